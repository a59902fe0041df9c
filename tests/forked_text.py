"""Children of `models/foreign_text.py`, forked from a process that has imported: each would import for a second.

They are what they are else: the same function, bounded by itself, in an environment made by the same, and children of
the process that asks. `tests/models/test_foreign_text.py` starts them as users do, and so does every command.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slipstream.models import foreign_text


class _Forked:
    """What `foreign_text` uses of a Popen."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._code: int | None = None

    def kill(self) -> None:
        if self._poll() is None:
            os.kill(self._pid, signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self._poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.001)
        return code

    def _poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


class Forks:
    """Stands for the module `subprocess` in `foreign_text`; the process that forks is started when it is needed."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def begin(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._socket, others = socket.socketpair()
        with others:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(others.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[others.fileno()],
                env=foreign_text._environment(),
            )

    def Popen(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> _Forked:
        from slipstream.controller.nursery import _adopting

        self.begin()
        with _adopting():
            socket.send_fds(self._socket, [command[-2].encode()], pass_fds)
            return _Forked(int(self._socket.recv(32)))

    def close(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
            self._process = None


FORKS = Forks()


@contextmanager
def forking() -> Iterator[None]:
    foreign_text.subprocess = FORKS  # type: ignore[attr-defined,assignment]
    yield
    foreign_text.subprocess = subprocess  # type: ignore[attr-defined]


def _fork_for_ever(peer: socket.socket) -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # as in `_main`
    import transformers.models.auto.tokenization_auto  # noqa: F401

    while True:
        kind, fds, _, _ = socket.recv_fds(peer, 32, 1)
        if not kind:
            return
        mine, others = os.pipe()
        if (between := os.fork()) == 0:
            if os.fork() == 0:
                os.write(others, str(os.getpid()).encode())
                for fd in (mine, others, peer.fileno()):
                    os.close(fd)
                foreign_text._main(kind.decode(), fds[0])
            os._exit(0)
        os.waitpid(between, 0)  # the one below is now a child of the process that asks
        peer.sendall(os.read(mine, 32))
        for fd in (mine, others, *fds):
            os.close(fd)


if __name__ == "__main__":
    _fork_for_ever(socket.socket(fileno=int(sys.argv[1])))
