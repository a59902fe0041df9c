"""Frames between a pool and its jailed workers, and the messages that every kind of worker has.

A frame is 4 bytes of length (little endian) and msgpack, decoded strictly on both sides.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any

import msgspec

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker has imported what its setup names; `isolation` names the barriers that hold."""

    isolation: list[str]


class SetupFailed(msgspec.Struct, frozen=True, tag=True):
    """The setup names something that cannot be built: the user's import path or parameters are wrong."""

    error: str


class TriedNetwork(msgspec.Struct, frozen=True, tag=True):
    """The worker's code has tried to reach a network that there is not."""


_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct | list[Any]) -> bytes:
    """Return `message`, or a list of messages, as one frame."""
    return framed(_encoder.encode(message))


def framed(body: bytes) -> bytes:
    """Return `body` with its length in front."""
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Bytes in, whole frame bodies out; never holds more than one frame of `max_bytes` and one read."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Bodies completed by `data`, which is taken whole only when the iterator is used up.

        ValueError, after the bodies before it, when a frame announces more than `max_bytes`.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise ValueError(f"a frame of {length} bytes, at most {self._max_bytes} allowed")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body


def receive_frames(connection: socket.socket, reader: FrameReader) -> list[bytes]:
    """Wait for the next frames, at least one; EOFError when the other side is gone."""
    while True:
        data = connection.recv(_READ_BYTES)
        if not data:
            raise EOFError
        if bodies := list(reader.feed(data)):
            return bodies
