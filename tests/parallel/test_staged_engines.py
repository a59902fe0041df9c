"""Engines whose model lies in pipeline stages: the tokens of one engine; each token of one version; no stage idles."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import rank_jobs
import stage_jobs as jobs
from covering import with_slow
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
        pytest.param(DEEP, 2, 2, marks=pytest.mark.slow),
        (DEEP, 4, 4),
        pytest.param(DEEP, 4, 2, marks=pytest.mark.slow),
        (CONFIGS["gpt2"], 2, 2),
        (CONFIGS["qwen2"], 2, 2),
        (MIXTURE, 2, 2),
    ],
    ids=["two", "four", "two_of_two", "gpt2", "tied", "mixture"],
)
def test_tokens_are_those_of_one_engine(ranks: RankPool, config: TransformerConfig, world: int, stages: int) -> None:
    """To the bit where every layer is whole: more sequences than rows, shared prompts in chunks."""
    batch = requests(8, 3, max_new_tokens=8)
    by_rank = ranks.run(jobs.generate, config, batch, stages, world=world)
    for tokens in by_rank[1:]:
        assert_same(tokens, by_rank[0], atol=0)
    assert_same(by_rank[0], one_engine(config, batch), atol=0 if world == stages else 1e-4)


@pytest.mark.parametrize("stages", with_slow([2], [4]))
def test_pages_hold_a_stages_layers(ranks: RankPool, stages: int) -> None:
    """So few of them that rows lose theirs; kept sets travel with tokens."""
    batch = requests(8, 3, top_k=5)
    by_rank = ranks.run(partial(jobs.generate, paged=True), DEEP, batch, stages, world=stages)
    for tokens in by_rank[1:]:
        assert_same(tokens, by_rank[0], atol=0)
    assert_same(by_rank[0], one_engine(DEEP, batch), atol=1e-5)


@pytest.mark.parametrize(("paged", "mode"), with_slow([(False, "recompute"), (True, "keep")], [(False, "keep")]))
def test_every_token_is_of_the_version_that_it_says(ranks: RankPool, paged: bool, mode: str) -> None:
    """Against a loop over positions in float64, which has the weights of each token's version. Rows lose their keys,
    too, which are made again by the present weights.
    """
    batch = requests(3, 2)
    lost = () if mode == "keep" else (20, 31)
    swaps = [jobs.Swap(16, 1, mode), jobs.Swap(25, 2, mode)]  # type: ignore[arg-type]
    job = partial(jobs.generate, paged=paged, swaps=swaps, losses=lost, options={"stop_token_ids": []})
    [found, other] = ranks.run(job, DEEP, batch, 2, world=2)
    assert_same(other, found, atol=0)
    seen = set[int]()
    for request in batch:
        tokens, logprobs, spans, _ = found[request.ordinal, request.sample]
        versions = versions_of(spans, len(tokens))
        seen |= set(versions)
        assert (versions[0], versions[-1]) == (0, 2)
        if mode == "keep":
            expected = jobs.reread(DEEP, request, tokens, versions)
        else:
            each = [jobs.reread(DEEP, request, tokens, [version] * len(tokens)) for version in range(3)]
            expected = np.choose(versions, each)
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)
    assert seen == {0, 1, 2}


def versions_of(spans: tuple[VersionSpan, ...], count: int) -> list[int]:
    """The version of each of `count` tokens."""
    ends = [*(span.start for span in spans[1:]), count]
    return [span.version for span, end in zip(spans, ends, strict=True) for _ in range(end - span.start)]


def test_no_stage_idles_but_while_the_pipeline_fills(ranks: RankPool) -> None:
    """One prompt in a pass of its own, and 12 tokens in each of P groups: P - 1 ticks of n + P - 1 without a pass."""
    prompt = np.arange(2, 10).astype(np.int32)
    batch = [Request(ordinal=0, sample=n, prompt_tokens=prompt, max_new_tokens=12) for n in range(16)]
    for stages in (2, 4):
        for ticks, busy in ranks.run(jobs.busy_ticks, DEEP, batch, stages, world=stages):
            assert (ticks, busy) == (1 + 12 * stages + stages - 1, 1 + 12 * stages)


def test_a_stage_holds_its_layers_alone(ranks: RankPool) -> None:
    """And half of the keys and values of an even model."""
    config = replace(DEEP, num_layers=4)
    weights, kv = zip(*ranks.run(jobs.held, config, 2, world=2), strict=True)
    assert sum(weights) == sum(p.nbytes for p in whole_model(config).parameters())
    per_layer = 2 * 4 * 128 * config.num_kv_heads * config.head_dim
    assert kv == (16 * 2 * per_layer,) * 2
