"""What ranks do to train together, and what one does alone: the same updates from the same sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rank_models import whole_model
from rank_pool import Rank
from torch import Tensor

from slipstream.batching.collate import collate
from slipstream.core.config import OptimizerConfig
from slipstream.core.packed import PackedMicrobatch, TrainSequence, empty_microbatch
from slipstream.core.ranks import RankGroup, data_parallel_rank
from slipstream.models.config import TransformerConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors
from slipstream.models.sharded import Division, ShardedParameters, divide, sum_gradients
from slipstream.models.shards import Box, load_shard, local_parts
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer
from slipstream.trainer.optim import FlatAdamW, Optimizer
from slipstream.trainer.sharded_optim import ShardedAdamW
from slipstream.trainer.step import microbatch_logprobs

Boxes = list[tuple[Box, np.ndarray]]
_GROUPS: dict[tuple[int, int], tuple[RankGroup, RankGroup]] = {}


@dataclass(frozen=True)
class Layout:
    """Data-parallel x tensor-parallel ranks, and how they work."""

    data_parallel: int
    tensor_parallel: int
    recomputes: bool = False
    one_reduction: bool = False  # per update, not per microbatch
    precision: Any = "float32"

    @property
    def world(self) -> int:
        return self.data_parallel * self.tensor_parallel


@dataclass
class Trained:
    """What a run of updates showed; arrays by box on a rank, by whole tensor on one alone."""

    first_gradient: Any = None
    weights: Any = None
    moments: Any = None
    grad_norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def division_of(rank: Rank, layout: Layout) -> Division:
    """Process groups are made once for all jobs."""
    key = (layout.world, layout.tensor_parallel)
    if key not in _GROUPS:
        everyone = RankGroup.over(rank.group)
        if layout.tensor_parallel == 1:
            _GROUPS[key] = everyone, RankGroup.alone()
        elif layout.data_parallel == 1:
            _GROUPS[key] = RankGroup.alone(), everyone
        else:
            _GROUPS[key] = everyone.split(layout.tensor_parallel)
    return Division(*_GROUPS[key], precision=layout.precision, recomputes=layout.recomputes)


def part_of(config: TransformerConfig, division: Division) -> Transformer:
    ranks = division.ranks_of(config)
    model = Transformer(ranks.local_config if isinstance(ranks, TensorParallel) else config, ranks)
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


def loss_of(model: Transformer, microbatch: PackedMicrobatch, num_tokens: int) -> Tensor:
    """A policy gradient, and some of the entropy's."""
    logprobs, entropies = microbatch_logprobs(model, microbatch, temperature=1.0)
    return -(logprobs * torch.from_numpy(microbatch.advantages) + 0.1 * entropies).sum() / num_tokens


def update_from(
    model: Transformer, optimizer: Optimizer, sequences: Sequence[TrainSequence], layout: Layout, ranks: RankGroup
) -> float:
    """Gradients of all `sequences`, of which this rank reads its own; this rank's part of the loss."""
    num_tokens = sum(sequence.num_targets for sequence in sequences)
    own = [s for s in sequences if data_parallel_rank(*s.key, ranks.world, by="samples") == ranks.rank]
    microbatches = collate(own, 64)
    num_passes = int(ranks.max(torch.tensor(len(microbatches))))
    optimizer.zero_grad()
    total = 0.0
    for index in range(num_passes):
        if layout.one_reduction:
            sum_gradients(model, index == num_passes - 1)
        microbatch = microbatches[index] if index < len(microbatches) else empty_microbatch()
        loss = loss_of(model, microbatch, num_tokens)
        torch.autograd.backward(loss)
        total += float(loss.detach())
    return total


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
    division = division_of(rank, layout)
    model = part_of(config, division)
    parameters = ShardedParameters(model, division)
    optimizer = ShardedAdamW(parameters, OptimizerConfig(**settings), total_updates=num_updates)
    seen = Trained()
    for update in range(num_updates):
        sequences = sequences_of(update, config.vocab_size)
        loss = update_from(model, optimizer, sequences, layout, division.data_parallel)
        seen.losses.append(float(division.data_parallel.sum(torch.tensor(loss, dtype=torch.float64))))
        if update == 0:
            optimizer.finite_grad_norm()
            seen.first_gradient = boxes(model, parameters.named_grads())
        seen.grad_norms.append(optimizer.step())
    seen.weights = boxes(model, parameters.named_views())
    seen.moments = boxes(model, optimizer.named_moments()["exp_avg"])
    return seen


def train_alone(config: TransformerConfig, settings: dict[str, Any], num_updates: int) -> Trained:
    """The oracle: one rank, the whole model, `FlatAdamW`."""
    model = whole_model(config)
    flat = FlatParameters(model)
    optimizer = FlatAdamW(model, flat, OptimizerConfig(**settings), total_updates=num_updates)
    seen = Trained()
    for update in range(num_updates):
        sequences = sequences_of(update, config.vocab_size)
        seen.losses.append(update_from(model, optimizer, sequences, Layout(1, 1), RankGroup.alone()))
        if update == 0:
            seen.first_gradient = _whole(config, optimizer.grad)
        seen.grad_norms.append(optimizer.step())
    seen.weights = _whole(config, flat.flat)
    seen.moments = _whole(config, optimizer.state_dict()["exp_avg"])
    return seen


def _whole(config: TransformerConfig, flat: Tensor) -> dict[str, np.ndarray]:
    from slipstream.models.shards import whole_tensors

    return {name: tensor.numpy().copy() for name, tensor in whole_tensors(config, flat).items()}
