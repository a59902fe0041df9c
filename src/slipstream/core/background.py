"""Threads beside the one in which an executor works, and the CPU seconds that they use.

They stage and send weights, write checkpoints and call a user's reward function. The time of an executor that waits
meanwhile counts as waiting, because it would begin new work at once; `background_cpu_s` is the work of the threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

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
    """Return the CPU seconds that all threads of `start_thread` have used so far; on macOS those that have ended."""
    with _lock:
        if not hasattr(time, "pthread_getcpuclockid"):
            return _ended_s
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in _running if thread.ident is not None]
        return _ended_s + sum(map(time.clock_gettime, clocks))


@contextmanager
def repeated(call: Callable[[], object], *, every_s: float) -> Iterator[None]:
    """Call `call` every `every_s` seconds from a thread while the code within, which may block, goes on."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s):
            call()

    thread = start_thread(repeat, name="progress")
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_interruptibly(call: Callable[[], T], *, name: str) -> T:
    """Return or raise the outcome of `call`, which runs in a daemon thread: a signal ends the wait, not the call.

    For calls that wait in C++ or deep in a library, during which no signal handler runs.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the other thread
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome.result()
