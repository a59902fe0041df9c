"""Trainer, generator and critic on one GPU: the bytes that each is planned to take, and the shares that follow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError
from slipstream.generator.device import USABLE_MEMORY as USABLE_BY_GENERATOR
from slipstream.generator.device import replica_device
from slipstream.models.config import TransformerConfig, config_from_hf
from slipstream.models.device import scoring_device
from slipstream.models.hf import read_hf_config
from slipstream.models.hub import is_adapter, with_folders
from slipstream.models.packed import rounded_up
from slipstream.models.peft import planned_shapes
from slipstream.models.preflight import check_policy
from slipstream.models.sizes import num_parameters
from slipstream.plan.cost_model import USABLE_MEMORY, CostModel
from slipstream.plan.counts import NO_ADAPTERS, adapters_of
from slipstream.plan.hardware import GpuCluster, cluster
from slipstream.plan.layouts import GeneratorLayout, Parts, TrainerLayout, Workload
from slipstream.plan.lengths import LengthSample
from slipstream.trainer.loss_checks import needs_reference

DIVIDED = 0.95
"""Share of a GPU that is divided where no shares are given: CUDA's contexts take the rest, outside of any share."""

_GENERATOR_HINT = "lower generator.num_slots or eval.num_slots, generator.max_new_tokens or prompts.max_prompt_tokens"
_TRAINER_HINT = (
    "trainer.offload_moments = true, trainer.recompute = true, or a lower trainer.microbatch_tokens or "
    "prompts.max_prompt_tokens"
)
_CRITIC_HINT = "; or the critic inside the trainer: critic.executor = 'trainer'"


def with_shares(config: RunConfig, *, remote: Collection[str] = ()) -> tuple[RunConfig, str | None]:
    """Return `config` with a share of each GPU for both sides where they share one, and in words what was chosen.

    Keys and values are bounded by the generator's share, so the trainer's part is what its steps are planned to take at
    most: pages are laid out before the first step. A critic of its own executor that is there too gets what it is
    planned to take. ConfigError where the shares of a GPU sum to more than 1, or a side is planned to take more than
    its share.
    """
    sides = _sides(config, remote)
    names = ["trainer", "generator"] + ["critic"] * config.has_own_critic
    given = {name: share for name in names if (share := vars(config)[name].gpu_share) is not None}
    both = [ranks for ranks in sides.values() if ranks["trainer"] and ranks["generator"]]
    missing = {name for ranks in both for name in ranks} - given.keys()
    if not sides or not (given or missing):
        return config, None
    _check_sums(sides, given)
    local = with_folders(config)
    shape = check_policy(local)
    memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in sides)
    if not is_planned(shape):
        if missing:
            what = "layers with and without experts in one model are not planned: shares of the GPU are yours to say"
            raise ConfigError(what, got="no " + ", ".join(f"{name}.gpu_share" for name in sorted(missing)))
        return config, None
    planned = {"trainer": trainer_bytes(local, shape), "generator": generator_bytes(local, shape, all_slots=False)}
    if "critic" in missing | given.keys():
        planned["critic"] = critic_bytes(local, shape)
    usable = dict.fromkeys(planned, USABLE_MEMORY * memory) | {"generator": USABLE_BY_GENERATOR * memory}
    least = {name: parts.total / usable[name] for name, parts in planned.items()}
    chosen = dict(given)
    if "critic" in missing:
        chosen["critic"] = math.ceil(100 * least["critic"]) / 100
    if missing - {"critic"}:
        wanted = generator_bytes(local, shape, all_slots=True).total / usable["generator"]
        beside = max(ranks["generator"] for ranks in both)
        divided = DIVIDED - max(ranks["critic"] * chosen.get("critic", 0.0) for ranks in both)
        chosen |= _chosen(given, least, wanted, beside, planned, memory, divided)
    for name in chosen if given else ():
        _check_share(name, planned[name], chosen[name], usable[name])
    _check_sums(sides, chosen)
    if not missing:
        return config, None
    sections = {name: vars(config)[name].model_copy(update={"gpu_share": chosen[name]}) for name in missing}
    told = ", ".join(f"{name}.gpu_share = {chosen[name]:g} (planned: {_gb(planned[name].total)})" for name in planned)
    return config.model_copy(update=sections), f"both sides on one GPU of {_gb(memory)}: {told}"


