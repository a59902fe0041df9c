"""The placement of processes: which groups compute here or on other machines, and on how many cores.

Thread counts decide every number on a CPU, so they are fixed before torch is imported.

Seen on two cores, decode and train steps per second: alone with two threads 397 and 17, together with one each 240
and 7, together with two each 93 and 5. Executors that run at the same time therefore share the cores without overlap;
phases that cannot overlap (warm start, evaluation at the ends, everything at staleness 0) get all of them, unless
`sync_placement = "split"` asks for the baseline that leaves the other side's cores idle.
"""

from __future__ import annotations

import math
import os
import resource
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.machine import memory_bytes, num_cores
from slipstream.core.processes import open_pidfd

PROCESSES_PER_CORE = 256
PROCESS_BYTES = 20_000_000  # of the smallest, a reward worker's, beside what processes share
FILES_PER_PROCESS = 3  # sockets and pipes that lead to it, in the process that watches it


@dataclass(frozen=True)
class Threads:
    """Compute threads of one executor: while others work, and while it works alone."""

    together: int
    alone: int


class Scorer(NamedTuple):
    """A group that scores completions, or a critic of its own: `ranks`, which `field` gives, on `device`.

    `tensor_parallel` of the ranks share each layer.
    """

    name: str
    field: str
    ranks: int
    device: str
    tensor_parallel: int = 1


def scorers(config: RunConfig) -> list[Scorer]:
    """Return the groups of the default pipeline that run models beside trainer and generators."""
    rewards, kl, teacher, critic = config.rewards, config.kl, config.teacher, config.critic
    size, field = rewards.model_tensor_parallel, "rewards.model_ranks"
    found = [
        (Scorer("reward_models", field, rewards.model_ranks, rewards.device, size), bool(rewards.models)),
        (Scorer("reference", "kl.ranks", kl.ranks, kl.device, kl.tensor_parallel), kl.executor == "own"),
        (
            Scorer("teacher", "teacher.ranks", teacher.ranks, teacher.device, teacher.tensor_parallel),
            config.has_own_teacher,
        ),
        (Scorer("critic", "critic.ranks", critic.ranks, critic.device, critic.tensor_parallel), config.has_own_critic),
    ]
    return [scorer for scorer, is_there in found if is_there]


def computing_groups(config: RunConfig) -> set[str]:
    """The groups of the default pipeline that run models, replicas of the generator under one name."""
    return {"trainer", "generator", *(scorer.name for scorer in scorers(config))}


def check_remote(config: RunConfig, remote: Collection[str]) -> None:
    """Raise ConfigError for a group of `remote` that the run does not have, or that could not join it."""
    groups = computing_groups(config)
    if not set(remote) <= groups:
        raise ConfigError(
            "no such group could join this run",
            got=", ".join(sorted(set(remote) - groups)),
            allowed=", ".join(sorted(groups)),
            hint="there are reward_models with rewards.models, a reference with kl.executor = 'own', a teacher with "
            "teacher.executor = 'own', and a critic with critic.executor = 'own'",
        )


def check_processes(config: RunConfig, here: Collection[str], *, has_workers: bool) -> None:
    """Raise ConfigError for more processes than this machine could start and keep, by the groups that are `here`.

    A worker that scores is three processes: a keeper, the first of a namespace, the scorer; and there is one to spare.
    """
    if config.host == "process" and (reason := why_no_processes()):
        raise ConfigError(
            "executors cannot have processes of their own here",
            got=reason,
            hint="another machine, or a Linux container; host = 'inline' runs them all in one process, without overlap",
        )
    counts = {
        "trainer": ("trainer.ranks", config.trainer.ranks, 1),
        "generator": ("generator.replicas x pipeline_parallel x tensor_parallel", _replicas(config), 1),
        **{scorer.name: (scorer.field, scorer.ranks, 1) for scorer in scorers(config)},
        "rewards": ("rewards.num_workers", config.rewards.all_workers + 1, 3),
    }
    if config.host != "process":
        counts = {"rewards": counts["rewards"]}
    most, why = most_processes()
    for group, (field, count, each) in counts.items():
        if (group in here or (group == "rewards" and has_workers)) and count * each > most:
            raise ConfigError(
                f"{field} asks for more processes than this machine can have",
                got=f"{count} x {each} processes" if each > 1 else f"{count} processes",
                allowed=f"{most} ({why})",
                hint=f"lower {field}",
            )


