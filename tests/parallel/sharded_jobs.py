"""What ranks do to train together, and what one does alone: the same updates from the same sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gradients import named_grads
from rank_models import whole_model, whole_tensors
from rank_pool import Rank
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slipstream.batching.collate import collate
from slipstream.core.config import RunConfig
from slipstream.core.errors import NonFiniteError
from slipstream.core.packed import PackedMicrobatch, TrainSequence, empty_microbatch
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import data_parallel_rank
from slipstream.core.training_sections import OptimizerConfig, TrainerConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig, local_config
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors
from slipstream.models.packed import at_targets
from slipstream.models.scalar import ScalarModel
from slipstream.models.sharded import (
    Division,
    ShardedParameters,
    divide,
    load_sharded,
    new_sharded,
)
from slipstream.models.shards import Box, load_shard, local_parts
from slipstream.models.transformer import Transformer
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import microbatch_logprobs
from slipstream.trainer.optim import AdamW
from slipstream.trainer.rank_axes import RankAxes

Boxes = list[tuple[Box, np.ndarray]]
_AXES: dict[tuple[int, int, int, int, int], RankAxes] = {}


@dataclass(frozen=True)
class Layout:
    """Data-parallel x tensor-parallel ranks, with stages or context-parallel ranks between, and how they work; of the
    data-parallel ones `experts` divide those of a mixture."""

    data_parallel: int
    tensor_parallel: int
    recomputes: bool = False
    reduce_once: bool = False
    precision: Any = "float32"
    context_parallel: int = 1
    stages: int = 1
    chunks: int = 1
    experts: int = 1

    @property
    def world(self) -> int:
        return self.data_parallel * self.stages * self.context_parallel * self.tensor_parallel


@dataclass
class Trained:
    """What a run of updates showed; arrays by box on a rank, by whole tensor on one alone."""

    first_gradient: Any = None
    weights: Any = None
    moments: Any = None
    grad_norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def axes_of(rank: Rank, layout: Layout) -> RankAxes:
    """Process groups are made once for all jobs."""
    key = (layout.world, layout.stages, layout.context_parallel, layout.tensor_parallel, layout.experts)
    if key not in _AXES:
        trainer = TrainerConfig(
            ranks=layout.world,
            pipeline_parallel=layout.stages,
            context_parallel=layout.context_parallel,
            tensor_parallel=layout.tensor_parallel,
            expert_parallel=layout.experts,
        )
        _AXES[key] = RankAxes.of(RankGroup.over(rank.group), trainer, timeout_s=60.0)
    return _AXES[key]


def division_of(rank: Rank, layout: Layout) -> Division:
    axes = axes_of(rank, layout)
    return Division(
        axes.sharing,
        axes.tensor,
        axes.context,
        precision=layout.precision,
        recomputes=layout.recomputes,
        reduce_once=layout.reduce_once,
        pipeline_parallel=axes.stage,
        chunks=layout.chunks,
        experts=axes.experts,
    )


def part_of(config: TransformerConfig, division: Division) -> Transformer:
    local = local_config(config, division.tensor_parallel.world)
    model = Transformer(local, division.ranks_of(config), division.stage)
    divide(model, division)
    load_shard(model, logical_tensors(whole_model(config)))
    return model


def sequences_of(update: int, vocab_size: int) -> list[TrainSequence]:
    """Of uneven lengths, some with the same prompt; of every third update all belong to one data-parallel rank."""
    rng = np.random.default_rng(update)
    drawn = []
    for ordinal in range(2 if update % 3 == 2 else 4):
        prompt = rng.integers(0, vocab_size, 3 + ordinal)
        for sample in range(1 if update % 3 == 2 else 3):
            completion = rng.integers(0, vocab_size, int(rng.integers(2, 24)))
            tokens = np.concatenate([prompt, completion]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            advantages = np.where(mask, rng.normal(size=len(tokens)), 0).astype(np.float32)
            nothing = np.zeros(len(tokens), dtype=np.float32)
            key = (4 * ordinal if update % 3 == 2 else ordinal, sample)
            drawn.append(TrainSequence(key, tokens, mask, nothing, advantages, np.where(mask, 0, -1).astype(np.int32)))
    return drawn


def loss_of(model: Transformer, microbatch: PackedMicrobatch, states: Tensor, num_tokens: int) -> Tensor:
    """A policy gradient, and some of the entropy's."""
    logprobs, entropies = microbatch_logprobs(model, microbatch, temperature=1.0, states=states)
    advantages = torch.from_numpy(microbatch.advantages).to(logprobs.device)
    return -(logprobs * advantages + 0.1 * entropies).sum() / num_tokens


