"""Threads beside the one in which an executor works.

They stage and send weights, write checkpoints and call a user's reward function. The time of an executor that waits
meanwhile counts as waiting, because it would begin new work at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def start_thread(target: Callable[..., Any], *, name: str, args: tuple[Any, ...] = ()) -> threading.Thread:
    """Run `target(*args)` in a daemon thread."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


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
