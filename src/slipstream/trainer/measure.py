"""What is measured on a batch before its first update: logprobs under frozen policies, and the critic's values.

One float32 per token that is trained on, by (ordinal, sample); nothing here is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import ShapeError
from slipstream.core.packed import Batching, PackedMicrobatch, TrainSequence, empty_microbatch
from slipstream.core.rank_group import RankGroup
from slipstream.core.types import Rollout

Key = tuple[int, int]  # (ordinal, sample)
Columns = dict[Key, np.ndarray]


@torch.no_grad()
def measure(
    read: Callable[[PackedMicrobatch], Tensor],
    sequences: Sequence[TrainSequence],
    *,
    microbatch_tokens: int,
    batching: Batching,
    ranks: RankGroup = RankGroup.alone(),
) -> Columns:
    """What `read` gives for the targets of each sequence, float32 [num_targets]; none for a sequence without targets.

    `read` maps a microbatch to [M], one number per target. `sequences` are this rank's own; all `ranks` call it.
    Identity: equals reading every sequence alone.
    """
    columns = {sequence.key: np.zeros(0, dtype=np.float32) for sequence in sequences}
    for microbatch in in_step(batching.collate(sequences, microbatch_tokens), ranks):
        read_values = read(microbatch).float().cpu().numpy()
        ends = np.cumsum(np.bincount(microbatch.segment_ids, minlength=len(microbatch.keys)))
        columns.update(zip(microbatch.keys, np.split(read_values, ends)[: len(ends)], strict=True))
    return columns


def brought(rollouts: Iterable[Rollout], sequences: Sequence[TrainSequence]) -> Columns:
    """The reference logprobs that `rollouts` have come with, for `sequences` of theirs.

    ShapeError where a rollout has none, or not one for each sampled token.
    """
    found = {(rollout.ordinal, rollout.sample): rollout.reference_logprobs for rollout in rollouts}
    columns: Columns = {}
    for sequence in sequences:
        logprobs = found[sequence.key]
        if logprobs is None or logprobs.shape != (sequence.num_targets,):
            raise ShapeError(
                "a rollout has to bring the reference's logprobs of its sampled tokens (kl.executor = 'own')",
                got=f"{'none' if logprobs is None else logprobs.shape} for (ordinal, sample) {sequence.key}",
                allowed=(sequence.num_targets,),
            )
        columns[sequence.key] = logprobs
    return columns


def in_step(microbatches: Sequence[PackedMicrobatch], ranks: RankGroup) -> list[PackedMicrobatch]:
    """`microbatches`, and empty ones behind them until every rank has as many as the one with most."""
    most = int(ranks.max(torch.tensor([len(microbatches)])))
    return filled(microbatches, most)


def filled(microbatches: Sequence[PackedMicrobatch], count: int) -> list[PackedMicrobatch]:
    """`microbatches` and empty ones, `count` in all."""
    return [*microbatches, *(empty_microbatch() for _ in range(count - len(microbatches)))]


def with_columns(sequence: TrainSequence, **columns: np.ndarray) -> TrainSequence:
    """`sequence` with these columns, each given for its targets: float32 [num_targets]. Without any, itself."""
    if not columns:
        return sequence
    spread: dict[str, Any] = {name: _spread(sequence, values) for name, values in columns.items()}
    return replace(sequence, **spread)


def _spread(sequence: TrainSequence, values: np.ndarray) -> np.ndarray:
    """float32 [T]: `values` on the targets of `sequence`, 0 elsewhere."""
    column = np.zeros(len(sequence.tokens), dtype=np.float32)
    column[sequence.mask] = values
    return column