def why_no_processes() -> str:
    """Return why executors cannot have processes of their own here, or nothing where they can."""
    if not sys.platform.startswith("linux"):
        return f"this is {sys.platform}: they are watched, and end with the run, by means of Linux"
    try:
        os.close(open_pidfd(os.getpid()))
    except OSError as error:
        return f"pidfd_open is refused ({error.strerror}): Linux before 5.3, or a container that does not permit it"
    return ""


def _replicas(config: RunConfig) -> int:
    generator = config.generator  # vLLM's ranks are processes, too
    return generator.replicas * generator.pipeline_parallel * generator.tensor_parallel


def most_processes() -> tuple[int, str]:
    """Return how many processes a run can have here, and which limit that is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    memory = memory_bytes()
    limits = {
        f"{PROCESSES_PER_CORE} for each of {num_cores()} cores": PROCESSES_PER_CORE * num_cores(),
        f"{memory / 1e9:.3g} GB of memory, {PROCESS_BYTES / 1e6:g} MB for each": memory // PROCESS_BYTES,
        "the user's limit, ulimit -u": math.inf if soft == resource.RLIM_INFINITY else soft,
        f"open files, ulimit -n, {FILES_PER_PROCESS} for each": math.inf
        if files == resource.RLIM_INFINITY
        else files // FILES_PER_PROCESS,
    }
    why = min(limits, key=limits.__getitem__)
    return int(limits[why]), why


def place(config: RunConfig, cores: int) -> dict[str, Threads]:
    """Threads of each process of the computing executors, by the first word of their names.

    At staleness 0 trainer and generator take turns, so each gets everything, unless `sync_placement` splits them;
    otherwise trainer and replicas divide the cores, the trainer taking what is left over. Reward models get as much as
    a replica, once cores suffice for both, and so do reference and teacher with executors of their own: they read each
    token once, which is a small part of what sampling it costs. A critic of its own works while the trainer does, also
    at staleness 0, so the two share the cores then. The ranks of a group divide what it gets. What computes
    on a GPU takes one core for each replica or rank.
    """
    whole = _place_groups(config, cores)
    ranks = {"trainer": config.trainer.ranks, "generator": config.generator.ranks}
    ranks |= {scorer.name: scorer.ranks for scorer in scorers(config)}
    return {
        name: Threads(
            together=max(1, threads.together // ranks[name]),
            alone=max(1, threads.alone // ranks[name]),
        )
        for name, threads in whole.items()
    }


def _place_groups(config: RunConfig, cores: int) -> dict[str, Threads]:
    """Return the threads of whole groups, before their ranks divide them."""
    replicas = config.generator.replicas
    beside = [  # the trainer: name, groups of that name, processes of all of them, device
        ("generator", replicas, replicas, config.generator.device),
        *((scorer.name, 1, scorer.ranks, scorer.device) for scorer in scorers(config)),
    ]
    free = cores - sum(processes for _, _, processes, device in beside if device != "cpu")
    others = sum(groups for _, groups, _, device in beside if device == "cpu")
    each = max(1, free // (others + 1))
    trainer = max(1, free - each * others)
    if config.is_colocated:
        trainer, each = cores, max(1, cores // replicas)
        if config.has_own_critic and config.critic.device == "cpu":
            trainer = max(1, cores - cores // 2)
    placed = {"trainer": Threads(together=trainer, alone=cores)}
    for name, groups, _, device in beside:
        on_cpu = Threads(together=each, alone=max(1, cores // groups))
        if name == "critic" and config.is_colocated:
            on_cpu = Threads(together=max(1, cores - trainer), alone=cores)
        placed[name] = on_cpu if device == "cpu" else Threads(together=1, alone=1)
    return placed


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables every numerical library reads when it is loaded.

    OpenMP binds no thread to a core, whatever the site has set: in each process it would be the same ones. Waiting
    threads spin for microseconds, then sleep, and tensors of megabytes lie in large pages. Two threads,
    decoding 64 x 16 tokens and one training pass in ms (`benchmarks/waiting.py`): without spinning 149 and 269, with
    OpenMP's default, which spins long, 76 and 202, so 73 and 211, with large pages besides 70 and 167; beside two busy
    processes 155 and 305, 334 and 697, 330 and 500, 341 and 517.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    others = {"OMP_PROC_BIND": "false", "GOMP_SPINCOUNT": "10000", "THP_MEM_ALLOC_ENABLE": "1"}
    return dict.fromkeys(names, str(num_threads)) | others | {"TOKENIZERS_PARALLELISM": "false"}
