"""Batch -> minibatches -> microbatches (M7), and greedy collation (M8)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.packed import PackedMicrobatch, TrainSequence
from slipstream.core.types import Group


def split_minibatches(groups: Sequence[Group], num_minibatches: int) -> list[list[Group]]:
    """Deal whole groups, in canonical order, into parts whose sizes differ by at most one.

    Dealt like cards, so that each part has old and new groups alike. ConfigError if a part would be empty.
    """
    if num_minibatches > len(groups):
        raise ConfigError(
            "a minibatch needs at least one group",
            got=f"minibatches = {num_minibatches} with {len(groups)} groups",
            allowed=f"1..{len(groups)}",
            hint="lower trainer.minibatches or raise groups_per_step",
        )
    canonical = sorted(groups, key=lambda group: group.ordinal)
    return [canonical[part::num_minibatches] for part in range(num_minibatches)]


def first_fit(lengths: Sequence[int], keys: Sequence[tuple[int, int]], capacity_tokens: int) -> list[list[int]]:
    """Indices of atoms per microbatch: longest first, each into the first microbatch with room, else a new one.

    Magistral's greedy collation (M8). Ties in length go by `keys`, so the result does not depend on the order of the
    input. An atom longer than the capacity gets a microbatch of its own: atoms are never split.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], keys[i])):
        length = lengths[index]
        place = next((b for b, free in enumerate(room) if free >= length), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(capacity_tokens)
        bins[place].append(index)
        room[place] -= length
    return bins


def collate(sequences: Sequence[TrainSequence], capacity_tokens: int) -> list[PackedMicrobatch]:
    """Pack sequences into microbatches of at most `capacity_tokens` input tokens (M8).

    Sequences without a token to train on are left out: they would add nothing to any loss.
    """
    trained = [sequence for sequence in sequences if sequence.num_targets]
    bins = first_fit([s.num_inputs for s in trained], [s.key for s in trained], capacity_tokens)
    return [_pack([trained[index] for index in members]) for members in bins]


def _pack(sequences: Sequence[TrainSequence]) -> PackedMicrobatch:
    lengths = tuple(sequence.num_inputs for sequence in sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
    trained = [np.flatnonzero(sequence.mask) for sequence in sequences]

    def of_targets(name: str, dtype: type) -> np.ndarray:
        columns = [vars(sequence)[name][index] for sequence, index in zip(sequences, trained, strict=True)]
        return np.concatenate(columns).astype(dtype)

    return PackedMicrobatch(
        tokens=np.concatenate([s.tokens[:n] for s, n in zip(sequences, lengths, strict=True)]).astype(np.int64),
        positions=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        lengths=lengths,
        target_index=np.concatenate([start + index - 1 for start, index in zip(starts, trained, strict=True)]),
        targets=of_targets("tokens", np.int64),
        behaviour_logprobs=of_targets("behaviour_logprobs", np.float32),
        advantages=of_targets("advantages", np.float32),
        versions=of_targets("versions", np.int64),
        segment_ids=np.repeat(np.arange(len(sequences), dtype=np.int64), [len(index) for index in trained]),
        keys=tuple(sequence.key for sequence in sequences),
    )


def padding_frac(microbatches: Sequence[PackedMicrobatch]) -> float:
    """Share of padding if all microbatches were filled up to the fullest one: what greedy collation keeps small (M8).

    Nothing is really padded; it is the idle share of ranks that run one microbatch each. One microbatch gives 0.
    """
    sizes = [microbatch.num_tokens for microbatch in microbatches]
    return 1.0 - sum(sizes) / (len(sizes) * max(sizes)) if sizes else 0.0


def padded_layout_frac(microbatches: Sequence[PackedMicrobatch]) -> float:
    """Share of padding in the rectangular layout [sequences, longest] of the same microbatches: what packing saves."""
    slots = sum(len(microbatch.lengths) * max(microbatch.lengths) for microbatch in microbatches)
    return 1.0 - sum(microbatch.num_tokens for microbatch in microbatches) / slots if slots else 0.0
