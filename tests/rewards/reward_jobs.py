"""Jobs, and driving a pool as a host does."""

from __future__ import annotations

import select
import time
from pathlib import Path
from typing import Any

from slipstream.rewards.pool import Scored
from slipstream.rewards.protocol import Job

HERE = Path(__file__).parent


def job(
    job_id: int,
    completion: str,
    *,
    answer: str | None = None,
    ids: tuple[int, ...] = (),
    task: str = "",
    prompt: Any = "q",
    **columns: Any,
) -> Job:
    return Job(job_id, prompt, completion, list(ids), task, answer, columns)


def run_jobs(pool: Any, jobs: list[Job], limit_s: float = 30) -> dict[int, Scored]:
    """Submit all and wait, as a host does: on descriptors and deadlines."""
    for one in jobs:
        pool.submit(one)
    done: dict[int, Scored] = {}
    end_s = time.monotonic() + limit_s
    while len(done) < len(jobs):
        assert time.monotonic() < end_s, f"hangs; finished: {sorted(done)}"
        deadline_s = pool.next_deadline_s()
        wait_s = 5.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        select.select(pool.fds(), [], [], wait_s)
        done |= {one.job_id: one for one in pool.poll()}
    return done
