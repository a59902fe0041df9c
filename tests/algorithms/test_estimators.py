import math

import pytest
import torch

from slipstream.algorithms.advantages import group_mean, group_normalised
from slipstream.algorithms.kl import k1, k2, k3
from slipstream.algorithms.ratios import token_ratios, truncate
from slipstream.algorithms.reduce import Max, Mean, merge_metrics, metric_values
from slipstream.core.errors import ShapeError


def test_kl_estimators_on_a_known_pair():
    p, q = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    assert k1(p, q).item() == pytest.approx(math.log(2))
    assert k2(p, q).item() == pytest.approx(0.5 * math.log(2) ** 2)
    assert k3(p, q).item() == pytest.approx(0.5 - 1 + math.log(2))


def test_unbiased_estimators_average_to_the_exact_kl():
    p, q = torch.tensor([0.1, 0.2, 0.7]), torch.tensor([0.3, 0.3, 0.4])
    exact = (p * (p / q).log()).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((p * estimator(p.log(), q.log())).sum(), exact)
    assert (k3(p.log(), q.log()) >= 0).all()


def test_ratios_and_truncation():
    ratios = token_ratios(torch.tensor([0.0, 1.0, 9e9]), torch.zeros(3), torch.tensor([True, True, False]))
    torch.testing.assert_close(ratios, torch.tensor([1.0, math.e, 1.0]))
    torch.testing.assert_close(truncate(ratios, 2.0), torch.tensor([1.0, 2.0, 1.0]))
    torch.testing.assert_close(truncate(ratios, math.inf), ratios)


def test_group_advantages_golden():
    rewards = torch.tensor([1.0, 5.0, 0.0, 5.0, 0.0, 1.0])
    groups = torch.tensor([7, 3, 7, 3, 7, 7])
    torch.testing.assert_close(group_mean(rewards, groups), torch.tensor([0.5, 0.0, -0.5, 0.0, -0.5, 0.5]))
    expected = torch.tensor([0.5, 0.0, -0.5, 0.0, -0.5, 0.5]) / 0.6
    torch.testing.assert_close(group_normalised(rewards, groups, std_eps=0.1), expected)


def test_equal_rewards_give_exactly_no_advantage():
    rewards = torch.full((7,), 0.1)
    advantages = group_normalised(rewards, torch.zeros(7, dtype=torch.int64), std_eps=1e-12)
    assert (advantages == 0).all()


def test_population_standard_deviation_against_torch():
    torch.manual_seed(0)
    rewards = torch.randn(4, 6)
    advantages = group_normalised(rewards.flatten(), torch.arange(4).repeat_interleave(6), std_eps=1e-3)
    centred = rewards - rewards.mean(1, keepdim=True)
    expected = centred / (rewards.std(1, keepdim=True, correction=0) + 1e-3)
    torch.testing.assert_close(advantages.view(4, 6), expected)


def test_group_ids_must_fit():
    with pytest.raises(ShapeError):
        group_mean(torch.zeros(3), torch.zeros(2, dtype=torch.int64))


def test_metrics_add_up_and_never_mix_kinds():
    mean = Mean(torch.tensor(3.0), torch.tensor(2))
    merged = merge_metrics(
        {"a": mean, "b": Max(torch.tensor(1.0))}, {"a": mean, "b": Max(torch.tensor(4.0)), "c": mean}
    )
    assert metric_values(merged) == {"a": 1.5, "b": 4.0, "c": 1.5}
    with pytest.raises(TypeError):
        merge_metrics({"a": mean}, {"a": Max(torch.tensor(0.0))})
    assert Mean(torch.tensor(0.0), torch.tensor(0)).value() == 0.0
