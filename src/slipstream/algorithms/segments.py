"""Sums and means over the sequences of a packed microbatch, differentiable and the same in every run.

`segment_ids` int64 [T] names each token's sequence: ascending from 0, so that a sequence is one contiguous piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.errors import ShapeError


def segment_sum(values: Tensor, mask: Tensor, segment_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """sum of `values` [T] where `mask` [T], per sequence: [S]; summed in float64, returned as `values` are.

    `lengths` int64 [S] count each sequence's tokens; without them, counting and checking waits for the device.

    Reads one piece after the other: additions at an index run in any order on a GPU, and on a CPU with several threads.
    ShapeError when the ids are not those of contiguous sequences.
    Identity: the result of a sequence does not depend on what else is packed with it.
    """
    if values.shape != segment_ids.shape or mask.shape != segment_ids.shape or values.ndim != 1:
        got = f"{tuple(values.shape)}, {tuple(mask.shape)} and {tuple(segment_ids.shape)}"
        raise ShapeError("values, mask and segment ids of the same tokens are needed", got=got)
    if lengths is None:
        if bool((segment_ids[1:] < segment_ids[:-1]).any()):
            raise ShapeError("segment ids must ascend: each sequence one contiguous piece", got=segment_ids.tolist())
        lengths = torch.bincount(segment_ids)
    counted = torch.where(mask, values, 0.0).double()
    # `unsafe` skips a check of the lengths that fails on an empty batch; bincount's fit by construction.
    return torch.segment_reduce(counted, "sum", lengths=lengths, unsafe=True).to(values.dtype)


def segment_counts(mask: Tensor, segment_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Number of tokens where `mask` [T], per sequence: float32 [S]."""
    return segment_sum(torch.ones(mask.shape, device=mask.device, dtype=torch.float32), mask, segment_ids, lengths)


def segment_mean(values: Tensor, mask: Tensor, segment_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Mean of `values` [T] where `mask` [T], per sequence: [S]; 0 for a sequence without any.

    Identity: a sequence of equal values gets exactly that value.
    """
    counts = segment_counts(mask, segment_ids, lengths).clamp(min=1.0)
    return segment_sum(values.double(), mask, segment_ids, lengths).div(counts).to(values.dtype)


def sum_before(values: Tensor, mask: Tensor, segment_ids: Tensor) -> Tensor:
    """Sum of `values` [T] where `mask` [T], over the tokens before each one in its own sequence: float64 [T].

    Identity: 0 at the first token of a sequence; plus the token's own value, the sum up to it.
    """
    counted = torch.where(mask, values, 0.0).double()
    before = counted.cumsum(0) - counted
    is_first = torch.ones_like(mask)
    is_first[1:] = segment_ids[1:] != segment_ids[:-1]
    first = torch.arange(len(mask), device=mask.device).where(is_first, 0).cummax(0).values
    return before - before[first]
