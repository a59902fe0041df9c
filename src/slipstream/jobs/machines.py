"""The jobs of a run and their machines, whatever starts them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from slipstream.controller.placement import Scorer, check_remote, scorers
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError

CONTROLLER_RESTARTS = 3
"""Times a run that failed goes on from its last checkpoint by itself. A mistake in it would come back each time."""
GROUP_RESTARTS = 20
"""Times a group's job starts anew after failing, beside the restarts that its torchrun agent makes in place."""
JOB_JOIN_TIMEOUT_S = 86_400
"""Seconds that jobs wait for one another: one may wait so long in a queue, or for an image. The others' limits hold."""
ENDING_S = 15
"""Seconds for a run whose grace period is over: its children are killed, its summary is written."""
STORE_PORT, RENDEZVOUS_PORT = 29400, 29500
CPUS_PER_RANK = 8
TEACHER_SIZE = "teacher.vllm.engine_args.tensor_parallel_size"


class Machines(NamedTuple):
    """The machines of one executor group: `nodes` of them with `ranks` processes, `gpus` and `cpus` each."""

    nodes: int
    ranks: int
    gpus: int
    cpus: int


class GroupJob(NamedTuple):
    """The job of the executor groups of one kind, each on `machines` of its own; `replicas`: None where it is one."""

    kind: str
    machines: Machines
    replicas: int | None = None

    @property
    def groups(self) -> list[str]:
        """Return the names of the groups, for `slipstream launch --group`."""
        return [self.kind] if self.replicas is None else [f"{self.kind}-{n}" for n in range(self.replicas)]


class Layout(NamedTuple):
    """A whole run: the controller's machine, and the groups that join it; the controller is told of `remote` ones."""

    controller: Machines
    groups: list[GroupJob]
    remote: list[str]


def lay_out(config: RunConfig, remote: Collection[str] | None = None, *, ranks_per_node: int = 8) -> Layout:
    """Return the jobs that the run is made of, with their machines.

    Trainer and generators have jobs of their own, and so have the groups of `remote` ('reward_models', 'reference',
    'teacher', 'critic'); None: those on CUDA, so that the controller needs no GPU. `ranks_per_node` are the GPUs of a
    machine, and how many ranks one without GPUs holds. ConfigError for groups that the run does not have, and for what
    fits on no machine.
    """
    trainer, is_served = config.trainer, config.teacher.engine == "vllm"
    found = [
        scorer._replace(ranks=_teacher_size(config), device=trainer.device, field=TEACHER_SIZE)
        if scorer.name == "teacher" and is_served
        else scorer
        for scorer in scorers(config)
    ]
    own = {scorer.name for scorer in found if scorer.device == "cuda"} if remote is None else set(remote)
    check_remote(config, own)
    leaving = [scorer for scorer in found if scorer.name in own]
    staying = [scorer for scorer in found if scorer.name not in own]
    in_every_layer = max(trainer.context_parallel, trainer.expert_parallel) * trainer.tensor_parallel
    groups = [
        GroupJob(
            "trainer", machines(trainer.ranks, in_every_layer, trainer.device, ranks_per_node, trainer.tensor_parallel)
        ),
        GroupJob("generator", _generator_machines(config, ranks_per_node), config.generator.replicas),
        *(
            GroupJob(each.name, _vllm_machine(config, TEACHER_SIZE, _teacher_size(config), ranks_per_node))
            if each.name == "teacher" and is_served
            else GroupJob(each.name, machines(each.ranks, each.tensor_parallel, each.device, ranks_per_node))
            for each in leaving
        ),
    ]
    told = [scorer.name for scorer in leaving]
    for scorer in staying:
        if scorer.ranks > ranks_per_node:
            raise ConfigError(
                f"the controller's machine has no room for '{scorer.name}'",
                got=f"{scorer.field} = {scorer.ranks}",
                allowed=f"at most {ranks_per_node}, as many as a machine has GPUs (--gpus-per-node)",
                hint=f"`--remote {' '.join([*told, scorer.name])}` gives it a job of its own (docs/cluster.md)",
            )
    return Layout(_controller_machine(config, staying), groups, told)


