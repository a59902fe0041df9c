"""Where a published version lies: numbered byte slots that a publisher writes and subscribers copy from.

A slot is written as: marker cleared, bytes, checksum, marker. A reader checks the marker, copies, and compares the
checksum of *its copy* with the offer, so a torn or damaged slot is never used.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
import xxhash

from slipstream.core.errors import WeightSyncError
from slipstream.core.executor import WeightsPacker

# Copying and hashing piece by piece hashes what is still in the cache: one pass over memory instead of two.
_CHUNK_BYTES = 1 << 20


class Commit(NamedTuple):
    """What lies complete in a slot."""

    version: int
    checksum: int


class Slots(Protocol):
    """Slots of one run; all of `num_bytes` bytes."""

    name: str
    num_slots: int
    num_bytes: int

    def data(self, slot: int) -> np.ndarray:
        """uint8 [num_bytes]: a view of the slot."""
        ...

    def invalidate(self, slot: int) -> None:
        """Clear the commit marker; before the first byte is rewritten."""
        ...

    def commit(self, slot: int, commit: Commit) -> None:
        """Set the commit marker; after the last byte."""
        ...

    def committed(self, slot: int) -> Commit | None: ...

    def close(self) -> None: ...


class Transport(Protocol):
    """How slots are shared between a publisher and its subscribers."""

    def create(self, num_bytes: int, num_slots: int) -> Slots: ...

    def attach(self, name: str) -> Slots: ...


class MemorySlots:
    """Plain memory of this process."""

    def __init__(self, name: str, num_bytes: int, num_slots: int) -> None:
        self.name, self.num_bytes, self.num_slots = name, num_bytes, num_slots
        self._data = [np.zeros(num_bytes, np.uint8) for _ in range(num_slots)]
        self._commits: list[Commit | None] = [None] * num_slots

    def data(self, slot: int) -> np.ndarray:
        return self._data[slot]

    def invalidate(self, slot: int) -> None:
        self._commits[slot] = None

    def commit(self, slot: int, commit: Commit) -> None:
        self._commits[slot] = commit

    def committed(self, slot: int) -> Commit | None:
        return self._commits[slot]

    def close(self) -> None:
        """Nothing to release: the memory goes with its last user."""


class InProcess:
    """Transport between executors of one process, which share this object."""

    def __init__(self) -> None:
        self._slots: dict[str, MemorySlots] = {}

    def create(self, num_bytes: int, num_slots: int) -> MemorySlots:
        slots = MemorySlots(f"memory-{len(self._slots)}", num_bytes, num_slots)
        self._slots[slots.name] = slots
        return slots

    def attach(self, name: str) -> MemorySlots:
        if name not in self._slots:
            raise WeightSyncError("no such weights in this process", got=name, allowed=", ".join(self._slots) or "none")
        return self._slots[name]


def bytes_of(flat: torch.Tensor) -> np.ndarray:
    """uint8 view of a contiguous CPU tensor."""
    if flat.device.type != "cpu" or not flat.is_contiguous():
        raise WeightSyncError(
            "weights must be one contiguous CPU tensor", got=f"{flat.device}, stride {flat.stride()}, {flat.shape}"
        )
    view: np.ndarray = flat.detach().view(torch.uint8).numpy()
    return view


def copy_bytes(target: np.ndarray, source: np.ndarray) -> int:
    """Copy uint8 [N] and return the xxh3_64 checksum of the copy.

    numpy and xxhash release the GIL and use this thread only: torch's copy would start a second team of threads, which
    takes the cores from decoding. xxh3 runs at memory speed where zlib.crc32 does 1-3 GB/s.
    """
    digest = xxhash.xxh3_64()
    for start in range(0, len(source), _CHUNK_BYTES):
        piece = target[start : start + _CHUNK_BYTES]
        np.copyto(piece, source[start : start + _CHUNK_BYTES])
        digest.update(piece.data)
    return digest.intdigest()


def pack_bytes(target: np.ndarray, packer: WeightsPacker) -> int:
    """Have `packer` fill `target` uint8 [N] and return the xxh3_64 checksum, computed piece by piece on the way."""
    digest = xxhash.xxh3_64()
    for piece in packer.pack(torch.from_numpy(target)):
        digest.update(target[piece].data)
    return digest.intdigest()
