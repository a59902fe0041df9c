"""Plans: every wanted number arrives, once, from a rank that holds it: by the bytes that are moved."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.link_price import price
from slipstream.core import wire
from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import Holding
from slipstream.weight_sync.copies import Copies
from slipstream.weight_sync.copying import BLOCK_BYTES, HOST, checksum_of, num_blocks
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.resharding import Place, ReshardPlan, make_plan

ON_DEVICE = DeviceMemory(torch.device("cpu"))
SHAPES = {"a": (7, 6), "b": (12,), "c": (1, 5), "d": (9, 4)}


@dataclass
class Rank:
    """Boxes in a buffer of a rank, one behind the other, some of them transposed and with gaps between."""

    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...], bool]] = field(default_factory=list)
    gap: int = 0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=lambda: SHAPES)

    def build(self) -> tuple[Holding, np.ndarray, list[np.ndarray]]:
        """(holding, its bytes, int32 views of every box in them)."""
        names = sorted({name for name, *_ in self.boxes})
        end, rows = 0, []
        for name, start, stop, is_transposed in self.boxes:
            extent = [high - low for low, high in zip(start, stop, strict=True)]
            strides = [4] if len(extent) == 1 else [4, 4 * extent[0]] if is_transposed else [4 * extent[1], 4]
            fill = 2 - len(extent)
            rows.append(
                (names.index(name), end, [*start, *[0] * fill], [*stop, *[1] * fill], [*strides, *[0] * fill], extent)
            )
            end += 4 * int(np.prod(extent)) + self.gap
        buffer = np.zeros(end, np.uint8)
        views = [
            np.ndarray(extent, np.int32, buffer.data, offset, strides[: len(extent)])
            for _, offset, _, _, strides, extent in rows
        ]
        holding = Holding(
            num_bytes=end,
            names=tuple(names),
            shapes=tuple(self.shapes[name] for name in names),
            types=("int32",) * len(names),
            item_bytes=(4,) * len(names),
            tensor=np.array([row[0] for row in rows], np.int32),
            offset=np.array([row[1] for row in rows], np.int64),
            start=np.array([row[2] for row in rows], np.int64).reshape(-1, 2),
            stop=np.array([row[3] for row in rows], np.int64).reshape(-1, 2),
            strides=np.array([row[4] for row in rows], np.int64).reshape(-1, 2),
        )
        return holding, buffer, views


def numbers(name: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> np.ndarray:
    """Every number of every tensor differs."""
    first = 1 + sum(int(np.prod(shape)) for other, shape in shapes.items() if other < name)
    return np.arange(first, first + int(np.prod(shapes[name])), dtype=np.int32).reshape(shapes[name])


def cut(box: tuple, shapes: dict[str, tuple[int, ...]] = SHAPES) -> np.ndarray:
    name, start, stop, _ = box
    return numbers(name, shapes)[tuple(slice(low, high) for low, high in zip(start, stop, strict=True))]


def execute(plan: ReshardPlan, sources: list[Rank], destinations: list[Rank]) -> None:
    """Fill the sources' buffers by their boxes, move what the plan says, and compare every box of the destinations."""
    held = [source.build() for source in sources]
    for source, (_, _, views) in zip(sources, held, strict=True):
        for box, view in zip(source.boxes, views, strict=True):
            view[...] = cut(box, source.shapes)
    for number, destination in enumerate(destinations):
        for memory, by_block in itertools.product((HOST, ON_DEVICE), (False, True)):
            _, buffer, views = destination.build()
            target = torch.from_numpy(buffer)
            for source in plan.sources_of(number):
                copies, origin = plan.copies[source, number], torch.from_numpy(held[source][1])
                if by_block:
                    checksums = np.zeros(num_blocks(len(origin)), np.uint64)
                    memory.copy(torch.empty_like(origin), origin, checksums)
                    memory.gather(copies.by_source(), origin, target, checksums)
                else:
                    for bucket in copies.buckets(40):
                        packed = memory.empty(bucket.num_bytes)
                        memory.run_copies(bucket.packed(), origin, packed)
                        memory.run_copies(bucket.unpacked(), packed, target)
            for box, view in zip(destination.boxes, views, strict=True):
                assert np.array_equal(view, cut(box, destination.shapes)), (number, box)


