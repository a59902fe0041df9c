"""Copying bytes of a version, with checksums taken while what is copied lies in the cache: one pass over memory.

`HostMemory` is here, `DeviceMemory` of GPUs in `device_memory.py`; `Memory` is what both can do.

A version's bytes have one checksum per block of `BLOCK_BYTES`, so that a reader of a part can verify what it
read. numpy and xxhash release the GIL and use this thread only: torch's copy would start a second team of threads,
which takes the cores from decoding. xxh3 runs at memory speed where zlib.crc32 does 1-3 GB/s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
import xxhash

from slipstream.core.errors import WeightSyncError
from slipstream.core.weights import WeightsPacker
from slipstream.weight_sync.copies import Copies, StridedCopy

BLOCK_BYTES = 1 << 18  # small enough that what was copied is hashed from the cache next to the core

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Checksums = np.ndarray[Any, np.dtype[np.uint64]]


class Memory(ABC):
    """The memory that a rank keeps versions in: how bytes are copied and checked there. Tensors are uint8 [N].

    What is copied has arrived, and what is read is let go, when a call returns. Checksums are uint64 [blocks].
    """

    device: torch.device

    @abstractmethod
    def bytes_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View a contiguous tensor as bytes. Raises WeightSyncError when it lies elsewhere."""

    @abstractmethod
    def empty(self, num_bytes: int) -> torch.Tensor: ...

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, checksums: Checksums) -> int:
        """Return the version's checksum, computed of the copy, and fill those of its blocks."""

    @abstractmethod
    def pack(self, target: torch.Tensor, packer: WeightsPacker, checksums: Checksums) -> int:
        """Have `packer` fill `target`; return and fill checksums as `copy` does."""

    @abstractmethod
    def gather(self, copies: Copies, source: torch.Tensor, target: torch.Tensor, checksums: Checksums) -> None:
        """Carry out `copies`, in the order of the source, and verify all blocks of `source` that they touch.

        Raises WeightSyncError, with `target` in any state, for a block that is not what its checksum says.
        """

    @abstractmethod
    def run_copies(self, copies: Copies, source: torch.Tensor, target: torch.Tensor) -> None:
        """Carry out all copies."""

    @abstractmethod
    def checksum(self, data: torch.Tensor) -> int:
        """Return the checksum of a bucket's bytes."""


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def checksum_of(data: np.ndarray[Any, Any]) -> int:
    """xxh3_64 of contiguous numbers; that of a version is the one of its blocks' checksums."""
    return xxhash.xxh3_64_intdigest(data.data)


def _gather_run(
    source: Bytes, start: int, target: Bytes, end: int, run: int, checksums: Checksums, touched: set[int]
) -> None:
    shift, stop = end - start, start + run
    while start < stop:
        block = start // BLOCK_BYTES
        block_stop = min((block + 1) * BLOCK_BYTES, len(source))
        until = min(block_stop, stop)
        copy = target[start + shift : until + shift]
        np.copyto(copy, source[start:until])
        if start == block * BLOCK_BYTES and until == block_stop:
            _compare(block, checksum_of(copy), checksums)
        else:
            _verify(source, checksums, touched, block)
            touched.add(block)
        start = until


def _verify(source: Bytes, checksums: Checksums, touched: set[int], before: int) -> None:
    """Verify the touched blocks before `before`."""
    for block in sorted(block for block in touched if block < before):
        touched.remove(block)
        _compare(block, checksum_of(source[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]), checksums)


def verify(data: torch.Tensor, checksums: Checksums) -> None:
    """Raise WeightSyncError for a block of a version that is not what its checksum says."""
    _verify(data.numpy(), checksums, set(range(len(checksums))), len(checksums))


def _compare(block: int, checksum: int, checksums: Checksums) -> None:
    if checksum != int(checksums[block]):
        raise WeightSyncError(
            f"block {block} of a version is damaged", got=f"checksum {checksum:x}", allowed=f"{int(checksums[block]):x}"
        )


class HostMemory(Memory):
    """`Memory` of this process."""

    device = torch.device("cpu")

    def bytes_of(self, flat: torch.Tensor) -> torch.Tensor:
        if flat.device.type != "cpu" or not flat.is_contiguous():
            raise WeightSyncError(
                "weights must be one contiguous CPU tensor", got=f"{flat.device}, stride {flat.stride()}, {flat.shape}"
            )
        return flat.detach().view(torch.uint8)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, checksums: Checksums) -> int:
        copied, given = target.numpy(), source.numpy()
        for block, start in enumerate(range(0, len(given), BLOCK_BYTES)):
            piece = copied[start : start + BLOCK_BYTES]
            np.copyto(piece, given[start : start + BLOCK_BYTES])
            checksums[block] = checksum_of(piece)
        return checksum_of(checksums)

    def pack(self, target: torch.Tensor, packer: WeightsPacker, checksums: Checksums) -> int:
        packed, block = target.numpy(), 0
        for piece in packer.pack(target):
            while block < len(checksums) and min((block + 1) * BLOCK_BYTES, len(packed)) <= piece.stop:
                checksums[block] = checksum_of(packed[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
                block += 1
        return checksum_of(checksums)

    def run_copies(self, copies: Copies, source: torch.Tensor, target: torch.Tensor) -> None:
        for copy in copies.rows:
            _copy(copy, source.numpy(), target.numpy())

    def gather(self, copies: Copies, source: torch.Tensor, target: torch.Tensor, checksums: Checksums) -> None:
        """Hash a block that is copied as a whole in its copy.

        Of others the source is hashed, after the copies that touch it: had anything been written there in between, the
        checksum would not fit.
        """
        given, taken = source.numpy(), target.numpy()
        touched: set[int] = set()  # and not yet verified
        for copy in copies.rows:
            _verify(given, checksums, touched, copy.source // BLOCK_BYTES)
            if not copy.counts:
                _gather_run(given, copy.source, taken, copy.target, copy.run, checksums, touched)
                continue
            for part in copy.along_first_axis(BLOCK_BYTES):
                _verify(given, checksums, touched, part.source // BLOCK_BYTES)
                _copy(part, given, taken)
                touched.update(range(part.source // BLOCK_BYTES, (part.stop - 1) // BLOCK_BYTES + 1))
        _verify(given, checksums, touched, len(checksums))

    def checksum(self, data: torch.Tensor) -> int:
        return checksum_of(data.numpy())


def _copy(copy: StridedCopy, source: Bytes, target: Bytes) -> None:
    start, end, run = copy.source, copy.target, copy.run
    if not copy.counts:
        np.copyto(target[end : end + run], source[start : start + run])
        return
    shape = (*copy.counts, run)
    np.copyto(
        np.ndarray(shape, np.uint8, target.data, end, (*copy.target_strides, 1)),
        np.ndarray(shape, np.uint8, source.data, start, (*copy.source_strides, 1)),
    )


HOST = HostMemory()
