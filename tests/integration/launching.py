"""Runs whose groups are torchrun jobs on this machine, which meet over loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LAUNCH = (sys.executable, "-m", "slipstream.cli", "launch")


class Launched:
    """The jobs of one run, by name, with a log each in `folder`. Leaving the context kills what is still there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key, self.address = folder, folder / "key", folder / "address"
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.jobs:
            self.kill(name)

    def control(self, *options: str) -> None:
        """Start a controller, and wait until it listens."""
        self.address.unlink(missing_ok=True)
        where = ("--key-file", str(self.key), "--address-file", str(self.address))
        self._start("controller", "--group", "controller", *where, *options)
        self.wait_until(self.address.exists, "the controller does not listen")

    def join(self, group: str, *options: str, name: str | None = None) -> None:
        """Start the agent of `group`, or of its part on one machine, which needs a `name`."""
        common = ("--controller", str(self.address), "--key-file", str(self.key), "--threads", "1")
        self._start(name or group, "--group", group, *common, *options)

    def _start(self, name: str, *options: str) -> None:
        if name in self.jobs:
            self.end(name)  # an earlier one of that name
        with (self.folder / f"{name}.log").open("ab") as log:
            self.jobs[name] = subprocess.Popen(
                [*LAUNCH, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def workers(self, name: str) -> list[int]:
        """The processes that an agent has started."""
        pid = self.jobs[name].pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def kill(self, name: str) -> None:
        """The job with all that it has started."""
        if self.jobs[name].poll() is None:
            os.killpg(self.jobs[name].pid, signal.SIGKILL)
            self.jobs[name].wait()

    def wait_until(self, is_so: Callable[[], bool], what: str, *, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_so():
            assert time.monotonic() < deadline, f"{what}{self.logs()}"
            time.sleep(0.1)

    def end(self, name: str, *, timeout_s: float = 120.0) -> int:
        """Its exit code."""
        try:
            return self.jobs[name].wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"'{name}' does not end{self.logs()}") from None

    def logs(self) -> str:
        return "".join(f"\n\n{path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))