def planned(sources: list[Rank], destinations: list[Rank], **options) -> ReshardPlan:
    return make_plan(
        [rank.build()[0] for rank in sources], [rank.build()[0] for rank in destinations], piece_bytes=48, **options
    )


@st.composite
def grids(draw: st.DrawFn, name: str, world: int) -> list[list[tuple]]:
    """For each rank its boxes of a tensor that is cut along both axes, unevenly; some ranks have nothing."""
    edges = []
    for size in SHAPES[name]:
        inner = draw(st.lists(st.integers(0, size), max_size=3))
        edges.append(sorted({0, size, *inner}))
    cells = [()]
    for axis in edges:
        cells = [(*cell, pair) for cell in cells for pair in itertools.pairwise(axis)]
    held: list[list[tuple]] = [[] for _ in range(world)]
    for cell in cells:
        start, stop = tuple(low for low, _ in cell), tuple(high for _, high in cell)
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=2)):
            held[rank].append((name, start, stop, draw(st.booleans())))
    return held


@st.composite
def sides(draw: st.DrawFn, world: int) -> list[Rank]:
    ranks = [Rank(gap=draw(st.sampled_from([0, 4, 60]))) for _ in range(world)]
    for name in SHAPES:
        # Laid over one another, two grids make boxes that overlap without being equal.
        for _ in range(draw(st.integers(1, 2))):
            for rank, boxes in zip(ranks, draw(grids(name, world)), strict=True):
                rank.boxes += boxes
    return ranks


@drawn(15, 40, data=st.data())
def test_any_division_reaches_any_other(data: st.DataObject) -> None:
    sources = data.draw(sides(data.draw(st.integers(1, 4))))
    destinations = [rank for rank in data.draw(sides(data.draw(st.integers(1, 3)))) if rank.boxes]
    plan = planned(sources, destinations, rotation=data.draw(st.integers(0, 3)))
    execute(plan, sources, destinations)
    wanted = sum(4 * view.size for rank in destinations for view in rank.build()[2])
    gaps = sum(rank.gap * len(rank.boxes) for rank in destinations)
    assert wanted <= int(plan.bytes_sent().sum()) <= wanted + gaps


def whole(gap: int = 0) -> Rank:
    return Rank([(name, (0,) * len(shape), shape, False) for name, shape in SHAPES.items()], gap)


def test_equal_layouts_are_one_copy() -> None:
    plan = planned([whole(gap=60)], [whole(gap=60)])
    assert len(plan.copies[0, 0]) == 1
    assert plan.copies[0, 0].is_one_run


def test_what_no_source_holds_is_refused_by_name() -> None:
    part = Rank([("a", (0, 0), (3, 6), False)])
    with pytest.raises(WeightSyncError, match=r"holds all of a\b[\s\S]*18 numbers"):
        planned([part, part], [whole()])
    twice = Rank([("a", (0, 0), (4, 6), False), ("a", (2, 0), (5, 6), False)])  # 42 numbers of 42, but not these
    with pytest.raises(WeightSyncError, match="holds all of a"):
        planned([twice, Rank([("a", (0, 0), (5, 6), False)])], [Rank([("a", (0, 0), (7, 6), False)])])


def test_other_shapes_and_types_are_refused_by_name() -> None:
    holding = whole().build()[0]
    for change in ({"shapes": ((7, 5), *holding.shapes[1:])}, {"types": ("int8", *holding.types[1:])}):
        fields = {name: getattr(holding, name) for name in holding.__struct_fields__} | change
        with pytest.raises(WeightSyncError, match="disagree about a"):
            make_plan([Holding(**fields)], [holding])


def test_the_nearest_holder_sends_and_of_these_the_least_loaded() -> None:
    sources = [whole(), whole(), whole(), whole()]
    places = [Place("x"), Place("y"), Place("y"), Place("y", "gpu-1")]
    device = planned(sources, [whole()], source_places=places, destination_places=[Place("y", "gpu-1")]).bytes_sent()
    assert device[:, 0].tolist() == [0, 0, 0, device.sum()]
    host = planned(sources, [whole()], source_places=places, destination_places=[Place("y", "gpu-9")]).bytes_sent()
    assert host[0, 0] == 0
    assert host[1:, 0].max() <= host[1:, 0].min() + 48
    far = planned(sources, [whole()], source_places=places, destination_places=[Place("z")]).bytes_sent()
    assert far[:, 0].max() <= far[:, 0].min() + 48


