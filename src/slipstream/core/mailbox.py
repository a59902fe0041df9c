"""Mailbox that other threads have for the thread that polls."""

from __future__ import annotations

import contextlib
import queue
import socket
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue with a descriptor that is readable while something waits in it; any thread may `put`, also too late."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._read, self._write = socket.socketpair()  # no pipe: the number of a closed one may be another's already
        self._read.setblocking(False)
        self._write.setblocking(False)

    def put(self, answer: T) -> None:
        self._queue.put(answer)
        with contextlib.suppress(OSError):  # enough wake-ups are waiting, or it is closed
            self._write.send(b"\0")

    def take(self) -> list[T]:
        """Return what came, in its order; never waits."""
        with contextlib.suppress(BlockingIOError):
            self._read.recv(4096)
        return [self._queue.get() for _ in range(self._queue.qsize())]

    def fileno(self) -> int:
        return self._read.fileno()

    def close(self) -> None:
        self._read.close()
        self._write.close()
