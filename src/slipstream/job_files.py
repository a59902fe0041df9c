"""The files with which SLURM or Kubernetes starts a run on many machines: from a configuration to texts.

Both start the same commands (`slipstream launch`): one job for the controller, one for the trainer, and one for each
generator replica, so that the loss of one is healed without touching the others. No file contains the run's key: the
scripts make it where the jobs are submitted.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import config_toml

CONTROLLER_RESTARTS = 3
"""Times a run that failed goes on from its last checkpoint by itself. A mistake in it would come back each time."""
GROUP_RESTARTS = 20
"""Times a group's job starts anew after failing, beside the restarts that its torchrun agent makes in place."""
BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes of `slipstream launch` after which starting again would be of no use, or not wanted."""

RECIPE_FILE = "recipe.toml"
STORE_PORT, RENDEZVOUS_PORT = 29400, 29500
VOLUME = "slipstream"
VOLUME_DIR = "/slipstream"
RECIPE_DIR = "/etc/slipstream"


_ELEMENT = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
"""One element of a job array: the SLURM_JOB_ID of its last element stands for the whole array."""


@dataclass(frozen=True)
class Machines:
    """What one executor group runs on: `nodes` machines with `ranks` processes, `gpus` GPUs and `cpus` cores each."""

    nodes: int
    ranks: int
    gpus: int
    cpus: int


def machines(
    ranks: int, tensor_parallel: int, *, is_on_gpu: bool, ranks_per_node: int = 8, cpus_per_rank: int = 8
) -> Machines:
    """The fewest machines that share `ranks` evenly, at most `ranks_per_node` each.

    Ranks that share a layer talk most: they stay on one machine, or fill whole ones. A GPU per rank.
    """
    if ranks_per_node < 1 or cpus_per_rank < 1:
        raise ConfigError(
            "a machine needs room for a rank",
            got=f"{ranks_per_node} GPUs per node, {cpus_per_rank} cores per rank",
            allowed="at least 1 of each",
        )
    each = next(
        n
        for n in range(min(ranks, ranks_per_node), 0, -1)
        if ranks % n == 0 and (n % tensor_parallel == 0 or tensor_parallel % n == 0)
    )
    return Machines(nodes=ranks // each, ranks=each, gpus=each if is_on_gpu else 0, cpus=each * cpus_per_rank)


def trainer_machines(config: RunConfig, *, ranks_per_node: int = 8, cpus_per_rank: int = 8) -> Machines:
    """What the trainer runs on."""
    trainer = config.trainer
    return machines(
        trainer.ranks,
        trainer.tensor_parallel,
        is_on_gpu=trainer.device == "cuda",
        ranks_per_node=ranks_per_node,
        cpus_per_rank=cpus_per_rank,
    )


def generator_machines(config: RunConfig, *, ranks_per_node: int = 8, cpus_per_rank: int = 8) -> Machines:
    """What each generator replica runs on.

    The configuration does not know what vLLM was built for: its replicas get GPUs where the trainer has them, as many
    as vLLM's own `tensor_parallel_size`. ConfigError for 'cuda:N', and for a vLLM that no machine has room for.
    """
    generator = config.generator
    if ":" in generator.device:
        raise ConfigError(
            "on a cluster each replica sees its own GPUs only",
            got=f"generator.device = '{generator.device}'",
            allowed="'cuda' or 'cpu'",
        )
    if generator.engine != "vllm":
        return machines(
            generator.tensor_parallel,
            generator.tensor_parallel,
            is_on_gpu=generator.device == "cuda",
            ranks_per_node=ranks_per_node,
            cpus_per_rank=cpus_per_rank,
        )
    size = int(generator.vllm.engine_args.get("tensor_parallel_size", 1))
    if size > ranks_per_node:
        raise ConfigError(
            "a replica of vLLM runs on one machine",
            got=f"generator.vllm.engine_args.tensor_parallel_size = {size}",
            allowed=f"at most {ranks_per_node}, the GPUs of a machine",
        )
    return Machines(1, ranks=1, gpus=size if config.trainer.device == "cuda" else 0, cpus=size * cpus_per_rank)


def controller_machine(config: RunConfig, *, gpus_per_node: int = 8, cpus_per_rank: int = 8) -> Machines:
    """What the controller runs on with its children: rewards and their workers, reward models, an own reference.

    The ranks of these two share GPUs, where both are on some. ConfigError where no machine has so many.
    """
    scorers = [
        (config.rewards.model_ranks if config.rewards.models else 0, config.rewards.device, "rewards.model_ranks"),
        (config.kl.ranks if config.kl.executor == "own" else 0, config.kl.device, "kl.ranks"),
    ]
    for ranks, device, field in scorers:
        if device == "cuda" and ranks > gpus_per_node:
            raise ConfigError(
                "what scores completions runs on the controller's machine",
                got=f"{field} = {ranks} on CUDA",
                allowed=f"at most {gpus_per_node}, the GPUs of a machine",
                hint="`slipstream launch --remote` lets these groups join a run from other machines (docs/cluster.md)",
            )
    gpus = max(ranks if device == "cuda" else 0 for ranks, device, _ in scorers)
    cpus = 2 + config.rewards.num_workers + cpus_per_rank * sum(ranks for ranks, _, _ in scorers)
    return Machines(1, ranks=1, gpus=gpus, cpus=cpus)


def write_job_files(config: RunConfig, options: Any, kind: str, console: Console) -> int:
    """Write the files that `slipstream launch --slurm DIR` or `--kubernetes DIR` asks for, and say how to start them.

    `kind` is 'slurm' or 'kubernetes', `options` are the command's. Returns the exit code, 0; raises ConfigError for a
    folder that has something in it.
    """
    folder: Path = (options.slurm if kind == "slurm" else options.kubernetes).absolute()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(
            "job files need a folder of their own", got=folder, allowed="a new or empty one", hint="move the old one"
        )
    gpus_per_node = 8 if options.gpus_per_node is None else options.gpus_per_node
    if kind == "slurm":
        files = slurm_files(
            config,
            folder,
            working_dir=Path.cwd(),
            out=options.out if options.resume is None else options.resume,
            gpus_per_node=gpus_per_node,
            partition=options.partition,
            account=options.account,
            time=options.time or "24:00:00",
            program=(sys.executable, "-m", "slipstream.cli"),
        )
    else:
        if (options.resume or options.out) is not None:
            raise ConfigError(
                "on Kubernetes a run has its place on the volume claim",
                got=f"{options.resume or options.out}",
                allowed=f"{VOLUME_DIR}/runs/{folder.name}, which is gone on with where it is a run",
                hint="leave --out and --resume away",
            )
        files = kubernetes_files(
            config, folder.name, image=options.image, namespace=options.namespace, gpus_per_node=gpus_per_node
        )
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
        if file.endswith(".sh"):
            (folder / file).chmod(0o755)
    submit = shlex.quote(str(folder / "submit.sh"))
    done = f"written: {', '.join(files)}\nlook through them, then start the run with {submit}"
    console.print(done, soft_wrap=True, markup=False, highlight=False)
    return 0


# SLURM


def slurm_files(
    config: RunConfig,
    folder: Path,
    *,
    working_dir: Path,
    out: Path | None = None,
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
    also how many ranks a machine without GPUs holds. ConfigError for what a batch script cannot express.
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
    trainer = trainer_machines(config, ranks_per_node=gpus_per_node, cpus_per_rank=cpus_per_rank)
    generator = generator_machines(config, ranks_per_node=gpus_per_node, cpus_per_rank=cpus_per_rank)
    controller = controller_machine(config, gpus_per_node=gpus_per_node, cpus_per_rank=cpus_per_rank)
    log, array_log = "--output=logs/%x-%j.log", "--output=logs/%x-%a-%A.log"
    replicas = f"--array=0-{config.generator.replicas - 1}"
    return {
        RECIPE_FILE: config_toml(config),
        "controller.sbatch": _SLURM_CONTROLLER.format(
            header=_header(f"{name}-controller", controller, log, "--signal=INT@300", *shared),
            where=where,
            run=shlex.quote(str((folder / "run") if out is None else out.absolute())),
            launch=launch,
            restart=_restart(CONTROLLER_RESTARTS, BAD_INPUT, INTERRUPTED),
        ),
        "trainer.sbatch": _group_script(
            _header(f"{name}-trainer", trainer, log, *shared),
            where,
            trainer,
            launch,
            group="trainer",
            job='"$SLURM_JOB_ID"',
        ),
        "generator.sbatch": _group_script(
            _header(f"{name}-generator", generator, array_log, replicas, *shared),
            where,
            generator,
            launch,
            group='"generator-$SLURM_ARRAY_TASK_ID"',
            job=_ELEMENT,
        ),
        "end.sbatch": _SLURM_END.format(
            header=_header(f"{name}-end", Machines(1, 1, 0, 1), log, *(s for s in shared if "--time" not in s))
        ),
        "submit.sh": _SLURM_SUBMIT,
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


def _group_script(header: str, where: str, machines: Machines, launch: str, *, group: str, job: str) -> str:
    """The job of a group; its machines meet, where it has several. `job` is how SLURM's commands name it."""
    several = machines.nodes > 1
    what = "a GPU each" if machines.gpus == machines.ranks else f"{machines.gpus} GPUs" if machines.gpus else "no GPU"
    return _SLURM_GROUP.format(
        header=header,
        where=where,
        about=f"On each node a torchrun agent; {machines.ranks} of the group's ranks, {what}.",
        launch=launch,
        group=group,
        ranks=machines.ranks,
        rendezvous=_SLURM_RENDEZVOUS if several else "",
        node_rank=' --node-rank "$SLURM_NODEID"' if several else "",
        restart=_restart(GROUP_RESTARTS, BAD_INPUT, job=job),
        meeting=' --nnodes "$SLURM_JOB_NUM_NODES" --rendezvous "$rendezvous"' if several else "",
    )


