"""Pools and jobs for the reward tests."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.rewards.functions import make_term
from slipstream.rewards.pool import Scored, ScoringPool
from slipstream.rewards.protocol import Job, Setup, Task

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


@pytest.fixture(scope="module")
def make_pool() -> Iterator[Callable[..., ScoringPool]]:
    pools: list[ScoringPool] = []

    def make(
        *terms: tuple[str, dict[str, Any]], tasks: dict[str, Task] | None = None, timeout_s: float = 1.0, **kwargs: Any
    ) -> ScoringPool:
        setup = Setup(
            terms=[make_term(name, params) for name, params in terms],
            tasks=tasks or {},
            memory_bytes=512 << 20,
            timeout_s=timeout_s,
        )
        pools.append(ScoringPool(setup, num_workers=kwargs.pop("num_workers", 1), **kwargs))
        pools[-1].wait_ready()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
