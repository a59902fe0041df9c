"""Pools of both kinds, closed after each test; pools of workers in which nothing hangs are the next test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hosted_agents
import hosted_environments
import pytest
from drive import GENEROUS_S, until
from loopback import needs_loopback

from slipstream.core.clock import Clock, VirtualClock
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

    def make(*names: str, step_limit_s: float = GENEROUS_S, clock: Clock | None = None, **also: Any) -> InlinePool:
        makers = [vars(hosted_environments)[name] for name in names]
        pools.append(InlinePool(makers, step_limit_s=step_limit_s, clock=clock, **also))
        pools[-1].wait_ready()
        return pools[-1]

    hosted_environments.RELEASED.clear()
    yield make
    hosted_environments.RELEASED.set()
    for pool in pools:
        pool.close()


def start_workers(
    sources: Sequence[EnvironmentSource],
    pools: list[EnvironmentPool],
    *,
    step_limit_s: float = GENEROUS_S,
    clock: Clock | None = None,
    num_workers: int = 1,
    **also: Any,
) -> EnvironmentPool:
    """Start a pool and add it to `pools`."""
    setup = HostSetup(list(sources), memory_bytes=512 << 20, step_limit_s=step_limit_s, **also)
    pools.append(EnvironmentPool(setup, num_workers=num_workers, clock=clock, num_spares=0))
    pools[-1].wait_ready()
    return pools[-1]


def sources_of(names: Sequence[str]) -> list[EnvironmentSource]:
    return [EnvironmentSource("class", f"hosted_environments:{name}") for name in names]


@pytest.fixture
def make_workers() -> Iterator[MakePool]:
    pools: list[EnvironmentPool] = []
    yield lambda *names, **limits: start_workers(sources_of(names), pools, **limits)
    for pool in pools:
        pool.close()


class KeptPools:
    """Pools of the tests of a file, by what they play. To start a worker takes longer than most tests.

    What was started for a worker that a test has ended is there for the next test. A pool with an episode that hangs
    at the end of a test is closed. Their time passes when a test says so: a call is late after 7 s of it.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], EnvironmentPool] = {}
        self._in_use: dict[tuple[Any, ...], EnvironmentPool] = {}
        self._others: list[EnvironmentPool] = []

    def take(
        self,
        played: Sequence[str] | None,
        sources: Sequence[EnvironmentSource],
        network: Network,
        *,
        clock: Clock | None = None,
        step_limit_s: float = 7.0,
        **limits: Any,
    ) -> EnvironmentPool:
        """Return a pool for these `sources`: a kept one that has `played` the same with the same limits, else a new
        one."""
        clock = clock or VirtualClock()
        limits["step_limit_s"] = step_limit_s
        if played is None:
            return start_workers(sources, self._others, network=network, clock=clock, **limits)
        key = (*played, *sorted(limits.items()))
        pool = self._kept.pop(key, None)
        if pool is None:
            pool = start_workers(sources, self._others, network=network, clock=clock, **limits)
        else:
            pool._clock, pool.num_restarts = clock, 0
            for site in pool._sites:
                site.deadline_s = pool._clock.now_s() + GENEROUS_S  # of one that is not ready yet
            pool.wait_ready()
        self._in_use[key] = pool
        return pool

    def end_test(self) -> None:
        in_use, self._in_use = self._in_use, {}
        for played, pool in in_use.items():
            if pool.num_calls == 0 and pool._closed_because is None:
                for key in list(pool._by_key):
                    pool.shut(key)
                until(pool, lambda pool=pool: not pool._site_of)  # type: ignore[misc]
                self._kept[played] = pool
        kept = list(self._kept.values())
        for pool in self._others:
            if pool not in kept:
                pool.close()
        self._others = kept

    def close(self) -> None:
        for pool in (*self._others, *self._kept.values()):
            pool.close()


@pytest.fixture(scope="module")
def _pools_of_the_file() -> Iterator[KeptPools]:
    pools = KeptPools()
    yield pools
    pools.close()


@pytest.fixture
def kept_pools(_pools_of_the_file: KeptPools) -> Iterator[KeptPools]:
    yield _pools_of_the_file
    _pools_of_the_file.end_test()


@pytest.fixture
def keep_workers(kept_pools: KeptPools) -> MakePool:
    """As `make_workers`, of pools that the tests of a file share."""
    return lambda *names, **limits: kept_pools.take(names, sources_of(names), "none", **limits)


@pytest.fixture(params=["workers", "inline"])
def make_pool(request: pytest.FixtureRequest) -> Callable[..., EpisodePool]:
    """Makes pools of either kind: what the tests of both say holds for both."""
    if request.param == "workers":
        keep: Callable[..., EpisodePool] = request.getfixturevalue("keep_workers")
        return keep
    make: Callable[..., EpisodePool] = request.getfixturevalue("make_inline")
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

    def make(*agents: AgentOf, network: Network = "gateway", **limits: Any) -> EnvironmentPool:
        return start_workers([source_of(agent) for agent in agents], pools, network=network, **limits)

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture(params=["in_workers", "inline"])
def make_agents(request: pytest.FixtureRequest) -> Callable[..., EpisodePool]:
    """Makes pools of either kind for agents; jailed workers where they may have a network of their own."""
    if request.param == "in_workers":
        needs_loopback()
        kept: KeptPools = request.getfixturevalue("kept_pools")

        def take(*agents: AgentOf, **limits: Any) -> EnvironmentPool:
            functions = [agent for agent in agents if isinstance(agent, str)]
            played = functions if len(functions) == len(agents) else None  # a program lies in the test's own folder
            return kept.take(played, [source_of(agent) for agent in agents], "gateway", **limits)

        return take
    make: Callable[..., EpisodePool] = request.getfixturevalue("make_agents_inline")
    return make
