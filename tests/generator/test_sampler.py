"""Sampling: exact distributions, their logprobs, what the cuts keep, and that a row depends on itself alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream.generator.noise import uniform
from slipstream.generator.sampler import BLOCK, MIN_BLOCKS, SampledTokens, SamplingPlan, SamplingRows, sample_tokens

LARGE = 2 * MIN_BLOCKS * BLOCK + 37  # drawn in two steps, with a short last block


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


Setting = float | np.ndarray
OFF: dict[str, Setting] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "keep": False}
DTYPES = {"temperature": np.float32, "top_k": np.int64, "top_p": np.float32, "min_p": np.float32, "keep": np.bool_}


def sample(logits: Tensor, uniforms: np.ndarray, **settings: Setting) -> SampledTokens:
    """`sample_tokens`, the same settings in all rows or an array of them."""
    assert settings.keys() <= OFF.keys()
    arrays: dict[str, np.ndarray] = {
        name: np.broadcast_to(np.asarray(value, dtype=DTYPES[name]), len(logits)).copy()
        for name, value in (OFF | settings).items()
    }
    temperatures, top_k, top_p, min_p, keep = arrays.values()
    rows = SamplingRows(*(torch.from_numpy(values) for values in (temperatures, top_k, top_p, min_p)))
    plan = SamplingPlan.of(temperatures, top_k, top_p, min_p, keep)
    return sample_tokens(logits, rows, torch.from_numpy(uniforms), plan)


def sets_of(sampled: SampledTokens) -> list[list[int]]:
    assert sampled.kept is not None
    return [[token for token in row if token >= 0] for row in sampled.kept.tolist()]


def warped(logits: Tensor, *, temperature: float, top_k: float, top_p: float, min_p: float) -> Tensor:
    """Logits after the processors of transformers, in its order; -inf where a token was cut."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(TopKLogitsWarper(int(top_k)))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    return processors(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone())  # type: ignore[arg-type]


