import math
from dataclasses import replace

import pytest
import torch

from slipstream.algorithms.losses import LOSSES, LossInputs, loss_named
from slipstream.algorithms.reduce import merge_metrics, metric_values
from slipstream.core.errors import ConfigError, MissingLogprobsError


def inputs_of(policy, behaviour, advantages, mask=None, num_units=None) -> LossInputs:
    policy = torch.as_tensor(policy, dtype=torch.float32)
    mask = torch.ones(len(policy), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    return LossInputs(
        policy_logprobs=policy.clone().requires_grad_(),
        behaviour_logprobs=None if behaviour is None else torch.as_tensor(behaviour, dtype=torch.float32),
        advantages=torch.as_tensor(advantages, dtype=torch.float32),
        mask=mask,
        segment_ids=torch.zeros(len(policy), dtype=torch.int64),
        num_units=int(mask.sum()) if num_units is None else num_units,
    )


def gradient(name, inputs, **params):
    loss, metrics = loss_named(name, params)(inputs)
    (grad,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    return loss.item(), grad, metric_values(metrics)


# Three tokens: ratio 1/2, ratio 2 and ratio 8, advantages 1, -1 and 2.
GOLDEN = {
    "policy": [math.log(0.2), math.log(0.4), math.log(0.8)],
    "behaviour": [math.log(0.4), math.log(0.2), math.log(0.1)],
}
ADVANTAGES = [1.0, -1.0, 2.0]


def test_aipo_golden_keeps_the_gradient_above_max_ratio():
    loss, grad, metrics = gradient("aipo", inputs_of(**GOLDEN, advantages=ADVANTAGES), max_ratio=4.0)
    torch.testing.assert_close(grad, torch.tensor([-0.5, 2.0, -8.0]) / 3)
    assert loss == pytest.approx(-(0.5 * math.log(0.2) - 2 * math.log(0.4) + 8 * math.log(0.8)) / 3)
    assert metrics["clipped_frac"] == pytest.approx(1 / 3)
    assert metrics["ratio"] == pytest.approx(3.5)
    assert metrics["ratio_max"] == pytest.approx(8.0)
    assert metrics["ess"] == pytest.approx(10.5**2 / (3 * (0.25 + 4 + 64)))
    assert metrics["logprob_diff_max"] == pytest.approx(math.log(8))


def test_aipo_masked_golden_drops_it():
    loss, grad, _ = gradient("aipo_masked", inputs_of(**GOLDEN, advantages=ADVANTAGES), max_ratio=4.0)
    torch.testing.assert_close(grad, torch.tensor([-0.5, 2.0, 0.0]) / 3)
    assert loss == pytest.approx(-(0.5 - 2.0 + 8.0) / 3)


def test_grpo_golden():
    loss, grad, metrics = gradient("grpo", inputs_of(**GOLDEN, advantages=ADVANTAGES), eps_low=0.2, eps_high=0.28)
    # min(0.5, 0.8) and min(-2, -1.28) are unclipped, min(16, 2.56) is clipped.
    torch.testing.assert_close(grad, torch.tensor([-0.5, 2.0, 0.0]) / 3)
    assert loss == pytest.approx(-(0.5 - 2.0 + 2.56) / 3)
    assert metrics["clipped_high_frac"] == pytest.approx(1 / 3)
    assert metrics["clipped_low_frac"] == 0.0


def test_grpo_clips_low_ratios_of_negative_advantage():
    _, grad, metrics = gradient("grpo", inputs_of([math.log(0.2)], [math.log(0.4)], [-1.0]), eps_low=0.2)
    assert grad.item() == 0.0
    assert metrics["clipped_low_frac"] == 1.0


def test_on_policy_aipo_is_reinforce():
    torch.manual_seed(0)
    policy, advantages = -torch.rand(20), torch.randn(20)
    _, grad, metrics = gradient("aipo", inputs_of(policy, policy, advantages), max_ratio=math.inf)
    torch.testing.assert_close(grad, -advantages / 20)
    assert metrics["kl_k1"] == metrics["kl_k3"] == metrics["clipped_frac"] == 0.0
    assert metrics["ess"] == pytest.approx(1.0)


def test_unclipped_grpo_is_ratio_times_advantage():
    torch.manual_seed(0)
    policy, behaviour, advantages = -torch.rand(20), -torch.rand(20), torch.randn(20)
    loss, grad, _ = gradient("grpo", inputs_of(policy, behaviour, advantages), eps_low=math.inf, eps_high=math.inf)
    ratios = (policy.double() - behaviour.double()).exp()
    assert loss == pytest.approx(-(ratios * advantages).mean().item(), rel=1e-5)
    torch.testing.assert_close(grad.double(), -ratios * advantages / 20)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_masked_tokens_change_nothing(name):
    torch.manual_seed(0)
    policy, behaviour, advantages = -torch.rand(12), -torch.rand(12), torch.randn(12)
    mask = torch.tensor([True, False] * 6)
    behaviour[1] = -1000.0
    loss, grad, metrics = gradient(name, inputs_of(policy, behaviour, advantages, mask))
    kept_loss, kept_grad, kept_metrics = gradient(name, inputs_of(policy[mask], behaviour[mask], advantages[mask]))
    assert loss == pytest.approx(kept_loss, rel=1e-6)
    torch.testing.assert_close(grad[mask], kept_grad)
    assert (grad[~mask] == 0).all()
    assert metrics == pytest.approx(kept_metrics, rel=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_parts_add_up_to_the_whole(name):
    torch.manual_seed(0)
    policy, behaviour, advantages = -torch.rand(30), -torch.rand(30), torch.randn(30)
    whole_loss, whole_grad, whole_metrics = gradient(name, inputs_of(policy, behaviour, advantages))
    loss, grads, metrics = 0.0, [], {}
    for part in range(0, 30, 10):
        rows = slice(part, part + 10)
        inputs = inputs_of(policy[rows], behaviour[rows], advantages[rows], num_units=30)
        part_loss, part_metrics = LOSSES[name](inputs)
        grads.append(torch.autograd.grad(part_loss, inputs.policy_logprobs)[0])
        loss += part_loss.item()
        metrics = merge_metrics(metrics, part_metrics)
    assert loss == pytest.approx(whole_loss, rel=1e-5)
    torch.testing.assert_close(torch.cat(grads), whole_grad)
    assert metric_values(metrics) == pytest.approx(whole_metrics, rel=1e-6)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_missing_anchor_raises(name):
    with pytest.raises(MissingLogprobsError, match="behaviour_logprobs"):
        LOSSES[name](inputs_of([-1.0], None, [1.0]))


def test_unknown_names_are_told_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'aipo'"):
        loss_named("aipoo", {})
    with pytest.raises(ConfigError, match="did you mean 'max_ratio'"):
        loss_named("aipo", {"max_ration": 3.0})


def test_parameters_override_defaults():
    assert loss_named("aipo", {"max_ratio": 2.0}).params == {"max_ratio": 2.0}
    assert LOSSES["aipo"].params == {"max_ratio": 4.0}


def test_metrics_do_not_hold_the_graph():
    inputs = inputs_of([-1.0, -2.0], [-1.5, -1.5], [1.0, 1.0])
    for loss in LOSSES.values():
        _, metrics = loss(replace(inputs))
        assert all(not tensor.requires_grad for part in metrics.values() for tensor in vars(part).values())
