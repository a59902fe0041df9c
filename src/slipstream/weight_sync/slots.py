"""Where a rank's bytes of published versions lie: numbered slots that a publisher writes and subscribers copy from.

A slot is written as: marker cleared, bytes, checksums of its blocks, marker. A reader checks the marker, copies, and
compares checksums of what it copied, so a torn or damaged slot is never used. Beside the slots lies the `Holding` that
says which boxes they hold, unless all readers take their bytes as they are.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import Holding
from slipstream.core.weights import SlotPlace
from slipstream.weight_sync.copying import HOST, Checksums, Memory, num_blocks


class VersionGoneError(WeightSyncError):
    """A version that was offered is not there any more: its place has been, or is being, given to a newer one."""


class Commit(NamedTuple):
    """The version that lies complete in a slot; `checksum` is that of its blocks' checksums."""

    version: int
    checksum: int


class Slots(Protocol):
    """Slots of one rank; all of `num_bytes` bytes."""

    name: str
    num_slots: int
    num_bytes: int
    holding: Holding | None

    def data(self, slot: int) -> torch.Tensor:
        """uint8 [num_bytes]: a view of the slot."""
        ...

    def checksums(self, slot: int) -> Checksums:
        """uint64 [blocks]: a view of the slot's."""
        ...

    def invalidate(self, slot: int) -> None:
        """Clear the commit marker; before the first byte is rewritten."""
        ...

    def commit(self, slot: int, commit: Commit) -> None:
        """Set the commit marker; after the last byte."""
        ...

    def committed(self, slot: int) -> Commit | None: ...

    def place(self, slot: int) -> SlotPlace:
        """Where the version in `slot` lies. Raises WeightSyncError where another process cannot read it."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """How slots are shared between a publisher and its subscribers.

    `memory`: where this end has its bytes, the publisher its slots and a subscriber the buffers it copies to.
    """

    memory: Memory

    def create(self, num_bytes: int, num_slots: int, holding: Holding | None = None) -> Slots: ...

    def attach(self, name: str) -> Slots: ...


class MemorySlots:
    """Plain memory of this process."""

    def __init__(
        self, name: str, num_bytes: int, num_slots: int, holding: Holding | None = None, memory: Memory = HOST
    ) -> None:
        self.name, self.num_bytes, self.num_slots, self.holding = name, num_bytes, num_slots, holding
        self._data = [memory.empty(num_bytes).zero_() for _ in range(num_slots)]
        self._checksums = [np.zeros(num_blocks(num_bytes), np.uint64) for _ in range(num_slots)]
        self._commits: list[Commit | None] = [None] * num_slots

    def data(self, slot: int) -> torch.Tensor:
        return self._data[slot]

    def checksums(self, slot: int) -> Checksums:
        return self._checksums[slot]

    def invalidate(self, slot: int) -> None:
        self._commits[slot] = None

    def commit(self, slot: int, commit: Commit) -> None:
        self._commits[slot] = commit

    def committed(self, slot: int) -> Commit | None:
        return self._commits[slot]

    def place(self, slot: int) -> SlotPlace:
        raise WeightSyncError(f"slot {slot} lies in memory of one process", hint="`SharedMemory` is for several")

    def close(self) -> None:
        """Nothing to release: the memory goes with its last user."""
