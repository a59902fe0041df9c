"""Which bytes go from which rank of the trainer to which rank of a generator: a pure function of who holds what.

Both sides hold boxes of the checkpoint's tensors (`core.peer_messages.Holding`). Where a box of a source and a box of a
destination meet is a piece; the pieces of all pairs cover every destination exactly once. In five steps, each over
arrays of all boxes at once, since there are hundreds of thousands:

1. Equal boxes of several sources become one with several holders. Boxes that overlap without being equal are first cut
   along each other's edges; then sources are disjoint, and sorted.
2. Pieces, by a sweep: the sources that a destination meets lie next to one another.
3. One holder per piece: the nearest, and of these the one with the least to send.
4. Copies: pieces as byte ranges with strides, neighbours joined. Equal layouts on both sides become a single copy.
5. Buckets per pair, in order of the destination's bytes; and rounds, so that no rank has two heavy partners at a time.

Every rank of both sides computes the plan of its link by itself, and they compare its hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import xxhash

from slipstream.core.errors import CheckpointError, WeightSyncError
from slipstream.core.peer_messages import Holding
from slipstream.weight_sync.copies import Array, Copies

BUCKET_BYTES = 64 << 20
_LARGEST_GAP = 64  # bytes between parameters (`models.quantized`): copied along when nothing lies there


class Place(NamedTuple):
    """Where a rank runs. Two on one `device` are nearest, then two on one `host`."""

    host: str = ""
    device: str = ""

    def distance(self, other: Place) -> int:
        if self.host != other.host:
            return 2
        return 0 if self.device and self.device == other.device else 1


@dataclass(frozen=True)
class ReshardPlan:
    """`copies[source, destination]` of a link, and who is asked in which order."""

    num_sources: int
    num_destinations: int
    copies: dict[tuple[int, int], Copies]

    def bytes_sent(self) -> Array:
        """int64 [num_sources, num_destinations]."""
        sent = np.zeros((self.num_sources, self.num_destinations), np.int64)
        for pair, copies in self.copies.items():
            sent[pair] = copies.num_bytes
        return sent

    def sources_of(self, destination: int) -> list[int]:
        """The sources of a destination, by rounds: in round k source s serves destination (s + k) mod D.

        So while all destinations are in one round, a source has one of them, or as few as go.
        """
        mine = [source for source, other in self.copies if other == destination]
        return sorted(mine, key=lambda source: ((destination - source) % self.num_destinations, source))

    @cached_property
    def hash(self) -> int:
        """xxh3_64 of everything that both ends must agree on."""
        digest = xxhash.xxh3_64()
        digest.update(np.array([self.num_sources, self.num_destinations], np.int64).data)
        for pair, copies in sorted(self.copies.items()):
            digest.update(np.array(pair, np.int64).data)
            for column in copies._columns:
                digest.update(np.ascontiguousarray(column).data)
        return digest.intdigest()


def make_plan(
    sources: Sequence[Holding],
    destinations: Sequence[Holding],
    *,
    source_places: Sequence[Place] | None = None,
    destination_places: Sequence[Place] | None = None,
    rotation: int = 0,
    piece_bytes: int = BUCKET_BYTES,
) -> ReshardPlan:
    """How every destination gets all of its boxes, each byte once, from sources that hold it.

    Of several holders of a box the nearest sends it, and of these the one that has least to send yet; ties go to the
    first from `rotation` on, which sets the plans of several links apart. Pieces that several could send are cut to at
    most `piece_bytes`, to divide them well. Raises WeightSyncError for a box that no source holds, and for tensors that
    are of different shapes or types on both sides; CheckpointError for versions that are beside other frozen weights.
    """
    _check_bases(sources, destinations)
    names = _Names(destinations)
    held, wanted = names.boxes(sources, is_source=True), names.boxes(destinations, is_source=False)
    held = _disjoint(held)
    unique, first_holder = _distinct(held)
    box, destination = _meet(unique, wanted, names)
    pieces = _pieces(unique, wanted, box, destination, names)
    is_shared = np.diff(first_holder)[box] > 1
    pieces, box, destination = _divide(pieces, box, destination, is_shared, piece_bytes)
    source_places = source_places or [Place()] * len(sources)
    destination_places = destination_places or [Place()] * len(destinations)
    distances = np.array([[s.distance(d) for d in destination_places] for s in source_places], np.int64)
    chosen = _choose(pieces.sizes(), box, wanted.rank[destination], held.rank, first_holder, distances, rotation)
    return ReshardPlan(len(sources), len(destinations), _copies(pieces, held, chosen, wanted, destination, names))


def _check_bases(sources: Sequence[Holding], destinations: Sequence[Holding]) -> None:
    """Raise CheckpointError: no version of the run will ever fit, so this is not one that is lost."""
    theirs, ours = ({holding.base for holding in side} for side in (sources, destinations))
    if theirs != ours:
        raise CheckpointError(
            "trainer and generator have different base models beside the adapters",
            got=", ".join(f"SHA-256 {base[:16]}..." if base else "none" for base in sorted(ours)),
            allowed=", ".join(f"{base[:16]}..., the trainer's" if base else "none" for base in sorted(theirs)),
            hint="model.path must have the same files on every machine",
        )


@dataclass(frozen=True)
class _Boxes:
    """N boxes: of which rank and tensor, from where to where [N, D], and where in the rank's bytes."""

    rank: Array
    tensor: Array
    start: Array
    stop: Array
    offset: Array
    strides: Array

    def take(self, index: Array) -> _Boxes:
        return _Boxes(*(column[index] for column in vars(self).values()))

    @staticmethod
    def join(parts: Sequence[_Boxes]) -> _Boxes:
        return _Boxes(*(np.concatenate(columns) for columns in zip(*(vars(p).values() for p in parts), strict=True)))