def is_planned(shape: TransformerConfig) -> bool:
    """Whether the cost model knows such a model."""
    return not (shape.num_experts and shape.dense_layers)


def trainer_bytes(config: RunConfig, shape: TransformerConfig) -> Parts:
    """Return the bytes that a rank of the trainer is planned to take at most, in a step of the longest completions."""
    costs, served = costs_of(config, shape), None if config.publishes_in_place else config.generator.precision
    return costs.train_memory(_layout(config, shape, costs), served=served) + _teacher_bytes(config)


def _teacher_bytes(config: RunConfig) -> Parts:
    """The teacher inside the trainer, whole on each rank, in float32 and as passes read it; adapters share a base."""
    path = config.teacher.path
    if config.has_own_teacher or path is None or stage_of(path) is not None or is_adapter(Path(path)):
        return Parts({})
    read = 2 if config.trainer.precision == "bfloat16" else 0
    return Parts({"teacher": (4 + read) * num_parameters(config_from_hf(read_hf_config(Path(path))))})


def critic_bytes(config: RunConfig, shape: TransformerConfig) -> Parts:
    """Return the bytes that a rank of a critic of its own executor is planned to take at most; `shape` is the policy's.

    A critic that starts from a stage that has not run counts as one of that shape.
    """
    critic, path = config.critic, config.critic.path
    if path is not None and stage_of(path) is None:
        shape = replace(config_from_hf(read_hf_config(Path(path))), max_positions=shape.max_positions)
    costs = costs_of(config, shape)
    layout = replace(
        _layout(config, shape, costs),
        devices=critic.ranks,
        tensor_parallel=critic.tensor_parallel,
        context_parallel=1,
        expert_parallel=1,
    )
    return costs.critic_memory(layout)


def _layout(config: RunConfig, shape: TransformerConfig, costs: CostModel) -> TrainerLayout:
    """Return the trainer's layout, with microbatches of the longest completions."""
    trainer = config.trainer
    longest = config.longest_sequence(shape.max_positions)  # a microbatch by itself, if it is longer
    rows = max(rounded_up(trainer.microbatch_tokens), longest)
    return TrainerLayout(
        devices=trainer.ranks,
        tensor_parallel=trainer.tensor_parallel,
        microbatch=rows / costs.workload.trained_tokens,
        precision=trainer.precision,
        recompute=trainer.recompute,
        keeps_products=trainer.recompute and not trainer.recompute_products,
        reduce_once=trainer.reduce_once,
        offloads_moments=trainer.offload_moments,
        pipeline_parallel=trainer.pipeline_parallel,
        chunks=trainer.pipeline_chunks,
        context_parallel=trainer.context_parallel,
        expert_parallel=trainer.expert_parallel,
    )


def generator_bytes(config: RunConfig, shape: TransformerConfig, *, all_slots: bool) -> Parts:
    """Return the bytes of a rank of a replica with its evaluations, that an engine has room for a sequence, or for all.

    Identity: of so much usable memory `kv_bytes_beside` gives each engine its keys and values.
    """
    generator, costs = config.generator, costs_of(config, shape)
    slots = generator.rows if all_slots else 1
    layout = GeneratorLayout(
        devices=generator.ranks,
        tensor_parallel=generator.tensor_parallel,
        slots=slots,
        precision=generator.precision,
        pipeline_parallel=generator.pipeline_parallel,
    )
    parts = costs.generator_memory(layout)
    version, kept = parts["shadow"], parts["keys_and_values"]
    base = parts["weights"] - version  # of adapters: all engines share it
    # An evaluation's keys and values come when its weights are there once.
    return Parts({"weights": base + 3 * version, "keys_and_values": kept + max(kept, version)})


def costs_of(config: RunConfig, shape: TransformerConfig, on: GpuCluster | None = None) -> CostModel:
    """Return the costs of a run whose completions are all as long as they may be; bytes do not depend on the GPU."""
    lora, longest = config.model.lora, config.longest_sequence(shape.max_positions)
    completion = min(config.longest_completion, longest - 1)
    rank = next((one.rank for one in planned_shapes(lora, shape).values()), None) if lora.is_set else None
    workload = Workload(
        groups=config.groups_per_step,
        group_size=config.samples_per_group,
        lengths=LengthSample(longest - completion, (completion,), "the longest"),
        reference=needs_reference(config) and config.kl.executor == "trainer",
        critic=config.has_critic and config.critic.model == "own" and not config.has_own_critic,
        adapters=NO_ADAPTERS
        if rank is None
        else adapters_of(shape, rank, lora.targets, lora.adapter_precision, lora.base_precision),
    )
    return CostModel(shape, on or cluster("h100", 1), workload)


