"""Sampling: exact distribution, behaviour logprobs of what was sampled, greedy rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.generator.noise import uniform
from slipstream.generator.sampler import sample_tokens


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_frequencies_match_the_reported_logprobs(temperature: float) -> None:
    num_draws, vocab = 40_000, 20
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 1.5
    uniforms = uniform(np.full(num_draws, 99, dtype=np.uint64), np.arange(num_draws))
    temperatures = np.full(num_draws, temperature, dtype=np.float32)
    tokens, logprobs = sample_tokens(logits.expand(num_draws, vocab), temperatures, uniforms)
    reference = torch.log_softmax(logits.double() / temperature, -1)
    assert (logprobs - reference[tokens]).abs().max() < 1e-6
    expected = reference.exp().numpy() * num_draws
    observed = np.bincount(tokens.numpy(), minlength=vocab)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001


def test_greedy_rows_take_the_argmax_with_its_logprob_at_temperature_one() -> None:
    logits = torch.randn(16, 30, generator=torch.Generator().manual_seed(1))
    temperatures = np.array([0.0, 1.0, 0.7, 0.0] * 4, dtype=np.float32)
    uniforms = np.linspace(0.01, 0.99, 16)
    tokens, logprobs = sample_tokens(logits, temperatures, uniforms)
    greedy = temperatures == 0.0
    assert torch.equal(tokens[greedy], logits[greedy].argmax(-1))
    assert torch.equal(logprobs[greedy], torch.log_softmax(logits, -1)[greedy].gather(1, tokens[greedy, None])[:, 0])
    everything_greedy, _ = sample_tokens(logits, np.zeros(16, dtype=np.float32), uniforms)
    assert torch.equal(everything_greedy, logits.argmax(-1))


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).repeat(4, 1)
    uniforms = np.array([2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-52, 1 - 2.0**-53])
    tokens, _ = sample_tokens(logits, np.ones(4, dtype=np.float32), uniforms)
    assert tokens.tolist() == [1, 1, 3, 3]
