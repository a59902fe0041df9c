"""Learning from preferences: against transformers in float64, whatever the microbatches; what it learns and refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from covering import with_slow
from training_data import VOCAB_SIZE, hugging_face_twin, tiny_policy

from slipstream.batching import collate as batching
from slipstream.core.errors import ConfigError, NonFiniteError
from slipstream.core.stage_sections import DpoConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.trainer.dpo import dpo_updates, measure_preferences, preference_data, preference_loss
from slipstream.trainer.reward_model import Preference

LOSSES = ("sigmoid", "ipo", "kto", "simpo")
READ = {"microbatch_tokens": 4096, "batching": batching}
LIKED = 5


def config(loss, **changes):
    optimizer = OptimizerConfig(lr=3e-3, **changes.pop("optimizer", {}))
    return DpoConfig(loss=loss, optimizer=optimizer, **({"batch_size": 8, "steps": 3} | changes))


def pairs(count, *, seed=0, low=2, high=7):
    """Completions with LIKED are preferred to those without; two pairs of each prompt stand side by side."""
    rng = np.random.default_rng(seed)

    def tokens(least, most):
        return rng.integers(6, VOCAB_SIZE, int(rng.integers(least, most))).astype(np.int32)

    made = []
    for index in range(count):
        prompt = tokens(2, 6) if index % 2 == 0 else made[-1].prompt_tokens
        liked, other = tokens(low, high), tokens(low, high)
        liked[0] = LIKED
        best = int(rng.integers(2))
        made.append(Preference(prompt, (liked, other) if best == 0 else (other, liked), best))
    return made


def singles(count, *, seed=0):
    made = []
    for pair in pairs(count, seed=seed):
        for rank, (prompt, tokens) in enumerate(pair.samples):
            made.append(Preference(prompt, (tokens,), rating=float(rank == 0)))
    return made


def data_for(loss, count=16, seed=0):
    return singles(count // 2, seed=seed) if loss == "kto" else pairs(count, seed=seed)


def prepared(reference, preferences, dpo, **reading):
    given = {"others": preferences, "max_positions": reference.config.max_positions} | READ | reading
    return preference_data(preferences, reference, loss=preference_loss(dpo), **given)


def log_likelihoods(twin, prompt, completion):
    """Logprobs of the completion's tokens by transformers, each sequence read alone."""
    tokens = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))
    with torch.no_grad():
        logprobs = twin(tokens[None]).logits[0, :-1].log_softmax(-1)
    return logprobs[torch.arange(len(tokens) - 1), tokens[1:]][len(prompt) - 1 :].numpy()


def by_transformers(policy, reference, preferences, dpo):
    """(loss, rewards of each completion, the best first) as the equations have them, in float64."""
    beta = dpo.beta or (2.0 if dpo.loss == "simpo" else 0.1)
    rewards = []
    for one in preferences:
        ours = [log_likelihoods(policy, *sample) for sample in one.samples]
        if dpo.loss == "simpo":
            rewards.append([beta * lines.mean() for lines in ours])
        else:
            theirs = [log_likelihoods(reference, *sample) for sample in one.samples]
            rewards.append([beta * (own.sum() - other.sum()) for own, other in zip(ours, theirs, strict=True)])
    found = np.array(rewards)
    if dpo.loss == "kto":
        z0 = max(0.0, float(np.mean([mismatch(policy, reference, preferences, at) for at in range(len(found))])))
        signs = np.array([1.0 if one.rating else -1.0 for one in preferences])
        return float(np.mean(1 - 1 / (1 + np.exp(-signs * (found[:, 0] - beta * z0))))), found, z0
    margins = found[:, 0] - found[:, 1]
    losses = {
        "sigmoid": np.log1p(np.exp(-margins)),
        "ipo": (margins / beta - 1 / (2 * beta)) ** 2,
        "simpo": np.log1p(np.exp(-(margins - dpo.gamma))),
    }
    return float(losses[dpo.loss].mean()), found, 0.0


