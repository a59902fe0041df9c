"""Who computes, here or on other machines, and who gets which cores.

Thread counts decide every number on a CPU, so they are fixed before torch is imported.

Seen on two cores, decode and train steps per second: alone with two threads 397 and 17, together with one each 240
and 7, together with two each 93 and 5. Executors that run at the same time therefore share the cores without overlap;
phases that cannot overlap (warm start, evaluation at the ends, everything at staleness 0) get all of them, unless
`sync_placement = "split"` asks for the baseline that leaves the other side's cores idle.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError


@dataclass(frozen=True)
class Threads:
    """Compute threads of one executor: while others work, and while it works alone."""

    together: int
    alone: int


def computing_groups(config: RunConfig) -> set[str]:
    """The groups of the default pipeline that run models, replicas of the generator under one name."""
    groups = {"trainer", "generator"} | ({"reward_models"} if config.rewards.models else set())
    return groups | ({"reference"} if config.kl.executor == "own" else set())


def check_remote(config: RunConfig, remote: Collection[str]) -> None:
    """Raise ConfigError for a group of `remote` that the run does not have, or that could not join it."""
    groups = computing_groups(config)
    if not set(remote) <= groups:
        raise ConfigError(
            "no such group could join this run",
            got=", ".join(sorted(set(remote) - groups)),
            allowed=", ".join(sorted(groups)),
            hint="there are reward_models with rewards.models, and a reference with kl.executor = 'own'",
        )


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def place(config: RunConfig, cores: int) -> dict[str, Threads]:
    """Threads of each process of the computing executors, by the first word of their names.

    At staleness 0 trainer and generator take turns, so each gets everything, unless `sync_placement` splits them;
    otherwise trainer and replicas divide the cores, the trainer taking what is left over. Reward models get as much as
    a replica, once cores suffice for both, and so does a reference with an executor of its own: they read each token
    once, which is a small part of what sampling it costs. The ranks of a group divide what it gets. What computes on a
    GPU takes one core for each replica or rank.
    """
    whole = _place_groups(config, cores)
    ranks = {
        "trainer": config.trainer.ranks,
        "generator": config.generator.tensor_parallel,
        "reward_models": config.rewards.model_ranks,
        "reference": config.kl.ranks,
    }
    return {
        name: Threads(
            together=max(1, threads.together // ranks[name]),
            alone=max(1, threads.alone // ranks[name]),
        )
        for name, threads in whole.items()
    }


def _place_groups(config: RunConfig, cores: int) -> dict[str, Threads]:
    """The same for whole groups."""
    replicas = config.generator.replicas
    beside = [  # the trainer: name, groups of that name, processes of all of them, device
        ("generator", replicas, replicas, config.generator.device),
        ("reward_models", int(bool(config.rewards.models)), config.rewards.model_ranks, config.rewards.device),
        ("reference", int(config.kl.executor == "own"), config.kl.ranks, config.kl.device),
    ]
    free = cores - sum(processes for _, groups, processes, device in beside if groups and device != "cpu")
    others = sum(groups for _, groups, _, device in beside if device == "cpu")
    each = max(1, free // (others + 1))
    trainer = max(1, free - each * others)
    if config.is_colocated:
        trainer, each = cores, max(1, cores // replicas)
    placed = {"trainer": Threads(together=trainer, alone=cores)}
    for name, groups, _, device in beside:
        on_cpu = Threads(together=each, alone=max(1, cores // max(groups, 1)))
        placed[name] = on_cpu if device == "cpu" else Threads(together=1, alone=1)
    return placed


def thread_environment(num_threads: int) -> dict[str, str]:
    """Variables every numerical library reads when it is loaded.

    Waiting OpenMP threads spin for microseconds, then sleep, and tensors of megabytes lie in large pages. Two threads,
    decoding 64 x 16 tokens and one training pass in ms (`benchmarks/waiting.py`): without spinning 149 and 269, with
    OpenMP's default, which spins long, 76 and 202, so 73 and 211, with large pages besides 70 and 167; beside two busy
    processes 155 and 305, 334 and 697, 330 and 500, 341 and 517.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    others = {"GOMP_SPINCOUNT": "10000", "THP_MEM_ALLOC_ENABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return dict.fromkeys(names, str(num_threads)) | others
