"""Pools of both kinds, closed after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hosted_agents
import hosted_environments
import pytest
from drive import GENEROUS_S
from loopback import needs_loopback

from slipstream.core.clock import Clock
from slipstream.environments.hosting import HostSetup
from slipstream.environments.inline import InlinePool
from slipstream.environments.pool import EpisodePool
from slipstream.environments.sources import EnvironmentSource, load, make_source
from slipstream.environments.workers import EnvironmentPool
from slipstream.jail.isolation import Network

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


AgentOf = str | tuple[str, list[str]]
"""A function's name in `hosted_agents`, or "program" or "lines" and the words of a command."""


def source_of(agent: AgentOf) -> EnvironmentSource:
    if isinstance(agent, str):
        return make_source("agent", f"hosted_agents:{agent}")
    kind, command = agent
    return make_source(kind, command=command)


@pytest.fixture
def make_agents_inline() -> Iterator[MakePool]:
    pools: list[InlinePool] = []

    def make(
        *agents: AgentOf, step_limit_s: float = GENEROUS_S, clock: Clock | None = None, num_workers: int = 1
    ) -> InlinePool:
        assert num_workers == 1, "this process"
        makers = [load(source_of(agent)) for agent in agents]
        pools.append(InlinePool(makers, step_limit_s=step_limit_s, clock=clock))
        pools[-1].wait_ready()
        return pools[-1]

    hosted_agents.RELEASED.clear()
    for left in (hosted_agents.LEFT, hosted_agents.LEFT_ERRORS, hosted_agents._KEPT):
        left.clear()
    yield make
    hosted_agents.RELEASED.set()
    for pool in pools:
        pool.close()


@pytest.fixture
def make_agents_in_workers() -> Iterator[MakePool]:
    pools: list[EnvironmentPool] = []

    def make(
        *agents: AgentOf,
        step_limit_s: float = GENEROUS_S,
        clock: Clock | None = None,
        num_workers: int = 1,
        network: Network = "gateway",
        **also: Any,
    ) -> EnvironmentPool:
        sources = [source_of(agent) for agent in agents]
        setup = HostSetup(sources, memory_bytes=512 << 20, step_limit_s=step_limit_s, network=network, **also)
        pools.append(EnvironmentPool(setup, num_workers=num_workers, clock=clock, num_spares=0))
        pools[-1].wait_ready()
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(params=["in_workers", "inline"])
def make_agents(request: pytest.FixtureRequest) -> Callable[..., EpisodePool]:
    """Makes pools of either kind for agents; jailed workers where they may have a network of their own."""
    if request.param == "in_workers":
        needs_loopback()
    make: Callable[..., EpisodePool] = request.getfixturevalue(f"make_agents_{request.param}")
    return make