def group_command(
    config: RunConfig, group: str, machines: Machines, controller: str, address: str, node: str, meeting: str
) -> list[str]:
    """Return the arguments of `slipstream` on machine `node` of a group, which is at `address`.

    A word may be one that a shell or Kubernetes fills in.
    """
    command = ["launch", "--group", group, "--controller", controller, "--address", address]
    command += ["--threads", str(machines.cpus // machines.ranks), "--shutdown-grace-s", f"{config.shutdown_grace_s:g}"]
    command += ["--join-timeout", str(JOB_JOIN_TIMEOUT_S)]
    if machines.nodes > 1:
        command += ["--nnodes", str(machines.nodes), "--node-rank", node, "--rendezvous", meeting]
    return command


def termination_s(config: RunConfig) -> int:
    """Return the seconds between SIGTERM and SIGKILL that the run needs."""
    return math.ceil(config.shutdown_grace_s) + ENDING_S


def machines(ranks: int, neighbours: int, device: str, ranks_per_node: int = 8, inner: int = 1) -> Machines:
    """Return the fewest machines that share `ranks` evenly, at most `ranks_per_node` each.

    So many `neighbours` talk in every layer: they stay on one machine, or fill whole ones; and so do each `inner` of
    them, which talk most. A GPU per rank on 'cuda'.
    """
    if ranks_per_node < 1:
        raise ConfigError(
            "a machine needs room for a rank", got=f"{ranks_per_node} GPUs per node", allowed="at least 1"
        )
    each = next(
        n
        for n in range(min(ranks, ranks_per_node), 0, -1)
        if ranks % n == 0 and all(n % size == 0 or size % n == 0 for size in (neighbours, inner))
    )
    return Machines(ranks // each, each, each if device == "cuda" else 0, each * CPUS_PER_RANK)


def _generator_machines(config: RunConfig, ranks_per_node: int) -> Machines:
    """Return the machines of each generator replica. ConfigError for 'cuda:N', and for a vLLM that fits on none."""
    generator = config.generator
    if ":" in generator.device:
        what = "on a cluster each replica sees its own GPUs only"
        raise ConfigError(what, got=f"generator.device = '{generator.device}'", allowed="'cuda' or 'cpu'")
    if generator.engine != "vllm":
        return machines(generator.ranks, generator.tensor_parallel, generator.device, ranks_per_node)
    return _vllm_machine(config, "generator.tensor_parallel", generator.tensor_parallel, ranks_per_node)


def _teacher_size(config: RunConfig) -> int:
    return int(config.teacher.vllm.engine_args.get("tensor_parallel_size", 1))


def _vllm_machine(config: RunConfig, field: str, size: int, ranks_per_node: int) -> Machines:
    """Return the machine of a vLLM of `size` ranks, which `field` says. ConfigError for one that fits on none.

    The configuration does not know what vLLM was built for: it gets GPUs where the trainer has them, one for each rank.
    """
    if size > ranks_per_node:
        allowed = f"at most {ranks_per_node}, the GPUs of a machine"
        raise ConfigError("a replica of vLLM runs on one machine", got=f"{field} = {size}", allowed=allowed)
    return Machines(1, 1, size if config.trainer.device == "cuda" else 0, size * CPUS_PER_RANK)


def _controller_machine(config: RunConfig, staying: Sequence[Scorer]) -> Machines:
    """Return the machine of the controller and its children: rewards and their workers, and the scorers that stay.

    Scorers share GPUs, and so does a stage that computes beside the controller, before RL or after it.
    """
    in_stages = (config.rewards, config.gold) if {"preferences", "evaluate"} & set(config.stages) else ()
    gpus = [scorer.ranks for scorer in staying if scorer.device == "cuda"]
    gpus += [1 for rewards in in_stages if rewards.models and rewards.device == "cuda"]
    gpus += [1] if config.trains_in_stages and config.trainer.device == "cuda" else []
    gpus += [1] if config.samples_in_stages and config.samples_on != "cpu" else []
    cpus = 2 + config.rewards.all_workers + CPUS_PER_RANK * sum(scorer.ranks for scorer in staying)
    return Machines(1, 1, max(gpus, default=0), cpus)
