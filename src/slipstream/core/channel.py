"""Channels: typed, bounded, closable; a deadline on every wait; one behaviour inside a process and between processes.

A channel joins an output port to an input port. Channels that share an output port fan out (`BROADCAST`, `SCATTER`,
`WEIGHTS`), channels that share an input port fan in (`GATHER`). `connect` makes the ports of an executor that runs in a
process of its own, `connect_local` those of executors that share one process, `connect_hosted` any mixture: channels
between executors of the process are queues, the others ZeroMQ sockets (`core/links.py`).

Back-pressure is end to end: a message counts against its channel's capacity until the receiver has taken it.
"""

from __future__ import annotations

import contextlib
import enum
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import zmq

from slipstream.core import links, wire
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout, did_you_mean
from slipstream.core.links import Link, LocalLink, Stream, WakeUp, ZmqLink
from slipstream.core.types import Admit, Message

Route = Callable[[Message], int | None]

_CLOCK = WallClock()


class Kind(enum.StrEnum):
    """How messages of one output port reach its input ports."""

    BROADCAST = "broadcast"  # every target gets every message
    SCATTER = "scatter"  # `route` names the target
    GATHER = "gather"  # one target, which several sources share
    WEIGHTS = "weights"  # a broadcast of offers; the weights themselves lie in segments


@dataclass(frozen=True)
class ChannelSpec:
    """A channel from port `source` to port `target`, each written 'executor.port'.

    `capacity` messages may wait untaken; a `put` beyond it waits at most `deadline_s` seconds. `route` is a key of
    ROUTES and only for SCATTER; target i of an output port is its i-th spec. `accepts` names the message types that may
    pass (none: all of `core/types.py`).
    """

    name: str
    kind: Kind
    source: str
    target: str
    capacity: int = 1024
    deadline_s: float = 120.0
    route: str = "replica"
    accepts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for port in (self.source, self.target):
            if len(port.split(".")) != 2 or not all(port.split(".")):
                raise ChannelError(f"channel '{self.name}' has a bad port", got=port, allowed="'executor.port'")
        if not self.name or len(self.name.encode()) > 255:
            raise ChannelError("a channel needs a name", got=self.name, allowed="1..255 bytes")
        if self.capacity < 1 or self.deadline_s < 0:
            raise ChannelError(
                f"channel '{self.name}' cannot work",
                got=f"capacity {self.capacity}, deadline_s {self.deadline_s}",
                allowed="capacity >= 1, deadline_s >= 0",
            )


def route_by_replica(message: Message) -> int | None:
    """`Admit` to the replica it names, everything else to all."""
    return message.replica if isinstance(message, Admit) else None


ROUTES: dict[str, Route] = {"replica": route_by_replica}


@dataclass
class ChannelStats:
    """Cumulative counters of one port; `wait_s` is the time `put` spent blocked, in seconds."""

    sent: int = 0
    received: int = 0
    duplicates: int = 0
    refused: int = 0
    wait_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}


