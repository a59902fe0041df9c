"""VCPO's baseline of least variance, against gradients of single completions under transformers' model in float64."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from covering import with_slow
from gradients import named_grads
from training_data import hugging_face_twin, make_groups, run_config, sharing_prompts, tiny_policy

from slipstream.algorithms.losses import LOSSES, loss_named
from slipstream.algorithms.losses.spec import LossInputs
from slipstream.batching import collate as batching
from slipstream.core.errors import ConfigError
from slipstream.core.packed import empty_microbatch
from slipstream.core.rank_group import RankGroup
from slipstream.core.training_sections import OptimizerConfig
from slipstream.core.types import Group
from slipstream.models.flat import FlatParameters
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.loss_checks import PROPORTIONAL, check_loss
from slipstream.trainer.min_variance import MinVariance
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

TEMPERATURE = 0.8


class Kept(AdamW):
    """Keep the gradient, and make no update."""

    def step(self, *, scale: float = 1.0) -> float:
        self.made = {name: grad.clone() for name, grad in named_grads(self.parameters).items()}
        self.num_updates += 1
        return self.finite_grad_norm()


def trained(groups, **changes):
    """(gradients by transformers' names, metrics, transformers' model in float64) of one step on `groups`."""
    config = run_config(generator={"temperature": TEMPERATURE, "max_new_tokens": 16}, **changes)
    check_loss(config)
    model, flat = tiny_policy()
    optimizer = Kept(flat, config.trainer.optimizer, total_updates=100)
    metrics = train_on_batch(model, optimizer, groups, config=config, step=0, batching=batching)
    return optimizer, metrics, hugging_face_twin(model), model


def near(groups, twin, *, spread=0.4):
    """`groups` as if sampled by a policy whose logprobs lie `spread` times normal around those of `twin`."""
    rng, moved = np.random.default_rng(3), []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            (segment,) = rollout.completion.segments
            own = logprobs_of(twin, rollout.completion).detach().numpy()
            behaviour = (own + spread * rng.normal(size=len(own))).astype(np.float32)
            segments = (msgspec.structs.replace(segment, behaviour_logprobs=behaviour),)
            completion = msgspec.structs.replace(rollout.completion, segments=segments)
            rollouts.append(msgspec.structs.replace(rollout, completion=completion))
        moved.append(Group(ordinal=group.ordinal, rollouts=tuple(rollouts)))
    return moved


def logprobs_of(twin, completion):
    sequence = train_sequence(completion)
    ids, at = torch.from_numpy(sequence.tokens.astype(np.int64)), torch.from_numpy(sequence.mask[1:])
    logs = torch.log_softmax(twin(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
    return logs.gather(1, ids[1:, None]).squeeze(1)[at]


def printed(groups, twin, *, max_ratio, normalised, std_eps=0.1):
    """VCPO's formula over gradients of single completions: (float64 gradient, the groups' b - mean in advantages)."""
    parameters = list(twin.parameters())
    num_tokens = sum(len(one.completion.segments[0].tokens) for group in groups for one in group.rollouts)
    total, shifts = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64), []
    for group in groups:
        scores, weights = [], []
        for rollout in group.rollouts:
            logprobs = logprobs_of(twin, rollout.completion)
            grads = torch.autograd.grad(logprobs.sum(), parameters, allow_unused=True)
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
            scores.append(torch.cat([one.flatten() for one in flat]))
            behaviour = rollout.completion.segments[0].behaviour_logprobs.astype(np.float64)
            weights.append(min(math.exp(logprobs.detach().numpy().sum() - behaviour.sum()), max_ratio))
        rewards = np.array([one.reward for one in group.rollouts])
        squares = np.array([w**2 * float(s @ s) for w, s in zip(weights, scores, strict=True)])
        baseline = (squares * rewards).sum() / squares.sum()
        scale = 1 / (rewards.std() + std_eps) if normalised else 1.0
        shifts.append((baseline - rewards.mean()) * scale)
        for w, s, r in zip(weights, scores, rewards, strict=True):
            total -= w * (r - baseline) * scale * s / num_tokens
    return total, shifts


@pytest.fixture(scope="module")
def groups():
    fresh = sharing_prompts(make_groups(3, 4, seed=5))
    return near(fresh, hugging_face_twin(tiny_policy()[0]))


@pytest.mark.parametrize(("advantages", "max_ratio"), with_slow([("group_normalised", 2.0)], [("group_mean", 1e9)]))
def test_the_gradient_is_the_printed_one(groups, advantages, max_ratio):
    loss = {"name": "aipo", "advantages": advantages, "baseline": "min_variance"}
    loss["params"] = {"level": "sequence", "max_ratio": max_ratio}
    optimizer, metrics, twin, model = trained(groups, loss=loss)
    expected, shifts = printed(groups, twin, max_ratio=max_ratio, normalised=advantages == "group_normalised")
    with torch.no_grad():  # the same gradient under transformers' names: of fused matrices the parts
        start = hugging_face_twin(model)
        for name, parameter in model.named_parameters():
            parameter.add_(optimizer.made[name])
        moved = hugging_face_twin(model)
    found = torch.cat([(b - a).flatten() for a, b in zip(start.parameters(), moved.parameters(), strict=True)])
    assert (found - expected).norm() < 2e-5 * expected.norm() + 1e-6
    assert np.mean(np.abs(shifts)) > 0.1, "not the mean"
    assert metrics["baseline_shift"] == pytest.approx(np.mean(np.abs(shifts)), rel=1e-4)
    assert metrics["num_microbatches"] == 12


def test_the_loss_is_that_of_the_advantages_it_trained_on(groups):
    loss = {"name": "aipo", "baseline": "min_variance", "advantages": "group_mean", "params": {"level": "sequence"}}
    _, metrics, twin, _ = trained(groups, loss=loss)
    _, shifts = printed(groups, twin, max_ratio=4.0, normalised=False)
    total, count = 0.0, 0
    for group, shift in zip(groups, shifts, strict=True):
        mean = np.mean([one.reward for one in group.rollouts])
        for rollout in group.rollouts:
            own = logprobs_of(twin, rollout.completion).detach().numpy()
            behaviour = rollout.completion.segments[0].behaviour_logprobs.astype(np.float64)
            total -= min(math.exp((own - behaviour).sum()), 4.0) * (rollout.reward - mean - shift) * own.sum()
            count += len(own)
    assert metrics["loss"] == pytest.approx(total / count, rel=1e-4)


def test_no_baseline_has_less_variance_where_one_can_enumerate():
    """A softmax over 4 actions, groups of 2 from another policy: the expectation over all 16 groups, exactly."""
    policy = torch.tensor([0.1, 0.2, 0.3, 0.4])
    behaviour, rewards = torch.tensor([0.55, 0.25, 0.15, 0.05]), torch.tensor([1.0, 0.0, 0.3, 2.0])
    model = torch.nn.Linear(1, 4, bias=False)
    model.weight.data = policy.log()[:, None]
    flat = FlatParameters(model)
    optimizer = AdamW(flat, OptimizerConfig(), total_updates=1)
    ratios = policy / behaviour

    def of_group(actions, advantages):
        """What the trainer makes of a group's gradient."""
        single = MinVariance(
            optimizer,
            [replace(empty_microbatch(), keys=((0, at),), advantages=a[None]) for at, a in enumerate(advantages)],
            RankGroup.alone(),
        )
        for action in actions:
            optimizer.zero_grad()
            (ratios[action] * model.weight[:, 0].log_softmax(0)[action]).backward()
            single.take()
        single.finish()
        return flat.grad.double()

    def with_baseline(actions, advantages, baseline=0.0):
        scores = torch.eye(4)[list(actions)] - policy
        return (ratios[list(actions), None] * (torch.from_numpy(advantages) - baseline)[:, None] * scores).sum(0)

    def variance(gradient):
        first, second = torch.zeros(4), 0.0
        for actions in itertools.product(range(4), repeat=2):
            own = rewards[list(actions)]
            made = gradient(actions, (own - own.mean()).numpy())
            chance = float(behaviour[list(actions)].prod())
            first, second = first + chance * made, second + chance * float(made @ made)
        return second - float(first @ first)

    found, of_mean = variance(of_group), variance(with_baseline)
    assert found < 0.9 * of_mean
    for shift in (-0.3, -0.1, 0.1, 0.3):
        assert found < variance(lambda *given, shift=shift: with_baseline(*given, shift))


