"""Causal attention inside each of several packed sequences, forward and backward, without a mask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ShapeError

BATCH_OVERHEAD_TOKENS = 32
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
    """Partition sequence indices into batches of similar length, minimising padded tokens + `overhead` per batch.

    Dynamic programming over the distinct lengths in ascending order: an optimal batch is a range of them.
    """
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    distinct = sorted(by_length)
    below = [0, *itertools.accumulate(len(by_length[length]) for length in distinct)]  # sequences of shorter lengths
    cost, start = [0], [0]  # cost[j]: of batching the j smallest lengths; start[j]: where their last batch starts
    for j, longest in enumerate(distinct, 1):
        best = min(range(j), key=lambda i: cost[i] - below[i] * longest)
        cost.append(cost[best] + (below[j] - below[best]) * longest + overhead)
        start.append(best)
    batches, j = [], len(distinct)
    while j:
        batches.append([index for length in distinct[start[j] : j] for index in by_length[length]])
        j = start[j]
    return batches


class PackedAttention:
    """Causal attention inside each of the consecutive sequences of `lengths` tokens (sum = N).

    Sequences of similar length are gathered into right-padded batches for `scaled_dot_product_attention(is_causal)`,
    which needs no mask: padding lies after every real query. The index tensors are computed once, here, follow the
    tokens to their device, and serve every layer. Identity: packed equals each sequence alone.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        if not lengths or min(lengths) < 1:
            raise ShapeError("every packed sequence needs at least one token", got=list(lengths))
        self.num_tokens = sum(lengths)
        self.shapes: list[tuple[int, int]] = []  # (sequences, padded length) of each batch
        size = torch.tensor(lengths)
        begin = size.cumsum(0) - size
        sources, is_real = [], []
        for batch in length_batches(lengths):
            sizes = size[batch, None]
            within = torch.arange(int(sizes.max()))
            sources.append((begin[batch, None] + within.minimum(sizes - 1)).flatten())
            is_real.append((within < sizes).flatten())
            self.shapes.append((len(batch), len(within)))
        self._source = torch.cat(sources)  # [M]: the row each padded place shows
        real_places = torch.cat(is_real).nonzero().squeeze(1)
        self._place = torch.empty(self.num_tokens, dtype=torch.int64)  # [N]: the padded place of each row
        self._place[self._source[real_places]] = real_places

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 - the Attention protocol
        """q [N, H, D], k and v [N, Hkv, D] -> [N, H, D]."""
        if q.shape[0] != self.num_tokens:
            raise ShapeError("tokens do not match the packed lengths", got=q.shape[0], allowed=self.num_tokens)
        self._source, self._place = self._source.to(q.device), self._place.to(q.device)
        is_grouped = q.shape[1] != k.shape[1]
        batches = zip(self.shapes, self._pad(q), self._pad(k), self._pad(v), strict=True)
        mixed = []
        for shape, *qkv in batches:
            q_batch, k_batch, v_batch = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in qkv)  # [B, heads, T, D]
            out = F.scaled_dot_product_attention(q_batch, k_batch, v_batch, is_causal=True, enable_gqa=is_grouped)
            mixed.append(out.transpose(1, 2).flatten(0, 1))
        unpadded: Tensor = _Unpad.apply(torch.cat(mixed), self._place)  # type: ignore[no-untyped-call]
        return unpadded

    def _pad(self, rows: Tensor) -> tuple[Tensor, ...]:
        padded: Tensor = _Pad.apply(rows, self._source, self._place)  # type: ignore[no-untyped-call]
        return torch.split(padded, [sequences * length for sequences, length in self.shapes])
