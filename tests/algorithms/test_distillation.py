"""Divergences from a teacher: golden values, limits, what merging tokens does to them, and TRL's own code."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import evaluate, random_inputs

from slipstream.algorithms.distillation import LEAST_LOGPROB, coarse_logprobs, divergences, likeliest
from slipstream.algorithms.segments import sum_before
from slipstream.core.errors import ShapeError

TRL = json.loads((Path(__file__).parents[1] / "data" / "trl_gkd.json").read_text(encoding="utf-8"))
P, Q = [0.7, 0.2, 0.1], [0.25, 0.25, 0.5]  # teacher, policy

rows = st.tuples(st.integers(1, 4), st.integers(2, 9), st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 20.0]))
alphas = st.sampled_from([0.0, 1e-3, 0.3, 0.5, 1.0])


def drawn(shape: tuple[int, int, int, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of policy and teacher, float64 [N, V]."""
    count, size, seed, spread = shape
    rng = np.random.default_rng(seed)
    policy, teacher = (torch.from_numpy(spread * rng.normal(size=(count, size))) for _ in range(2))
    return policy, teacher


def logs(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def by_hand(policy: list[float], teacher: list[float], alpha: float) -> float:
    if alpha in (0.0, 1.0):
        return kl(policy, teacher) if alpha else kl(teacher, policy)
    mixture = [alpha * p + (1 - alpha) * q for p, q in zip(teacher, policy, strict=True)]
    return alpha * kl(teacher, mixture) + (1 - alpha) * kl(policy, mixture)


@pytest.mark.parametrize(("alpha", "golden"), [(1.0, 0.603100), (0.0, 0.515161), (0.5, 0.129654), (0.25, 0.095538)])
def test_golden_divergences(alpha: float, golden: float) -> None:
    assert by_hand(Q, P, alpha) == pytest.approx(golden, abs=1e-6)
    assert divergences(logs(Q), logs(P), alpha).item() == pytest.approx(golden, abs=1e-6)


@given(rows, alphas)
@settings(max_examples=80, deadline=None)
def test_they_are_never_negative_and_nothing_where_both_agree(shape: tuple[int, int, int, float], alpha: float) -> None:
    policy, teacher = drawn(shape)
    found = divergences(policy.log_softmax(-1), teacher.log_softmax(-1), alpha)
    assert (found > -1e-12).all()
    expected = [
        by_hand(q, p, alpha) for q, p in zip(policy.softmax(-1).tolist(), teacher.softmax(-1).tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    leaf = policy.clone().requires_grad_()
    same = divergences(leaf.log_softmax(-1), policy.log_softmax(-1), alpha)
    (grad,) = torch.autograd.grad(same.sum(), leaf)
    assert same.abs().max() < 1e-12
    assert grad.abs().max() < 1e-12


@given(rows)
@settings(max_examples=40, deadline=None)
def test_the_ends_of_alpha_are_the_two_kls(shape: tuple[int, int, int, float]) -> None:
    policy, teacher = (logits.clamp(-3, 3).log_softmax(-1) for logits in drawn(shape))
    small = 1e-6
    torch.testing.assert_close(
        divergences(policy, teacher, small) / small, divergences(policy, teacher, 0.0), rtol=1e-2, atol=1e-8
    )
    torch.testing.assert_close(
        divergences(policy, teacher, 1 - small) / small, divergences(policy, teacher, 1.0), rtol=1e-2, atol=1e-8
    )


@given(rows, alphas, st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_merged_tokens_never_add_to_a_divergence(shape: tuple[int, int, int, float], alpha: float, top_k: int) -> None:
    """The data processing inequality; with all tokens apart it is the whole divergence, with its gradient."""
    policy, teacher = drawn(shape)
    top_k = min(top_k, policy.shape[1])
    tokens = likeliest(teacher, top_k)

    def read(coarse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = policy.clone().requires_grad_()
        both = [coarse_logprobs(z, tokens) if coarse else z.log_softmax(-1) for z in (leaf, teacher)]
        found = divergences(both[0], both[1], alpha)
        return found.detach(), torch.autograd.grad(found.sum(), leaf)[0]

    (merged, merged_grad), (whole, whole_grad) = read(True), read(False)
    assert (merged > -1e-12).all()
    assert (merged <= whole + 1e-9).all()
    assert merged_grad.isfinite().all()
    if top_k == policy.shape[1]:
        torch.testing.assert_close(merged, whole, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(merged_grad, whole_grad, rtol=1e-9, atol=1e-12)


def test_the_rest_is_the_sum_of_the_others_however_small() -> None:
    logits = torch.tensor([[40.0, 0.0, -1.0, 39.0, -2.0], [0.0, 1.0, 2.0, 3.0, 4.0]])
    tokens = torch.tensor([[0, 3], [1, 4]])
    found = coarse_logprobs(logits, tokens)
    whole = logits.double().log_softmax(-1)
    rest = torch.stack([whole[0, [1, 2, 4]].logsumexp(0), whole[1, [0, 2, 3]].logsumexp(0)])
    expected = torch.cat([whole.gather(1, tokens), rest[:, None]], 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert rest[0] < -39  # 1 - sum of float32 would be 0 here
    assert coarse_logprobs(logits, torch.arange(5).expand(2, 5))[:, -1].tolist() == [LEAST_LOGPROB] * 2


def test_the_likeliest_come_by_id() -> None:
    assert likeliest(torch.tensor([[1.0, 5.0, 3.0, 4.0]]), 3).tolist() == [[1, 2, 3]]


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="same outcomes"):
        divergences(torch.zeros(2, 3), torch.zeros(2, 4), 1.0)


@pytest.mark.parametrize("case", TRL["cases"], ids=lambda one: f"{one['beta']} at {one['temperature']}")
def test_agrees_with_trl(case: dict[str, float]) -> None:
    """GKDTrainer.generalized_jsd_loss, by scripts/record_trl_gkd.py: its mean over counted tokens, and gradient."""
    policy = torch.tensor(TRL["student"], dtype=torch.float64).flatten(0, 1).requires_grad_()
    teacher = torch.tensor(TRL["teacher"], dtype=torch.float64).flatten(0, 1)
    at = case["temperature"]
    found = divergences((policy / at).log_softmax(-1), (teacher / at).log_softmax(-1), case["beta"])
    counted = torch.tensor(TRL["mask"]).flatten().bool()
    loss = found[counted].mean()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-10)
    (grad,) = torch.autograd.grad(loss, policy)
    expected = torch.tensor(case["grad"], dtype=torch.float64).flatten(0, 1)
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


# The loss over them


def test_on_policy_every_weight_is_one() -> None:
    inputs = random_inputs([3, 1, 4])
    inputs = type(inputs)(**vars(inputs) | {"behaviour_logprobs": inputs.policy_logprobs})
    plain, weighed = (evaluate("distill", inputs, weight=weight) for weight in ("none", "prefix"))
    assert plain[0] == weighed[0]
    assert torch.equal(plain[1], weighed[1])
    assert weighed[2]["teacher_weight"] == 1.0
    assert weighed[2]["clipped_frac"] == 0.0


def test_sums_before_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, math.nan, 4.0, 5.0, 6.0])
    mask = torch.tensor([True, True, False, True, True, True])
    assert sum_before(values, mask, torch.tensor([0, 0, 0, 0, 1, 1])).tolist() == [0, 1, 3, 3, 0, 5]
    assert sum_before(values[:0], mask[:0], torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_prefix_weights_make_the_mean_that_of_the_policys_own_states() -> None:
    """Two steps of two actions: all four completions of the behaviour policy, each counted by its probability."""
    mu, pi = torch.tensor([[0.8, 0.2], [0.5, 0.5], [0.3, 0.7]]), torch.tensor([[0.4, 0.6], [0.1, 0.9], [0.6, 0.4]])
    distance = torch.tensor([0.1, 0.7, 2.0], dtype=torch.float64)  # at first, behind action 0, behind action 1
    expected = distance[0] + pi[0].double() @ distance[1:]
    found = {"none": 0.0, "prefix": 0.0}
    for first in range(2):
        for second in range(2):
            chosen = [(0, first), (1 + first, second)]
            likely = math.prod(mu[state, action].item() for state, action in chosen)
            logprobs = [torch.tensor([of[s, a] for s, a in chosen], dtype=torch.float64).log() for of in (pi, mu)]
            inputs = type(random_inputs([2]))(
                policy_logprobs=logprobs[0],
                behaviour_logprobs=logprobs[1],
                teacher_divergences=distance[[0, 1 + first]],
                advantages=None,
                mask=torch.ones(2, dtype=torch.bool),
                segment_ids=torch.zeros(2, dtype=torch.int64),
                num_units=1,
            )
            for weight in found:
                value = evaluate("distill", inputs, num_units=1, weight=weight, max_ratio=math.inf)[0]
                found[weight] += likely * value
    assert found["prefix"] == pytest.approx(expected.item(), rel=1e-6)
    assert found["none"] == pytest.approx((distance[0] + mu[0].double() @ distance[1:]).item(), rel=1e-6)
