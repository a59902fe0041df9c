"""Slots in a file that several processes map: named after the run, owned and unlinked by the publisher.

Plain files instead of `multiprocessing.shared_memory`, whose Python 3.11 resource tracker unlinks the owner's segment
when an attached process exits.

    page 0     magic, number of slots, bytes per slot; then one record per slot: marker, version, checksum
    page 1 ..  the slots, each starting on a page
"""

from __future__ import annotations

import atexit
import errno
import mmap
import os
import re
import shutil
import struct
import tempfile
import uuid
from pathlib import Path

import numpy as np

from slipstream.core.errors import WeightSyncError
from slipstream.weight_sync.slots import Commit

_MAGIC = b"SLIPSEG1"
_HEADER = struct.Struct("<8sQQ")
_RECORD = struct.Struct("<QqQ")
_MARKER = struct.Struct("<Q")
_COMMITTED = 0x434F4D4D49545445  # any number that is not zero by accident
_PAGE_BYTES = 4096
_MAX_SLOTS = 64


class SegmentSlots:
    """A mapped segment file; the process that created it unlinks it."""

    def __init__(self, path: Path, *, is_owner: bool) -> None:
        self.name = str(path)
        self._owner_pid = os.getpid() if is_owner else None
        try:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise WeightSyncError(
                "a weight segment cannot be mapped", got=error, hint="has its publisher ended?"
            ) from error
        magic, self.num_slots, self.num_bytes = _HEADER.unpack_from(self._map)
        if magic != _MAGIC or self.num_slots > _MAX_SLOTS or len(self._map) != _size(self.num_bytes, self.num_slots):
            raise WeightSyncError("this is not a weight segment", got=f"{path}, {len(self._map)} bytes")
        if is_owner:
            atexit.register(self.close)

    def data(self, slot: int) -> np.ndarray:
        offset = _PAGE_BYTES + slot * _round_up(self.num_bytes)
        return np.frombuffer(self._map, np.uint8, self.num_bytes, offset)

    def invalidate(self, slot: int) -> None:
        _MARKER.pack_into(self._map, self._record(slot), 0)

    def commit(self, slot: int, commit: Commit) -> None:
        _RECORD.pack_into(self._map, self._record(slot), 0, commit.version, commit.checksum)
        _MARKER.pack_into(self._map, self._record(slot), _COMMITTED)

    def committed(self, slot: int) -> Commit | None:
        marker, version, checksum = _RECORD.unpack_from(self._map, self._record(slot))
        return Commit(version, checksum) if marker == _COMMITTED else None

    def close(self) -> None:
        """Unlink the file if this process owns it. The mapping goes with the last array that uses it. Idempotent."""
        if self._owner_pid == os.getpid():
            self._owner_pid = None
            Path(self.name).unlink(missing_ok=True)
            atexit.unregister(self.close)

    def _record(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise WeightSyncError("a weight segment has no such slot", got=slot, allowed=f"0..{self.num_slots - 1}")
        return _HEADER.size + slot * _RECORD.size


class SharedMemory:
    """Transport between processes of one machine. `run_id` names the files: letters, digits, '_' and '-'."""

    def __init__(self, run_id: str, directories: tuple[Path, ...] | None = None) -> None:
        self._prefix = file_prefix(run_id)
        self._directories = directories if directories is not None else segment_directories()

    def create(self, num_bytes: int, num_slots: int) -> SegmentSlots:
        """A new segment in the first directory with room; its space is reserved, so writing cannot fail later."""
        if not 1 <= num_slots <= _MAX_SLOTS:
            raise WeightSyncError("bad number of slots", got=num_slots, allowed=f"1..{_MAX_SLOTS}")
        size = _size(num_bytes, num_slots)
        for directory in self._directories:
            path = directory / f"{self._prefix}{uuid.uuid4().hex[:12]}"
            try:
                _allocate(path, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.ENOENT):
                    raise
                path.unlink(missing_ok=True)
                continue
            with open(path, "r+b") as file:
                file.write(_HEADER.pack(_MAGIC, num_slots, num_bytes))
            return SegmentSlots(path, is_owner=True)
        raise WeightSyncError(
            "no room for the weight segment",
            got=f"{size} bytes needed",
            allowed=", ".join(map(str, self._directories)),
            hint="free memory in /dev/shm or the temporary directory",
        )

    def attach(self, name: str) -> SegmentSlots:
        path = Path(name)
        if not path.name.startswith(self._prefix):
            raise WeightSyncError("this segment belongs to another run", got=name, allowed=f"{self._prefix}*")
        return SegmentSlots(path, is_owner=False)


def cleanup(run_id: str) -> list[Path]:
    """Remove the segments and other scratch that killed processes of this run left behind; returns them."""
    found = [path for directory in segment_directories() for path in directory.glob(f"{file_prefix(run_id)}*")]
    for path in found:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def segment_directories() -> tuple[Path, ...]:
    """Where segments may lie: memory first, then the temporary directory."""
    shared = Path("/dev/shm")
    return tuple(dict.fromkeys([*([shared] if shared.is_dir() else []), Path(tempfile.gettempdir())]))


def file_prefix(run_id: str) -> str:
    """What the names of a run's files outside its folder begin with."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", run_id):
        raise WeightSyncError("a run id names files", got=repr(run_id), allowed="1..100 letters, digits, '_' and '-'")
    return f"slipstream.{run_id}."


def _allocate(path: Path, size: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    finally:
        os.close(descriptor)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _size(num_bytes: int, num_slots: int) -> int:
    return _PAGE_BYTES + num_slots * _round_up(num_bytes)
