"""Pools of both kinds, closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hosted_environments
import pytest
from drive import GENEROUS_S

from slipstream.core.clock import Clock
from slipstream.environments.hosting import HostSetup
from slipstream.environments.inline import InlinePool
from slipstream.environments.pool import EpisodePool
from slipstream.environments.sources import EnvironmentSource
from slipstream.environments.workers import EnvironmentPool

MakePool = Callable[..., Any]


@pytest.fixture
def make_inline() -> Iterator[MakePool]:
    pools: list[InlinePool] = []

    def make(*names: str, step_limit_s: float = GENEROUS_S, clock: Clock | None = None) -> InlinePool:
        makers = [vars(hosted_environments)[name] for name in names]
        pools.append(InlinePool(makers, step_limit_s=step_limit_s, clock=clock))
        pools[-1].wait_ready()
        return pools[-1]

    hosted_environments.RELEASED.clear()
    yield make
    hosted_environments.RELEASED.set()
    for pool in pools:
        pool.close()


@pytest.fixture
def make_workers() -> Iterator[MakePool]:
    pools: list[EnvironmentPool] = []

    def make(
        *names: str, step_limit_s: float = GENEROUS_S, clock: Clock | None = None, num_workers: int = 1, **also: Any
    ) -> EnvironmentPool:
        sources = [EnvironmentSource("class", f"hosted_environments:{name}") for name in names]
        setup = HostSetup(sources, memory_bytes=512 << 20, step_limit_s=step_limit_s, **also)
        pools.append(EnvironmentPool(setup, num_workers=num_workers, clock=clock, num_spares=0))
        pools[-1].wait_ready()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(params=["workers", "inline"])
def make_pool(request: pytest.FixtureRequest) -> Callable[..., EpisodePool]:
    """Makes pools of either kind: what the tests of both say holds for both."""
    make: Callable[..., EpisodePool] = request.getfixturevalue(f"make_{request.param}")
    return make
