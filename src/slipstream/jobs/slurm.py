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
    BAD_INPUT,
    CONTROLLER_RESTARTS,
    GROUP_RESTARTS,
    INTERRUPTED,
    RECIPE_FILE,
    GroupJob,
    Machines,
    lay_out,
    termination_s,
)

_LOG = "--output=logs/%x-%j.log"
_JOB = '"$SLURM_JOB_ID"'
_ELEMENT = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
"""One element of a job array: the SLURM_JOB_ID of its last element stands for the whole array."""


def slurm_files(
    config: RunConfig,
    folder: Path,
    *,
    working_dir: Path,
    out: Path | None = None,
    remote: Collection[str] | None = None,
    gpus_per_node: int = 8,
    cpus_per_rank: int = 8,
    partition: str | None = None,
    account: str | None = None,
    time: str | None = None,
    program: Sequence[str] = ("slipstream",),
) -> dict[str, str]:
    """Batch scripts by file name, to be written into `folder`, which all nodes see; `submit.sh` starts them.

    Relative paths of the configuration are looked for in `working_dir`, where the jobs run. `out` is the run's
    directory (default: `folder`/run). `program` is the command `slipstream` as the nodes find it. `gpus_per_node` is
    also how many ranks a machine without GPUs holds, `remote` as in `lay_out`. ConfigError for what a batch script
    cannot express.
    """
    for option, value in (("--partition", partition), ("--account", account), ("--time", time)):
        if value is not None and not re.fullmatch(r"[\w.,:+@/-]+", value):
            raise ConfigError(f"{option} is no name that SLURM knows", got=repr(value), allowed="one word")
    given = {"partition": partition, "account": account, "time": time}
    shared = [f"--{option}={value}" for option, value in given.items() if value is not None]
    name = re.sub(r"[^\w.-]", "-", folder.name) or "slipstream"
    folder, launch = folder.absolute(), shlex.join([*program, "launch"])
    where = _SLURM_PATHS.format(
        folder=shlex.quote(str(folder)), working_dir=shlex.quote(str(working_dir.absolute()))
    ).strip()
    layout = lay_out(config, remote, ranks_per_node=gpus_per_node, cpus_per_rank=cpus_per_rank)
    early_s = max(300, termination_s(config))
    return {
        RECIPE_FILE: config_toml(config),
        "controller.sbatch": _SLURM_CONTROLLER.format(
            header=_header(f"{name}-controller", layout.controller, _LOG, f"--signal=INT@{early_s}", *shared),
            early_s=early_s,
            where=where,
            run=shlex.quote(str((folder / "run") if out is None else out.absolute())),
            launch=launch,
            remote=f" --remote {' '.join(layout.remote)}" if layout.remote else "",
            restart=_restart(CONTROLLER_RESTARTS, BAD_INPUT, INTERRUPTED),
        ),
        **{
            f"{job.kind}.sbatch": _group_script(job, name, shared, where, launch, config.shutdown_grace_s)
            for job in layout.groups
        },
        "end.sbatch": _SLURM_END.format(
            header=_header(f"{name}-end", Machines(1, 1, 0, 1), _LOG, *(s for s in shared if "--time" not in s))
        ),
        "submit.sh": _SLURM_SUBMIT.format(groups=" ".join(job.kind for job in layout.groups)),
    }


def _header(name: str, machines: Machines, *more: str) -> str:
    """The #SBATCH lines of a job: a task per node, which starts that node's processes."""
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


def _group_script(job: GroupJob, run: str, shared: Sequence[str], where: str, launch: str, grace_s: float) -> str:
    """The job of a group, or an array with an element for each replica; its machines meet, where it has several."""
    machines, is_array = job.machines, job.replicas is not None
    own = ["--output=logs/%x-%a-%A.log", f"--array=0-{len(job.groups) - 1}"] if is_array else [_LOG]
    several = machines.nodes > 1
    what = "a GPU each" if machines.gpus == machines.ranks else f"{machines.gpus} GPUs" if machines.gpus else "no GPU"
    return _SLURM_GROUP.format(
        header=_header(f"{run}-{job.kind}", machines, *own, *shared),
        where=where,
        about=f"On each node a torchrun agent; {machines.ranks} of the group's ranks, {what}.",
        launch=launch,
        grace_s=grace_s,
        group=f'"{job.kind}-$SLURM_ARRAY_TASK_ID"' if is_array else job.kind,
        ranks=machines.ranks,
        rendezvous=_SLURM_RENDEZVOUS if several else "",
        node_rank=' --node-rank "$SLURM_NODEID"' if several else "",
        restart=_restart(GROUP_RESTARTS, BAD_INPUT, job=_ELEMENT if is_array else _JOB),
        meeting=' --nnodes "$SLURM_JOB_NUM_NODES" --rendezvous "$rendezvous"' if several else "",
    )