GRID = list(itertools.product([0.6, 1.0, 1.7], [0, 3, 20], [1.0, 0.7], [0.0, 0.1]))


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), GRID)
def test_frequencies_match_the_reported_logprobs(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    num_draws, vocab_size = 20_000, 50
    logits = random_logits(1, vocab_size)
    uniforms = uniform(np.full(num_draws, 99, dtype=np.uint64), np.arange(num_draws))
    cut: dict[str, float] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampled = sample(logits.expand(num_draws, -1), uniforms, temperature=temperature, **cut)
    expected = torch.log_softmax(warped(logits, temperature=temperature, **cut)[0].double(), -1)
    assert (sampled.logprobs - expected[sampled.tokens]).abs().max() < 1e-6  # -inf for a token that was cut
    wanted = expected.exp().numpy() * num_draws
    observed = np.bincount(sampled.tokens.numpy(), minlength=vocab_size)
    is_cell = wanted >= 5
    cells = np.append(wanted[is_cell], wanted[~is_cell].sum()), np.append(observed[is_cell], observed[~is_cell].sum())
    chi_square = sum((seen - want) ** 2 / want for want, seen in zip(*cells, strict=True) if want > 0)
    freedom = np.count_nonzero(cells[0]) - 1
    assert chi_square < freedom + 4.5 * np.sqrt(2 * freedom) + 6  # beyond p = 1e-4 for any of these


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), [case for case in GRID if case[1]])
@pytest.mark.parametrize("vocab_size", [50, 60 * BLOCK + 5])
def test_kept_sets_are_those_of_transformers(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(16, vocab_size, seed=3)
    cut: dict[str, float] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    sampled = sample(logits, np.linspace(0.01, 0.99, 16), temperature=temperature, keep=True, **cut)
    expected = warped(logits, temperature=temperature, **cut)
    sets = sets_of(sampled)
    assert sets == [torch.isfinite(row).nonzero()[:, 0].tolist() for row in expected]
    logprobs = torch.log_softmax(expected.double(), -1).gather(1, sampled.tokens[:, None])[:, 0]
    assert (sampled.logprobs - logprobs).abs().max() < 1e-6


def test_probabilities_over_a_kept_set_sum_to_one() -> None:
    logits = random_logits(1, 50, seed=5)
    uniforms = (np.arange(4000) + 0.5) / 4000
    sampled = sample(logits.expand(4000, -1), uniforms, temperature=0.9, top_k=12, top_p=0.9, min_p=0.01, keep=True)
    probability = dict(zip(sampled.tokens.tolist(), sampled.logprobs.exp().tolist(), strict=True))
    assert sorted(probability) == sets_of(sampled)[0]
    assert sum(probability.values()) == pytest.approx(1.0, abs=1e-6)


def test_of_equals_at_a_boundary_the_lower_ids_stay() -> None:
    logits = torch.tensor([[0.0, 1.0, -0.0, 0.0, 2.0, 0.0]])
    assert sets_of(sample(logits, np.array([0.5]), top_k=4, keep=True)) == [[0, 1, 2, 4]]  # -0 equals 0
    even = torch.zeros(1, 3 * MIN_BLOCKS * BLOCK)
    assert sets_of(sample(even, np.array([0.999]), top_k=3, keep=True)) == [[0, 1, 2]]
    assert sets_of(sample(even, np.array([0.5]), top_k=8, top_p=0.5, keep=True)) == [[0, 1, 2, 3]]
    assert sets_of(sample(even, np.array([0.5]), top_k=8, min_p=1.0, keep=True)) == [list(range(8))]


def test_the_last_tokens_of_a_vocabulary_that_ends_within_a_block_count_once() -> None:
    logits = random_logits(4, 60 * BLOCK + 5, seed=2, scale=1.0)
    logits[:, -2:] = torch.tensor([9.0, 10.0])
    sampled = sample(logits, np.linspace(0.01, 0.99, 4), top_k=4, keep=True)
    expected = torch.topk(logits.double(), 4)
    assert sets_of(sampled) == [sorted(row) for row in expected.indices.tolist()]
    totals = expected.values.logsumexp(-1)
    assert (sampled.logprobs - (logits.gather(1, sampled.tokens[:, None])[:, 0] - totals)).abs().max() < 1e-6


def test_without_top_p_even_the_rarest_candidates_stay() -> None:
    """Of a share that no float64 sum of all of them shows."""
    logits = torch.tensor([[0.0, -50.0, -60.0, -70.0]])
    assert sets_of(sample(logits, np.array([0.5]), top_k=3, keep=True)) == [[0, 1, 2]]


def test_the_likeliest_token_always_stays() -> None:
    logits = random_logits(8, 40, seed=7)
    for cut in ({"top_p": 1e-6}, {"min_p": 1.0}, {"top_p": 1e-6, "min_p": 1.0}):
        sampled = sample(logits, np.linspace(0.01, 0.99, 8), top_k=40, keep=True, **cut)
        assert torch.equal(sampled.tokens, logits.argmax(-1))
        assert torch.equal(sampled.logprobs, torch.zeros(8))


def test_tokens_of_probability_zero_are_neither_kept_nor_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(4, 1)
    uniforms = np.array([2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-52, 1 - 2.0**-53])
    assert sample(logits, uniforms).tokens.tolist() == [1, 1, 3, 3]
    cut = sample(logits, uniforms, top_k=4, keep=True)
    assert cut.tokens.tolist() == [1, 1, 3, 3]
    assert sets_of(cut) == [[1, 3]] * 4
    large = torch.full((4, LARGE), -torch.inf)
    large[:, [BLOCK, LARGE - 1]] = 0.0
    assert sample(large, uniforms).tokens.tolist() == [BLOCK, BLOCK, LARGE - 1, LARGE - 1]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_large_vocabulary_is_drawn_exactly(temperature: float) -> None:
    """Against the running sum of all probabilities in float64, at random places and within an ulp of every boundary."""
    logits = random_logits(1, LARGE, seed=11, scale=3.0)
    probs = torch.softmax(logits.double() / temperature, -1)[0]
    cumulative = probs.cumsum(0).numpy()
    random = np.random.default_rng(0).random(1500)
    drawn = sample(logits.expand(1500, -1), random, temperature=temperature)
    expected = np.searchsorted(cumulative, random * cumulative[-1])
    clear = np.abs(cumulative[:, None] - random).min(0) > 1e-6  # float32 probabilities move boundaries by so little
    assert clear.mean() > 0.9
    assert np.array_equal(drawn.tokens.numpy()[clear], expected[clear])
    assert (drawn.logprobs - probs.log()[drawn.tokens]).abs().max() < 4e-6
    # Every token comes up, the rarest included: aim at the middle of its interval of the sampler's own sums.
    own = torch.softmax(logits / temperature, -1)[0].double().cumsum(0).numpy()
    middles = (own - np.diff(own, prepend=0.0) / 2) / own[-1]
    hit = sample(logits.expand(LARGE, -1), middles, temperature=temperature).tokens.numpy()
    wide = probs.numpy() > 1e-5  # narrower intervals lie closer to their middle than block sums are exact
    assert np.array_equal(hit[wide], np.flatnonzero(wide))


def test_a_tail_of_rare_tokens_keeps_its_probability() -> None:
    """One token of probability 1/2 before 100 000 of 5e-6 each, then 1000 of 1e-9: no mass is lost in running sums."""
    weights = torch.cat([torch.tensor([0.5]), torch.full((100_000,), 5e-6), torch.full((1000,), 1e-9)])
    logits = weights.log().unsqueeze(0)
    tail = 1e-6 / (1 + 1e-6)
    uniforms = 1.0 - tail * (np.arange(64) + 0.5) / 64
    sampled = sample(logits.expand(64, -1), uniforms)
    places = sampled.tokens.numpy()
    expected = 101_001 - 1000 * (np.arange(64) + 0.5) / 64
    assert np.abs(places - expected).max() < 100  # float32 sums of the blocks before move the tail by 1e-7 of all
    assert np.abs(np.diff(places) + 1000 / 64).max() < 2  # and change nothing in its width
    assert (sampled.logprobs.double() - np.log(1e-9 / (1 + 1e-6))).abs().max() < 4e-6
    inside = sample(logits.expand(64, -1), 0.5 + 0.499 * (np.arange(64) + 0.5) / 64)
    assert (inside.tokens < 100_001).all()
    assert len(set(inside.tokens.tolist())) == 64


@pytest.mark.parametrize("vocab_size", [30, LARGE])
def test_greedy_rows_take_the_argmax_with_its_logprob_at_temperature_one(vocab_size: int) -> None:
    logits = random_logits(16, vocab_size, seed=1)
    logits[3, [5, 17]] = 100.0  # the first of equals
    temperature = np.array([0.0, 1.0, 0.7, 0.0] * 4, dtype=np.float32)
    uniforms = np.linspace(0.01, 0.99, 16)
    expected = torch.log_softmax(logits.double(), -1).amax(-1).float()
    greedy = temperature == 0.0
    for cut in ({}, {"top_k": 4}):
        mixed = sample(logits, uniforms, temperature=temperature, **cut)
        alone = sample(logits, uniforms, temperature=0.0, **cut)
        assert torch.equal(alone.tokens, logits.argmax(-1))
        assert (alone.logprobs - expected).abs().max() < 1e-6
        assert torch.equal(mixed.tokens[greedy], alone.tokens[greedy])
        assert torch.equal(mixed.logprobs[greedy], alone.logprobs[greedy])


SETTINGS: dict[str, np.ndarray] = {
    "temperature": np.array([1.0, 0.7, 0.0, 1.0, 1.3, 1.0, 0.9, 1.0], dtype=np.float32),
    "top_k": np.array([0, 0, 5, 7, 40, 0, 16, 0]),
    "top_p": np.array([1.0, 1.0, 1.0, 1.0, 0.8, 0.9, 0.95, 1.0], dtype=np.float32),
    "min_p": np.array([0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0, 0.02], dtype=np.float32),
    "keep": np.array([False, False, False, True, True, False, True, False]),
}


@pytest.mark.parametrize("vocab_size", [72, LARGE, 100 * BLOCK])
def test_the_bits_of_a_row_depend_on_that_row_alone(vocab_size: int) -> None:
    logits = random_logits(8, vocab_size, seed=2)
    uniforms = np.random.default_rng(1).random(8)
    together = sample(logits, uniforms, **SETTINGS)
    assert [len(row) for row in sets_of(together)[:3]] == [0, 0, 0], "not cut: whole, whole, greedy"
    for row in range(8):
        alone = {name: values[row] for name, values in SETTINGS.items()}
        for num_rows in (8, 24):  # eight times the same row, and in a larger batch of strangers
            crowd = random_logits(num_rows, vocab_size, seed=9)
            crowd[:8] = logits[row]
            single = sample(crowd, np.resize(uniforms[row : row + 1], num_rows), **alone)
            assert single.tokens[0] == together.tokens[row]
            assert single.logprobs[0].view(torch.int32) == together.logprobs[row].view(torch.int32)
            if alone["keep"]:
                assert sets_of(single)[0] == sets_of(together)[row]


@pytest.mark.parametrize("vocab_size", [72, LARGE, 100 * BLOCK])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_the_logprob(vocab_size: int, bad: float) -> None:
    for place in (0, vocab_size - 1):
        logits = random_logits(8, vocab_size, seed=4)
        logits[::2, place] = bad
        for settings in ({}, {"temperature": 0.0}, {"top_k": 4}, {"top_p": 0.9}, {"top_k": 4, "top_p": 0.9}, SETTINGS):
            sampled = sample(logits, np.linspace(0.01, 0.99, 8), **settings)
            assert not torch.isfinite(sampled.logprobs[::2]).any()
            assert torch.isfinite(sampled.logprobs[1::2]).all()
            assert ((sampled.tokens >= 0) & (sampled.tokens < vocab_size)).all()
    everything = sample(torch.full((8, vocab_size), -torch.inf), np.linspace(0.01, 0.99, 8), top_k=4)
    assert not torch.isfinite(everything.logprobs).any()


def plan_of_settings(is_open: np.ndarray | None = None) -> SamplingPlan:
    temperatures, top_k, top_p, min_p, keep = SETTINGS.values()
    return SamplingPlan.of(temperatures, top_k, top_p, min_p, keep, is_open)


def test_the_plan_says_what_the_rows_ask_for() -> None:
    whole = plan_of_settings()
    assert whole == SamplingPlan(
        has_greedy=True, has_temperature=True, truncates=True, has_whole=True, num_candidates=0, num_kept=64
    )
    assert hash(whole) == hash(replace(whole))
    is_open = np.array([False, False, False, True, True, False, True, False])
    some = plan_of_settings(is_open)
    assert some == SamplingPlan(has_temperature=True, truncates=True, has_whole=False, num_candidates=64, num_kept=64)
    assert plan_of_settings(np.arange(8) == 0) == SamplingPlan()
    assert not plan_of_settings(np.zeros(8, dtype=bool)).all_greedy
