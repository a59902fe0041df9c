"""Who is who among the processes of a run, by what the system says of them: no word of the package is asked.

controller          what the user started
  generator-0 ...   `slipstream.controller.process .../generator-0.json`: executors, named by their file
  rewards
    keeper          `slipstream.rewards.worker`: one for each reward worker
      scorer        the last below it: what runs the verifier
  environments
    host_keeper     `slipstream.environments.worker`: one for each worker of environments
      host          the last below it: what runs the environments
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, what outlives its parent below this process becomes its child, and can be found and counted."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def children(pid: int) -> list[int]:
    """Those that any of its threads has started; nothing of a process that has ended meanwhile."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on, parents first."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def state(pid: int) -> str:
    """'R', 'S', 'T', 'Z' ... of /proc, '' of a process that is no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """False of a zombie, too."""
    return state(pid) not in ("", "Z")


def command_line(pid: int) -> list[str]:
    """Its arguments; none of a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ").split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def roles(controller: int) -> dict[str, list[int]]:
    """Role -> living processes of the run of `controller`, in the order in which they were started."""
    found: dict[str, list[int]] = {}
    if is_alive(controller):
        found["controller"] = [controller]
    for pid in descendants(controller):
        if is_alive(pid) and (role := _role(pid)) is not None:
            found.setdefault(role, []).append(pid)
    return found


def _role(pid: int) -> str | None:
    words = command_line(pid)
    if "slipstream.controller.process" in words:
        return Path(words[-1]).stem
    if "slipstream.environments.worker" in words:
        names = ("host_keeper", "host")
    elif "slipstream.rewards.worker" in words:
        names = ("keeper", "scorer")
    else:
        return None
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) if is_alive(pid) else 0
    if "slipstream.controller.process" in command_line(parent):
        return names[0]
    return None if children(pid) else names[1]


def reap(pids: Iterable[int]) -> None:
    """Take the exit codes of adopted processes that have ended; others are left alone."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
