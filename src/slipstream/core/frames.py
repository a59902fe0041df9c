"""The protocol between the sockets of a channel: its frames, and the receiver's judgement of them.

ZeroMQ loses messages when a connection breaks. So every message has (channel, incarnation, sequence number). The
receiver acknowledges, cumulatively, the messages that were taken; the sender keeps all others and can send them again.
An acknowledgement wakes both processes, so of one channel there are few: for many messages, after some time, or when
the sender asks.

    data   DEALER -> ROUTER   magic, kind, length of name, incarnation, base, sequence, count, name, lengths, payloads
    probe  DEALER -> ROUTER   the same with count 0 and no payload
    reply  ROUTER -> DEALER   magic, reply, incarnation, sequence

A data frame is an envelope for `count` messages with the sequence numbers from `sequence` on: what is ready together
travels together. Everything else is per message.

`base` is the oldest sequence number that the sender still keeps; a receiver that does not know the sender starts there.
A probe asks "do you have everything up to `sequence`?" and is always answered, by TAKEN, with RESEND if not, and by
TAKEN once more when all that had arrived was taken. A sender that waits for room, or until all was taken, sends one.
After a reconnect it finds the messages and acknowledgements that the broken connection lost. Sent regularly it is a
sign of life of both ends.
"""

from __future__ import annotations

import enum
import itertools
import math
import struct

import msgspec

from slipstream.core import wire
from slipstream.core.channel_spec import ChannelSpec, executor_of
from slipstream.core.errors import ChannelError

MAX_MESSAGES = 256  # in a frame
_ACK_EVERY = 64  # messages, or a quarter of a channel's capacity, if that is less
_ACK_BYTES = 1 << 18  # or so many bytes of them: a sender keeps that much longer than it has to
_ACK_AGAIN_S = 0.1  # after the last one, where fewer have come
MAX_OVERHEAD_BYTES = 1024 + 4 * MAX_MESSAGES  # beyond its payloads: header, name, lengths, the bytes that CURVE adds

_MAGIC = b"SLP3"
_DATA, _PROBE = 0, 1
_FRAME = struct.Struct("<4sBHQQQI")
_REPLY = struct.Struct("<4sBQQ")


class Reply(enum.IntEnum):
    """The answers of a receiver; each comes with a sequence number."""

    TAKEN = 1  # everything up to it was taken
    RESEND = 2  # everything after it is missing
    FENCED = 3  # a higher incarnation (the one in the reply) has replaced you
    CLOSED = 4  # the receiver has ended


class ChannelFrame(msgspec.Struct, frozen=True):
    """A message of a data frame, or a probe; the module docstring explains the numbers."""

    is_probe: bool
    name: str
    incarnation: int
    base: int
    sequence: int
    payload: bytes


def pack_data(name: bytes, incarnation: int, base: int, sequence: int, *payloads: bytes) -> bytes:
    """Return the frame of 1..MAX_MESSAGES messages, the first of which has number `sequence`."""
    header = _FRAME.pack(_MAGIC, _DATA, len(name), incarnation, base, sequence, len(payloads))
    lengths = struct.pack(f"<{len(payloads)}I", *map(len, payloads))
    return b"".join((header, name, lengths, *payloads))


def pack_probe(name: bytes, incarnation: int, base: int, sequence: int) -> bytes:
    return _FRAME.pack(_MAGIC, _PROBE, len(name), incarnation, base, sequence, 0) + name


def unpack(frame: bytes) -> list[ChannelFrame]:
    """Return the messages in the bytes of `pack_data`, in order, or the probe of `pack_probe`. Raises ChannelError."""
    if len(frame) < _FRAME.size:
        raise ChannelError("a frame is too short", got=f"{len(frame)} bytes")
    magic, kind, length, incarnation, base, sequence, count = _FRAME.unpack_from(frame)
    start = _FRAME.size + length
    is_probe = kind == _PROBE
    if magic != _MAGIC or kind not in (_DATA, _PROBE) or len(frame) < start + 4 * count:
        raise ChannelError("a frame has a malformed header")
    if not 1 <= base <= sequence + is_probe or not (count == 0 if is_probe else 1 <= count <= MAX_MESSAGES):
        raise ChannelError("a frame has impossible numbers", got=f"base {base}, sequence {sequence}, count {count}")
    try:
        name = frame[_FRAME.size : start].decode()
    except UnicodeDecodeError as error:
        raise ChannelError("a frame has a malformed channel name") from error
    lengths = struct.unpack_from(f"<{count}I", frame, start)
    ends = [*itertools.accumulate(lengths, initial=start + 4 * count)]
    if ends[-1] != len(frame):
        raise ChannelError("a frame has lengths that do not fit it", got=f"{len(frame)} bytes", allowed=f"{ends[-1]}")
    if is_probe:
        return [ChannelFrame(True, name, incarnation, base, sequence, b"")]
    return [
        ChannelFrame(False, name, incarnation, base, sequence + index, frame[begin:end])
        for index, (begin, end) in enumerate(itertools.pairwise(ends))
    ]


def pack_reply(reply: Reply, incarnation: int, sequence: int) -> bytes:
    return _REPLY.pack(_MAGIC, reply, incarnation, sequence)


def unpack_reply(frame: bytes) -> tuple[Reply, int, int]:
    """Parse the bytes of `pack_reply`: (reply, incarnation, sequence). Raises ChannelError."""
    if len(frame) != _REPLY.size:
        raise ChannelError("a reply has a wrong length", got=f"{len(frame)} bytes", allowed=_REPLY.size)
    magic, reply, incarnation, sequence = _REPLY.unpack(frame)
    if magic != _MAGIC or reply not in tuple(Reply):
        raise ChannelError("a reply is malformed")
    return Reply(reply), incarnation, sequence


