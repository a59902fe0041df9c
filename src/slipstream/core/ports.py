"""The two ends of a channel: an `Inbox` reads what any number of sources put, an `Outbox` writes to its targets."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import zmq

from slipstream.core import links, wire
from slipstream.core.channel_spec import ChannelSpec, ChannelStats, Route
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout
from slipstream.core.links import Link, LocalLink, Stream, WakeUp
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


class Inbox(_End):
    """The reading end of an input port; any number of sources feed it.

    Consumes frames of its ROUTER socket and messages put by executors of this process. Never blocks: `wait` does.
    One thread reads; any thread may put locally or close.
    """

    def __init__(self, port: str, specs: Sequence[ChannelSpec], address: str | None = None) -> None:
        super().__init__(port)
        self._queue: deque[tuple[Stream | LocalLink, int, Message | bytes]] = deque()
        self._streams = {
            spec.name: Stream(spec.name, wire.message_types(spec.accepts), ack_every=max(1, spec.capacity // 4))
            for spec in specs
        }
        self._executor_of = {spec.name: spec.source.split(".")[0] for spec in specs}
        self._unacknowledged: set[str] = set()
        self._socket: zmq.Socket[bytes] | None = links.bind(address) if address else None

    def get_nowait(self) -> Message | None:
        """The oldest waiting message, or None. Taking it acknowledges it. ChannelClosed once this end is closed."""
        with self._lock:
            self.check_open()
            if not self._queue:
                self._pump()
            while self._queue:
                origin, sequence, item = self._queue.popleft()
                message = self._take(origin, sequence, item)
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
        """Refuse everything from incarnations of `executor` below `incarnation`, from now on."""
        with self._lock:
            for name, owner in self._executor_of.items():
                if owner == executor:
                    self._streams[name].fence(incarnation)

    def close(self) -> None:
        """Wake whoever waits here and tell the sources; their puts raise ChannelClosed. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for origin, _, _ in self._queue:
                if isinstance(origin, LocalLink):
                    origin.notify()
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
            self._queue.append((link, 0, message))
            self.wake.set()

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return [self.wake.fileno()] if self._socket is None else [self.wake.fileno(), self._socket]

    def _take(self, origin: Stream | LocalLink, sequence: int, item: Message | bytes) -> Message | None:
        if isinstance(origin, LocalLink):
            origin.num_waiting -= 1
            origin.notify()
            assert isinstance(item, Message)
            return item
        assert isinstance(item, bytes)  # frames wait undecoded
        if origin.take(sequence):
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
        if self._socket is None:
            return
        while links.is_readable(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            self._arrived(frames[0], frames[1] if len(frames) == 2 else b"")
        if not self._queue:
            self._acknowledge_all()

    def _arrived(self, peer: bytes, frame: bytes) -> None:
        try:
            data = links.unpack_data(frame)
            stream = self._streams[data.name]
        except (ChannelError, KeyError):
            self.stats.refused += 1
            return
        match stream.admit(peer, data):
            case links.Verdict.NEW:
                self._queue.append((stream, data.sequence, data.payload))
            case links.Verdict.DUPLICATE:
                self.stats.duplicates += 1
                self._unacknowledged.add(stream.name)
            case links.Verdict.GAP:
                self._send(peer, links.pack_reply(links.Reply.RESEND, stream.incarnation, stream.arrived))
            case links.Verdict.FENCED:
                self.stats.refused += 1
                self._send(peer, links.pack_reply(links.Reply.FENCED, stream.incarnation, 0))
            case links.Verdict.WAITING:
                pass

    def _acknowledge_all(self) -> None:
        for name in self._unacknowledged:
            self._acknowledge(self._streams[name])
        self._unacknowledged.clear()

    def _acknowledge(self, stream: Stream) -> None:
        if stream.peer is not None:
            self._send(stream.peer, links.pack_reply(links.Reply.TAKEN, stream.incarnation, stream.taken))

    def _send(self, peer: bytes, frame: bytes) -> None:
        assert self._socket is not None
        self._socket.send_multipart([peer, frame], zmq.NOBLOCK)  # a ROUTER drops what it cannot route

    def _dispose(self) -> None:
        if self._socket is not None:
            for stream in self._streams.values():
                if stream.peer is not None:
                    self._send(stream.peer, links.pack_reply(links.Reply.CLOSED, stream.incarnation, 0))
            self._socket.close()
            self._socket = None
        self.wake.close()


class Outbox(_End):
    """The writing end of an output port. One thread puts and waits; any thread may close."""

    def __init__(self, port: str, specs: Sequence[ChannelSpec], peers: Sequence[Link], route: Route | None) -> None:
        super().__init__(port)
        self._specs = tuple(specs)
        self._links = tuple(peers)
        self._route = route
        self._accepts = tuple({kind: None for spec in specs for kind in wire.message_types(spec.accepts)})
        self._put_lock = threading.RLock()

    def put(self, message: Message) -> None:
        """Hand `message` over to its target, or to all.

        Waits while a target has `capacity` untaken messages. Unblocked by: the target takes one. ChannelTimeout after
        `deadline_s` (at once where both ends share a thread), and then no target got it; ChannelClosed when either end
        closes.
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
                    self._wait_for_room(targets)
                for link in targets:
                    link.send(message)
                self.stats.sent += 1
        finally:
            self.end_wait()

    @property
    def has_room(self) -> bool:
        """True when a `put` would not have to wait, whatever its target."""
        return all(link.has_room() for link in self._links if not link.is_closed)

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
                self._wait_until(lambda: [link for link in self._links if link.depth], deadline_s, self._links)
        finally:
            self.end_wait()

    def disconnect(self, executor: str) -> None:
        """Forget a dead target: what waits for it is dropped and broadcasts pass it by."""
        with self._put_lock:
            for spec, link in zip(self._specs, self._links, strict=True):
                if spec.target.split(".")[0] == executor:
                    link.close()

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

    def _targets(self, message: Message) -> list[Link]:
        index = self._route(message, len(self._links)) if self._route else None
        if index is None:
            return [link for link in self._links if not link.is_closed] or list(self._links)
        if not 0 <= index < len(self._links):
            raise ChannelError(
                f"port '{self.port}' has no such target", got=index, allowed=f"0..{len(self._links) - 1}"
            )
        return [self._links[index]]

    def _wait_for_room(self, targets: Sequence[Link]) -> None:
        deadline_s = min(spec.deadline_s for spec in self._specs)
        self._wait_until(lambda: [link for link in targets if not link.has_room()], deadline_s, targets)

    def _wait_until(self, waiting: Callable[[], list[Link]], deadline_s: float, targets: Sequence[Link]) -> None:
        started_s = _CLOCK.now_s()
        try:
            while blocked := waiting():
                remaining_s = started_s + deadline_s - _CLOCK.now_s()
                link = blocked[0]
                if remaining_s <= 0 or not link.can_wait:
                    raise self._timeout(link, deadline_s)
                poll([self.wake.fileno(), *(p for item in targets for p in item.pollables())], remaining_s)
                self.check_open()
                self.pump()
        finally:
            self.stats.wait_s += _CLOCK.now_s() - started_s

    def _timeout(self, link: Link, deadline_s: float) -> ChannelTimeout:
        if link.can_wait:
            why, hint = f"nothing was taken for {deadline_s:g} s", f"'{link.target}' is busy, stuck or gone"
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
