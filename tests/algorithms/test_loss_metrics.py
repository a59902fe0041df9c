"""What losses report about their clips, and ratios close to where they are cut off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import POLICY_NAMES, evaluate, random_inputs

from slipstream.algorithms.losses import LossInputs
from slipstream.algorithms.ratios import sequence_ratios
from slipstream.observe.catalogue import described

# Four completions of one token each: ratios 4, 4, 1/2 and 1; the large ones with advantages of both signs.
RATIOS = torch.tensor([4.0, 4.0, 0.5, 1.0], dtype=torch.float64)
INPUTS = LossInputs(
    policy_logprobs=RATIOS.log() - 3.0,
    behaviour_logprobs=torch.full((4,), -3.0, dtype=torch.float64),
    proximal_logprobs=torch.full((4,), -3.0, dtype=torch.float64) + torch.tensor([2.0, 0.0, 0.0, 0.0]).double(),
    advantages=torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64),
    mask=torch.ones(4, dtype=torch.bool),
    segment_ids=torch.arange(4),
    num_units=0,
)


def test_divergences_are_those_of_the_sampler_from_the_policy():
    """KL(behaviour || policy) from the sampler's own tokens: the mean of -log r is below 0 where the policy gained."""
    _, _, metrics = evaluate("reinforce", INPUTS)
    log_ratios = [math.log(4), math.log(4), -math.log(2), 0.0]
    assert metrics["kl_k1"] == pytest.approx(-sum(log_ratios) / 4)
    assert metrics["kl_k2"] == pytest.approx(sum(x**2 for x in log_ratios) / 8)
    assert metrics["kl_k3"] == pytest.approx(sum(math.exp(x) - 1 - x for x in log_ratios) / 4)


def test_the_dual_clip_counts_only_what_it_holds_back():
    """A large ratio with a positive advantage is the ordinary clip's."""
    _, grad, metrics = evaluate("ppo", INPUTS, dual_clip=3.0)
    assert metrics["dual_clipped_frac"] == 1 / 4
    assert metrics["clipped_frac"] == 2 / 4
    assert (grad == 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"max_ratio": 2.0}, 2 / 4),  # both large ones
        ({"max_ratio": 100.0, "eps_low": 0.2, "eps_high": 0.2}, 2 / 4),  # one above with A > 0, one below with A < 0
        ({"max_ratio": 2.0, "eps_low": 0.2, "eps_high": 0.2}, 3 / 4),  # either
    ],
)
def test_aipo_counts_what_either_clip_holds_back(params, expected):
    assert evaluate("aipo", INPUTS, **params)[2]["clipped_frac"] == expected


def test_decoupled_ppo_counts_corrections_above_the_cap():
    _, _, metrics = evaluate("decoupled_ppo", INPUTS, max_ratio=5.0)
    assert metrics["correction_truncated_frac"] == 1 / 4
    assert metrics["correction_ratio_max"] == pytest.approx(math.e**2)
    assert metrics["correction_ratio"] == pytest.approx((math.e**2 + 3) / 4)
    assert metrics["proximal_ratio"] == pytest.approx((4 / math.e**2 + 4 + 0.5 + 1) / 4)


def test_the_value_clip_counts_only_what_it_holds_back():
    """All moved by 1 from 0, further than the clip; only the one that moved towards its return loses its gradient."""
    ones = torch.ones(4, dtype=torch.float64)
    returns = torch.tensor([2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    inputs = replace(INPUTS, values=ones, anchor_values=0 * ones, returns=returns)
    _, grad, metrics = evaluate("value", inputs, clip=0.2)
    assert metrics["value_clipped_frac"] == 1 / 4
    assert (grad == 0).tolist() == [True, False, False, False]


@pytest.mark.parametrize("name", ["gspo", "proximal_rloo"])
def test_sequence_losses_count_no_completion_without_a_counted_token(name):
    """Its ratio is 1 by convention: it is no share of what the clip lets through."""
    inputs = replace(INPUTS, mask=torch.tensor([True, True, True, False]))
    assert evaluate(name, inputs, num_units=3)[2]["clipped_frac"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("log_ratio", [30.0, 59.0])
def test_sequence_ratios_are_exact_up_to_their_limit(log_ratio):
    policy = torch.full((10,), -1.0, dtype=torch.float64, requires_grad=True)
    mask, segment_ids = torch.ones(10, dtype=torch.bool), torch.zeros(10, dtype=torch.int64)
    ratios = sequence_ratios(policy, policy.detach() - log_ratio / 10, mask, segment_ids)
    assert ratios.item() == pytest.approx(math.exp(log_ratio))
    (grad,) = torch.autograd.grad(ratios.sum(), policy)
    torch.testing.assert_close(grad, torch.full_like(grad, math.exp(log_ratio)))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_metric_of_a_loss_is_explained(name):
    inputs = random_inputs([3, 5, 2, 4])
    params = {"dual_clip": 3.0} if name == "ppo" else {}
    _, _, metrics = evaluate(name, inputs, **params)
    assert [metric for metric in metrics if described(metric) is None] == []
