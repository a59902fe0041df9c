"""Scoring without blocking: jobs in, results out, through workers that may hang, die or lie."""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ConfigError, ExecutorDied
from slipstream.core.scratch import sweep
from slipstream.core.user_code import MAX_ERROR_CHARS
from slipstream.jail.protocol import SetupFailed, TriedNetwork, WorkerReady
from slipstream.jail.sandbox import JailedWorker, Permissions, Spares, WorkerKind, nested_selector
from slipstream.rewards.logged import NOTHING, Logged
from slipstream.rewards.protocol import (
    MAX_RESULT_BYTES,
    AnyJob,
    Began,
    FromWorker,
    JobResult,
    RewardGroupJob,
    WorkerSetup,
)

_MAX_BATCH = 64  # jobs sent to a worker together; each still has the deadline of its own
_QUICK_S = 2e-3  # jobs that take longer, on average, are sent one by one: so they spread over the workers
_START_S = 120.0  # imports of sympy and reasoning-gym on a busy machine
_MAX_FAILED_STARTS = 3  # in a row
NO_NETWORK = (
    "rewards have no network: set network = true of the term, or rewards.allow_network = true, if you trust the "
    "function; a model that judges can be one of rewards.judges"
)

_KIND: WorkerKind[FromWorker] = WorkerKind(
    module="slipstream.rewards.worker",
    scratch="reward",
    decoder=msgspec.msgpack.Decoder(FromWorker, strict=True),
    max_bytes=MAX_RESULT_BYTES,
)


@dataclass(frozen=True)
class ScoredJob:
    """The parts of one job's reward, as in `JobResult`, or why there are none."""

    job_id: int
    parts: list[float | None]
    failure: str | None = None
    logged: Logged = NOTHING


@dataclass
class _Slot:
    """A worker, the jobs it has in order, and when the first of them is overdue; which term that has reached.

    `again` is scored before all others once the worker is ready: the one before had no memory left for it.
    """

    worker: JailedWorker[FromWorker]
    deadline_s: float
    is_ready: bool = False
    jobs: deque[AnyJob] = field(default_factory=deque)
    term: str | None = None
    has_tried_network: bool = False
    has_answered: bool = False
    again: AnyJob | None = None


