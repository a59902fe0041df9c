"""Links between the ranks of a trainer and those of one generator replica: versions between machines, point to point.

A link is a process group of its own over c10d's store: sources first, then the replica's ranks. Nobody else is in it,
so a replica that dies or hangs breaks its own link only; a new one is made under the next epoch's name. Both ends put
what they hold into the store, plan alike (`plan.py`) and compare the plans' hashes before the first byte.

A receiver pulls: it asks one source after the other, in the plan's rounds, for a version that was offered. For each
receiver a source has a thread that waits for requests and sends from the slot: neither the trainer nor another
receiver is ever waited for. What travels are buckets: a header (kind, number, checksum), then bytes. A bucket that is
one run in a slot, or in the receiver's buffer, is sent from there, and lands there, without a copy between.

With `delta` both ends keep the last version that was sent, and only 2-byte words that changed travel, with their
places, where that is less. bf16 weights mostly stay as they are at the learning rates of RL (arXiv:2602.03839): worth
its memory on slow links.

Between GPUs what lies in buckets goes over NCCL (`nccl.py`), from slot to buffer without the host. Requests and headers
go over gloo in any case.

gloo and NCCL send in plain text: links need a trusted network.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.core import wire
from slipstream.core.errors import ChannelError, WeightSyncError
from slipstream.core.types import Holding, LinkMember, WeightsLinked, WeightsOffered
from slipstream.weight_sync.copying import HOST, Bytes, Memory
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.nccl import Pair
from slipstream.weight_sync.plan import BUCKET_BYTES, Copies, Place, Plan, make_plan
from slipstream.weight_sync.slots import Slots

_c10d: Any = dist  # whose stubs leave out stores and backends
_LOG = logging.getLogger(__name__)
_FOREVER = timedelta(days=365)  # gloo has no endless wait; a receiver asks when it likes, and `close` ends the wait
_REQUEST, _HEADER, _PAYLOAD, _READY = range(4)  # tags
_REFUSED, _WHOLE, _DELTA = -1, 0, 1  # kinds of buckets
_WORD = np.uint16
_LEAST_RETRY_S = 0.5  # between two attempts to make a link: what fails at once must not become a busy loop


class Links:
    """Makes the links of one process, all over one `store`.

    `hostname`: the address that this process listens at; peers on other machines must reach it. `timeout_s` bounds the
    making of a link, and every bucket. `memory`: where this process has its versions; on a GPU it sends over NCCL.
    """

    def __init__(
        self,
        store: Any,  # torch.distributed.Store
        *,
        hostname: str = "127.0.0.1",
        place: Place = Place(),
        timeout_s: float = 60.0,
        bucket_bytes: int = BUCKET_BYTES,
        delta: bool = False,
        memory: Memory = HOST,
    ) -> None:
        if delta and memory is not HOST:
            raise WeightSyncError("what has changed of a version is found on the host only", got="delta on a GPU")
        self.store, self.hostname, self.place, self.timeout = store, hostname, place, timedelta(seconds=timeout_s)
        self.bucket_bytes, self.delta, self.memory = bucket_bytes, delta, memory
        self.has_pairs = memory.device.type == "cuda"  # of GPUs, for what is in buckets
        self._servers: dict[int, LinkServer] = {}

    def serve(self, linked: WeightsLinked, slots: Slots, rank: int) -> None:
        """On rank `rank` of the trainer: answer a replica's requests from now on, beside everything else."""
        if slots.holding is None:
            raise WeightSyncError("versions that say not what they hold cannot be sent", hint="open(..., holding=)")
        self.drop(linked.replica)
        self._servers[linked.replica] = LinkServer(self, linked, slots, rank)

    def receive(self, linked: WeightsLinked, rank: int, holding: Holding) -> LinkReader:
        """On rank `rank` of the replica: the other end."""
        return LinkReader(self, linked, rank, holding)

    def drop(self, replica: int) -> None:
        """Close the link of a replica, if there is one."""
        server = self._servers.pop(replica, None)
        if server is not None:
            server.close()

    def close(self) -> None:
        """Idempotent."""
        for replica in list(self._servers):
            self.drop(replica)