def update_from(
    model: Transformer,
    optimizer: AdamW,
    sequences: Sequence[TrainSequence],
    layout: Layout,
    ranks: RankGroup,
    critic: Critic | None = None,
) -> float:
    """Gradients of all `sequences`, of which this rank reads its own; this rank's part of the loss."""
    num_tokens = sum(sequence.num_targets for sequence in sequences)
    own = [s for s in sequences if data_parallel_rank(*s.key, ranks.world, by="samples") == ranks.rank]
    microbatches = collate(own, 64)
    num_passes = int(ranks.max(torch.tensor(len(microbatches))))
    optimizer.zero_grad()
    if critic is not None:
        critic.optimizer.zero_grad()
    total = 0.0
    for index in range(num_passes):
        for one in (optimizer,) if critic is None else (optimizer, critic.optimizer):
            one.before_backward(is_last=index == num_passes - 1)
        microbatch = microbatches[index] if index < len(microbatches) else empty_microbatch()
        states = at_targets(model, microbatch)
        loss = loss_of(model, microbatch, states, num_tokens)
        if critic is not None:  # through the trunk of the policy, where the critic is a head
            errors = critic.values(microbatch, states) - torch.from_numpy(microbatch.advantages)
            loss = loss + errors.square().sum() / num_tokens
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


@torch.no_grad()
def logits_of(model: Transformer) -> np.ndarray:
    """Of one short sequence, [9, V]."""
    return model.logits(model(torch.arange(9), torch.arange(9), PackedAttention([9]))).numpy()


def boxes(model: Transformer, tensors: dict[str, Tensor]) -> Boxes:
    """This rank's `tensors`, by parameter name, as parts of the checkpoint."""
    return [(part.box, part.of(tensors[part.parameter]).numpy().copy()) for part in local_parts(model)]


def assembled(by_rank: Sequence[Boxes]) -> dict[str, np.ndarray]:
    """The whole tensors; what several ranks hold must be equal to the bit."""
    whole: dict[str, np.ndarray] = {}
    for box, part in (one for parts in by_rank for one in parts):
        tensor = whole.setdefault(box.name, np.full(box.shape, np.nan, dtype=np.float32))
        old = tensor[box.slices]
        is_new = np.isnan(old)
        assert is_new.all() or np.array_equal(old, part), f"ranks differ in {box}"
        tensor[box.slices] = part
    for name, tensor in whole.items():
        assert not np.isnan(tensor).any(), name
    return whole


# Jobs


def train(rank: Rank, config: TransformerConfig, layout: Layout, settings: dict[str, Any], num_updates: int) -> Trained:
    division, ranks = division_of(rank, layout), axes_of(rank, layout).data
    model = part_of(config, division)
    parameters = ShardedParameters(model, division)
    optimizer = AdamW(parameters, OptimizerConfig(**settings), total_updates=num_updates)
    seen = Trained()
    for update in range(num_updates):
        sequences = sequences_of(update, config.vocab_size)
        loss = update_from(model, optimizer, sequences, layout, ranks)
        seen.losses.append(float(ranks.sum(torch.tensor(loss, dtype=torch.float64))))
        if update == 0:
            optimizer.finite_grad_norm()
            seen.first_gradient = boxes(model, named_grads(parameters))
        seen.grad_norms.append(optimizer.step())
    seen.weights = boxes(model, parameters.named_views())
    seen.moments = boxes(model, optimizer.named_moments()["exp_avg"])
    return seen


