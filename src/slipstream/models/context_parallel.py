"""Context parallelism: ranks that read each microbatch together, each its share of the rows, for longer sequences.

A rank takes only its own rows through embedding, norms, products, MLPs and head, so it keeps 1/C of the activations. In
attention its queries are its own rows', which see keys and values of all rows before them: those of one layer are
gathered from all ranks in the forward pass, and their gradients are summed back to the rows' ranks in the backward
pass. Grouped queries make keys and values a small part of a layer's activations; with `recompute` the gathered ones of
one layer at a time exist.

Rows. A microbatch is filled up and cut into blocks of equally many rows, 2 to 8 for each rank. They are dealt by the
keys that their rows see: all ranks have equally many rows, and about as much attention. Of one sequence these are the
pairs of Llama 3 (arXiv:2407.21783, section 3.3.2): blocks r and 2C - 1 - r.

Sequences. A run of own rows in one sequence is a piece: its queries are the last rows of a prefix of the sequence, and
attention of a piece is that of a sequence which ends there. So shared prompts and branches need nothing of their own.

Behind the head logprobs, entropies and values of all targets are gathered again (`ContextParallel.joined`): losses,
ratios of whole sequences and metrics are computed alike on every rank, and each takes back the gradients of its own.
Parameters see data-parallel ranks (`sharded.Division`). Identity: C ranks give what one does, up to rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ShapeError
from slipstream.core.packed import PackedMicrobatch, sent
from slipstream.core.rank_group import RankGroup
from slipstream.models.attention import SequenceEnds, bounds, length_batches, takes_flash
from slipstream.models.packed import ROW_MULTIPLE, ReadRows, filled_rows, rounded_up

MAX_IMBALANCE = 1.05
"""Work of the rank with most over the mean up to which blocks are not cut: each is a piece with a copy of its keys."""
TILE_QUERIES = 256
"""Queries that attend at once where there is no `flash`: their mask has a place for each of them and each key."""

# The public names changed in torch 2.13.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


def dealt_rows(work: np.ndarray, world: int) -> np.ndarray:
    """Deal rows to `world` ranks: int64 [world, N / world], ascending on each; `work` [N] is what a row costs.

    Of the rows, as they lie, each rank gets 2 blocks, or 4 or 8 where fewer leave a rank with more than `MAX_IMBALANCE`
    times the mean work and blocks are no smaller than `ROW_MULTIPLE`. N is a multiple of 2 `world`.
    Identity: rows whose work grows by one each give all ranks the same work.
    """
    best, least = np.zeros((world, 0), dtype=np.int64), np.inf
    for count in (2, 4, 8):
        size, rest = divmod(len(work), count * world)
        if count > 2 and (rest or size < ROW_MULTIPLE or least <= MAX_IMBALANCE):
            break
        chosen = _dealt_blocks(work.reshape(-1, size).sum(1), world)
        dealt = np.sort(np.arange(len(work)).reshape(-1, size)[chosen].reshape(world, -1), axis=1)
        of_rank = work[dealt].sum(1)
        imbalance = of_rank.max() / max(of_rank.mean(), 1)
        if imbalance < least:
            best, least = dealt, imbalance
    return best


def _dealt_blocks(work: np.ndarray, world: int) -> np.ndarray:
    """Return the blocks of each rank, equally many: the dearest first, each to the rank with least work and room."""
    found: list[list[int]] = [[] for _ in range(world)]
    done = [0] * world
    for block in work.argsort(kind="stable")[::-1].tolist():
        with_room = (rank for rank in range(world) if len(found[rank]) < len(work) // world)
        rank = min(with_room, key=done.__getitem__)
        found[rank].append(block)
        done[rank] += int(work[block])
    return np.array(found)


class RowPieces(NamedTuple):
    """Runs of own rows in one sequence each, in the order of these rows, which they are all of.

    A piece has `num_queries` [P] rows, the last of the `num_keys` [P] first of its sequence, whose keys its last query
    all sees. `keys` int64 [sum of num_keys] are the rows of these, piece after piece.
    """

    num_queries: np.ndarray
    num_keys: np.ndarray
    keys: np.ndarray


class Structure:
    """Sequences of `lengths` over the rows `rows` [T], as of `PackedAttention`; where each row first is in one."""

    def __init__(self, lengths: Sequence[int], rows: np.ndarray) -> None:
        self._rows, size = rows, np.array(lengths)
        self._begin = size.cumsum() - size
        found, first = np.unique(rows, return_index=True)
        if int(size.sum()) != len(rows) or not np.array_equal(found, np.arange(len(found))):
            raise ShapeError("rows do not fit their sequences", got=f"{len(rows)} tokens", allowed=int(size.sum()))
        self._sequence = np.repeat(np.arange(len(size)), size)[first]
        self._offset = first - self._begin[self._sequence]

    @property
    def keys_seen(self) -> np.ndarray:
        """The number of keys that the query of each row sees, int64 [N]."""
        seen: np.ndarray = self._offset + 1
        return seen

    def pieces(self, own: np.ndarray, most_queries: int | None = None) -> RowPieces:
        """Return the pieces of the rows `own`, ascending, of at most `most_queries` rows each."""
        sequence, offset = self._sequence[own], self._offset[own]
        is_first = np.ones(len(own), dtype=bool)
        is_first[1:] = (np.diff(sequence) != 0) | (np.diff(offset) != 1)
        if most_queries is not None:
            starts = np.flatnonzero(is_first)
            within = np.arange(len(own)) - np.repeat(starts, np.diff(np.append(starts, len(own))))
            is_first |= within % most_queries == 0
        starts = np.flatnonzero(is_first)
        lasts = np.append(starts[1:], len(own)) - 1
        num_keys = offset[lasts] + 1
        before = np.repeat(self._begin[sequence[lasts]] - (num_keys.cumsum() - num_keys), num_keys)
        return RowPieces(lasts - starts + 1, num_keys, self._rows[before + np.arange(len(before))])


class _Tile(NamedTuple):
    """RowPieces of similar lengths, padded: B of at most Q queries and K keys.

    `queries` [B * Q] and `keys` [B * K] are the rows in each place, `own` and `places` the queries that are real and
    their places. A key is seen up to `offset` [B] behind its query's place. Rows `key_rows` are among the keys, each at
    `key_places` from its `key_starts` on.
    """

    shape: tuple[int, int, int]
    queries: Tensor
    keys: Tensor
    own: Tensor
    places: Tensor
    offset: Tensor
    key_rows: Tensor
    key_places: Tensor
    key_starts: Tensor
    is_square: bool

    def to(self, device: torch.device) -> _Tile:
        return _Tile(*(sent(one, device) if isinstance(one, Tensor) else one for one in self))  # type: ignore[arg-type]

    def taken(self, q: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [B, H, Q, D], and keys and values [B, 2 Hkv, K, D]."""
        count, most_queries, most_keys = self.shape
        chosen = q.index_select(0, self.queries).view(count, most_queries, *q.shape[1:])
        seen = fused.index_select(0, self.keys).view(count, most_keys, *fused.shape[1:])
        return chosen.transpose(1, 2), seen.transpose(1, 2)

    def attend(self, q: Tensor, fused: Tensor) -> Tensor:
        """Return [B, H, Q, D] of what `taken` gives."""
        k, v = fused.chunk(2, 1)
        mask = None
        if not self.is_square:
            _, most_queries, most_keys = self.shape
            last = self.offset[:, None] + torch.arange(most_queries, device=q.device)
            mask = (torch.arange(most_keys, device=q.device) <= last[..., None])[:, None]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.is_square, enable_gqa=q.shape[1] != k.shape[1]
        )


