"""Causal attention inside each of several packed sequences, forward and backward, without a mask.

On CUDA in bfloat16 it is one call of torch's `varlen_attn` (FlashAttention), which takes sequences end to end;
elsewhere sequences of similar length are padded to batches.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ShapeError
from slipstream.core.packed import sent
from slipstream.models.experts import replayed

logger = logging.getLogger(__name__)

MAX_FLASH_ERROR = 0.05
"""Of what is largest: bfloat16 gives less than 0.01, keys in wrong places 0.3 and more."""
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


class SequenceEnds(NamedTuple):
    """Sequences end to end: from where to where their queries lie, int32 [C + 1], and their keys; the most of each.

    Queries are the rows themselves, each in the sequence that it is first in, which it is at the end of. Keys are the
    rows `source` [T] (None: the rows as they are); the key of row n is at `places` from `starts[n]` on.
    """

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    num_rows: int
    source: Tensor | None
    places: Tensor | None
    starts: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], rows: Tensor | None) -> SequenceEnds | None:
        """None where rows do not lie like this: sequences with rows of their own before shared ones."""
        size = torch.tensor(lengths)
        if rows is None:
            ends = bounds(size)
            return cls(ends, ends, max(lengths), max(lengths), sum(lengths), None, None, None)
        num_rows = int(rows.max()) + 1
        parts = torch.split(rows, list(lengths))
        seen = torch.tensor([-1, *(int(part.max()) for part in parts)]).cummax(0).values
        own = seen.diff()  # rows are numbered as they come
        is_read = own > 0
        if not torch.equal(
            torch.cat([part[len(part) - count :] for part, count in zip(parts, own.tolist(), strict=True)]),
            torch.arange(num_rows),
        ):
            return None
        source = torch.cat([part for part, one in zip(parts, is_read.tolist(), strict=True) if one])
        index = _Index.of_rows(source, torch.arange(len(source)), torch.arange(len(source)))
        size = size[is_read]
        most = int(own.max()), int(size.max())
        return cls(bounds(own[is_read]), bounds(size), *most, num_rows, source, index.places, index.starts)

    def to(self, device: torch.device) -> SequenceEnds:
        return SequenceEnds(*(sent(one, device) if isinstance(one, Tensor) else one for one in self))  # type: ignore[arg-type]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.source is not None:
            spread = (self.source, self.places, self.starts)
            k, v = _Pad.apply(k, *spread), _Pad.apply(v, *spread)  # type: ignore[no-untyped-call]
        return flash(q, k, v, self.queries, self.keys, self.most_queries, self.most_keys)


def bounds(sizes: Tensor) -> Tensor:
    return F.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)


def flash(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: Tensor, most_queries: int, most_keys: int) -> Tensor:
    """Attention of q [N, H, D] to k and v [T, Hkv, D], sequences end to end, whose last query sees the last key."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    words: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        words["enable_gqa"] = q.shape[1] != k.shape[1]
    out = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), queries, keys, most_queries, most_keys, **words)
    assert isinstance(out, Tensor)
    return out


def takes_flash(q: Tensor, k: Tensor) -> bool:
    """Tell whether the device of q [N, H, D] and k [N, Hkv, D] has `flash` for them."""
    if q.is_cpu or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    return not q.is_cuda or flash_is_right(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])


@functools.cache
def flash_is_right(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Tell whether `flash` gives what padded sequences do on `device`, forward and backward, on a small example.

    In a thread of its own, for a layer that will run again would take the example for a part of its first run.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_try_flash, device, dtype, heads, kv_heads, head_dim).result()


def _try_flash(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    lengths, rows = [5, 4, 3], torch.tensor([0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9])
    ends, padded = SequenceEnds.of(lengths, rows), PackedAttention(lengths, rows).padded
    assert ends is not None, "each has rows of its own behind shared ones"
    fused = torch.randn(10, heads + 2 * kv_heads, head_dim, generator=torch.Generator().manual_seed(0))
    found = []
    try:
        for attend, wide in ((ends.to(device).attend, dtype), (padded, torch.float32)):
            leaf = fused.to(device, dtype).to(wide, copy=True).requires_grad_()
            out = attend(*torch.split(leaf, [heads, kv_heads, kv_heads], 1))
            found.append((out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]))
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        logger.warning("attention pads its sequences: torch %s has no varlen_attn here (%s)", torch.__version__, error)
        return False
    errors = [(one - exact).abs().max() / exact.abs().max() for one, exact in zip(*found, strict=True)]
    is_right = float(torch.stack(errors).max()) < MAX_FLASH_ERROR
    if not is_right:
        logger.warning("attention pads its sequences: varlen_attn of torch %s gives other numbers", torch.__version__)
    return is_right


class PackedAttention:
    """Causal attention inside each of several sequences of `lengths` tokens (sum T) that lie in N packed rows.

    `rows` int64 [T] holds the row of every token, sequence after sequence; by default they lie end to end, each row
    its own. Sequences may share the rows of a common prefix: what a row sees is the same in all of them, so its output
    is taken from the first, and its key and value get the gradients of all.

    Sequences of similar length are gathered into right-padded batches for `scaled_dot_product_attention(is_causal)`,
    which needs no mask: padding lies after every real query. The index tensors are computed once, here, follow the
    tokens to their device, and serve every layer. With `varlen` half precision on CUDA is one call of `flash` instead,
    where the rows lie so (`SequenceEnds`), as those of a microbatch do, and it is right there. `routes` [R, L, k] are
    the experts that the first R rows go through in each layer, as far as they are known (`experts.replayed`).
    Identity: packed, shared or not, equals each sequence alone.
    """

    def __init__(
        self, lengths: Sequence[int], rows: Tensor | None = None, routes: Tensor | None = None, *, varlen: bool = False
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ShapeError("every packed sequence needs at least one token", got=list(lengths))
        self._lengths, self._rows, self._routes, self._varlen = lengths, rows, routes, varlen
        if not varlen:
            self._index  # noqa: B018 - rows that do not fit are refused here

    @functools.cached_property
    def _ends(self) -> SequenceEnds | None:
        return SequenceEnds.of(self._lengths, self._rows)

    @functools.cached_property
    def _index(self) -> _Index:
        lengths, rows = self._lengths, self._rows
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
        return _Index(source, places, places, None) if rows is None else _Index.of_rows(rows, source, places)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 - the Attention protocol
        """q [N, H, D], k and v [N, Hkv, D] -> [N, H, D]."""
        if self._varlen and takes_flash(q, k) and self._ends is not None:
            self._ends = ends = self._ends.to(q.device)
            if q.shape[0] != ends.num_rows:
                raise ShapeError("tokens do not match the packed lengths", got=q.shape[0], allowed=ends.num_rows)
            return ends.attend(q, k, v)
        return self.padded(q, k, v)

    def padded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend by batches of similar length."""
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
