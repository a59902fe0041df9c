"""What travels between the sockets of a channel.

ZeroMQ forgets messages when a connection breaks, so every frame carries (channel, incarnation, sequence number). The
receiver acknowledges, cumulatively, what was taken; the sender keeps the rest.

    data   DEALER -> ROUTER   magic, kind, length of name, incarnation, base, sequence, name, payload
    probe  DEALER -> ROUTER   the same without payload
    reply  ROUTER -> DEALER   magic, reply, incarnation, sequence

`base` is the oldest sequence number the sender still keeps: where a receiver that lost its memory starts. A probe asks
"have you got everything up to `sequence`?" and is always answered, by TAKEN or RESEND: after a reconnect it finds out
what the broken connection lost, of either direction, and now and then it is a sign of life for both ends.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from slipstream.core.errors import ChannelError

MAX_OVERHEAD_BYTES = 1024  # of a frame, beyond its payload: header, name, what CURVE adds

_MAGIC = b"SLP2"
_FRAME = struct.Struct("<4sBHQQQ")
_REPLY = struct.Struct("<4sBQQ")


class Kind(enum.IntEnum):
    DATA = 0
    PROBE = 1


class Reply(enum.IntEnum):
    """What a receiver tells a sender; the number with it is a sequence number."""

    TAKEN = 1  # everything up to it was taken
    RESEND = 2  # everything after it is missing
    FENCED = 3  # a higher incarnation (the one in the reply) has replaced you
    CLOSED = 4  # the receiver has ended


@dataclass(frozen=True)
class Frame:
    """What a sender sends; see the module docstring."""

    kind: Kind
    name: str
    incarnation: int
    base: int
    sequence: int
    payload: bytes


def pack_data(name: bytes, incarnation: int, base: int, sequence: int, payload: bytes) -> bytes:
    return _FRAME.pack(_MAGIC, Kind.DATA, len(name), incarnation, base, sequence) + name + payload


def pack_probe(name: bytes, incarnation: int, base: int, sequence: int) -> bytes:
    return _FRAME.pack(_MAGIC, Kind.PROBE, len(name), incarnation, base, sequence) + name


def unpack(frame: bytes) -> Frame:
    """Inverse of `pack_data` and `pack_probe`. Raises ChannelError."""
    if len(frame) < _FRAME.size:
        raise ChannelError("a frame is too short", got=f"{len(frame)} bytes")
    magic, kind, length, incarnation, base, sequence = _FRAME.unpack_from(frame)
    start = _FRAME.size + length
    is_probe = kind == Kind.PROBE
    if magic != _MAGIC or kind not in (Kind.DATA, Kind.PROBE) or len(frame) < start:
        raise ChannelError("a frame has a malformed header")
    if not 1 <= base <= sequence + is_probe or (is_probe and len(frame) > start):
        raise ChannelError("a frame's numbers make no sense", got=f"base {base}, sequence {sequence}")
    try:
        name = frame[_FRAME.size : start].decode()
    except UnicodeDecodeError as error:
        raise ChannelError("a frame has a malformed channel name") from error
    return Frame(Kind(kind), name, incarnation, base, sequence, frame[start:])


def pack_reply(reply: Reply, incarnation: int, sequence: int) -> bytes:
    return _REPLY.pack(_MAGIC, reply, incarnation, sequence)


def unpack_reply(frame: bytes) -> tuple[Reply, int, int]:
    """(reply, incarnation, sequence). Raises ChannelError."""
    if len(frame) != _REPLY.size:
        raise ChannelError("a reply has another length", got=f"{len(frame)} bytes", allowed=_REPLY.size)
    magic, reply, incarnation, sequence = _REPLY.unpack(frame)
    if magic != _MAGIC or reply not in tuple(Reply):
        raise ChannelError("a malformed reply")
    return Reply(reply), incarnation, sequence