def test_rotation_sets_links_apart_and_rounds_set_destinations_apart() -> None:
    alone = Rank([("c", (0, 0), (1, 5), False)])
    senders = [planned([alone] * 3, [alone], rotation=link).sources_of(0) for link in range(3)]
    assert sorted(senders) == [[0], [1], [2]]
    rows = [Rank([("b", (3 * n,), (3 * n + 3,), False)]) for n in range(4)]
    everything = Rank([("b", (0,), (12,), False)])
    plan = planned(rows, [everything] * 4)
    for rounds in zip(*(plan.sources_of(destination) for destination in range(4)), strict=True):
        assert len(set(rounds)) == 4, "in every round every source has one destination"


def test_the_hash_sees_every_difference() -> None:
    plan = planned([whole()], [whole()])
    assert plan.hash == planned([whole()], [whole()]).hash
    assert plan.hash != planned([whole(gap=4)], [whole()]).hash
    assert plan.hash != planned([whole(), whole()], [whole()]).hash


def test_holdings_cross_a_channel() -> None:
    holding = whole().build()[0]
    decoded = wire.decode(wire.encode(holding), (Holding,))
    assert isinstance(decoded, Holding)
    assert make_plan([decoded], [decoded]).hash == make_plan([holding], [holding]).hash


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_block_that_a_copy_touches_is_verified(data: st.DataObject) -> None:
    """Whatever of the source was changed after its checksums: whoever copied from that block notices."""
    size, pitch = int(2.5 * BLOCK_BYTES), 1 << data.draw(st.integers(8, 18))
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    checksums = np.array(
        [checksum_of(source[n * BLOCK_BYTES : (n + 1) * BLOCK_BYTES]) for n in range(num_blocks(size))], np.uint64
    )
    rows, columns = size // pitch, data.draw(st.integers(1, pitch))
    first = data.draw(st.integers(0, pitch - columns))
    begin, run = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size))
    strided = (first, 0, [rows, 1], [pitch, 0], [columns, 0], columns)
    straight = (begin, rows * columns, [1, 1], [0, 0], [0, 0], min(run, size - begin))
    columns_of = zip(*(strided, straight), strict=True)
    copies = Copies(*(np.array(column, np.int64) for column in columns_of)).by_source()
    target = np.zeros(rows * columns + straight[-1], np.uint8)
    HOST.gather(copies, torch.from_numpy(source), torch.from_numpy(target), checksums)
    expected = np.concatenate(
        [source[: rows * pitch].reshape(rows, pitch)[:, first : first + columns].ravel(), source[begin : begin + run]]
    )
    assert np.array_equal(target, expected)
    touched = data.draw(st.sampled_from([first, begin, begin + straight[-1] - 1, first + (rows - 1) * pitch]))
    source[touched] ^= 1
    with pytest.raises(WeightSyncError, match=f"block {touched // BLOCK_BYTES} of a version is damaged"):
        HOST.gather(copies, torch.from_numpy(source), torch.from_numpy(target), checksums)


def test_prices() -> None:
    """The formula of a bound, by hand: 8 destinations of 10 GB each from 1 or 8 sources at 50 GB/s."""
    rates = {"sender_bytes_per_s": 50e9, "receiver_bytes_per_s": 50e9}
    one = price(np.full((1, 8), 10e9), **rates)
    assert (one.pairs_s, one.broadcast_s) == (1.6, 0.2)
    assert one.is_broadcast_cheaper
    many = price(np.full((8, 8), 10e9 / 8), **rates)
    assert many.pairs_s == pytest.approx(0.2)
    assert not many.is_broadcast_cheaper
    assert price(np.full((8, 8), 10e9 / 8), **rates, num_links=3).pairs_s == pytest.approx(0.6)
