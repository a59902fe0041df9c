"""What the groups of a run need of a cluster: machines, restarts, exit codes; whatever starts them."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError

CONTROLLER_RESTARTS = 3
"""Times a run that failed goes on from its last checkpoint by itself. A mistake in it would come back each time."""
GROUP_RESTARTS = 20
"""Times a group's job starts anew after failing, beside the restarts that its torchrun agent makes in place."""
BAD_INPUT, INTERRUPTED = 2, 130
"""Exit codes of `slipstream launch` after which starting again would be of no use, or not wanted."""

RECIPE_FILE = "recipe.toml"
STORE_PORT, RENDEZVOUS_PORT = 29400, 29500


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
