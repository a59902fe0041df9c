"""Which GPU a replica computes on, what may not be asked of it, and how much of its memory holds keys and values."""

from __future__ import annotations

import torch

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.sections import GeneratorConfig
from slipstream.models.served import check_precision

USABLE_MEMORY = 0.85
"""Share of a GPU that is planned with; the rest is for activations, captured graphs and CUDA itself."""


def replica_device(
    config: RunConfig, replica: int, num_gpus: int, rank: int = 0, *, is_remote: bool = False
) -> torch.device:
    """'cuda' deals the replicas' ranks out to the GPUs in turn; 'cuda:N' puts all of them on one.

    `is_remote`: on a machine of which the run knows nothing, from its first GPU on; else from `first_gpu` on.
    """
    generator = config.generator
    if generator.device == "cuda":
        first = 0 if is_remote else first_gpu(config, num_gpus)
        return torch.device("cuda", (first + replica * generator.ranks + rank) % num_gpus)
    return torch.device(generator.device)


def first_gpu(config: RunConfig, num_gpus: int) -> int:
    """Return the GPU that the first replica is on: the one behind the trainer's, where there are enough for all of a
    run's processes, of which those that score count from the last; else the first."""
    trainer, generator, rewards, kl = config.trainer, config.generator, config.rewards, config.kl
    teacher, critic = config.teacher, config.critic
    if config.host != "process" or not trainer.device == generator.device == "cuda":
        return 0
    scoring = (
        rewards.model_ranks if rewards.models and rewards.device == "cuda" else 0,
        kl.ranks if kl.executor == "own" and kl.device == "cuda" else 0,
        teacher.ranks if config.has_own_teacher and teacher.device == "cuda" else 0,
        critic.ranks if config.has_own_critic and critic.device == "cuda" else 0,
    )
    needed = trainer.ranks + generator.replicas * generator.ranks + max(scoring)
    return trainer.ranks if needed <= num_gpus else 0


def most_on_one(generator: GeneratorConfig, num_gpus: int) -> int:
    """Ranks that share a GPU where the most do; where a replica has one rank, replicas."""
    ranks = generator.replicas * generator.ranks
    return -(-ranks // num_gpus) if generator.device == "cuda" else ranks


def check_device(config: RunConfig, *, local_world: int | None = None) -> None:
    """Raise ConfigError where this machine has not the GPUs that `generator.device` names, or they cannot do it.

    `local_world` of a replica's ranks are here, where it is on several machines; None: all.
    """
    generator = config.generator
    if generator.engine == "vllm":  # in a process of its own, on the device that it was built for
        return
    num_gpus = torch.cuda.device_count()
    wanted = torch.device(generator.device)
    if wanted.type == "cuda" and not (wanted.index or 0) < num_gpus:
        found = ", ".join(f"cuda:{index}" for index in range(num_gpus)) or "none, or none that this torch can use"
        raise ConfigError(
            "generator.device names a GPU that is not there",
            got=f"'{generator.device}'; GPUs found: {found}",
            allowed="'cpu'" + (f", 'cuda' or 'cuda:0' to 'cuda:{num_gpus - 1}'" if num_gpus else ""),
            hint="`slipstream doctor` shows GPUs; a torch that ends in +cpu sees none",
        )
    here = generator.ranks if local_world is None else local_world
    if wanted.type == "cuda" and here > (num_gpus if wanted.index is None else 1):
        raise ConfigError(
            "ranks that share a model need a GPU each",
            got=f"generator.pipeline_parallel = {generator.pipeline_parallel} x generator.tensor_parallel = "
            f"{generator.tensor_parallel} with generator.device = '{generator.device}' and {num_gpus} GPUs",
            allowed="generator.device = 'cuda' and as many GPUs",
        )
    devices = {
        replica_device(config, replica, num_gpus, rank)
        for replica in range(generator.replicas)
        for rank in range(generator.ranks)
    }
    if len(devices) > 1 and config.host == "inline":
        got = f"host = 'inline' with {generator.replicas} replicas on {len(devices)} GPUs"
        allowed = "generator.device = 'cuda:0', or host = 'process'"
        raise ConfigError("replicas that share a process share a GPU", got=got, allowed=allowed)
    for device in sorted(devices, key=str):
        check_precision(generator.precision, device)


def kv_bytes_beside(weight_bytes: int, memory_bytes: int, base_bytes: int = 0) -> int:
    """Keys and values that `memory_bytes` of a GPU have room for, beside weights of `weight_bytes`; for each engine.

    `base_bytes`: the base of adapters, which is there once for both engines; `weight_bytes` are the adapters' then.

    While an evaluation runs there are two engines. Training's holds its weights twice, those that are live and those
    that arrive; the evaluation's once, and once more while it starts, before it takes its own keys and values.
    """
    usable = USABLE_MEMORY * memory_bytes - base_bytes
    return int(min((usable - 3 * weight_bytes) / 2, usable - 4 * weight_bytes))
