"""Frames between a pool and its workers."""

from __future__ import annotations

import socket

import pytest

from slipstream.jail.protocol import FrameReader, WorkerReady, frame, receive_frames


def test_frames_are_bounded() -> None:
    reader = FrameReader(16)
    assert list(reader.feed(b"\x02\x00\x00\x00a")) == []
    assert list(reader.feed(b"b\x00\x00\x00\x00")) == [b"ab", b""]
    bodies = reader.feed(b"\x01\x00\x00\x00c\xff\xff\x00\x00")
    assert next(bodies) == b"c"
    with pytest.raises(ValueError, match="at most 16"):
        next(bodies)


def test_whole_frames_are_waited_for_and_an_end_is_told() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message = frame(WorkerReady(isolation=["files"]))
        theirs.sendall(message + message[:3])
        reader = FrameReader(1 << 10)
        [body] = receive_frames(ours, reader)
        theirs.sendall(message[3:])
        assert receive_frames(ours, reader) == [body]
        theirs.close()
        with pytest.raises(EOFError):
            receive_frames(ours, reader)
