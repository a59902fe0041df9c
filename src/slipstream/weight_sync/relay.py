"""Where a link's source takes a version from: slots that were published, or what a replica is just being sent.

A replica that hands a version on (`tree.py`) sends each bucket as soon as that has landed, out of the buffer in which
it decodes with the version later. The buffer is written again two versions later; a reader that still needs it then
finds the version gone, and gets a newer one.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from slipstream.core.peer_messages import Holding
from slipstream.weight_sync.copies import Extent
from slipstream.weight_sync.copying import HOST
from slipstream.weight_sync.slots import Slots


class Availability(enum.Enum):
    """The state of some bytes of a version."""

    READY = enum.auto()
    AWAITED = enum.auto()  # not here yet
    GONE = enum.auto()  # overwritten, or passed over


class Source(Protocol):
    """Versions that a link may send. Its methods may be called by several threads."""

    @property
    def holding(self) -> Holding | None: ...

    @property
    def num_arrivals(self) -> int:
        """Grows with every piece that lands, so that a waiting sender sees progress."""
        ...

    def wait(self, version: int, slot: int, extent: Extent, timeout_s: float, /) -> Availability:
        """Wait until the bytes of `extent` are there, or for `timeout_s`."""
        ...

    def data(self, version: int, slot: int, /) -> torch.Tensor | None:
        """uint8 [num_bytes]; what is READY is valid for as long as `wait` says so again afterwards. None: GONE."""
        ...


class SlotSource:
    """The published slots, in which a version is whole or not there. Implements `Source`."""

    num_arrivals = 0

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    @property
    def holding(self) -> Holding | None:
        return self._slots.holding

    def wait(self, version: int, slot: int, _extent: Extent, _timeout_s: float) -> Availability:
        commit = self._slots.committed(slot) if 0 <= slot < self._slots.num_slots else None
        return Availability.READY if commit is not None and commit.version == version else Availability.GONE

    def data(self, _version: int, slot: int) -> torch.Tensor | None:
        return self._slots.data(slot) if 0 <= slot < self._slots.num_slots else None


class _Buffer:
    def __init__(self, version: int, flat: torch.Tensor, extents: Sequence[Extent]) -> None:
        self.version, self.flat = version, flat
        table = np.array(extents, np.int64).reshape(-1, 2)
        self.starts, self.stops = table[:, 0], table[:, 1]
        self.is_awaited = np.ones(len(table), bool)

    def has(self, extent: Extent) -> bool:
        start, stop = extent
        return not (self.is_awaited & (self.starts < stop) & (self.stops > start)).any()


class Shelf:
    """The two buffers of a generator's rank, and what has landed in them. Implements `Source`.

    The thread that receives versions calls `begin`, `landed` and `fail`; those that send them on call the rest.
    """

    def __init__(self, holding: Holding) -> None:
        self.holding = holding
        self.num_arrivals = 0
        self._buffers: list[_Buffer] = []  # the newest last
        self._changed = threading.Condition()

    def begin(self, version: int, flat: torch.Tensor, extents: Sequence[Extent]) -> None:
        """`flat` is about to be written, in pieces that lie within `extents`. What it held is gone."""
        with self._changing():
            self._buffers = [buffer for buffer in self._buffers if buffer.flat.data_ptr() != flat.data_ptr()]
            self._buffers.append(_Buffer(version, flat, extents))

    def landed(self, index: int) -> None:
        """Note that extent `index` of the version begun last is written and verified."""
        with self._changing():
            self._buffers[-1].is_awaited[index] = False
            self.num_arrivals += 1

    def fail(self) -> None:
        """The version begun last will not become whole; it may be begun again."""
        with self._changing():
            self._buffers.pop()

    def wait(self, version: int, _slot: int, extent: Extent, timeout_s: float) -> Availability:
        with self._changed:
            self._changed.wait_for(lambda: self._state(version, extent) is not Availability.AWAITED, timeout_s)
            return self._state(version, extent)

    def data(self, version: int, _slot: int) -> torch.Tensor | None:
        with self._changed:
            buffer = self._buffer_of(version)
            return None if buffer is None else HOST.bytes_of(buffer.flat)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._changed:
            yield
            self._changed.notify_all()

    def _buffer_of(self, version: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.version == version), None)

    def _state(self, version: int, extent: Extent) -> Availability:
        buffer = self._buffer_of(version)
        if buffer is None:
            newest = max((buffer.version for buffer in self._buffers), default=-1)
            return Availability.AWAITED if version > newest else Availability.GONE
        return Availability.READY if buffer.has(extent) else Availability.AWAITED