class _Group:
    """The process group of a link. What is in buckets lies in `links.memory`, all else on the CPU."""

    def __init__(self, links: Links, linked: WeightsLinked, rank: int) -> None:
        self.links, self.rank = links, rank
        self.num_sources, self.size = linked.sources, linked.sources + linked.world
        self.store = _c10d.PrefixStore(f"weights/{linked.replica}/{linked.epoch}", links.store.clone())
        self.store.set_timeout(links.timeout)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=links.hostname)]
        options._timeout = links.timeout
        self.gloo: Any = _c10d.ProcessGroupGloo(_c10d.PrefixStore("gloo", self.store), rank, self.size, options)
        self._pairs: dict[int, Pair] = {}

    def agree(self, holding: Holding) -> Plan:
        """The plan that all ranks of the link have made. Raises WeightSyncError when they differ."""
        place = self.links.place
        member = LinkMember(holding=holding, host=place.host, device=place.device)
        self.store.set(f"member/{self.rank}", wire.encode(member))
        members = [wire.decode(self.store.get(f"member/{rank}"), (LinkMember,)) for rank in range(self.size)]
        holdings = [m.holding for m in members if isinstance(m, LinkMember)]
        places = [Place(m.host, m.device) for m in members if isinstance(m, LinkMember)]
        plan = make_plan(
            holdings[: self.num_sources],
            holdings[self.num_sources :],
            source_places=places[: self.num_sources],
            destination_places=places[self.num_sources :],
        )
        self.store.set(f"plan/{self.rank}", f"{plan.hash:x}")
        others = [self.store.get(f"plan/{rank}").decode() for rank in range(self.size)]
        if others != [f"{plan.hash:x}"] * self.size:
            raise WeightSyncError(
                "the ends of a link have made different plans", got=others, hint="do both run the same version of this?"
            )
        return plan

    def connect(self, peer: int) -> None:
        """Before the first bucket: source and destination call it in the order in which they meet."""
        memory = self.links.memory
        if self.links.has_pairs:
            assert isinstance(memory, DeviceMemory), "HostMemory is on no GPU"
            source, destination = min(self.rank, peer), max(self.rank, peer)  # sources come first
            store = _c10d.PrefixStore(f"nccl/{source}/{destination}", self.store)
            self._pairs[peer] = Pair(store, memory, is_source=source == self.rank, timeout=self.links.timeout)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Any:
        if tag != _PAYLOAD or to not in self._pairs:
            return self.gloo.send([tensor], to, tag)
        self.gloo.recv([torch.zeros(1)], to, _READY).wait(self.links.timeout)
        return self._pairs[to].send(tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        if tag != _PAYLOAD or source not in self._pairs:
            return self.gloo.recv([tensor], source, tag)
        work = self._pairs[source].receive(tensor)
        self.gloo.send([torch.zeros(1)], source, _READY).wait(self.links.timeout)
        return work

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.gloo.abort()
        for pair in list(self._pairs.values()):
            pair.close()


class _Bucket:
    """Copies that travel together: from a slot to consecutive bytes, and from there to the receiver's buffer."""

    def __init__(self, copies: Copies) -> None:
        self.copies, self.num_bytes = copies, copies.num_bytes
        self.packing, self.unpacking = copies.packed(), copies.unpacked()

    def slice_of(self, start: np.ndarray[Any, Any]) -> slice | None:
        """Where it lies as one run, `start` being the copies' sources or targets."""
        if not self.copies.is_one_run:
            return None
        return slice(int(start[0]), int(start[0]) + self.num_bytes)


class LinkServer:
    """A source's end of a link: threads that make it, wait for requests, and send until the link breaks or closes."""

    def __init__(self, links: Links, linked: WeightsLinked, slots: Slots, rank: int) -> None:
        self._links, self._linked, self._slots, self._rank = links, linked, slots, rank
        self._group: _Group | None = None
        self._is_closed = False
        threading.Thread(target=self._run, name=f"weights-to-{linked.replica}", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        if self._group is not None:
            self._group.close()

    def _run(self) -> None:
        try:
            self._group = _Group(self._links, self._linked, self._rank)
            assert self._slots.holding is not None, "serve has seen to that"
            plan = self._group.agree(self._slots.holding)
        except (RuntimeError, ChannelError, WeightSyncError) as error:
            self._report(error)
            return
        for destination in range(plan.num_destinations):
            copies = plan.copies.get((self._rank, destination))
            if copies is not None:
                buckets = [_Bucket(bucket) for bucket in copies.buckets(self._links.bucket_bytes)]
                threading.Thread(
                    target=self._serve,
                    args=(self._group, buckets, plan.num_sources + destination),
                    name=f"weights-to-{self._linked.replica}-{destination}",
                    daemon=True,
                ).start()

    def _serve(self, group: _Group, buckets: list[_Bucket], to: int) -> None:
        """Consumes requests (version, slot, version that the receiver has of this link). Ends when the link does."""
        request = torch.zeros(3, dtype=torch.int64)
        try:
            group.connect(to)
            sender = _Sender(group, buckets, to)
            while True:
                group.receive(request, to, _REQUEST).wait(_FOREVER)
                version, slot, base = request.tolist()
                commit = self._slots.committed(slot) if 0 <= slot < self._slots.num_slots else None
                if commit is None or commit.version != version:
                    sender.refuse()
                else:
                    sender.send(version, self._slots.data(slot), base)
        except RuntimeError as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._is_closed:
            _LOG.warning("the link to replica %d has ended: %s", self._linked.replica, str(error).splitlines()[0])


class _Sender:
    """Sends versions to one receiver: a bucket is packed while the one before is on its way."""

    def __init__(self, group: _Group, buckets: list[_Bucket], to: int) -> None:
        self._group, self._buckets, self._to = group, buckets, to
        self._memory = group.links.memory
        largest = max(bucket.num_bytes for bucket in buckets)
        needs_room = group.links.delta or not all(bucket.copies.is_one_run for bucket in buckets)
        self._room = [self._memory.empty(largest if needs_room else 0) for _ in range(2)]
        self._headers = [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
        self._bases: list[Bytes | None] = [None] * len(buckets)
        self._base = -1

    def refuse(self) -> None:
        self._headers[0][0] = _REFUSED
        self._group.send(self._headers[0], self._to, _HEADER).wait(self._group.links.timeout)

    def send(self, version: int, slot: torch.Tensor, base: int) -> None:
        """All buckets of `version`. Raises RuntimeError when the link breaks or a bucket takes too long."""
        may_differ = self._group.links.delta and base == self._base >= 0
        under_way: list[list[Any]] = [[], []]
        timeout = self._group.links.timeout
        for number, bucket in enumerate(self._buckets):
            turn = number % 2
            for work in under_way[turn]:
                work.wait(timeout)
            data = self._packed(bucket, slot, turn)
            header = self._headers[turn]
            header[0], header[1] = _WHOLE, bucket.num_bytes
            header[2] = np.uint64(self._memory.checksum(data)).astype(np.int64).item()
            if self._group.links.delta:
                data = self._delta(number, data, header, may_differ)
            under_way[turn] = [
                self._group.send(header, self._to, _HEADER),
                self._group.send(data, self._to, _PAYLOAD),
            ]
        for work in [*under_way[len(self._buckets) % 2], *under_way[(len(self._buckets) + 1) % 2]]:
            work.wait(timeout)
        self._base = version

    def _packed(self, bucket: _Bucket, slot: torch.Tensor, turn: int) -> torch.Tensor:
        where = None if self._group.links.delta else bucket.slice_of(bucket.copies.source)
        if where is not None:
            return slot[where]
        data = self._room[turn][: bucket.num_bytes]
        self._memory.run_copies(bucket.packing, slot, data)
        return data

    def _delta(self, number: int, data: torch.Tensor, header: torch.Tensor, may_differ: bool) -> torch.Tensor:
        """What to send instead of `data`; keeps `data` as what the next version is compared with."""
        new, base = data.numpy(), self._bases[number]
        if base is None:
            self._bases[number] = new.copy()
            return data
        changes = _changes(base, new) if may_differ else None
        np.copyto(base, new)
        if changes is None:
            return data
        header[0], header[1] = _DELTA, len(changes)
        return torch.from_numpy(changes)


def _changes(base: Bytes, new: Bytes) -> Bytes | None:
    """int32 places, then values, of the words that changed, and the odd byte at the end; None where that is no less."""
    whole = len(new) // 2 * 2
    is_new = base[:whole].view(_WORD) != new[:whole].view(_WORD)
    count = int(np.count_nonzero(is_new))
    if 6 * count + len(new) - whole >= len(new) or len(new) >= 1 << 32:
        return None
    places = np.flatnonzero(is_new).astype(np.uint32)
    values = new[:whole].view(_WORD)[places]
    return np.concatenate([places.view(np.uint8), values.view(np.uint8), new[whole:], np.zeros(1, np.uint8)])


def _apply(base: Bytes, changes: Bytes) -> None:
    odd = len(base) % 2
    count = (len(changes) - 1 - odd) // 6
    places, values = changes[: 4 * count].view(np.uint32), changes[4 * count : 6 * count].view(_WORD)
    if count and places.max() >= len(base) // 2:
        raise WeightSyncError("changes lie outside of their bucket", got=int(places.max()), allowed=len(base) // 2)
    base[: len(base) - odd].view(_WORD)[places] = values
    base[len(base) - odd :] = changes[6 * count : 6 * count + odd]


class LinkReader:
    """Implements `reader.Fetch`: a receiver's end of a link. A thread makes it; the first transfer waits for that."""

    def __init__(self, links: Links, linked: WeightsLinked, rank: int, holding: Holding) -> None:
        self._links, self._linked, self._rank, self._holding = links, linked, rank, holding
        self._group: _Group | None = None
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._is_made = threading.Event()
        self.received_bytes = 0
        self._base = -1
        self._bases: dict[tuple[int, int], torch.Tensor] = {}
        threading.Thread(target=self._make, name="weights-link", daemon=True).start()

    def fetch(self, offer: WeightsOffered, shadow: torch.Tensor) -> None:
        """Ask every source for its part of the version, in the plan's order. Raises WeightSyncError when one fails."""
        if not self._is_made.wait(2 * self._links.timeout.total_seconds() + _LEAST_RETRY_S):
            raise WeightSyncError("the link to the trainer was not made in time")
        try:
            if self._error is not None:
                raise self._error
            for source, buckets in self._buckets:
                self._fetch_from(source, buckets, offer, shadow)
        except (RuntimeError, ChannelError) as error:
            raise WeightSyncError(
                f"the link to the trainer broke before version {offer.version} was whole",
                got=str(error).splitlines()[0],
            ) from error
        self._base = offer.version

    def close(self) -> None:
        """Idempotent; a transfer in hand fails."""
        self._closing.set()
        self._error = WeightSyncError("the link to the trainer was closed")
        self._is_made.set()
        if self._group is not None:
            self._group.close()

    def _make(self) -> None:
        started_s = time.monotonic()
        try:
            self._group = _Group(self._links, self._linked, self._linked.sources + self._rank)
            plan = self._group.agree(self._holding)
            for source in plan.sources_of(self._rank):
                self._group.connect(source)
            self._buckets = [
                (
                    source,
                    [_Bucket(bucket) for bucket in plan.copies[source, self._rank].buckets(self._links.bucket_bytes)],
                )
                for source in plan.sources_of(self._rank)
            ]
            sizes = [bucket.num_bytes for _, buckets in self._buckets for bucket in buckets]
            self._room = [self._links.memory.empty(max(sizes, default=0)) for _ in range(2)]
        except (RuntimeError, ChannelError, WeightSyncError) as error:
            self._closing.wait(max(0.0, _LEAST_RETRY_S - (time.monotonic() - started_s)))
            self._error = error
        if self._closing.is_set() and self._group is not None:
            self._group.close()
        self._is_made.set()

    def _fetch_from(self, source: int, buckets: list[_Bucket], offer: WeightsOffered, shadow: torch.Tensor) -> None:
        group = self._group
        assert group is not None, "made before"
        timeout = self._links.timeout
        request = torch.tensor([offer.version, offer.slot, self._base])
        group.send(request, source, _REQUEST).wait(timeout)
        arrivals = self._arrivals(group, source, buckets, offer, shadow)
        current = next(arrivals, None)
        while current is not None:
            bucket, header, data, number, arrival = current
            arrival.wait(timeout)
            self.received_bytes += len(data)
            current = next(arrivals, None)  # the next one is on its way while this one is unpacked
            self._land(bucket, header, data, (source, number), shadow, offer.version)

    def _arrivals(
        self, group: _Group, source: int, buckets: list[_Bucket], offer: WeightsOffered, shadow: torch.Tensor
    ) -> Iterator[tuple[_Bucket, list[int], torch.Tensor, int, Any]]:
        for number, bucket in enumerate(buckets):
            header = torch.zeros(3, dtype=torch.int64)
            group.receive(header, source, _HEADER).wait(self._links.timeout)
            kind, count, _ = header.tolist()
            if kind == _REFUSED:
                raise WeightSyncError(f"the trainer no longer has version {offer.version}")
            if not (0 <= count <= bucket.num_bytes + 1 and (kind == _DELTA or count == bucket.num_bytes)):
                raise WeightSyncError("a malformed bucket arrived", got=f"kind {kind}, {count} bytes")
            where = bucket.slice_of(bucket.copies.target)
            if kind == _DELTA:
                data = torch.empty(count, dtype=torch.uint8)
            elif self._links.delta:
                data = self._bases.setdefault((source, number), torch.empty(bucket.num_bytes, dtype=torch.uint8))
            elif where is not None:
                data = shadow.view(torch.uint8)[where]
            else:
                data = self._room[number % 2][: bucket.num_bytes]
            yield bucket, header.tolist(), data, number, group.receive(data, source, _PAYLOAD)

    def _land(
        self,
        bucket: _Bucket,
        header: list[int],
        data: torch.Tensor,
        key: tuple[int, int],
        shadow: torch.Tensor,
        version: int,
    ) -> None:
        kind, _, expected = header
        if kind == _DELTA:
            if key not in self._bases:
                raise WeightSyncError("changes arrived to a version that is not here")
            _apply(self._bases[key].numpy(), data.numpy())
            data = self._bases[key]
        memory = self._links.memory
        checksum = np.uint64(memory.checksum(data)).astype(np.int64).item()
        if checksum != expected:
            raise WeightSyncError(f"version {version} is damaged: a bucket is not what its checksum says")
        if self._links.delta or bucket.slice_of(bucket.copies.target) is None:
            memory.run_copies(bucket.unpacking, data, memory.bytes_of(shadow))
