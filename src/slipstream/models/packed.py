"""A model over a packed microbatch: what it computes at the rows from which targets are predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.core.packed import PackedMicrobatch, sent
from slipstream.models.attention import PackedAttention

ROW_MULTIPLE = 64
"""Rows of a microbatch are filled up to a multiple: oneDNN compiles a kernel for every number of rows it meets."""


def at_targets(model: nn.Module, microbatch: PackedMicrobatch, *, replays: bool = False) -> Tensor:
    """`model(tokens, positions, attention)` [N, ...] at the M rows that the targets are predicted from: [M, ...].

    A prompt shared by several completions is read once. Filler rows are further sequences, which nobody reads.
    With `replays` tokens go through the experts that the engine chose, where the microbatch knows them.
    """
    device, varlen = next(model.parameters()).device, bool(model.varlen)
    out = model(*packed_inputs(microbatch, device, num_rows=filled_rows([microbatch]), replays=replays, varlen=varlen))
    return target_rows(out, microbatch)


def filled_rows(microbatches: Sequence[PackedMicrobatch]) -> int:
    """Return the rows that the longest of `microbatches` is filled up to."""
    return max(-(-microbatch.num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE for microbatch in microbatches)


def packed_inputs(
    microbatch: PackedMicrobatch, device: torch.device, *, num_rows: int, replays: bool, varlen: bool
) -> tuple[Tensor, Tensor, PackedAttention]:
    """Return tokens [N], positions [N] and attention of a microbatch that is filled up to N = `num_rows`.

    Fillers are sequences of at most ROW_MULTIPLE tokens, so that attending costs little there.
    """
    num_fillers = num_rows - microbatch.num_tokens
    filler = np.zeros(num_fillers, dtype=np.int64)
    lengths, rows = microbatch.lengths, microbatch.rows
    if num_fillers:
        whole, rest = divmod(num_fillers, ROW_MULTIPLE)
        lengths = (*lengths, *[ROW_MULTIPLE] * whole, *[rest] * (rest > 0))
        rows = np.concatenate([rows, microbatch.num_tokens + np.arange(num_fillers)])
    routes = torch.from_numpy(microbatch.routes) if replays and microbatch.routes is not None else None
    return (
        sent(np.concatenate([microbatch.tokens, filler]), device),
        sent(np.concatenate([microbatch.positions, filler]), device),
        PackedAttention(lengths, torch.from_numpy(rows), routes, varlen=varlen),
    )


def target_rows(out: Tensor, microbatch: PackedMicrobatch) -> Tensor:
    """Return the rows of `out` [N, ...] that the targets are predicted from: [M, ...]."""
    # A shared prompt's last row predicts several targets. The gradient of `out[index]` adds them up by atomic
    # additions, in any order, as soon as there are two threads; that of an embedding has one fixed order.
    index = sent(microbatch.target_index, out.device)
    return F.embedding(index, out.flatten(1) if out.ndim > 1 else out[:, None]).view(-1, *out.shape[1:])
