"""Links between the ranks that have versions and those of one generator replica: between machines, point to point.

A link is a process group of its own over c10d's store: sources first, then the replica's ranks. No other process is in
it, so a replica that dies or hangs breaks its own link only; a new one is made under the next epoch's name. Both ends
put what they hold into the store, plan alike (`resharding.py`) and compare the plans' hashes before the first byte. The
sources are the trainer's ranks, or those of a replica that hands on what it gets (`tree.py`).

A receiver pulls: it asks one source after the other, in the plan's rounds, for a version that was offered. For each
receiver a source has a thread that waits for requests and sends (`relay.Source`): neither the trainer nor another
receiver is ever waited for. What travels are buckets: a header (kind, number, checksum), then bytes. A bucket that is
one run on the source's side, or in the receiver's buffer, is sent from there, and lands there, without a copy between.
One that the source itself has yet to get is announced every now and then, so that silence always means a fault.

With `delta` both ends keep the last version that was sent, and only 2-byte words that changed travel, with their
places, where that is less. bf16 weights mostly stay as they are at the learning rates of RL (arXiv:2602.03839): worth
its memory on slow links.

gloo and NCCL send in plain text: links need a trusted network.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from slipstream.core.background import start_thread
from slipstream.core.errors import ChannelError, SlipstreamError, WeightSyncError
from slipstream.core.peer_messages import WeightsLinked, WeightsOffered
from slipstream.weight_sync.copies import Copies
from slipstream.weight_sync.copying import HOST, Bytes, Memory
from slipstream.weight_sync.delta import apply_changes, changes_of
from slipstream.weight_sync.link_group import Ends, LinkGroup, Tag
from slipstream.weight_sync.relay import Availability, Shelf, Source
from slipstream.weight_sync.resharding import BUCKET_BYTES, Place
from slipstream.weight_sync.slots import VersionGoneError

_LOG = logging.getLogger(__name__)
_FOREVER = timedelta(days=365)  # gloo has no endless wait; a receiver asks when it likes, and `close` ends the wait
_STUCK, _GONE, _AWAITED, _WHOLE, _DELTA = range(5)  # kinds of headers: of a bucket, or why there is none
_SIGNS_OF_WAITING = 4  # within the timeout; and how many of them may follow one another while nothing arrives
_LEAST_RETRY_S = 0.5  # between two attempts to make a link: what fails at once must not become a busy loop


class Links:
    """Makes the links of one process, all over one `store`.

    `hostname`: the address that this process listens at; peers on other machines must reach it. `timeout_s` bounds the
    making of a link, and every bucket. `relays`: whether replicas may feed one another. `memory`: where this process
    has its versions; on a GPU it sends over NCCL.
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
        relays: bool = True,
        memory: Memory = HOST,
    ) -> None:
        if delta and memory is not HOST:
            raise WeightSyncError("what has changed of a version is found on the host only", got="delta on a GPU")
        self.ends = Ends(store, hostname, place, timedelta(seconds=timeout_s), memory)
        self.place, self.timeout, self.memory = place, self.ends.timeout, memory
        self.bucket_bytes, self.delta = bucket_bytes, delta
        # On a GPU the buffers that decoding reads are none that could be sent from: their contents change places.
        self.relays = relays and memory is HOST
        self._servers: dict[int, LinkServer] = {}

    def serve(self, linked: WeightsLinked, source: Source, rank: int, *, gives_way: bool = False) -> None:
        """On rank `rank` of the sources: answer a replica's requests from now on, beside everything else."""
        if source.holding is None:
            raise WeightSyncError("versions that say not what they hold cannot be sent", hint="open(..., holding=)")
        self.drop(linked.replica)
        self._servers[linked.replica] = LinkServer(self, linked, source, rank, gives_way=gives_way)

    def receive(self, linked: WeightsLinked, rank: int, shelf: Shelf) -> LinkReader:
        """On rank `rank` of the replica: the other end. What has landed is on `shelf`."""
        return LinkReader(self, linked, rank, shelf)

    def drop(self, replica: int) -> None:
        """Close the link of a replica, if there is one."""
        server = self._servers.pop(replica, None)
        if server is not None:
            server.close()

    def close(self) -> None:
        """Idempotent."""
        for replica in list(self._servers):
            self.drop(replica)


STAGING_NICENESS = 10
"""In Linux's units: a tenth of a core where decoding wants all of them, else what is idle."""


