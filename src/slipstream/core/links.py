"""Links and listeners: the sockets under the ports, and the bookkeeping of a sender.

A link is the source's end of a channel, within a process (`LocalLink`) or over ZeroMQ (`ZmqLink`). A ZmqLink keeps
every message until the receiver has acknowledged that it was taken, and sends it again when a broken connection has
lost it (`core/frames.py`).
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from slipstream.core import frames, wire
from slipstream.core.addresses import Address
from slipstream.core.channel_spec import ChannelSpec, ChannelStats, executor_of
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelClosed, ChannelError
from slipstream.core.frames import Reply
from slipstream.core.keys import RunKeys
from slipstream.core.types import Message

Pollable = zmq.Socket[bytes] | int

_CLOCK = WallClock()
_LINGER_MS = 250  # hosts flush before they close; this covers the last replies to peers that are still there
_RECONNECT_MS, _RECONNECT_MAX_MS = 10, 500
_CONNECT_TIMEOUT_MS = 2000  # the system's own attempts come at growing intervals
_UNACKNOWLEDGED_MS = 8000  # a connection on which the other machine's system answers nothing for so long is given up
_KEEPALIVE_IDLE_S, _KEEPALIVE_EVERY_S, _KEEPALIVE_COUNT = 4, 2, 3  # the same for one on which nothing is sent
_HANDSHAKE_MS = 10_000
_TOGETHER_BYTES = 1 << 16  # of messages; more of them leave before `release`
_REOPEN_S = 5.0  # ZeroMQ reconnects by itself, except where the other side spoke another protocol: then it gives up

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_MAX_EVENTS = 100_000
"""Unread events of a socket, 15 MB. When there are more, ZeroMQ's thread waits, and all channels with it."""

_MAX_SOCKETS = 16_384
"""Sockets of a process; each channel has two. ZeroMQ's own limit, 1,023, is reached with 250 replicas. The first socket
of a process fixes the limit: setting it again changes nothing."""

_EVENTS, _READABLE = int(zmq.EVENTS), int(zmq.POLLIN)  # operations of enumerations take longer than the call itself

_monitor_numbers = itertools.count()


class WakeUp:
    """A file descriptor that is readable while set. Thread-safe; setting twice is setting once.

    It is opened when it is first asked for: a large fleet has thousands of ports at which nobody waits.
    """

    def __init__(self) -> None:
        self._fds: tuple[int, int] | None = None  # to read from, to write to
        self._lock = threading.Lock()
        self._is_set = False
        self._is_closed = False

    def fileno(self) -> int:
        with self._lock:
            if self._fds is None:
                self._fds = os.pipe()
                if self._is_set:
                    os.write(self._fds[1], b"\x00")
            return self._fds[0]

    def set(self) -> None:
        with self._lock:
            if not self._is_set and not self._is_closed:
                self._is_set = True
                if self._fds is not None:
                    os.write(self._fds[1], b"\x00")

    def clear(self) -> None:
        with self._lock:
            if self._is_set and not self._is_closed:
                self._is_set = False
                if self._fds is not None:
                    os.read(self._fds[0], 1)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for fd in self._fds or ():
                    os.close(fd)


class Link(abc.ABC):
    """The source's end of a channel: a (source, target) pair of ports."""

    can_wait = True
    """False when only this thread could make room."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec
        self.executor = executor_of(spec.target)
        self.closed_because: str | None = None
        self.is_away = False
        """Closed by `close`: another link may lead to the target later."""
        self.is_fenced = False
        """Closed because a later incarnation of the source has taken its place."""
        self.is_connected = False
        """Whether the systems of both ends have a connection, whatever their programs do."""

    @property
    def is_closed(self) -> bool:
        return self.closed_because is not None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way over the link, in either direction: then nobody has to look at it."""
        return False

    def check_open(self) -> None:
        """Raise ChannelClosed once the link is closed."""
        if self.closed_because is not None:
            raise ChannelClosed(f"channel '{self.spec.name}': {self.closed_because}")

    def has_room(self) -> bool:
        """Whether `send` need not wait. True also when the link is closed: `send` raises then."""
        if self.depth >= self.spec.capacity:
            self.pump()
        return self.depth < self.spec.capacity or self.is_closed

    def end(self, why: str) -> None:
        """Close the link for good, for reasons of either side. The first reason counts."""
        if self.closed_because is None:
            self.closed_because, self.is_connected = why, False

    def close(self) -> None:
        self.is_away = True
        self.end(f"'{self.spec.target}' was disconnected")

    def probe(self) -> None:  # noqa: B027 - within a process there is nothing to ask
        """Ask the target for a sign of life."""

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """Messages sent and not taken yet."""

    @abc.abstractmethod
    def send(self, message: Message) -> None:
        """Take `message`, without waiting. It leaves with `release`, or before. Raises ChannelClosed."""

    def release(self) -> None:  # noqa: B027 - within a process a message leaves at once
        """Let the messages leave that were sent, those that are ready together in one frame."""

    def is_due(self, now_s: float) -> bool:  # noqa: ARG002 - within a process there is none
        """Whether there is work for `release` or `pump` that no pollable tells of."""
        return False

    @abc.abstractmethod
    def pump(self) -> None:
        """Read replies of the target and changes of the connection."""

    @abc.abstractmethod
    def pollables(self) -> list[Pollable]:
        """Return all that becomes readable when there may be room."""