def _tiles(pieces: RowPieces) -> list[_Tile]:
    """Batch pieces of similar lengths, as `PackedAttention` does sequences."""
    num_queries, num_keys = (torch.from_numpy(one) for one in pieces[:2])
    keys = torch.from_numpy(pieces.keys)
    first_query, first_key = num_queries.cumsum(0) - num_queries, num_keys.cumsum(0) - num_keys
    made = []
    for batch in length_batches(pieces.num_keys.tolist()):
        queries, sizes = num_queries[batch, None], num_keys[batch, None]
        of_query, of_key = torch.arange(int(queries.max())), torch.arange(int(sizes.max()))
        rows = (first_query[batch, None] + of_query.minimum(queries - 1)).flatten()
        places = (of_query < queries).flatten().nonzero().squeeze(1)
        seen = keys[(first_key[batch, None] + of_key.minimum(sizes - 1)).flatten()]
        real = (of_key < sizes).flatten().nonzero().squeeze(1)
        key_rows, counts = torch.unique(seen[real], return_counts=True)
        offset = (sizes - queries).flatten()
        made.append(
            _Tile(
                shape=(len(batch), len(of_query), len(of_key)),
                queries=rows,
                keys=seen,
                own=rows[places],
                places=places,
                offset=offset,
                key_rows=key_rows,
                key_places=real[seen[real].argsort(stable=True)],
                key_starts=counts.cumsum(0) - counts,
                is_square=not bool(offset.any()),
            )
        )
    return made