def train_alone(config: TransformerConfig, settings: dict[str, Any], num_updates: int) -> Trained:
    """The oracle: one rank with the whole model, stored flat."""
    model = whole_model(config)
    flat = FlatParameters(model)
    optimizer = AdamW(flat, OptimizerConfig(**settings), total_updates=num_updates)
    seen = Trained()
    for update in range(num_updates):
        sequences = sequences_of(update, config.vocab_size)
        seen.losses.append(update_from(model, optimizer, sequences, Layout(1, 1), RankGroup.alone()))
        if update == 0:
            seen.first_gradient = _whole(config, flat.grad)
        seen.grad_norms.append(optimizer.step())
    seen.weights = _whole(config, flat.flat)
    moments = optimizer.named_moments()["exp_avg"].values()
    seen.moments = _whole(config, torch.cat([view.flatten() for view in moments]))
    return seen


def _whole(config: TransformerConfig, flat: Tensor) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in whole_tensors(config, flat).items()}


def train_with_torch(config: TransformerConfig, settings: dict[str, Any], num_updates: int) -> Trained:
    """Another oracle: torch's AdamW with two groups, and its clipping."""
    model = whole_model(config)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings["lr"], betas=settings["betas"], eps=settings["eps"])
    seen = Trained()
    for update in range(num_updates):
        sequences = sequences_of(update, config.vocab_size)
        optimizer.zero_grad()
        num_tokens = sum(sequence.num_targets for sequence in sequences)
        for sequence in sequences:  # each alone
            [microbatch] = collate([sequence], 64)
            torch.autograd.backward(loss_of(model, microbatch, at_targets(model, microbatch), num_tokens))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings["max_grad_norm"])
        seen.grad_norms.append(float(norm))
        optimizer.step()
    seen.weights = {name: tensor.detach().numpy().copy() for name, tensor in logical_tensors(model).items()}
    return seen


def load(rank: Rank, folder: str, layout: Layout) -> Boxes:
    model = load_sharded(folder, division_of(rank, layout))
    return boxes(model, ShardedParameters(model, division_of(rank, layout)).named_views())


def fresh(rank: Rank, config: TransformerConfig, seed: int, layout: Layout) -> Boxes:
    model = new_sharded(config, seed, division_of(rank, layout))
    return boxes(model, ShardedParameters(model, division_of(rank, layout)).named_views())


def resume(rank: Rank, config: TransformerConfig, layout: Layout, settings: dict[str, Any]) -> tuple[Boxes, Boxes]:
    """Weights after 4 updates at a stretch, and after 2 and 2 with another model and optimizer."""
    division = division_of(rank, layout)
    results = []
    for starts in ([0], [0, 2]):
        kept: tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], int] | None = None
        for start in starts:
            model = part_of(config, division)
            parameters = ShardedParameters(model, division)
            optimizer = AdamW(parameters, OptimizerConfig(**settings), total_updates=8)
            if kept is not None:
                with torch.no_grad():
                    model(torch.arange(3), torch.arange(3), PackedAttention([3]))  # leaves old weights gathered
                live = {"weights": parameters.named_views(), **optimizer.named_moments()}
                for kind, views in live.items():
                    for name, view in views.items():
                        view.copy_({"weights": kept[0], **kept[1]}[kind][name])
                optimizer.resumed(kept[2])
            for update in range(start, 4 if len(starts) == 1 else start + 2):
                update_from(model, optimizer, sequences_of(update, config.vocab_size), layout, division.data_parallel)
                optimizer.step()
            kept = parameters.named_views(), optimizer.named_moments(), optimizer.num_updates
        results.append(boxes(model, parameters.named_views()))
    return results[0], results[1]


def measure_between(rank: Rank, config: TransformerConfig, layout: Layout) -> tuple[list[np.ndarray], Boxes]:
    """Logits without gradients before and after an update, and the weights that it left."""
    division = division_of(rank, layout)
    model = part_of(config, division)
    parameters = ShardedParameters(model, division)
    optimizer = AdamW(parameters, OptimizerConfig(lr=0.05), total_updates=8)
    seen = [logits_of(model)]
    update_from(model, optimizer, sequences_of(0, config.vocab_size), layout, division.data_parallel)
    seen.append(logits_of(model))  # old weights stay gathered over the update
    optimizer.step()
    seen.append(logits_of(model))
    return seen, boxes(model, parameters.named_views())


