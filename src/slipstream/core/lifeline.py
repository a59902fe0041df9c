"""Processes that do not outlive the process that started them.

    python -P -m slipstream.core.lifeline PARENT MODULE ARGUMENTS ...

runs MODULE as `python -m` does, but searches the working folder for modules last, behind the libraries. Until it calls
`ends_with` or `live_on`, the system kills it (Linux) as soon as process PARENT ends, also amid an import or the loading
of a model, when no code of ours could watch a pipe. After `ends_with` it may end in its own order, within a grace
period, when the other end of a pipe is closed.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a process that runs `module` and does not outlive the thread that starts it."""
    return [sys.executable, "-P", "-m", "slipstream.core.lifeline", str(os.getpid()), module, *arguments]


def die_with_parent(*, parent: int | None = None) -> None:
    """Have the system kill this process as soon as its parent ends; at once, if that is no longer `parent`."""
    _set_death_signal(signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def live_on() -> None:
    """Outlive the thread that started this process: for one that waits for nothing but its parent's end of a pipe."""
    _set_death_signal(0)


def ends_with(descriptor: int, *, grace_s: float = GRACE_S) -> None:
    """Let this process end by itself when the pipe at `descriptor` is closed; end it `grace_s` seconds later."""

    def watch() -> None:
        select.select([descriptor], [], [])
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    live_on()


def _set_death_signal(number: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def main(arguments: Sequence[str]) -> None:
    parent, module, *rest = arguments
    die_with_parent(parent=int(parent))
    sys.argv[1:] = rest
    sys.path.append("")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
