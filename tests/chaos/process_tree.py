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
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # for the scripts of this folder; under pytest it is there
from processes import children, command_line, descendants, is_alive

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on, what outlives its parent below this process becomes its child, and can be found and counted."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


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