class _Names:
    """Numbers for the tensors that destinations want."""

    def __init__(self, destinations: Sequence[Holding]) -> None:
        self.names: list[str] = []
        self.known: dict[str, tuple[int, tuple[int, ...], str]] = {}
        item_bytes: list[int] = []
        for holding in destinations:
            for name, shape, kind, size in zip(
                holding.names, holding.shapes, holding.types, holding.item_bytes, strict=True
            ):
                if name not in self.known:
                    self.known[name] = (len(self.names), tuple(shape), kind)
                    self.names.append(name)
                    item_bytes.append(size)
        self.item_bytes = np.array(item_bytes, np.int64)
        self.rows = np.array([shape[0] if shape else 1 for _, shape, _ in self.known.values()], np.int64)
        self.dimensions = max([2, *(len(shape) for _, shape, _ in self.known.values())])

    def boxes(self, holdings: Sequence[Holding], *, is_source: bool) -> _Boxes:
        """Return the boxes of all `holdings`; those of a source that no destination wants are left out."""
        parts = []
        for rank, holding in enumerate(holdings):
            numbers = np.full(len(holding.names), -1, np.int64)
            for place, (name, shape, kind) in enumerate(zip(holding.names, holding.shapes, holding.types, strict=True)):
                if name not in self.known:
                    continue
                number, wanted_shape, wanted_kind = self.known[name]
                if tuple(shape) != wanted_shape or kind != wanted_kind:
                    raise WeightSyncError(
                        f"trainer and generator disagree about {name}",
                        got=f"{list(shape)} {kind} and {list(wanted_shape)} {wanted_kind}",
                        hint="they must run the same model, and the trainer packs at the generators' precision",
                    )
                numbers[place] = number
            tensor = numbers[holding.tensor]
            known = np.flatnonzero(tensor >= 0)
            fill = ((0, 0), (0, self.dimensions - holding.start.shape[1]))
            boxes = _Boxes(
                np.full(len(tensor), rank, np.int64),
                tensor,
                np.pad(holding.start, fill),
                np.pad(holding.stop, fill, constant_values=1),
                holding.offset.astype(np.int64),
                np.pad(holding.strides, fill),
            )
            parts.append(boxes.take(known) if is_source else boxes)
        return _Boxes.join(parts)


