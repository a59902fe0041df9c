"""Pools for the reward tests, closed after each module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reward_jobs import GENEROUS_S

from slipstream.rewards.functions import make_term
from slipstream.rewards.pool import ScoringPool
from slipstream.rewards.protocol import Task, WorkerSetup


@pytest.fixture(scope="module")
def make_pool() -> Iterator[Callable[..., ScoringPool]]:
    pools: list[ScoringPool] = []

    def make(
        *terms: tuple[str, dict[str, Any]],
        tasks: dict[str, Task] | None = None,
        timeout_s: float = GENEROUS_S,
        **kwargs: Any,
    ) -> ScoringPool:
        setup = WorkerSetup(
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