def poison(rank: Rank, config: TransformerConfig, layout: Layout, value: float) -> tuple[str, bool]:
    """A number of the last rank's gradient is `value`: the error here, and whether weights and state are as before."""
    division = division_of(rank, layout)
    model = part_of(config, division)
    parameters = ShardedParameters(model, division)
    optimizer = AdamW(parameters, OptimizerConfig(weight_decay=0.1), total_updates=8)
    for update in range(2):
        update_from(model, optimizer, sequences_of(update, config.vocab_size), layout, division.data_parallel)
        if update == 0:
            optimizer.step()
    live = {**parameters.named_views(), **{f"m {n}": m for n, m in optimizer.named_moments()["exp_avg"].items()}}
    before = {name: tensor.clone() for name, tensor in live.items()}
    if rank.rank == rank.world - 1:
        named_grads(parameters)["layers.1.up.weight"].view(-1)[0] = value
    try:
        optimizer.step()
    except NonFiniteError as error:
        return str(error), all(torch.equal(before[name], tensor) for name, tensor in live.items())
    return "", False


def count_reductions(rank: Rank, config: TransformerConfig, layout: Layout) -> tuple[int, int]:
    """(backward passes, reduce-scatters) of one update."""
    division = division_of(rank, layout)
    model = part_of(config, division)
    parameters = ShardedParameters(model, division)
    optimizer = AdamW(parameters, OptimizerConfig(), total_updates=1)
    passes: list[Tensor] = []
    model.final_norm.register_full_backward_pre_hook(lambda _module, grads: passes.append(grads[0]))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        update_from(model, optimizer, sequences_of(0, config.vocab_size), layout, division.data_parallel)
    names = [event.name for event in seen.events()]
    return len(passes), names.count("c10d::_reduce_scatter_base_")


def train_critic(
    rank: Rank, config: TransformerConfig, layout: Layout, run: RunConfig, num_updates: int
) -> tuple[Boxes, dict[str, Any], list[float]]:
    """The critic after updates of policy and critic: its trunk, its other weights by name, and its gradients' norms."""
    division = division_of(rank, layout)
    model = part_of(config, division)
    optimizer = AdamW(ShardedParameters(model, division), run.critic.optimizer, total_updates=num_updates)
    critic = Critic(run, model, division)
    norms = []
    for update in range(num_updates):
        sequences = sequences_of(update, config.vocab_size)
        update_from(model, optimizer, sequences, layout, division.data_parallel, critic)
        norms.append(critic.optimizer.finite_grad_norm())
        optimizer.step()
        assert critic.optimizer.step() == norms[-1], "sums over ranks are made once"
    views = critic.parameters.named_views()
    others = {name: view.numpy().copy() for name, view in views.items() if not name.startswith("backbone.")}
    trunk = {name.removeprefix("backbone."): view for name, view in views.items() if name.startswith("backbone.")}
    held = boxes(critic.module.backbone, trunk) if isinstance(critic.module, ScalarModel) else []
    return held, others, norms


def train_critic_alone(
    config: TransformerConfig, run: RunConfig, num_updates: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[float]]:
    """The oracle of `train_critic`: a critic beside a whole policy."""
    model = whole_model(config)
    optimizer = AdamW(FlatParameters(model), run.critic.optimizer, total_updates=num_updates)
    critic = Critic(run, model)
    norms = []
    for update in range(num_updates):
        sequences = sequences_of(update, config.vocab_size)
        update_from(model, optimizer, sequences, Layout(1, 1), RankGroup.alone(), critic)
        optimizer.step()
        norms.append(critic.optimizer.step())
    trunk = {}
    if isinstance(critic.module, ScalarModel):
        trunk = {name: t.numpy().copy() for name, t in logical_tensors(critic.module.backbone).items()}
    named = critic.module.named_parameters()
    others = {name: p.detach().numpy().copy() for name, p in named if not name.startswith("backbone.")}
    return trunk, others, norms
