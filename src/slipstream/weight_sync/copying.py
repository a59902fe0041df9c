"""Copying bytes of a version, with checksums taken while what is copied lies in the cache: one pass over memory.

Of the host's: what is done with bytes on a GPU is in `device_memory.py`. `Memory` is what both can do.

A version's bytes have one checksum per block of `BLOCK_BYTES`, so that whoever reads only a part can verify what it
read. numpy and xxhash release the GIL and use this thread only: torch's copy would start a second team of threads,
which takes the cores from decoding. xxh3 runs at memory speed where zlib.crc32 does 1-3 GB/s.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from slipstream.core.errors import WeightSyncError
from slipstream.core.weights import WeightsPacker
from slipstream.weight_sync.plan import Copies

BLOCK_BYTES = 1 << 18  # small enough that what was copied is hashed from the cache next to the core

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Checksums = np.ndarray[Any, np.dtype[np.uint64]]


class Memory(Protocol):
    """The memory that a rank keeps versions in: how bytes are copied and checked there. Tensors are uint8 [N].

    What is copied has arrived, and what is read is let go, when a call returns. Checksums are uint64 [blocks].
    """

    device: torch.device

    def bytes_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View of a contiguous tensor. Raises WeightSyncError when it lies elsewhere."""
        ...

    def empty(self, num_bytes: int) -> torch.Tensor: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, checksums: Checksums) -> int:
        """Returns the version's checksum, and fills those of its blocks."""
        ...

    def pack(self, target: torch.Tensor, packer: WeightsPacker, checksums: Checksums) -> int:
        """Have `packer` fill `target`; returns and fills checksums as `copy` does."""
        ...

    def gather(self, copies: Copies, source: torch.Tensor, target: torch.Tensor, checksums: Checksums) -> None:
        """Carry out `copies`, in the order of the source, and verify all blocks of `source` that they touch.

        Raises WeightSyncError, with `target` in any state, for a block that is not what its checksum says.
        """
        ...

    def run_copies(self, copies: Copies, source: torch.Tensor, target: torch.Tensor) -> None: ...

    def checksum(self, data: torch.Tensor) -> int:
        """Of a bucket's bytes."""
        ...


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def bytes_of(flat: torch.Tensor) -> Bytes:
    """uint8 view of a contiguous CPU tensor."""
    if flat.device.type != "cpu" or not flat.is_contiguous():
        raise WeightSyncError(
            "weights must be one contiguous CPU tensor", got=f"{flat.device}, stride {flat.stride()}, {flat.shape}"
        )
    view: Bytes = flat.detach().view(torch.uint8).numpy()
    return view


def checksum_of(data: np.ndarray[Any, Any]) -> int:
    """xxh3_64 of contiguous numbers; that of a version is the one of its blocks' checksums."""
    return xxhash.xxh3_64_intdigest(data.data)


def copy_bytes(target: Bytes, source: Bytes, checksums: Checksums | None = None) -> int:
    """Copy uint8 [N] and return the version's checksum, computed of the copy. `checksums` [blocks] receives those."""
    if checksums is None:
        checksums = np.zeros(num_blocks(len(source)), np.uint64)
    for block, start in enumerate(range(0, len(source), BLOCK_BYTES)):
        piece = target[start : start + BLOCK_BYTES]
        np.copyto(piece, source[start : start + BLOCK_BYTES])
        checksums[block] = checksum_of(piece)
    return checksum_of(checksums)


def pack_bytes(target: Bytes, packer: WeightsPacker, checksums: Checksums | None = None) -> int:
    """Have `packer` fill `target` uint8 [N]; returns and fills checksums as `copy_bytes` does."""
    if checksums is None:
        checksums = np.zeros(num_blocks(len(target)), np.uint64)
    block = 0
    for piece in packer.pack(torch.from_numpy(target)):
        while block < len(checksums) and min((block + 1) * BLOCK_BYTES, len(target)) <= piece.stop:
            checksums[block] = checksum_of(target[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])
            block += 1
    return checksum_of(checksums)


def run_copies(copies: Copies, source: Bytes, target: Bytes) -> None:
    """Carry out all copies."""
    for start, end, counts, source_strides, target_strides, run in copies.rows:
        if len(counts) == 0:
            np.copyto(target[end : end + run], source[start : start + run])
        else:
            shape = (*counts, run)
            np.copyto(
                np.ndarray(shape, np.uint8, target.data, end, (*target_strides, 1)),
                np.ndarray(shape, np.uint8, source.data, start, (*source_strides, 1)),
            )


def gather(copies: Copies, source: Bytes, target: Bytes, checksums: Checksums) -> None:
    """Carry out all copies, and compare `source`'s blocks that they touch with their `checksums` [blocks].

    A block that is copied as a whole is hashed in its copy. Of others the source is, after the copies that touch it:
    had anything been written there in between, the checksum would not fit. `copies` are in the order of the source.
    Raises WeightSyncError for a block that is not what its checksum says.
    """
    touched: set[int] = set()  # and not yet verified
    for start, end, counts, source_strides, target_strides, run in copies.rows:
        _verify(source, checksums, touched, start // BLOCK_BYTES)
        if len(counts) == 0:
            _gather_run(source, start, target, end, run, checksums, touched)
            continue
        step = max(1, BLOCK_BYTES // max(1, source_strides[0]))
        for first in range(0, counts[0], step):
            begin = start + first * source_strides[0]
            _verify(source, checksums, touched, begin // BLOCK_BYTES)
            shape = (min(step, counts[0] - first), *counts[1:], run)
            np.copyto(
                np.ndarray(shape, np.uint8, target.data, end + first * target_strides[0], (*target_strides, 1)),
                np.ndarray(shape, np.uint8, source.data, begin, (*source_strides, 1)),
            )
            span = sum((count - 1) * stride for count, stride in zip(shape, source_strides, strict=False)) + run
            touched.update(range(begin // BLOCK_BYTES, (begin + span - 1) // BLOCK_BYTES + 1))
    _verify(source, checksums, touched, len(checksums))


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


def _compare(block: int, checksum: int, checksums: Checksums) -> None:
    if checksum != int(checksums[block]):
        raise WeightSyncError(
            f"block {block} of a version is damaged", got=f"checksum {checksum:x}", allowed=f"{int(checksums[block]):x}"
        )


class HostMemory:
    """Implements `Memory` with the functions above."""

    device = torch.device("cpu")

    def bytes_of(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(bytes_of(flat))

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor, checksums: Checksums) -> int:
        return copy_bytes(target.numpy(), source.numpy(), checksums)

    def pack(self, target: torch.Tensor, packer: WeightsPacker, checksums: Checksums) -> int:
        return pack_bytes(target.numpy(), packer, checksums)

    def gather(self, copies: Copies, source: torch.Tensor, target: torch.Tensor, checksums: Checksums) -> None:
        gather(copies, source.numpy(), target.numpy(), checksums)

    def run_copies(self, copies: Copies, source: torch.Tensor, target: torch.Tensor) -> None:
        run_copies(copies, source.numpy(), target.numpy())

    def checksum(self, data: torch.Tensor) -> int:
        return checksum_of(data.numpy())


HOST = HostMemory()