def mismatch(policy, reference, preferences, at):
    """The log-ratio of the completion four places on: `singles` makes four of each prompt."""
    prompt, other = preferences[at].prompt_tokens, preferences[(at + 4) % len(preferences)]
    assert not np.array_equal(other.prompt_tokens, prompt)
    sample = (prompt, other.candidates[0])
    return float(log_likelihoods(policy, *sample).sum() - log_likelihoods(reference, *sample).sum())


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_rewards_are_those_of_transformers(loss):
    """Before training and after it; the first update measures what it is about to change."""
    dpo = config(loss, batch_size=8, steps=2)
    preferences, (model, _) = data_for(loss, 8), tiny_policy()
    reference = hugging_face_twin(tiny_policy()[0])
    data = prepared(model, preferences, dpo)
    policies = [hugging_face_twin(model)]
    done = []
    for update in dpo_updates(model, data, config=dpo, seed=0, **READ):
        done.append(update)
        policies.append(hugging_face_twin(model))
    for update, policy in zip(done, policies, strict=False):
        expected, rewards, z0 = by_transformers(policy, reference, preferences, dpo)
        assert update.measure.loss == pytest.approx(expected, rel=1e-4)
        assert update.reference_kl == pytest.approx(z0, rel=1e-3, abs=1e-5)
        if loss != "kto":
            assert update.measure.margin == pytest.approx((rewards[:, 0] - rewards[:, 1]).mean(), rel=1e-3, abs=1e-5)
    after = measure_preferences(model, data, config=dpo, **READ)
    expected, rewards, _ = by_transformers(policies[-1], reference, preferences, dpo)
    assert after.loss == pytest.approx(expected, rel=1e-4)
    if loss == "kto":
        is_good = np.array([bool(one.rating) for one in preferences])
        good, bad = rewards[is_good, 0], rewards[~is_good, 0]
        assert after.accuracy == pytest.approx((good[:, None] > bad[None, :]).mean())
    else:
        good, bad = rewards.T
        assert after.accuracy == pytest.approx((good > bad).mean())
    assert (after.chosen_reward, after.rejected_reward) == (
        pytest.approx(good.mean(), rel=1e-3),
        pytest.approx(bad.mean(), rel=1e-3),
    )


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "kto"])
def test_the_reference_has_moved_nowhere(loss):
    """Exactly: rewards of 0, every comparison a tie."""
    dpo, (model, _) = config(loss), tiny_policy()
    found = measure_preferences(model, prepared(model, data_for(loss, 40), dpo), config=dpo, **READ)
    assert (found.accuracy, found.margin, found.chosen_reward, found.rejected_reward) == (0.5, 0.0, 0.0, 0.0)
    assert found.loss == pytest.approx({"sigmoid": math.log(2), "ipo": 25.0, "kto": 0.5}[loss])


@pytest.mark.parametrize("loss", with_slow(["kto"], ["sigmoid", "ipo", "simpo"]))
def test_microbatches_change_nothing(loss):
    """One of everything, and one for each pair: KTO's estimate of the KL is of the whole batch."""
    dpo = config(loss, optimizer={"max_grad_norm": 0.05}, steps=2)
    ends = []
    for microbatch_tokens in (4096, 12):
        model, _ = tiny_policy()
        data = prepared(tiny_policy()[0], data_for(loss), dpo, microbatch_tokens=microbatch_tokens)
        reading = READ | {"microbatch_tokens": microbatch_tokens}
        done = list(dpo_updates(model, data, config=dpo, seed=0, **reading))
        if loss == "kto":
            assert done[-1].reference_kl > 0
        ends.append((torch.cat([p.detach().flatten() for p in model.parameters()]), done[-1].measure.loss))
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-4, atol=1e-5)
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-4)


@pytest.mark.parametrize("loss", with_slow(["sigmoid"], ["kto", "ipo", "simpo"]))
def test_it_learns_a_planted_preference(loss):
    model, _ = tiny_policy()
    dpo = config(loss, epochs=4, steps=None, batch_size=16)
    train, held_out = data_for(loss, 112), data_for(loss, 60, seed=1)
    data = prepared(model, train, dpo)
    unseen = prepared(model, held_out, dpo, others=train)
    before = measure_preferences(model, unseen, config=dpo, **READ)
    done = list(dpo_updates(model, data, config=dpo, seed=0, **READ))
    after = measure_preferences(model, unseen, config=dpo, **READ)
    assert len(done) == 28
    assert after.accuracy > max(0.85, before.accuracy)
    assert after.loss < before.loss
    assert after.margin > before.margin
    assert [one.num_preferences for one in done] == [16] * 28


def test_only_completions_count():
    """Another prompt with the same logprobs behind it would not matter; a longer completion does, to its end."""
    dpo, (model, _) = config("sigmoid"), tiny_policy()
    (one,) = pairs(1)
    data = prepared(model, [one], dpo)
    for sequence, (prompt, completion) in zip(data.sequences[0], one.samples, strict=True):
        assert sequence.mask.tolist() == [False] * len(prompt) + [True] * len(completion)
        assert np.isfinite(sequence.reference_logprobs).all()
        assert (sequence.reference_logprobs[: len(prompt)] == 0).all()
    assert prepared(model, [one], config("simpo")).sequences[0][0].reference_logprobs is None