def _order(boxes: _Boxes) -> Array:
    """By tensor, then along the first dimension, then the next; `stop` before what it decides."""
    keys = [boxes.rank]
    for axis in reversed(range(boxes.start.shape[1])):
        keys += [boxes.stop[:, axis], boxes.start[:, axis]]
    return np.lexsort([*keys, boxes.tensor])


def _overlapping(boxes: _Boxes) -> Array:
    """The tensors, of sorted `boxes`, in which two boxes overlap without being equal, or may.

    Sound, since sorted intervals that do not overlap their neighbours overlap none; and boxes of one interval in the
    first dimensions are compared in the next.
    """
    same = boxes.tensor[1:] == boxes.tensor[:-1]
    is_bad = np.zeros(len(same), bool)
    for axis in range(boxes.start.shape[1]):
        start, stop = boxes.start[:, axis], boxes.stop[:, axis]
        equal = (start[1:] == start[:-1]) & (stop[1:] == stop[:-1])
        is_bad |= same & ~equal & (stop[:-1] > start[1:])
        same = same & equal
    return np.unique(boxes.tensor[1:][is_bad])


def _disjoint(boxes: _Boxes) -> _Boxes:
    """The same boxes, those that overlap cut along each other's edges, sorted: any two are disjoint or equal."""
    boxes = boxes.take(_order(boxes))
    bad = _overlapping(boxes)
    if not len(bad):
        return boxes
    is_bad = np.isin(boxes.tensor, bad)
    parts = [boxes.take(~is_bad)]
    for tensor in bad:
        cells = boxes.take(boxes.tensor == tensor)
        for axis in range(cells.start.shape[1]):
            edges = np.unique(np.concatenate([cells.start[:, axis], cells.stop[:, axis]]))
            low = np.searchsorted(edges, cells.start[:, axis])
            counts = np.searchsorted(edges, cells.stop[:, axis]) - low
            origin = np.repeat(np.arange(len(low)), counts)
            number = low[origin] + _within_runs(counts)
            cut = cells.take(origin)
            start, stop = cut.start.copy(), cut.stop.copy()
            start[:, axis], stop[:, axis] = edges[number], edges[number + 1]
            offset = cut.offset + (start[:, axis] - cut.start[:, axis]) * cut.strides[:, axis]
            cells = _Boxes(cut.rank, cut.tensor, start, stop, offset, cut.strides)
        parts.append(cells)
    joined = _Boxes.join(parts)
    return joined.take(_order(joined))


def _within_runs(counts: Array) -> Array:
    """0, 1, .. counts[0] - 1, 0, 1, .. counts[1] - 1, ..."""
    ends = np.cumsum(counts)
    within: Array = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    return within


def _distinct(held: _Boxes) -> tuple[_Boxes, Array]:
    """(boxes without repetitions, firsts): box n is held as entries firsts[n] : firsts[n + 1] of `held`."""
    is_new = np.ones(len(held.tensor), bool)
    if len(is_new) > 1:
        is_new[1:] = (held.tensor[1:] != held.tensor[:-1]) | (
            (held.start[1:] != held.start[:-1]) | (held.stop[1:] != held.stop[:-1])
        ).any(1)
    firsts = np.append(np.flatnonzero(is_new), len(is_new))
    return held.take(firsts[:-1]), firsts


def _meet(unique: _Boxes, wanted: _Boxes, names: _Names) -> tuple[Array, Array]:
    """All pairs (source box, destination box) whose first dimensions meet, by a sweep along all tensors' rows."""
    base = np.concatenate([[0], np.cumsum(names.rows)])
    low = np.searchsorted(base[unique.tensor] + unique.stop[:, 0], base[wanted.tensor] + wanted.start[:, 0], "right")
    high = np.searchsorted(base[unique.tensor] + unique.start[:, 0], base[wanted.tensor] + wanted.stop[:, 0], "left")
    counts = np.maximum(high - low, 0)
    destination = np.repeat(np.arange(len(counts)), counts)
    return low[destination] + _within_runs(counts), destination


