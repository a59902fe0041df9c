"""Virtual time: an event loop whose clock jumps to the next event, and cores that its jobs share.

Events of one moment happen in the order in which they were asked for, so a simulation is a function of its input.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

BACKGROUND_SHARE = 0.1
"""The share of a core that a job of low priority gets beside others (`weight_sync/weight_links.py`: niceness 10)."""


def thread_speed(busy: int, cores: int, beside: float) -> float:
    """Return g(busy) of the class `Cores`: the speed of one thread among so many, of its speed alone."""
    if busy > cores:
        return beside * cores / busy
    return 1.0 if cores == 1 else 1.0 - (1.0 - beside) * (busy - 1) / (cores - 1)


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

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self._heap:
            return False
        self.time_s, _, do = heapq.heappop(self._heap)
        self.num_events += 1
        do()
        return True


@dataclass(eq=False, slots=True)
class CoreJob:
    """A job on cores: `before_s` of its `work_s` were done at `since_s`, and since then it goes on at `rate`."""

    cores: Cores
    kind: str
    threads: int
    work_s: float
    do: Callable[[], None]
    since_s: float
    is_background: bool
    rate: float = 0.0
    before_s: float = 0.0
    plan: int = 0

    def done_s(self) -> float:
        """Return the seconds of work done so far, as the job alone would have taken for them."""
        return self.before_s + (self.cores.loop.time_s - self.since_s) * self.rate

    def shorten(self, work_s: float) -> None:
        """End the job after `work_s` seconds of work in all, of which no more are done than that."""
        self.work_s = work_s
        self.cores.plan(self)


class Cores:
    """One machine's cores, which all jobs on them share: each runs at a rate that depends on who else runs.

    With C cores and n busy threads, one thread of a kind with `beside` = r goes at

        g(n) = 1 - (1 - r) (n - 1) / (C - 1)   for n <= C,        g(n) = r C / n   above,

    of its speed alone: r says how much slower it is with all cores busy (hyperthreads share a core's units, all cores
    the memory), and beyond C threads take turns. Times are given as a job of t threads takes them alone, so its rate
    is g(n) / g(min(t, C)). Jobs of low priority take a core that is free, and count then; where none is, they get the
    share `background` of one and slow nobody. Without `num_cores` they are devices of one process: a second of work
    takes a second.
    """

    def __init__(
        self,
        loop: EventLoop,
        num_cores: int | None = None,
        beside: Mapping[str, float] = MappingProxyType({}),
        background: float = BACKGROUND_SHARE,
    ) -> None:
        self.loop, self.num_cores, self._beside, self._background = loop, num_cores, beside, background
        self._jobs: list[CoreJob] = []

    def run(
        self, kind: str, threads: int, work_s: float, do: Callable[[], None], *, is_background: bool = False
    ) -> CoreJob:
        """Call `do` when `work_s` seconds of work are done, counted as they pass for the job alone."""
        job = CoreJob(self, kind, threads, work_s, do, self.loop.time_s, is_background)
        if self.num_cores is None:
            job.rate = 1.0
            self.plan(job)
        else:
            self._jobs.append(job)
            self._share(self.num_cores)
        return job

    def _share(self, cores: int) -> None:
        """Give every job its rate among those there are now."""
        busy = sum(job.threads for job in self._jobs if not job.is_background)
        background = sum(job.threads for job in self._jobs if job.is_background)
        lent = min(background, max(0, cores - busy))
        for job in self._jobs:
            r = self._beside.get(job.kind, 1.0)
            if job.is_background and not lent:
                rate = self._background * thread_speed(cores, cores, r)
            else:
                rate = thread_speed(busy + lent, cores, r) / thread_speed(min(job.threads, cores), cores, r)
            rate = min(rate, 1.0)
            if rate != job.rate:
                job.before_s, job.since_s, job.rate = job.done_s(), self.loop.time_s, rate
                self.plan(job)

    def plan(self, job: CoreJob) -> None:
        """(Re)plan the end of `job`; what was planned before for it is void."""
        job.plan += 1
        plan = job.plan
        self.loop.at(job.since_s + (job.work_s - job.before_s) / job.rate, lambda: self._end(job, plan))

    def _end(self, job: CoreJob, plan: int) -> None:
        if plan != job.plan:
            return
        job.plan += 1
        if self.num_cores is not None:
            self._jobs.remove(job)
            self._share(self.num_cores)
        job.do()
