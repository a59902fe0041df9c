"""A model over a packed microbatch: what it computes at the rows from which targets are predicted."""

from __future__ import annotations

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

    Rows that contexts share are read once. Filler rows are one more sequence, which nobody reads.
    With `replays` tokens go through the experts that the engine chose, where the microbatch knows them.
    """
    num_rows = microbatch.num_tokens
    filler = np.zeros(-num_rows % ROW_MULTIPLE, dtype=np.int64)
    lengths, rows = microbatch.lengths, microbatch.rows
    if len(filler):
        lengths = (*lengths, len(filler))
        rows = np.concatenate([rows, num_rows + np.arange(len(filler))])
    device = next(model.parameters()).device
    routes = torch.from_numpy(microbatch.routes) if replays and microbatch.routes is not None else None
    out = model(
        sent(np.concatenate([microbatch.tokens, filler]), device),
        sent(np.concatenate([microbatch.positions, filler]), device),
        PackedAttention(lengths, torch.from_numpy(rows), routes, varlen=bool(model.varlen)),
    )
    # The last row that contexts share predicts several targets. The gradient of `out[index]` adds them up by atomic
    # additions, in any order, as soon as there are two threads; that of an embedding has one fixed order.
    index = sent(microbatch.target_index, device)
    return F.embedding(index, out.flatten(1) if out.ndim > 1 else out[:, None]).view(-1, *out.shape[1:])
