"""The two ends of a channel: an `Inbox` reads what any number of sources put, an `Outbox` writes to its targets."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from slipstream.core import frames, wire
from slipstream.core.addresses import AddressBook
from slipstream.core.channel_spec import ChannelSpec, ChannelStats, Kind, Route
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout
from slipstream.core.frames import Arrival, ChannelFrame, Reply, Stream
from slipstream.core.links import AwayLink, Link, Listener, LocalLink, Pollable, WakeUp, ZmqLink, poll
from slipstream.core.types import Message

_CLOCK = WallClock()


class _End(abc.ABC):
    """An end of a port. Any thread may close it; `with end:` keeps its sockets open until no thread uses them."""

    def __init__(self, port: str) -> None:
        self.port = port
        self.stats = ChannelStats()
        self.wake = WakeUp()
        self._lock = threading.RLock()
        self.is_closed = False
        self._num_users = 0

    def check_open(self) -> None:
        """Raise ChannelClosed once this end is closed."""
        if self.is_closed:
            raise ChannelClosed(f"port '{self.port}' is closed")

    def __enter__(self) -> None:
        """Use the sockets until `__exit__`, also when another thread closes this end. Raises ChannelClosed."""
        with self._lock:
            self.check_open()
            self._num_users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self.is_closed and self._num_users == 0:
                self._dispose()

    def close(self) -> None:
        """Close this end and wake every thread that waits at it. Closing twice is closing once."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            self._drop()
            self.wake.set()
            if self._num_users == 0:
                self._dispose()

    @abc.abstractmethod
    def pollables(self) -> list[Pollable]:
        """Return all that becomes readable when `pump` has work or a wait here may be over."""

    @abc.abstractmethod
    def is_due(self, now_s: float) -> bool:
        """Whether `pump` has work that no pollable tells of."""

    @abc.abstractmethod
    def pump(self) -> None:
        """Read what has come and say what is due; nothing on a closed end."""

    def _drop(self) -> None:  # noqa: B027 - messages of an output port stay on their way
        """Forget waiting messages; called once, at the close."""

    @abc.abstractmethod
    def _dispose(self) -> None:
        """Close sockets and descriptors; called once, closed, with no thread in use."""