class Inbox:
    """The reading end of an input port; any number of sources feed it.

    Consumes frames of its ROUTER socket and messages put by executors of this process. Never blocks: `wait` does.
    One thread reads; any thread may put locally or close.
    """

    def __init__(self, port: str, specs: Sequence[ChannelSpec], address: str | None = None) -> None:
        self.port = port
        self.stats = ChannelStats()
        self.wake = WakeUp()
        self._lock = threading.RLock()
        self._queue: deque[tuple[Stream | LocalLink, int, Message | bytes]] = deque()
        self._streams = {
            spec.name: Stream(spec.name, wire.message_types(spec.accepts), ack_every=max(1, spec.capacity // 4))
            for spec in specs
        }
        self._executor_of = {spec.name: spec.source.split(".")[0] for spec in specs}
        self._unacknowledged: set[str] = set()
        self._num_waiters = 0
        self._is_closed = False
        self._socket: zmq.Socket[bytes] | None = links.bind(address) if address else None

    def get_nowait(self) -> Message | None:
        """The oldest waiting message, or None. Taking it acknowledges it. ChannelClosed once this end is closed."""
        with self._lock:
            if self._is_closed:
                raise ChannelClosed(f"port '{self.port}' is closed")
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

    @property
    def is_closed(self) -> bool:
        return self._is_closed

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

    def begin_wait(self) -> None:
        with self._lock:
            if self._is_closed:
                raise ChannelClosed(f"port '{self.port}' is closed")
            self._num_waiters += 1

    def end_wait(self) -> None:
        with self._lock:
            self._num_waiters -= 1
            if self._is_closed and self._num_waiters == 0:
                self._dispose()

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


class Outbox:
    """The writing end of an output port. One thread puts and waits; any thread may close."""

    def __init__(self, port: str, specs: Sequence[ChannelSpec], peers: Sequence[Link], route: Route | None) -> None:
        self.port = port
        self.stats = ChannelStats()
        self._specs = tuple(specs)
        self._links = tuple(peers)
        self._route = route
        self._accepts = tuple({kind: None for spec in specs for kind in wire.message_types(spec.accepts)})
        self._put_lock = threading.RLock()
        self._wake = WakeUp()
        self._num_waiters = 0
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, message: Message) -> None:
        """Hand `message` over to its target, or to all.

        Waits while a target has `capacity` untaken messages. Unblocked by: the target takes one. ChannelTimeout after
        `deadline_s` (at once where both ends share a thread), and then no target got it; ChannelClosed when either end
        closes.
        """
        self.begin_wait()
        try:
            with self._put_lock:
                self._check_open()
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

    @property
    def is_closed(self) -> bool:
        return self._is_closed

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
            self._wake.set()
            if self._num_waiters == 0:
                self._dispose()

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return [self._wake.fileno()] + [p for link in self._links if not link.is_closed for p in link.pollables()]

    def begin_wait(self) -> None:
        with self._lock:
            if self._is_closed:
                raise ChannelClosed(f"port '{self.port}' is closed")
            self._num_waiters += 1

    def end_wait(self) -> None:
        with self._lock:
            self._num_waiters -= 1
            if self._is_closed and self._num_waiters == 0:
                self._dispose()

    def _targets(self, message: Message) -> list[Link]:
        index = self._route(message) if self._route else None
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
                _poll([self._wake.fileno(), *(p for item in targets for p in item.pollables())], remaining_s)
                self._check_open()
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

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosed(f"port '{self.port}' is closed")

    def _dispose(self) -> None:
        for link in self._links:
            link.close()
        self._wake.close()


@dataclass(frozen=True)
class Ports:
    """The ends an executor gets from its host, by port name."""

    inputs: Mapping[str, Inbox] = field(default_factory=dict)
    outputs: Mapping[str, Outbox] = field(default_factory=dict)

    def close(self) -> None:
        for outbox in self.outputs.values():
            outbox.close()
        for inbox in self.inputs.values():
            inbox.close()


def connect(
    specs: Sequence[ChannelSpec],
    executor: str,
    transport_dir: Path,
    incarnation: int,
    routes: Mapping[str, Route] = ROUTES,
) -> Ports:
    """The ports of an executor that has this process to itself. Every process must be given the same `specs`."""
    return connect_hosted(specs, [executor], transport_dir, incarnation, routes=routes)[executor]


def connect_local(
    specs: Sequence[ChannelSpec], *, is_threaded: bool = False, routes: Mapping[str, Route] = ROUTES
) -> dict[str, Ports]:
    """The ports of every executor of `specs`, all in this process."""
    hosted = {port.split(".")[0] for spec in specs for port in (spec.source, spec.target)}
    return connect_hosted(specs, hosted, None, 0, is_threaded=is_threaded, routes=routes)


def connect_hosted(
    specs: Sequence[ChannelSpec],
    hosted: Collection[str],
    transport_dir: Path | None,
    incarnation: int,
    *,
    is_threaded: bool = False,
    routes: Mapping[str, Route] = ROUTES,
) -> dict[str, Ports]:
    """The ports of the executors `hosted` by this process, the others being in processes of their own.

    `transport_dir` (0700, short path) holds the sockets; it is the same for all processes of the run. `incarnation` is
    granted by the controller and grows with every restart. `is_threaded`: executors of this process run in threads, so
    that a full local channel can be waited for; else it is a ChannelTimeout at once.
    """
    _check(specs, routes)
    targets = _by(specs, lambda spec: spec.target)
    sources = _by(specs, lambda spec: spec.source)
    addresses = {port: f"{index}.sock" for index, port in enumerate(targets)}

    def address(port: str) -> str:
        if transport_dir is None:
            raise ChannelError(f"port '{port}' is in another process, but there is no transport_dir")
        return _ipc_address(transport_dir / addresses[port])

    inboxes: dict[str, Inbox] = {}
    for port, fan_in in targets.items():
        if _executor(port) in hosted:
            is_remote = any(_executor(spec.source) not in hosted for spec in fan_in)
            inboxes[port] = Inbox(port, fan_in, address(port) if is_remote else None)

    outboxes: dict[str, Outbox] = {}
    for port, fan_out in sources.items():
        if _executor(port) in hosted:
            peers: list[Link] = [
                LocalLink(spec.name, spec.target, spec.capacity, inboxes[spec.target], is_threaded=is_threaded)
                if spec.target in inboxes
                else ZmqLink(spec.name, spec.target, spec.capacity, address(spec.target), incarnation)
                for spec in fan_out
            ]
            route = routes[fan_out[0].route] if fan_out[0].kind is Kind.SCATTER else None
            outboxes[port] = Outbox(port, fan_out, peers, route)

    return {
        executor: Ports(
            inputs={port.split(".")[1]: inbox for port, inbox in inboxes.items() if _executor(port) == executor},
            outputs={port.split(".")[1]: outbox for port, outbox in outboxes.items() if _executor(port) == executor},
        )
        for executor in hosted
    }


def wait(
    receivers: Iterable[Inbox],
    senders: Iterable[Outbox] = (),
    extra_fds: Iterable[int] = (),
    timeout_s: float | None = None,
) -> bool:
    """Sleep until something can go on; False when `timeout_s` passed first.

    Unblocked by: a message at a receiver, a readable descriptor, a closed end. Meanwhile the senders read their
    acknowledgements and send again what a broken connection lost.
    """
    receivers, senders, extra_fds = list(receivers), list(senders), list(extra_fds)
    ends: list[Inbox | Outbox] = [*receivers, *senders]
    deadline_s = None if timeout_s is None else _CLOCK.now_s() + timeout_s
    with contextlib.ExitStack() as stack:
        for end in ends:
            try:
                end.begin_wait()
            except ChannelClosed:
                return True
            stack.callback(end.end_wait)
        while True:
            for sender in senders:
                sender.pump()
            if any(end.is_closed for end in ends) or any(receiver.depth for receiver in receivers):
                return True
            remaining_s = None if deadline_s is None else deadline_s - _CLOCK.now_s()
            if remaining_s is not None and remaining_s <= 0 and timeout_s != 0:
                return False
            ready = _poll([*(p for end in ends for p in end.pollables()), *extra_fds], remaining_s)
            if any(fd in ready for fd in extra_fds):
                return True
            if timeout_s == 0:
                return any(receiver.depth for receiver in receivers)


def make_transport_dir() -> Path:
    """A new private directory (0700) with a path short enough for sockets; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix="slipstream-"))


def _poll(pollables: Iterable[zmq.Socket[bytes] | int], timeout_s: float | None) -> set[zmq.Socket[bytes] | int]:
    poller = zmq.Poller()
    for item in pollables:
        poller.register(item, zmq.POLLIN)
    return {item for item, _ in poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000 + 0.5)))}


def _executor(port: str) -> str:
    return port.split(".")[0]


def _by(specs: Sequence[ChannelSpec], key: Callable[[ChannelSpec], str]) -> dict[str, list[ChannelSpec]]:
    groups: dict[str, list[ChannelSpec]] = {}
    for spec in specs:
        groups.setdefault(key(spec), []).append(spec)
    return groups


def _check(specs: Sequence[ChannelSpec], routes: Mapping[str, Route]) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ChannelError("two channels have the same name", got=sorted({n for n in names if names.count(n) > 1}))
    for port, fan_out in _by(specs, lambda spec: spec.source).items():
        kinds = {(spec.kind, spec.route) for spec in fan_out}
        if len(kinds) > 1 or (fan_out[0].kind is Kind.GATHER and len(fan_out) > 1):
            raise ChannelError(
                f"the channels from '{port}' do not fit together",
                got=", ".join(f"{spec.name}: {spec.kind}" for spec in fan_out),
                allowed="one kind and route per port; GATHER has one target",
            )
        if fan_out[0].kind is Kind.SCATTER and fan_out[0].route not in routes:
            raise ChannelError(
                f"unknown route '{fan_out[0].route}'",
                allowed=", ".join(routes),
                hint=did_you_mean(fan_out[0].route, routes),
            )


def _ipc_address(path: Path) -> str:
    mode = path.parent.stat().st_mode & 0o777
    if mode & 0o077:
        raise ChannelError(f"'{path.parent}' is open to other users", got=oct(mode), allowed="0o700")
    if len(os.fsencode(path)) > links.MAX_IPC_PATH_BYTES:
        raise ChannelError(
            "the path of a socket is too long",
            got=f"{len(os.fsencode(path))} bytes: {path}",
            allowed=f"at most {links.MAX_IPC_PATH_BYTES} bytes",
            hint="use make_transport_dir()",
        )
    return f"ipc://{path}"
