"""What a channel is made of: one link per (source, target), in this process or over ZeroMQ (`core/frames.py`).

The sender keeps every message until the receiver has said that it was taken, and sends it again when a connection that
broke has lost it; the receiver drops what it has already seen, and everything from a lower incarnation.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from slipstream.core import frames, wire
from slipstream.core.addresses import Address
from slipstream.core.channel_spec import ChannelSpec, ChannelStats
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelClosed, ChannelError
from slipstream.core.frames import Frame, Kind, Reply
from slipstream.core.keys import RunKeys
from slipstream.core.types import Message

_CLOCK = WallClock()
_LINGER_MS = 250  # hosts flush before they close; this covers the last replies to peers that are still there
_RECONNECT_MS, _RECONNECT_MAX_MS = 10, 500
_CONNECT_TIMEOUT_MS = 2000  # the system's own attempts come ever more seldom
_UNACKNOWLEDGED_MS = 8000  # a connection on which the other machine's system answers nothing for so long is given up
_KEEPALIVE_IDLE_S, _KEEPALIVE_EVERY_S, _KEEPALIVE_COUNT = 4, 2, 3  # the same for one on which nothing is sent
_HANDSHAKE_MS = 10_000
_REOPEN_S = 5.0  # ZeroMQ restores a connection by itself, except where the other side was no ZeroMQ: that it gives up

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_MAX_EVENTS = 100_000
"""Of a socket that are not read yet, 15 MB; with more of them ZeroMQ's thread waits, and all channels with it."""

_monitor_numbers = itertools.count()


class Verdict(enum.Enum):
    """What a receiver makes of a frame."""

    NEW = enum.auto()
    DUPLICATE = enum.auto()
    GAP = enum.auto()
    WAITING = enum.auto()  # in a gap whose resend was already asked for
    COMPLETE = enum.auto()  # a probe finds nothing missing
    FENCED = enum.auto()
    EARLY = enum.auto()  # of an incarnation that nobody has announced yet
    EXCESS = enum.auto()  # more than the channel's capacity: no sender of ours does it