class Arrival(enum.Enum):
    """The judgement of a frame that arrived."""

    NEW = enum.auto()
    DUPLICATE = enum.auto()
    GAP = enum.auto()
    WAITING = enum.auto()  # in a gap whose resend was already asked for
    COMPLETE = enum.auto()  # a probe, and nothing is missing
    FENCED = enum.auto()
    EARLY = enum.auto()  # of an incarnation that `fence` has not announced yet
    EXCESS = enum.auto()  # beyond the channel's capacity: no sender of ours sends it


def _is_later(peer: bytes, known: bytes) -> bool:
    """Tell whether the connection `peer` of a ROUTER was made after `known`.

    A ROUTER may read what a broken connection left behind the first frames of the next, and answers to that would go
    nowhere. libzmq numbers connections in turn, in four bytes behind a zero; of other ids the last one counts.
    """
    if any(len(one) != 5 or one[0] for one in (peer, known)):
        return peer != known
    return 0 < (int.from_bytes(peer) - int.from_bytes(known)) % 2**32 < 2**31


class Stream:
    """The receiver's state of one channel: the incarnation of its source, and how far its messages have come."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.source = executor_of(spec.source)
        self.max_bytes = spec.max_bytes
        self.decoder = wire.decoder_of(wire.message_types(spec.accepts))
        self.peer: bytes | None = None
        self.incarnation = 0
        self.arrived = 0
        self.taken = 0
        self.awaits_word = False
        """Whether a higher incarnation counts only when `fence` has announced it."""
        self.early: list[tuple[bytes, ChannelFrame]] = []
        self.early_probe: tuple[bytes, ChannelFrame] | None = None
        self.is_asked = False
        """Whether a probe waits for the news that everything was taken."""
        self._capacity = spec.capacity
        self._ack_every = max(1, min(_ACK_EVERY, spec.capacity // 4))
        self._num_unacknowledged = self._bytes_unacknowledged = 0
        self._acknowledged_s = -math.inf
        self._resend_after: int | None = None
        self._is_new = True

    def admit(self, peer: bytes, frame: ChannelFrame) -> Arrival:
        """Judge a frame; NEW counts it as arrived."""
        if frame.incarnation < self.incarnation:
            return Arrival.FENCED
        is_first = self._is_new and self.incarnation == 0  # before any word
        if frame.incarnation > self.incarnation and self.awaits_word and not is_first:
            return Arrival.EARLY
        if frame.incarnation > self.incarnation or self._is_new:
            self.incarnation = frame.incarnation
            self.arrived = self.taken = frame.base - 1
            self.peer, self._resend_after, self._is_new = None, None, False
        if self.peer is None or _is_later(peer, self.peer):  # the old connection may have lost the reply
            self.peer, self._resend_after = peer, None
        if frame.base > self.arrived + 1:  # acknowledged to a receiver that died: no sender keeps what lies between
            self.arrived = self.taken = frame.base - 1
        if frame.is_probe:
            self.is_asked = frame.sequence > self.taken
            return Arrival.GAP if frame.sequence > self.arrived else Arrival.COMPLETE
        if frame.sequence <= self.arrived:
            return Arrival.DUPLICATE
        if frame.sequence > self.arrived + 1:
            if self._resend_after == self.arrived:
                return Arrival.WAITING
            self._resend_after = self.arrived
            return Arrival.GAP
        if self.arrived - self.taken >= self._capacity:
            return Arrival.EXCESS
        self.arrived, self._resend_after = frame.sequence, None
        return Arrival.NEW

    def hold_back(self, peer: bytes, frame: ChannelFrame) -> None:
        """Keep an EARLY frame until `fence`. Of probes the last is enough: it finds all that a connection lost."""
        if frame.is_probe:
            self.early_probe = peer, frame
        elif len(self.early) < self._capacity:
            self.early.append((peer, frame))

    def take(self, frame: ChannelFrame) -> None:
        """Count a message as taken."""
        if frame.incarnation == self.incarnation:  # else the sender was replaced since the message arrived
            self.taken = max(self.taken, frame.sequence)
            self._num_unacknowledged += 1
            self._bytes_unacknowledged += len(frame.payload)

    def owes(self, now_s: float, *, is_empty: bool) -> bool:
        """Return whether it is time to acknowledge; `is_empty`: no message waits to be taken, of any channel."""
        if not self._num_unacknowledged:
            return False
        is_much = self._num_unacknowledged >= self._ack_every or self._bytes_unacknowledged >= _ACK_BYTES
        is_asked = self.is_asked and self.taken == self.arrived
        return is_much or is_asked or (is_empty and now_s >= self._acknowledged_s + _ACK_AGAIN_S)

    def acknowledged(self, now_s: float) -> None:
        """Note that the sender was told what has been taken."""
        self._num_unacknowledged = self._bytes_unacknowledged = 0
        self._acknowledged_s = now_s
        self.is_asked &= self.taken < self.arrived

    def fence(self, incarnation: int) -> list[tuple[bytes, ChannelFrame]]:
        """Refuse all incarnations below `incarnation` from now on. Return the frames that were held back, in order."""
        if incarnation > self.incarnation:
            self.incarnation, self.peer, self._is_new = incarnation, None, True
        held_back = self.early if self.early_probe is None else [*self.early, self.early_probe]
        self.early, self.early_probe = [], None
        return held_back
