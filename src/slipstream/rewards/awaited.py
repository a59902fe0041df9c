"""Scoring by coroutines, many at once on one event loop: the caller's `async def` functions, and judges."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from slipstream.core.background import start_thread
from slipstream.core.clock import Clock, WallClock
from slipstream.core.mailbox import Mailbox
from slipstream.core.user_code import describe
from slipstream.rewards.inline import MAX_ABANDONED
from slipstream.rewards.logged import CURRENT, RewardLog
from slipstream.rewards.pool import ScoredJob
from slipstream.rewards.protocol import AnyJob, RewardGroupJob

_STUCK_S = 1.0  # without a turn of the loop, after a deadline has passed: a coroutine blocks it
_CLOSING_S = 1.0

_KEPT: dict[int, asyncio.AbstractEventLoop] = {}
"""The loop of a scorer that has ended, by process id: a fork shares its descriptors and must not turn it."""


class NoScore(Exception):
    """A completion has no score; the text says why, and needs no type or line."""


@dataclass(frozen=True)
class Seat:
    """A coroutine function as it is awaited: `max_at_once` of its jobs together, each at most `timeout_s`."""

    name: str
    score: Callable[[AnyJob], Awaitable[list[float | None]]]
    timeout_s: float
    max_at_once: int


@dataclass(eq=False)
class _Handed:
    """A job in the hands of a loop."""

    place: str
    job: AnyJob
    deadline_s: float
    task: asyncio.Task[None] | None = None


class LoopScorer:
    """Awaits the seats' coroutines on one event loop, in a daemon thread.

    Its methods are those of `ScoringPool`, but that a job has a `place`, a key of `seats`. A job that takes longer than
    its seat allows is failed, and its task cancelled. If the loop does not turn within a second of that, because a
    coroutine blocks it, the loop is abandoned: what is not overdue begins again on a new one. While 8 abandoned loops
    have not come back, every further job fails at once. With `keeps_loop` the next such scorer of this process goes on
    with its loop, to which the connections belong that functions have made.
    """

    def __init__(self, seats: Mapping[str, Seat], *, clock: Clock | None = None, keeps_loop: bool = False) -> None:
        self._seats, self._keeps_loop = seats, keeps_loop
        self._clock = clock or WallClock()
        self._waiting: dict[str, deque[AnyJob]] = {place: deque() for place in seats}
        self._open: dict[int, _Handed] = {}
        self._num_open: Counter[str] = Counter()
        self._answers: Mailbox[tuple[_Handed, ScoredJob]] = Mailbox()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked_s: float | None = None  # since when the loop has been asked to turn
        self._abandoned: list[threading.Thread] = []  # of loops that have not come back
        self.num_restarts = 0

    @property
    def places(self) -> list[str]:
        return list(self._seats)

    def submit(self, job: AnyJob, place: str) -> None:
        self._waiting[place].append(job)

    def poll(self) -> list[ScoredJob]:
        """Take answers, judge deadlines, hand over jobs; never waits."""
        done = [scored for turn, scored in self._answers.take() if self._close_turn(turn)]
        now_s = self._clock.now_s()
        for turn in [turn for turn in self._open.values() if now_s >= turn.deadline_s]:
            seat = self._seats[turn.place]
            done.append(ScoredJob(turn.job.job_id, [], f"{seat.name}: timed out after {seat.timeout_s:g} s"))
            self._close_turn(turn)
            self._ask_to_cancel(turn, now_s)
        if self._asked_s is not None and now_s >= self._asked_s + _STUCK_S:
            self._abandon()
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        for place, waiting in self._waiting.items():
            while waiting and len(self._abandoned) >= MAX_ABANDONED:
                failure = f"{self._seats[place].name}: {len(self._abandoned)} loops hang, and none is begun meanwhile"
                done.append(ScoredJob(waiting.popleft().job_id, [], failure))
            while waiting and self._has_room(place):
                self._hand_over(place, waiting.popleft())
        return done

    def fds(self) -> list[int]:
        """A descriptor that is readable when an answer waits."""
        return [self._answers.fileno()]

    def next_deadline_s(self) -> float | None:
        if any(waiting and self._has_room(place) for place, waiting in self._waiting.items()):
            return self._clock.now_s()
        asked = [] if self._asked_s is None else [self._asked_s + _STUCK_S]
        return min([*asked, *(turn.deadline_s for turn in self._open.values())], default=None)

    def close(self) -> None:
        if self._loop is not None:
            self._is_over.set()
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSING_S)
        self._loop = None
        self._answers.close()

    def _has_room(self, place: str) -> bool:
        return self._num_open[place] < self._seats[place].max_at_once

    def _hand_over(self, place: str, job: AnyJob) -> None:
        if self._loop is None:
            kept = _KEPT.pop(os.getpid(), None) if self._keeps_loop else None
            self._loop, self._is_over = kept or asyncio.new_event_loop(), threading.Event()
            loop = self._loop  # an abandoned one is not kept
            turns = (loop, self._is_over, lambda: self._keeps_loop and self._loop is loop)
            self._thread = start_thread(_turn_round, args=turns, name="reward-loop")
        turn = _Handed(place, job, deadline_s=self._clock.now_s() + self._seats[place].timeout_s)
        self._open[job.job_id] = turn
        self._num_open[place] += 1
        self._loop.call_soon_threadsafe(self._begin, self._loop, turn)

    def _close_turn(self, turn: _Handed) -> bool:
        """Whether it was still open."""
        if self._open.get(turn.job.job_id) is not turn:
            return False
        del self._open[turn.job.job_id]
        self._num_open[turn.place] -= 1
        return True

    def _begin(self, loop: asyncio.AbstractEventLoop, turn: _Handed) -> None:
        turn.task = loop.create_task(self._work(turn))

    async def _work(self, turn: _Handed) -> None:
        seat, parts, failure = self._seats[turn.place], list[float | None](), None
        log = RewardLog(len(turn.job.jobs) if isinstance(turn.job, RewardGroupJob) else 1)
        CURRENT.set(log)  # of this task
        try:
            parts = await seat.score(turn.job)
        except NoScore as error:
            failure = f"{seat.name}: {error}"
        except BaseException as error:  # noqa: BLE001 - whatever a function raises (SystemExit too) fails one job
            failure = f"{seat.name}: {describe(error)}"
        self._answers.put((turn, ScoredJob(turn.job.job_id, parts, failure, logged=log.all())))

    def _ask_to_cancel(self, turn: _Handed, now_s: float) -> None:
        loop = self._loop
        assert loop is not None
        self._asked_s = now_s if self._asked_s is None else self._asked_s

        def cancel() -> None:
            if self._loop is loop:
                self._asked_s = None
            if turn.task is not None:
                turn.task.cancel()

        loop.call_soon_threadsafe(cancel)

    def _abandon(self) -> None:
        assert self._loop is not None
        self._is_over.set()
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = self._asked_s = None
        self._abandoned.append(self._thread)
        self.num_restarts += 1
        for turn in list(self._open.values()):
            self._close_turn(turn)
            self._waiting[turn.place].appendleft(turn.job)


def _turn_round(loop: asyncio.AbstractEventLoop, is_over: threading.Event, is_kept: Callable[[], bool]) -> None:
    """Run the loop until it is stopped, which `is_over` says, and end the tasks that it still has.

    A task that a function has started and that exits fails where it is awaited; nothing else ends with it.
    """
    asyncio.set_event_loop(loop)
    while not is_over.is_set():
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    with suppress(SystemExit, KeyboardInterrupt, RuntimeError):  # the last where a stop is left over
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    if not is_kept() or _KEPT.setdefault(os.getpid(), loop) is not loop:
        loop.close()
