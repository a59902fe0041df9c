"""Copying and checking bytes of a version on a GPU: the same numbers on a CPU, where it is tried.

The checksum of a block is a sum over its words, exact modulo 2^64:

    sum_i w_i x_i    x_i: the block's signed 32-bit words, the last one filled up with zeros;  w_i: odd, and any two of
                     them different modulo 2^33

A word that changed is found whatever changed in it: |x - x'| < 2^32, and w_i is odd. So are two words that changed
places: (w_i - w_j)(x_j - x_i) is divisible by 2^32 2^31 at most. Anything else that knows nothing of the w_i is missed
with a chance of 2^-64, or 2^-33 where only signs change. This guards against faults, as xxh3 does on the host.

On a GPU one kernel (`checksum_kernel.py`) sums whole blocks and copies them on the way: of the GPU's memory one byte is
read for each byte that is checked, and one written for each that is copied. Elsewhere, and for the bytes behind the
last whole block, torch multiplies and sums, 8 MiB at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import WeightSyncError
from slipstream.core.weights import WeightsPacker
from slipstream.weight_sync.copies import Copies, StridedCopy
from slipstream.weight_sync.copying import BLOCK_BYTES, Checksums, Memory, checksum_of, num_blocks

WINDOW_BYTES = 64 << 20
"""Bytes of a source that are brought to the reader's GPU, and verified there, at once."""

_BLOCK_WORDS = BLOCK_BYTES // 4
_BLOCKS_AT_ONCE = 32
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes: the larger, the faster


