"""The trusted end of a jailed worker: start it, feed it, read it with suspicion, kill it."""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from slipstream.core.errors import ConfigError
from slipstream.core.plain import wrong_text
from slipstream.core.processes import module_folders
from slipstream.core.scratch import make_claimed
from slipstream.jail.confinement import WorkerLayout
from slipstream.jail.isolation import Network
from slipstream.jail.protocol import FrameReader, frame

_SPARES_AFTER_S = 5.0
_KEEPER_GRACE_S = 5.0  # the keeper needs milliseconds to kill what is below it
_MAX_READ_BYTES = 1 << 20  # read from one worker between two looks at the others

Message = TypeVar("Message")
"""A union of the structs that a kind of worker sends."""

if sys.platform == "linux":
    nested_selector = selectors.EpollSelector
else:
    nested_selector = selectors.KqueueSelector
"""A selector with a descriptor of its own, which another selector can wait for."""


@dataclass(frozen=True)
class WorkerKind(Generic[Message]):
    """A kind of worker: `module` is run as `python -m`, and calls `confinement.keep`.

    `scratch` is part of the names of its folders; `decoder` decodes strictly; a frame of more than `max_bytes` is an
    attack or a bug.
    """

    module: str
    scratch: str
    decoder: msgspec.msgpack.Decoder[Message]
    max_bytes: int


@dataclass(frozen=True)
class Permissions:
    """The rights of a worker beyond its scratch folder and this interpreter's modules.

    `private` folders are empty for it, where files are confined, as are home folders and those shared by all;
    `folders` are searched for modules; `environment` names variables that it gets besides its own; `has_helper` starts
    the helper process of its kind; one that `listens` may take connections, where it has a network. `programs` are
    folders that it sees besides, wherever they lie.
    """

    private: Sequence[str] = ()
    folders: Sequence[str] = ()
    environment: Sequence[str] = ()
    network: Network = "none"
    has_helper: bool = False
    listens: bool = False
    programs: Sequence[str] = ()


def _environment(also: Sequence[str]) -> dict[str, str]:
    """Return a worker's environment: no secrets but those of `also`, one thread, the folders of modules."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", *also) if name in os.environ}
    kept |= module_folders()
    return kept | {
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class Spares:
    """The warm spares of a pool. They start seconds after its first worker is ready: till then the rest of the run
    wants the cores."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.due_s: list[float] = []
        """When, on the pool's clock, to start them: at most one moment."""

    def plan(self, now_s: float) -> None:
        """Call it whenever a worker is ready; the first time counts."""
        if self._count and not self.due_s:
            self.due_s.append(now_s + _SPARES_AFTER_S)

    def take(self, now_s: float) -> int:
        """Return how many to start now."""
        if not self.due_s or now_s < self.due_s[0]:
            return 0
        self.due_s.clear()
        count, self._count = self._count, 0
        return count


class JailedWorker(Generic[Message]):
    """One worker process and its connection. Nothing here blocks, except `close` for the keeper's few milliseconds.

    The connection ends when the keeper does, so that a worker that closes it and goes on holds up nobody.

    `setup` is the first frame that the worker gets. ConfigError where a folder of modules has no path in UTF-8.
    """

    def __init__(self, kind: WorkerKind[Message], setup: msgspec.Struct, permissions: Permissions) -> None:
        sys_path = [os.path.abspath(path) for path in [*sys.path, os.getcwd(), *permissions.folders]]
        if odd := [path for path in sys_path if wrong_text(path)]:
            what = "workers look for modules in a folder whose path is not UTF-8"
            raise ConfigError(what, got=ascii(odd[0]), hint="start in another folder, or rename it")
        ours, theirs = socket.socketpair()
        folder, self._claim = make_claimed(kind.scratch)
        self._scratch = str(folder)
        environment = _environment(permissions.environment) | {"HOME": self._scratch, "TMPDIR": self._scratch}
        home = os.path.expanduser("~")  # may be another folder than the account's
        layout = WorkerLayout(
            scratch=self._scratch,
            sys_path=list(dict.fromkeys(sys_path)),
            private=[home, *map(os.path.abspath, permissions.private)],
            has_helper=permissions.has_helper,
            network=permissions.network,
            listens=permissions.listens,
            programs=list(permissions.programs),
        )
        told = msgspec.json.encode(layout).decode()
        with theirs:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", kind.module, str(theirs.fileno()), told],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
                cwd=self._scratch,
                start_new_session=True,
            )
        ours.setblocking(False)
        self._socket = ours
        self._decoder = kind.decoder
        self._reader = FrameReader(kind.max_bytes)
        self._unsent = bytearray(frame(setup))
        self.failure: str | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, messages: Sequence[Any]) -> None:
        """Queue one list of messages; `flush` moves it."""
        self._unsent += frame(list(messages))
        self.flush()

    def flush(self) -> None:
        """Write as much as the worker takes now. A worker that is gone is noticed by `receive`."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> list[Message]:
        """Messages that are there now. After the last one of a worker that ended or misbehaved, `failure` is set."""
        messages: list[Message] = []
        num_bytes = 0
        while num_bytes < _MAX_READ_BYTES and self.failure is None:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                self.failure = f"worker died{self._cause()}"
            num_bytes += len(data)
            try:
                for body in self._reader.feed(data):
                    messages.append(self._decoder.decode(body))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                self.failure = f"worker sent bad output: {error}"[:200]
        return messages

    def close(self) -> None:
        """Kill everything the worker ever started, reap it, and remove its scratch folder."""
        self._socket.close()
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        try:
            self._keeper.wait(timeout=_KEEPER_GRACE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)
        os.close(self._claim)

    def _cause(self) -> str:
        """Return how the worker ended; the keeper, which has just ended too, passes its exit code on."""
        try:
            code = self._keeper.wait(timeout=_KEEPER_GRACE_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" (signal {code - 128})" if code > 128 else f" (exit code {code})"
