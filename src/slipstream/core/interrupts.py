"""The signals that end a run: SIGINT (Ctrl-C), SIGTERM (schedulers, `kill`) and SIGHUP (a terminal that closed).

    the first, while RL runs      noted, once its processes have met: the controller ends the run after the current
                                  step, with a checkpoint
    the first, anywhere else      `Interrupted` is raised: there is nothing to finish
    while the program starts      a line, and the end of the process: there is nothing to undo (`end_at_any_signal`)
    the second                    `Interrupted` is raised: no step is waited for, no checkpoint made
    the end of the grace period   the same. It begins with SIGTERM or SIGHUP; after Ctrl-C there is none

The same signal again within `ECHO_S` does not count as a second one: `timeout`, shells and other wrappers send it to a
process and to its group. Signals after a second one are ignored for `ENDING_S`, in which children are killed and files
written.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `slipstream` has no handler until this module is imported: it imports little
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAVING = signal.SIGUSR1  # torchrun's agent sends it to its processes when it was told to end: it ends them next
GO_ON_VARIABLE = "SLIPSTREAM_GO_ON"
"""The command that goes on with an interrupted run, where job files or Ray have started it."""
ECHO_S = 0.3
ENDING_S = 5.0


class Interrupted(KeyboardInterrupt):
    """A signal ends the program; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def end_at_any_signal() -> None:
    """Let signals end this process with a line from now on; for a process that has not started anything yet."""
    for number in _handled():
        signal.signal(number, _end)


def _handled() -> list[signal.Signals]:
    """Return the signals to handle: SIGTERM and SIGHUP not where the program was started to ignore them (`nohup`)."""
    return [n for n in SIGNALS if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN]


def _end(number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{in_words(number)}\n".encode())
    os._exit(128 + number)


def in_words(number: int) -> str:
    """Return the line for the terminal about a signal that ended the program."""
    return "interrupted" if number == signal.SIGINT else f"interrupted by {signal.Signals(number).name}"


class Interrupts:
    """Handles the signals inside its context, and restores their handlers afterwards.

    In a thread that is not the main one the context does nothing. With `ends_imports` a signal amid an import ends the
    process at once: imported code may swallow exceptions, or replace them. The work that needs the import has not begun
    then, and processes that were started before see that their controller has ended.
    """

    def __init__(self, *, ends_imports: bool = False) -> None:
        self.number: int | None = None
        """The first signal that came."""
        self.is_at_once = False
        """Whether `Interrupted` was raised: nothing is waited for from then on."""
        self._is_told = False
        self._ends_imports = ends_imports
        self._heard_s = self._raised_s = 0.0
        self._grace_s: float | None = None  # while the first signal is only noted
        self._tell: Callable[[], None] = lambda: None
        self._alarm = (0.0, 0.0)  # the program's own timer when the grace period began: seconds left, interval
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        import threading

        if threading.current_thread() is threading.main_thread():
            for number in _handled():
                self._previous[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._stop_clock()
        for number in SIGNALS:
            if number in self._previous:
                signal.signal(number, self._previous[number])
        if self.is_at_once and isinstance(error, Exception):  # a library has replaced `Interrupted` by its own error
            assert self.number is not None
            raise Interrupted(self.number) from error

    @contextlib.contextmanager
    def deferred(self, grace_s: float, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Only note the first signal in `number` inside this context, and call `tell` in its handler.

        `Interrupted` is raised at most `grace_s` seconds later, except after Ctrl-C.
        """
        self._grace_s, self._tell = grace_s, tell
        try:
            yield
        finally:
            self._grace_s = None
            self._stop_clock()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise `Interrupted` at the first signal inside this context, amid `deferred` too, and for an earlier one."""
        grace_s, self._grace_s = self._grace_s, None
        try:
            self.check()
            yield
        finally:
            self._grace_s = grace_s

    def is_news(self) -> bool:
        """Return whether a signal was noted that no earlier call told of."""
        is_news = self.number is not None and not self._is_told
        self._is_told |= is_news
        return is_news

    def heard(self, what: str) -> str:
        """Return a line for people about the noted signal: `what` is still done, and how to stop that, too."""
        assert self.number is not None, "a signal has come"
        if self.number == signal.SIGINT:
            return f"Ctrl-C: {what}; once more to stop now"
        return f"{signal.Signals(self.number).name}: {what}, within {self._grace_s or 0.0:g} s; once more to stop now"

    def check(self) -> None:
        """Raise Interrupted where a signal was noted."""
        if self.number is not None:
            self._end_at_once()

    def hand_on(self) -> None:
        """Call the handler that the signal had before; SystemExit(128 + number) where there was none.

        Ctrl-C is not handed on: it was meant for the run alone.
        """
        if self.number is None or self.number == signal.SIGINT:
            return
        previous = self._previous[self.number]
        if not callable(previous):
            raise SystemExit(128 + self.number)
        previous(self.number, None)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._ends_imports and _is_importing(frame):
            _end(number, frame)
        now_s = time.monotonic()
        if self.is_at_once:
            if now_s - self._raised_s < ENDING_S:
                return
        elif self.number is None:
            self.number, self._heard_s = number, now_s
            if self._grace_s is not None:
                if number != signal.SIGINT:
                    self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._take)
                    self._alarm = signal.setitimer(signal.ITIMER_REAL, self._grace_s)
                self._tell()
                return
        elif number == self.number and now_s - self._heard_s < ECHO_S:
            return
        self._end_at_once()

    def _end_at_once(self) -> None:
        assert self.number is not None, "a signal has come"
        self.is_at_once, self._raised_s = True, time.monotonic()
        raise Interrupted(self.number)

    def _stop_clock(self) -> None:
        if signal.SIGALRM in self._previous:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._previous.pop(signal.SIGALRM))
            left_s, every_s = self._alarm
            if left_s:
                signal.setitimer(signal.ITIMER_REAL, max(1e-3, left_s - (time.monotonic() - self._heard_s)), every_s)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def leave_to_the_run() -> None:
    """Let the signals do nothing in this process: its controller handles them, and closes the lifeline.

    Schedulers and service managers may send them to all processes of a run. SIGTERM and SIGHUP get an empty handler,
    as its own children would inherit that this process ignores them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _pass_over)
        signal.siginterrupt(number, False)


def _pass_over(_number: int, _frame: FrameType | None) -> None:
    """Handle a signal by doing nothing."""


def end_forked_as_usual() -> None:
    """Let SIGTERM and SIGHUP end what is forked from this process from now on, which leaves them to the run itself.

    They wait while it is forked: one that came before its handlers are the usual ones would be lost.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def restore() -> None:
        for number in numbers:
            if signal.getsignal(number) is _pass_over:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)
