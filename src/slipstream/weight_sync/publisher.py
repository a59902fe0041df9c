"""The trainer's end of weight sync: a staging copy per version, offered to every living reader, never waited for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from slipstream.core.clock import WallClock
from slipstream.core.errors import WeightSyncError
from slipstream.core.executor import Receiver, Sender, WeightsPacker
from slipstream.core.types import WeightsOffered, WeightsReleased
from slipstream.weight_sync.slots import Commit, Slots, Transport, bytes_of, copy_bytes, pack_bytes

_CLOCK = WallClock()


class SlotLedger:
    """Who still reads which slot. A slot is free when every living reader has released it."""

    def __init__(self, num_slots: int, readers: set[int]) -> None:
        self.readers = set(readers)
        self._versions = [-1] * num_slots
        self._reading: list[set[int]] = [set() for _ in range(num_slots)]

    def free_slot(self) -> int | None:
        """The free slot with the oldest content, or None."""
        free = [slot for slot, reading in enumerate(self._reading) if not reading]
        return min(free, key=lambda slot: self._versions[slot], default=None)

    def offer(self, slot: int, version: int) -> None:
        """Every reader may read `slot` from now on."""
        assert not self._reading[slot], f"slot {slot} is still being read by {self._reading[slot]}"
        self._versions[slot], self._reading[slot] = version, set(self.readers)

    def release(self, replica: int, version: int, slot: int) -> bool:
        """False for a release of something the slot no longer holds, which changes nothing."""
        if not 0 <= slot < len(self._versions) or self._versions[slot] != version:
            return False
        if replica not in self._reading[slot]:
            return False
        self._reading[slot].remove(replica)
        return True

    def drop_reader(self, replica: int) -> None:
        self.readers.discard(replica)
        for reading in self._reading:
            reading.discard(replica)


@dataclass
class PublishStats:
    """Cumulative, but for `staging_s`, the seconds of the last staging copy with its checksum."""

    num_published: int = 0
    num_skipped: int = 0
    payload_bytes: int = 0
    staging_s: float = 0.0


class Publisher:
    """Implements `core.executor.WeightsPublisher`: offers go out on `offers`, releases come in on `releases`.

    `num_slots` versions may be in transit. When a version finds no free slot it is skipped and counted; a private
    copy of the newest skipped one is offered as soon as a reader releases a slot.
    """

    def __init__(
        self, offers: Sender, releases: Receiver, transport: Transport, *, num_readers: int, num_slots: int = 2
    ) -> None:
        self.stats = PublishStats()
        self._offers, self._releases, self._transport = offers, releases, transport
        self._ledger = SlotLedger(num_slots, set(range(num_readers)))
        self._num_slots = num_slots
        self._live: np.ndarray | None = None
        self._packer: WeightsPacker | None = None
        self._slots: Slots | None = None
        self._held: np.ndarray | None = None
        self._held_offer: tuple[int, np.ndarray, np.ndarray] | None = None
        self._newest = -1

    def open(self, flat: torch.Tensor, packer: WeightsPacker | None = None) -> None:
        """`flat` [num_params] holds the live weights from now on; they are only read inside `publish`.

        With a `packer`, slots hold what it makes of them.
        """
        if self._slots is not None:
            raise WeightSyncError("this publisher is open already")
        self._live, self._packer = bytes_of(flat), packer
        self._slots = self._transport.create(self.num_bytes, self._num_slots)

    @property
    def num_bytes(self) -> int:
        """Of one version."""
        return len(self._opened()) if self._packer is None else self._packer.num_bytes

    def publish(self, version: int, probe_tokens: np.ndarray, probe_logprobs: np.ndarray) -> bool:
        """Copy the weights to a free slot and offer them; False when every slot is still being read.

        Versions ascend. The weights may change again as soon as this returns.
        """
        self._opened()
        if version <= self._newest:
            raise WeightSyncError("versions are published in ascending order", got=version, allowed=f"> {self._newest}")
        self._newest = version
        self._take_releases()
        self._held_offer = None
        slot = self._ledger.free_slot()
        if slot is None:
            self.stats.num_skipped += 1
            if self._held is None:
                self._held = np.zeros(self.num_bytes, np.uint8)
            self._write(self._held)
            self._held_offer = (version, probe_tokens, probe_logprobs)
            return False
        self._offer(slot, None, version, probe_tokens, probe_logprobs)
        return True

    def poll(self) -> bool:
        """Take releases; offer the newest skipped version when a slot came free. True when anything happened."""
        took = self._take_releases()
        slot = self._ledger.free_slot()
        if self._held_offer is not None and self._held is not None and slot is not None:
            offer, self._held_offer = self._held_offer, None
            self._offer(slot, self._held, *offer)
            return True
        return took

    def drop_reader(self, replica: int) -> None:
        """Forget a dead replica: its slots come free."""
        self._ledger.drop_reader(replica)

    def add_reader(self, replica: int) -> None:
        """A replica that joined or came back: it takes part from the next version on."""
        self._ledger.readers.add(replica)

    def close(self) -> None:
        """Unlink the segment; readers that map it finish their copy. Idempotent."""
        if self._slots is not None:
            self._slots.close()

    def _write(self, target: np.ndarray) -> int:
        """The live weights to `target`; returns the checksum."""
        if self._packer is None:
            return copy_bytes(target, self._opened())
        return pack_bytes(target, self._packer)

    def _offer(
        self, slot: int, held: np.ndarray | None, version: int, tokens: np.ndarray, logprobs: np.ndarray
    ) -> None:
        """Offer the version `held` back, or the live weights where it is None."""
        assert self._slots is not None
        started_s = _CLOCK.now_s()
        self._slots.invalidate(slot)
        target = self._slots.data(slot)
        checksum = self._write(target) if held is None else copy_bytes(target, held)
        self._slots.commit(slot, Commit(version, checksum))
        self.stats.staging_s = _CLOCK.now_s() - started_s
        self._ledger.offer(slot, version)
        self._offers.put(
            WeightsOffered(
                version=version,
                slot=slot,
                segment=self._slots.name,
                num_bytes=len(target),
                checksum=checksum,
                probe_tokens=tokens,
                probe_logprobs=logprobs,
            )
        )
        self.stats.num_published += 1
        self.stats.payload_bytes += len(target)

    def _take_releases(self) -> bool:
        took = False
        while (message := self._releases.get_nowait()) is not None:
            if not isinstance(message, WeightsReleased):
                raise WeightSyncError("a release was expected", got=type(message).__name__)
            took = self._ledger.release(message.replica, message.version, message.slot) or took
        return took

    def _opened(self) -> np.ndarray:
        if self._live is None:
            raise WeightSyncError("this publisher is not open", hint="call open(flat) first")
        return self._live