class Inbox(_End):
    """The reading end of an input port; any number of sources feed it.

    Consumes frames of its ROUTER socket and messages put by executors of this process. Never blocks: `wait` does.
    One thread reads; any thread may put locally or close.
    """

    def __init__(
        self, port: str, specs: Sequence[ChannelSpec], book: AddressBook | None = None, incarnation: int = 0
    ) -> None:
        """Listen where `book` says, if there is one; `addresses` are the results."""
        super().__init__(port)
        self._queue: deque[tuple[LocalLink | Stream, Message | ChannelFrame]] = deque()
        self._streams = {spec.name: Stream(spec) for spec in specs}
        self._local_links: list[LocalLink] = []
        self._heard_s: dict[str, float] = {}
        self._owing: set[Stream] = set()  # of which messages were taken and not acknowledged
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

    def local_link(self, spec: ChannelSpec, *, is_threaded: bool) -> LocalLink:
        """Return a new link of an executor of this process to this port."""
        link = LocalLink(spec, self._deliver, is_threaded=is_threaded)
        self._local_links.append(link)
        return link

    def await_word(self) -> None:
        """Hold back, from now on, the frames of an executor's next incarnation until `fence` announces it.

        A reader then learns of the loss of an executor before it gets messages of the successor.
        """
        with self._lock:
            for stream in self._streams.values():
                stream.awaits_word = True

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses at which this port listens, with the TCP port numbers that the system has chosen."""
        return tuple(self._listener.bound) if self._listener is not None else ()

    def get_nowait(self) -> Message | None:
        """Return the oldest waiting message, or None. The caller owns it then. Raises ChannelClosed."""
        with self._lock:
            self.check_open()
            if not self._queue:
                self._pump()
            while self._queue:
                message = self._take(*self._queue.popleft())
                if not self._queue:
                    self.wake.clear()
                    self._acknowledge_due()
                if message is not None:
                    self.stats.received += 1
                    return message
            return None

    @property
    def has_messages(self) -> bool:
        """Whether messages wait that `pump` has read."""
        return bool(self._queue)

    @property
    def depth(self) -> int:
        """Messages that have arrived and were not taken."""
        self.pump()
        return len(self._queue)

    def is_due(self, now_s: float) -> bool:
        return not self._queue and any(stream.owes(now_s, is_empty=True) for stream in self._owing)

    def pump(self) -> None:
        """Read the frames that have come and the changes of connections, and acknowledge what is due."""
        with self._lock:
            if not self.is_closed:
                if self._listener is not None:
                    self._listener.look()
                self._pump()

    def settle(self) -> None:
        """Acknowledge all that was taken: the reader takes nothing more, and sources may wait until it has."""
        with self._lock:
            for stream in list(self._owing):
                self._acknowledge(stream)

    def fence(self, executor: str, incarnation: int) -> None:
        """Refuse everything of incarnations of `executor` below `incarnation`, also what waits here already."""
        with self._lock:
            fenced = [stream for stream in self._streams.values() if stream.source == executor]
            held_back = [(stream, stream.fence(incarnation)) for stream in fenced]
            kept = deque(
                (origin, item)
                for origin, item in self._queue
                if origin not in fenced or not isinstance(item, ChannelFrame) or item.incarnation >= incarnation
            )
            self.stats.refused += len(self._queue) - len(kept)
            self._queue = kept
            for stream, early in held_back:
                for peer, frame in early:
                    self._admit(stream, peer, frame)

    @property
    def heard_s(self) -> Mapping[str, float]:
        """The times at which a frame of each executor was last read here, on the wall clock; no local executors."""
        self.pump()
        return dict(self._heard_s)

    def pollables(self) -> list[Pollable]:
        return [self.wake.fileno(), *self.sockets]

    @property
    def sockets(self) -> list[Pollable]:
        """The pollables that are not readable for as long as messages wait to be taken."""
        return [] if self._listener is None else [self._listener.socket, self._listener.monitor]

    def _deliver(self, link: LocalLink, message: Message) -> None:
        with self._lock:
            link.check_open()
            link.num_waiting += 1
            self._queue.append((link, message))
            self.wake.set()

    def _take(self, origin: Stream | LocalLink, item: ChannelFrame | Message) -> Message | None:
        if isinstance(origin, LocalLink):
            origin.count_taken(1)
            assert isinstance(item, Message)
            return item
        assert isinstance(item, ChannelFrame)  # frames wait undecoded
        origin.take(item)
        self._owing.add(origin)
        if origin.owes(0.0, is_empty=False):
            self._acknowledge(origin)
        try:
            return wire.decode_by(origin.decoder, item.payload)
        except ChannelError:
            self.stats.refused += 1
            return None

    def _pump(self) -> None:
        if self._listener is None:
            return
        while (received := self._listener.receive()) is not None:
            self._arrived(*received)
        if not self._queue:
            self._acknowledge_due()

    def _arrived(self, peer: bytes, raw: bytes) -> None:
        try:
            messages = frames.unpack(raw)
            stream = self._streams[messages[0].name]
        except (ChannelError, KeyError):
            self.stats.refused += 1
            return
        for message in messages:
            if len(message.payload) > stream.max_bytes:
                self.stats.refused += 1
                return
            self._admit(stream, peer, message)

    def _admit(self, stream: Stream, peer: bytes, frame: ChannelFrame) -> None:
        arrival = stream.admit(peer, frame)
        if arrival is not Arrival.FENCED:
            self._heard_s[stream.source] = _CLOCK.now_s()
        match arrival:
            case Arrival.NEW:
                self._queue.append((stream, frame))
            case Arrival.DUPLICATE:
                self.stats.duplicates += 1
            case Arrival.COMPLETE:
                self._acknowledge(stream)
            case Arrival.GAP:
                self._reply(peer, Reply.TAKEN, stream, stream.taken)
                self._reply(peer, Reply.RESEND, stream, stream.arrived)
            case Arrival.FENCED:
                self.stats.refused += 1
                self._reply(peer, Reply.FENCED, stream)
            case Arrival.EARLY:
                stream.hold_back(peer, frame)
            case Arrival.EXCESS:
                self.stats.refused += 1
            case Arrival.WAITING:
                pass

    def _acknowledge_due(self) -> None:
        if self._owing:
            now_s = _CLOCK.now_s()
            for stream in [stream for stream in self._owing if stream.owes(now_s, is_empty=True)]:
                self._acknowledge(stream)

    def _acknowledge(self, stream: Stream) -> None:
        self._owing.discard(stream)
        stream.acknowledged(_CLOCK.now_s())
        self._reply(stream.peer, Reply.TAKEN, stream, stream.taken)

    def _reply(self, peer: bytes | None, reply: Reply, stream: Stream, sequence: int = 0) -> None:
        if peer is not None:
            assert self._listener is not None
            self._listener.send(peer, frames.pack_reply(reply, stream.incarnation, sequence))

    def _drop(self) -> None:
        self._queue.clear()
        for link in self._local_links:
            link.end(f"port '{self.port}' is closed")
            link.count_taken(link.num_waiting)  # wakes a thread that waits for room

    def _dispose(self) -> None:
        if self._listener is not None:
            for stream in self._streams.values():
                self._reply(stream.peer, Reply.CLOSED, stream)
            self._listener.close()
            self._listener = None
        self.wake.close()


class Turn:
    """A context in which messages wait, to leave together at its end; all output ports of an executor share one.

    They also leave when there is enough of them for a frame, and before any wait.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._held: set[Outbox] = set()

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and self._held:
            held, self._held = self._held, set()
            for outbox in held:
                outbox.release()

    def holds(self, outbox: Outbox) -> bool:
        """Return whether what is put on `outbox` now is to wait; it is asked to `release` it at the end then."""
        if self._depth:
            self._held.add(outbox)
        return self._depth > 0


