"""Threads beside the one that an executor works in: started here, so that their CPU seconds are known apart.

They stage and send weights, write checkpoints, call a user's reward function. An executor that waits meanwhile does
wait: if work came it would begin at once. What its process computes all the same is what `background_cpu_s` says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

_lock = threading.Lock()
_running: set[threading.Thread] = set()  # none of them ends while the lock is held
_ended_s = 0.0


def start_thread(target: Callable[..., Any], *, name: str, args: tuple[Any, ...] = ()) -> threading.Thread:
    """Run `target(*args)` in a daemon thread whose CPU seconds count as background."""

    def run() -> None:
        global _ended_s
        try:
            target(*args)
        finally:
            with _lock:
                _running.discard(thread)
                _ended_s += time.thread_time()

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _lock:
        thread.start()
        _running.add(thread)
    return thread


def background_cpu_s() -> float:
    """CPU seconds that all these threads of the process have used so far, whether they still run or not."""
    with _lock:
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in _running if thread.ident is not None]
        return _ended_s + sum(map(time.clock_gettime, clocks))
