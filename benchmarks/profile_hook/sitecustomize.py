"""Imported by every Python process that has this folder in PYTHONPATH: it samples the main thread by its CPU time.

Every PROFILE_EVERY_S of the CPU time of the process the seconds of the main thread since the last look go to functions
of PROFILE_PACKAGE (a folder) on its stack: to each that is there (*inclusive*), and to the innermost one (*own*). They
are written to PROFILE_FOLDER/<pid>.json every WRITE_EVERY samples, and where the process ends as an interpreter does.
`benchmarks/cpu_profile.py` reads them.
"""

import atexit
import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

EVERY_S = float(os.environ.get("PROFILE_EVERY_S", "0.002"))
WRITE_EVERY = 100  # samples
PACKAGE = os.environ.get("PROFILE_PACKAGE", "") + os.sep

_inclusive: Counter[str] = Counter()
_own: Counter[str] = Counter()
_state = {"since_s": 0.0, "samples": 0}


def _name(code: Any) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}"


def _sample(_: int, frame: Any) -> None:
    now_s = time.thread_time()
    spent_s, _state["since_s"] = now_s - _state["since_s"], now_s
    innermost, seen = True, set()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            name = _name(frame.f_code)
            if innermost:
                _own[name] += spent_s
                innermost = False
            if name not in seen:
                seen.add(name)
                _inclusive[name] += spent_s
        frame = frame.f_back
    _state["samples"] += 1
    if _state["samples"] % WRITE_EVERY == 0:
        _write()


def _write() -> None:
    words = Path("/proc/self/cmdline").read_bytes().decode().replace("\0", " ").split()
    told = {"command": words, "inclusive": _inclusive, "own": _own, "thread_s": time.thread_time()}
    path = Path(os.environ["PROFILE_FOLDER"]) / f"{os.getpid()}.json"
    kept = path.with_suffix(".part")
    kept.write_text(json.dumps(told))
    kept.replace(path)


def _begin() -> None:
    """In this process, or in a child that was forked: the system passes no timers on."""
    _inclusive.clear()
    _own.clear()
    _state.update(since_s=time.thread_time(), samples=0)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)


def _end() -> None:
    """Before the interpreter takes back its handlers: the signal would end the process."""
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    _write()


def _hear(event: str, _: Any) -> None:
    """A timer lives on in a program that takes this one's place, and would end that."""
    if event == "os.exec":
        signal.setitimer(signal.ITIMER_PROF, 0.0)


if "PROFILE_FOLDER" in os.environ:
    sys.addaudithook(_hear)
    signal.signal(signal.SIGPROF, _sample)
    os.register_at_fork(after_in_child=_begin)
    atexit.register(_end)
    _begin()
