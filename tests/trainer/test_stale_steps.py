"""What an update looks at as a whole: VCPO's learning rate, M2PO's cutoff, OAPL's values of the groups."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import torch
from training_data import Recording, hugging_face_twin, make_groups, run_config, scored_group, tiny_policy

from slipstream.batching import collate as batching
from slipstream.core.types import Group
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.optim import AdamW
from slipstream.trainer.scores import rollout_advantages
from slipstream.trainer.step import train_on_batch

TEMPERATURE = 0.8


def trained(groups, *, edge=batching, **changes):
    """(change of the weights, metrics, logprobs in float64 before the step by key) of one step on `groups`."""
    config = run_config(generator={"temperature": TEMPERATURE, "max_new_tokens": 16}, **changes)
    model, flat = tiny_policy()
    twin, before = hugging_face_twin(model), flat.flat.clone()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    metrics = train_on_batch(model, optimizer, groups, config=config, step=0, batching=edge)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    logprobs = {(one.ordinal, one.sample): read(twin, one.completion) for one in rollouts}
    return flat.flat - before, metrics, logprobs


@torch.no_grad()
def read(twin, completion):
    """float64 [sampled tokens]: their logprobs under transformers' model."""
    sequence = train_sequence(completion)
    ids, at = torch.from_numpy(sequence.tokens.astype(np.int64)), torch.from_numpy(sequence.mask[1:])
    logs = torch.log_softmax(twin(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
    return logs.gather(1, ids[1:, None]).squeeze(1)[at].numpy()


def behaviour_of(rollout):
    return np.concatenate([one.behaviour_logprobs for one in rollout.completion.segments]).astype(np.float64)


def sampled_near(groups, logprobs, *, spread):
    """`groups` as if sampled by a policy whose logprobs lie `spread` times normal around `logprobs`."""
    rng = np.random.default_rng(3)

    def moved(rollout):
        own = logprobs[rollout.ordinal, rollout.sample]
        (segment,) = rollout.completion.segments
        near = (own + spread * rng.normal(size=len(own))).astype(np.float32)
        segments = (msgspec.structs.replace(segment, behaviour_logprobs=near),)
        completion = msgspec.structs.replace(rollout.completion, segments=segments)
        return msgspec.structs.replace(rollout, completion=completion)

    return [Group(ordinal=one.ordinal, rollouts=tuple(moved(rollout) for rollout in one.rollouts)) for one in groups]


@pytest.fixture(scope="module")
def fresh():
    """Groups, and their logprobs under the policy of version 0."""
    groups = make_groups(6, 4, seed=5)
    return groups, trained(groups)[2]


SETTINGS = {"optimizer": {"lr": 1e-2, "warmup_updates": 2}, "microbatch_tokens": 60}


@pytest.fixture(scope="module")
def unscaled(fresh):
    """Groups sampled near the policy, and what a step makes of them."""
    groups = sampled_near(*fresh, spread=0.4)
    return groups, *trained(groups, trainer=SETTINGS)


@pytest.mark.parametrize(("rule", "base"), [("sqrt", 1.0), ("linear", 1.0), ("sqrt", 0.5)])
def test_an_update_is_smaller_by_its_effective_completions(unscaled, rule, base):
    """Adam's first step is the learning rate times something that the rate does not enter."""
    groups, whole, plain, logprobs = unscaled
    scaled, metrics, _ = trained(groups, trainer=SETTINGS | {"ess_scaling": rule, "ess_base": base})
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    weights = np.exp([(logprobs[one.ordinal, one.sample] - behaviour_of(one)).sum() for one in rollouts])
    share = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert 0.05 < share < 0.8, "some of the completions make the update"
    assert metrics["sequence_ess"] == pytest.approx(share, rel=1e-3)
    kept = min(1.0, share / base)
    scale = math.sqrt(kept) if rule == "sqrt" else kept
    assert plain["lr"] == pytest.approx(0.5e-2)
    assert metrics["lr"] == pytest.approx(0.5e-2 * scale, rel=1e-3)
    assert (scaled - scale * whole).norm() < 1e-3 * whole.norm()
    assert "sequence_ess" not in plain


def test_on_policy_nothing_is_scaled(fresh):
    groups = sampled_near(*fresh, spread=0.0)
    whole, plain, _ = trained(groups)
    scaled, metrics, _ = trained(groups, trainer={"ess_scaling": "sqrt"})
    assert metrics["sequence_ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["lr"] == pytest.approx(plain["lr"], rel=1e-6)
    assert (scaled - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("capacity", [10_000, 60, pytest.param(1, marks=pytest.mark.slow)])
def test_the_cutoff_is_that_of_the_minibatch(fresh, capacity):
    """Algorithm 1 of M2PO over the tokens of each of two minibatches, in whatever microbatches they come."""
    groups, threshold = sampled_near(*fresh, spread=0.4), 0.04
    recording = Recording()
    _, metrics, _ = trained(
        groups,
        edge=recording,
        loss={"name": "m2po", "params": {"threshold": threshold}},
        trainer={"minibatches": 2, "microbatch_tokens": capacity},
    )
    num_masked, bounded_kept = 0, []
    for minibatch in recording.packed[-2:]:
        moved = np.concatenate([one.proximal_logprobs - one.behaviour_logprobs for one in minibatch])
        advantages = np.concatenate([one.advantages for one in minibatch])
        bounded = sorted((moved.astype(np.float64) ** 2)[moved * advantages > 0])
        while np.mean(bounded) > threshold:
            bounded.pop()
            num_masked += 1
        bounded_kept += bounded
    assert num_masked > 5
    assert metrics["clipped_frac"] == pytest.approx(num_masked / metrics["tokens_trained"])
    assert metrics["second_moment_kept"] == pytest.approx(np.mean(bounded_kept), rel=1e-5)
    assert metrics["second_moment"] > threshold > metrics["second_moment_kept"]


def test_oapl_regresses_onto_rewards_less_the_value_of_their_group(fresh):
    groups = sampled_near(*fresh, spread=0.4)
    loss = {"name": "oapl", "advantages": "optimal", "optimal_beta": 0.7, "params": {"beta": 0.3}}
    _, metrics, logprobs = trained(groups, loss=loss)
    errors = []
    for group in groups:
        rewards = np.array([rollout.reward for rollout in group.rollouts])
        value = 0.7 * np.log(np.exp(rewards / 0.7).mean())
        sums = [(logprobs[one.ordinal, one.sample] - behaviour_of(one)).sum() for one in group.rollouts]
        errors += list((0.3 * np.array(sums) - (rewards - value)) ** 2)
    assert metrics["loss"] == pytest.approx(np.mean(errors), rel=1e-4)
    assert metrics["regression_error"] == pytest.approx(np.mean(errors), rel=1e-4)
    config = run_config(loss=loss)
    advantages = rollout_advantages([scored_group(groups[0], config)], config)
    assert np.exp(np.array(list(advantages.values())) / 0.7).mean() == pytest.approx(1.0, rel=1e-5)
