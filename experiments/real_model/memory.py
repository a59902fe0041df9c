"""The most memory that a program and all its processes hold together (Linux)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.lab import RUN_DEADLINE_S, RunFailed

EVERY_S = 0.25
PROC = Path("/proc")


def peak_pss(words: Sequence[str], *, deadline_s: float = RUN_DEADLINE_S) -> int:
    """Bytes, the largest sum over all processes of `python words` at a time: what several share counts once (PSS).

    RunFailed with its last words where it does not end well, or not within `deadline_s` seconds.
    """
    most, ends_s = 0, time.monotonic() + deadline_s
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen([sys.executable, *words], stdout=out, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None and time.monotonic() < ends_s:
                most = max(most, sum(map(pss, tree(child.pid))))
                time.sleep(EVERY_S)
        finally:
            is_late = child.poll() is None
            child.kill()
            child.wait()
        if is_late or child.returncode:
            out.seek(0)
            ended = f"not done after {deadline_s:g} s" if is_late else f"exit code {child.returncode}"
            raise RunFailed(f"{ended}: {out.read().decode(errors='replace')[-2000:]}")
    return most


def pss(pid: int) -> int:
    """Bytes of a process, each page over the number of those who share it; 0 of one that has ended."""
    try:
        lines = (PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def tree(root: int) -> Iterable[int]:
    """The process `root` and all that it, or one of its own, has started and that run."""
    parents: dict[int, int] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, added = {root}, {root}
    while added := {pid for pid, parent in parents.items() if parent in added} - found:
        found |= added
    return found
