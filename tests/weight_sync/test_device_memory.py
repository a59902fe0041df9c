"""What is done with bytes on a GPU, on CPU tensors: checksums against Python's integers, copies against numpy's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from drawn import drawn
from hypothesis import strategies as st

from slipstream.core.errors import WeightSyncError
from slipstream.weight_sync import device_memory
from slipstream.weight_sync.copies import Copies
from slipstream.weight_sync.copying import BLOCK_BYTES, HOST
from slipstream.weight_sync.device_memory import DeviceMemory, block_checksums

ON_CPU = DeviceMemory(torch.device("cpu"))
WORDS = BLOCK_BYTES // 4


def splitmix64(count: int) -> list[int]:
    """The first numbers of the generator with state 0, as its authors write it."""
    state, found = 0, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        found.append(z ^ (z >> 31))
    return found


WEIGHTS = [number | 1 for number in splitmix64(WORDS)]


def oracle(data: bytes) -> list[int]:
    """Block by block, in integers without end."""
    sums = []
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        block += bytes(-len(block) % 4)
        words = [int.from_bytes(block[i : i + 4], "little", signed=True) for i in range(0, len(block), 4)]
        sums.append(sum(w * x for w, x in zip(WEIGHTS, words, strict=False)) % 2**64)
    return sums


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def sums_of(data: torch.Tensor) -> list[int]:
    return [int(each) % 2**64 for each in block_checksums(data)]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 4097, BLOCK_BYTES, 2 * BLOCK_BYTES + 6])
def test_checksums_are_those_of_integers_without_end(count: int) -> None:
    data = random_bytes(count)
    assert sums_of(data) == oracle(data.numpy().tobytes())


def test_extreme_words_and_many_blocks() -> None:
    """More blocks than are taken at once, of the numbers whose products overflow most."""
    count = device_memory._BLOCKS_AT_ONCE + 2
    data = torch.full((count * WORDS,), -(2**31), dtype=torch.int32)
    data[::3] = 2**31 - 1
    sums = sums_of(data.view(torch.uint8))
    assert sums == oracle(data[: 3 * WORDS].numpy().tobytes()) * (count // 3) + sums[count // 3 * 3 :]
    assert len(sums) == count


def test_bytes_at_any_address_have_the_same_checksums() -> None:
    data = random_bytes(BLOCK_BYTES + 100)
    for shift in range(1, 9):
        moved = torch.zeros(len(data) + shift, dtype=torch.uint8)
        moved[shift:] = data
        assert sums_of(moved[shift:]) == sums_of(data)


def test_any_changed_bit_is_found() -> None:
    """For every bit of a word, in every word: an odd weight times a power of two below 2^32 is never 0 mod 2^64."""
    assert all(weight % 2 for weight in WEIGHTS)
    data = random_bytes(240)
    before = sums_of(data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert sums_of(data) != before
        data[bit // 8] ^= 1 << bit % 8
    assert sums_of(data) == before


def test_words_and_blocks_that_changed_places_are_found() -> None:
    """Of words whatever they are: weights that differ modulo 2^33 take less than 2^31 to add up to 2^64."""
    assert len({weight % 2**33 for weight in WEIGHTS}) == WORDS
    generator = np.random.default_rng(0)
    words = torch.randint(-(2**31), 2**31, (2 * WORDS,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    words[5], words[90] = 0, -(2**31)  # as differently as can be, in one bit
    before = sums_of(words.view(torch.uint8))
    for one, other in [(5, 90), *generator.integers(0, WORDS, (50, 2)).tolist()]:
        changed = words.clone()
        changed[one], changed[other] = words[other], words[one]
        assert one == other or sums_of(changed.view(torch.uint8))[0] != before[0]
    swapped = torch.cat([words[WORDS:], words[:WORDS]])
    assert sums_of(swapped.view(torch.uint8)) == before[::-1]
    assert ON_CPU.checksum(swapped.view(torch.uint8)) != ON_CPU.checksum(words.view(torch.uint8))


def rows(*rows: tuple[int, int, tuple[int, int], tuple[int, int], tuple[int, int], int]) -> Copies:
    """(source, target, counts, source strides, target strides, run) each."""
    columns = list(zip(*rows, strict=True))
    return Copies(*(np.array(column, np.int64) for column in columns))


@st.composite
def copies(draw: st.DrawFn, num_bytes: int) -> Copies:
    """Some in the order of the source, with and without strides; targets lie one behind the other."""
    found, end = [], 0
    for _ in range(draw(st.integers(1, 6))):
        unit = draw(st.sampled_from([1, 2, 4, 8, 24]))
        counts = draw(st.sampled_from([(1, 1), (1, 7), (5, 1), (9, 4), (300, 2)]))
        run = unit * draw(st.integers(1, 40))
        if counts == (1, 1):
            run *= draw(st.sampled_from([1, 100, 5000]))
        inner = run + unit * draw(st.integers(0, 9))
        outer = inner * counts[1] + unit * draw(st.sampled_from([0, 3, 100]))
        strides = (outer if counts[0] > 1 else 0, inner if counts[1] > 1 else 0)
        if draw(st.booleans()):
            counts, strides = counts[::-1], strides[::-1]  # transposed: the first axis has the small steps
        span = sum((count - 1) * stride for count, stride in zip(counts, strides, strict=True)) + run
        if span > num_bytes:
            continue
        start = draw(st.integers(0, (num_bytes - span) // unit)) * unit
        packed = (run * counts[1] if counts[0] > 1 else 0, run if counts[1] > 1 else 0)
        found.append((start, end, counts, strides, packed, run))
        end += run * counts[0] * counts[1] + draw(st.integers(0, 9))
    if not found:
        found.append((0, 0, (1, 1), (0, 0), (0, 0), num_bytes))
    return rows(*found).by_source()


def extent(found: Copies) -> int:
    ends = found.target + found.run_bytes + ((found.counts - 1) * found.target_strides).sum(1)
    return int(ends.max())


@drawn(25, 60, data=st.data())
def test_any_copies_are_those_of_the_host(data: st.DataObject) -> None:
    """Runs and strides of all alignments, window by window; only touched blocks are looked at."""
    num_bytes = 5 * BLOCK_BYTES + data.draw(st.sampled_from([0, 2, 5]))
    found = data.draw(copies(num_bytes))
    shift = data.draw(st.sampled_from([0, 4, 5]))
    source = random_bytes(num_bytes + shift)[shift:]
    expected, got = (torch.zeros(extent(found), dtype=torch.uint8) for _ in range(2))
    HOST.run_copies(found, source, expected)
    ON_CPU.run_copies(found, source, got)
    assert torch.equal(got, expected)

    checksums = block_checksums(source).numpy().view(np.uint64).copy()
    touched = np.zeros(num_bytes, bool)
    for start, _, counts, strides, _, run in found.rows:
        for index in itertools.product(*map(range, counts)):
            first = start + sum(i * s for i, s in zip(index, strides, strict=True))
            touched[first : first + run] = True
    first_of = [bool(touched[start : start + BLOCK_BYTES].any()) for start in range(0, num_bytes, BLOCK_BYTES)]
    window = device_memory.WINDOW_BYTES
    device_memory.WINDOW_BYTES = data.draw(st.sampled_from([window, BLOCK_BYTES, 2 * BLOCK_BYTES]))
    try:
        got.zero_()
        ON_CPU.gather(found, source, got, checksums)
        assert torch.equal(got, expected)
        for block, is_touched in enumerate(first_of):
            if is_touched:
                place = block * BLOCK_BYTES + int(np.flatnonzero(touched[block * BLOCK_BYTES :])[0])
                source[place] ^= 1
                with pytest.raises(WeightSyncError, match=f"block {block} of a version is damaged"):
                    ON_CPU.gather(found, source, got, checksums)
                source[place] ^= 1
    finally:
        device_memory.WINDOW_BYTES = window


def test_a_window_holds_no_block_that_nobody_touches() -> None:
    """A rank's rows of every layer: what lies between is of others, and does not cross."""
    layer = 8 * BLOCK_BYTES
    found = rows(*[(n * layer, n * BLOCK_BYTES, (1, 1), (0, 0), (0, 0), BLOCK_BYTES) for n in range(10)])
    windows = list(device_memory._windows(found, 10 * layer))
    assert [(window.start, window.stop) for window in windows] == [
        (n * layer, n * layer + BLOCK_BYTES) for n in range(10)
    ]
    neighbours = rows(*[(n * BLOCK_BYTES, n * BLOCK_BYTES, (1, 1), (0, 0), (0, 0), BLOCK_BYTES) for n in range(10)])
    (window,) = device_memory._windows(neighbours, 10 * BLOCK_BYTES)
    assert (window.start, window.stop, len(window.pieces)) == (0, 10 * BLOCK_BYTES, 10)


