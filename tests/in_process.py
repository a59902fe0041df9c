"""Versions in plain memory, for publishers and subscribers of one process."""

from __future__ import annotations

from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import Holding
from slipstream.weight_sync.copying import HOST, Memory
from slipstream.weight_sync.slots import MemorySlots


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
