"""Virtual time: an event loop whose clock jumps to the next event, and cores that its jobs share.

    consumes      callbacks with a time (`at`), and jobs with an amount of work (`Cores.run`)
    waits for     nothing: the clock jumps
    ends when     `step` is called no more, or nothing is left to happen

Events of one moment happen in the order in which they were asked for, so a simulation is a function of its input.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

BACKGROUND_SHARE = 0.1
"""The share of a core that a job of low priority gets beside others (`weight_sync/weight_links.py`: niceness 10)."""


class EventLoop:
    """The heap of future callbacks. `now_s` is the clock that recorders read (`core.clock.Clock`)."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0

    def now_s(self) -> float:
        return self.time_s

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        """Call `do` at `time_s`, or now if that has passed."""
        self._num_asked += 1
        heapq.heappush(self._heap, (max(time_s, self.time_s), self._num_asked, do))

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.at(self.time_s + seconds, do)

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._heap:
            return False
        self.time_s, _, do = heapq.heappop(self._heap)
        self.num_events += 1
        do()
        return True


class OwnDevice:
    """Devices of one process: a second of work takes a second."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop

    def run(
        self,
        kind: str,  # noqa: ARG002 - as `Cores.run`
        threads: int,  # noqa: ARG002
        work_s: float,
        do: Callable[[], None],
        *,
        is_background: bool = False,  # noqa: ARG002
    ) -> Job:
        return _OwnJob(self._loop, work_s, do)


class _OwnJob:
    __slots__ = ("_do", "_loop", "_since_s", "_work_s")

    def __init__(self, loop: EventLoop, work_s: float, do: Callable[[], None]) -> None:
        self._loop, self._since_s, self._do = loop, loop.time_s, do
        self.shorten(work_s)

    def done_s(self) -> float:
        return self._loop.time_s - self._since_s

    def shorten(self, work_s: float) -> None:
        self._work_s = work_s
        self._loop.at(self._since_s + work_s, lambda: self._end(work_s))

    def _end(self, work_s: float) -> None:
        if work_s == self._work_s:  # else it was shortened since
            self._work_s = -1.0
            self._do()


@dataclass(eq=False)
class _SharedJob:
    """A job on shared cores; `left_s` of its work was left at `since_s`, and has been done at `rate` since."""

    cores: Cores
    kind: str
    threads: int
    work_s: float
    left_s: float
    do: Callable[[], None]
    since_s: float
    is_background: bool
    rate: float = 0.0
    plan: int = 0

    def done_s(self) -> float:
        """Return the seconds of work done so far, as the job alone would have taken for them."""
        return self.work_s - self.left_at(self.cores.loop.time_s)

    def left_at(self, now_s: float) -> float:
        return max(0.0, self.left_s - (now_s - self.since_s) * self.rate)

    def shorten(self, work_s: float) -> None:
        """End the job after `work_s` seconds of work in all, of which no more are done than that."""
        now_s = self.cores.loop.time_s
        self.left_s = max(0.0, self.left_at(now_s) - (self.work_s - work_s))
        self.since_s, self.work_s = now_s, work_s
        self.cores.plan(self)


class Cores:
    """One machine's cores, which all jobs on them share: each runs at a rate that depends on who else runs.

    With C cores and n busy threads, one thread of a kind with `beside` = r goes at

        g(n) = 1 - (1 - r) (n - 1) / (C - 1)   for n <= C,        g(n) = r C / n   above,

    of its speed alone: r says how much slower it is with all cores busy (hyperthreads share a core's units, all cores
    the memory), and beyond C threads take turns. Times are given as a job of t threads takes them alone, so its rate
    is g(n) / g(min(t, C)). Jobs of low priority take a core that is free, and count then; where none is, they get the
    share `background` of one and slow nobody.
    """

    def __init__(
        self, loop: EventLoop, num_cores: int, beside: Mapping[str, float], background: float = BACKGROUND_SHARE
    ) -> None:
        self.loop, self.num_cores, self._background = loop, num_cores, background
        self._beside = beside
        self._jobs: list[_SharedJob] = []

    def run(
        self, kind: str, threads: int, work_s: float, do: Callable[[], None], *, is_background: bool = False
    ) -> Job:
        """Call `do` when `work_s` seconds of work are done, counted as they pass for the job alone."""
        job = _SharedJob(self, kind, threads, work_s, work_s, do, self.loop.time_s, is_background)
        self._jobs.append(job)
        self._share()
        return job

    def speed(self, kind: str, num_threads: int) -> float:
        """g(n) of the class's docstring."""
        r, cores = self._beside.get(kind, 1.0), self.num_cores
        if num_threads > cores:
            return r * cores / num_threads
        return 1.0 if cores == 1 else 1.0 - (1.0 - r) * (num_threads - 1) / (cores - 1)

    def _share(self) -> None:
        """Give every job its rate among those there are now."""
        now_s = self.loop.time_s
        busy = sum(job.threads for job in self._jobs if not job.is_background)
        background = sum(job.threads for job in self._jobs if job.is_background)
        lent = min(background, max(0, self.num_cores - busy))
        for job in self._jobs:
            if job.is_background and not lent:
                rate = self._background * self.speed(job.kind, self.num_cores)
            else:
                rate = self.speed(job.kind, busy + lent) / self.speed(job.kind, min(job.threads, self.num_cores))
            rate = min(rate, 1.0)
            if rate != job.rate:
                job.left_s, job.since_s, job.rate = job.left_at(now_s), now_s, rate
                self.plan(job)

    def plan(self, job: _SharedJob) -> None:
        """(Re)plan the end of `job`; what was planned before for it is void."""
        job.plan += 1
        plan = job.plan
        self.loop.at(job.since_s + job.left_s / job.rate, lambda: self._end(job, plan))

    def _end(self, job: _SharedJob, plan: int) -> None:
        if plan != job.plan:
            return
        self._jobs.remove(job)
        job.plan += 1
        self._share()
        job.do()


Job = _OwnJob | _SharedJob
Device = OwnDevice | Cores
