"""Causal attention inside each of several packed sequences, forward and backward, without a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ShapeError

BATCH_OVERHEAD_TOKENS = 128
"""What one more batch costs, in padded tokens: a larger value gives fewer batches with more padding."""


class _Pad(torch.autograd.Function):
    """Rows [N, H, D] -> padded rows [M, H, D]; the gradient picks each row's own place, an index_select again.

    That is the true gradient because filler rows get none: a real query never sees a filler key, and what a filler
    query returns is never read. (index_select's own backward is an index_add, several times slower on a CPU.)
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


class _Unpad(torch.autograd.Function):
    """Padded rows [M, H, D] -> rows [N, H, D]; the gradient goes back to each row's place and is zero on fillers."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.num_padded = padded.shape[0]
        return padded.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        padded = grad.new_zeros((ctx.num_padded, *grad.shape[1:]))
        return padded.index_copy_(0, place, grad), None


def length_batches(lengths: Sequence[int], overhead: int = BATCH_OVERHEAD_TOKENS) -> list[list[int]]:
    """Partition sequence indices into batches of similar length, minimising padded tokens + overhead per batch.

    Dynamic programming over the sequences sorted by length, where the best batches are contiguous; O(n^2).
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    cost, start = [0.0], [0]  # cost[j]: best cost of the j shortest; start[j]: where their last batch starts
    for j in range(1, len(order) + 1):
        longest = lengths[order[j - 1]]
        best = min(range(j), key=lambda i: cost[i] + (j - i) * longest)
        cost.append(cost[best] + (j - best) * longest + overhead)
        start.append(best)
    batches, j = [], len(order)
    while j:
        batches.append(order[start[j] : j])
        j = start[j]
    return batches


class PackedAttention:
    """Causal attention inside each of the consecutive sequences of `lengths` tokens (sum = N).

    Sequences of similar length are gathered into right-padded batches for `scaled_dot_product_attention(is_causal)`,
    which needs no mask: padding lies after every real query. The index tensors are computed once, here, and serve
    every layer. Identity: packed equals each sequence alone.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not lengths or min(lengths) < 1:
            raise ShapeError("every packed sequence needs at least one token", got=list(lengths))
        begins = [0]
        for length in lengths:
            begins.append(begins[-1] + length)
        self.num_tokens = begins[-1]
        self.shapes: list[tuple[int, int]] = []  # (sequences, padded length) of each batch
        sources, place, offset = [], torch.empty(self.num_tokens, dtype=torch.int64), 0
        for batch in length_batches(lengths):
            longest = max(lengths[i] for i in batch)
            within = torch.arange(longest)
            for i in batch:
                sources.append((begins[i] + within).clamp_(max=begins[i + 1] - 1))
                place[begins[i] : begins[i + 1]] = offset + within[: lengths[i]]
                offset += longest
            self.shapes.append((len(batch), longest))
        self.source = torch.cat(sources).to(device)  # [M]: the row each padded place shows
        self.place = place.to(device)  # [N]: the padded place of each row

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 - the Attention protocol
        """q [N, H, D], k and v [N, Hkv, D] -> [N, H, D]."""
        if q.shape[0] != self.num_tokens:
            raise ShapeError("tokens do not match the packed lengths", got=q.shape[0], allowed=self.num_tokens)
        grouped = q.shape[1] != k.shape[1]
        q, k, v = (_Pad.apply(x, self.source, self.place) for x in (q, k, v))
        sizes = [sequences * length for sequences, length in self.shapes]
        outputs = []
        for shape, *qkv in zip(self.shapes, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
            batch = [x.unflatten(0, shape).transpose(1, 2) for x in qkv]
            mixed = F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=grouped)
            outputs.append(mixed.transpose(1, 2).flatten(0, 1))
        return _Unpad.apply(torch.cat(outputs), self.place)
