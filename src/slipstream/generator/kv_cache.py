"""Keys and values of the live sequences, and the two ways the model attends over them.

Everything here obeys two shape rules that make a sequence's bits independent of its company. Found by experiment on CPU
(AVX2 and AVX-512, 1 and 2 threads, widths 32 to 49152) and asserted by the tests on the running machine:

- A row of a linear layer has the same bits for every number of rows that is a multiple of 8 (`ROW_MULTIPLE`); it may
  differ at others (by AMX, below float32, at any: docs/generator.md). So decode runs on a multiple of 8 slots, and
  every prefilled prompt is padded to a multiple of 8.
- Masked positions at the end of a row are bit-neutral in scores, softmax and weighted sum when the number of positions
  is a multiple of 32 (`LENGTH_MULTIPLE`); 8, 16 and 24 do differ. So a row may be computed over any such number that
  holds it, and with which others is a matter of speed (`arrangement.py`). Two exceptions were found: a GEMM over 160
  positions and more may split its sum at a place that depends on their number, so the weighted sum goes in blocks of
  128 (`POSITION_BLOCK`); and heads narrower than 16 differ between buckets when they are not grouped, so such models
  always use the whole length (`MIN_BUCKETED_HEAD_DIM`).

Shapes: L layers, S slots, Tmax positions, H query heads, Hkv key-value heads, D head size, g = H / Hkv.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.generator.arrangement import LENGTH_MULTIPLE, ROW_MULTIPLE, SlotSpan, round_up
from slipstream.models.experts import route_type
from slipstream.models.transformer import Attention

if TYPE_CHECKING:
    from slipstream.generator.paged_attention import PagedPrefillAttention

POSITION_BLOCK = 128
MIN_BUCKETED_HEAD_DIM = 16


def unknown_routes(shape: Sequence[int], recorded: tuple[int, int], device: torch.device | None = None) -> Tensor:
    """Room for the experts of tokens, [*shape, k], none of which is known; `recorded` are k and all there are."""
    per_token, num_experts = recorded
    dtype = route_type(num_experts)
    return torch.full((*shape, per_token), torch.iinfo(dtype).max, dtype=dtype, device=device)


def unknown_like(routes: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """Room for the experts of other tokens, as `unknown_routes` gives it; None where none are recorded."""
    return None if routes is None else routes.new_full((*shape, routes.shape[-1]), torch.iinfo(routes.dtype).max)


@dataclass(frozen=True, eq=False)
class PrefixKV:
    """Keys and values of the first `num_tokens` tokens of a sequence: each [L, Hkv, num_tokens, D].

    `routes` [L, 1, num_tokens, k]: their experts, where those are recorded.
    """

    keys: Tensor
    values: Tensor
    routes: Tensor | None = None

    @property
    def stored(self) -> list[Tensor]:
        """All that there is."""
        return [self.keys, self.values, *([] if self.routes is None else [self.routes])]

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[2]


class SlotKV:
    """A fixed number of slots, each with room for `max_len` positions: keys and values float32 [L, S, Hkv, Tmax, D].

    With `recorded` (experts per token, their number) also `routes` [L, S, 1, Tmax, k], the experts of each position.
    Heads lie outside positions, so that one batched GEMM per layer reads them in place. S and Tmax are rounded up to
    the multiples above; the buffers start as zeros because unused slots take part in decode steps as padding.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_len: int,
        head_dim: int,
        recorded: tuple[int, int] | None = None,
    ) -> None:
        self.num_slots = round_up(num_slots, ROW_MULTIPLE)
        self.max_len = round_up(max_len, LENGTH_MULTIPLE)
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        shape = (num_layers, self.num_slots, num_kv_heads, self.max_len, head_dim)
        self.keys = torch.zeros(shape, dtype=torch.float32)
        self.values = torch.zeros(shape, dtype=torch.float32)
        self.routes = None if recorded is None else unknown_routes((*shape[:2], 1, self.max_len), recorded)
        self._stored = PrefixKV(self.keys, self.values, self.routes).stored

    def write_prefix(self, slots: Sequence[int], prefix: PrefixKV) -> None:
        """Copy `prefix` to the start of every slot in `slots`."""
        index = torch.tensor(slots)
        for stored, given in zip(self._stored, prefix.stored, strict=True):
            stored[:, :, :, : prefix.num_tokens].index_copy_(
                1, index, given.unsqueeze(1).expand(-1, len(slots), -1, -1, -1)
            )

    def read_prefix(self, slot: int, prefix: PrefixKV) -> None:
        """Fill `prefix` with the first positions of `slot`."""
        for stored, given in zip(self._stored, prefix.stored, strict=True):
            given.copy_(stored[:, slot, :, : prefix.num_tokens])

    def swap(self, one: int, other: int, lengths: tuple[int, int]) -> None:
        """Exchange the first `lengths` positions of two slots; 0 for one that nobody reads."""
        for stored in self._stored:
            kept = stored[:, one, :, : lengths[0]].clone()
            stored[:, one, :, : lengths[1]] = stored[:, other, :, : lengths[1]]
            stored[:, other, :, : lengths[0]] = kept


