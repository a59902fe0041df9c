"""What a channel is made of: one link per (source, target), in this process or over ZeroMQ.

ZeroMQ forgets messages when a connection breaks, so every frame carries (channel, incarnation, sequence number). The
receiver acknowledges, cumulatively, what was taken; the sender keeps the rest and sends it again on reconnect; the
receiver drops what it has already seen, and everything from a lower incarnation.

    data   DEALER -> ROUTER   magic, length of name, incarnation, base, sequence, name, payload
    reply  ROUTER -> DEALER   magic, reply, incarnation, sequence

`base` is the oldest sequence number the sender still keeps: where a receiver that lost its memory starts.
"""

from __future__ import annotations

import enum
import os
import struct
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from slipstream.core import wire
from slipstream.core.errors import ChannelClosed, ChannelError
from slipstream.core.types import Message

MAX_IPC_PATH_BYTES = 103  # sun_path holds 104 on macOS and 108 on Linux, with the final NUL
_LINGER_MS = 250  # hosts flush before they close; this covers the last replies to peers that are still there
_RECONNECT_MS, _RECONNECT_MAX_MS = 10, 500

_MAGIC = b"SLP1"
_DATA = struct.Struct("<4sHQQQ")
_REPLY = struct.Struct("<4sBQQ")


class Reply(enum.IntEnum):
    """What a receiver tells a sender; the number with it is a sequence number."""

    TAKEN = 1  # everything up to it was taken
    RESEND = 2  # everything after it is missing
    FENCED = 3  # a higher incarnation (the one in the reply) has replaced you
    CLOSED = 4  # the receiver has ended


class Verdict(enum.Enum):
    """What a receiver makes of a frame."""

    NEW = enum.auto()
    DUPLICATE = enum.auto()
    GAP = enum.auto()
    WAITING = enum.auto()  # in a gap whose resend was already asked for
    FENCED = enum.auto()


@dataclass(frozen=True)
class Data:
    """A data frame; see the module docstring."""

    name: str
    incarnation: int
    base: int
    sequence: int
    payload: bytes


def pack_data(name: bytes, incarnation: int, base: int, sequence: int, payload: bytes) -> bytes:
    return _DATA.pack(_MAGIC, len(name), incarnation, base, sequence) + name + payload


def unpack_data(frame: bytes) -> Data:
    """Inverse of `pack_data`. Raises ChannelError."""
    if len(frame) < _DATA.size:
        raise ChannelError("a frame is too short", got=f"{len(frame)} bytes")
    magic, length, incarnation, base, sequence = _DATA.unpack_from(frame)
    start = _DATA.size + length
    if magic != _MAGIC or len(frame) < start or not 1 <= base <= sequence:
        raise ChannelError("a frame has a malformed header")
    try:
        name = frame[_DATA.size : start].decode()
    except UnicodeDecodeError as error:
        raise ChannelError("a frame has a malformed channel name") from error
    return Data(name, incarnation, base, sequence, frame[start:])


def pack_reply(reply: Reply, incarnation: int, sequence: int) -> bytes:
    return _REPLY.pack(_MAGIC, reply, incarnation, sequence)


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

    def __init__(self, name: str, messages: wire.MessageTypes, *, ack_every: int) -> None:
        self.name = name
        self.messages = messages
        self.peer: bytes | None = None
        self.incarnation = 0
        self.arrived = 0
        self.taken = 0
        self._ack_every = ack_every
        self._num_untold = 0
        self._resend_after: int | None = None
        self._is_new = True

    def admit(self, peer: bytes, data: Data) -> Verdict:
        """Judge a frame; NEW counts it as arrived."""
        if data.incarnation < self.incarnation:
            return Verdict.FENCED
        if data.incarnation > self.incarnation or self._is_new:
            self.incarnation = data.incarnation
            self.arrived = self.taken = data.base - 1
            self._resend_after, self._is_new = None, False
        self.peer = peer
        if data.base > self.arrived + 1:  # an acknowledgement to a receiver that died: nobody keeps what is in between
            self.arrived = self.taken = data.base - 1
        if data.sequence <= self.arrived:
            return Verdict.DUPLICATE
        if data.sequence > self.arrived + 1:
            if self._resend_after == self.arrived:
                return Verdict.WAITING
            self._resend_after = self.arrived
            return Verdict.GAP
        self.arrived, self._resend_after = data.sequence, None
        return Verdict.NEW

    def take(self, sequence: int) -> bool:
        """Count a message as taken; True when it is time to say so."""
        if sequence > self.arrived:  # left over from an incarnation that was replaced meanwhile
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
    def depth(self) -> int: ...

    def has_room(self) -> bool: ...

    def send(self, message: Message) -> None: ...

    def pump(self) -> None: ...

    def pollables(self) -> list[zmq.Socket[bytes] | int]: ...

    def close(self) -> None: ...


class LocalLink:
    """Delivers into the inbox of an executor of the same process; the message itself travels, not a copy."""

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

    def __init__(self, name: str, target: str, capacity: int, address: str, incarnation: int) -> None:
        self.name, self.target, self.capacity = name, target, capacity
        self._name = name.encode()
        self._incarnation = incarnation
        self._sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._num_connections = 0
        self._closed_because: str | None = None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)  # bounded by `capacity`
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, _LINGER_MS)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.set(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED)
        self._socket.connect(address)

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
        if (self._sequence & 15) == 0 or len(self._kept) < 2:  # see a fence soon, without a look per message
            self.pump()
        if self._closed_because is not None:
            raise ChannelClosed(f"channel '{self.name}': {self._closed_because}")
        payload = wire.encode(message)
        self._sequence += 1
        self._kept.append((self._sequence, payload))
        self._transmit(self._sequence, payload)

    def pump(self) -> None:
        """Read replies and connection events; a reconnect or a gap sends everything kept again."""
        while not self.is_closed and is_readable(self._monitor):
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
            self._num_connections += 1
            if self._num_connections > 1:  # what was put before the first connection is still queued
                self._resend()
        while not self.is_closed and is_readable(self._socket):
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 1 and len(frames[0]) == _REPLY.size:
                self._replied(*_REPLY.unpack(frames[0]))

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        return [] if self.is_closed else [self._socket, self._monitor]

    def close(self) -> None:
        self._end(f"'{self.target}' was disconnected")

    def _replied(self, magic: bytes, reply: int, incarnation: int, sequence: int) -> None:
        if magic != _MAGIC:
            return
        if reply == Reply.FENCED and incarnation > self._incarnation:
            self._end(f"incarnation {self._incarnation} was replaced by {incarnation}")
        elif incarnation == self._incarnation and reply == Reply.TAKEN:
            while self._kept and self._kept[0][0] <= sequence:
                self._kept.popleft()
        elif incarnation == self._incarnation and reply == Reply.RESEND:
            self._resend()
        elif reply == Reply.CLOSED:
            self._end(f"'{self.target}' has ended")

    def _resend(self) -> None:
        for sequence, payload in self._kept:
            self._transmit(sequence, payload)

    def _transmit(self, sequence: int, payload: bytes) -> None:
        self._socket.send(pack_data(self._name, self._incarnation, self._kept[0][0], sequence, payload), zmq.NOBLOCK)

    def _end(self, why: str) -> None:
        if self._closed_because is None:
            self._closed_because = why
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._kept.clear()


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    """True when a frame can be received without waiting."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def bind(address: str) -> zmq.Socket[bytes]:
    """A ROUTER at `address`; its queues are bounded by the capacities of the senders."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, _LINGER_MS)
    socket.bind(address)
    return socket