@dataclass(frozen=True)
class _Pieces:
    start: Array  # [N, D] in the tensor
    stop: Array
    item_bytes: Array  # [N]

    def sizes(self) -> Array:
        sizes: Array = (self.stop - self.start).prod(1) * self.item_bytes
        return sizes


def _pieces(unique: _Boxes, wanted: _Boxes, box: Array, destination: Array, names: _Names) -> _Pieces:
    """Where the pairs meet; and the check that what they have in common is all that is wanted."""
    start = np.maximum(unique.start[box], wanted.start[destination])
    stop = np.minimum(unique.stop[box], wanted.stop[destination])
    # The sweep compares rows only: what does not meet in columns is left with size 0, for `_divide` to drop.
    stop = np.maximum(stop, start)
    covered = np.zeros(len(wanted.tensor), np.int64)
    np.add.at(covered, destination, (stop - start).prod(1))
    missing = np.flatnonzero(covered != (wanted.stop - wanted.start).prod(1))
    if len(missing):
        n = int(missing[0])
        raise WeightSyncError(
            f"no rank of the trainer holds all of {names.names[int(wanted.tensor[n])]}",
            got=f"{int(covered[n])} numbers of the box from {wanted.start[n].tolist()} to {wanted.stop[n].tolist()} "
            f"that rank {int(wanted.rank[n])} of the generator wants; {len(missing)} boxes like it",
        )
    return _Pieces(start, stop, names.item_bytes[wanted.tensor[destination]])


