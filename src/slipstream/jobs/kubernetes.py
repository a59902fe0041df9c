"""Manifests for Kubernetes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import config_toml
from slipstream.jobs.machines import (
    BAD_INPUT,
    CONTROLLER_RESTARTS,
    GROUP_RESTARTS,
    RECIPE_FILE,
    RENDEZVOUS_PORT,
    STORE_PORT,
    Machines,
    lay_out,
    termination_s,
)

VOLUME = "slipstream"
VOLUME_DIR = "/slipstream"
RECIPE_DIR = "/etc/slipstream"


def kubernetes_files(
    config: RunConfig,
    name: str,
    *,
    image: str | None,
    namespace: str | None = None,
    remote: Collection[str] | None = None,
    gpus_per_node: int = 8,
    cpus_per_rank: int = 8,
) -> dict[str, str]:
    """Manifests by file name, and `submit.sh`, which applies them. Kubernetes 1.29 or newer.

    `name` is the run's, and what all its objects are named after. `image` has `slipstream` in its path. Containers work
    in the volume claim `slipstream`, at /slipstream: relative paths of the configuration are looked for there, and
    the run is written to runs/`name`. `remote` as in `lay_out`. ConfigError for names that Kubernetes would refuse.
    """
    _check_names(name, image, namespace)
    metadata: dict[str, Any] = {"labels": {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/instance": name}}
    if namespace is not None:
        metadata["namespace"] = namespace
    layout = lay_out(config, remote, ranks_per_node=gpus_per_node, cpus_per_rank=cpus_per_rank)

    def job(group: str, machines: Machines, restarts: int, command: list[str]) -> dict[str, Any]:
        return _job(name, group, metadata, machines, restarts, str(image), command, termination_s(config))

    script = _KUBERNETES_CONTROLLER.format(
        run=f"{VOLUME_DIR}/runs/{name}",
        recipe=f"{RECIPE_DIR}/{RECIPE_FILE}",
        remote=f" --remote {' '.join(layout.remote)}" if layout.remote else "",
        port=STORE_PORT,
    )
    groups = {
        f"{each.kind}.yaml": _manifest(
            _ABOUT_GROUP,
            *(
                job(group, each.machines, GROUP_RESTARTS, _group_command(name, group, each.machines, config))
                for group in each.groups
            ),
        )
        for each in layout.groups
    }
    return {
        "volume.yaml": _manifest(_ABOUT_VOLUME, _volume(namespace)),
        "recipe.yaml": _manifest(
            _ABOUT_RECIPE,
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": name, **metadata},
                "data": {RECIPE_FILE: config_toml(config)},
            },
        ),
        "controller.yaml": _manifest(
            _ABOUT_CONTROLLER,
            _service(name, metadata),
            job("controller", layout.controller, CONTROLLER_RESTARTS, ["sh", "-c", script]),
        ),
        **groups,
        "submit.sh": _KUBERNETES_SUBMIT.format(
            kubectl="kubectl" if namespace is None else f"kubectl --namespace={namespace}",
            name=name,
            volume=VOLUME,
            files=" ".join(f"--filename={file}" for file in ("recipe.yaml", "controller.yaml", *groups)),
        ),
    }


def _check_names(name: str, image: str | None, namespace: str | None) -> None:
    """A label of DNS begins with a letter; `name` leaves room for '-generator-999-999' in the 63 characters of one."""
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
    """Of a group's Job. Names of DNS have no '_'."""
    return f"{name}-{group.replace('_', '-')}"


