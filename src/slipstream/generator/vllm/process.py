"""The process of vLLM as its client sees it: started, spoken to, watched, ended."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from slipstream.core.addresses import MAX_IPC_PATH_BYTES
from slipstream.core.channel import make_transport_dir
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelError, ChannelTimeout, ExecutorDied
from slipstream.core.links import is_readable
from slipstream.core.processes import open_pidfd
from slipstream.core.scratch import claim
from slipstream.generator.vllm import protocol

LOG_TAIL_BYTES, LOG_TAIL_LINES = 8192, 20
STOP_DEADLINE_S = 5.0
LAST_WORDS_MS = 100  # what a process sent just before its end may still be on its way
_CLOCK = WallClock()

FrameT = TypeVar("FrameT", bound=protocol.Frame)


@dataclass(frozen=True)
class Launch:
    """How to start the worker: its command, which gets the spec's path as last argument, and its environment."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path


class WorkerProcess:
    """One life of the worker. Frames go both ways; every wait has a deadline and sees the process die.

    The worker leads a session of its own, vLLM's processes are in it, and the whole group is killed at the end.
    """

    def __init__(self, launch: Launch, *, name: str, spec: protocol.Spec) -> None:
        self.name = name
        self._launch = launch
        self._kept: deque[protocol.ToClient] = deque()
        self._folder = make_transport_dir()
        self._owner = claim(self._folder)
        address = f"ipc://{self._folder}/vllm"
        assert len(os.fsencode(address)) <= MAX_IPC_PATH_BYTES, "a fresh folder has a short path"
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, 0)  # bounded by the engine's rooms
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME_BYTES)
        self._socket.bind(address)
        spec_path = self._folder / "spec.json"
        spec_path.write_bytes(msgspec.json.encode(msgspec.structs.replace(spec, address=address)))
        launch.log_path.parent.mkdir(parents=True, exist_ok=True)
        with launch.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [*launch.command, str(spec_path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=dict(launch.environment),
                start_new_session=True,
            )
        self._pidfd = open_pidfd(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: protocol.ToWorker) -> None:
        """Queue a frame. One that a process did not live to take is lost; `receive` and `wait_for` tell of its end."""
        with contextlib.suppress(zmq.Again):  # nobody is connected
            self._socket.send(protocol.encode(frame), zmq.NOBLOCK)

    def has_news(self) -> bool:
        """Whether `receive` would return a frame, or raise."""
        return bool(self._kept) or is_readable(self._socket) or self._has_ended()

    def receive(self) -> protocol.ToClient | None:
        """The next frame, or None. Raises ExecutorDied when the worker has ended, or says that it must."""
        if self._kept:
            return self._kept.popleft()
        return self._read()

    def wait_for(self, kind: type[FrameT], what: str, deadline_s: float) -> FrameT:
        """The next frame of `kind`; what comes before it is kept for `receive`.

        Raises ChannelTimeout, which says `what` was waited for, after `deadline_s` seconds, and what `receive` raises.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._pidfd, zmq.POLLIN)
        end_s = _CLOCK.now_s() + deadline_s
        while True:
            while (frame := self._read()) is not None:
                if isinstance(frame, kind):
                    return frame
                self._kept.append(frame)
            remaining_s = end_s - _CLOCK.now_s()
            if remaining_s <= 0:
                raise self.timeout(what, deadline_s)
            poller.poll(math.ceil(remaining_s * 1000))

    def wait_fds(self) -> list[int]:
        """Readable when there may be news. ZeroMQ's is edge-triggered: ask `has_news` before sleeping on it."""
        return [int(self._socket.getsockopt(zmq.FD)), self._pidfd]

    def timeout(self, what: str, deadline_s: float) -> ChannelTimeout:
        return ChannelTimeout(
            f"{self.name} (pid {self.pid}) did not answer within its deadline",
            got=f"nothing for {deadline_s:g} s while waiting for {what}",
            hint=self._log_tail(),
        )

    def death(self, why: str | None = None) -> ExecutorDied:
        """Return the error of a process that ended, with the end of its log."""
        code = self._process.poll()
        how = "it ends itself" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return ExecutorDied(f"{self.name} (pid {self.pid}) ended", got=why or how, hint=self._log_tail())

    def close(self, *, is_orderly: bool = True) -> None:
        """End it and its group: politely at first where it `is_orderly`. Idempotent."""
        if self._socket.closed:
            return
        if is_orderly and not self._has_ended():
            self.send(protocol.EndWorker())
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # vLLM's own processes are in the group, and may outlive the worker
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._pidfd)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._owner)

    def _read(self) -> protocol.ToClient | None:
        if not is_readable(self._socket) and not (self._has_ended() and self._socket.poll(LAST_WORDS_MS)):
            if self._has_ended():
                raise self.death()
            return None
        try:
            frame: protocol.ToClient = protocol.decode_to_client(self._socket.recv(zmq.NOBLOCK))
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
            raise ChannelError(f"a malformed message came from {self.name}", got=error) from error
        if isinstance(frame, protocol.WorkerFailed):
            raise self.death(f"{frame.what}: {frame.error}")
        return frame

    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    def _log_tail(self) -> str:
        path = self._launch.log_path
        with path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{path} ends with", *lines]) if lines else f"{path} says nothing"
