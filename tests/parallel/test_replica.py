"""A generator's replica on several ranks: what it generates is what one executor generates of the same, whenever what
reaches each of its ranks; it sleeps without work, and ends as a whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import replica_jobs as jobs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rank_pool import RankPool

from slipstream.core.channel import make_transport_dir
from slipstream.core.types import (
    Completion,
    CompletionFinished,
    Counters,
    Evaluate,
    Message,
    Ready,
    Swapped,
)

BETWEEN: dict[str, Any] = {"weight_update": "between_batches", "max_staleness": 2}
IN_FLIGHT: dict[str, Any] = {"weight_update": "in_flight", "max_staleness": 2}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    jobs.save_policy(folder)
    return str(folder)


@pytest.fixture
def transport() -> Iterator[str]:
    folder = make_transport_dir()
    yield str(folder)
    shutil.rmtree(folder)


def run(ranks: RankPool, case: jobs.Case, policy: str, *, world: int) -> tuple[list[jobs.Outcome], jobs.Outcome]:
    """(what each rank did, what one executor does when told the same)."""
    folder = make_transport_dir()
    try:
        by_rank = ranks.run(jobs.replica, case, policy, str(folder), world=world)
    finally:
        shutil.rmtree(folder)
    [alone] = ranks.run(jobs.follow, case, policy, by_rank[0].trace, world=1)
    return by_rank, alone


def said(completion: Completion) -> tuple[Any, ...]:
    [segment] = completion.segments
    spans = [(span.start, span.version) for span in segment.version_spans]
    times = (completion.started_s, completion.finished_s)
    return segment.tokens.tolist(), spans, completion.finish_reason, completion.text, times


def logprobs(completion: Completion) -> np.ndarray:
    [segment] = completion.segments
    assert segment.behaviour_logprobs is not None
    return segment.behaviour_logprobs


def kinds(events: list[Message]) -> set[type]:
    return {type(event) for event in events}


def assert_one_replica(by_rank: list[jobs.Outcome], case: jobs.Case) -> None:
    """All ranks did the same at the same steps; only rank 0 spoke of it."""
    first, *others = by_rank
    assert len(first.completions) == case.num_completions
    for other in others:
        assert [(len(commands), *rest) for commands, *rest in other.trace] == [
            (len(commands), *rest) for commands, *rest in first.trace
        ]
        assert other.committed == first.committed
        assert other.probe_errors == first.probe_errors
        assert not other.completions
        assert kinds(other.events) <= {Ready, Counters}
    swapped = [event.version for event in first.events if isinstance(event, Swapped)]
    assert swapped == [version for version, _ in first.committed]


def assert_equal_to_one(first: jobs.Outcome, alone: jobs.Outcome, *, atol: float) -> None:
    assert first.completions.keys() == alone.completions.keys()
    for key, completion in first.completions.items():
        assert said(completion) == said(alone.completions[key]), key
        np.testing.assert_allclose(logprobs(completion), logprobs(alone.completions[key]), rtol=0, atol=atol)
    assert first.committed == alone.committed


def evaluation(eval_id: int, count: int, temperature: float = 0.0) -> Evaluate:
    prompts = tuple(jobs.prompt(50 + number) for number in range(count))
    return Evaluate(eval_id=eval_id, prompts=prompts, temperature=temperature)


def test_completions_are_those_of_one_executor(ranks: RankPool, policy: str) -> None:
    """Versions arrive on each rank at a step of its own, one gives way to the next, and so do commands."""
    case = jobs.Case(
        IN_FLIGHT | {"generator": {"kv_on_update": "recompute"}},
        commands=(
            (0, jobs.admit(0, 4)),
            (2, jobs.admit(1)),
            (5, evaluation(0, 3)),
            (6, jobs.admit(2)),
            (20, jobs.admit(3)),
        ),
        staged=(
            ((4, 1), (12, None), (14, 2)),
            ((7, 1), (11, 2)),
            ((2, 1), (13, 2)),
            ((6, 1), (10, 2)),
        ),
        late=((), (0, 2, 0, 1), (3,), (0, 0, 4)),
    )
    for world in (2, 4):
        by_rank, alone = run(ranks, case, policy, world=world)
        assert_one_replica(by_rank, case)
        assert_equal_to_one(by_rank[0], alone, atol=1e-4)
        assert [version for version, _ in by_rank[0].committed][-1] == 2
        assert max(by_rank[0].probe_errors) < 1e-4
        spans = [len(said(completion)[1]) for completion in by_rank[0].completions.values()]
        assert max(spans) > 1
    assert {event.ordinal for event in by_rank[0].events if isinstance(event, CompletionFinished)} == {0, 1, 2, 3}


arrivals = st.lists(st.integers(0, 30), max_size=3, unique=True).map(sorted)


@st.composite
def cases(draw: st.DrawFn) -> jobs.Case:
    messages: list[tuple[int, Message]] = []
    steps = sorted(draw(st.lists(st.integers(0, 40), min_size=1, max_size=5)))
    for ordinal, step in enumerate(steps):
        is_evaluation = draw(st.integers(0, 4)) == 0
        message = evaluation(ordinal, 2, 0.7) if is_evaluation else jobs.admit(ordinal, draw(st.integers(1, 5)))
        messages.append((step, message))
    staged = tuple(
        tuple((step, draw(st.sampled_from([None, *range(1, index + 2)]))) for index, step in enumerate(draw(arrivals)))
        for _ in range(4)
    )
    late = tuple(tuple(draw(st.lists(st.integers(0, 4), max_size=5))) for _ in range(4))
    mode = draw(
        st.sampled_from(
            [
                IN_FLIGHT,
                IN_FLIGHT | {"generator": {"kv_on_update": "recompute_if_older_than", "max_kv_age": 1}},
                BETWEEN,
                BETWEEN | {"generator": {"segment_tokens": 3}},
                IN_FLIGHT | {"generator": {"time_limit_s": 6.0}},
            ]
        )
    )
    return jobs.Case(mode, tuple(messages), staged, late, seconds_per_step=0.5)


@pytest.mark.parametrize("world", [2, 4])
def test_whatever_arrives_when(ranks: RankPool, policy: str, world: int) -> None:
    @settings(
        max_examples=12 if world == 2 else 5,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def holds(case: jobs.Case) -> None:
        by_rank, alone = run(ranks, case, policy, world=world)
        assert_one_replica(by_rank, case)
        assert_equal_to_one(by_rank[0], alone, atol=1e-4)

    holds()
