"""Where a rank's bytes of published versions lie: numbered slots that a publisher writes and subscribers copy from.

A slot is written as: marker cleared, bytes, checksums of its blocks, marker. A reader checks the marker, copies, and
compares checksums of what it copied, so a torn or damaged slot is never used. Beside the slots lies the `Holding` that
says which boxes they hold, unless all readers take their bytes as they are.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import Holding
from slipstream.core.weights import SlotPlace
from slipstream.weight_sync.copying import Checksums, Memory


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