def _group_command(name: str, group: str, machines: Machines, config: RunConfig) -> list[str]:
    """$(...) is filled in by Kubernetes, for each pod."""
    command = ["slipstream", "launch", "--group", group]
    command += ["--controller", f"{name}-controller-0.{name}:{STORE_PORT}", "--address", "$(POD_IP)"]
    command += ["--threads", str(machines.cpus // machines.ranks)]
    command += ["--shutdown-grace-s", f"{config.shutdown_grace_s:g}"]
    if machines.nodes > 1:
        first = f"{_object_name(name, group)}-0.{name}:{RENDEZVOUS_PORT}"
        command += ["--nnodes", str(machines.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)", "--rendezvous", first]
    return command


def _job(
    name: str,
    group: str,
    metadata: Mapping[str, Any],
    machines: Machines,
    restarts: int,
    image: str,
    command: list[str],
    termination_s: int,
) -> dict[str, Any]:
    """An Indexed Job with a pod per machine, known to the others as `_object_name(name, group)`-INDEX.`name`."""
    labels = metadata["labels"] | {"app.kubernetes.io/component": group}
    resources: dict[str, Any] = {"requests": {"cpu": str(machines.cpus)}}
    if machines.gpus:
        resources["limits"] = {"nvidia.com/gpu": str(machines.gpus)}
    container = {
        "name": "slipstream",
        "image": image,
        "command": command,
        "workingDir": VOLUME_DIR,
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "SLIPSTREAM_RUN_KEY", "valueFrom": {"secretKeyRef": {"name": name, "key": "key"}}},
        ],
        "resources": resources,
        "volumeMounts": [
            {"name": "volume", "mountPath": VOLUME_DIR},
            {"name": "recipe", "mountPath": RECIPE_DIR, "readOnly": True},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": termination_s,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "volume", "persistentVolumeClaim": {"claimName": VOLUME}},
            {"name": "recipe", "configMap": {"name": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": _object_name(name, group), **metadata, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": machines.nodes,
            "parallelism": machines.nodes,
            "backoffLimit": restarts * machines.nodes,
            "podFailurePolicy": {
                "rules": [
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": "slipstream", "operator": "In", "values": [BAD_INPUT]},
                    },
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _service(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Names for the run's pods, without an address of its own. Pods need them before they count as ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, **metadata},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": dict(metadata["labels"]),
            "ports": [{"name": "store", "port": STORE_PORT}],
        },
    }


def _volume(namespace: str | None) -> dict[str, Any]:
    metadata = {"name": VOLUME} if namespace is None else {"name": VOLUME, "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}},
    }


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Texts of several lines are written as such."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _manifest(about: str, *objects: Mapping[str, Any]) -> str:
    """`objects` as one YAML file under a comment; nothing is shared between them by anchors."""
    documents = [yaml.dump(_copied(each), Dumper=_Dumper, sort_keys=False, width=1000) for each in objects]
    comment = "".join(f"# {line}\n" for line in about.strip().splitlines())
    return comment + "---\n".join(documents)


def _copied(value: Any) -> Any:
    """`value` without shared parts, which YAML would write once and refer to."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


_ABOUT_VOLUME = """
Models, data and runs; one for all runs of a namespace. submit.sh makes it where there is none. Pods on several
machines write to it: name a storageClassName with ReadWriteMany where the default class has none.
"""
_ABOUT_RECIPE = "The run's configuration with every field."
_ABOUT_CONTROLLER = """
The headless Service names all pods of the run. The Job hosts the store, runs the controller, and as its children
what scores completions without a Job of its own. A pod that fails is replaced, and goes on from the last checkpoint;
exit code 2 is bad input, which would fail again.
"""
_ABOUT_GROUP = """
A Job per executor group, a pod per machine with a torchrun agent in it. The agent starts ranks again that die; a pod
that fails or loses its machine is replaced under the same name, without touching the other groups. /dev/shm: ranks of a
machine exchange weights there, and the 64 MiB that containers have by default do not do.
"""

_KUBERNETES_CONTROLLER = """\
run={run}
if [ -e "$run/config.toml" ]; then
  set -- --resume "$run"
else
  set -- {recipe} --out "$run"
fi
exec slipstream launch "$@" --group controller{remote} --listen "$POD_IP:{port}"
"""

_KUBERNETES_SUBMIT = """\
#!/bin/bash
# Starts the run; called again after its end, goes on from its last checkpoint. Stop it with:
#     {kubectl} delete jobs --selector=app.kubernetes.io/instance={name}
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"

# Jobs cannot be changed: those of an earlier start make room, unless they still run.
selector=app.kubernetes.io/instance={name}
active=$({kubectl} get jobs --selector="$selector" --output=jsonpath='{{.items[?(@.status.active)].metadata.name}}')
if [[ -n $active ]]; then
    echo "this run is being worked on already: $active" >&2
    exit 1
fi
{kubectl} delete jobs --selector="$selector" --ignore-not-found

# The key goes from the system's randomness to the cluster's Secret: no file, no argument that others could see.
if ! {kubectl} get secret {name} >/dev/null 2>&1; then
    head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' |
        {kubectl} create secret generic {name} --from-file=key=/dev/stdin
fi
if ! {kubectl} get persistentvolumeclaim {volume} >/dev/null 2>&1; then
    {kubectl} apply --filename=volume.yaml
fi
{kubectl} apply {files}
"""
