"""The trainer's end of weight sync: a staging copy per version, offered to every living reader, never waited for."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from slipstream.core.clock import WallClock
from slipstream.core.errors import WeightSyncError
from slipstream.core.executor import Receiver, Sender
from slipstream.core.peer_messages import Holding, WeightsLinked, WeightsOffered, WeightsReleased, WeightsWanted
from slipstream.core.rank_group import RankGroup
from slipstream.core.types import Message
from slipstream.core.weights import WeightsPacker
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.relay import SlotSource
from slipstream.weight_sync.segment import SegmentSlots
from slipstream.weight_sync.slots import Commit, Slots, Transport
from slipstream.weight_sync.tree import TRAINER, FeedingTree
from slipstream.weight_sync.weight_links import Links

_CLOCK = WallClock()
_DECISION = struct.Struct("<qq?")  # version, slot, whether it is offered
_STAGED = struct.Struct("<Q")  # checksum

Reader = tuple[int, int]
"""(replica, rank)"""

MOST_UNREAD = 32  # offers taken back from a reader that releases nothing: they wait in its channel, which is bounded


class SlotLedger:
    """The readers of each slot. A slot is free when every living reader has released it, or does not need it."""

    def __init__(self, num_slots: int, readers: Iterable[Reader]) -> None:
        self.readers = set(readers)
        self._versions = [-1] * num_slots
        self._reading: list[set[Reader]] = [set() for _ in range(num_slots)]
        self._unread = Counter[Reader]()

    def free_slots(self) -> list[int]:
        """Return the free slots, those with the oldest content first."""
        free = [slot for slot, reading in enumerate(self._reading) if not reading]
        return sorted(free, key=lambda slot: self._versions[slot])

    def version_in(self, slot: int) -> int:
        return self._versions[slot]

    def write(self, slot: int, version: int) -> None:
        """`slot` holds `version` from now on, and nobody reads it yet."""
        assert not self._reading[slot], f"slot {slot} is still being read by {self._reading[slot]}"
        self._versions[slot] = version

    def offer(self, slot: int, readers: Iterable[Reader] | None = None) -> None:
        """Every reader, or `readers`, may read `slot` from now on."""
        self._reading[slot].update(self.readers if readers is None else readers)

    def release(self, reader: Reader, version: int, slot: int) -> bool:
        """False for a release of something the slot no longer holds, which changes nothing."""
        if not 0 <= slot < len(self._versions) or self._versions[slot] != version:
            return False
        if reader not in self._reading[slot]:
            return False
        self._reading[slot].remove(reader)
        del self._unread[reader]
        return True

    def take_back(self, replicas: Collection[int]) -> None:
        """Free the oldest slot that nobody reads yet: its readers are of `replicas`, which read one version at a time,
        have an older one to release first, and have not left too many unread."""
        busy: set[Reader] = set()
        for slot in sorted(range(len(self._versions)), key=self.version_in):
            if self._reading[slot] and self._reading[slot] <= busy:
                self._unread.update(self._reading[slot])
                self._reading[slot].clear()
                return
            busy.update(r for r in self._reading[slot] if r[0] in replicas and self._unread[r] < MOST_UNREAD)

    def forget(self, replica: int) -> None:
        """No rank of `replica` reads anything any more."""
        for reading in self._reading:
            reading.difference_update([reader for reader in reading if reader[0] == replica])
        self._unread = Counter({reader: count for reader, count in self._unread.items() if reader[0] != replica})

    def drop_replica(self, replica: int) -> None:
        """It takes no part from now on."""
        self.readers = {reader for reader in self.readers if reader[0] != replica}
        self.forget(replica)


@dataclass
class PublishStats:
    """Cumulative, but for `staging_s`, the seconds of the last staging copy with its checksum."""

    num_published: int = 0
    num_skipped: int = 0
    payload_bytes: int = 0
    staging_s: float = 0.0


class Publisher:
    """Implements `core.weights.WeightsPublisher`: offers go out on `offers`, `releases` brings these and requests.

    `num_slots` versions may be in transit. One that finds no free slot is skipped and counted; it is written to a slot
    more that nobody reads, and offered as soon as a reader releases one, unless a newer one has come by then. A reader
    that is slow, or stopped, keeps the slot that it reads, and no other that somebody needs.

    Of the ranks of `group` each has segments of its own, made by `transport`; rank 0 has the ports and `relay`, by
    which it tells the others what happens between two versions. `links`: to readers that cannot map segments, of which
    some may be fed by others (`tree.py`). Readers that are `away` count as dropped until they are added.

    `in_place`: there is one slot, in which the live weights lie themselves. Nothing is copied, and they may change only
    when `withdraw` has said so, which waits for readers: both sides must take turns, so that these are done by then.
    """

    def __init__(
        self,
        offers: Sender | None,
        releases: Receiver | None,
        transport: Transport,
        *,
        num_readers: int,
        away: Collection[int] = (),
        reader_ranks: int = 1,
        num_slots: int = 2,
        in_place: bool = False,
        group: RankGroup | None = None,
        links: Links | None = None,
        relay: Sender | None = None,
    ) -> None:
        self.stats = PublishStats()
        self._offers, self._releases, self._transport, self._relay = offers, releases, transport, relay
        self._links, self._group = links, RankGroup.alone() if group is None else group
        self._ranks = range(reader_ranks)
        readers = [(replica, rank) for replica in range(num_readers) if replica not in away for rank in self._ranks]
        self._in_place = in_place
        self._ledger = SlotLedger(1 if in_place else num_slots + 1, readers)
        self._live: torch.Tensor | None = None
        self._packer: WeightsPacker | None = None
        self._slots: Slots | None = None
        self._segments: tuple[str, ...] = ()
        self._num_bytes = 0
        self._last: WeightsOffered | None = None
        self._held: WeightsOffered | None = None
        self._newest = -1
        self._checksums: tuple[int, ...] = ()
        self._has_moved = True
        self._wanting: dict[int, dict[int, WeightsWanted]] = {}
        self._greeted: set[int] = set()  # replicas that have asked before
        self._copying: set[int] = set()  # replicas that copy versions from here, one at a time
        self._lost = set(away)  # that were dropped, or are yet to come: what they ask for waits until they are added
        self._epochs: dict[int, int] = {}
        self._tree = FeedingTree([])

    def open(
        self, flat: torch.Tensor | None, packer: WeightsPacker | None = None, holding: Holding | None = None
    ) -> None:
        """The live weights from now on, only read inside `publish`: `flat`, or what `packer` makes of them."""
        if self._slots is not None:
            raise WeightSyncError("this publisher is open already")
        self._packer = packer
        if packer is not None:
            num_bytes, holding = packer.num_bytes, packer.holding
        elif flat is not None:
            self._live = self._transport.memory.bytes_of(flat)
            num_bytes = len(self._live)
        else:
            raise WeightSyncError("a publisher needs flat weights or a packer")
        self._slots = self._transport.create(num_bytes, len(self._ledger.free_slots()), holding)
        if self._in_place:
            if packer is None:
                raise WeightSyncError("weights that are published in place need a packer that puts them there")
            packer.settle(self._slots.data(0))
        told = self._group.gather(num_bytes.to_bytes(8, "little") + self._slots.name.encode())
        if self._links is not None:
            hosts = {host.decode() for host in self._group.gather(self._links.place.host.encode())}
            self._tree = FeedingTree(hosts, relays=self._links.relays)
        self._segments = tuple(name[8:].decode() for name in told)
        self._num_bytes = sum(int.from_bytes(name[:8], "little") for name in told)

    @property
    def num_bytes(self) -> int:
        """The size of one version, on all ranks together."""
        self._opened()
        return self._num_bytes

    def withdraw(self) -> bool:
        """Say that the live weights are about to change; False where somebody still reads the version that is in them.

        A reader that comes back from here on waits for the next version.
        """
        if self._in_place:
            self._take_messages()
            if not self._ledger.free_slots():
                return False
            self._last = None
            self._opened().invalidate(0)
        return True

    def publish(self, version: int, probe_tokens: np.ndarray, probe_logprobs: np.ndarray) -> bool:
        """Copy the weights to a free slot and offer them; False when every slot is still being read.

        Versions ascend. The weights may change again as soon as this returns. All ranks call it together.
        """
        slots = self._opened()
        if version <= self._newest:
            raise WeightSyncError("versions are published in ascending order", got=version, allowed=f"> {self._newest}")
        self._newest = version
        slot, is_offered = self._decide(version)
        checksums = self._stage(slots, slot, version)
        if not self._group.is_leader:
            return is_offered
        self._has_moved, self._checksums = checksums != self._checksums, checksums
        offer = WeightsOffered(
            version=version,
            slot=slot,
            segments=self._segments,
            checksums=checksums,
            probe_tokens=probe_tokens,
            probe_logprobs=probe_logprobs,
        )
        if is_offered:
            self._offer(offer)
        else:
            self._held = offer
            self.stats.num_skipped += 1
        return is_offered

    @property
    def has_moved(self) -> bool:
        """Whether the bytes of the last version were others than those of the one before; on rank 0."""
        return self._has_moved

    def poll(self) -> bool:
        """Take releases; offer the newest skipped version when a slot came free. True when anything happened."""
        took = self._take_messages()
        if self._held is not None and len(self._free_slots()) > 1:
            held, self._held = self._held, None
            self._offer(held)
            return True
        return took

    def take(self, message: Message) -> None:
        """On ranks other than 0: what rank 0 has relayed."""
        match message:
            case WeightsLinked():
                self._serve(message)
            case WeightsWanted():
                self._mirror()
            case _:
                raise WeightSyncError("a link was expected", got=type(message).__name__)

    def drop_reader(self, replica: int) -> None:
        """Forget a dead replica: its slots come free, its link is closed, those that it has fed get another."""
        self._ledger.drop_replica(replica)
        self._lost.add(replica)
        self._wanting.pop(replica, None)
        if self._links is not None:
            self._links.drop(replica)
        for child in self._tree.leave(replica):
            world = self._tree.world(child)
            self._link(child, self._tree.host(child), world)
            self._offer_again(child, world)

    def add_reader(self, replica: int) -> None:
        """A replica that joined or came back, to which `offers` leads again; it gets the last version when it asks."""
        self._ledger.readers.update((replica, rank) for rank in self._ranks)
        self._greeted.add(replica)
        self._lost.discard(replica)
        asked = list(self._wanting.pop(replica, {}).values())
        for message in asked:
            self._want(message)

    def close(self) -> None:
        """Unlink the segment; readers that map it finish their copy. Idempotent."""
        if self._links is not None:
            self._links.close()
        if self._slots is not None:
            self._slots.close()

    # Versions

    def _decide(self, version: int) -> tuple[int, bool]:
        """Where to write it, and whether to offer it: rank 0's decision."""
        decision = b""
        if self._group.is_leader:
            self._take_messages()
            self._held = None
            free = self._free_slots()
            # The slot more comes last, so that runs without skips never touch its memory.
            slot = min(free, key=lambda slot: slot == self._spare and self._ledger.version_in(slot) < 0)
            self._ledger.write(slot, version)
            decision = _DECISION.pack(version, slot, len(free) > 1 or self._in_place)
        agreed, slot, is_offered = _DECISION.unpack(self._group.broadcast(decision))
        if agreed != version:
            raise WeightSyncError("ranks publish different versions", got=version, allowed=f"rank 0's {agreed}")
        return slot, is_offered

    def _free_slots(self) -> list[int]:
        if len(self._ledger.free_slots()) < 2:
            self._ledger.take_back(self._copying)
        return self._ledger.free_slots()

    @property
    def _spare(self) -> int:
        return self._opened().num_slots - 1

    def _stage(self, slots: Slots, slot: int, version: int) -> tuple[int, ...]:
        """This rank's part of the live weights to its slot; returns the checksums of all ranks."""
        started_s = _CLOCK.now_s()
        slots.invalidate(slot)
        memory, target, checksums = self._transport.memory, slots.data(slot), slots.checksums(slot)
        if self._packer is not None:
            checksum = memory.pack(target, self._packer, checksums)
        else:
            assert self._live is not None, "open has seen to that"
            checksum = memory.copy(target, self._live, checksums)
        slots.commit(slot, Commit(version, checksum))
        self.stats.staging_s = _CLOCK.now_s() - started_s
        return tuple(_STAGED.unpack(staged)[0] for staged in self._group.gather(_STAGED.pack(checksum)))

    def _offer(self, offer: WeightsOffered) -> None:
        self._ledger.offer(offer.slot)
        self._last = offer
        self._send(offer)
        self.stats.num_published += 1
        self.stats.payload_bytes += self._num_bytes

    def _send(self, message: Message) -> None:
        assert self._offers is not None, "rank 0 has the ports"
        self._offers.put(message)

    # Readers

    def _take_messages(self) -> bool:
        took = False
        while self._releases is not None and (message := self._releases.get_nowait()) is not None:
            match message:
                case WeightsReleased():
                    reader = (message.replica, message.rank)
                    took = self._ledger.release(reader, message.version, message.slot) or took
                case WeightsWanted():
                    self._want(message)
                    took = True
                case _:
                    raise WeightSyncError("a release or request was expected", got=type(message).__name__)
        return took

    def _want(self, message: WeightsWanted) -> None:
        """Once all ranks of a replica have asked, or one has lost their link: link it, and offer again what it may
        have lost.

        The first time nothing is lost: a replica that was there from the start finds every offer in its channel.
        """
        if message.in_host_memory:
            if self._relay is not None:
                self._relay.put(message)
            self._mirror()
            return
        replica = message.replica
        if message.lost_epoch not in (0, self._epochs.get(replica)):
            return  # another rank has lost that link, too: it was replaced
        wanting = self._wanting.setdefault(replica, {})
        wanting[message.rank] = message
        is_complete = len(wanting) == message.world or message.lost_epoch > 0
        if not is_complete or replica in self._lost:
            return
        del self._wanting[replica]
        if message.is_linked:
            self._link(replica, wanting.get(0, message).host, message.world)
        elif not message.holds_slots:
            self._copying.add(replica)
        if replica in self._greeted:
            self._offer_again(replica, message.world)
        self._greeted.add(replica)

    def _mirror(self) -> None:
        slots = self._opened()
        assert isinstance(self._transport, CudaIpc)
        assert isinstance(slots, SegmentSlots)
        self._transport.mirror(slots)

    def _link(self, replica: int, host: str, world: int) -> None:
        """Tell everybody who feeds `replica` from now on."""
        parent = self._tree.feed(replica, host, world)
        # Another's buffer is written again with the next version but one, and who is fed from it may be reading there.
        (self._copying.add if parent == TRAINER else self._copying.discard)(replica)
        self._epochs[replica] = self._epochs.get(replica, 0) + 1
        linked = WeightsLinked(
            replica=replica,
            world=world,
            sources=self._group.world if parent == TRAINER else self._tree.world(parent),
            epoch=self._epochs[replica],
            parent=parent,
            is_renewed=replica in self._greeted,
        )
        if self._relay is not None:
            self._relay.put(linked)
        self._serve(linked)
        self._send(linked)

    def _offer_again(self, replica: int, world: int) -> None:
        """To `replica` alone, what was offered last; what it reads or had before is forgotten."""
        self._ledger.forget(replica)
        if self._last is not None and self._ledger.version_in(self._last.slot) == self._last.version:
            self._ledger.offer(self._last.slot, [(replica, rank) for rank in range(world)])
            self._send(msgspec.structs.replace(self._last, replica=replica))

    def _serve(self, linked: WeightsLinked) -> None:
        if self._links is None:
            raise WeightSyncError(
                f"replica {linked.replica} asks for a link and there are none", hint="both ends need `links`"
            )
        if linked.parent == TRAINER:
            self._links.serve(linked, SlotSource(self._opened()), self._group.rank)
        else:
            self._links.drop(linked.replica)

    def _opened(self) -> Slots:
        if self._slots is None:
            raise WeightSyncError("this publisher is not open", hint="call open(flat) first")
        return self._slots