@pytest.mark.parametrize("name", PROPORTIONAL)
def test_the_losses_that_it_takes_are_proportional_to_the_advantage(name):
    generator = torch.Generator().manual_seed(1)
    policy = -torch.rand(9, generator=generator, dtype=torch.float64)
    moved = torch.randn(9, generator=generator, dtype=torch.float64)
    inputs = LossInputs(
        policy_logprobs=policy.requires_grad_(),
        behaviour_logprobs=policy.detach() + moved,
        advantages=torch.ones(9, dtype=torch.float64),
        mask=torch.ones(9, dtype=torch.bool),
        segment_ids=torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]),
        num_units=3,
    )
    one, *others = (
        torch.autograd.grad(LOSSES[name](replace(inputs, advantages=inputs.advantages * scale))[0], policy)[0]
        for scale in (1.0, -2.0, 0.5)
    )
    for scale, other in zip((-2.0, 0.5), others, strict=True):
        torch.testing.assert_close(other, scale * one)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss": {"name": "grpo"}}, "'grpo'"),
        ({"loss": {"name": "aipo", "params": {"eps_low": 0.2}}}, "with eps_low"),
        ({"loss": {"name": "aipo", "advantages": "leave_one_out"}}, "leave_one_out"),
        ({"loss": {"name": "aipo", "advantages": "gae"}}, "'gae'"),
        ({"loss": {"name": "aipo", "whiten_advantages": "batch"}}, "whiten_advantages"),
        ({"loss": {"name": "rloo", "select": "best_and_worst"}}, "loss.select"),
        ({"loss": {"name": "aipo", "entropy_coef": 0.1}}, "entropy_coef"),
        ({"loss": {"name": "aipo"}, "kl": {"coef": 0.1, "place": "loss", "estimator": "k3"}}, "kl.place"),
    ],
)
def test_what_it_cannot_go_with_is_refused(changes, named):
    config = run_config(**changes | {"loss": {**changes["loss"], "baseline": "min_variance"}})
    with pytest.raises(ConfigError, match="least variance") as caught:
        check_loss(config)
    assert named in str(caught.value)


def test_a_kl_penalty_in_the_reward_is_a_reward(groups):
    check_loss(run_config(loss={"baseline": "min_variance"}, kl={"coef": 0.1}))
    assert loss_named("aipo", {}).params["eps_low"] == math.inf
