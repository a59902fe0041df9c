"""Engines on several ranks: the tokens of one engine, the same on all, whatever arrives when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rank_jobs
from rank_models import CONFIGS, DIVISIBLE, LLAMA, VOCAB, whole_model
from rank_pool import RankPool

from slipstream.generator.requests import Request
from slipstream.models.flat import FlatParameters


def requests(count: int, *, temperature: float = 1.0, max_new_tokens: int = 24) -> list[Request]:
    """Prompts of 3, 10, 17, ... tokens modulo 29."""
    random = np.random.default_rng(0)
    return [
        Request(
            ordinal=ordinal,
            sample=0,
            prompt_tokens=random.integers(2, VOCAB, 3 + 7 * ordinal % 29).astype(np.int32),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        for ordinal in range(count)
    ]


def assert_same_bits(left: rank_jobs.Tokens, right: rank_jobs.Tokens) -> None:
    assert left.keys() == right.keys()
    for key, (tokens, logprobs, spans, reason) in left.items():
        assert (tokens, logprobs.tobytes(), spans, reason) == (right[key][0], right[key][1].tobytes(), *right[key][2:])


def assert_same_tokens(left: rank_jobs.Tokens, right: rank_jobs.Tokens) -> None:
    """And logprobs up to rounding."""
    assert left.keys() == right.keys()
    for key, (tokens, logprobs, spans, reason) in left.items():
        assert (tokens, spans, reason) == (right[key][0], *right[key][2:]), key
        np.testing.assert_allclose(logprobs, right[key][1], rtol=0, atol=1e-4)


def one_engine(config, batch: list[Request], *, swap_at: int | None = None) -> rank_jobs.Tokens:
    model = whole_model(config)
    weights = FlatParameters(model)
    engine = rank_jobs.new_engine(model)
    engine.submit(batch)
    finished = []
    step = 0
    while not engine.is_idle:
        if step == swap_at:
            weights.rebind(FlatParameters(whole_model(config, seed=1)).flat)
            engine.set_version(1)
        finished += engine.step()
        step += 1
    return rank_jobs.collected(finished)


@pytest.mark.parametrize(
    ("case", "world"), [("llama", 2), ("llama", 4), ("qwen3", 4), ("gpt_neox", 2), ("gpt2", 2), ("mistral", 2)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_those_of_one_engine(ranks: RankPool, case: str, world: int, temperature: float) -> None:
    config, batch = CONFIGS[case], requests(6, temperature=temperature)
    by_rank = ranks.run(rank_jobs.generate, config, batch, False, world=world)
    for tokens in by_rank[1:]:
        assert_same_bits(tokens, by_rank[0])
    expected = one_engine(config, batch)
    assert len({tuple(tokens) for tokens, *_ in expected.values()}) == len(batch)
    assert_same_tokens(by_rank[0], expected)


@pytest.mark.parametrize("world", [2, 4])
def test_pages_hold_a_ranks_heads(ranks: RankPool, world: int) -> None:
    batch = requests(6, temperature=0.0)
    by_rank = ranks.run(rank_jobs.generate, LLAMA, batch, False, True, world=world)
    for tokens in by_rank[1:]:
        assert_same_bits(tokens, by_rank[0])
    assert_same_tokens(by_rank[0], one_engine(LLAMA, batch))


@pytest.mark.parametrize(("config", "world"), [(LLAMA, 2), (DIVISIBLE, 3), (LLAMA, 4)])
def test_in_fixed_order_a_completion_does_not_depend_on_its_neighbours(ranks: RankPool, config, world: int) -> None:
    crowd = requests(12)
    [together, *_] = ranks.run(rank_jobs.generate, config, crowd, True, world=world)
    for request in crowd[::5]:
        [alone, *_] = ranks.run(rank_jobs.generate, config, [request], True, world=world)
        assert_same_bits(alone, {key: together[key] for key in alone})


@pytest.mark.parametrize("world", [2, 4])
def test_a_swap_happens_at_the_first_step_at_which_all_have_staged(ranks: RankPool, world: int) -> None:
    batch = requests(5)
    staged = [{7: 1}, {9: 1}, {6: 1}, {2: 1}]
    by_rank = ranks.run(rank_jobs.swap, LLAMA, batch, [0] * 4, staged, world=world)
    assert [committed for _, committed in by_rank] == [[(1, 9)]] * world
    for tokens, _ in by_rank[1:]:
        assert_same_bits(tokens, by_rank[0][0])
    expected = one_engine(LLAMA, batch, swap_at=9)
    assert any(len(spans) == 2 for _, _, spans, _ in expected.values())
    assert_same_tokens(by_rank[0][0], expected)


def test_a_version_that_a_rank_has_skipped_is_not_committed(ranks: RankPool) -> None:
    staged = [{3: 2}, {2: 1, 8: 2}]
    by_rank = ranks.run(rank_jobs.swap, LLAMA, requests(2), [0] * 2, staged, world=2)
    assert [committed for _, committed in by_rank] == [[(2, 8)]] * 2


def test_requests_start_when_all_ranks_have_them(ranks: RankPool) -> None:
    batch = requests(5)
    by_rank = ranks.run(rank_jobs.swap, LLAMA, batch, [0, 4, 11, 3], [{}] * 4, world=4)
    for tokens, _ in by_rank[1:]:
        assert_same_bits(tokens, by_rank[0][0])
    assert_same_tokens(by_rank[0][0], one_engine(LLAMA, batch))  # a completion does not depend on when it starts


def test_time_limits_go_by_the_slowest_clock(ranks: RankPool) -> None:
    batch = [replace(request, time_limit_s=10.0) for request in requests(3)]
    by_rank = ranks.run(rank_jobs.time_limits, LLAMA, batch, [5.0, 1.0], world=2)
    assert_same_bits(*by_rank)
    assert {reason for *_, reason in by_rank[0].values()} == {"deadline"}
    assert {len(tokens) for tokens, *_ in by_rank[0].values()} <= {10, 11}


def test_one_rank_is_enough_to_pause_and_to_stop_all(ranks: RankPool) -> None:
    by_rank = ranks.run(rank_jobs.pause_and_stop, LLAMA, requests(3), world=4)
    assert by_rank[0] == [(0, 3)] * 4 + [(3, 0)] * 5
    assert all(seen == by_rank[0] for seen in by_rank)


def test_ranks_that_do_not_do_the_same_are_told(ranks: RankPool) -> None:
    one, two = requests(2)
    for other in (
        [two],
        [replace(one, temperature=0.5)],
        [replace(one, prompt_tokens=one.prompt_tokens[::-1].copy())],
    ):
        for error in ranks.run(rank_jobs.diverge, LLAMA, [[one], other], [7, 7], world=2):
            assert "no longer do the same" in error
            assert "at step 0" in error
    for error in ranks.run(rank_jobs.diverge, LLAMA, [[one, two]] * 2, [7, 8], world=2):
        assert "no longer do the same" in error


@pytest.fixture
def frail_ranks(tmp_path: Path) -> Iterator[RankPool]:
    """Ranks that wait for each other no longer than two seconds."""
    pool = RankPool(2, tmp_path, timeout_s=2.0)
    yield pool
    pool.close()


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_rank_is_an_error_on_the_others_within_the_timeout(frail_ranks: RankPool, how: str) -> None:
    [(status, value), (last, _)] = frail_ranks.outcomes(rank_jobs.lose, LLAMA, requests(2), how, world=2)
    assert last == ("died" if how == "dies" else "done")
    assert status == "done", value
    error, after_s = value
    assert "a collective of the ranks that run one model failed" in error
    assert "seen by rank 0 of 2" in error
    assert after_s < 2.0 + 3.0  # on a machine that has other things to do
