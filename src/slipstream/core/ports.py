"""The two ends of a channel: an `Inbox` reads what any number of sources put, an `Outbox` writes to its targets."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import zmq

from slipstream.core import frames, wire
from slipstream.core.addresses import AddressBook
from slipstream.core.channel_spec import ChannelSpec, ChannelStats, Kind, Route
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout
from slipstream.core.frames import Frame, Reply
from slipstream.core.links import Link, Listener, LocalLink, Stream, Verdict, WakeUp, ZmqLink
from slipstream.core.types import Message

_CLOCK = WallClock()


class _End(abc.ABC):
    """One end of a port: open until closed, and disposed of when nobody waits at it any more. Any thread may close."""

    def __init__(self, port: str) -> None:
        self.port = port
        self.stats = ChannelStats()
        self.wake = WakeUp()
        self._lock = threading.RLock()
        self._num_waiters = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def check_open(self) -> None:
        """ChannelClosed once this end is closed."""
        if self._is_closed:
            raise ChannelClosed(f"port '{self.port}' is closed")

    def begin_wait(self) -> None:
        with self._lock:
            self.check_open()
            self._num_waiters += 1

    def end_wait(self) -> None:
        with self._lock:
            self._num_waiters -= 1
            if self._is_closed and self._num_waiters == 0:
                self._dispose()

    @abc.abstractmethod
    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """What becomes readable when a wait here may be over."""

    @abc.abstractmethod
    def _dispose(self) -> None:
        """Give back sockets and descriptors; called once, closed, without waiters."""


@dataclass
class _Waiting:
    """A message that arrived and was not taken: still encoded when it came through a socket."""

    origin: Stream | LocalLink
    item: Message | bytes
    incarnation: int = 0
    sequence: int = 0


class Inbox(_End):
    """The reading end of an input port; any number of sources feed it.

    Consumes frames of its ROUTER socket and messages put by executors of this process. Never blocks: `wait` does.
    One thread reads; any thread may put locally or close.
    """

    def __init__(
        self, port: str, specs: Sequence[ChannelSpec], book: AddressBook | None = None, incarnation: int = 0
    ) -> None:
        """With a `book`, it listens where that says; the address it got is in `addresses`."""
        super().__init__(port)
        self._queue: deque[_Waiting] = deque()
        self._streams = {spec.name: Stream(spec) for spec in specs}
        self._heard_s: dict[str, float] = {}
        self._unacknowledged: set[str] = set()
        self._early: dict[str, list[tuple[bytes, bytes]]] = {}
        self._early_probes: dict[str, tuple[bytes, bytes]] = {}
        self._listener: Listener | None = None
        if book is not None:
            self._listener = Listener(
                port,
                book.listen_at(port, incarnation),
                incarnation,
                keys=book.keys,
                max_bytes=max(spec.max_bytes for spec in specs),
                stats=self.stats,
            )

    def await_word(self) -> None:
        """From now on an executor's successor has to be announced by `fence`; what comes of it before that waits.

        So whoever reads here hears first that the old one is lost, and then what the new one says.
        """
        with self._lock:
            for stream in self._streams.values():
                stream.awaits_word = True

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens; of a TCP port the number that the system has chosen."""
        return tuple(self._listener.bound) if self._listener is not None else ()

    def get_nowait(self) -> Message | None:
        """The oldest waiting message, or None. Taking it acknowledges it. ChannelClosed once this end is closed."""
        with self._lock:
            self.check_open()
            if not self._queue:
                self._pump()
            while self._queue:
                message = self._take(self._queue.popleft())
                if not self._queue:
                    self.wake.clear()
                    self._acknowledge_all()
                if message is not None:
                    self.stats.received += 1
                    return message
            return None

    @property
    def depth(self) -> int:
        """Messages that have arrived and were not taken."""
        with self._lock:
            if not self._is_closed:
                self._pump()
            return len(self._queue)

    def fence(self, executor: str, incarnation: int) -> None:
        """Refuse everything from incarnations of `executor` below `incarnation`, also what waits here already."""
        with self._lock:
            fenced = [stream for stream in self._streams.values() if stream.source == executor]
            for stream in fenced:
                stream.fence(incarnation)
            kept = [w for w in self._queue if w.origin not in fenced or w.incarnation >= incarnation]
            self.stats.refused += len(self._queue) - len(kept)
            self._queue = deque(kept)
            for stream in fenced:
                for peer, raw in self._early.pop(stream.name, []):
                    self._arrived(peer, raw)
                if stream.name in self._early_probes:
                    self._arrived(*self._early_probes.pop(stream.name))

    @property
    def heard_s(self) -> Mapping[str, float]:
        """When the last frame of each executor was found here, on the wall clock; without local ones."""
        with self._lock:
            if not self._is_closed:
                self._pump()
            return dict(self._heard_s)

    def close(self) -> None:
        """Wake whoever waits here and tell the sources; their puts raise ChannelClosed. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for waiting in self._queue:
                if isinstance(waiting.origin, LocalLink):
                    waiting.origin.notify()
            self._queue.clear()
            self.wake.set()
            if self._num_waiters == 0:
                self._dispose()

    def deliver(self, link: LocalLink, message: Message) -> None:
        """Queue a message of an executor of this process."""
        with self._lock:
            if self._is_closed:
                raise ChannelClosed(f"channel '{link.name}': port '{self.port}' is closed")
            link.num_waiting += 1
            self._queue.append(_Waiting(link, message))
            self.wake.set()

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        if self._listener is None:
            return [self.wake.fileno()]
        return [self.wake.fileno(), self._listener.socket, self._listener.monitor]

    def _take(self, waiting: _Waiting) -> Message | None:
        origin, item = waiting.origin, waiting.item
        if isinstance(origin, LocalLink):
            origin.num_waiting -= 1
            origin.notify()
            assert isinstance(item, Message)
            return item
        assert isinstance(item, bytes)  # frames wait undecoded
        if origin.take(waiting.incarnation, waiting.sequence):
            self._unacknowledged.discard(origin.name)
            self._acknowledge(origin)
        else:
            self._unacknowledged.add(origin.name)
        try:
            return wire.decode(item, origin.messages)
        except ChannelError:
            self.stats.refused += 1
            return None

    def _pump(self) -> None:
        if self._listener is None:
            return
        while (received := self._listener.receive()) is not None:
            self._arrived(*received)
        if not self._queue:
            self._acknowledge_all()

    def _arrived(self, peer: bytes, raw: bytes) -> None:
        try:
            frame = frames.unpack(raw)
            stream = self._streams[frame.name]
        except (ChannelError, KeyError):
            self.stats.refused += 1
            return
        if len(frame.payload) > stream.max_bytes:
            self.stats.refused += 1
            return
        verdict = stream.admit(peer, frame)
        if verdict is not Verdict.FENCED:
            self._heard_s[stream.source] = _CLOCK.now_s()
        match verdict:
            case Verdict.NEW:
                self._queue.append(_Waiting(stream, frame.payload, frame.incarnation, frame.sequence))
            case Verdict.DUPLICATE:
                self.stats.duplicates += 1
                self._unacknowledged.add(stream.name)
            case Verdict.COMPLETE:
                self._acknowledge(stream)
            case Verdict.GAP:
                self._send(peer, frames.pack_reply(Reply.RESEND, stream.incarnation, stream.arrived))
            case Verdict.FENCED:
                self.stats.refused += 1
                self._send(peer, frames.pack_reply(Reply.FENCED, stream.incarnation, 0))
            case Verdict.EARLY:
                self._wait_for_word(stream, peer, raw, frame)
            case Verdict.EXCESS:
                self.stats.refused += 1
            case Verdict.WAITING:
                pass

    def _wait_for_word(self, stream: Stream, peer: bytes, raw: bytes, frame: Frame) -> None:
        """Keep what a successor sends, and the last it has asked: that finds out what a broken connection has lost."""
        if frame.kind is frames.Kind.PROBE:
            self._early_probes[stream.name] = peer, raw
        elif len(early := self._early.setdefault(stream.name, [])) < stream.capacity:
            early.append((peer, raw))

    def _acknowledge_all(self) -> None:
        for name in self._unacknowledged:
            self._acknowledge(self._streams[name])
        self._unacknowledged.clear()

    def _acknowledge(self, stream: Stream) -> None:
        if stream.peer is not None:
            self._send(stream.peer, frames.pack_reply(Reply.TAKEN, stream.incarnation, stream.taken))

    def _send(self, peer: bytes, frame: bytes) -> None:
        assert self._listener is not None
        self._listener.send(peer, frame)

    def _dispose(self) -> None:
        if self._listener is not None:
            for stream in self._streams.values():
                if stream.peer is not None:
                    self._send(stream.peer, frames.pack_reply(Reply.CLOSED, stream.incarnation, 0))
            self._listener.close()
            self._listener = None
        self.wake.close()


class Outbox(_End):
    """The writing end of an output port. One thread puts and waits; any thread may close."""

    def __init__(
        self,
        port: str,
        specs: Sequence[ChannelSpec],
        inboxes: Mapping[str, Inbox],
        book: AddressBook,
        incarnation: int,
        *,
        route: Route | None = None,
        is_threaded: bool = False,
    ) -> None:
        """`inboxes`: the ports of this process; where the others are is in `book`. Waits until all are to be found."""
        super().__init__(port)
        self._specs = tuple(specs)
        self._route = route
        self._book = book
        self._incarnation = incarnation
        self._accepts = tuple({kind: None for spec in specs for kind in wire.message_types(spec.accepts)})
        self._put_lock = threading.RLock()
        self._links: list[Link] = []
        self._blocked: list[Link] = []
        try:
            for spec in specs:
                if spec.target in inboxes:
                    inbox = inboxes[spec.target]
                    link = LocalLink(spec.name, spec.target, spec.capacity, inbox, is_threaded=is_threaded)
                    self._links.append(link)
                else:
                    self._links.append(self._remote(spec, 0, sequence=0))
        except BaseException:
            self.close()
            raise

    def put(self, message: Message) -> None:
        """Hand `message` over to its target, or to all that are not disconnected.

        Waits while a target has `capacity` untaken messages. Unblocked by: the target takes one, or is disconnected.
        ChannelTimeout after the target's `deadline_s` (at once where both ends share a thread), and then no target got
        it; ChannelClosed when either end closes, or this executor was replaced by a later incarnation.
        """
        self.begin_wait()
        try:
            with self._put_lock:
                self.check_open()
                if not isinstance(message, self._accepts):
                    raise ChannelError(
                        f"a message of a wrong type was put on '{self.port}'",
                        got=type(message).__name__,
                        allowed=", ".join(kind.__name__ for kind in self._accepts),
                    )
                targets = self._targets(message)
                if not all(link.has_room() for link in targets):
                    targets = self._wait_for_room(message)
                for link in targets:
                    self._send(link, message)
                self.stats.sent += 1
        finally:
            self.end_wait()

    @property
    def has_room(self) -> bool:
        """True when a `put` would not have to wait, whatever its target."""
        return all(link.has_room() for link in self._links if not link.is_closed)

    def has_room_for(self, message: Message) -> bool:
        """True when a `put` of this message would not have to wait: other targets than its own may be full.

        After a no, `wait` returns when there is room.
        """
        self._blocked = [link for link in self._targets(message) if not link.has_room()]
        return not self._blocked

    @property
    def is_relieved(self) -> bool:
        """Whether there is room where `has_room_for` has last found none."""
        return bool(self._blocked) and all(link.has_room() for link in self._blocked)

    @property
    def targets(self) -> frozenset[str]:
        """The executors that this port leads to."""
        return frozenset(spec.target.split(".")[0] for spec in self._specs)

    @property
    def depth(self) -> int:
        """Messages put and not taken yet, over all targets."""
        return sum(link.depth for link in self._links)

    def pump(self) -> None:
        """Read acknowledgements and send again what a broken connection lost. `wait` and a full `put` do it."""
        with self._put_lock:
            if not self._is_closed:
                for link in self._links:
                    link.pump()

    def flush(self, deadline_s: float) -> None:
        """Wait until everything put was taken. Unblocked by: the targets take it. ChannelTimeout after `deadline_s`."""
        self.begin_wait()
        try:
            with self._put_lock:
                self._wait_until(lambda: [link for link in self._links if link.depth], deadline_s)
        finally:
            self.end_wait()

    def disconnect(self, executor: str) -> None:
        """Forget a dead target: what waits for it is dropped and broadcasts pass it by, until `reconnect`."""
        with self._put_lock:
            for spec, link in zip(self._specs, self._links, strict=True):
                if spec.target.split(".")[0] == executor:
                    link.close()

    def reconnect(self, executor: str, incarnation: int) -> None:
        """Talk to this incarnation of `executor` from now on; what waits for an earlier one is dropped.

        Waits until it has announced its address (ChannelTimeout). Nothing happens where it is known already. Not for a
        connection that broke: that restores itself, and loses nothing.
        """
        with self._put_lock:
            self.check_open()
            for index, (spec, link) in enumerate(zip(self._specs, self._links, strict=True)):
                if spec.target.split(".")[0] != executor or not isinstance(link, ZmqLink):
                    continue
                if link.address.incarnation >= incarnation and not link.is_away:
                    continue
                link.close()
                self._links[index] = self._remote(spec, incarnation, sequence=link.sequence)

    def beat(self) -> None:
        """Ask every connected target for a sign of life; it answers when its program next reads its port."""
        with self._put_lock:
            if not self._is_closed:
                for link in self._links:
                    if not link.is_closed:
                        link.probe()

    @property
    def heard_s(self) -> Mapping[str, float]:
        """When each target last answered anything, on the wall clock."""
        self.pump()
        return {link.target.split(".")[0]: link.heard_s for link in self._links if isinstance(link, ZmqLink)}

    @property
    def connected(self) -> frozenset[str]:
        """The executors whose process is connected now, whatever it is busy with."""
        self.pump()
        return frozenset(link.target.split(".")[0] for link in self._links if link.is_connected)

    def close(self) -> None:
        """Wake whoever waits here; what was handed over stays on its way. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.wake.set()
            if self._num_waiters == 0:
                self._dispose()

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return [self.wake.fileno()] + [p for link in self._links if not link.is_closed for p in link.pollables()]

    def _remote(self, spec: ChannelSpec, incarnation: int, *, sequence: int) -> ZmqLink:
        address = self._book.find(spec.target, incarnation)
        return ZmqLink(spec, address, self._incarnation, keys=self._book.keys, sequence=sequence, stats=self.stats)

    def _targets(self, message: Message) -> list[Link]:
        """Whom it goes to, also if closed when it is for them only, or when one says that we were replaced."""
        if fenced := [link for link in self._links if link.is_fenced]:
            return fenced
        index = self._route(message, len(self._links)) if self._route else None
        if index is not None:
            if not 0 <= index < len(self._links):
                raise ChannelError(
                    f"port '{self.port}' has no such target", got=index, allowed=f"0..{len(self._links) - 1}"
                )
            return [self._links[index]]
        living = [link for link in self._links if not link.is_closed]
        match self._specs[0].kind:
            case Kind.GATHER:
                return self._links
            case Kind.WEIGHTS:  # whoever needs the next version gets the next offer
                return living
            case _:
                return living or [link for link in self._links if not link.is_away]

    def _send(self, link: Link, message: Message) -> None:
        try:
            link.send(message)
        except ChannelClosed:
            if link in self._targets(message):  # nobody else will do
                raise

    def _wait_for_room(self, message: Message) -> list[Link]:
        """Those that it goes to then: some may be disconnected meanwhile."""
        targets = self._targets(message)
        pairs = zip(self._specs, self._links, strict=True)
        deadline_s = min(spec.deadline_s for spec, link in pairs if link in targets)
        self._wait_until(lambda: [link for link in self._targets(message) if not link.has_room()], deadline_s)
        return self._targets(message)

    def _wait_until(self, waiting: Callable[[], list[Link]], deadline_s: float) -> None:
        started_s = _CLOCK.now_s()
        try:
            while blocked := waiting():
                remaining_s = started_s + deadline_s - _CLOCK.now_s()
                link = blocked[0]
                if remaining_s <= 0 or not link.can_wait:
                    raise self._timeout(link, deadline_s)
                poll([self.wake.fileno(), *(p for item in blocked for p in item.pollables())], remaining_s)
                self.check_open()
                self.pump()
        finally:
            self.stats.wait_s += _CLOCK.now_s() - started_s

    def _timeout(self, link: Link, deadline_s: float) -> ChannelTimeout:
        if link.can_wait:
            state = f" ({link.describe()})" if isinstance(link, ZmqLink) else ""
            why, hint = f"nothing was taken for {deadline_s:g} s", f"'{link.target}' is busy, stuck or gone{state}"
        else:
            why, hint = "full, and both ends share a thread", "raise the capacity or step the receiver in between"
        return ChannelTimeout(
            f"channel '{link.name}' ({self.port} -> {link.target}): {why}",
            got=f"{link.depth} messages wait",
            allowed=f"capacity {link.capacity}",
            hint=hint,
        )

    def _dispose(self) -> None:
        for link in self._links:
            link.close()
        self.wake.close()


def poll(pollables: Iterable[zmq.Socket[bytes] | int], timeout_s: float | None) -> set[zmq.Socket[bytes] | int]:
    poller = zmq.Poller()
    for item in pollables:
        poller.register(item, zmq.POLLIN)
    return {item for item, _ in poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000 + 0.5)))}
