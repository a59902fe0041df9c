"""The trusted end of a reward worker: start it, feed it, read it with suspicion, kill it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.core.scratch import make_claimed
from slipstream.rewards.protocol import MAX_RESULT_BYTES, AnyJob, FrameReader, FromWorker, WorkerSetup, frame
from slipstream.rewards.worker import WorkerLayout

_KEEPER_GRACE_S = 5.0  # the keeper needs milliseconds to kill what is below it
_CAUSE_S = 0.5
_MAX_READ_BYTES = 1 << 20  # read from one worker between two looks at the others

_decoder = msgspec.msgpack.Decoder(FromWorker, strict=True)


def _environment(also: Sequence[str]) -> dict[str, str]:
    """Return a worker's environment: no secrets but those of `also`, one thread, the folder of this package."""
    package_root = str(Path(__file__).resolve().parents[2])
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", *also) if name in os.environ}
    return kept | {
        "LANG": "C.UTF-8",
        "PYTHONPATH": package_root,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class RewardWorker:
    """One worker process and its connection. Nothing here blocks, except `close` for the keeper's few milliseconds.

    `private` folders are empty for it, where files are confined, as are home folders and those shared by all.
    """

    def __init__(self, setup: WorkerSetup, *, private: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        folder, self._claim = make_claimed("reward")
        self._scratch = str(folder)
        environment = _environment(setup.environment) | {"HOME": self._scratch, "TMPDIR": self._scratch}
        folders = [os.path.dirname(t.function.rpartition(":")[0]) for t in setup.terms if t.source is not None]
        sys_path = [os.path.abspath(path) for path in [*sys.path, os.getcwd(), *folders]]
        home = os.path.expanduser("~")  # may be another folder than the account's
        layout = WorkerLayout(
            scratch=self._scratch,
            sys_path=list(dict.fromkeys(sys_path)),
            private=[home, *map(os.path.abspath, private)],
            runs_programs=any(term.function == "code" for term in setup.terms),
            allow_network=setup.allow_network,
        )
        told = msgspec.json.encode(layout).decode()
        with theirs:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", "slipstream.rewards.worker", str(theirs.fileno()), told],
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
        self._reader = FrameReader(MAX_RESULT_BYTES)
        self._unsent = bytearray(frame(setup))
        self.failure: str | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def keeper_pid(self) -> int:
        return self._keeper.pid

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, jobs: list[AnyJob]) -> None:
        """Queue one list of jobs; `flush` moves it."""
        self._unsent += frame(jobs)
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

    def receive(self) -> list[FromWorker]:
        """Messages that are there now. After the last one of a worker that ended or misbehaved, `failure` is set."""
        messages: list[FromWorker] = []
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
                    messages.append(_decoder.decode(body))
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
        """Return how the scorer ended; the keeper outlives it by milliseconds and passes its exit code on."""
        try:
            code = self._keeper.wait(timeout=_CAUSE_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" (signal {code - 128})" if code > 128 else f" (exit code {code})"
