"""Two machines in one: network namespaces joined by a virtual cable, which can be pulled and throttled (Linux, root).

Each has its own interfaces, ports and loopback, so what reaches the other one goes over TCP through the cable. They
share files and processor.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SLIPSTREAM = (sys.executable, "-m", "slipstream.cli")


def are_possible() -> bool:
    """Whether this user may make network namespaces, and has the programs for it."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return False
    name = f"slip-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


@dataclass
class Job:
    """A command on a machine; killing it kills its group of processes. Workers of torchrun have one of their own."""

    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def children(self) -> list[int]:
        """The processes that this one has started."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def tail(self, num_chars: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-num_chars:]

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {timeout_s:g} s:\n{self.tail()}") from None


@dataclass
class Machine:
    """A namespace and its address on the cable."""

    name: str
    address: str
    device: str
    folder: Path
    jobs: list[Job] = field(default_factory=list)

    def start(self, command: Sequence[str], log: str) -> Job:
        path = self.folder / log
        with path.open("ab") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.jobs.append(Job(process, path))
        return self.jobs[-1]

    def processes(self) -> list[int]:
        """All that run on it."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def launch(self, *options: str, log: str) -> Job:
        """`slipstream launch` on this machine."""
        return self.start([*SLIPSTREAM, "launch", *options], log)


class Cable:
    """Between two machines."""

    def __init__(self, ends: Sequence[Machine]) -> None:
        self._ends = ends

    def carried(self, end: Machine) -> int:
        """Bytes that `end` has sent."""
        counter = f"/sys/class/net/{end.device}/statistics/tx_bytes"
        shown = subprocess.run(["ip", "netns", "exec", end.name, "cat", counter], capture_output=True, text=True)
        return int(shown.stdout)

    def pull(self) -> None:
        for end in self._ends:
            _ip("-n", end.name, "link", "set", end.device, "down")

    def plug(self) -> None:
        for end in self._ends:
            _ip("-n", end.name, "link", "set", end.device, "up")

    def throttle(self, mbit_per_s: float) -> None:
        """So many megabits per second, each way."""
        for end in self._ends:
            rate = f"{mbit_per_s:g}mbit"
            command = ["tc", "-n", end.name, "qdisc", "replace", "dev", end.device, "root"]
            _run([*command, "tbf", "rate", rate, "burst", "128kb", "latency", "100ms"])


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine, Cable]]:
    """Two machines and the cable between them. Logs of their jobs go to `folder`; in the end they are killed."""
    mark = os.getpid()
    machines = [
        Machine(f"slip-{side}-{mark}", f"10.77.0.{number}", f"slip{side}{mark}"[:15], folder)
        for number, side in enumerate("ab", 1)
    ]
    try:
        for machine in machines:
            _ip("netns", "add", machine.name)
        _ip("link", "add", machines[0].device, "type", "veth", "peer", "name", machines[1].device)
        for machine in machines:
            _ip("link", "set", machine.device, "netns", machine.name)
            _ip("-n", machine.name, "addr", "add", f"{machine.address}/24", "dev", machine.device)
            for device in ("lo", machine.device):
                _ip("-n", machine.name, "link", "set", device, "up")
        yield machines[0], machines[1], Cable(machines)
    finally:
        for machine in machines:
            for job in machine.jobs:
                job.kill()
            for pid in machine.processes():  # workers that have not found out yet that their agent is gone
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", machine.name], capture_output=True)


def wait_until(is_so, what: str, *, timeout_s: float, every_s: float = 0.2) -> None:
    """The run is watched from outside, by its files: there is no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(every_s)


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