class LocalLink(Link):
    """A link to an executor of the same process (`Inbox.local_link`). It passes the message itself, not a copy."""

    def __init__(self, spec: ChannelSpec, deliver: Callable[[LocalLink, Message], None], *, is_threaded: bool) -> None:
        super().__init__(spec)
        self.can_wait, self.is_connected = is_threaded, True
        self.num_waiting = 0  # counted by the inbox, under its lock
        self._deliver = deliver
        self._room = WakeUp() if is_threaded else None

    @property
    def depth(self) -> int:
        return self.num_waiting

    def send(self, message: Message) -> None:
        self._deliver(self, message)

    def count_taken(self, count: int) -> None:
        """Make room for `count` messages; the inbox calls it, under its lock."""
        self.num_waiting -= count
        if self._room is not None:
            self._room.set()

    def pump(self) -> None:
        if self._room is not None:
            self._room.clear()

    def pollables(self) -> list[Pollable]:
        return [] if self._room is None else [self._room.fileno()]

    def close(self) -> None:
        super().close()
        if self._room is not None:
            self._room.close()


class AwayLink(Link):
    """The place of a link to an executor that has not come yet: disconnected until `Outbox.reconnect` makes a link."""

    sequence, depth, is_quiet = 0, 0, True

    def __init__(self, spec: ChannelSpec) -> None:
        super().__init__(spec)
        self.address = Address("")
        self.close()

    def send(self, message: Message) -> None:  # noqa: ARG002 - nobody is there
        self.check_open()

    def pump(self) -> None:
        """Do nothing."""

    def pollables(self) -> list[Pollable]:
        return []


