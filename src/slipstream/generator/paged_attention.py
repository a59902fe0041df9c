"""Attention over pages: one new token per row in a decode step, and chunks of prefixes in prefill.

Shapes: B rows, M blocks of a row that a step looks at, H query heads, Hkv key-value heads, D head size, P page size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.generator.paged_kv import PagedKV
from slipstream.models.attention import PackedAttention
from slipstream.models.device import power_of_two

SPLIT_TOKENS = 256
"""Positions that one program of the kernel reads. Fixed, not chosen by the load: a row's bits depend on it."""
KEYS_PER_TILE = 64
SPLITS_PER_TILE = 16

AttendPages = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q [B, H, D], keys and values [pages, P, Hkv, D], blocks int32 [B, M], lengths int64 [B]) -> [B, H, D].

    out_b = softmax(q_b K_b^T / sqrt(D)) V_b   over the first lengths[b] >= 1 tokens of row b, where block j of row b
                                              is page blocks[b, j]; lengths are at most M * P
"""


def attend_gathered(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor) -> Tensor:
    """`AttendPages` in torch operations, by gathering every row's pages: the reference, on any device; sums in fp32."""
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    num_positions = blocks.shape[1] * keys.shape[1]
    k, v = (pages[blocks].view(rows, num_positions, kv_heads, head_dim).float() for pages in (keys, values))
    grouped = q.float().view(rows, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("bkgd,btkd->bkgt", grouped, k) * head_dim**-0.5
    is_hidden = torch.arange(num_positions, device=q.device) >= lengths.unsqueeze(1)
    weights = scores.masked_fill(is_hidden[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bkgt,btkd->bkgd", weights, v).reshape(rows, heads, head_dim).to(q.dtype)


def attend_split(q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor) -> Tensor:
    """`AttendPages` by the kernels of `paged_kernels.py`; fp32 sums. A row's bits do not depend on B or M."""
    from slipstream.generator import paged_kernels as kernels

    rows, heads, head_dim = q.shape
    page_size, kv_heads = keys.shape[1:3]
    num_splits = -(-blocks.shape[1] * page_size // SPLIT_TOKENS)
    head_block = max(16, power_of_two(head_dim))
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    # The one stretch of a short bucket is the result already.
    partial = out if num_splits == 1 else q.new_empty((rows, heads, num_splits, head_dim), dtype=torch.float32)
    log_sums = q.new_empty((rows, heads, num_splits), dtype=torch.float32)
    kernels.split_kernel[(rows, kv_heads, num_splits)](
        q.to(keys.dtype),
        keys,
        values,
        blocks,
        lengths,
        partial,
        log_sums,
        head_dim**-0.5 * 1.4426950408889634,  # log2(e)
        q.stride(0),
        q.stride(1),
        blocks.stride(0),
        num_splits,
        NUM_HEADS=heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=head_block,
        GROUP_BLOCK=max(16, power_of_two(heads // kv_heads)),
        PAGE=page_size,
        SPLIT=SPLIT_TOKENS,
        BLOCK=KEYS_PER_TILE,
        num_stages=2,  # of keys and values each: wide heads fit into shared memory then
    )
    if num_splits > 1:
        kernels.join_kernel[(rows, heads)](
            partial,
            log_sums,
            lengths,
            out,
            num_splits,
            NUM_HEADS=heads,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=head_block,
            SPLIT=SPLIT_TOKENS,
            BLOCK=SPLITS_PER_TILE,
        )
    return out


def default_attend(device: torch.device) -> AttendPages:
    """The kernels on CUDA, whose torch brings Triton; the reference elsewhere."""
    return attend_split if device.type == "cuda" else attend_gathered


class PagedDecodeAttention:
    """One new token per row: stores its key and value at `slots`, attends to the row's `lengths` tokens, itself too.

    An `Attention` for `Transformer.forward`. `slots` int64 [B], `blocks` int32 [B, M], `lengths` int64 [B].
    """

    def __init__(self, kv: PagedKV, attend: AttendPages, *, slots: Tensor, blocks: Tensor, lengths: Tensor) -> None:
        self._kv, self._attend = kv, attend
        self.slots, self._blocks, self._lengths = slots, blocks, lengths

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._kv.write(layer, self.slots, k, v)
        return self.attend_stored(layer, q)

    def attend_stored(self, layer: int, q: Tensor) -> Tensor:
        """Attend with queries whose keys and values somebody has stored."""
        return self._attend(q, *self.stored(layer), self._blocks, self._lengths)

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [pages, P, Hkv, D] of a layer."""
        return self._kv.keys[layer], self._kv.values[layer]

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Record the experts [B, k] of the new tokens, if they are to be."""
        return self._kv.record(layer, self.slots, chosen)


class PagedPrefillAttention:
    """Chunks of several prefixes, packed: stores keys and values at `slots` int64 [N] and attends causally.

    The first `len(fresh)` chunks, of `fresh[i]` tokens, begin their sequences: they attend to themselves, packed. Each
    of the others attends to everything its prefix has stored: `continued[i]` is its number of tokens and the slots of
    all tokens up to its last one. The last layer is not attended: only its keys and values are wanted
    (`Transformer.prefill`), unless it `goes_on` in another stage.
    """

    def __init__(
        self,
        kv: PagedKV,
        *,
        slots: Tensor,
        fresh: Sequence[int],
        continued: Sequence[tuple[int, Tensor]],
        goes_on: bool = False,
    ) -> None:
        self._kv, self._slots = kv, slots
        self.last_layer = None if goes_on else len(kv.keys) - 1
        self._num_fresh = sum(fresh)
        self._packed = PackedAttention(fresh) if fresh else None
        self._continued = continued
        stops = itertools.accumulate((count for count, _ in continued), initial=self._num_fresh)
        self._spans = [slice(start, stop) for start, stop in itertools.pairwise(stops)]
        # Query i of n sees the keys up to its own, the last n of them all.
        self._visible = [
            torch.ones((count, len(seen)), dtype=torch.bool, device=slots.device).tril_(len(seen) - count)
            for count, seen in continued
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._kv.write(layer, self._slots, k, v)
        if layer == self.last_layer:
            if (routes := self._kv.routes) is not None:  # of these none are computed
                routes[layer].flatten(0, 1).index_fill_(0, self._slots, torch.iinfo(routes.dtype).max)
            return q
        mixed = []
        if self._packed is not None:
            own = slice(0, self._num_fresh)
            mixed.append(self._packed(layer, q[own], k[own], v[own]))
        for (_, seen), span, visible in zip(self._continued, self._spans, self._visible, strict=True):
            keys, values = (
                x.to(q.dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in self._kv.read(layer, seen)
            )
            queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q[span], keys, values))
            attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible)
            mixed.append(attended.squeeze(0).transpose(0, 1))
        return torch.cat(mixed)

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Record the experts [N, k] of the chunks' tokens, if they are to be."""
        return self._kv.record(layer, self._slots, chosen)
