"""What a run needs of a cluster, whatever starts it: its jobs, their machines, restarts, exit codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from slipstream.controller.placement import check_remote
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError

CONTROLLER_RESTARTS = 3
"""Times a run that failed goes on from its last checkpoint by itself. A mistake in it would come back each time."""
GROUP_RESTARTS = 20
"""Times a group's job starts anew after failing, beside the restarts that its torchrun agent makes in place."""
BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes of `slipstream launch` after which starting again would be of no use, or not wanted."""

ENDING_S = 15
"""Seconds for a run whose grace period is over: its children are killed, its summary is written."""

RECIPE_FILE = "recipe.toml"
STORE_PORT, RENDEZVOUS_PORT = 29400, 29500


@dataclass(frozen=True)
class Machines:
    """What one executor group runs on: `nodes` machines with `ranks` processes, `gpus` GPUs and `cpus` cores each."""

    nodes: int
    ranks: int
    gpus: int
    cpus: int


@dataclass(frozen=True)
class GroupJob:
    """What is started for the executor groups of one kind: a job for the one of that name, or for each replica.

    Each of its groups runs on `machines` of its own. `replicas`: None for a group that has none.
    """

    kind: str
    machines: Machines
    replicas: int | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        """What `slipstream launch --group` calls them."""
        if self.replicas is None:
            return (self.kind,)
        return tuple(f"{self.kind}-{replica}" for replica in range(self.replicas))


@dataclass(frozen=True)
class Layout:
    """All of a run: the controller with its children on one machine, and the jobs of the groups that join it.

    `remote`: which of these groups the controller has to be told of (`--remote`).
    """

    controller: Machines
    groups: tuple[GroupJob, ...]
    remote: tuple[str, ...]


@dataclass(frozen=True)
class Scorer:
    """A group that scores completions, which may be children of the controller: `ranks` whole copies on `device`."""

    name: str
    ranks: int
    device: str
    ranks_field: str


def lay_out(
    config: RunConfig, remote: Collection[str] | None = None, *, ranks_per_node: int = 8, cpus_per_rank: int = 8
) -> Layout:
    """Which jobs the run is made of, and what each of them runs on.

    Trainer and generators have jobs of their own, and so have the groups of `remote` ('reward_models', 'reference');
    None: those on CUDA, so that the controller needs no GPU. `ranks_per_node` are the GPUs of a machine, and how many
    ranks one without GPUs holds. ConfigError for groups that the run does not have, and for what fits on no machine.
    """
    scorers = _scorers(config)
    own = {scorer.name for scorer in scorers if scorer.device == "cuda"} if remote is None else set(remote)
    check_remote(config, own)
    leaving = [scorer for scorer in scorers if scorer.name in own]
    staying = [scorer for scorer in scorers if scorer.name not in own]
    fewest = partial(machines, ranks_per_node=ranks_per_node, cpus_per_rank=cpus_per_rank)
    trainer = config.trainer
    groups = [
        GroupJob("trainer", fewest(trainer.ranks, trainer.tensor_parallel, is_on_gpu=trainer.device == "cuda")),
        GroupJob(
            "generator",
            _generator_machines(config, fewest, ranks_per_node=ranks_per_node, cpus_per_rank=cpus_per_rank),
            config.generator.replicas,
        ),
        *(GroupJob(each.name, fewest(each.ranks, 1, is_on_gpu=each.device == "cuda")) for each in leaving),
    ]
    told = [scorer.name for scorer in leaving]
    for scorer in staying:
        if scorer.ranks > ranks_per_node:
            raise ConfigError(
                f"the controller's machine has no room for '{scorer.name}'",
                got=f"{scorer.ranks_field} = {scorer.ranks}",
                allowed=f"at most {ranks_per_node}, as many as a machine has GPUs (--gpus-per-node)",
                hint=f"`--remote {' '.join([*told, scorer.name])}` gives it a job of its own (docs/cluster.md)",
            )
    controller = _controller_machine(config, staying, cpus_per_rank=cpus_per_rank)
    return Layout(controller, tuple(groups), remote=tuple(told))


def termination_s(config: RunConfig) -> int:
    """Seconds between SIGTERM and SIGKILL that the run needs."""
    return math.ceil(config.shutdown_grace_s) + ENDING_S


def _scorers(config: RunConfig) -> list[Scorer]:
    rewards, kl = config.rewards, config.kl
    models = Scorer("reward_models", rewards.model_ranks, rewards.device, "rewards.model_ranks")
    reference = Scorer("reference", kl.ranks, kl.device, "kl.ranks")
    return [*([models] if rewards.models else []), *([reference] if kl.executor == "own" else [])]


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


def _generator_machines(
    config: RunConfig, fewest: Callable[..., Machines], *, ranks_per_node: int, cpus_per_rank: int
) -> Machines:
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
        return fewest(generator.tensor_parallel, generator.tensor_parallel, is_on_gpu=generator.device == "cuda")
    size = int(generator.vllm.engine_args.get("tensor_parallel_size", 1))
    if size > ranks_per_node:
        raise ConfigError(
            "a replica of vLLM runs on one machine",
            got=f"generator.vllm.engine_args.tensor_parallel_size = {size}",
            allowed=f"at most {ranks_per_node}, the GPUs of a machine",
        )
    return Machines(1, ranks=1, gpus=size if config.trainer.device == "cuda" else 0, cpus=size * cpus_per_rank)


def _controller_machine(config: RunConfig, staying: Sequence[Scorer], *, cpus_per_rank: int) -> Machines:
    """What the controller runs on with its children: rewards and their workers, and the scorers that stay.

    Scorers share GPUs, and so does a stage that scores in the controller's process, before RL or after it.
    """
    in_stages = (config.rewards, config.gold) if {"preferences", "evaluate"} & set(config.stages) else ()
    gpus = [scorer.ranks for scorer in staying if scorer.device == "cuda"]
    gpus += [1 for rewards in in_stages if rewards.models and rewards.device == "cuda"]
    cpus = 2 + config.rewards.num_workers + cpus_per_rank * sum(scorer.ranks for scorer in staying)
    return Machines(1, ranks=1, gpus=max(gpus, default=0), cpus=cpus)
