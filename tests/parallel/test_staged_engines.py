"""Engines whose model lies in pipeline stages: the tokens of one engine; each token of one version; no stage idles."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import rank_jobs
import stage_jobs as jobs
from rank_models import CONFIGS, LLAMA, MIXTURE, VOCAB, whole_model
from rank_pool import RankPool

from slipstream.core.types import VersionSpan
from slipstream.generator.requests import Request
from slipstream.models.config import TransformerConfig

DEEP = replace(LLAMA, num_layers=5, head_dim=16)


def requests(groups: int, size: int = 1, *, max_new_tokens: int = 20, top_k: int = 0) -> list[Request]:
    """Prompts of 3, 10, 17, ... tokens modulo 29, each for `size` completions that end at lengths of their own."""
    random = np.random.default_rng(0)
    prompts = [random.integers(2, VOCAB, 3 + 7 * ordinal % 29).astype(np.int32) for ordinal in range(groups)]
    return [
        Request(
            ordinal=ordinal,
            sample=sample,
            prompt_tokens=prompt,
            max_new_tokens=max_new_tokens + sample,
            top_k=top_k,
            keep_sets=top_k > 0,
        )
        for ordinal, prompt in enumerate(prompts)
        for sample in range(size)
    ]


def one_engine(config: TransformerConfig, batch: list[Request]) -> rank_jobs.Tokens:
    engine = rank_jobs.new_engine(whole_model(config), prefill_tokens=32, prefill_chunk=8)
    engine.submit(batch)
    finished = []
    while not engine.is_idle:
        finished += engine.step()
    return rank_jobs.collected(finished)


def assert_same(left: rank_jobs.Tokens, right: rank_jobs.Tokens, *, atol: float) -> None:
    """The same tokens, and logprobs to within `atol`; to the bit with 0."""
    assert left.keys() == right.keys()
    for key, (tokens, logprobs, spans, reason) in left.items():
        assert (tokens, spans, reason) == (right[key][0], *right[key][2:]), key
        np.testing.assert_allclose(logprobs, right[key][1], rtol=0, atol=atol)
        assert atol or logprobs.tobytes() == right[key][1].tobytes()


@pytest.mark.parametrize(
    ("config", "world", "stages"),
    [
        (DEEP, 2, 2),
        (DEEP, 4, 4),
        (DEEP, 4, 2),
        (CONFIGS["gpt2"], 2, 2),
        (CONFIGS["qwen2"], 2, 2),
        (MIXTURE, 2, 2),
    ],
    ids=["two", "four", "two_of_two", "gpt2", "tied", "mixture"],
)
def test_tokens_are_those_of_one_engine(
    ranks: RankPool, config: TransformerConfig, world: int, stages: int
) -> None:
    """To the bit where every layer is whole: more sequences than rows, shared prompts in chunks, rows that are lost."""
    batch = requests(8, 3)
    by_rank = ranks.run(jobs.generate, config, batch, stages, world=world)
    for tokens in by_rank[1:]:
        assert_same(tokens, by_rank[0], atol=0)
    assert_same(by_rank[0], one_engine(config, batch), atol=0 if world == stages else 1e-4)


@pytest.mark.parametrize("stages", [2, 4])
def test_pages_hold_a_stages_layers(ranks: RankPool, stages: int) -> None:
    """In so few of them that rows wait for one."""
    batch = requests(8, 3)
    by_rank = ranks.run(generate_in_pages, DEEP, batch, stages, world=stages)
    for tokens in by_rank[1:]:
        assert_same(tokens, by_rank[0], atol=0)
    assert_same(by_rank[0], one_engine(DEEP, batch), atol=1e-5)


def generate_in_pages(*args) -> rank_jobs.Tokens:
    return jobs.generate(*args, paged=True)
