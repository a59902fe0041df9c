import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.advantages import (
    greedy_baseline,
    group_mean,
    group_normalised,
    leave_one_out,
    normalise_then_sum,
)
from slipstream.core.errors import ShapeError

NAN = math.nan


def test_leave_one_out_golden_of_the_asynchronous_rlhf_code():
    """Three prompts with four completions each, laid out completion by completion."""
    rewards = torch.tensor([1, 2, 3, 2, 3, 4, 5, 6, 7, 8, 9, 10], dtype=torch.float32)
    prompts = torch.arange(3).repeat(4)
    expected = [-4, -4, -4, -8 / 3, -8 / 3, -8 / 3, 4 / 3, 4 / 3, 4 / 3, 16 / 3, 16 / 3, 16 / 3]
    torch.testing.assert_close(leave_one_out(rewards, prompts), torch.tensor(expected))


def test_leave_one_out_is_the_group_mean_scaled_and_refuses_groups_of_one():
    torch.manual_seed(0)
    rewards, groups = torch.randn(24, dtype=torch.float64), torch.arange(24) % 4
    torch.testing.assert_close(leave_one_out(rewards, groups), group_mean(rewards, groups) * 6 / 5, rtol=1e-14, atol=0)
    with pytest.raises(ShapeError, match="at least two"):
        leave_one_out(rewards[:5], groups[:5])


def test_bessels_correction_against_torch_and_trl():
    """TRL's GRPO: (r - mean) / (std + 1e-4) with torch's std."""
    torch.manual_seed(0)
    rewards = torch.randn(4, 6)
    advantages = group_normalised(rewards.flatten(), torch.arange(4).repeat_interleave(6), std_eps=1e-4, unbiased=True)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(advantages.view(4, 6), expected)


def test_one_of_two_wins_under_both_standard_deviations():
    """Rewards 1 and 0: deviations of 1/2, population std 1/2, Bessel's sqrt(1/2)."""
    rewards, group = torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.int64)
    torch.testing.assert_close(group_normalised(rewards, group, std_eps=0.0), torch.tensor([1.0, -1.0]))
    expected = torch.tensor([0.5, -0.5]) / math.sqrt(0.5)
    torch.testing.assert_close(group_normalised(rewards, group, std_eps=0.0, unbiased=True), expected)


@pytest.mark.parametrize("unbiased", [False, True])
def test_no_spread_no_advantage(unbiased):
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 7.3]), torch.tensor([0, 0, 0, 1])
    assert (group_normalised(rewards, groups, std_eps=1e-12, unbiased=unbiased) == 0).all()


def test_greedy_baseline():
    rewards, greedy = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.25, 0.0, 1.0])
    torch.testing.assert_close(greedy_baseline(rewards, greedy), torch.tensor([0.75, 0.0, -0.5]))
    with pytest.raises(ShapeError):
        greedy_baseline(rewards, greedy[:1])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32)), min_size=1, max_size=20))
def test_every_group_estimator_against_loops(rollouts):
    """Also: neither the order of the rollouts nor the numbering of the groups matters."""
    groups = torch.tensor([100 - 7 * group for group, _ in rollouts])
    rewards = torch.tensor([reward for _, reward in rollouts], dtype=torch.float64)
    means, deviations, others = [], [], []
    for group, reward in rollouts:
        members = [other for number, other in rollouts if number == group]
        mean = sum(members) / len(members)
        means.append(reward - mean)
        deviations.append(math.sqrt(sum((other - mean) ** 2 for other in members) / len(members)))
        others.append(reward - (sum(members) - reward) / (len(members) - 1) if len(members) > 1 else None)
    expected = torch.tensor(means, dtype=torch.float64)
    torch.testing.assert_close(group_mean(rewards, groups), expected, rtol=1e-9, atol=1e-12)
    normalised = expected / (torch.tensor(deviations, dtype=torch.float64) + 0.1)
    torch.testing.assert_close(group_normalised(rewards, groups, std_eps=0.1), normalised, rtol=1e-9, atol=1e-9)
    if None not in others:
        torch.testing.assert_close(
            leave_one_out(rewards, groups), torch.tensor(others, dtype=torch.float64), rtol=1e-9, atol=1e-9
        )


def test_normalised_sums_golden():
    """Two groups of two; the second reward is ten times as large and does not apply to the third rollout."""
    parts = torch.tensor([[1.0, 0.0], [0.0, 20.0], [1.0, NAN], [1.0, 10.0]])
    weights, groups = torch.tensor([1.0, 0.5]), torch.tensor([0, 0, 1, 1])
    normalised = normalise_then_sum(parts, weights, groups, std_eps=1e-12)
    torch.testing.assert_close(normalised, torch.tensor([1 - 0.5, -1 + 0.5, 0.0, 0.0]))


def test_one_part_of_weight_one_is_group_normalised():
    torch.manual_seed(0)
    rewards, groups = torch.randn(12), torch.arange(12) // 4
    for unbiased in (False, True):
        summed = normalise_then_sum(rewards[:, None], torch.ones(1), groups, std_eps=1e-3, unbiased=unbiased)
        assert torch.equal(summed, group_normalised(rewards, groups, std_eps=1e-3, unbiased=unbiased))


def test_normalising_first_is_blind_to_the_scale_of_a_reward():
    torch.manual_seed(0)
    parts, groups = torch.randn(12, 2, dtype=torch.float64), torch.arange(12) // 4
    scaled = parts * torch.tensor([1.0, 1000.0], dtype=torch.float64)
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    torch.testing.assert_close(
        normalise_then_sum(parts, weights, groups, std_eps=1e-12),
        normalise_then_sum(scaled, weights, groups, std_eps=1e-12),
    )


@pytest.mark.parametrize(("parts", "weights", "groups"), [((4,), 1, 4), ((4, 2), 1, 4), ((4, 2), 2, 3)])
def test_normalised_sums_must_fit(parts, weights, groups):
    with pytest.raises(ShapeError):
        normalise_then_sum(
            torch.zeros(parts), torch.ones(weights), torch.zeros(groups, dtype=torch.int64), std_eps=1e-4
        )
