"""What goes beside a policy loss: bonus and penalty, against transformers' model in float64; critic, lags, rewards.

Bonus and penalty are reduced as the loss is: over tokens under its reduction, or summed over each completion.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from training_data import (
    TINY,
    VOCAB_SIZE,
    hugging_face_twin,
    make_groups,
    prepared,
    run_config,
    scored_group,
    tiny_policy,
)

from slipstream.batching import collate as batching
from slipstream.core.errors import NonFiniteError
from slipstream.core.types import Group, VersionSpan
from slipstream.models.initialise import new_model
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.critic import Critic
from slipstream.trainer.measure import Auxiliary
from slipstream.trainer.optim import AdamW
from slipstream.trainer.scores import key_of, rollout_advantages, selected
from slipstream.trainer.step import train_on_batch

TEMPERATURE = 0.8
MAX_NEW_TOKENS = 16


def over_completions(values):
    return torch.stack([one.sum() for one in values]).mean()


LOSSES = {  # and how each reduces values of tokens, one tensor per completion
    "rloo": ({"name": "rloo", "advantages": "leave_one_out"}, over_completions),
    "online_dpo": ({"name": "online_dpo", "select": "best_and_worst"}, over_completions),
    "grpo, token": ({"name": "grpo"}, lambda values: torch.cat(values).mean()),
    "grpo, constant": (
        {"name": "grpo", "reduction": "constant"},
        lambda values: over_completions(values) / MAX_NEW_TOKENS,
    ),
    "grpo, sequence": (
        {"name": "grpo", "reduction": "sequence"},
        lambda values: torch.stack([one.mean() for one in values]).mean(),
    ),
}


def update(groups, *, loss, kl):
    """The config; policy (before) and reference in float64; the embedding's gradient of one update."""
    config = run_config(
        loss=loss,
        kl=kl,
        generator={"max_new_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE},
        trainer={"optimizer": {"max_grad_norm": 1e9}},
    )
    model, flat = tiny_policy()
    twin = hugging_face_twin(model)
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    reference = new_model(TINY, VOCAB_SIZE, 7)
    auxiliary = Auxiliary(reference=reference)
    train_on_batch(model, optimizer, groups, config=config, step=0, batching=batching, auxiliary=auxiliary)
    return config, twin, hugging_face_twin(reference), model.embedding.weight.grad.double().clone()


def log_distributions(twin, sequence):
    """float64 [M, V] under `twin`, at temperature, of each sampled token of `sequence`; and those tokens, [M]."""
    ids, at = torch.from_numpy(sequence.tokens.astype(np.int64)), torch.from_numpy(sequence.mask[1:])
    return torch.log_softmax(twin(ids[None]).logits[0, :-1] / TEMPERATURE, -1)[at], ids[1:][at]


def added_and_expected(per_token, *, name, added, weight):
    """What the sections `added` change in the gradient of loss `name`; and of weight * `per_token`, reduced."""
    loss, reduce = LOSSES[name]
    groups = make_groups(seed=11)
    _, _, _, before = update(groups, loss=loss, kl={})
    config, twin, frozen, after = update(groups, loss=loss | added.get("loss", {}), kl=added.get("kl", {}))
    completions = {(one.ordinal, one.sample): one.completion for group in groups for one in group.rollouts}
    chosen = [key_of(head) for group in groups for head in selected(scored_group(group, config), config)]
    sequences = [train_sequence(completions[key]) for key in chosen]
    values = [per_token(twin, frozen, sequence) for sequence in sequences]
    assert len(sequences) > 2
    (weight * reduce(values)).backward()
    return after - before, twin.model.embed_tokens.weight.grad


@pytest.mark.parametrize("name", LOSSES)
def test_the_entropy_bonus_is_reduced_as_the_loss(name):
    def entropies(twin, _, sequence):
        logs, _targets = log_distributions(twin, sequence)
        return -(logs.exp() * logs).sum(-1)

    added, expected = added_and_expected(entropies, name=name, added={"loss": {"entropy_coef": 0.5}}, weight=-0.5)
    torch.testing.assert_close(added, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_kl_in_the_loss_is_reduced_as_the_loss(name, corrected):
    """`corrected`: times the ratio of policy to sampler, as in TRL, through which the gradient goes, too."""

    def divergences(twin, frozen, sequence):
        logs, targets = log_distributions(twin, sequence)
        of_reference = log_distributions(frozen, sequence)[0].detach()
        difference = (of_reference - logs).gather(1, targets[:, None]).squeeze(1)
        divergence = difference.exp() - 1 - difference
        if not corrected:
            return divergence
        behaviour = torch.from_numpy(sequence.behaviour_logprobs[sequence.mask].astype(np.float64))
        return divergence * (logs.gather(1, targets[:, None]).squeeze(1) - behaviour).exp()

    kl = {"coef": 2.0, "place": "loss", "estimator": "k3", "corrected": corrected}
    added, expected = added_and_expected(divergences, name=name, added={"kl": kl}, weight=2.0)
    torch.testing.assert_close(added, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["own", "head"])
def test_a_critic_whose_gradient_alone_overflows_changes_no_weight_of_either(kind):
    """Values, advantages and the policy's loss are finite: only the critic's gradient is not."""
    config = run_config(loss={"name": "ppo", "advantages": "gae"}, critic={"model": kind, "head_init": "reward"})
    config = config.model_copy(update={"critic": config.critic.model_copy(update={"coef": 1e37})})  # unchecked
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    critic = Critic(config, model)
    before = flat.flat.clone(), critic.parameters.flat.clone()
    with pytest.raises(NonFiniteError, match="gradient"):
        train_on_batch(
            model,
            optimizer,
            make_groups(),
            config=config,
            step=0,
            batching=batching,
            auxiliary=Auxiliary(critic=critic),
        )
    assert torch.equal(flat.flat, before[0])
    assert torch.equal(critic.parameters.flat, before[1])


def test_a_completion_that_spans_versions_is_in_no_lag():
    """Its old tokens were sampled over a cache of its own history: they say nothing about rounding at that lag."""
    first, *others = make_groups(seed=2)
    spanning, *whole = first.rollouts
    (segment,) = spanning.completion.segments
    mixed = msgspec.structs.replace(
        segment,
        behaviour_logprobs=np.full_like(segment.behaviour_logprobs, -50.0),
        version_spans=(VersionSpan(start=0, version=0), VersionSpan(start=1, version=1)),
    )
    completion = msgspec.structs.replace(spanning.completion, segments=(mixed,))
    groups = [
        Group(ordinal=0, rollouts=(msgspec.structs.replace(spanning, completion=completion), *whole)),
        *others,
    ]
    model, flat = tiny_policy()
    config = run_config()
    optimizer = AdamW(flat, config.trainer.optimizer, total_updates=100)
    metrics = train_on_batch(model, optimizer, groups, config=config, step=1, batching=batching)
    assert metrics["logprob_diff_max"] > 30
    assert 0 < metrics["logprob_diff_max/lag_1"] < 30
    assert "logprob_diff_max/lag_0" not in metrics


@pytest.mark.parametrize(("unbiased", "variance"), [(False, 2 / 3), (True, 1.0)])
def test_rewards_normalised_before_their_sum_have_the_configured_variance(unbiased, variance):
    (group,) = make_groups(1)
    rollouts = [
        msgspec.structs.replace(one, reward=2.0 * part, reward_parts={"a": part, "b": part})
        for one, part in zip(group.rollouts, (0.0, 1.0, 2.0), strict=True)
    ]
    config = run_config(
        loss={"several_rewards": "normalise_then_sum", "std_eps": 1e-6, "unbiased_std": unbiased},
        rewards={"terms": [{"function": "task"}, {"function": "exact_match"}]},
    )
    whole = Group(ordinal=group.ordinal, rollouts=tuple(rollouts))
    advantages = rollout_advantages([scored_group(whole, config)], config)
    expected = [2 * deviation / variance**0.5 for deviation in (-1.0, 0.0, 1.0)]
    assert list(advantages.values()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kl_coef", [0.2, 0.7])
def test_a_critics_rewards_pay_the_present_coefficient(kl_coef):
    """gamma = lam = 1: the first return of a completion is its score less the present coefficient times its KL."""
    groups = make_groups(seed=4)
    config = run_config(loss={"name": "ppo", "advantages": "gae"}, critic={"lam": 1.0}, kl={"coef": 0.2})

    def measured(sequences):
        def filled(value):
            return {one.key: np.full(one.num_targets, value, dtype=np.float32) for one in sequences}

        return {"reference_logprobs": filled(-3.0), "values": filled(0.0)}

    batch = prepared(groups, config=config, step=0, measure=measured, kl_coef=kl_coef)
    for group in groups:
        for rollout in group.rollouts:
            completion = rollout.completion
            (segment,) = completion.segments
            returns = batch.sequences[completion.ordinal, completion.sample].returns
            paid = kl_coef * float((segment.behaviour_logprobs + 3.0).sum())
            assert returns[len(completion.prompt.tokens)] == pytest.approx(rollout.reward - paid, rel=1e-4, abs=1e-4)


def test_the_critics_own_rate_decays_over_all_its_updates():
    rates = {"optimizer": {"lr": 0.5, "schedule": "linear"}}
    config = run_config(steps=10, loss={"name": "ppo", "advantages": "gae"}, critic=rates, trainer={"minibatches": 2})
    optimizer = Critic(config, tiny_policy()[0]).optimizer
    assert optimizer.lr == 0.5
    optimizer.planned = 10
    assert optimizer.lr == 0.25
    optimizer.planned = 20
    assert optimizer.lr == 0.0