def test_kto_takes_each_completion_once_and_those_of_both_labels():
    """Pairs taken apart stand side by side: one or two of each prompt, or the first prompt's again at the end."""
    dpo, (model, _) = config("kto"), tiny_policy()

    def made(sizes):
        names = [name for name, size in sizes for _ in range(size)]
        return [
            Preference(np.full(3, name, np.int32), (np.array([6 + index], np.int32),), rating=float(index % 2 == 0))
            for index, name in enumerate(names)
        ]

    for sizes in ([(5, 2), (6, 2), (7, 2)], [(5, 4), (6, 4)], [(5, 1), (6, 1), (7, 1), (8, 1)]):
        preferences = made(sizes)
        data = prepared(model, preferences, dpo)
        taken = [int(one.tokens[-1]) - 6 for one in data.mismatched]
        assert sorted(taken) == list(range(len(preferences)))
        if len(sizes) < 4:
            assert [preferences[one].rating for one in taken] == [one.rating for one in preferences]
    preferences = made([(5, 2), (6, 2), (5, 2)])
    assert [int(one.tokens[-1]) - 6 for one in prepared(model, preferences, dpo).mismatched] == [2, 3, 4, 5, 2, 2]


def test_kto_takes_completions_of_other_prompts_and_cuts_them_to_fit():
    dpo, (model, _) = config("kto"), tiny_policy()
    most = model.config.max_positions
    long, short = np.full(most - 3, 7, np.int32), np.full(2, 8, np.int32)
    preferences = [
        Preference(long, (short,), rating=1.0),
        Preference(long, (short + 1,), rating=0.0),
        Preference(short, (long,), rating=1.0),
    ]
    data = prepared(model, preferences, dpo)
    assert [len(one.tokens) for one in data.mismatched] == [most, most, 4]
    assert data.mismatched[1].tokens[len(long) :].tolist() == [7, 7, 7]
    assert data.mismatched[2].tokens[2:].tolist() == [8, 8], "the first one behind it, in a circle"
    shorter = prepared(model, preferences, dpo, max_positions=most - 1)
    assert [len(one.tokens) for one in shorter.mismatched] == [most - 1, most - 1, 4], "what the policy reads, too"


def test_one_kind_of_labels_has_no_accuracy():
    dpo, (model, _) = config("kto"), tiny_policy()
    only = [one for one in singles(4) if one.rating]
    found = measure_preferences(model, prepared(model, only, dpo), config=dpo, **READ)
    assert math.isnan(found.accuracy)
    assert math.isnan(found.rejected_reward)
    assert found.chosen_reward == 0.0


def test_what_a_loss_cannot_learn_from_is_refused():
    model, _ = tiny_policy()
    for loss, preferences in (("sigmoid", singles(2)), ("kto", pairs(2))):
        with pytest.raises(ConfigError, match="not what the loss learns from"):
            prepared(model, preferences, config(loss))
    with pytest.raises(ConfigError, match="takes some"):
        prepared(model, [], config("sigmoid"))
    with pytest.raises(ConfigError, match="one prompt alone"):
        prepared(model, singles(1), config("kto"))


def test_an_update_that_is_not_finite_changes_nothing():
    model, _ = tiny_policy()
    dpo = config("sigmoid", beta=1e30)
    data = prepared(tiny_policy(seed=1)[0], pairs(8), dpo)
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(NonFiniteError, match="preferences"):
        list(dpo_updates(model, data, config=DpoConfig(loss="ipo", beta=1e-30), seed=0, **READ))
    assert all(torch.equal(before, now) for before, now in zip(weights, model.parameters(), strict=True))


def test_constants_are_those_of_the_loss():
    assert preference_loss(DpoConfig()).params == {"beta": 0.1, "label_smoothing": 0.0}
    assert preference_loss(DpoConfig(loss="simpo")).params == {"beta": 2.0, "gamma": 1.0}
    kto = preference_loss(DpoConfig(loss="kto", beta=0.3, desirable_weight=1.5))
    assert kto.params == {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 1.0}
    for wrong in ({"gamma": 0.5}, {"loss": "kto", "label_smoothing": 0.1}, {"loss": "ipo", "desirable_weight": 2.0}):
        with pytest.raises(ValueError, match="belongs to another loss"):
            DpoConfig(**wrong)
    with pytest.raises(ValueError, match="no reference"):
        DpoConfig(loss="simpo", reference="somewhere")