class ZmqLink(Link):
    """A DEALER that keeps every message until the other side has acknowledged that it was taken."""

    def __init__(
        self,
        spec: ChannelSpec,
        address: Address,
        incarnation: int,
        *,
        keys: RunKeys | None = None,
        sequence: int = 0,
        stats: ChannelStats | None = None,
    ) -> None:
        """Number messages from `sequence` + 1: the target may know the channel from an earlier link."""
        super().__init__(spec)
        self.sequence = sequence
        self.address = address
        self.heard_s = _CLOCK.now_s()  # when the target last answered; at first, when the link was made
        self._tried_s = self.heard_s
        self._name = spec.name.encode()
        self._incarnation = incarnation
        self._kept: deque[tuple[int, bytes]] = deque()
        self._left, self._held_bytes = sequence, 0  # the last number that has left; the bytes of those behind it
        self._most_together = min(spec.max_bytes, _TOGETHER_BYTES)
        self._num_connections = 0
        self._num_refused = 0
        self._is_probed = False  # the target owes an answer
        self._stats = ChannelStats() if stats is None else stats
        self._socket = _socket(zmq.DEALER, [address.at])
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        self._socket.set(zmq.MAXMSGSIZE, frames.MAX_OVERHEAD_BYTES)
        if keys is not None:
            keys.secure_caller(self._socket, spec.target, address.incarnation)
        self._monitor = _monitor_of(self._socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED)
        self._socket.connect(address.at)

    @property
    def depth(self) -> int:
        return len(self._kept)

    @property
    def is_quiet(self) -> bool:
        return self.is_closed or not (self._kept or self._is_probed)

    def send(self, message: Message) -> None:
        if (self.sequence & 15) == 0 or len(self._kept) < 2:  # to notice a fence soon, without a look per message
            self.pump()
        self.check_open()
        payload = wire.encode(message)
        if len(payload) > self.spec.max_bytes:
            what = f"a {type(message).__name__} is too large for channel '{self.spec.name}'"
            raise ChannelError(what, got=f"{len(payload)} bytes", allowed=f"{self.spec.max_bytes} bytes")
        if self._held_bytes + len(payload) > self._most_together:
            self.release()
        self.sequence += 1
        self._kept.append((self.sequence, payload))
        self._held_bytes += len(payload)

    def release(self) -> None:
        if self._left < self.sequence and not self.is_closed:
            self._transmit_behind(self._left)

    def probe(self) -> None:
        self.release()
        if self.is_connected:  # else probes would wait, and all of them would arrive together
            self._is_probed = True
            self._transmit(frames.pack_probe(self._name, self._incarnation, self._base, self.sequence))

    def pump(self) -> None:
        """Read replies and connection events; probe every new connection for losses of an earlier one."""
        while not self.is_closed and (event := _next_event(self._monitor)) is not None:
            self._changed(event)
        while not self.is_closed and is_readable(self._socket):
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._replied(*frames.unpack_reply(b"".join(parts)))
            except ChannelError:
                self._stats.refused += 1
        if not self.is_closed and self._is_given_up(_CLOCK.now_s()):
            self._reopen()

    def is_due(self, now_s: float) -> bool:
        return not self.is_closed and (self._left < self.sequence or self._is_given_up(now_s))

    def _is_given_up(self, now_s: float) -> bool:
        return not self.is_connected and now_s - self._tried_s >= _REOPEN_S

    def pollables(self) -> list[Pollable]:
        return [] if self.is_closed else [self._socket, self._monitor]

    def describe(self) -> str:
        """Return the state of the connection, for an error message."""
        if self.is_connected:
            return "connected"
        if self._num_refused:
            return f"not connected: {self._num_refused} handshakes failed; has it the same run key?"
        return "never connected" if self._num_connections == 0 else "the connection is lost"

    def end(self, why: str) -> None:
        if not self.is_closed:
            _end_monitor(self._socket, self._monitor)
            self._socket.close()
            self._kept.clear()
        super().end(why)

    @property
    def _base(self) -> int:
        return self._kept[0][0] if self._kept else self.sequence + 1

    def _changed(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._num_connections += 1
            self.is_connected, self.heard_s = True, _CLOCK.now_s()
            self.probe()
        elif event == zmq.EVENT_DISCONNECTED:
            self._stats.disconnects += self.is_connected
            self.is_connected, self._tried_s = False, _CLOCK.now_s()
        else:
            self._num_refused += 1
            self._stats.refused_peers += 1

    def _replied(self, reply: Reply, incarnation: int, sequence: int) -> None:
        self.heard_s, self._is_probed = _CLOCK.now_s(), False
        if reply is Reply.FENCED and incarnation > self._incarnation:
            self.is_fenced = True
            self.end(f"incarnation {self._incarnation} was replaced by {incarnation}")
        elif incarnation == self._incarnation and reply is Reply.TAKEN:
            while self._kept and self._kept[0][0] <= sequence:
                self._kept.popleft()
        elif incarnation == self._incarnation and reply is Reply.RESEND:
            self._transmit_behind(sequence)
        elif reply is Reply.CLOSED:
            self.end(f"'{self.spec.target}' has ended")

    def _transmit_behind(self, sequence: int) -> None:
        """Transmit all kept messages with higher numbers, in as few frames as `_most_together` bytes allow."""
        self._left, self._held_bytes = self.sequence, 0
        part: list[bytes] = []
        num_bytes = 0
        for number, payload in itertools.islice(self._kept, max(0, sequence + 1 - self._base), None):
            num_bytes += len(payload)
            if part and (len(part) == frames.MAX_MESSAGES or num_bytes > self._most_together):
                self._transmit(frames.pack_data(self._name, self._incarnation, self._base, number - len(part), *part))
                part, num_bytes = [], len(payload)
            part.append(payload)
        if part:
            first = self.sequence + 1 - len(part)
            self._transmit(frames.pack_data(self._name, self._incarnation, self._base, first, *part))

    def _transmit(self, frame: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # ZeroMQ has given up; the next connection brings what is kept
            self._socket.send(frame, zmq.NOBLOCK)

    def _reopen(self) -> None:
        self._tried_s = _CLOCK.now_s()
        with contextlib.suppress(zmq.ZMQError):  # it is gone where ZeroMQ has given up
            self._socket.disconnect(self.address.at)
        self._socket.connect(self.address.at)


class Listener:
    """A ROUTER at some addresses; its queues are bounded by the capacities of the senders."""

    def __init__(
        self,
        port: str,
        addresses: Sequence[str],
        incarnation: int,
        *,
        keys: RunKeys | None,
        max_bytes: int,
        stats: ChannelStats,
    ) -> None:
        self._stats = stats
        self._num_refused = 0  # connections that will end without having been admitted
        self.socket = _socket(zmq.ROUTER, addresses)
        self.socket.set(zmq.MAXMSGSIZE, max_bytes + frames.MAX_OVERHEAD_BYTES)
        self.socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        if keys is not None:
            keys.secure_listener(self.socket, port, incarnation)
        self.monitor = _monitor_of(self.socket, zmq.EVENT_DISCONNECTED | _REFUSED)
        self.bound: list[str] = []
        try:
            for address in addresses:
                self.socket.bind(address)
                endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
                assert isinstance(endpoint, bytes)
                self.bound.append(endpoint.rstrip(b"\0").decode())
        except zmq.ZMQError as error:
            self.close()
            what = f"port '{port}' cannot listen"
            allowed = "a free address of this machine"
            raise ChannelError(what, got=error.strerror, allowed=allowed, hint=address) from error

    def look(self) -> None:
        """Count what became of connections."""
        while (event := _next_event(self.monitor)) is not None:
            if event != zmq.EVENT_DISCONNECTED:
                self._stats.refused_peers += 1
                self._num_refused += 1
            elif self._num_refused:
                self._num_refused -= 1
            else:
                self._stats.disconnects += 1

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return (peer, frame), or None when there is none. A message of several frames comes out malformed."""
        if not is_readable(self.socket):
            return None
        parts = self.socket.recv_multipart(zmq.NOBLOCK)
        return parts[0], parts[1] if len(parts) == 2 else b""

    def send(self, peer: bytes, frame: bytes) -> None:
        self.socket.send_multipart([peer, frame], zmq.NOBLOCK)  # a ROUTER drops what it cannot route

    def close(self) -> None:
        _end_monitor(self.socket, self.monitor)
        self.socket.close()


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """True when a frame can be received without waiting."""
    return bool(socket.getsockopt(_EVENTS) & _READABLE)  # type: ignore[operator]


def poll(pollables: Iterable[Pollable], timeout_s: float | None) -> set[Pollable]:
    """Wait until one of `pollables` is readable, at most `timeout_s` seconds; return those that are."""
    timeout_ms = -1 if timeout_s is None else max(0, round(timeout_s * 1000 + 0.5))
    return {item for item, _ in zmq.zmq_poll([(item, zmq.POLLIN) for item in pollables], timeout_ms)}


def _socket(kind: int, addresses: Sequence[str]) -> zmq.Socket[bytes]:
    """Make a socket with unbounded queues: `capacity` bounds the channels. The system finds dead connections."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    socket: zmq.Socket[bytes] = context.socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, _LINGER_MS)
    socket.set(zmq.IPV6, any("[" in address for address in addresses))  # else addresses come back as mapped ones
    socket.set(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_EVERY_S)
    socket.set(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_COUNT)
    return socket


def _monitor_of(socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Return a socket that receives these events of `socket`.

    Its address is used only once. pyzmq's own is named after the file descriptor of `socket`, which the system
    assigns again before ZeroMQ has given up the address of a closed socket.
    """
    address = f"inproc://slipstream.monitor-{next(_monitor_numbers)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.set(zmq.RCVHWM, _MAX_EVENTS)
    monitor.connect(address)
    return monitor


def _next_event(monitor: zmq.Socket[bytes]) -> int | None:
    return recv_monitor_message(monitor, zmq.NOBLOCK)["event"] if is_readable(monitor) else None


def _end_monitor(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Read the events that are left first: ZeroMQ's thread may wait for room, and could not be told to end `socket`."""
    while _next_event(monitor) is not None:
        pass
    socket.disable_monitor()
    monitor.close(linger=0)
