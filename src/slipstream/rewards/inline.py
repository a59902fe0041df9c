"""Python callables as reward functions, in the caller's process: trusted, but held to their deadline."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.core.background import start_thread
from slipstream.core.clock import Clock, WallClock
from slipstream.core.mailbox import Mailbox
from slipstream.rewards.calls import Scoring, answer, end_loop
from slipstream.rewards.pool import ScoredJob
from slipstream.rewards.protocol import AnyJob

MAX_ABANDONED = 8  # threads that have not come back; a thread cannot be killed


@dataclass(eq=False)
class _FunctionThread:
    """A thread, the job it has, when that is overdue, and the term that it has come to."""

    inbox: queue.SimpleQueue[AnyJob | None] = field(default_factory=queue.SimpleQueue)
    job: AnyJob | None = None
    deadline_s: float = 0.0
    reached: str = ""
    is_abandoned: bool = False


class CallableScorer:
    """Scores with `terms`, the caller's functions, in `num_threads` daemon threads, each one job at a time.

    Its methods are those of `ScoringPool`. A job that takes longer than `timeout_s` is failed, its thread abandoned
    (its answer is ignored) and a new one started; while 8 abandoned threads have not come back, every further job fails
    at once. Jobs in other threads by then go on, so that at most `8 + num_threads - 1` are abandoned at a time.
    """

    def __init__(
        self, terms: Sequence[Scoring], *, timeout_s: float, num_threads: int = 1, clock: Clock | None = None
    ) -> None:
        self._terms = terms
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._clock = clock or WallClock()
        self._waiting: deque[AnyJob] = deque()
        self._answers: Mailbox[tuple[_FunctionThread, ScoredJob]] = Mailbox()
        self._lanes: list[_FunctionThread] = []
        self._stuck: set[_FunctionThread] = set()
        self.num_restarts = 0

    def submit(self, job: AnyJob) -> None:
        self._waiting.append(job)

    def poll(self) -> list[ScoredJob]:
        """Take answers, judge deadlines, hand over jobs; never waits."""
        done = []
        for lane, scored in self._answers.take():
            if not lane.is_abandoned:
                done.append(scored)
                lane.job = None
            self._stuck.discard(lane)
        now_s = self._clock.now_s()
        for lane in [lane for lane in self._lanes if lane.job is not None and now_s >= lane.deadline_s]:
            assert lane.job is not None
            done.append(ScoredJob(lane.job.job_id, [], f"{lane.reached}: timed out after {self._timeout_s:g} s"))
            lane.is_abandoned = True
            lane.inbox.put(None)
            self._lanes.remove(lane)
            self._stuck.add(lane)
            self.num_restarts += 1
        while self._waiting and len(self._stuck) >= MAX_ABANDONED:
            failure = f"the reward function hangs in {len(self._stuck)} threads and is not called meanwhile"
            done.append(ScoredJob(self._waiting.popleft().job_id, [], failure))
        while self._waiting and (free := self._free()) is not None:
            self._hand_over(free, self._waiting.popleft())
        return done

    def fds(self) -> list[int]:
        """A descriptor that is readable when an answer waits."""
        return [self._answers.fileno()]

    def next_deadline_s(self) -> float | None:
        is_free = len(self._lanes) < self._num_threads or any(lane.job is None for lane in self._lanes)
        if self._waiting and is_free:
            return self._clock.now_s()
        return min((lane.deadline_s for lane in self._lanes if lane.job is not None), default=None)

    def close(self) -> None:
        for lane in self._lanes:
            lane.is_abandoned = True  # an answer that is still to come goes nowhere
            lane.inbox.put(None)
        self._lanes.clear()
        self._answers.close()

    def _free(self) -> _FunctionThread | None:
        """An idle thread, a new one while there may be more, else None."""
        lane = next((lane for lane in self._lanes if lane.job is None), None)
        if lane is None and len(self._lanes) < self._num_threads:
            lane = _FunctionThread()
            self._lanes.append(lane)
            start_thread(self._serve, args=(lane,), name="reward-function")
        return lane

    def _hand_over(self, lane: _FunctionThread, job: AnyJob) -> None:
        lane.job = job
        lane.reached = ", ".join(term.name for term in self._terms)
        lane.deadline_s = self._clock.now_s() + self._timeout_s
        lane.inbox.put(job)

    def _serve(self, lane: _FunctionThread) -> None:
        """Consumes jobs, waits for the next one, ends on None or when it was abandoned."""

        def began(index: int) -> None:
            lane.reached = self._terms[index].name

        while not lane.is_abandoned and (job := lane.inbox.get()) is not None:
            result = answer(self._terms, job, began)
            scored = ScoredJob(job_id=job.job_id, parts=result.parts, failure=result.error, logged=result.logged)
            self._answers.put((lane, scored))
        end_loop()
