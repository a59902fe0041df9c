"""Versions in plain memory, for publishers and subscribers of one process."""

from __future__ import annotations

import numpy as np
import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import Holding
from slipstream.core.weights import SlotPlace
from slipstream.weight_sync.copying import HOST, Checksums, Memory, num_blocks
from slipstream.weight_sync.slots import Commit


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
        raise WeightSyncError(f"slot {slot} lies in memory of one process")

    def close(self) -> None:
        """Nothing to release: the memory goes with its last user."""


class InProcess:
    """Transport between executors of one process, which share this object."""

    def __init__(self, memory: Memory = HOST) -> None:
        self.memory = memory
        self._slots: dict[str, MemorySlots] = {}

    def create(self, num_bytes: int, num_slots: int, holding: Holding | None = None) -> MemorySlots:
        slots = MemorySlots(f"memory-{len(self._slots)}", num_bytes, num_slots, holding, self.memory)
        self._slots[slots.name] = slots
        return slots

    def attach(self, name: str) -> MemorySlots:
        if name not in self._slots:
            raise WeightSyncError("no such weights in this process", got=name, allowed=", ".join(self._slots) or "none")
        return self._slots[name]