class ScoringPool:
    """`num_workers` workers and, once the run has started, a warm spare, behind one file descriptor.

    Consumes: jobs (`submit`). Produces: one `ScoredJob` per job (`poll`), whatever the job does. Each job has
    `timeout_s` from the moment its worker reached it, as far as the pool can see: results that wait are read before any
    deadline is judged, so a pool that was not polled for a while accuses no job. A job that is overdue, or whose worker
    dies, is failed and its worker killed with everything it started. Quick jobs go to a worker together and their
    answers come together, so of several jobs that a worker still had, any may be at fault: each is scored again, alone.
    A worker whose memory is used up by earlier jobs is replaced, and the job that failed for it is scored once more.
    Ends: `close`.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        num_workers: int,
        clock: Clock | None = None,
        private: Sequence[str] = (),
        num_spares: int = 1,
    ) -> None:
        self._setup = setup
        self._permissions = _permissions(setup, private)
        self._clock = clock or WallClock()
        self._num_workers = num_workers
        self._selector = nested_selector()
        self._waiting: deque[AnyJob] = deque()
        self._suspects: set[int] = set()  # ids of jobs that go to a worker alone; they are the first of those waiting
        self._done: list[ScoredJob] = []
        self._slots: list[_Slot] = []
        self._failed_starts = 0
        self._job_s = 0.0  # running mean, for the size of batches
        self.num_restarts = 0
        self.isolation: frozenset[str] = frozenset()
        sweep()  # folders of workers that were killed with their pool
        self._spares = Spares(num_spares)
        for _ in range(num_workers):
            self._start()

    def wait_ready(self) -> None:
        """Block until a worker has imported what it needs. ConfigError when the reward functions cannot be built."""
        while not any(slot.is_ready for slot in self._slots):
            deadline_s = self.next_deadline_s()
            assert deadline_s is not None
            self._advance(max(0.0, deadline_s - self._clock.now_s()))

    def submit(self, job: AnyJob) -> None:
        """Queue `job`; it is handed to a worker at the next `poll`."""
        self._waiting.append(job)

    def poll(self) -> list[ScoredJob]:
        """Move what can be moved without waiting; results in the order they came."""
        self._advance(0)
        done, self._done = self._done, []
        return done

    def fds(self) -> list[int]:
        """Readable when `poll` has something to do: one descriptor, which stands for all workers' sockets."""
        return [self._selector.fileno()]

    def next_deadline_s(self) -> float | None:
        """When, on the clock, `poll` has to be called even if nothing arrives; None while nothing is awaited."""
        if self._done or (self._waiting and self._free()):
            return self._clock.now_s()
        deadlines = [slot.deadline_s for slot in self._slots if slot.jobs or not slot.is_ready]
        return min([*deadlines, *self._spares.due_s], default=None)

    def close(self) -> None:
        for slot in self._slots:
            slot.worker.close()
        self._slots.clear()
        self._selector.close()

    def _start(self, again: AnyJob | None = None) -> None:
        worker = JailedWorker(_KIND, self._setup, self._permissions)
        slot = _Slot(worker, deadline_s=self._clock.now_s() + _START_S, again=again)
        self._slots.append(slot)
        self._selector.register(slot.worker, selectors.EVENT_READ | selectors.EVENT_WRITE, slot)

    def _advance(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            slot: _Slot = key.data
            slot.worker.flush()
            self._watch(slot)
            self._read(slot)
        now_s = self._clock.now_s()
        for slot in list(self._slots):
            if now_s < slot.deadline_s:
                continue
            if slot.jobs:
                self._replace(slot, f"timed out after {self._setup.timeout_s:g} s")
            elif not slot.is_ready:
                self._replace(slot, f"worker was not ready after {_START_S:g} s")
        for _ in range(self._spares.take(now_s)):
            self._start()
        self._dispatch()

    def _read(self, slot: _Slot) -> None:
        for message in slot.worker.receive():
            if isinstance(message, TriedNetwork) and (slot.jobs or not slot.is_ready):
                slot.has_tried_network = True
            elif isinstance(message, Began) and slot.jobs and 0 <= message.term < len(self._setup.terms):
                slot.term = self._setup.terms[message.term].label
            elif isinstance(message, SetupFailed) and not slot.is_ready:
                raise ConfigError(
                    "the reward functions cannot be set up",
                    got=message.error,
                    allowed="functions whose files can be imported by a worker, with the packages of this Python",
                    hint=NO_NETWORK if slot.has_tried_network else _setup_hint(message.error),
                )
            elif isinstance(message, WorkerReady) and not slot.is_ready:
                slot.is_ready, slot.has_tried_network = True, False
                self._failed_starts = 0
                self._spares.plan(self._clock.now_s())
                self.isolation = frozenset(message.isolation)
                if slot.again is not None:
                    self._hand(slot, [slot.again])
                    slot.again = None
            elif isinstance(message, JobResult) and slot.jobs and message.job_id == slot.jobs[0].job_id:
                if not self._finish(slot, message):
                    return
            else:
                slot.worker.failure = "worker sent bad output: an answer to no question"
                break
        if slot.worker.failure is not None:
            self._replace(slot, slot.worker.failure)

    def _finish(self, slot: _Slot, result: JobResult) -> bool:
        """Settle the first job of `slot`, or have it scored once more; False where the worker is replaced."""
        job = slot.jobs.popleft()
        now_s = self._clock.now_s()
        started_s = slot.deadline_s - self._setup.timeout_s
        self._job_s += 0.05 * (max(0.0, now_s - started_s) - self._job_s)
        slot.deadline_s = now_s + self._setup.timeout_s
        is_over = result.is_exhausted and slot.has_answered
        again = job if is_over and result.error is not None else None
        if again is None:
            error = None if result.error is None else _explained(result.error[: 2 * MAX_ERROR_CHARS], slot)
            self._settle(ScoredJob(job_id=result.job_id, parts=result.parts, failure=error, logged=result.logged))
        slot.term, slot.has_tried_network, slot.has_answered = None, False, True
        if is_over:
            self._renew(slot, again)
        return not is_over

    def _replace(self, slot: _Slot, failure: str) -> None:
        """Kill the worker of `slot` and start another. Its job failed; of several each is tried again alone."""
        if not slot.is_ready:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_FAILED_STARTS:
                raise ExecutorDied(
                    f"{self._failed_starts} reward workers in a row ended before they were ready",
                    got=failure,
                    hint="raise rewards.memory_mb, or see `slipstream doctor`",
                )
        if len(slot.jobs) == 1:
            job = slot.jobs.popleft()
            term = slot.term or self._only_term(job)
            failure = _explained(failure if term is None else f"{term}: {failure}", slot)
            self._settle(ScoredJob(job_id=job.job_id, parts=[], failure=failure))
        self._renew(slot, slot.again)

    def _renew(self, slot: _Slot, again: AnyJob | None) -> None:
        """Kill the worker of `slot` and start another, for `again` first; the jobs of `slot` wait again, each alone."""
        self._slots.remove(slot)
        self._selector.unregister(slot.worker)
        slot.worker.close()
        self.num_restarts += 1
        self._suspects.update(job.job_id for job in slot.jobs)
        self._waiting.extendleft(reversed(slot.jobs))
        self._start(again)

    def _settle(self, scored: ScoredJob) -> None:
        self._suspects.discard(scored.job_id)
        self._done.append(scored)

    def _only_term(self, job: AnyJob) -> str | None:
        """The term that scores `job`, where there is just one."""
        per = "group" if isinstance(job, RewardGroupJob) else "completion"
        terms = [term for term in self._setup.terms if term.per == per]
        return terms[0].label if len(terms) == 1 else None

    def _free(self) -> list[_Slot]:
        """Idle workers, not counting the spare."""
        active = [slot for slot in self._slots if slot.is_ready][: self._num_workers]
        return [slot for slot in active if not slot.jobs]

    def _dispatch(self) -> None:
        free = self._free()
        for i, slot in enumerate(free):
            if batch := self._next_batch(-(-len(self._waiting) // (len(free) - i))):
                self._hand(slot, batch)

    def _hand(self, slot: _Slot, batch: list[AnyJob]) -> None:
        slot.jobs.extend(batch)
        slot.deadline_s = self._clock.now_s() + self._setup.timeout_s
        slot.worker.send(batch)
        self._watch(slot)

    def _next_batch(self, share: int) -> list[AnyJob]:
        """Take jobs for one worker: `share` at most, and one where it is slow or a suspect."""
        most = min(share, _MAX_BATCH if self._job_s <= _QUICK_S else 1)
        if self._waiting and self._waiting[0].job_id in self._suspects:
            most = 1
        return [self._waiting.popleft() for _ in range(most)]

    def _watch(self, slot: _Slot) -> None:
        """Wake for writability exactly while something waits to be written."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if slot.worker.has_unsent else 0)
        if self._selector.get_key(slot.worker).events != events:
            self._selector.modify(slot.worker, events, slot)


def _permissions(setup: WorkerSetup, private: Sequence[str]) -> Permissions:
    return Permissions(
        private=private,
        folders=[os.path.dirname(t.function.rpartition(":")[0]) for t in setup.terms if t.source is not None],
        environment=setup.environment,
        network="host" if setup.allow_network else "none",
        has_helper=any(term.function == "code" for term in setup.terms),
    )


def _explained(failure: str, slot: _Slot) -> str:
    """`failure` of the job of `slot`, with what its function could not know."""
    return f"{failure} ({NO_NETWORK})" if slot.has_tried_network else failure


def _setup_hint(error: str) -> str:
    if "No module named" in error:
        return (
            "is it installed in this environment, or on PYTHONPATH? An import inside the function comes later. A "
            "module that lies in the home folder itself, or in /tmp, is hidden from workers: move it to a folder below"
        )
    return "a worker has no network, and few environment variables: see rewards.environment"