def _divide(
    pieces: _Pieces, box: Array, destination: Array, is_shared: Array, most_bytes: int
) -> tuple[_Pieces, Array, Array]:
    """Without the empty ones; those that several sources could send cut by rows to `most_bytes`."""
    sizes = pieces.sizes()
    rows = pieces.stop[:, 0] - pieces.start[:, 0]
    counts = np.where(is_shared, np.minimum(-(-sizes // most_bytes), rows), 1)
    counts = np.where(sizes > 0, np.maximum(counts, 1), 0)
    origin = np.repeat(np.arange(len(counts)), counts)
    number, count = _within_runs(counts), counts[origin]
    start, stop = pieces.start[origin], pieces.stop[origin]
    first, rows = start[:, 0].copy(), rows[origin]
    start[:, 0] = first + rows * number // count
    stop[:, 0] = first + rows * (number + 1) // count
    return _Pieces(start, stop, pieces.item_bytes[origin]), box[origin], destination[origin]


def _choose(
    sizes: Array,
    box: Array,
    destination_rank: Array,
    holder_rank: Array,
    firsts: Array,
    distances: Array,
    rotation: int,
) -> Array:
    """int64 [N]: which entry of the held boxes sends each piece. Largest first, to whom has least to send."""
    counts = firsts[box + 1] - firsts[box]
    chosen = firsts[box]
    num_sources = len(distances)
    single = counts == 1
    load = np.bincount(holder_rank[chosen[single]], sizes[single], num_sources).astype(np.int64).tolist()
    open_pieces = np.flatnonzero(~single)
    open_pieces = open_pieces[np.argsort(-sizes[open_pieces], kind="stable")]
    place = [(rank - rotation) % num_sources for rank in range(num_sources)]
    nearness = distances.tolist()
    ranks = holder_rank.tolist()
    for n, first, end, to, size in zip(
        open_pieces.tolist(),
        firsts[box[open_pieces]].tolist(),
        firsts[box[open_pieces] + 1].tolist(),
        destination_rank[open_pieces].tolist(),
        sizes[open_pieces].tolist(),
        strict=True,
    ):
        best = min(range(first, end), key=lambda h: (nearness[ranks[h]][to], load[ranks[h]], place[ranks[h]]))
        chosen[n] = best
        load[ranks[best]] += size
    return chosen


def _copies(
    pieces: _Pieces, held: _Boxes, chosen: Array, wanted: _Boxes, destination: Array, names: _Names
) -> dict[tuple[int, int], Copies]:
    """Pieces as copies of bytes, by pair of ranks, in order of the destination's bytes."""
    source, source_strides = _located(held, chosen, pieces)
    target, target_strides = _located(wanted, destination, pieces)
    counts, run_bytes = (pieces.stop - pieces.start).copy(), pieces.item_bytes.copy()
    for _ in range(counts.shape[1]):  # every axis that continues the run on both sides becomes part of it
        for axis in range(counts.shape[1]):
            joins = (source_strides[:, axis] == run_bytes) & (target_strides[:, axis] == run_bytes)
            run_bytes = np.where(joins, run_bytes * counts[:, axis], run_bytes)
            counts[:, axis] = np.where(joins, 1, counts[:, axis])
    source_strides, target_strides = (np.where(counts == 1, 0, s) for s in (source_strides, target_strides))
    from_rank, to_rank = held.rank[chosen], wanted.rank[destination]
    order = np.lexsort([target, from_rank, to_rank])
    every = Copies(source, target, counts, source_strides, target_strides, run_bytes).take(order)
    from_rank, to_rank, destination = from_rank[order], to_rank[order], destination[order]
    stops, starts = _lonely_edges(wanted, names)
    edges = np.flatnonzero((np.diff(from_rank) != 0) | (np.diff(to_rank) != 0)) + 1
    copies = {}
    for group in np.split(np.arange(len(order)), edges):
        if len(group):
            pair = int(from_rank[group[0]]), int(to_rank[group[0]])
            copies[pair] = _joined(every.take(group), stops[destination[group]], starts[destination[group]])
    return copies


def _located(boxes: _Boxes, index: Array, pieces: _Pieces) -> tuple[Array, Array]:
    strides = boxes.strides[index]
    return boxes.offset[index] + ((pieces.start - boxes.start[index]) * strides).sum(1), strides


def _lonely_edges(wanted: _Boxes, names: _Names) -> tuple[Array, Array]:
    """For each box the byte where it ends, if none lies there before the next one begins, and where that next one is.

    (-1, -1) for others. Sorted by first bytes, nothing lies behind a box where all before it have ended, too.
    """
    order = np.lexsort([wanted.offset, wanted.rank])
    extent = wanted.stop - wanted.start
    ends = (wanted.offset + ((extent - 1) * wanted.strides).sum(1) + names.item_bytes[wanted.tensor])[order]
    base = wanted.rank[order] * (int(ends.max(initial=0)) + 1)
    has_ended = np.maximum.accumulate(base + ends) == base + ends
    starts = np.full(len(order), -1)
    starts[:-1] = np.where(wanted.rank[order[1:]] == wanted.rank[order[:-1]], wanted.offset[order[1:]], -1)
    edges = np.full((2, len(order)), -1)
    edges[:, order] = np.where(has_ended & (starts >= 0), [ends, starts], -1)
    return edges[0], edges[1]


def _joined(copies: Copies, box_stops: Array, next_starts: Array) -> Copies:
    """Runs that continue one another on both sides made one; also over a gap between boxes in which nothing lies."""
    is_run = (copies.counts == 1).all(1)
    ends = copies.target + copies.run_bytes
    gap = copies.target[1:] - ends[:-1]
    is_lonely = (ends[:-1] == box_stops[:-1]) & (copies.target[1:] == next_starts[:-1])
    joins = (
        is_run[1:]
        & is_run[:-1]
        & (copies.source[1:] - copies.source[:-1] - copies.run_bytes[:-1] == gap)
        & ((gap == 0) | ((gap > 0) & (gap < _LARGEST_GAP) & is_lonely))
    )
    first = np.flatnonzero(np.append(True, ~joins))
    last = np.append(first[1:], len(copies)) - 1
    kept = copies.take(first)
    run_bytes = np.where(first == last, kept.run_bytes, ends[last] - kept.target)
    return Copies(kept.source, kept.target, kept.counts, kept.source_strides, kept.target_strides, run_bytes)
