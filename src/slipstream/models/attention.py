"""Causal attention inside each of several packed sequences, forward and backward, without a mask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ShapeError
from slipstream.core.packed import sent
from slipstream.models.experts import replayed

BATCH_OVERHEAD_TOKENS = 32
"""The cost of one more batch, in padded tokens: a larger value gives fewer batches with more padding."""


class _Pad(torch.autograd.Function):
    """Rows [N, H, D] -> padded rows [M, H, D]; the gradient of a row is the sum over its own places.

    `places` lists them row by row and `starts` [N] says where each row's begin; None: one place each, and the sum is an
    index_select again. That is the true gradient because filler rows get none: a real query never sees a filler key,
    and what a filler query returns is never read. (index_select's own backward is an index_add, several times slower
    on a CPU.) Sums run in the order of `places`, whatever the number of threads: the same bits every time.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, places: Tensor, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, starts)
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        places, starts = ctx.saved_tensors
        if starts is None:
            return grad.index_select(0, places), None, None, None
        summed = F.embedding_bag(places, grad.flatten(1), starts, mode="sum")
        return summed.view(-1, *grad.shape[1:]), None, None, None


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


class _Index(NamedTuple):
    """Between N rows and M padded places: what a place shows, and where a row is shown.

    `source` [M] is the row in each place; `place` [N] the place where a row's output is read, its first; `places` [T]
    are all its places, row by row from `starts` [N], which is None when every row has one only.
    """

    source: Tensor
    place: Tensor
    places: Tensor
    starts: Tensor | None

    @classmethod
    def of_rows(cls, rows: Tensor, source: Tensor, places: Tensor) -> _Index:
        """`rows` [T]: the row of each token; `source` [M]: the token in each place; `places` [T]: the place of each."""
        if rows.shape != places.shape:
            raise ShapeError("one row is needed per token", got=tuple(rows.shape), allowed=tuple(places.shape))
        counts = rows.bincount()
        if not counts.all():
            raise ShapeError("every row needs a token", got=f"none in row {int(counts.argmin())}")
        starts = counts.cumsum(0) - counts
        places = places[rows.argsort(stable=True)]
        return cls(rows[source], places[starts], places, None if len(starts) == len(places) else starts)

    def to(self, device: torch.device) -> _Index:
        return _Index(*(None if one is None else sent(one, device) for one in self))  # type: ignore[arg-type]

    def pad(self, rows: Tensor, places: Tensor, starts: Tensor | None) -> Tensor:
        padded: Tensor = _Pad.apply(rows, self.source, places, starts)  # type: ignore[no-untyped-call]
        return padded


class PackedAttention:
    """Causal attention inside each of several sequences of `lengths` tokens (sum T) that lie in N packed rows.

    `rows` int64 [T] holds the row of every token, sequence after sequence; by default they lie end to end, each row
    its own. Sequences may share the rows of a common prefix: what a row sees is the same in all of them, so its output
    is taken from the first, and its key and value get the gradients of all.

    Sequences of similar length are gathered into right-padded batches for `scaled_dot_product_attention(is_causal)`,
    which needs no mask: padding lies after every real query. The index tensors are computed once, here, follow the
    tokens to their device, and serve every layer. `routes` [R, L, k] are the experts that the first R rows go through
    in each layer, as far as they are known (`experts.replayed`).
    Identity: packed, shared or not, equals each sequence alone.
    """

    def __init__(self, lengths: Sequence[int], rows: Tensor | None = None, routes: Tensor | None = None) -> None:
        if not lengths or min(lengths) < 1:
            raise ShapeError("every packed sequence needs at least one token", got=list(lengths))
        self._routes = routes
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
        source = torch.cat(sources)  # [M]: the token each padded place shows
        real_places = torch.cat(is_real).nonzero().squeeze(1)
        places = torch.empty(sum(lengths), dtype=torch.int64)  # [T]: the padded place of each token
        places[source[real_places]] = real_places
        if rows is None:
            self._index = _Index(source, places, places, None)
        else:
            self._index = _Index.of_rows(rows, source, places)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 - the Attention protocol
        """q [N, H, D], k and v [N, Hkv, D] -> [N, H, D]."""
        self._index = index = self._index.to(q.device)
        if q.shape[0] != len(index.place):
            raise ShapeError("tokens do not match the packed lengths", got=q.shape[0], allowed=len(index.place))
        is_grouped = q.shape[1] != k.shape[1]
        # A query's output is read from one place only, so its gradient is there.
        padded = (index.pad(q, index.place, None), *(index.pad(x, index.places, index.starts) for x in (k, v)))
        sizes = [sequences * length for sequences, length in self.shapes]
        mixed = []
        for shape, *qkv in zip(self.shapes, *(torch.split(x, sizes) for x in padded), strict=True):
            q_batch, k_batch, v_batch = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in qkv)  # [B, heads, T, D]
            out = F.scaled_dot_product_attention(q_batch, k_batch, v_batch, is_causal=True, enable_gqa=is_grouped)
            mixed.append(out.transpose(1, 2).flatten(0, 1))
        unpadded: Tensor = _Unpad.apply(torch.cat(mixed), index.place)  # type: ignore[no-untyped-call]
        return unpadded

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Replay what is known of the experts [N, k] of `layer`."""
        if self._routes is None:
            return chosen
        self._routes = sent(self._routes, chosen.device)
        known = replayed(self._routes[:, layer], chosen[: len(self._routes)])
        return torch.cat((known, chosen[len(known) :]))