class _AttendTiles(torch.autograd.Function):
    """Attention of q [n, H, D] to keys and values [N, 2 Hkv, D], tile after tile; run again in the backward pass.

    So no mask and no copy of a key is kept. Gradients of a row are summed in one fixed order.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, fused: Tensor, tiles: list[_Tile]) -> Tensor:
        ctx.tiles = tiles
        ctx.save_for_backward(q, fused)
        out = q.new_empty(q.shape)
        for tile in tiles:
            mixed = tile.attend(*tile.taken(q, fused))
            out[tile.own] = mixed.transpose(1, 2).flatten(0, 1)[tile.places]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        q, fused = ctx.saved_tensors
        of_q, of_fused = torch.empty_like(q), torch.zeros_like(fused)
        for tile in ctx.tiles:
            with torch.enable_grad():
                leaves = [one.detach().requires_grad_() for one in tile.taken(q, fused)]
                mixed = tile.attend(*leaves)
            count, most_queries, most_keys = tile.shape
            padded = grad.new_zeros(count * most_queries, *grad.shape[1:])
            padded[tile.places] = grad[tile.own]
            of_mixed = padded.view(count, most_queries, *grad.shape[1:]).transpose(1, 2)
            of_queries, of_keys = torch.autograd.grad(mixed, leaves, of_mixed)
            of_q[tile.own] = of_queries.transpose(1, 2).flatten(0, 1)[tile.places]
            flat = of_keys.transpose(1, 2).reshape(count * most_keys, -1)
            summed = F.embedding_bag(tile.key_places, flat, tile.key_starts, mode="sum")
            of_fused[tile.key_rows] += summed.view(-1, *fused.shape[1:])
        return of_q, of_fused, None


class _GatherRows(torch.autograd.Function):
    """Rows [n, ...] of each rank -> [C n, ...] of all, by rank; a row's gradient is the sum over ranks, on its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty((group.world * len(rows), *rows.shape[1:]))
        group.run(_all_gather, gathered, rows.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty((len(grad) // ctx.group.world, *grad.shape[1:]))
        ctx.group.run(_reduce_scatter, own, grad.contiguous())
        return own, None


class SharedAttention:
    """`PackedAttention` of the rows `own` of one rank, whose keys and values `group` has among them.

    `place` int64 [N] is where the key of each row is among those of all ranks. Rows may lie in any way.
    """

    def __init__(
        self, structure: Structure, own: np.ndarray, place: np.ndarray, group: RankGroup, *, varlen: bool = False
    ) -> None:
        self._structure, self._own, self._place, self._group, self._varlen = structure, own, place, group, varlen

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002 - the Attention protocol
        """q [n, H, D], k and v [n, Hkv, D] of own rows -> [n, H, D]."""
        if len(q) != len(self._own):
            raise ShapeError("tokens do not match this rank's rows", got=len(q), allowed=len(self._own))
        return self.attend(q, _GatherRows.apply(torch.cat((k, v), 1), self._group))  # type: ignore[no-untyped-call]

    def attend(self, q: Tensor, fused: Tensor) -> Tensor:
        """Attend from q [n, H, D] to the keys and values [N, 2 Hkv, D] of all ranks."""
        k, v = fused.chunk(2, 1)
        if self._varlen and takes_flash(q, k):
            self._ends = ends = self._ends.to(q.device)
            return ends.attend(q, k, v)
        self._tiles = tiles = [tile.to(q.device) for tile in self._tiles]
        mixed: Tensor = _AttendTiles.apply(q, fused, tiles)  # type: ignore[no-untyped-call]
        return mixed

    @functools.cached_property
    def _ends(self) -> SequenceEnds:
        pieces = self._structure.pieces(self._own)
        source = torch.from_numpy(self._place[pieces.keys])
        counts = source.bincount(minlength=len(self._place))
        queries, keys = map(torch.from_numpy, pieces[:2])
        most = int(queries.max()), int(keys.max())
        places, starts = source.argsort(stable=True), counts.cumsum(0) - counts
        return SequenceEnds(bounds(queries), bounds(keys), *most, len(self._own), source, places, starts)

    @functools.cached_property
    def _tiles(self) -> list[_Tile]:
        pieces = self._structure.pieces(self._own, TILE_QUERIES)
        return _tiles(pieces._replace(keys=self._place[pieces.keys]))

    def route(self, layer: int, chosen: Tensor) -> Tensor:  # noqa: ARG002 - the Attention protocol
        """Leave the experts as chosen: recorded ones are not replayed here."""
        return chosen


@dataclass(frozen=True)
class Share:
    """A microbatch as one of several ranks reads it.

    `targets` int64 [m] are its own among all M. Joined columns have room for `most` of each rank; `order` int64 [M] is
    where each target is in them.
    """

    rows: ReadRows
    targets: np.ndarray
    order: np.ndarray
    most: int

    @classmethod
    def of(cls, microbatch: PackedMicrobatch, group: RankGroup, *, varlen: bool) -> Share:
        world, rank = group.world, group.rank
        tokens, positions, lengths, rows = filled_rows(
            microbatch, rounded_up(microbatch.num_tokens, ROW_MULTIPLE * world)
        )
        structure = Structure(lengths, rows)
        dealt = dealt_rows(structure.keys_seen, world)
        place = np.empty(len(tokens), dtype=np.int64)
        place[dealt.flatten()] = np.arange(len(tokens))
        owner, within = np.divmod(place, dealt.shape[1])
        of_target = owner[microbatch.target_index]
        counts = np.bincount(of_target, minlength=world)
        most, by_rank = int(counts.max(initial=1)), of_target.argsort(kind="stable")
        order = np.empty(len(of_target), dtype=np.int64)
        order[by_rank] = most * of_target[by_rank] + np.arange(len(by_rank))
        order -= (counts.cumsum() - counts)[of_target]
        targets, own = np.flatnonzero(of_target == rank), dealt[rank]
        attention = SharedAttention(structure, own, place, group, varlen=varlen)
        read = ReadRows(tokens[own], positions[own], attention, within[microbatch.target_index[targets]])
        return cls(read, targets, order, most)


class _JoinTargets(torch.autograd.Function):
    """Columns [m] of each rank's targets -> [M] of all, in order; the gradient, alike on all ranks, is cut to its own.

    A column whose values nothing depends on gets no gradient, so that no product is made for it.
    """

    @staticmethod
    def forward(ctx: Any, share: Share, group: RankGroup, *columns: Tensor) -> tuple[Tensor, ...]:
        device = columns[0].device
        ctx.targets, order = sent(share.targets, device), sent(share.order, device)
        ctx.set_materialize_grads(False)
        local = columns[0].new_zeros((len(columns), share.most))
        local[:, : len(share.targets)] = torch.stack(columns)
        gathered = local.new_empty((group.world * len(columns), share.most))
        group.run(_all_gather, gathered, local)
        by_rank = gathered.view(group.world, len(columns), share.most)
        return tuple(by_rank[:, index].flatten().index_select(0, order) for index in range(len(columns)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *(None if grad is None else grad.index_select(0, ctx.targets) for grad in grads)


class ContextParallel:
    """The ranks of `group`, which read each microbatch together. Implements `packed.MicrobatchReader`.

    All of them call every method with the same microbatch, in the same order.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._last: tuple[PackedMicrobatch, bool, Share] | None = None

    def rows(self, microbatch: PackedMicrobatch, *, varlen: bool, replays: bool) -> ReadRows:  # noqa: ARG002
        return self._share(microbatch, varlen=varlen).rows

    def targets(self, microbatch: PackedMicrobatch) -> np.ndarray:
        return self._share(microbatch).targets

    def joined(self, microbatch: PackedMicrobatch, *columns: Tensor) -> tuple[Tensor, ...]:
        share = self._share(microbatch)
        joined: tuple[Tensor, ...] = _JoinTargets.apply(share, self.group, *columns)  # type: ignore[no-untyped-call]
        return joined

    def _share(self, microbatch: PackedMicrobatch, *, varlen: bool | None = None) -> Share:
        """Keep the last share: rows are read once, and their targets looked up a few times."""
        if self._last is None or self._last[0] is not microbatch or varlen not in (None, self._last[1]):
            self._last = microbatch, bool(varlen), Share.of(microbatch, self.group, varlen=bool(varlen))
        return self._last[2]
