"""Slots in a file that several processes map: named after the run, owned and unlinked by the publisher.

Plain files instead of `multiprocessing.shared_memory`, whose Python 3.11 resource tracker unlinks the owner's segment
when an attached process exits.

    page 0     magic, number of slots, bytes per slot, bytes of the holding, bytes of the handle; then a record per
               slot: marker, version, checksum
    page 1 ..  the holding and the handle; the checksums of each slot's blocks; the slots: each starting on a page

A segment with a handle has no slots: their bytes lie where that leads (`cuda_ipc.py`). Page 0 then names, behind the
records, the segment without a handle that has the same versions for readers whom the handle leads nowhere, once there
is one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import mmap
import os
import shutil
import struct
import uuid
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from slipstream.core import wire
from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import Holding
from slipstream.core.scratch import file_prefix, hold, scratch_directories
from slipstream.core.weights import SlotPlace
from slipstream.weight_sync.copying import HOST, Checksums, Memory, num_blocks
from slipstream.weight_sync.slots import Commit

_MAGIC = b"SLIPSEG3"
_HEADER = struct.Struct("<8sQQQQ")
_RECORD = struct.Struct("<QqQ")
_MARKER = struct.Struct("<Q")
_MIRROR = struct.Struct("<QQ")  # marker, bytes of the name behind it
_COMMITTED = 0x434F4D4D49545445  # any number that is not zero by accident
_PAGE_BYTES = 4096
_ELSEWHERE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.ENOENT}
"""Errors of a directory for which the next one is tried."""
_MAX_SLOTS = 64
_MIRROR_START = _HEADER.size + _MAX_SLOTS * _RECORD.size
_MADV_POPULATE_WRITE = 23  # Linux's; Python has no name for it


class SegmentSlots:
    """A mapped segment file; the process that created it unlinks it."""

    def __init__(self, path: Path, *, is_owner: bool) -> None:
        self.name = str(path)
        self._owner_pid = os.getpid() if is_owner else None
        self._hold: int | None = None
        self._memory: torch.Tensor | None = None
        self._mirror: SegmentSlots | None = None
        try:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise WeightSyncError(
                "a weight segment cannot be mapped", got=error, hint="has its publisher ended?"
            ) from error
        magic, self.num_slots, self.num_bytes, holding_bytes, handle_bytes = _HEADER.unpack_from(self._map)
        if magic == _MAGIC and self.num_slots <= _MAX_SLOTS:
            self._places = _Places(self.num_bytes, self.num_slots, holding_bytes, handle_bytes)
        if magic != _MAGIC or self.num_slots > _MAX_SLOTS or len(self._map) != self._places.size:
            raise WeightSyncError("this is not a weight segment", got=f"{path}, {len(self._map)} bytes")
        self.holding = None
        if holding_bytes:
            self.holding = wire.decode_one(self._map[_PAGE_BYTES : _PAGE_BYTES + holding_bytes], Holding)
        start = _PAGE_BYTES + holding_bytes
        self.handle = self._map[start : start + handle_bytes]
        self._unreserved = {self.num_slots - 1} if is_owner and self.num_slots > 1 and not handle_bytes else set()
        if is_owner:
            self._hold = hold(path)
            atexit.register(self.close)
            if not handle_bytes:
                self._populate(0, self._places.data(max(self.num_slots - 1, 1)))

    def data(self, slot: int) -> torch.Tensor:
        if self.handle:
            if self._memory is None:
                raise WeightSyncError("the bytes of these versions lie on a GPU", hint="both ends must compute on GPUs")
            start = slot * _round_up(self.num_bytes)
            return self._memory[start : start + self.num_bytes]
        return torch.from_numpy(np.frombuffer(self._map, np.uint8, self.num_bytes, self._places.data(slot)))

    def lie_in(self, memory: torch.Tensor) -> SegmentSlots:
        """Take the bytes of the slots from uint8 `memory`, where the handle leads; returns the slots themselves."""
        if len(memory) != device_bytes(self.num_bytes, self.num_slots):
            raise WeightSyncError("the memory of a segment has another size", got=len(memory), allowed=self.num_bytes)
        self._memory = memory
        return self

    def checksums(self, slot: int) -> Checksums:
        return np.frombuffer(self._map, np.uint64, num_blocks(self.num_bytes), self._places.checksums(slot))

    def invalidate(self, slot: int) -> None:
        if slot in self._unreserved:
            self._reserve(slot)
        _MARKER.pack_into(self._map, self._record(slot), 0)

    def commit(self, slot: int, commit: Commit) -> None:
        if self._mirror is not None:
            self._copy_to(self._mirror, slot, commit)
        _RECORD.pack_into(self._map, self._record(slot), 0, commit.version, commit.checksum)
        _MARKER.pack_into(self._map, self._record(slot), _COMMITTED)

    def committed(self, slot: int) -> Commit | None:
        marker, version, checksum = _RECORD.unpack_from(self._map, self._record(slot))
        return Commit(version, checksum) if marker == _COMMITTED else None

    def mirror_in(self, mirror: SegmentSlots) -> None:
        """Copy what is committed to `mirror`, of the same size, and whatever is from now on; tell readers of it."""
        assert self._mirror is None
        name = mirror.name.encode()
        for slot in range(self.num_slots):
            if (commit := self.committed(slot)) is not None:
                self._copy_to(mirror, slot, commit)
        self._mirror = mirror
        start = _MIRROR_START + _MIRROR.size
        self._map[start : start + len(name)] = name
        _MIRROR.pack_into(self._map, _MIRROR_START, 0, len(name))
        _MARKER.pack_into(self._map, _MIRROR_START, _COMMITTED)

    @property
    def mirror_name(self) -> str | None:
        """The segment that has all versions that are offered in this one, if there is one."""
        marker, length = _MIRROR.unpack_from(self._map, _MIRROR_START)
        start = _MIRROR_START + _MIRROR.size
        return self._map[start : start + length].decode() if marker == _COMMITTED else None

    def _copy_to(self, mirror: SegmentSlots, slot: int, commit: Commit) -> None:
        mirror.invalidate(slot)
        mirror.data(slot).copy_(self.data(slot))
        mirror.checksums(slot)[:] = self.checksums(slot)
        mirror.commit(slot, commit)

    def place(self, slot: int) -> SlotPlace:
        if self.handle or self.holding is None:
            raise WeightSyncError("this segment does not say what lies where in it", got=self.name)
        record, start = self._record(slot), self._places.data(slot)
        return SlotPlace(self.name, record, self._map[record : record + _RECORD.size], start, self.holding)

    def close(self) -> None:
        """Unlink the file if this process owns it. The mapping goes with the last array that uses it. Idempotent."""
        if self._owner_pid == os.getpid():
            self._owner_pid = None
            if self._mirror is not None:
                self._mirror.close()
            Path(self.name).unlink(missing_ok=True)
            if self._hold is not None:
                os.close(self._hold)
            atexit.unregister(self.close)

    def _populate(self, start: int, stop: int) -> None:
        """Map the pages now: the first version in a slot would wait for each of them."""
        with contextlib.suppress(OSError):  # Linux before 5.14
            self._map.madvise(_MADV_POPULATE_WRITE, start, stop - start)

    def _reserve(self, slot: int) -> None:
        try:
            with open(self.name, "r+b") as file:
                _reserve(file.fileno(), self._places.data(slot), _round_up(self.num_bytes))
        except OSError as error:
            raise WeightSyncError("no room for a further version in the weight segment", got=error) from error
        self._unreserved.clear()

    def _record(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise WeightSyncError("a weight segment has no such slot", got=slot, allowed=f"0..{self.num_slots - 1}")
        return _HEADER.size + slot * _RECORD.size


class SharedMemory:
    """Transport between processes of one machine. `run_id` names the files: letters, digits, '_' and '-'."""

    memory: Memory = HOST

    def __init__(self, run_id: str, directories: tuple[Path, ...] | None = None) -> None:
        self._prefix = file_prefix(run_id)
        self._directories = directories if directories is not None else scratch_directories()

    def create(
        self, num_bytes: int, num_slots: int, holding: Holding | None = None, handle: bytes = b""
    ) -> SegmentSlots:
        """A new segment in the first directory with room for all of it; its space is reserved, so writing cannot fail.

        But for the last of several slots, which few runs ever write: its space is reserved by its first `invalidate`.
        Where no directory has room for that slot too, the first with room for the others is taken.
        With a `handle`, by which others find the bytes, there is no space for them here.
        """
        if not 1 <= num_slots <= _MAX_SLOTS:
            raise WeightSyncError("bad number of slots", got=num_slots, allowed=f"1..{_MAX_SLOTS}")
        encoded = b"" if holding is None else wire.encode(holding)
        places = _Places(num_bytes, num_slots, len(encoded), len(handle))
        for directory in sorted(self._directories, key=lambda directory: not _has_room(directory, places.size)):
            path = directory / f"{self._prefix}{uuid.uuid4().hex[:12]}"
            try:
                _allocate(path, places)
            except OSError as error:
                if error.errno not in _ELSEWHERE:
                    raise
                with contextlib.suppress(OSError):  # it is not there, and a read-only one says so first
                    path.unlink()
                continue
            with open(path, "r+b") as file:
                file.write(_HEADER.pack(_MAGIC, num_slots, num_bytes, len(encoded), len(handle)))
                file.seek(_PAGE_BYTES)
                file.write(encoded + handle)
            return SegmentSlots(path, is_owner=True)
        raise WeightSyncError(
            "no room for the weight segment",
            got=f"{places.size} bytes needed",
            allowed=", ".join(map(str, self._directories)),
            hint="free memory in /dev/shm or the temporary directory",
        )

    def attach(self, name: str) -> SegmentSlots:
        path = Path(name)
        if not path.name.startswith(self._prefix):
            raise WeightSyncError("this segment belongs to another run", got=name, allowed=f"{self._prefix}*")
        return SegmentSlots(path, is_owner=False)


def _has_room(directory: Path, num_bytes: int) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free >= num_bytes
    return False


def _allocate(path: Path, places: _Places) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.truncate(descriptor, places.size)
        _reserve(descriptor, 0, places.data(max(places.num_slots - 1, 1)))
    finally:
        os.close(descriptor)


def _reserve(descriptor: int, start: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate") and num_bytes:  # not on macOS
        os.posix_fallocate(descriptor, start, num_bytes)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def device_bytes(num_bytes: int, num_slots: int) -> int:
    """Return the size of an allocation for slots that lie outside of the segment."""
    return num_slots * _round_up(num_bytes)


class _Places(NamedTuple):
    """Where things lie in a segment's file."""

    num_bytes: int
    num_slots: int
    holding_bytes: int
    handle_bytes: int

    def checksums(self, slot: int) -> int:
        blocks = _round_up(8 * num_blocks(self.num_bytes))
        return _PAGE_BYTES + _round_up(self.holding_bytes + self.handle_bytes) + slot * blocks

    def data(self, slot: int) -> int:
        return self.checksums(self.num_slots) + slot * (0 if self.handle_bytes else _round_up(self.num_bytes))

    @property
    def size(self) -> int:
        return self.data(self.num_slots)
