"""Batch scripts for SLURM."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import config_toml
from slipstream.jobs.machines import (
    CONTROLLER_RESTARTS,
    GROUP_RESTARTS,
    JOB_JOIN_TIMEOUT_S,
    Machines,
    lay_out,
    termination_s,
)
from slipstream.jobs.templates import filled

_LOG = "--output=logs/%x-%j.log"
_RENDEZVOUS = """
# This script runs on the first node. A port of the job's own: several jobs may share that node.
rendezvous=$SLURMD_NODENAME:$((20000 + SLURM_JOB_ID % 10000))
"""


def slurm_files(
    config: RunConfig,
    folder: Path,
    *,
    working_dir: Path,
    out: Path | None = None,
    remote: Collection[str] | None = None,
    gpus_per_node: int = 8,
    partition: str | None = None,
    account: str | None = None,
    time: str | None = None,
    program: Sequence[str] = ("slipstream",),
) -> dict[str, str]:
    """Return batch scripts by file name, to be written into `folder`, which all nodes see; `submit.sh` starts them.

    Relative paths of the configuration are looked for in `working_dir`, where the jobs run. `out` is the run's
    directory (default: `folder`/run). `program` is the command `slipstream` as the nodes find it. `gpus_per_node` is
    also how many ranks a machine without GPUs holds, `remote` as in `lay_out`. ConfigError for what a batch script
    cannot express.
    """
    given = {"partition": partition, "account": account, "time": time}
    for option, value in given.items():
        if value is not None and not re.fullmatch(r"[\w.,:+@/-]+", value):
            raise ConfigError(f"--{option} is no name that SLURM knows", got=repr(value), allowed="one word")
    shared = [f"--{option}={value}" for option, value in given.items() if value is not None]
    name = re.sub(r"[^\w.-]", "-", folder.name) or "slipstream"
    folder = folder.absolute()
    layout = lay_out(config, remote, ranks_per_node=gpus_per_node)
    early_s = max(300, termination_s(config))
    values = {
        "folder": shlex.quote(str(folder)),
        "working_dir": shlex.quote(str(working_dir.absolute())),
        "launch": shlex.join([*program, "launch"]),
        "early_s": early_s,
        "run": shlex.quote(str((folder / "run") if out is None else out.absolute())),
        "remote": f" --remote {' '.join(layout.remote)}" if layout.remote else "",
        "grace_s": f"{config.shutdown_grace_s:g}",
        "groups": " ".join(job.kind for job in layout.groups),
        "join_s": JOB_JOIN_TIMEOUT_S,
    }

    def script(template: str, kind: str, machines: Machines, *options: str, **more: object) -> str:
        header = _header(f"{name}-{kind}", machines, *options)
        return filled(template, values | more | {"header": header})

    files = {"recipe.toml": config_toml(config)}
    told = f"--signal=INT@{early_s}"
    files["controller.sbatch"] = script(
        "controller.sbatch", "controller", layout.controller, _LOG, told, *shared, restarts=CONTROLLER_RESTARTS
    )
    for job in layout.groups:
        log = [_LOG] if job.replicas is None else ["--output=logs/%x-%a-%A.log", f"--array=0-{job.replicas - 1}"]
        more = _of_group(job.kind, job.machines, is_array=job.replicas is not None)
        files[f"{job.kind}.sbatch"] = script("group.sbatch", job.kind, job.machines, *log, *shared, **more)
    untimed = [option for option in shared if not option.startswith("--time")]
    files["end.sbatch"] = script("end.sbatch", "end", Machines(1, 1, 0, 1), _LOG, *untimed)
    return files | {"submit.sh": filled("submit_slurm.sh", values)}


def _header(name: str, machines: Machines, *more: str) -> str:
    """Return the #SBATCH lines of a job: a task per node, which starts that node's processes."""
    options = [
        f"--job-name={name}",
        f"--nodes={machines.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={machines.cpus}",
        *([f"--gres=gpu:{machines.gpus}"] if machines.gpus else []),
        "--requeue",
        "--open-mode=append",
        *more,
    ]
    return "\n".join(f"#SBATCH {option}" for option in options)


def _of_group(kind: str, machines: Machines, *, is_array: bool) -> dict[str, object]:
    """Return what a group's script has of its own; one element of an array has no job id that stands for it alone."""
    several = machines.nodes > 1
    gpus = "a GPU each" if machines.gpus == machines.ranks else f"{machines.gpus} GPUs" if machines.gpus else "no GPU"
    return {
        "about": f"On each node a torchrun agent; {machines.ranks} of the group's ranks, {gpus}.",
        "group": f'"{kind}-$SLURM_ARRAY_TASK_ID"' if is_array else kind,
        "job": '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if is_array else '"$SLURM_JOB_ID"',
        "ranks": machines.ranks,
        "restarts": GROUP_RESTARTS,
        "rendezvous": _RENDEZVOUS if several else "",
        "node_rank": ' --node-rank "$SLURM_NODEID"' if several else "",
        "meeting": ' --nnodes "$SLURM_JOB_NUM_NODES" --rendezvous "$rendezvous"' if several else "",
    }