def give_way() -> None:
    """Called by such a thread, once: one core at most, and that only when decoding leaves it."""
    torch.set_num_threads(1)  # of this thread; the others keep theirs
    if sys.platform == "linux":  # where threads have priorities of their own
        thread = threading.get_native_id()  # never raised: who begins lower may not
        with contextlib.suppress(OSError):  # a filter of system calls: it is no reason to stage nothing
            os.setpriority(os.PRIO_PROCESS, thread, max(STAGING_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))


class _Bucket:
    """Copies that travel together: from a slot to consecutive bytes, and from there to the receiver's buffer."""

    def __init__(self, copies: Copies) -> None:
        self.copies, self.num_bytes = copies, copies.num_bytes
        self.packing, self.unpacking = copies.packed(), copies.unpacked()
        self.taken_from, self.lands_in = copies.reads, copies.writes

    def slice_of(self, start: np.ndarray[Any, Any]) -> slice | None:
        """Where it lies as one run, `start` being the copies' sources or targets."""
        if not self.copies.is_one_run:
            return None
        return slice(int(start[0]), int(start[0]) + self.num_bytes)


class LinkServer:
    """A source's end of a link: threads that make it, wait for requests, and send until the link breaks or closes."""

    def __init__(
        self, links: Links, linked: WeightsLinked, source: Source, rank: int, *, gives_way: bool = False
    ) -> None:
        self._links, self._linked, self._source, self._rank = links, linked, source, rank
        self._gives_way = gives_way
        self._group: LinkGroup | None = None
        self._is_closed = False
        start_thread(self._run, name=f"weights-to-{linked.replica}")

    def close(self) -> None:
        self._is_closed = True
        if self._group is not None:
            self._group.close()

    def _run(self) -> None:
        try:
            self._group = LinkGroup(self._links.ends, self._linked, self._rank)
            assert self._source.holding is not None, "serve has seen to that"
            plan = self._group.agree(self._source.holding)
        except (RuntimeError, SlipstreamError) as error:
            self._report(error)
            return
        if self._is_closed:  # while it was made: `close` has found no group
            self._group.close()
            return
        for destination in range(plan.num_destinations):
            copies = plan.copies.get((self._rank, destination))
            if copies is not None:
                buckets = [_Bucket(bucket) for bucket in copies.buckets(self._links.bucket_bytes)]
                start_thread(
                    self._serve,
                    args=(self._group, buckets, plan.num_sources + destination),
                    name=f"weights-to-{self._linked.replica}-{destination}",
                )

    def _serve(self, group: LinkGroup, buckets: list[_Bucket], to: int) -> None:
        """Consumes requests (version, slot, version that the receiver has of this link). Ends when the link does."""
        if self._gives_way:
            give_way()
        request = torch.zeros(3, dtype=torch.int64)
        try:
            group.connect(to)
            sender = _Sender(self._links, group, self._source, buckets, to)
            while True:
                group.receive(request, to, Tag.REQUEST).wait(_FOREVER)
                sender.send(*request.tolist())
        except RuntimeError as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if not self._is_closed:
            _LOG.warning("the link to replica %d has ended: %s", self._linked.replica, str(error).splitlines()[0])


