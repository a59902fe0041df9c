"""The calls of the user's callbacks (`core/hooks.py`), in one thread of the controller's process.

They are made one after the other, in the order of what they hear of. The loop never waits for them; only the end of a
run does.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.controller.evaluations import EvaluationDone
from slipstream.controller.observers import StepWritten
from slipstream.core.background import start_thread
from slipstream.core.clock import WallClock
from slipstream.core.errors import SlipstreamError
from slipstream.core.hooks import STOP, CheckpointRecord, EvalRecord, Hooks, StepRecord
from slipstream.core.service_messages import CheckpointSaved
from slipstream.core.user_code import describe, place_of

MANY_WAITING = 16
log = logging.getLogger(__name__)


class _Call(NamedTuple):
    function: Callable[[Any], Any]
    record: object
    name: str


@dataclass
class Callbacks:
    """An observer that passes on what it hears. Each call has `timeout_s`.

    A call that raises, or takes longer, is an `error`, which the controller raises once the step is saved: nothing is
    called any more.
    """

    hooks: Hooks = field(default_factory=dict)
    timeout_s: float = 600.0
    wants_stop: bool = False
    error: SlipstreamError | None = None

    hears = (StepWritten, EvaluationDone, CheckpointSaved)

    def __post_init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """The time in calls, by the name of the callback."""
        self._clock, self._changed = WallClock(), threading.Condition()
        self._waiting: deque[_Call] = deque()
        self._running: tuple[_Call, float] | None = None  # and since when
        self._has_thread = self._has_told = self._has_failed = self._is_closed = False

    def take(self, news: object) -> None:
        match news:
            case StepWritten(line=line):
                self._call("on_step", lambda: StepRecord(line["step"], line["version"], dict(line)))
            case EvaluationDone(version=version, temperature=temperature, found=found, name=name):
                numbers, parts = (found.accuracy, found.reward), found.reward_parts
                self._call("on_eval", lambda: EvalRecord(version, temperature, *numbers, dict(parts), name))
            case CheckpointSaved(step=step, path=path):
                self._call("on_checkpoint", lambda: CheckpointRecord(step, Path(path)))

    def has_failed(self) -> bool:
        """Tell, once, of a call that has raised, or takes too long."""
        running = self._running
        if running is not None and self.error is None and self._clock.now_s() - running[1] > self.timeout_s:
            self.error = SlipstreamError(
                f"the callback {running[0].name} has not returned",
                got=f"{self.timeout_s:g} s for {_shown(running[0].record)}",
                allowed=f"callbacks.timeout_s = {self.timeout_s:g}",
                hint="raise it, or do what takes so long in a thread or a process of your own",
            )
        is_news, self._has_failed = self.error is not None and not self._has_failed, self.error is not None
        return is_news

    def finish(self) -> None:
        """Wait for the calls that are still to come; raise the error of one."""
        while self.error is None:
            with self._changed:
                if not self._waiting and self._running is None:
                    break
                self._changed.wait(0.2)
            self.has_failed()
        self.close()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Call nothing more."""
        with self._changed:
            self._waiting.clear()
            self._is_closed = True
            self._changed.notify_all()

    def _call(self, hook: str, record: Callable[[], object]) -> None:
        """Let the functions of `hook` be called, each with a record of its own, which it may change."""
        functions = self.hooks.get(hook, ())
        if not functions or self.error is not None:
            return
        with self._changed:
            self._waiting.extend(_Call(f, record(), f"{hook} ({place_of(f) or repr(f)})") for f in functions)
            self._changed.notify_all()
            is_late = len(self._waiting) > MANY_WAITING * len(functions) and not self._has_told
        if is_late:
            self._has_told = True
            log.warning("callbacks are %d calls behind: they take longer than what they hear of", len(self._waiting))
        if not self._has_thread:
            self._has_thread = True
            start_thread(self._work, name="callbacks")

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                call = self._waiting.popleft()
                began_s = self._clock.now_s()
                self._running = (call, began_s)
            self._make(call)
            with self._changed:
                took_s = self._clock.now_s() - began_s
                self.seconds[call.name] = self.seconds.get(call.name, 0.0) + took_s
                self._running = None
                if self.error is not None:
                    self._waiting.clear()
                self._changed.notify_all()

    def _make(self, call: _Call) -> None:
        try:
            answer = call.function(call.record)
        except BaseException as error:  # noqa: BLE001 - SystemExit, too, would end this thread unseen
            self.error = SlipstreamError(
                f"the callback {call.name} raised",
                got=f"{describe(error)}, called with {_shown(call.record)}",
                hint="the run is saved: corrected, --resume goes on from there",
            )
            return
        if isinstance(answer, str) and answer == STOP:
            self.wants_stop = True
        elif answer is not None:
            self.error = SlipstreamError(
                f"the callback {call.name} returned what means nothing",
                got=repr(answer)[:100],
                allowed="None, or 'stop', which ends the run",
            )


def _shown(record: object) -> str:
    parts = [f"{name} = {getattr(record, name)}" for name in ("step", "version") if hasattr(record, name)]
    return f"{type(record).__name__}({', '.join(parts)})"
