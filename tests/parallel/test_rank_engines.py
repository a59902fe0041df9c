"""Engines on several ranks: the tokens of one engine, the same on all. Whole replicas: test_replica.py."""

from __future__ import annotations

import numpy as np
import pytest
import rank_jobs
from covering import with_slow
from rank_models import CONFIGS, DIVISIBLE, LLAMA, VOCAB, whole_model
from rank_pool import RankPool

from slipstream.generator.requests import Request


def requests(count: int, *, temperature: float = 1.0, max_new_tokens: int = 16) -> list[Request]:
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


def one_engine(config, batch: list[Request]) -> rank_jobs.Tokens:
    engine = rank_jobs.new_engine(whole_model(config))
    engine.submit(batch)
    finished = []
    while not engine.is_idle:
        finished += engine.step()
    return rank_jobs.collected(finished)


@pytest.mark.parametrize(
    ("case", "world", "temperature"),
    with_slow(
        [("qwen3", 4, 0.0), ("gpt2", 2, 1.0), ("mistral", 2, 0.0)],
        [
            *(("llama", 4, 0.0), ("llama", 4, 1.0), ("qwen3", 4, 1.0), ("gpt2", 2, 0.0), ("mistral", 2, 1.0)),
            *((case, 2, temperature) for case in ("llama", "gpt_neox") for temperature in (0.0, 1.0)),
        ],
    ),
)
def test_tokens_are_those_of_one_engine(ranks: RankPool, case: str, world: int, temperature: float) -> None:
    config, batch = CONFIGS[case], requests(6, temperature=temperature)
    by_rank = ranks.run(rank_jobs.generate, config, batch, False, world=world)
    for tokens in by_rank[1:]:
        assert_same_bits(tokens, by_rank[0])
    expected = one_engine(config, batch)
    assert len({tuple(tokens) for tokens, *_ in expected.values()}) == len(batch)
    assert_same_tokens(by_rank[0], expected)


@pytest.mark.parametrize("world", with_slow([2], [4]))
def test_pages_hold_a_ranks_heads(ranks: RankPool, world: int) -> None:
    batch = requests(6, temperature=0.0)
    by_rank = ranks.run(rank_jobs.generate, LLAMA, batch, False, True, world=world)
    for tokens in by_rank[1:]:
        assert_same_bits(tokens, by_rank[0])
    assert_same_tokens(by_rank[0], one_engine(LLAMA, batch))


@pytest.mark.parametrize(("config", "world"), with_slow([(DIVISIBLE, 3)], [(LLAMA, 2), (LLAMA, 4)]))
def test_in_fixed_order_a_completion_does_not_depend_on_its_neighbours(ranks: RankPool, config, world: int) -> None:
    crowd = requests(12, max_new_tokens=12)
    [together, *_] = ranks.run(rank_jobs.generate, config, crowd, True, world=world)
    for request in crowd[::6]:
        [alone, *_] = ranks.run(rank_jobs.generate, config, [request], True, world=world)
        assert_same_bits(alone, {key: together[key] for key in alone})