class _Sender:
    """Sends versions to one receiver: a bucket is packed while the one before is on its way."""

    def __init__(self, links: Links, group: LinkGroup, source: Source, buckets: list[_Bucket], to: int) -> None:
        self._links, self._group, self._source, self._buckets, self._to = links, group, source, buckets, to
        largest = max(bucket.num_bytes for bucket in buckets)
        needs_room = links.delta or not all(bucket.copies.is_one_run for bucket in buckets)
        self._room = [links.memory.empty(largest if needs_room else 0) for _ in range(2)]
        self._headers = [torch.zeros(3, dtype=torch.int64) for _ in range(2)]
        self._bases: list[Bytes | None] = [None] * len(buckets)
        self._base = -1

    def send(self, version: int, slot: int, base: int) -> None:
        """All buckets of `version`, or the news that it is not to be had.

        Raises RuntimeError when the link breaks or a bucket takes too long.
        """
        may_differ = self._links.delta and base == self._base >= 0
        self._base = -1  # until all of it has gone: then both ends have the same bases
        under_way: list[list[Any]] = [[], []]
        timeout = self._links.timeout
        is_whole = True
        for number, bucket in enumerate(self._buckets):
            turn = number % 2
            for work in under_way[turn]:
                work.wait(timeout)
            under_way[turn] = []  # a second wait for what has arrived would find nothing that ends it
            header = self._headers[turn]
            data = self._ready(version, slot, bucket, header, turn)
            if data is None:
                is_whole = False
                break
            if self._links.delta:
                data = self._delta(number, data, header, may_differ)
            under_way[turn] = [
                self._group.send(header, self._to, Tag.HEADER),
                self._group.send(data, self._to, Tag.PAYLOAD),
            ]
        for work in [*under_way[len(self._buckets) % 2], *under_way[(len(self._buckets) + 1) % 2]]:
            work.wait(timeout)
        if is_whole:
            self._base = version

    def _ready(self, version: int, slot: int, bucket: _Bucket, header: torch.Tensor, turn: int) -> torch.Tensor | None:
        """The bucket's bytes, and their `header`; None if they are not to be had, and the receiver knows."""
        while (state := self._awaited(version, slot, bucket)) is Availability.READY:
            whole = self._source.data(version, slot)
            if whole is None:
                break
            data = self._packed(bucket, whole, turn)
            checksum = self._links.memory.checksum(data)
            header[0], header[1], header[2] = _WHOLE, bucket.num_bytes, np.uint64(checksum).astype(np.int64).item()
            # If it is here still, then what was hashed is nothing else; what is written later does not fit the hash.
            if self._source.wait(version, slot, bucket.taken_from, 0.0) is Availability.READY:
                return data
            # AWAITED: the source has lost its own source meanwhile, and begins the version again.
        self._say(_STUCK if state is Availability.AWAITED else _GONE)
        return None

    def _awaited(self, version: int, slot: int, bucket: _Bucket) -> Availability:
        """Wait for the bucket's bytes; return their state. The receiver waits too, while something arrives."""
        beat_s = self._links.timeout.total_seconds() / _SIGNS_OF_WAITING
        state = self._source.wait(version, slot, bucket.taken_from, 0.0)
        num_idle = 0
        while state is Availability.AWAITED and num_idle < _SIGNS_OF_WAITING:
            self._say(_AWAITED)
            num_arrivals = self._source.num_arrivals
            state = self._source.wait(version, slot, bucket.taken_from, beat_s)
            num_idle = num_idle + 1 if self._source.num_arrivals == num_arrivals else 0
        return state

    def _say(self, kind: int) -> None:
        notice = torch.tensor([kind, 0, 0])
        self._group.send(notice, self._to, Tag.HEADER).wait(self._links.timeout)

    def _packed(self, bucket: _Bucket, whole: torch.Tensor, turn: int) -> torch.Tensor:
        where = None if self._links.delta else bucket.slice_of(bucket.copies.source)
        if where is not None:
            return whole[where]
        data = self._room[turn][: bucket.num_bytes]
        self._links.memory.run_copies(bucket.packing, whole, data)
        return data

    def _delta(self, number: int, data: torch.Tensor, header: torch.Tensor, may_differ: bool) -> torch.Tensor:
        """Return what to send instead of `data`; keep `data` as what the next version is compared with."""
        new, base = data.numpy(), self._bases[number]
        if base is None:
            self._bases[number] = new.copy()
            return data
        changes = changes_of(base, new) if may_differ else None
        np.copyto(base, new)
        if changes is None:
            return data
        header[0], header[1] = _DELTA, len(changes)
        return torch.from_numpy(changes)