@dataclass(frozen=True, eq=False)
class _Part:
    """A span of slots in one step: what its GEMMs read beside keys and values, and where they write."""

    rows: slice  # of slots x heads
    bucket: int
    mask: Tensor
    scores: Tensor
    weights: Tensor


class DecodeAttention:
    """One new token per slot, over slots 0..B-1 and everything they hold: an `Attention` for `Transformer.forward`.

    `prepare` once per step, then one call per layer, which stores the layer's new keys and values and attends:

        out_i = softmax(q_i K_i^T / sqrt(D) + mask_i) V_i   over the first positions of slot i, as many as its span has

    `mask` is 0 up to the slot's newest position and -inf beyond; it grows by one entry per slot and step.
    """

    def __init__(self, kv: SlotKV, *, num_heads: int) -> None:
        self._kv = kv
        self._group = num_heads // kv.num_kv_heads
        self._scale = kv.head_dim**-0.5
        rows = kv.num_slots * kv.num_kv_heads
        self._mask = torch.full((rows, 1, kv.max_len), -torch.inf, dtype=torch.float32)
        self._mask_by_slot = self._mask.view(kv.num_slots, kv.num_kv_heads, kv.max_len)
        self._all_positions = torch.arange(kv.max_len)
        self._row_starts = torch.arange(rows).view(kv.num_slots, kv.num_kv_heads) * kv.max_len
        self._scores = torch.empty(rows * self._group * kv.max_len, dtype=torch.float32)
        self._weights = torch.empty_like(self._scores)
        self._keys = [layer.view(rows, kv.max_len, kv.head_dim) for layer in kv.keys]
        self._values = [layer.view(rows, kv.max_len, kv.head_dim) for layer in kv.values]
        self._flat_keys = [layer.view(-1, kv.head_dim) for layer in kv.keys]
        self._flat_values = [layer.view(-1, kv.head_dim) for layer in kv.values]
        self._slot_starts = torch.arange(kv.num_slots) * kv.max_len

    def open_slots(self, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """Let `slots[i]` attend to its first `lengths[i]` positions (and to those later steps add)."""
        is_hidden = self._all_positions >= torch.tensor(lengths).unsqueeze(1)
        mask = torch.zeros(is_hidden.shape, dtype=torch.float32).masked_fill_(is_hidden, -torch.inf)
        self._mask_by_slot[torch.tensor(slots)] = mask.unsqueeze(1)

    @property
    def has_buckets(self) -> bool:
        """Whether a row has the same bits at every length; if not, spans are of `max_len` positions."""
        return self._kv.head_dim >= MIN_BUCKETED_HEAD_DIM

    def prepare(self, positions: Tensor, spans: Sequence[SlotSpan]) -> None:
        """The next forward puts the token of slot i at `positions[i]` (int64 [B]), below the bucket of its span.

        `spans` follow one another from 0 to B.
        """
        num_slots, heads = len(positions), self._kv.num_kv_heads
        self._num_slots, self._num_rows = num_slots, num_slots * heads
        self._places = self._slot_starts[:num_slots] + positions
        self._targets = (self._row_starts[:num_slots] + positions.unsqueeze(1)).view(-1)
        self._mask.view(-1).index_fill_(0, self._targets, 0.0)
        self._parts = []
        used = 0
        for span in spans:
            rows = slice(span.start * heads, span.stop * heads)
            shape = (rows.stop - rows.start, self._group, span.bucket)
            here = slice(used, used + shape[0] * shape[1] * shape[2])
            used = here.stop
            mask = self._mask[rows, :, : span.bucket]
            scores, weights = self._scores[here].view(shape), self._weights[here].view(shape)
            self._parts.append(_Part(rows, span.bucket, mask, scores, weights))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        head_dim = self._kv.head_dim
        self._flat_keys[layer].index_copy_(0, self._targets, k.reshape(self._num_rows, head_dim))
        self._flat_values[layer].index_copy_(0, self._targets, v.reshape(self._num_rows, head_dim))
        queries = q.reshape(self._num_rows, self._group, head_dim)
        out = torch.empty_like(queries)
        for part in self._parts:
            keys, values = self._keys[layer][part.rows, : part.bucket], self._values[layer][part.rows, : part.bucket]
            torch.baddbmm(part.mask, queries[part.rows], keys.transpose(1, 2), alpha=self._scale, out=part.scores)
            torch.softmax(part.scores, dim=-1, out=part.weights)
            attended = out[part.rows]
            torch.bmm(part.weights[..., :POSITION_BLOCK], values[:, :POSITION_BLOCK], out=attended)
            for start in range(POSITION_BLOCK, part.bucket, POSITION_BLOCK):
                block = slice(start, start + POSITION_BLOCK)
                attended.baddbmm_(part.weights[..., block], values[:, block])
        return out.view(self._num_slots, -1, head_dim)

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Record the experts [B, k] of the new tokens, if they are to be."""
        if (routes := self._kv.routes) is not None:
            routes[layer].view(-1, chosen.shape[1]).index_copy_(0, self._places, chosen.to(routes.dtype))
        return chosen


class PrefillAttention:
    """Causal attention of several chunks, each behind the part of its own sequence that is stored already.

    The chunks lie end to end, each padded to a multiple of 8 tokens (`num_tokens` are the real ones); the padding comes
    last, so no real token sees it. Chunks that begin a sequence and have equal padded lengths are attended in one call
    (they must be neighbours for that), whose kernel works on each (sequence, head) alone. The last layer is not
    attended: only its keys and values are wanted (`Transformer.prefill`), unless it `goes_on` in another stage.
    """

    def __init__(
        self,
        prefixes: Sequence[PrefixKV],
        starts: Sequence[int],
        num_tokens: Sequence[int],
        *,
        goes_on: bool = False,
    ) -> None:
        self._prefixes, self._starts, self._num_tokens = prefixes, starts, num_tokens
        padded_lengths = [round_up(count, ROW_MULTIPLE) for count in num_tokens]
        num_layers, num_kv_heads, _, head_dim = prefixes[0].keys.shape
        self.last_layer = None if goes_on else num_layers - 1
        shape = (num_layers, num_kv_heads, sum(padded_lengths), head_dim)
        self._keys = torch.empty(shape, dtype=torch.float32)
        self._values = torch.empty(shape, dtype=torch.float32)
        self._routes = unknown_like(prefixes[0].routes, (num_layers, shape[2]))
        self._rows = np.concatenate([[0], np.cumsum(padded_lengths)]).tolist()
        self._runs: list[tuple[int, int, int]] = []  # (first chunk, number of chunks, padded length)
        for index, (start, length) in enumerate(zip(starts, padded_lengths, strict=True)):
            if self._runs and start == 0 and self._runs[-1][2] == length and starts[self._runs[-1][0]] == 0:
                first, count, _ = self._runs[-1]
                self._runs[-1] = (first, count + 1, length)
            else:
                self._runs.append((index, 1, length))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._keys[layer].copy_(k.transpose(0, 1))
        self._values[layer].copy_(v.transpose(0, 1))
        if layer == self.last_layer:
            return q
        out = torch.empty(q.shape, dtype=torch.float32)
        for first, count, length in self._runs:
            rows = slice(self._rows[first], self._rows[first] + count * length)
            queries, keys, values = (x[rows].view(count, length, -1, x.shape[-1]).transpose(1, 2) for x in (q, k, v))
            mask, start = None, self._starts[first]
            if start > 0:
                prefix = self._prefixes[first]
                keys = torch.cat((prefix.keys[None, layer, :, :start], keys), 2)
                values = torch.cat((prefix.values[None, layer, :, :start], values), 2)
                mask = torch.ones(length, start + length, dtype=torch.bool).tril(start)
            attended = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
            out[rows] = attended.transpose(1, 2).reshape(count * length, *q.shape[1:])
        return out

    def store(self) -> None:
        """Write the chunks' keys and values to their prefixes; after the model's last layer."""
        for prefix, start, row, count in zip(
            self._prefixes, self._starts, self._rows[:-1], self._num_tokens, strict=True
        ):
            prefix.keys[:, :, start : start + count] = self._keys[:, :, row : row + count]
            prefix.values[:, :, start : start + count] = self._values[:, :, row : row + count]
            if prefix.routes is not None and self._routes is not None:
                prefix.routes[:, 0, start : start + count] = self._routes[:, row : row + count]

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Record the experts [N, k] of the chunks' tokens, if they are to be."""
        if self._routes is not None:
            self._routes[layer] = chosen
        return chosen


class JoinedAttention:
    """Decoding and prefill in one pass over the weights: the first `num_rows` tokens are decoded, the rest prefilled.

    The last layer goes on with the decoded tokens alone; of the others only its keys and values are wanted.
    """

    def __init__(self, decode: Attention, num_rows: int, prefill: PrefillAttention | PagedPrefillAttention) -> None:
        self._decode, self._num_rows, self._prefill = decode, num_rows, prefill

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, rest = slice(self._num_rows), slice(self._num_rows, None)
        decoded = self._decode(layer, q[rows], k[rows], v[rows])
        prefilled = self._prefill(layer, q[rest], k[rest], v[rest])
        return decoded if layer == self._prefill.last_layer else torch.cat((decoded, prefilled))

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Record the experts of both, if they are to be."""
        self._decode.route(layer, chosen[: self._num_rows])
        if layer != self._prefill.last_layer:
            self._prefill.route(layer, chosen[self._num_rows :])
        return chosen
