"""The trainer's head over tensor-parallel ranks: each computes its rows of the vocabulary, and none gathers logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rank_jobs
import torch
from drawn import drawn
from hypothesis import strategies as st
from rank_jobs import HeadCase
from rank_models import CONFIGS
from rank_pool import RankPool
from sharded_jobs import sequences_of
from torch import Tensor

from slipstream.batching.collate import collate
from slipstream.models.head import head_logprobs

N, K = 9, 6


def case_of(seed: int, vocab_size: int, *, is_cut: bool, temperature: float, at_once: int, dtype: torch.dtype):
    """Kept sets of 1 to 5 tokens with the target among them, in no order, filled up with -1."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(rows, K, generator=generator).to(dtype) for rows in (N, vocab_size))
    targets = torch.randint(vocab_size, (N,), generator=generator)
    kept = torch.full((N, 5), -1)
    for row, target in enumerate(targets.tolist()):
        others = [j for j in torch.randperm(vocab_size, generator=generator).tolist() if j != target]
        own = [*others, target][-int(torch.randint(1, 6, (), generator=generator)) :]
        kept[row, : len(own)] = torch.tensor(own)
    grads = torch.randn(N, generator=generator), torch.randn(N, generator=generator)
    return HeadCase(hidden, weight, targets, kept if is_cut else None, grads, temperature, at_once)


def in_float64(logits: Tensor, case: HeadCase) -> tuple[Tensor, Tensor]:
    """By torch's log_softmax over all logits, or over each row's own set."""
    logprobs = (logits / case.temperature).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    chosen = logprobs.gather(1, case.targets[:, None]).squeeze(1)
    if case.kept is None:
        return chosen, entropies
    sets = [row[row >= 0] for row in case.kept]
    whole = [row[own].logsumexp(0) for row, own in zip(logprobs, sets, strict=True)]
    return chosen - torch.stack(whole), entropies


def joined(by_rank: list[list[Tensor]]) -> list[Tensor]:
    """What one rank would return; what all have must be the same bits."""
    for found in by_rank:
        assert all(torch.equal(one, other) for one, other in zip(found[:3], by_rank[0][:3], strict=True))
    return [*by_rank[0][:3], torch.cat([found[3] for found in by_rank])]


@drawn(
    8,
    100,
    seed=st.integers(0, 10**6),
    world=st.sampled_from([2, 4]),
    vocab_size=st.integers(6, 40),
    is_cut=st.booleans(),
    temperature=st.sampled_from([1.0, 0.7]),
    at_once=st.sampled_from([4, 100]),
    fixed_order=st.booleans(),
)
def test_values_and_gradients_are_those_of_one_rank(
    ranks: RankPool,
    seed: int,
    world: int,
    vocab_size: int,
    is_cut: bool,
    temperature: float,
    at_once: int,
    fixed_order: bool,
) -> None:
    case = case_of(seed, vocab_size, is_cut=is_cut, temperature=temperature, at_once=at_once, dtype=torch.float32)
    found = joined(ranks.run(rank_jobs.head, case, fixed_order, world=world))
    hidden, weight = (one.clone().requires_grad_() for one in (case.hidden, case.weight))
    alone = head_logprobs(hidden, weight, case.targets, case.kept, temperature=temperature, at_once=at_once)
    one_rank = [*alone, *torch.autograd.grad(alone, (hidden, weight), case.grads)]
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    right = in_float64(exact[0] @ exact[1].t(), case)
    oracle = [*right, *torch.autograd.grad(right, exact, [grad.double() for grad in case.grads])]
    for ours, other, true in zip(found, one_rank, oracle, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.double(), true, atol=2e-5, rtol=2e-5)


def test_in_bfloat16_the_gradient_of_states_is_rounded_once(ranks: RankPool) -> None:
    """After the sum over ranks: each number of logits' gradients is rounded by 2^-8 of itself, and the result is."""
    case = case_of(3, 35, is_cut=True, temperature=0.7, at_once=4, dtype=torch.bfloat16)
    found = joined(ranks.run(rank_jobs.head, case, False, world=4))
    exact = [one.double().requires_grad_() for one in (case.hidden, case.weight)]
    logits = exact[0] @ exact[1].t()
    right, grads = in_float64(logits, case), [grad.double() for grad in case.grads]
    of_hidden, of_weight, of_logits = torch.autograd.grad(right, (*exact, logits), grads)
    for ours, true in zip(found[:2], right, strict=True):
        torch.testing.assert_close(ours.double(), true, atol=1e-5, rtol=1e-5)
    terms = of_logits.abs() @ exact[1].abs(), of_logits.abs().t() @ exact[0].abs()
    for mine, true, term in zip(found[2:], (of_hidden, of_weight), terms, strict=True):
        assert mine.dtype == torch.bfloat16
        assert ((mine.double() - true).abs() <= 2**-8 * (term + true.abs()) + 1e-5).all()


@pytest.mark.parametrize("case", ["llama", "llama_tied"])
def test_no_rank_has_all_logits(ranks: RankPool, case: str) -> None:
    """The largest tensor of the head's two passes is a rank's share of logits; ranks gather none."""
    config = replace(CONFIGS[case], vocab_size=1001)
    [microbatch] = collate(sequences_of(0, config.vocab_size)[:6], 256)
    share = max(501 * microbatch.num_targets, config.vocab_size * config.hidden_size)
    assert share < 1001 * microbatch.num_targets
    for most, collectives in ranks.run(rank_jobs.largest_tensor, config, microbatch, world=2):
        assert most <= share
        assert collectives == {"allreduce_"}
