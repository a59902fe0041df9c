"""The controller's end of the nursery (`forking.py`), the process from which those of a run are forked.

The controller starts it as soon as it knows that there will be a run, and goes on with its own imports beside it. A
process that is started later, or again after a loss, is there in milliseconds instead of seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from slipstream.controller.placement import thread_environment
from slipstream.core import lifeline
from slipstream.core.config import RunConfig
from slipstream.core.errors import SlipstreamError

START_DEADLINE_S = 180.0  # for an answer: the first comes when all is imported, from a slow disk too
HEADER_BYTES = 8
OF_CHECKPOINTS = "transformers.models.auto.tokenization_auto"  # seconds of imports; characters need no transformers

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


class Nursery:
    """The controller's end, for any thread. Starts the nursery at the first need; a lost one is replaced."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def is_there(self) -> bool:
        """Whether the nursery was started, and not ended."""
        return self._process is not None

    def begin(self, *also: str) -> None:
        """Start the nursery, which then imports beside this process, the modules `also` too.

        Does nothing where it is there.
        """
        with self._lock:
            if self.is_there:
                return
            ours, theirs = socket.socketpair()
            command = lifeline.command("slipstream.controller.forking", str(theirs.fileno()), *also)
            environment = os.environ | thread_environment(1) | {"PYTHONPATH": search_path()}
            with theirs, contextlib.ExitStack() as failed:
                failed.callback(ours.close)
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a Ctrl-C at the terminal reaches the controller only
                )
                failed.pop_all()
            ours.settimeout(START_DEADLINE_S)
            self._socket = ours

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        stdin: int,
        log: int,
        keep: Sequence[int] = (),
    ) -> int:
        """Start `slipstream.controller.process` with `arguments`, as a child of this process; return its id.

        `environment` is the whole of its environment, `stdin` and `log` its standard streams; the descriptors in `keep`
        stay open in it. SlipstreamError where the nursery does not answer within `START_DEADLINE_S`, twice.
        """
        request = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "path": [path for path in sys.path if isinstance(path, str)],
            "parent": os.getpid(),
        }
        body = json.dumps(request).encode()
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY)  # its path may be gone
        try:
            with self._lock:
                try:
                    return self._asked(body, [stdin, log, folder, *keep])
                except OSError:  # it was killed; a timeout is one, too
                    self.close()
                try:
                    return self._asked(body, [stdin, log, folder, *keep])
                except OSError as error:
                    self.close()
                    raise SlipstreamError("the process that starts the others does not answer", got=error) from error
        finally:
            os.close(folder)

    def _asked(self, body: bytes, fds: Sequence[int]) -> int:
        """Send a request, and return the id of the process that was started for it."""
        self.begin()
        assert self._socket is not None
        with _adopting():
            socket.send_fds(self._socket, [len(body).to_bytes(HEADER_BYTES)], fds)
            self._socket.sendall(body)
            pid = int.from_bytes(received(self._socket, HEADER_BYTES))
        if not pid:
            raise OSError("a process could not be forked")
        return pid

    def close(self) -> None:
        """End the nursery; the processes that it has started go on."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = self._socket = None


NURSERY = Nursery()
"""The one of this process."""
atexit.register(NURSERY.close)


@contextlib.contextmanager
def nursery_for(config: RunConfig, *, tell: Callable[[str], object] | None = None) -> Iterator[None]:
    """Let the nursery import beside what is done within, where the run has executors in processes of their own, and
    end it then. No other stage than RL has any.

    One that was there before stays: it serves all runs between its `begin` and its `close`. `tell` is told that the
    import takes some seconds.
    """
    if config.host != "process" or "rl" not in config.stages or NURSERY.is_there:
        yield
        return
    if tell is not None:
        tell(f"starting {config.recipe}: libraries are imported first, for some seconds")
    NURSERY.begin(*([] if config.model.path is None else [OF_CHECKPOINTS]))
    try:
        yield
    finally:
        NURSERY.close()


def search_path() -> str:
    """Return this process's search path for modules as PYTHONPATH has it."""
    found = [path for path in sys.path if isinstance(path, str)]  # Python looks into nothing else
    return os.pathsep.join(path or os.getcwd() for path in found if not path.endswith(".zip"))


def received(connection: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes. ConnectionError where the other end has closed before."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make orphans among this process's descendants its children, inside the context."""
    libc, was = ctypes.CDLL(None, use_errno=True), ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0)