class DeviceMemory(Memory):
    """`Memory` of a GPU `device`.

    `pack` and `copy` run where the caller computes, behind what has written the weights. Everything else runs in a
    stream of its own, so that it neither waits for decoding or training, nor holds them up.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Kernels go to the stream of this memory."""
        if self.device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = new_stream(self.device)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def bytes_of(self, flat: Tensor) -> Tensor:
        if flat.device != self.device or not flat.is_contiguous():
            raise WeightSyncError(
                "weights must be one contiguous tensor on this rank's GPU",
                got=f"{flat.device}, stride {flat.stride()}, {flat.shape}",
                allowed=self.device,
            )
        return flat.detach().view(torch.uint8)

    def empty(self, num_bytes: int) -> Tensor:
        with self.aside():  # else torch gives out what kernels of the caller's stream are not done with yet
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor, checksums: Checksums) -> int:
        """Checksums of the bytes that were read: a reader, which computes them of the slot's, finds a bad write."""
        return _seal(block_checksums(source, target), checksums)

    def pack(self, target: Tensor, packer: WeightsPacker, checksums: Checksums) -> int:
        for _ in packer.pack(target):
            pass
        return _seal(block_checksums(target), checksums)

    def gather(self, copies: Copies, source: Tensor, target: Tensor, checksums: Checksums) -> None:
        """Window by window of the source: brought here in one copy, verified, and taken apart.

        A window that is one run of whole blocks is brought straight to its target, and verified on the way or, from
        another GPU, there. So what is used is what was verified, and only whole runs cross from one GPU to another.
        """
        windows = list(_windows(copies, len(source)))
        if not windows:
            return
        with self.aside():
            landing = self.empty(max(0 if window.is_direct else window.stop - window.start for window in windows))
            found = []
            for window in windows:
                brought, first = source[window.start : window.stop], window.pieces[0].target
                if window.is_direct:
                    found.append(block_checksums(brought, target[first : first + len(brought)]))
                    continue
                landed = landing[: len(brought)]
                landed.copy_(brought, non_blocking=True)
                found.append(block_checksums(landed))
                for piece in window.pieces:
                    _copy(piece, landed, target, shift=window.start)
            sums = _on_host(torch.cat(found))  # which waits for all of it
        blocks = np.concatenate([np.arange(window.start // BLOCK_BYTES, num_blocks(window.stop)) for window in windows])
        damaged = np.flatnonzero(sums != checksums[blocks])
        if len(damaged):
            block = int(blocks[damaged[0]])
            raise WeightSyncError(
                f"block {block} of a version is damaged",
                got=f"checksum {int(sums[damaged[0]]):x}, {len(damaged)} blocks like it",
                allowed=f"{int(checksums[block]):x}",
            )

    def run_copies(self, copies: Copies, source: Tensor, target: Tensor) -> None:
        with self.aside():
            for copy in copies.rows:
                _copy(copy, source, target)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def checksum(self, data: Tensor) -> int:
        with self.aside():
            return checksum_of(_on_host(block_checksums(data)))


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Behind all that the caller has queued: the former owner of its tensors' memory may be reading that still."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def block_checksums(data: Tensor, target: Tensor | None = None) -> Tensor:
    """int64 [blocks] of uint8 [N], each of a block of BLOCK_BYTES; the last may be shorter.

    With `target` [N] the data are copied there: in the same pass on one GPU, else before, and summed there.
    """
    if target is not None and not _is_one_pass(data, target):
        data, target = target.copy_(data, non_blocking=True), None
    if data.storage_offset() % 4:
        data = data.clone()
    weights = _weights(data.device)
    sums = torch.zeros(num_blocks(len(data)), dtype=torch.int64, device=data.device)
    whole = len(data) // BLOCK_BYTES
    words = _blocks(data, whole)
    if data.is_cuda and whole:
        from slipstream.weight_sync.checksum_kernel import sum_blocks

        sum_blocks(words, None if target is None else _blocks(target, whole), _weight_halves(data.device), sums[:whole])
    else:
        for first in range(0, whole, _BLOCKS_AT_ONCE):
            last = min(first + _BLOCKS_AT_ONCE, whole)
            torch.sum(words[first:last] * weights, 1, out=sums[first:last])
    if whole < len(sums):
        rest = data[whole * BLOCK_BYTES :]
        filled = torch.zeros(-(-len(rest) // 4) * 4, dtype=torch.uint8, device=data.device)
        filled[: len(rest)].copy_(rest)
        tail = filled.view(torch.int32)
        sums[whole] = (tail * weights[: len(tail)]).sum()
        if target is not None:
            target[whole * BLOCK_BYTES :].copy_(filled[: len(rest)])
    return sums


def _is_one_pass(data: Tensor, target: Tensor) -> bool:
    is_aligned = data.storage_offset() % 4 == target.storage_offset() % 4 == 0
    return data.is_cuda and data.device == target.device and is_aligned


def _blocks(data: Tensor, count: int) -> Tensor:
    return data[: count * BLOCK_BYTES].view(torch.int32).view(count, _BLOCK_WORDS)


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """int64 [words of a block]: splitmix64's numbers (Steele, Lea and Flood 2014), made odd."""
    z = np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    odd = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(odd.view(np.int64)).to(device)


@functools.cache
def _weight_halves(device: torch.device) -> Tensor:
    """int32 [2, words of a block]: lower and upper halves."""
    return _weights(torch.device("cpu")).view(torch.int32).view(-1, 2).T.contiguous().to(device)


def _on_host(sums: Tensor) -> Checksums:
    return sums.cpu().numpy().view(np.uint64)


def _seal(sums: Tensor, checksums: Checksums) -> int:
    """Fill `checksums`. Their way to the host ends when everything before has: then the slot may be marked."""
    checksums[:] = _on_host(sums)
    return checksum_of(checksums)


class _Window(NamedTuple):
    """Blocks of the source, none of them untouched, and what is taken from there."""

    start: int
    stop: int
    pieces: list[StridedCopy]

    @property
    def is_direct(self) -> bool:
        """Whether nothing is to be taken apart."""
        return len(self.pieces) == 1 and _is_direct(self.pieces[0], self.stop)


def _is_direct(piece: StridedCopy, num_bytes: int) -> bool:
    """Whether a piece is a run of whole blocks of a source of `num_bytes`, and its target a multiple of words."""
    ends = piece.stop == num_bytes or piece.stop % BLOCK_BYTES == 0
    return not piece.counts and ends and piece.source % BLOCK_BYTES == 0 and piece.target % 4 == 0


def _pieces(copies: Copies, num_bytes: int) -> Iterator[StridedCopy]:
    """Yield the copies in parts of at most a window; where nothing helps, of one step along the first axis.

    Direct runs are not cut: they need no room to land in, and the end of each launch would leave a part of a GPU idle.
    """
    for copy in copies.rows:
        if copy.counts:
            yield from copy.along_first_axis(WINDOW_BYTES)
            continue
        if _is_direct(copy, num_bytes):
            yield copy
            continue
        for first in range(0, copy.run, WINDOW_BYTES):
            run = min(WINDOW_BYTES, copy.run - first)
            yield copy._replace(source=copy.source + first, target=copy.target + first, run=run)


def _windows(copies: Copies, num_bytes: int) -> Iterator[_Window]:
    window: _Window | None = None
    for piece in _pieces(copies, num_bytes):
        first = piece.source // BLOCK_BYTES * BLOCK_BYTES
        last = min(num_blocks(piece.stop) * BLOCK_BYTES, num_bytes)
        if window is not None:
            stop = max(window.stop, last)
            if window.start <= first <= window.stop and stop - window.start <= WINDOW_BYTES:
                window.pieces.append(piece)
                window = window._replace(stop=stop)
                continue
            yield window
        window = _Window(first, last, [piece])
    if window is not None:
        yield window


def _copy(piece: StridedCopy, source: Tensor, target: Tensor, *, shift: int = 0) -> None:
    """Carry out a piece; `source` begins with byte `shift` of the source."""
    start = piece.source - shift
    if not piece.counts:
        target[piece.target : piece.target + piece.run].copy_(source[start : start + piece.run], non_blocking=True)
        return
    offsets = (start, piece.target, source.storage_offset(), target.storage_offset())
    size = math.gcd(8, piece.run, *offsets, *piece.source_strides, *piece.target_strides)
    _strided(target, piece.target, piece.counts, piece.target_strides, piece.run, size).copy_(
        _strided(source, start, piece.counts, piece.source_strides, piece.run, size), non_blocking=True
    )


def _strided(
    data: Tensor, start: int, counts: tuple[int, ...], strides: tuple[int, ...], run: int, size: int
) -> Tensor:
    """[*counts, run / size] words of `size` bytes in uint8 [N], from byte `start` on."""
    words = data[: len(data) // size * size].view(_WORDS[size])
    steps = [stride // size for stride in strides]
    return words.as_strided((*counts, run // size), (*steps, 1), words.storage_offset() + start // size)
