"""One input, tried: a child that has everything imported runs the command line; its end is judged.

The parent must be a process without threads, since it forks. It is the subreaper of what the child leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import json
import os
import resource
import shutil
import signal
import stat
import sys
import textwrap
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

HANG_S = 60.0
"""Seconds in which a command has ended or begun its work; those in which others had its core are not counted."""
ENOUGH_S = 15.0
"""A run that goes on for so long after its first step is a long one, and interrupted, as by a user."""
MEMORY_BYTES = 12 << 30
SCREEN_ROWS, SCREEN_COLUMNS = 24, 80
FAILED_ROWS = 60
"""A run that failed may show the end of a process's log."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BEGUN = '"reward_mean"'


@dataclass(frozen=True)
class Ended:
    """What came of an input. `faults`: what must not be; none of a good end."""

    code: int
    seconds: float
    told: str
    faults: tuple[str, ...]


def become_subreaper() -> None:
    """Orphans of the children become this process's children, so that none is overlooked."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tried(
    arguments: tuple[str, ...], folder: Path, *, by_executable: bool = False, enough_s: float = ENOUGH_S
) -> Ended:
    """Run `slipstream` with `arguments` in `folder`, in a forked child or as a new process.

    A run that goes on for `enough_s` after its first step is interrupted.
    """
    before, steps = files_of(folder), steps_of(folder)
    scratch = folder.parent / f"{folder.name}.tmp"
    told = folder.parent / f"{folder.name}.told"
    scratch.mkdir()
    shared = set(os.listdir("/dev/shm"))
    start_s = time.monotonic()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        child(arguments, folder, scratch, told, by_executable=by_executable)
    status, fault = awaited(pid, folder, steps, enough_s)
    seconds = time.monotonic() - start_s
    faults = [] if fault is None else [fault]
    code = os.waitstatus_to_exitcode(status)
    faults += left_behind(scratch, shared)
    shutil.rmtree(scratch, ignore_errors=True)
    text = told.read_bytes()[-1_000_000:].decode("utf-8", "replace")
    if fault is None:
        faults += judged(code, text, folder, arguments, before)
    return Ended(code, seconds, text, tuple(faults))


def child(arguments: tuple[str, ...], folder: Path, scratch: Path, told: Path, *, by_executable: bool) -> NoReturn:
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.chdir(folder)
        os.environ |= {"TMPDIR": str(scratch), "COLUMNS": str(SCREEN_COLUMNS), "LINES": str(SCREEN_ROWS)}
        output = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, to in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(fd, to)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if by_executable:
            os.execv(sys.executable, [sys.executable, "-m", "slipstream.cli", *arguments])
        import tempfile

        tempfile.tempdir = None
        faulthandler.enable()
        from slipstream import cli

        sys.argv = ["slipstream", *arguments]
        with contextlib.suppress(KeyboardInterrupt):
            code = cli.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001 - what a process would print
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def awaited(pid: int, folder: Path, steps: int, enough_s: float) -> tuple[int, str | None]:
    """The child's status, and whether it hung. A run with many more than `steps` is interrupted."""
    start_s, begun_s, interrupted_s = time.monotonic(), None, None
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status, None
        now_s = time.monotonic()
        had_s = now_s - (start_s if interrupted_s is None else interrupted_s)
        if begun_s is None and had_s > 2 and steps_of(folder) > steps:
            begun_s = now_s
        if interrupted_s is None and begun_s is not None and now_s - begun_s > enough_s:
            interrupted_s = now_s
            os.kill(pid, signal.SIGINT)
        elif had_s > HANG_S and had_s - kept_s(pid) > HANG_S:
            where = stack_of(pid)
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            after = " after it was interrupted" if interrupted_s else ""
            return signal.SIGKILL, f"hangs: {HANG_S:g} s{after}, {where}"
        time.sleep(0.02 if had_s < 2 else 0.2)


def steps_of(folder: Path) -> int:
    """How many steps the runs in `folder` have trained, by their metrics."""
    found = 0
    for path in (folder / "out/metrics.jsonl", folder / "run/metrics.jsonl", *folder.glob("runs/*/metrics.jsonl")):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode):
                found += path.read_text(errors="replace").count(BEGUN)
    return found