def _restart(limit: int, *final: int, job: str = _JOB) -> str:
    """What a job does with the `status` of its command: starts anew, at most `limit` times, but not after `final`."""
    unless = " && ".join(f"status != {code}" for code in (0, *final))
    return _SLURM_RESTART.format(unless=unless, limit=limit, job=job).strip()


_SLURM_PATHS = """
folder={folder}
address=$folder/address
cd {working_dir}
"""

_SLURM_RESTART = """
# A new start, two minutes later, may get other nodes; the job keeps its id and its place in dependencies.
if (({unless} && ${{SLURM_RESTART_COUNT:-0}} < {limit})); then
    scontrol requeue {job}
fi
exit "$status"
"""

_SLURM_CONTROLLER = """\
#!/bin/bash
{header}
# Hosts the run's store, runs the controller, and as its children what scores completions without a job of its own.
# {early_s} s before the job's time is up the run gets SIGINT and ends with a checkpoint; submit.sh then goes on.
set -euo pipefail
{where}
run={run}

# An address of an earlier start leads nowhere. Where machines have several networks, the first is taken.
rm -f "$address"
trap 'rm -f "$address"' EXIT
addresses=$(hostname -I)
host=${{addresses%% *}}

what=("$folder/recipe.toml" --out "$run")
if [[ -e $run/config.toml ]]; then
    what=(--resume "$run")
fi
status=0
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" {launch} "${{what[@]}}" \\
    --group controller{remote} --listen "$host:0" --key-file "$folder/key" --address-file "$address" || status=$?
{restart}
"""

_SLURM_GROUP = """\
#!/bin/bash
{header}
# {about}
# The agent starts ranks again that die; when it gives up, or a node is lost, SLURM starts this job again.
set -euo pipefail
{where}

# The controller may itself just be starting again. If it has ended for good, end.sbatch cancels this job.
until [[ -s $address ]]; do sleep 2; done
{rendezvous}
status=0
# What differs between nodes is found out on each of them. An agent that gives up ends the others.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
    bash -c 'addresses=$(hostname -I); exec "$@" --address "${{addresses%% *}}"{node_rank}' node \\
    {launch} --group {group} --controller "$address" --key-file "$folder/key" \\
    --threads "$((SLURM_CPUS_PER_TASK / {ranks}))" --shutdown-grace-s {grace_s:g}{meeting} || status=$?
{restart}
"""

_SLURM_RENDEZVOUS = """
# This script runs on the first node. A port of the job's own: several jobs may share that node.
rendezvous=$SLURMD_NODENAME:$((20000 + SLURM_JOB_ID % 10000))
"""

_SLURM_END = """\
#!/bin/bash
{header}
#SBATCH --time=5
# Waits in the queue for the controller's end, whatever kind of end: a dependency can hold a job back but not stop one,
# and the groups would otherwise keep their nodes, or wait in the queue, for a run that is over.
scancel "$@" 2>/dev/null || true
"""

_SLURM_SUBMIT = """\
#!/bin/bash
# Starts the run; called again after its end, goes on from its last checkpoint. Stop it with: scancel $(cat jobs)
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
unset SLIPSTREAM_RUN_KEY # SLURM stores the environment of jobs: the key is for its file alone

queue="jobs"
if [[ -s $queue && -n $(squeue --noheader --jobs="$(paste -sd, "$queue")" 2>/dev/null) ]]; then
    echo "this run is in the queue already: squeue --jobs=$(paste -sd, "$queue")" >&2
    exit 1
fi
mkdir -p logs
rm -f address # of an earlier start
if [[ ! -e key ]]; then
    (umask 077 && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n' >key.new && mv key.new key)
fi

submitted=()
trap 'if (($? && ${{#submitted[@]}})); then scancel "${{submitted[@]}}"; fi' EXIT # all jobs or none
submit() {{
    id=$(sbatch --parsable "$@")
    id=${{id%%;*}} # "id;cluster" where there are several clusters
    submitted+=("$id")
}}
submit controller.sbatch
controller=$id
# The groups are jobs of their own, so that one can be lost and come back while the others run. They start after the
# controller, so that no GPU waits for it in vain.
names="controller $controller"
for group in {groups}; do
    submit --dependency=after:"$controller" "$group.sbatch"
    names+=", $group $id"
done
# And they end with it.
submit --dependency=afterany:"$controller" end.sbatch "${{submitted[@]:1}}"
printf '%s\\n' "${{submitted[@]}}" >"$queue"
echo "submitted: $names; logs are in $PWD/logs"
"""