def _sides(config: RunConfig, remote: Collection[str]) -> dict[int, Counter[str]]:
    """Return the processes of both sides on each GPU of this machine, by side."""
    found: dict[int, Counter[str]] = {}
    num_gpus = torch.cuda.device_count()
    trainer, generator = config.trainer, config.generator
    if config.host != "process" or not num_gpus:
        return found
    if trainer.device == "cuda" and "trainer" not in remote:
        for rank in range(trainer.ranks):
            found.setdefault(rank % num_gpus, Counter())["trainer"] += 1
    if generator.device != "cpu" and "generator" not in remote:
        for replica in range(generator.replicas):
            for rank in range(generator.ranks):
                gpu = replica_device(config, replica, num_gpus, rank).index or 0
                found.setdefault(gpu, Counter())["generator"] += 1
    if config.has_own_critic and config.critic.device == "cuda" and "critic" not in remote:
        for rank in range(config.critic.ranks):
            found.setdefault(scoring_device("cuda", rank).index, Counter())["critic"] += 1
    return found


def _check_sums(sides: dict[int, Counter[str]], given: dict[str, float]) -> None:
    for gpu, ranks in sorted(sides.items()):
        terms = [(count, name, given[name]) for name, count in ranks.items() if name in given]
        if sum(count * share for count, _, share in terms) > 1 + 1e-9:
            got = " + ".join(f"{f'{n} x ' if n > 1 else ''}{name}.gpu_share = {share:g}" for n, name, share in terms)
            raise ConfigError(
                f"the shares of one GPU's memory sum to more than 1, on cuda:{gpu}",
                got=got,
                allowed="at most 1 in all",
                hint="lower one of them, or put the generator on another GPU: generator.device = 'cuda:N'"
                + _CRITIC_HINT * ("critic" in ranks),
            )


def _chosen(
    given: dict[str, float],
    least: dict[str, float],
    wanted: float,
    beside: int,
    planned: dict[str, Parts],
    memory: float,
    divided: float,
) -> dict[str, float]:
    """Return the shares that are not given, of the part of a GPU that a trainer and `beside` replicas' ranks divide.

    The generator gets room for all of its slots, if the trainer leaves that; each has half of what is over then.
    """
    if "trainer" in given:
        return {"generator": _floor((divided - given["trainer"]) / beside)}
    if "generator" in given:
        return {"trainer": _floor(divided - beside * given["generator"])}
    room = divided - least["trainer"]
    if room < beside * least["generator"]:
        raise ConfigError(
            f"{' and '.join(planned)} do not fit one GPU together",
            got=", ".join(f"{name}: {_listed(parts)}" for name, parts in planned.items()),
            allowed=f"{DIVIDED:.0%} of {_gb(memory)}",
            hint=f"{_TRAINER_HINT}; or another GPU for the generator: generator.device = 'cuda:1'"
            + _CRITIC_HINT * ("critic" in planned),
        )
    all_slots = min(beside * wanted, room)
    over = (room - all_slots) / 2
    return {"trainer": _floor(least["trainer"] + over), "generator": _floor((all_slots + over) / beside)}


def _check_share(name: str, planned: Parts, share: float, usable: float) -> None:
    if planned.total > share * usable:
        raise ConfigError(
            f"the {name} is planned to take more than its share of the GPU",
            got=_listed(planned),
            allowed=f"{name}.gpu_share = {share:g}, of which {_gb(share * usable)} can be used",
            hint=_GENERATOR_HINT if name == "generator" else _TRAINER_HINT,
        )


def _floor(share: float) -> float:
    return max(math.floor(100 * share + 1e-9) / 100, 0.01)


def _listed(parts: Parts) -> str:
    largest = sorted(parts.parts, key=lambda part: -parts[part])[:4]
    return f"{_gb(parts.total)} (" + ", ".join(f"{part} {_gb(parts[part])}" for part in largest) + ")"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3g} GB"
