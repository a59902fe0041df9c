"""Manifests for Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import config_toml
from slipstream.jobs.machines import (
    CONTROLLER_RESTARTS,
    GROUP_RESTARTS,
    JOB_JOIN_TIMEOUT_S,
    RENDEZVOUS_PORT,
    STORE_PORT,
    Machines,
    group_command,
    lay_out,
    termination_s,
)
from slipstream.jobs.templates import filled, manifest

VOLUME_DIR = "/slipstream"


def kubernetes_files(
    config: RunConfig,
    name: str,
    *,
    image: str | None,
    namespace: str | None = None,
    remote: Collection[str] | None = None,
    gpus_per_node: int = 8,
) -> dict[str, str]:
    """Return manifests by file name, and `submit.sh`, which applies them. Kubernetes 1.29 or newer.

    `name` is the run's, and what all its objects are named after. `image` has `slipstream` in its path. Containers work
    in the volume claim `slipstream`, at /slipstream: relative paths of the configuration are looked for there, and
    the run is written to runs/`name`. `remote` as in `lay_out`. ConfigError for names that Kubernetes would refuse.
    """
    _check_names(name, image, namespace)
    layout = lay_out(config, remote, ranks_per_node=gpus_per_node)
    labels = {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/instance": name}
    values: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "labels": labels,
        "image": image,
        "recipe": config_toml(config),
        "address": "$POD_IP",
        "port": STORE_PORT,
        "join_s": JOB_JOIN_TIMEOUT_S,
        "recipe_file": "/etc/slipstream/recipe.toml",
        "remote": f" --remote {' '.join(layout.remote)}" if layout.remote else "",
        "termination_s": termination_s(config),
        "kubectl": "kubectl" if namespace is None else f"kubectl --namespace={namespace}",
    }

    def job(group: str, machines: Machines, restarts: int, command: list[str]) -> dict[str, Any]:
        return values | {
            "job": _object_name(name, group),
            "job_labels": labels | {"app.kubernetes.io/component": group},
            "nodes": machines.nodes,
            "restarts": restarts * machines.nodes,
            "cpus": str(machines.cpus),
            "limits": {"nvidia.com/gpu": str(machines.gpus)} if machines.gpus else None,
            "command": command,
        }

    command = ["sh", "-c", filled("controller.sh", values)]
    controller = job("controller", layout.controller, CONTROLLER_RESTARTS, command)
    groups: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for each in layout.groups:
        commands = {group: _group_command(name, group, each.machines, config) for group in each.groups}
        jobs = [job(group, each.machines, GROUP_RESTARTS, command) for group, command in commands.items()]
        groups[f"{each.kind}.yaml"] = [("group.yaml", values_of_job) for values_of_job in jobs]
    files = " ".join(f"--filename={file}" for file in ("recipe.yaml", "controller.yaml", *groups))
    return {
        "volume.yaml": manifest(("volume.yaml", values)),
        "recipe.yaml": manifest(("recipe.yaml", values)),
        "controller.yaml": manifest(("controller.yaml", values), ("group.yaml", controller)),
        **{file: manifest(*jobs) for file, jobs in groups.items()},
        "submit.sh": filled("submit_kubernetes.sh", values | {"files": files}),
    }


def _check_names(name: str, image: str | None, namespace: str | None) -> None:
    """Refuse what is no label of DNS; `name` leaves room for '-generator-999-999' in the 63 characters of one."""
    for what, value, limit in (("the run's name", name, 40), ("--namespace", namespace, 63)):
        if value is not None and not (re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", value) and len(value) <= limit):
            raise ConfigError(
                f"{what} is no name that Kubernetes takes",
                got=repr(value),
                allowed=f"at most {limit} lower-case letters, digits and '-', a letter first and no '-' last",
                hint="the run is named after the folder of its job files" if value == name else None,
            )
    if not image or image.split() != [image]:
        raise ConfigError("an image is needed", got=image, allowed="--image REGISTRY/NAME:TAG with slipstream in it")


def _object_name(name: str, group: str) -> str:
    """Return the name of a group's Job. Names of DNS have no '_'."""
    return f"{name}-{group.replace('_', '-')}"


def _group_command(name: str, group: str, machines: Machines, config: RunConfig) -> list[str]:
    """Return the command of a group's pods, in each of which Kubernetes fills in $(...)."""
    controller, first = f"{name}-controller-0.{name}:{STORE_PORT}", f"{_object_name(name, group)}-0.{name}"
    node, meeting = "$(JOB_COMPLETION_INDEX)", f"{first}:{RENDEZVOUS_PORT}"
    command = group_command(config, group, machines, controller, "$(POD_IP)", node, meeting)
    return ["slipstream", *command, "--out", f"{VOLUME_DIR}/runs/{name}", "--steps", str(config.steps)]