class LinkReader:
    """Implements `reader.Fetch`: a receiver's end of a link. A thread makes it; the first transfer waits for that."""

    def __init__(self, links: Links, linked: WeightsLinked, rank: int, shelf: Shelf) -> None:
        self._links, self._linked, self._rank, self._shelf = links, linked, rank, shelf
        self._group: LinkGroup | None = None
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._is_made = threading.Event()
        self.received_bytes = 0
        self._base = -1
        self._bases: dict[tuple[int, int], torch.Tensor] = {}
        start_thread(self._make, name="weights-link")

    def fetch(self, offer: WeightsOffered, shadow: torch.Tensor) -> None:
        """Ask every source for its part of the version, in the plan's order.

        Raises WeightSyncError when one fails, VersionGoneError when the first has passed on to a newer version,
        CheckpointError where none will ever fit.
        """
        if not self._is_made.wait(2 * self._links.timeout.total_seconds() + _LEAST_RETRY_S):
            raise WeightSyncError(f"{self._name} was not made in time")
        if self._error is not None:
            raise self._failed(offer, self._error)
        base, self._base = self._base, -1
        self._shelf.begin(offer.version, shadow, [b.lands_in for _, buckets in self._buckets for b in buckets])
        try:
            num_landed = 0
            for source, buckets in self._buckets:
                self._fetch_from(source, buckets, offer, base, shadow, num_landed)
                num_landed += len(buckets)
        except Exception as error:
            self._shelf.fail()
            if isinstance(error, (RuntimeError, ChannelError)):
                raise self._failed(offer, error) from error
            raise
        self._base = offer.version

    @property
    def _name(self) -> str:
        return f"the link to {'the trainer' if self._linked.parent < 0 else f'replica {self._linked.parent}'}"

    def _failed(self, offer: WeightsOffered, error: Exception) -> Exception:
        if not isinstance(error, RuntimeError | ChannelError):  # the link is not at fault
            return error
        return WeightSyncError(
            f"{self._name} broke before version {offer.version} was whole", got=str(error).splitlines()[0]
        )

    def close(self) -> None:
        """Idempotent; a transfer in hand fails."""
        self._closing.set()
        self._error = WeightSyncError(f"{self._name} was closed")
        self._is_made.set()
        if self._group is not None:
            self._group.close()

    def _make(self) -> None:
        started_s = time.monotonic()
        try:
            self._group = LinkGroup(self._links.ends, self._linked, self._linked.sources + self._rank)
            plan = self._group.agree(self._shelf.holding)
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
        except Exception as error:  # noqa: BLE001 - `fetch` raises it
            self._closing.wait(max(0.0, _LEAST_RETRY_S - (time.monotonic() - started_s)))
            self._error = error
        if self._closing.is_set() and self._group is not None:
            self._group.close()
        self._is_made.set()

    def _fetch_from(
        self,
        source: int,
        buckets: list[_Bucket],
        offer: WeightsOffered,
        base: int,
        shadow: torch.Tensor,
        num_landed: int,
    ) -> None:
        group = self._group
        assert group is not None, "made before"
        timeout = self._links.timeout
        request = torch.tensor([offer.version, offer.slot, base])
        group.send(request, source, Tag.REQUEST).wait(timeout)
        on_its_way: _OnItsWay | None = None
        for upcoming in self._announced(group, source, buckets, offer, shadow, is_first=not num_landed):
            if on_its_way is not None:
                self._land(on_its_way, source, num_landed, shadow, offer.version)
            on_its_way = upcoming
        if on_its_way is not None:
            self._land(on_its_way, source, num_landed, shadow, offer.version)

    def _announced(
        self,
        group: LinkGroup,
        source: int,
        buckets: list[_Bucket],
        offer: WeightsOffered,
        shadow: torch.Tensor,
        *,
        is_first: bool,
    ) -> Iterator[_OnItsWay | None]:
        """Every bucket as soon as its header is here; None for each time the source says that it waits itself."""
        for number, bucket in enumerate(buckets):
            header = torch.zeros(3, dtype=torch.int64)
            # Such headers are not endless: see `_awaited`.
            group.receive(header, source, Tag.HEADER).wait(self._links.timeout)
            while header[0] == _AWAITED:
                yield None
                group.receive(header, source, Tag.HEADER).wait(self._links.timeout)
            kind, count, checksum = header.tolist()
            if kind == _GONE and is_first and number == 0:
                raise VersionGoneError(f"{self._name} no longer leads to version {offer.version}")
            if kind in (_GONE, _STUCK):
                why = "was overwritten there" if kind == _GONE else "does not arrive there"
                raise WeightSyncError(f"{self._name} brings no more of version {offer.version}, which {why}")
            allowed = {_WHOLE: range(bucket.num_bytes, bucket.num_bytes + 1), _DELTA: range(bucket.num_bytes + 2)}
            if count not in allowed.get(kind, ()):
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
            yield _OnItsWay(bucket, number, kind, checksum, data, group.receive(data, source, Tag.PAYLOAD))

    def _land(self, arriving: _OnItsWay, source: int, num_landed: int, shadow: torch.Tensor, version: int) -> None:
        """Wait for a bucket, check it, bring it to its place; `num_landed` buckets of other sources are there."""
        arriving.arrival.wait(self._links.timeout)
        bucket, data, key = arriving.bucket, arriving.data, (source, arriving.number)
        self.received_bytes += len(data)
        if arriving.kind == _DELTA:
            if key not in self._bases:
                raise WeightSyncError("changes arrived to a version that is not here")
            apply_changes(self._bases[key].numpy(), data.numpy())
            data = self._bases[key]
        memory = self._links.memory
        if np.uint64(memory.checksum(data)).astype(np.int64).item() != arriving.checksum:
            raise WeightSyncError(f"version {version} is damaged: a bucket is not what its checksum says")
        if self._links.delta or bucket.slice_of(bucket.copies.target) is None:
            memory.run_copies(bucket.unpacking, data, memory.bytes_of(shadow))
        self._shelf.landed(num_landed + arriving.number)


@dataclass(frozen=True)
class _OnItsWay:
    """Bucket `number` of a source, of which the header is here."""

    bucket: _Bucket
    number: int
    kind: int
    checksum: int
    data: torch.Tensor
    arrival: Any  # c10d's work