def _restart(limit: int, *final: int, job: str = '"$SLURM_JOB_ID"') -> str:
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
# Hosts the run's store, runs the controller, and as its children whatever scores completions. Five minutes before the
# job's time is up the run gets SIGINT and ends with a checkpoint; submit.sh then goes on from there.
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
    --group controller --listen "$host:0" --key-file "$folder/key" --address-file "$address" || status=$?
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
    --threads "$((SLURM_CPUS_PER_TASK / {ranks}))"{meeting} || status=$?
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
# and trainer and generators would otherwise keep their nodes, or wait in the queue, for a run that is over.
scancel "$@" 2>/dev/null || true
"""

_SLURM_SUBMIT = """\
#!/bin/bash
# Starts the run; called again after its end, goes on from its last checkpoint. Stop it with: scancel $(cat jobs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
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
trap 'if (($? && ${#submitted[@]})); then scancel "${submitted[@]}"; fi' EXIT # all jobs or none
submit() {
    id=$(sbatch --parsable "$@")
    id=${id%%;*} # "id;cluster" where there are several clusters
    submitted+=("$id")
}
submit controller.sbatch
controller=$id
# The groups are jobs of their own, so that one can be lost and come back while the others run. They start after the
# controller, so that no GPU waits for it in vain.
submit --dependency=after:"$controller" trainer.sbatch
trainer=$id
submit --dependency=after:"$controller" generator.sbatch
generator=$id
# And they end with it.
submit --dependency=afterany:"$controller" end.sbatch "$trainer" "$generator"
printf '%s\\n' "${submitted[@]}" >"$queue"
echo "submitted: controller $controller, trainer $trainer, generator $generator; logs are in $PWD/logs"
"""


# Kubernetes


def kubernetes_files(
    config: RunConfig,
    name: str,
    *,
    image: str | None,
    namespace: str | None = None,
    gpus_per_node: int = 8,
    cpus_per_rank: int = 8,
) -> dict[str, str]:
    """Manifests by file name, and `submit.sh`, which applies them. Kubernetes 1.29 or newer.

    `name` is the run's, and what all its objects are named after. `image` has `slipstream` in its path. Containers work
    in the volume claim `slipstream`, at /slipstream: relative paths of the configuration are looked for there, and
    the run is written to runs/`name`. ConfigError for names that Kubernetes would refuse.
    """
    _check_names(name, image, namespace)
    metadata: dict[str, Any] = {"labels": {"app.kubernetes.io/name": "slipstream", "app.kubernetes.io/instance": name}}
    if namespace is not None:
        metadata["namespace"] = namespace
    trainer = trainer_machines(config, ranks_per_node=gpus_per_node, cpus_per_rank=cpus_per_rank)
    generator = generator_machines(config, ranks_per_node=gpus_per_node, cpus_per_rank=cpus_per_rank)

    def job(group: str, machines: Machines, restarts: int, command: list[str]) -> dict[str, Any]:
        return _job(name, group, metadata, machines, restarts, str(image), command)

    controller = controller_machine(config, gpus_per_node=gpus_per_node, cpus_per_rank=cpus_per_rank)
    script = _KUBERNETES_CONTROLLER.format(
        run=f"{VOLUME_DIR}/runs/{name}", recipe=f"{RECIPE_DIR}/{RECIPE_FILE}", port=STORE_PORT
    )
    groups = {f"generator-{replica}": generator for replica in range(config.generator.replicas)}
    generators = [job(group, own, GROUP_RESTARTS, _group_command(name, group, own)) for group, own in groups.items()]
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
            job("controller", controller, CONTROLLER_RESTARTS, ["sh", "-c", script]),
        ),
        "trainer.yaml": _manifest(
            _ABOUT_GROUP, job("trainer", trainer, GROUP_RESTARTS, _group_command(name, "trainer", trainer))
        ),
        "generator.yaml": _manifest(_ABOUT_GROUP, *generators),
        "submit.sh": _KUBERNETES_SUBMIT.format(
            kubectl="kubectl" if namespace is None else f"kubectl --namespace={namespace}", name=name, volume=VOLUME
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


def _group_command(name: str, group: str, machines: Machines) -> list[str]:
    """$(...) is filled in by Kubernetes, for each pod."""
    command = ["slipstream", "launch", "--group", group]
    command += ["--controller", f"{name}-controller-0.{name}:{STORE_PORT}", "--address", "$(POD_IP)"]
    command += ["--threads", str(machines.cpus // machines.ranks)]
    if machines.nodes > 1:
        first = f"{name}-{group}-0.{name}:{RENDEZVOUS_PORT}"
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
) -> dict[str, Any]:
    """An Indexed Job with a pod per machine, known to the others as `name`-`group`-INDEX.`name`."""
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
        "metadata": {"name": f"{name}-{group}", **metadata, "labels": labels},
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
whatever scores completions. A pod that fails is replaced, and goes on from the last checkpoint; exit code 2 is bad
input, which would fail again.
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
exec slipstream launch "$@" --group controller --listen "$POD_IP:{port}"
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
{kubectl} apply --filename=recipe.yaml --filename=controller.yaml --filename=trainer.yaml --filename=generator.yaml
"""