class Outbox(_End):
    """The writing end of an output port. One thread puts and waits; any thread may close.

    Messages that were put before `close` stay on their way.
    """

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
        turn: Turn | None = None,
    ) -> None:
        """Connect to the targets: ports of this process are in `inboxes`, addresses of the others in `book`.

        Waits until `book` has all that are awaited (ChannelTimeout).
        """
        super().__init__(port)
        self._route = route
        self._book = book
        self._incarnation = incarnation
        self._accepts = dict.fromkeys(kind for spec in specs for kind in wire.message_types(spec.accepts))
        self._put_lock = threading.RLock()
        self._links: list[Link] = []
        self._blocked: list[Link] = []
        self._awaited: dict[Link, None] = {}  # the links that may not be quiet: only these are looked at
        self._turn = turn
        try:
            for spec in specs:
                if spec.target in inboxes:
                    self._links.append(inboxes[spec.target].local_link(spec, is_threaded=is_threaded))
                    self._awaited[self._links[-1]] = None
                else:
                    self._links.append(self._remote(spec, 0, sequence=0) if spec.is_awaited else AwayLink(spec))
        except BaseException:
            self.close()
            raise

    def put(self, message: Message) -> None:
        """Hand `message` over to its target, or to all that are not disconnected.

        Waits while a target has `capacity` untaken messages. Unblocked by: the target takes one, or is disconnected.
        ChannelTimeout after the target's `deadline_s` (at once where both ends share a thread), and then no target got
        it; ChannelClosed when either end closes, or this executor was replaced by a later incarnation.
        """
        with self, self._put_lock:
            self.check_open()
            if type(message) not in self._accepts:  # `isinstance` would call the metaclass of each
                raise ChannelError(
                    f"a message of a wrong type was put on '{self.port}'",
                    got=type(message).__name__,
                    allowed=", ".join(kind.__name__ for kind in self._accepts),
                )
            targets = self._targets(message)
            if not all(link.has_room() for link in targets):
                targets = self._wait_for_room(message)
            for link in targets:
                self._awaited[link] = None
                self._send(link, message)
                if self._turn is None or not self._turn.holds(self):
                    link.release()
            self.stats.sent += 1

    def release(self) -> None:
        """Let the messages leave that wait for the end of a turn."""
        with self._put_lock:
            for link in self._awaited:
                link.release()

    def has_room_for(self, message: Message) -> bool:
        """True when a `put` of this message would not have to wait; other targets may be full.

        After a no, `wait` returns when there is room.
        """
        self._blocked = [link for link in self._targets(message) if not link.has_room()]
        return not self._blocked

    @property
    def is_relieved(self) -> bool:
        """Whether there is room at the targets at which `has_room_for` last found none."""
        return bool(self._blocked) and all(link.has_room() for link in self._blocked)

    @property
    def targets(self) -> frozenset[str]:
        """The executors that this port leads to."""
        return frozenset(link.executor for link in self._links)

    @property
    def depth(self) -> int:
        """Messages put and not taken yet, over all targets."""
        return sum(link.depth for link in self._links)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way over any of its links: a `wait` may do without it."""
        return not self._awaited and not self.is_closed

    def is_due(self, now_s: float) -> bool:
        return any(link.is_due(now_s) for link in [*self._awaited])

    def pump(self) -> None:
        """Read acknowledgements and send again what a broken connection lost. `wait` and a full `put` do it."""
        self._pump(self._awaited)

    def _pump(self, links: Iterable[Link]) -> None:
        with self._put_lock:
            if self.is_closed:
                return
            self.release()
            for link in [*links]:
                link.pump()
                if link.is_quiet:
                    self._awaited.pop(link, None)
                else:  # a new connection was probed
                    self._awaited[link] = None

    def flush(self, deadline_s: float) -> None:
        """Wait until everything put was taken. Unblocked by: the targets take it. ChannelTimeout after `deadline_s`."""
        with self, self._put_lock:
            self._wait_until(lambda: [link for link in self._links if link.depth], deadline_s)

    def disconnect(self, executor: str) -> None:
        """Forget a dead target: drop what waits for it. Broadcasts pass it by until `reconnect`."""
        with self._put_lock:
            for link in self._links:
                if link.executor == executor:
                    link.close()

    def reconnect(self, executor: str, incarnation: int) -> None:
        """Connect to this incarnation of `executor`; drop what waits for an earlier one.

        Waits until it has announced its address (ChannelTimeout). Does nothing where it is connected already. Not for
        a broken connection: that is restored without a call, and loses nothing.
        """
        with self._put_lock:
            self.check_open()
            for index, link in enumerate(self._links):
                if link.executor != executor or not isinstance(link, ZmqLink | AwayLink):
                    continue
                if link.address.incarnation < incarnation or link.is_away:
                    link.close()
                    self._links[index] = self._remote(link.spec, incarnation, sequence=link.sequence)

    def beat(self) -> None:
        """Ask every connected target for a sign of life. It answers when its program next reads its port."""
        with self._put_lock:
            if not self.is_closed:
                for link in self._links:
                    if not link.is_closed:
                        link.probe()
                        self._awaited[link] = None

    @property
    def heard_s(self) -> Mapping[str, float]:
        """The time at which each target last answered anything, on the wall clock."""
        self._pump(self._links)
        return {link.executor: link.heard_s for link in self._links if isinstance(link, ZmqLink)}

    @property
    def connected(self) -> frozenset[str]:
        """The executors whose process is connected now, whatever it is busy with."""
        self._pump(self._links)
        return frozenset(link.executor for link in self._links if link.is_connected)

    def pollables(self) -> list[Pollable]:
        return [self.wake.fileno()] + [p for link in [*self._awaited] if not link.is_closed for p in link.pollables()]

    def _remote(self, spec: ChannelSpec, incarnation: int, *, sequence: int) -> ZmqLink:
        address = self._book.find(spec.target, incarnation)
        return ZmqLink(spec, address, self._incarnation, keys=self._book.keys, sequence=sequence, stats=self.stats)

    def _targets(self, message: Message) -> list[Link]:
        """Return the links to send `message` over, closed ones too where sending has to raise.

        Those are a link that is its only target, and every link that knows that this executor was replaced.
        """
        if (kind := self._links[0].spec.kind) is Kind.GATHER:  # of one target, also a closed one
            return self._links
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
        if kind is Kind.WEIGHTS:  # an offer that reaches no replica is no error: the next one is made anyhow
            return living
        return living or [link for link in self._links if not link.is_away]

    def _send(self, link: Link, message: Message) -> None:
        try:
            link.send(message)
        except ChannelClosed:
            if link in self._targets(message):  # no other target will do
                raise

    def _wait_for_room(self, message: Message) -> list[Link]:
        """Wait until the targets of `message` have room; return them: some may have been disconnected meanwhile."""
        deadline_s = min(link.spec.deadline_s for link in self._targets(message))
        self._wait_until(lambda: [link for link in self._targets(message) if not link.has_room()], deadline_s)
        return self._targets(message)

    def _wait_until(self, waiting: Callable[[], list[Link]], deadline_s: float) -> None:
        started_s = _CLOCK.now_s()
        self.release()
        for link in waiting():
            link.probe()  # else the target tells of what it has taken when that is much
        try:
            while blocked := waiting():
                remaining_s = started_s + deadline_s - _CLOCK.now_s()
                if remaining_s <= 0 or not blocked[0].can_wait:
                    raise self._timeout(blocked[0], deadline_s)
                poll([self.wake.fileno(), *(p for link in blocked for p in link.pollables())], remaining_s)
                self.check_open()
                self.pump()
        finally:
            self.stats.wait_s += _CLOCK.now_s() - started_s

    def _timeout(self, link: Link, deadline_s: float) -> ChannelTimeout:
        target = link.spec.target
        if link.can_wait:
            state = f" ({link.describe()})" if isinstance(link, ZmqLink) else ""
            why, hint = f"nothing was taken for {deadline_s:g} s", f"'{target}' is busy, stuck or gone{state}"
        else:
            why, hint = "full, and both ends share a thread", "raise the capacity or step the receiver in between"
        return ChannelTimeout(
            f"channel '{link.spec.name}' ({self.port} -> {target}): {why}",
            got=f"{link.depth} messages wait",
            allowed=f"capacity {link.spec.capacity}",
            hint=hint,
        )

    def _dispose(self) -> None:
        for link in self._links:
            link.release()
            link.close()
        self.wake.close()
