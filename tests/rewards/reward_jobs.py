"""Jobs, and driving a pool as a host does."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

from slipstream.rewards.pool import ScoredJob
from slipstream.rewards.protocol import RewardJob

HERE = Path(__file__).parent
GENEROUS_S = 120.0
"""For what ends by itself: it only ends a hang, on however slow a machine."""


def job(
    job_id: int,
    completion: str,
    *,
    answer: str | None = None,
    ids: tuple[int, ...] = (),
    task: str = "",
    prompt: Any = "q",
    **columns: Any,
) -> RewardJob:
    return RewardJob(job_id, prompt, completion, list(ids), task, answer, columns)


def run_jobs(pool: Any, jobs: list[RewardJob], *, expected: int | None = None) -> dict[int, ScoredJob]:
    """Submit all and wait, as a host does: on descriptors and deadlines. `expected` results, by default one a job."""
    for one in jobs:
        pool.submit(one)
    done: dict[int, ScoredJob] = {}
    end_s = time.monotonic() + GENEROUS_S
    while len(done) < (len(jobs) if expected is None else expected):
        assert time.monotonic() < end_s, f"hangs; finished: {sorted(done)}"
        deadline_s = pool.next_deadline_s()
        wait_s = 5.0 if deadline_s is None else min(5.0, max(0.0, deadline_s - pool._clock.now_s()))
        select.select(pool.fds(), [], [], wait_s)
        done |= {one.job_id: one for one in pool.poll()}
    return done
