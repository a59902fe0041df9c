"""Python callables as reward functions, in the caller's process: trusted, but held to their deadline."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Sequence

from slipstream.core.background import start_thread
from slipstream.core.clock import Clock, WallClock
from slipstream.rewards.calls import Scoring, answer
from slipstream.rewards.pool import ScoredJob
from slipstream.rewards.protocol import AnyJob

_MAX_ABANDONED = 8  # threads that never came back; a thread cannot be killed


class CallableScorer:
    """Scores with `terms`, the caller's functions, in a daemon thread, one job at a time.

    Its methods are those of `ScoringPool`. A job that takes longer than `timeout_s` is failed, its thread abandoned
    (its answer is ignored) and a new one started; after 8 abandoned threads every further job fails at once.
    """

    def __init__(self, terms: Sequence[Scoring], *, timeout_s: float, clock: Clock | None = None) -> None:
        self._terms = terms
        self._reached = ""  # the term that the job in hand has come to
        self._timeout_s = timeout_s
        self._clock = clock or WallClock()
        self._waiting: queue.SimpleQueue[AnyJob] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, ScoredJob]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._current: AnyJob | None = None
        self._deadline_s = 0.0
        self._thread_inbox: queue.SimpleQueue[AnyJob | None] | None = None
        self._generation = 0
        self._num_waiting = 0
        self.num_restarts = 0

    @property
    def num_pending(self) -> int:
        return self._num_waiting + (self._current is not None)

    def submit(self, job: AnyJob) -> None:
        self._waiting.put(job)
        self._num_waiting += 1

    def poll(self) -> list[ScoredJob]:
        """Take an answer, judge the deadline, hand over the next job; never waits."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        done = []
        while not self._answers.empty():
            generation, scored = self._answers.get()
            if generation == self._generation:
                done.append(scored)
                self._current = None
        if self._current is not None and self._clock.now_s() >= self._deadline_s:
            done.append(self._failed(self._current, f"{self._reached}: timed out after {self._timeout_s:g} s"))
            self._current = None
            self._generation += 1
            self._thread_inbox = None
            self.num_restarts += 1
        while self._current is None and self._num_waiting:
            job = self._waiting.get()
            self._num_waiting -= 1
            if self.num_restarts >= _MAX_ABANDONED:
                done.append(
                    self._failed(job, f"the reward function hung {self.num_restarts} times and is not called again")
                )
                continue
            self._hand_over(job)
        return done

    def fds(self) -> list[int]:
        """A pipe that is readable when an answer waits."""
        return [self._wake_read]

    def next_deadline_s(self) -> float | None:
        if self._current is not None:
            return self._deadline_s
        return self._clock.now_s() if self._num_waiting else None

    def close(self) -> None:
        if self._thread_inbox is not None:
            self._thread_inbox.put(None)
            self._thread_inbox = None
        self._generation += 1  # whoever is still running writes to nobody
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _hand_over(self, job: AnyJob) -> None:
        if self._thread_inbox is None:
            self._thread_inbox = queue.SimpleQueue()
            start_thread(self._serve, args=(self._thread_inbox, self._generation), name="reward-function")
        self._current = job
        self._reached = ", ".join(term.name for term in self._terms)
        self._deadline_s = self._clock.now_s() + self._timeout_s
        self._thread_inbox.put(job)

    def _serve(self, inbox: queue.SimpleQueue[AnyJob | None], generation: int) -> None:
        """Consumes jobs, waits for the next one, ends on None or when its generation is over."""

        def began(index: int) -> None:
            if generation == self._generation:
                self._reached = self._terms[index].name

        while (job := inbox.get()) is not None:
            result = answer(self._terms, job, began)
            scored = ScoredJob(job_id=job.job_id, parts=result.parts, failure=result.error, logged=result.logged)
            if generation != self._generation:
                return
            self._answers.put((generation, scored))
            try:
                os.write(self._wake_write, b"\0")
            except BlockingIOError:  # enough wake-ups are waiting
                continue
            except OSError:  # closed meanwhile
                return

    @staticmethod
    def _failed(job: AnyJob, failure: str) -> ScoredJob:
        return ScoredJob(job_id=job.job_id, parts=[], failure=failure)