END = 5 * BLOCK_BYTES + 6
RUNS = {  # (source, target, bytes) of a run: (start, stop, is direct) of its windows, of two blocks
    (0, 0, END): [(0, END, True)],
    (BLOCK_BYTES, 4, END - BLOCK_BYTES): [(BLOCK_BYTES, END, True)],
    (BLOCK_BYTES, 12, 3 * BLOCK_BYTES): [(BLOCK_BYTES, 4 * BLOCK_BYTES, True)],
    (0, 2, 3 * BLOCK_BYTES): [(0, 2 * BLOCK_BYTES, False), (2 * BLOCK_BYTES, 3 * BLOCK_BYTES, False)],
    (0, 8, 3 * BLOCK_BYTES - 4): [(0, 2 * BLOCK_BYTES, True), (2 * BLOCK_BYTES, 3 * BLOCK_BYTES, False)],
    (4, 0, BLOCK_BYTES): [(0, 2 * BLOCK_BYTES, False)],
}


@pytest.mark.parametrize(("run", "expected"), RUNS.items())
def test_whole_blocks_go_straight_to_their_target(
    run: tuple[int, int, int], expected: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncut, and with no room to land in; a damaged block is found there, too."""
    monkeypatch.setattr(device_memory, "WINDOW_BYTES", 2 * BLOCK_BYTES)
    landings: list[int] = []
    empty = ON_CPU.empty
    monkeypatch.setattr(ON_CPU, "empty", lambda count: landings.append(count) or empty(count))
    start, place, count = run
    found = rows((start, place, (1, 1), (0, 0), (0, 0), count))
    assert [(one.start, one.stop, one.is_direct) for one in device_memory._windows(found, END)] == expected
    source, target = random_bytes(END), torch.zeros(place + count + 3, dtype=torch.uint8)
    checksums = np.array(oracle(source.numpy().tobytes()), np.uint64)
    ON_CPU.gather(found, source, target, checksums)
    assert torch.equal(target[place : place + count], source[start : start + count])
    assert not torch.cat([target[:place], target[place + count :]]).any()
    assert landings == [max(0 if is_direct else last - first for first, last, is_direct in expected)]
    source[start + count - 1] ^= 1
    with pytest.raises(WeightSyncError, match=f"block {(start + count - 1) // BLOCK_BYTES} of a version is damaged"):
        ON_CPU.gather(found, source, target, checksums)


def test_staging_says_the_same_for_copied_and_packed_bytes() -> None:
    live, slot = random_bytes(BLOCK_BYTES + 12), torch.zeros(BLOCK_BYTES + 12, dtype=torch.uint8)

    class Packer:
        num_bytes, holding = len(live), None

        def pack(self, out: torch.Tensor):
            for start in range(0, len(live), 1000):
                out[start : start + 1000].copy_(live[start : start + 1000])
                yield slice(start, min(start + 1000, len(live)))

    sums = [np.zeros(2, np.uint64) for _ in range(2)]
    copied = ON_CPU.copy(slot, live, sums[0])
    assert torch.equal(slot, live)
    slot.zero_()
    assert ON_CPU.pack(slot, Packer(), sums[1]) == copied
    assert torch.equal(slot, live)
    assert sums[0].tolist() == sums[1].tolist() == oracle(live.numpy().tobytes())


def test_a_version_is_read_from_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On "meta", where a look at a value raises: checksums come to the host together, for any number of windows."""
    reads: list[torch.Size] = []

    def on_host(sums: torch.Tensor) -> np.ndarray:
        reads.append(sums.shape)
        return np.zeros(sums.shape, dtype=np.uint64)

    monkeypatch.setattr(device_memory, "_on_host", on_host)
    meta = DeviceMemory(torch.device("meta"))
    source, target = (meta.empty(40 * BLOCK_BYTES + 5) for _ in range(2))
    sums = np.zeros(41, dtype=np.uint64)
    meta.copy(target, source, sums)
    assert reads == [(41,)]
    found = rows((0, 3, (1, 1), (0, 0), (0, 0), 30), (39 * BLOCK_BYTES, 100, (4, 2), (64, 8), (16, 8), 8))
    meta.gather(found, source, target, sums)
    meta.run_copies(found, source, target)
    assert reads == [(41,), (2,)]
    with pytest.raises((RuntimeError, NotImplementedError)):
        source.sum().item()


def test_weights_elsewhere_are_refused() -> None:
    with pytest.raises(WeightSyncError, match="on this rank's GPU"):
        DeviceMemory(torch.device("cuda", 0)).bytes_of(torch.zeros(4))
    with pytest.raises(WeightSyncError, match="contiguous"):
        ON_CPU.bytes_of(torch.zeros(4, 4).T)
    assert ON_CPU.bytes_of(torch.zeros(4)).shape == HOST.bytes_of(torch.zeros(4)).shape == (16,)