class WakeUp:
    """A file descriptor that is readable while set. Thread-safe; setting twice is setting once."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()
        self._lock = threading.Lock()
        self._is_set = False
        self._is_closed = False

    def fileno(self) -> int:
        return self._read_fd

    def set(self) -> None:
        with self._lock:
            if not self._is_set and not self._is_closed:
                self._is_set = True
                os.write(self._write_fd, b"\x00")

    def clear(self) -> None:
        with self._lock:
            if self._is_set and not self._is_closed:
                self._is_set = False
                os.read(self._read_fd, 1)

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._read_fd)
                os.close(self._write_fd)


class Stream:
    """What a receiver knows of one channel: its source's incarnation and how far it has come."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.name = spec.name
        self.source = spec.source.split(".")[0]
        self.max_bytes = spec.max_bytes
        self.messages = wire.message_types(spec.accepts)
        self.peer: bytes | None = None
        self.incarnation = 0
        self.arrived = 0
        self.taken = 0
        self.capacity = spec.capacity
        self._ack_every = max(1, spec.capacity // 4)
        self._num_untold = 0
        self._resend_after: int | None = None
        self._is_new = True
        self.awaits_word = False
        """Whether a successor has to be announced (`fence`) before anything of it counts."""

    def admit(self, peer: bytes, frame: Frame) -> Verdict:
        """Judge a frame; NEW counts it as arrived."""
        if frame.incarnation < self.incarnation:
            return Verdict.FENCED
        if frame.incarnation > self.incarnation and self.awaits_word and not self._is_new:
            return Verdict.EARLY
        if frame.incarnation > self.incarnation or self._is_new:
            self.incarnation = frame.incarnation
            self.arrived = self.taken = frame.base - 1
            self._resend_after, self._is_new = None, False
        if peer != self.peer:  # a new connection: the old one may have lost the reply
            self.peer, self._resend_after = peer, None
        if frame.base > self.arrived + 1:  # an acknowledgement to one that died: nobody keeps what is in between
            self.arrived = self.taken = frame.base - 1
        if frame.kind is Kind.PROBE:
            return Verdict.GAP if frame.sequence > self.arrived else Verdict.COMPLETE
        if frame.sequence <= self.arrived:
            return Verdict.DUPLICATE
        if frame.sequence > self.arrived + 1:
            if self._resend_after == self.arrived:
                return Verdict.WAITING
            self._resend_after = self.arrived
            return Verdict.GAP
        if self.arrived - self.taken >= self.capacity:
            return Verdict.EXCESS
        self.arrived, self._resend_after = frame.sequence, None
        return Verdict.NEW

    def take(self, incarnation: int, sequence: int) -> bool:
        """Count a message as taken; True when it is time to say so."""
        if incarnation != self.incarnation:  # left over from one that was replaced meanwhile
            return False
        self.taken = max(self.taken, sequence)
        self._num_untold += 1
        if self._num_untold < self._ack_every:
            return False
        self._num_untold = 0
        return True

    def fence(self, incarnation: int) -> None:
        """Refuse everything below `incarnation`."""
        if incarnation > self.incarnation:
            self.incarnation, self.peer, self._is_new = incarnation, None, True


class Queue(Protocol):
    """Where a LocalLink delivers: an Inbox."""

    def deliver(self, link: LocalLink, message: Message) -> None: ...

    @property
    def is_closed(self) -> bool: ...


class Link(Protocol):
    """One (source, target) pair as its source sees it."""

    name: str
    target: str
    capacity: int

    @property
    def can_wait(self) -> bool:
        """False when only this thread could make room."""
        ...

    @property
    def is_closed(self) -> bool: ...

    @property
    def is_away(self) -> bool:
        """Closed on our side, by `close`: there may be another link to the target later."""
        ...

    @property
    def is_fenced(self) -> bool:
        """Closed because a later incarnation of the source has taken its place."""
        ...

    @property
    def depth(self) -> int: ...

    def has_room(self) -> bool: ...

    def send(self, message: Message) -> None: ...

    def pump(self) -> None: ...

    def probe(self) -> None:
        """Ask the target for a sign of life."""
        ...

    @property
    def heard_s(self) -> float:
        """When the target was last heard of, on the wall clock; made is heard."""
        ...

    @property
    def is_connected(self) -> bool:
        """True while the systems of both ends have a connection, whatever their programs do."""
        ...

    def pollables(self) -> list[zmq.Socket[bytes] | int]: ...

    def close(self) -> None: ...


class LocalLink:
    """Delivers into the inbox of an executor of the same process; the message itself travels, not a copy."""

    is_fenced = False

    def __init__(self, name: str, target: str, capacity: int, queue: Queue, *, is_threaded: bool) -> None:
        self.name, self.target, self.capacity = name, target, capacity
        self.num_waiting = 0  # kept by the inbox, under its lock
        self._queue = queue
        self._room = WakeUp() if is_threaded else None
        self._is_closed = False

    @property
    def can_wait(self) -> bool:
        return self._room is not None

    @property
    def is_closed(self) -> bool:
        return self._is_closed or self._queue.is_closed

    @property
    def is_away(self) -> bool:
        return self._is_closed

    @property
    def depth(self) -> int:
        return self.num_waiting

    def has_room(self) -> bool:
        return self.num_waiting < self.capacity or self.is_closed  # sending on a closed one raises

    def send(self, message: Message) -> None:
        if self._is_closed:
            raise ChannelClosed(f"channel '{self.name}': '{self.target}' was disconnected")
        self._queue.deliver(self, message)

    def notify(self) -> None:
        """Called by the inbox when it took a message or closed."""
        if self._room is not None:
            self._room.set()

    def pump(self) -> None:
        if self._room is not None:
            self._room.clear()

    def probe(self) -> None:
        """It lives as long as we do."""

    @property
    def heard_s(self) -> float:
        return _CLOCK.now_s()

    @property
    def is_connected(self) -> bool:
        return not self.is_closed

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return [] if self._room is None else [self._room.fileno()]

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._room is not None:
                self._room.close()


class ZmqLink:
    """A DEALER that keeps every message until the other side says it was taken."""

    can_wait = True

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
        """Numbers go on after `sequence`: the target may know the channel from an earlier link."""
        self.name, self.target, self.capacity = spec.name, spec.target, spec.capacity
        self.sequence = sequence
        self.address = address
        self.heard_s = _CLOCK.now_s()
        self.is_connected = self.is_away = self.is_fenced = False
        self._tried_s = self.heard_s
        self._max_bytes = spec.max_bytes
        self._name = spec.name.encode()
        self._incarnation = incarnation
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_connections = 0
        self._num_refused = 0
        self._stats = ChannelStats() if stats is None else stats
        self._closed_because: str | None = None
        self._socket = _socket(zmq.DEALER, [address.at])
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        self._socket.set(zmq.MAXMSGSIZE, frames.MAX_OVERHEAD_BYTES)
        if keys is not None:
            keys.secure_caller(self._socket, spec.target, address.incarnation)
        self._monitor: zmq.Socket[bytes] = _monitor_of(
            self._socket, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
        )
        self._socket.connect(address.at)

    @property
    def is_closed(self) -> bool:
        return self._closed_because is not None

    @property
    def depth(self) -> int:
        return len(self._kept)

    def has_room(self) -> bool:
        if len(self._kept) >= self.capacity:
            self.pump()
        return len(self._kept) < self.capacity or self.is_closed  # sending on a closed one raises

    def send(self, message: Message) -> None:
        if (self.sequence & 15) == 0 or len(self._kept) < 2:  # see a fence soon, without a look per message
            self.pump()
        if self._closed_because is not None:
            raise ChannelClosed(f"channel '{self.name}': {self._closed_because}")
        payload = wire.encode(message)
        if len(payload) > self._max_bytes:
            raise ChannelError(
                f"a {type(message).__name__} is too large for channel '{self.name}'",
                got=f"{len(payload)} bytes",
                allowed=f"{self._max_bytes} bytes",
            )
        self.sequence += 1
        self._kept.append((self.sequence, payload))
        self._transmit(frames.pack_data(self._name, self._incarnation, self._base, self.sequence, payload))

    def probe(self) -> None:
        if self.is_connected:  # else it would only wait, and all of them would arrive together
            self._transmit(frames.pack_probe(self._name, self._incarnation, self._base, self.sequence))

    def pump(self) -> None:
        """Read replies and connection events; on every connection ask what an earlier one may have lost."""
        while not self.is_closed and is_readable(self._monitor):
            self._changed(recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"])
        while not self.is_closed and is_readable(self._socket):
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._replied(*frames.unpack_reply(b"".join(parts)))
            except ChannelError:
                self._stats.refused += 1
        if not self.is_closed and not self.is_connected and _CLOCK.now_s() - self._tried_s >= _REOPEN_S:
            self._reopen()

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return [] if self.is_closed else [self._socket, self._monitor]

    def describe(self) -> str:
        """How it stands with the connection, for an error message."""
        if self.is_connected:
            return "connected"
        if self._num_refused:
            return f"not connected: {self._num_refused} handshakes failed; has it the same run key?"
        return "never connected" if self._num_connections == 0 else "the connection is lost"

    def close(self) -> None:
        self.is_away = True
        self._end(f"'{self.target}' was disconnected")

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
        self.heard_s = _CLOCK.now_s()
        if reply is Reply.FENCED and incarnation > self._incarnation:
            self.is_fenced = True
            self._end(f"incarnation {self._incarnation} was replaced by {incarnation}")
        elif incarnation == self._incarnation and reply is Reply.TAKEN:
            while self._kept and self._kept[0][0] <= sequence:
                self._kept.popleft()
        elif incarnation == self._incarnation and reply is Reply.RESEND:
            for kept, payload in self._kept:
                if kept > sequence:
                    self._transmit(frames.pack_data(self._name, self._incarnation, self._base, kept, payload))
        elif reply is Reply.CLOSED:
            self._end(f"'{self.target}' has ended")

    def _transmit(self, frame: bytes) -> None:
        with contextlib.suppress(zmq.Again):  # ZeroMQ has given up; what is kept comes when there is a connection
            self._socket.send(frame, zmq.NOBLOCK)

    def _reopen(self) -> None:
        self._tried_s = _CLOCK.now_s()
        with contextlib.suppress(zmq.ZMQError):  # it is gone where ZeroMQ has given up
            self._socket.disconnect(self.address.at)
        self._socket.connect(self.address.at)

    def _end(self, why: str) -> None:
        if self._closed_because is None:
            self._closed_because = why
            self.is_connected = False
            _end_monitor(self._socket, self._monitor)
            self._socket.close()
            self._kept.clear()


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
        self.monitor: zmq.Socket[bytes] = _monitor_of(self.socket, zmq.EVENT_DISCONNECTED | _REFUSED)
        self.bound: list[str] = []
        try:
            for address in addresses:
                self.socket.bind(address)
                endpoint = self.socket.getsockopt(zmq.LAST_ENDPOINT)
                assert isinstance(endpoint, bytes)
                self.bound.append(endpoint.rstrip(b"\0").decode())
        except zmq.ZMQError as error:
            self.close()
            raise ChannelError(
                f"port '{port}' cannot listen",
                got=error.strerror,
                allowed="a free address of this machine",
                hint=address,
            ) from error

    def receive(self) -> tuple[bytes, bytes] | None:
        """(peer, frame), or None when nothing is there. A message of several frames comes out malformed."""
        while is_readable(self.monitor):
            if recv_monitor_message(self.monitor, zmq.NOBLOCK)["event"] != zmq.EVENT_DISCONNECTED:
                self._stats.refused_peers += 1
                self._num_refused += 1
            elif self._num_refused:
                self._num_refused -= 1
            else:
                self._stats.disconnects += 1
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
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _socket(kind: int, addresses: Sequence[str]) -> zmq.Socket[bytes]:
    """One without bounds of its own: channels are bounded by `capacity`. Dead connections are found by the system."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
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
    """Where a socket's events come out, at an address that no other has had: pyzmq's own is named after the socket's
    file descriptor, and the system gives that away again before ZeroMQ has given up the address of a closed one."""
    address = f"inproc://slipstream.monitor-{next(_monitor_numbers)}"
    socket.monitor(address, events)
    monitor: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
    monitor.set(zmq.RCVHWM, _MAX_EVENTS)
    monitor.connect(address)
    return monitor


def _end_monitor(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Read what is left first: ZeroMQ's thread may be waiting for room, and `socket` could not be told to end."""
    while is_readable(monitor):
        recv_monitor_message(monitor, zmq.NOBLOCK)
    socket.disable_monitor()
    monitor.close(linger=0)
