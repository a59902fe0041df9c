"""A job group for SkyPilot."""

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

_FIRST, _OWN = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)', '$(echo "$SKYPILOT_NODE_IPS" | sed -n "${line}p")'


def skypilot_files(
    config: RunConfig,
    name: str,
    *,
    image: str | None,
    accelerator: str | None = None,
    infra: str | None = None,
    remote: Collection[str] | None = None,
    gpus_per_node: int = 8,
) -> dict[str, str]:
    """Return `run.yaml`, a job group of SkyPilot 0.12 or newer, what it needs, and `submit.sh`, which launches it.

    `name` is the run's. `image` is a container image with `slipstream` in its path, `accelerator` what SkyPilot calls a
    GPU of the machines ('H100'), `infra` where it looks for them (None: anywhere). Tasks work in the volume
    `slipstream`, at /slipstream: relative paths of the configuration are looked for there, and the run is written to
    runs/`name`. `remote` as in `lay_out`. ConfigError for names that SkyPilot would refuse.
    """
    _check_words(name, image, accelerator, infra)
    layout = lay_out(config, remote, ranks_per_node=gpus_per_node)
    values: dict[str, Any] = {
        "name": name,
        "infra": infra,
        "image": f"docker:{image}",
        "address": _FIRST,
        "port": STORE_PORT,
        "join_s": JOB_JOIN_TIMEOUT_S,
        "recipe_file": "/tmp/slipstream/recipe.toml",
        "remote": f" --remote {' '.join(layout.remote)}" if layout.remote else "",
        "termination": f"{termination_s(config)}s",
    }

    def task(group: str, machines: Machines, restarts: int, run: str, **more: object) -> tuple[str, dict[str, Any]]:
        if machines.gpus and accelerator is None:
            allowed = "--accelerator NAME, what SkyPilot calls the GPUs of a machine: H100"
            raise ConfigError("the run needs GPUs, and SkyPilot their name", got="no --accelerator", allowed=allowed)
        found = {
            "task": group.replace("_", "-"),  # part of a host's name
            "nodes": machines.nodes,
            "cpus": f"{machines.cpus}+",
            "accelerators": f"{accelerator}:{machines.gpus}" if machines.gpus else None,
            "restarts": restarts,
            "run": f"cd /slipstream\n{run}",
        }
        return "skypilot_task.yaml", values | found | more

    mounts = {values["recipe_file"]: "recipe.toml"}
    tasks = [
        task("controller", layout.controller, CONTROLLER_RESTARTS, filled("controller.sh", values), file_mounts=mounts)
    ]
    for each in layout.groups:
        for group in each.groups:
            run = _group_script(group, each.machines, config)
            tasks.append(task(group, each.machines, GROUP_RESTARTS, run, file_mounts=None))
    return {
        "recipe.toml": config_toml(config),
        "volume.yaml": manifest(("skypilot_volume.yaml", values)),
        "run.yaml": manifest(("skypilot.yaml", values), *tasks),
        "submit.sh": filled("submit_skypilot.sh", values),
    }


def _check_words(name: str, image: str | None, accelerator: str | None, infra: str | None) -> None:
    if not re.fullmatch(r"[a-zA-Z]([a-zA-Z0-9-]{0,38}[a-zA-Z0-9])?", name):
        raise ConfigError(
            "the run's name is no name that SkyPilot takes",
            got=repr(name),
            allowed="at most 40 letters, digits and '-', a letter first and no '-' last",
            hint="the run is named after the folder of its job files",
        )
    if not image or image.split() != [image]:
        raise ConfigError("an image is needed", got=image, allowed="--image REGISTRY/NAME:TAG with slipstream in it")
    for option, value in (("--accelerator", accelerator), ("--infra", infra)):
        if value is not None and not re.fullmatch(r"[\w./@:-]+", value):
            raise ConfigError(f"{option} is no name that SkyPilot knows", got=repr(value), allowed="one word")


def _group_script(group: str, machines: Machines, config: RunConfig) -> str:
    """Return what each machine of a group runs."""
    controller, meeting = f"controller-0.$SKYPILOT_JOBGROUP_NAME:{STORE_PORT}", f'"{_FIRST}:{RENDEZVOUS_PORT}"'
    words = group_command(config, group, machines, controller, f'"{_OWN}"', '"$SKYPILOT_NODE_RANK"', meeting)
    return f"line=$((SKYPILOT_NODE_RANK + 1))\nexec slipstream {' '.join(words)}\n"