def kept_s(pid: int) -> float:
    """Seconds in which the child was ready and others had the cores."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def stack_of(pid: int) -> str:
    """What the child does: its state and system call, and its CPU seconds."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        wchan = Path(f"/proc/{pid}/wchan").read_text()
        return f"state {fields[0]} in {wchan or 'user space'}, CPU {(int(fields[11]) + int(fields[12])) / 100} s"
    return "gone"


def left_behind(scratch: Path, shared: set[str]) -> list[str]:
    """Processes, shared memory and temporary files that outlive the command."""
    faults = []
    deadline_s = time.monotonic() + 20
    while (orphans := children()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
        reap()
    for pid, name in orphans.items():
        faults.append(f"left a process behind: {name}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while children():
        reap()
        time.sleep(0.02)
    if mine := sorted(name for name in set(os.listdir("/dev/shm")) - shared if str(os.getpid()) in name):
        faults.append(f"left shared memory behind: {mine}")
    if files := sorted(path.name for path in scratch.iterdir() if path.name.startswith("slipstream")):
        faults.append(f"left temporary files behind: {files}")
    return faults


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def children() -> dict[int, str]:
    """pid: command of all children of this process that live."""
    reap()
    found = {}
    for pid in map(int, Path("/proc/thread-self/children").read_text().split()):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:150]
    return found


def judged(code: int, told: str, folder: Path, arguments: tuple[str, ...], before: dict[str, str]) -> list[str]:
    """What is wrong with this end of the command."""
    faults = []
    if "Traceback (most recent call last)" in told:
        last = [line for line in told.splitlines() if line and not line.startswith((" ", "\t"))][-1]
        faults.append(f"a traceback: {last[:200]}")
    rows = sum(len(textwrap.wrap(line, SCREEN_COLUMNS)) or 1 for line in told.splitlines())
    most = SCREEN_ROWS if code == 2 else FAILED_ROWS if code == 1 else 10_000
    if rows > most:
        faults.append(f"{rows} rows on the screen, at most {most}")
    if code not in (0, 1, 2, 130):
        faults.append(f"exit code {code}")
    changed = sorted(name for name, digest in files_of(folder).items() if before.get(name) != digest)
    changed += sorted(set(before) - set(files_of(folder)))
    is_run = arguments[:1] == ("run",) and not {"--help", "-h"} & set(arguments)
    if code == 2 and changed:
        faults.append(f"bad input, but changed: {changed[:6]}")
    if code in (1, 2) and not told.strip():
        faults.append(f"exit code {code} without a word")
    is_named = "error:" in told or (not is_run and arguments[:1] in (("replay",), ("doctor",)))
    if code == 1 and not is_named:
        faults.append("exit code 1 without the name of an error")
    if code == 0 and not told.strip():
        faults.append("exit code 0 without a word")
    if is_run and code in (0, 130):
        faults += unfinished(folder, code)
    return faults


def unfinished(folder: Path, code: int) -> list[str]:
    """What a run lacks that says it is done, or was interrupted."""
    summaries = sorted(folder.glob("**/summary.json"))
    wanted = {0: "done", 130: "interrupted"}[code]
    for path in summaries:
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text())["status"] == wanted:
                return []
    return [f"exit code {code}, and no summary.json says '{wanted}'"] if code == 0 or summaries else []


def files_of(folder: Path) -> dict[str, str]:
    """A digest of all in `folder`: kinds, times of change, sizes, and contents where they are small."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        is_small = stat.S_ISREG(about.st_mode) and about.st_size < 1 << 20
        content = hashlib.sha256(path.read_bytes()).hexdigest() if is_small else ""
        time_ns = 0 if stat.S_ISDIR(about.st_mode) else about.st_mtime_ns
        found[str(path.relative_to(folder))] = f"{about.st_mode:o} {time_ns} {about.st_size * bool(content)} {content}"
    return found


def import_all() -> None:
    """Import what commands import, and start no thread: children are forked from here."""
    import torch

    import slipstream.api
    import slipstream.controller.replay
    import slipstream.evals.evaluate
    import slipstream.generator.executor
    import slipstream.models.build
    import slipstream.observe.report
    import slipstream.plan.answer
    import slipstream.rewards.executor
    import slipstream.trainer.executor  # noqa: F401

    torch.set_num_threads(1)
    others = [name for name in os.listdir("/proc/self/task") if int(name) != os.getpid()]
    assert not others, f"the process that forks has {len(others)} threads beside its own"
