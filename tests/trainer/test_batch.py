"""From groups to training sequences: estimators, selection, penalties and shaping, against arrays made by hand."""

import math

import msgspec
import numpy as np
import pytest
from drawn import drawn
from hypothesis import strategies as st
from training_data import columns, make_rollout, prepared, run_config, scored_group, sharing_prompts

from slipstream.batching import collate as batching
from slipstream.core.errors import StalenessError
from slipstream.core.types import Group
from slipstream.trainer.inbox import group_scored
from slipstream.trainer.scores import has_signal, is_truncated, selected

REWARDS = [[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]]


def groups_of(rewards, *, seed=0, finish=None, **rollout):
    """One group per row of `rewards`; `finish` maps (ordinal, sample) to a finish reason."""
    rng = np.random.default_rng(seed)
    reasons = finish or {}
    return [
        Group(
            ordinal=ordinal,
            rollouts=tuple(
                make_rollout(ordinal, s, rng, reward=r, finish_reason=reasons.get((ordinal, s), "stop"), **rollout)
                for s, r in enumerate(row)
            ),
        )
        for ordinal, row in enumerate(rewards)
    ]


def advantages_of(batch, groups):
    """{key: the advantages of its targets}, with what lies elsewhere checked to be 0."""
    found = {}
    for sequence in batch.of(groups):
        assert not sequence.advantages[~sequence.mask].any()
        found[sequence.key] = sequence.advantages[sequence.mask].astype(np.float64)
    return found


def scalar_advantages(groups, measure=None, **changes):
    """[group][sample]: the one advantage that all tokens of a completion have."""
    batch = prepared(groups, config=run_config(**changes), step=0, measure=measure)
    found = advantages_of(batch, groups)
    assert all(np.ptp(values) == 0 for values in found.values())
    return [
        [
            found[group.ordinal, r.completion.sample][0]
            for r in group.rollouts
            if (group.ordinal, r.completion.sample) in found
        ]
        for group in groups
    ]


# Estimators


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"advantages": "group_mean"}, [[-2, -1, 3], [-1, -1, 2]]),
        ({"advantages": "leave_one_out"}, [[-3, -1.5, 4.5], [-1.5, -1.5, 3]]),
        ({"advantages": "reward"}, REWARDS),
        (
            {"advantages": "group_normalised", "std_eps": 0.5},
            [
                np.array([-2, -1, 3]) / (math.sqrt(14 / 3) + 0.5),
                np.array([-1, -1, 2]) / (math.sqrt(2) + 0.5),
            ],
        ),
        (
            {"advantages": "group_normalised", "std_eps": 0.5, "unbiased_std": True},
            [np.array([-2, -1, 3]) / (math.sqrt(7) + 0.5), np.array([-1, -1, 2]) / (math.sqrt(3) + 0.5)],
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_estimators(loss, expected):
    np.testing.assert_allclose(scalar_advantages(groups_of(REWARDS), loss=loss), expected, rtol=1e-6)


def test_the_greedy_completion_is_the_baseline_and_is_never_trained():
    groups = groups_of([[1.0, 2.0, 6.0, 2.5], [0.0, 0.0, 3.0, 3.0]])  # the last sample is the greedy one
    config = run_config(loss={"advantages": "greedy_baseline"})
    assert config.samples_per_group == 4
    batch = prepared(groups, config=config, step=0)
    assert set(batch.sequences) == {(o, s) for o in range(2) for s in range(3)}
    found = advantages_of(batch, groups)
    assert [found[0, s][0] for s in range(3)] == [-1.5, -0.5, 3.5]
    assert [found[1, s][0] for s in range(3)] == [-3, -3, 0]
    assert batch.metrics["reward_mean"] == 2.0  # of what is trained
    tokens = sum(rollout.completion.num_tokens for group in groups for rollout in group.rollouts)
    assert batch.metrics["staleness_tokens/lag_0"] == tokens  # of what is consumed


def test_a_stale_greedy_completion_is_outside_the_bound_too():
    (group,) = groups_of([[1.0, 0.0, 0.0]], version=4)
    stale = make_rollout(0, 3, np.random.default_rng(0), reward=0.0, version=1)
    group = msgspec.structs.replace(group, rollouts=(*group.rollouts, stale))
    with pytest.raises(StalenessError):
        prepared([group], config=run_config(loss={"advantages": "greedy_baseline"}), step=4)


def parts_of(group, *parts):
    return msgspec.structs.replace(
        group,
        rollouts=tuple(
            msgspec.structs.replace(
                rollout, reward_parts=dict(zip("ab", part, strict=True)), reward=sum(filter(None, part))
            )
            for rollout, part in zip(group.rollouts, parts, strict=True)
        ),
    )


TWO_TERMS = {"terms": [{"function": "task", "weight": 2.0}, {"function": "length", "weight": 0.5, "params": {}}]}
GDPO = {"advantages": "group_normalised", "several_rewards": "normalise_then_sum", "std_eps": 1e-4}


def test_each_reward_is_normalised_before_the_sum():
    (group,) = groups_of([[0.0, 0.0, 0.0]])
    group = parts_of(group, (0.0, 10.0), (3.0, None), (0.0, 30.0))
    first = np.array([-1, 2, -1]) / (math.sqrt(2) + 1e-4)
    second = np.array([-10, 0, 10]) / (10 + 1e-4)  # of the two that have it
    np.testing.assert_allclose(
        scalar_advantages([group], loss=GDPO, rewards=TWO_TERMS)[0], 2 * first + 0.5 * second, rtol=1e-5
    )


def test_a_failed_rollout_has_its_reward_for_every_part():
    (group,) = groups_of([[0.0, 0.0, -1.0]])
    failed = msgspec.structs.replace(group.rollouts[2], failure="timeout")
    group = parts_of(msgspec.structs.replace(group, rollouts=group.rollouts), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    group = msgspec.structs.replace(group, rollouts=(*group.rollouts[:2], failed))
    expected = 2.5 * np.array([2, 2, -4]) / 3 / (math.sqrt(8) / 3 + 1e-4)
    np.testing.assert_allclose(scalar_advantages([group], loss=GDPO, rewards=TWO_TERMS)[0], expected, rtol=1e-5)


# Which groups and completions are trained on


def signal_of(group, config):
    return has_signal(scored_group(group, config), config)


def test_signal_is_what_the_estimator_and_the_loss_make_of_it():
    def signal(rewards, **changes):
        return signal_of(groups_of([rewards])[0], run_config(**changes))

    for estimator in ("group_mean", "group_normalised", "leave_one_out"):
        assert signal([1.0, 0.0, 1.0], loss={"advantages": estimator})
        assert not signal([1.0, 1.0, 1.0], loss={"advantages": estimator})
    greedy = {"advantages": "greedy_baseline"}
    assert signal([1.0, 1.0, 1.0, 0.0], loss=greedy)
    assert not signal([1.0, 1.0, 1.0, 1.0], loss=greedy)
    for estimator in ("gae", "reward"):
        assert signal([1.0, 1.0, 1.0], loss={"advantages": estimator})
    # a KL penalty makes equal rewards unequal; one in the loss does not
    rloo = {"advantages": "leave_one_out"}
    assert signal([1.0, 1.0, 1.0], loss=rloo, kl={"coef": 0.1})
    assert not signal([1.0, 1.0, 1.0], loss=rloo, kl={"coef": 0.1, "place": "loss", "estimator": "k3"})
    # a pair of equal rewards has no preferred one, whatever the estimator
    for estimator in ("group_normalised", "reward"):
        pairs = {"name": "online_dpo", "select": "best_and_worst", "advantages": estimator}
        assert signal([1.0, 0.0, 1.0], loss=pairs)
        assert not signal([1.0, 1.0, 1.0], loss=pairs)
    # equal sums of unequal parts
    (group,) = groups_of([[0.0, 0.0, 0.0]])
    several = run_config(loss=GDPO, rewards=TWO_TERMS)
    assert signal_of(parts_of(group, (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)), several)
    assert not signal_of(parts_of(group, (1.0, None), (1.0, 2.0), (1.0, 2.0)), several)
    # what is only measured counts for nothing, and pairs are ranked by the sum
    measured = {"terms": [TWO_TERMS["terms"][0], TWO_TERMS["terms"][1] | {"weight": 0.0}]}
    assert not signal_of(parts_of(group, (1.0, 0.0), (1.0, 1.0), (1.0, 2.0)), run_config(loss=GDPO, rewards=measured))
    pairs = GDPO | {"name": "online_dpo", "select": "best_and_worst"}
    assert not signal_of(parts_of(group, (1.0, 0.0), (0.0, 1.0), (0.5, 0.5)), run_config(loss=pairs, rewards=TWO_TERMS))
    # truncation changes what counts
    cut = groups_of([[1.0, 1.0]], finish={(0, 1): "length"})[0]
    assert not signal_of(cut, run_config())
    assert signal_of(cut, run_config(loss={"truncated": "subtract", "truncation_reward": -1.0}))


@pytest.mark.parametrize("truncated", ["keep", "mask", "penalty", "subtract"])
def test_the_reward_that_is_told_is_the_one_that_was_scored(truncated):
    """Whatever advantages are made of: truncation does not change it, and a greedy baseline is not in it."""
    (cut,) = groups_of([[4.0, 2.0, 3.0]], finish={(0, 0): "length"})
    config = run_config(loss={"truncated": truncated, "truncation_reward": -9.0})
    assert group_scored(scored_group(cut, config), config).mean_reward == 3.0
    (group,) = groups_of([[4.0, 2.0, 3.0, 99.0]], finish={(0, 3): "length"})
    config = run_config(loss={"truncated": truncated, "truncation_reward": -9.0, "advantages": "greedy_baseline"})
    assert group_scored(scored_group(group, config), config).mean_reward == 3.0


def test_signal_hangs_on_what_advantages_are_made_of():
    loss = {"truncated": "penalty", "truncation_reward": -9.0}
    (cut,) = groups_of([[4.0, 2.0, 3.0]], finish=dict.fromkeys([(0, 0), (0, 1), (0, 2)], "length"))
    told = group_scored(scored_group(cut, run_config(loss=loss)), run_config(loss=loss))
    assert (told.has_signal, told.mean_reward) == (False, 3.0)


@pytest.mark.parametrize(
    ("rewards", "best", "worst"),
    [([1.0, 5.0, 0.0], 1, 2), ([2.0, 2.0, 2.0], 0, 2), ([3.0, 1.0, 1.0], 0, 2), ([0.0, 3.0, 3.0], 1, 0)],
)
def test_best_and_worst_with_ties(rewards, best, worst):
    (group,) = groups_of([rewards])

    def samples(select):
        config = run_config(loss={"select": select})
        return [head.sample for head in selected(scored_group(group, config), config)]

    assert samples("all") == [0, 1, 2]
    assert samples("best") == [best]
    assert samples("best_and_worst") == [best, worst]


def test_a_pair_of_equals_prefers_nothing():
    """skip_no_signal = false keeps such groups in the batch: they train nothing, and a batch of them no update."""
    loss = {"name": "online_dpo", "select": "best_and_worst", "skip_no_signal": False}
    groups = groups_of([[1.0, 1.0, 1.0], [0.0, 2.0, 1.0]])
    measured = columns(reference_logprobs=0.5)
    batch = prepared(groups, config=run_config(loss=loss), step=0, measure=measured)
    assert batch.keys == {0: (), 1: ((1, 1), (1, 0))}
    assert [sequence.key for sequence in batch.of(groups)] == [(1, 1), (1, 0)]
    ties = prepared(groups[:1], config=run_config(loss=loss), step=0, measure=measured)
    assert ties.of(groups[:1]) == []
    assert ties.metrics["reward_mean"] == 1.0


def test_selection_sees_the_truncation_penalty_and_leaves_the_advantages_those_of_the_whole_group():
    groups = groups_of([[1.0, 2.0, 6.0]], finish={(0, 2): "length"})
    loss = {"advantages": "group_mean", "select": "best_and_worst", "truncated": "penalty", "truncation_reward": -3.0}
    batch = prepared(groups, config=run_config(loss=loss), step=0)
    assert batch.keys[0] == ((0, 1), (0, 2))
    found = advantages_of(batch, groups)
    assert (found[0, 1][0], found[0, 2][0]) == (2.0, -3.0)


def test_the_end_of_a_completion_of_fixed_length_is_its_truncate_token():
    rollout = make_rollout(0, 0, np.random.default_rng(0), finish_reason="length")
    tokens = rollout.completion.segments[0].tokens
    tokens[:] = 3
    tokens[1] = 7

    def truncated(**rewards):
        return is_truncated(rollout.completion, run_config(rewards=rewards).rewards)

    assert truncated()
    assert not truncated(truncate_token=7)
    assert not truncated(truncate_token=7, truncate_after=1)
    assert truncated(truncate_token=7, truncate_after=2)
    assert truncated(truncate_token=8)
    # training still covers what comes after it
    batch = prepared(
        [Group(ordinal=0, rollouts=(rollout, make_rollout(0, 1, np.random.default_rng(1))))],
        config=run_config(rewards={"truncate_token": 7}, loss={"truncated": "mask"}),
        step=0,
    )
    assert batch.sequences[0, 0].num_targets == len(tokens)


@drawn(
    20,
    60,
    rewards=st.lists(st.lists(st.integers(0, 3).map(float), min_size=2, max_size=5), min_size=1, max_size=6),
    capacity=st.integers(1, 200),
    data=st.data(),
)
def test_pairs_are_whole_and_adjacent_in_every_microbatch(rewards, capacity, data):
    keys = [(ordinal, sample) for ordinal, row in enumerate(rewards) for sample in range(len(row))]
    cut = data.draw(st.sets(st.sampled_from(keys)))
    groups = groups_of(rewards, finish=dict.fromkeys(cut, "length"))
    if data.draw(st.booleans(), label="shared prompts"):
        groups = sharing_prompts(groups)
    loss = {"name": "online_dpo", "select": "best_and_worst", "truncated": "mask"}
    batch = prepared(groups, config=run_config(loss=loss), step=0)
    microbatches = batching.collate(batch.of(groups), capacity, atom_size=2)
    found = []
    for microbatch in microbatches:
        assert len(microbatch.keys) % 2 == 0
        assert set(microbatch.segment_ids) == set(range(len(microbatch.keys)))
        found += list(zip(microbatch.keys[0::2], microbatch.keys[1::2], strict=True))
        assert microbatch.num_tokens <= capacity or len(microbatch.keys) == 2
    expected = []
    for ordinal, row in enumerate(rewards):
        ranked = sorted(range(len(row)), key=lambda sample: -row[sample])
        pair = (ordinal, ranked[0]), (ordinal, ranked[-1])
        if row[ranked[0]] > row[ranked[-1]] and not cut & set(pair):
            expected.append(pair)
    assert sorted(found) == sorted(expected)


# The KL penalty


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("truncated", ["keep", "mask"])
def test_kl_in_the_reward_of_whole_completions(estimator, truncated):
    """Off every reward of the group, masked and unselected ones included: they are in the baseline."""
    groups = groups_of(REWARDS, finish={(0, 1): "length"})
    measure = columns(reference_logprobs=0.5)
    kl = {"coef": 0.3, "estimator": estimator}
    loss = {"advantages": "group_mean", "truncated": truncated, "select": "best_and_worst"}
    batch = prepared(groups, config=run_config(loss=loss, kl=kl), step=0, measure=measure)

    totals = {}
    for group in groups:
        for rollout in group.rollouts:
            key = group.ordinal, rollout.completion.sample
            behaviour = rollout.completion.segments[0].behaviour_logprobs.astype(np.float64)
            noise = np.random.default_rng((1, 0, *key)).normal(size=len(behaviour))
            difference = behaviour - (behaviour + 0.5 * noise).astype(np.float32)
            k3 = np.exp(-difference) - 1 + difference
            totals[key] = {"k1": difference, "k2": difference**2 / 2, "k3": k3}[estimator].sum()
    for ordinal, rewards in enumerate(REWARDS):
        penalised = np.array([r - 0.3 * totals[ordinal, s] for s, r in enumerate(rewards)])
        for key in batch.keys[ordinal]:
            sequence = batch.sequences[key]
            if truncated == "mask" and key == (0, 1):
                assert sequence.num_targets == 0
            else:
                expected = penalised[key[1]] - penalised.mean()
                np.testing.assert_allclose(sequence.advantages[sequence.mask], expected, rtol=1e-4, atol=1e-5)
    assert batch.metrics["kl_reference_sum"] == pytest.approx(np.mean(list(totals.values())), rel=1e-5)
    assert batch.metrics["kl_penalty"] == pytest.approx(0.3 * np.mean(list(totals.values())), rel=1e-5)
    tokens = sum(rollout.completion.num_tokens for group in groups for rollout in group.rollouts)
    assert batch.metrics["kl_reference"] == pytest.approx(sum(totals.values()) / tokens, rel=1e-5)


def test_the_present_coefficient_counts_not_the_configured_one():
    groups = groups_of(REWARDS)
    config = run_config(loss={"advantages": "reward"}, kl={"coef": 0.3, "target": 6.0})
    found = []
    for coef in (0.3, 0.6):
        batch = prepared(groups, config=config, step=0, measure=columns(reference_logprobs=0.5), kl_coef=coef)
        found.append({key: values[0] for key, values in advantages_of(batch, groups).items()})
        assert batch.metrics["kl_coef"] == coef
    for (ordinal, sample), once in found[0].items():
        reward = REWARDS[ordinal][sample]
        assert found[1][ordinal, sample] - reward == pytest.approx(2 * (once - reward), rel=1e-4)


def test_without_a_penalty_in_the_reward_only_what_is_trained_is_measured():
    seen = []

    def measure(sequences):
        seen.extend(sequence.key for sequence in sequences)
        return columns(reference_logprobs=0.1)(sequences)

    groups = groups_of(REWARDS, finish={(1, 2): "length"})
    loss = {"name": "online_dpo", "select": "best_and_worst", "truncated": "mask"}
    batch = prepared(groups, config=run_config(loss=loss), step=0, measure=measure)
    assert sorted(seen) == [(0, 0), (0, 2), (1, 1)]
    assert batch.metrics["kl_penalty"] == 0.0


def test_a_batch_without_a_token_to_measure_reports_no_kl():
    groups = groups_of(REWARDS, finish={(o, s): "length" for o in range(2) for s in range(3)})
    config = run_config(loss={"truncated": "mask"}, kl={"coef": 0.1, "place": "loss", "estimator": "k3"})
    batch = prepared(groups, config=config, step=0, measure=columns(reference_logprobs=0.1))
    assert "kl_reference_sum" not in batch.metrics


# Advantages of tokens


def padded_gae(groups, scores, *, measured, gamma, lam, kl=None, discount_of=None, whiten_rewards=False, ddof=0):
    """{key: (advantages, returns)}: a padded float64 loop over rewards placed by hand."""
    keys = [(group.ordinal, rollout.completion.sample) for group in groups for rollout in group.rollouts]
    lengths = {
        (group.ordinal, r.completion.sample): sum(len(s.tokens) for s in r.completion.segments if s.is_sampled)
        for group in groups
        for r in group.rollouts
    }
    width = max(lengths.values())
    rewards, values = np.zeros((len(keys), width)), np.zeros((len(keys), width + 1))
    mask = np.zeros((len(keys), width), dtype=bool)
    for row, key in enumerate(keys):
        length = lengths[key]
        mask[row, :length] = True
        if kl is not None:
            rewards[row, :length] -= kl[key]
        rewards[row, length - 1] += scores[key] * (1.0 if discount_of is None else discount_of[key])
        values[row, :length] = measured[key]
    if whiten_rewards:
        mean, variance = rewards[mask].mean(), rewards[mask].var(ddof=ddof)
        rewards = np.where(mask, (rewards - mean) / np.sqrt(variance + 1e-8) + mean, 0)
    advantages = np.zeros((len(keys), width + 1))
    for t in reversed(range(width)):
        delta = rewards[:, t] + gamma * values[:, t + 1] - values[:, t]
        advantages[:, t] = np.where(mask[:, t], delta + gamma * lam * advantages[:, t + 1], 0)
    return {
        key: (advantages[row, : lengths[key]], advantages[row, : lengths[key]] + measured[key])
        for row, key in enumerate(keys)
    }


def scores_of(groups):
    return {(g.ordinal, r.completion.sample): r.reward for g in groups for r in g.rollouts}


def assert_shaped(sequences, expected):
    for sequence in sequences:
        advantages, returns = expected[sequence.key]
        np.testing.assert_allclose(sequence.advantages[sequence.mask], advantages, rtol=1e-4, atol=2e-5)
        np.testing.assert_allclose(sequence.returns[sequence.mask], returns, rtol=1e-4, atol=2e-5)
        assert not sequence.returns[~sequence.mask].any()


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("coef", [0.0, 0.2])
@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_gae_against_a_padded_loop(coef, whiten_rewards, given):
    groups = groups_of(REWARDS, given=given)
    critic = {"gamma": 0.9, "lam": 0.8, "whiten_rewards": whiten_rewards}
    config = run_config(loss={"name": "ppo", "advantages": "gae"}, critic=critic, kl={"coef": coef})
    spreads = {"values": 1.0} | ({"reference_logprobs": 0.4} if coef else {})
    batch = prepared(groups, config=config, step=0, measure=columns(**spreads))
    kl = None
    if coef:
        kl = {
            key: coef * (s.behaviour_logprobs - s.reference_logprobs)[s.mask].astype(np.float64)
            for key, s in batch.sequences.items()
        }
    measured = {key: s.values[s.mask].astype(np.float64) for key, s in batch.sequences.items()}
    expected = padded_gae(
        groups, scores_of(groups), measured=measured, gamma=0.9, lam=0.8, kl=kl, whiten_rewards=whiten_rewards
    )
    assert_shaped(batch.of(groups), expected)


def test_token_rewards_are_whitened_over_each_minibatch_with_the_advantages():
    groups = groups_of(REWARDS)
    loss = {"name": "ppo", "advantages": "gae", "whiten_advantages": "minibatch"}
    config = run_config(loss=loss, critic={"gamma": 0.9, "lam": 0.8, "whiten_rewards": True})
    batch = prepared(groups, config=config, step=0, measure=columns(values=1.0))
    measured = {key: s.values[s.mask].astype(np.float64) for key, s in batch.sequences.items()}
    for group in groups:
        raw = padded_gae([group], scores_of([group]), measured=measured, gamma=0.9, lam=0.8, whiten_rewards=True)
        together = np.concatenate([advantages for advantages, _ in raw.values()])
        expected = {
            key: ((advantages - together.mean()) / np.sqrt(together.var() + 1e-8), returns)
            for key, (advantages, returns) in raw.items()
        }
        assert_shaped(batch.of([group]), expected)


def test_a_completion_cut_at_the_limit_has_no_step_after_its_last_token():
    groups = groups_of(REWARDS, finish={(0, 1): "length"})
    critic = {"gamma": 0.9, "lam": 0.8, "score_place": "after_last"}
    config = run_config(loss={"name": "ppo", "advantages": "gae"}, critic=critic)
    batch = prepared(groups, config=config, step=0, measure=columns(values=1.0))
    measured = {key: s.values[s.mask].astype(np.float64) for key, s in batch.sequences.items()}
    discounts = {key: 1.0 if key == (0, 1) else 0.9 * 0.8 for key in measured}
    expected = padded_gae(groups, scores_of(groups), measured=measured, gamma=0.9, lam=0.8, discount_of=discounts)
    assert_shaped(batch.of(groups), expected)


def test_the_penalty_in_the_loss_is_not_in_the_reward():
    groups = groups_of(REWARDS)
    found = []
    for kl in ({"coef": 0.0}, {"coef": 0.5, "place": "loss", "estimator": "k3"}):
        config = run_config(loss={"name": "ppo", "advantages": "gae"}, kl=kl)
        batch = prepared(groups, config=config, step=0, measure=columns(values=1.0, reference_logprobs=0.5))
        found.append(advantages_of(batch, groups))
    for key, advantages in found[0].items():
        np.testing.assert_array_equal(advantages, found[1][key])


def test_masked_completions_take_no_part_in_gae_or_whitening():
    groups = groups_of(REWARDS, finish={(0, 0): "length"})
    loss = {"name": "ppo", "advantages": "gae", "truncated": "mask", "whiten_advantages": "batch"}
    batch = prepared(groups, config=run_config(loss=loss), step=0, measure=columns(values=1.0))
    assert batch.sequences[0, 0].num_targets == 0
    trained = np.concatenate(list(advantages_of(batch, groups).values()))
    assert trained.mean() == pytest.approx(0, abs=1e-6)
    (microbatch,) = batching.collate(batch.of(groups), 10_000)
    assert (0, 0) not in microbatch.keys
    assert len(microbatch.returns) == len(trained)


def test_vtrace_at_staleness_0_is_gae_and_truncates_beyond():
    groups = groups_of(REWARDS)

    def shaped(spread, **critic):
        config = run_config(loss={"name": "aipo", "advantages": "gae"}, critic={"lam": 0.9, "gamma": 0.95, **critic})
        batch = prepared(groups, config=config, step=0, measure=columns(values=1.0, proximal_logprobs=spread))
        return batch.of(groups)

    for plain, corrected in zip(shaped(0.0), shaped(0.0, vtrace=True), strict=True):
        np.testing.assert_allclose(corrected.advantages, plain.advantages, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(corrected.returns, plain.returns, rtol=1e-5, atol=1e-6)
    for sequence in shaped(0.7, vtrace=True, max_rho=1.5, max_c=0.8):
        at = sequence.mask
        ratios = np.exp((sequence.proximal_logprobs - sequence.behaviour_logprobs)[at].astype(np.float64))
        values = np.append(sequence.values[at].astype(np.float64), 0.0)
        rewards = np.zeros(len(ratios))
        rewards[-1] = scores_of(groups)[sequence.key]
        correction, targets = 0.0, np.append(np.zeros(len(ratios)), 0.0)
        for t in reversed(range(len(ratios))):
            error = rewards[t] + 0.95 * values[t + 1] - values[t]
            correction = min(ratios[t], 1.5) * error + 0.95 * 0.9 * min(ratios[t], 0.8) * correction
            targets[t] = values[t] + correction
        following = 0.9 * targets[1:] + 0.1 * values[1:]
        np.testing.assert_allclose(sequence.returns[at], targets[:-1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            sequence.advantages[at], rewards + 0.95 * following - values[:-1], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("estimator", ["gae", "group_mean"])
def test_whitening_over_the_batch_and_over_each_minibatch(estimator):
    groups = groups_of([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0], [5.0, 5.0, 1.0], [9.0, 0.0, 0.0]])
    measure = columns(values=1.0) if estimator == "gae" else None

    def with_whitening(whiten):
        loss = {"name": "ppo", "advantages": estimator, "whiten_advantages": whiten}
        return prepared(groups, config=run_config(loss=loss), step=0, measure=measure)

    plain, batch, minibatch = with_whitening("no"), with_whitening("batch"), with_whitening("minibatch")
    for parts, whitened in (([groups], batch), ([groups[0::2], groups[1::2]], minibatch)):
        for part in parts:
            raw, found = advantages_of(plain, part), advantages_of(whitened, part)
            together = np.concatenate(list(raw.values()))
            for key, values in found.items():
                expected = (raw[key] - together.mean()) / np.sqrt(together.var() + 1e-8)
                np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)
    if estimator == "gae":  # returns are of the advantages before whitening
        for key, sequence in plain.sequences.items():
            np.testing.assert_array_equal(sequence.returns, batch.sequences[key].returns)
            np.testing.assert_array_equal(sequence.returns, minibatch.sequences[key].returns)


# Whitening in parts


@pytest.mark.parametrize("unbiased", [False, True])
def test_whitening_in_parts_of_the_minibatch_as_on_ranks(unbiased):
    """Rewards (mean kept) and advantages of contiguous shares of the canonical order, whatever the order given."""
    rng = np.random.default_rng(3)
    groups = groups_of(rng.integers(0, 5, (16, 2)).astype(float).tolist())
    loss = {"name": "ppo", "advantages": "gae", "whiten_advantages": "minibatch", "whiten_parts": 2}
    loss["whiten_unbiased"] = unbiased
    sizes = {"groups_per_step": 16, "completions_per_group": 2}
    config = run_config(**sizes, loss=loss, critic={"gamma": 0.9, "lam": 0.8, "whiten_rewards": True})
    batch = prepared(groups, config=config, step=0, measure=columns(values=1.0))
    measured = {key: s.values[s.mask].astype(np.float64) for key, s in batch.sequences.items()}
    expected = {}
    for part in (groups[:8], groups[8:]):
        own = {key: values for key, values in measured.items() if key[0] in {group.ordinal for group in part}}
        raw = padded_gae(part, scores_of(part), measured=own, gamma=0.9, lam=0.8, whiten_rewards=True, ddof=unbiased)
        together = np.concatenate([advantages for advantages, _ in raw.values()])
        expected |= {
            key: ((advantages - together.mean()) / np.sqrt(together.var(ddof=unbiased) + 1e-8), returns)
            for key, (advantages, returns) in raw.items()
        }
    assert_shaped(batch.of(groups), expected)
    dealt = [groups[index] for index in rng.permutation(16)]
    in_order = {sequence.key: sequence.advantages for sequence in batch.of(groups)}
    for sequence in batch.of(dealt):
        assert np.array_equal(sequence.advantages, in_order[sequence.key])
    whole = run_config(**sizes, loss=loss | {"whiten_parts": 1}, critic={"whiten_rewards": True})
    together = prepared(groups, config=whole, step=0, measure=columns(values=1.0)).of(groups)
    assert abs(together[0].advantages - in_order[0, 0]).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": {"whiten_parts": 3, "whiten_advantages": "batch"}}, "too small"),  # 23 completions in 3 parts
        ({"loss": {"whiten_parts": 2, "whiten_advantages": "minibatch"}, "trainer": {"minibatches": 2}}, "too small"),
        (
            {
                "loss": {"whiten_parts": 2, "whiten_advantages": "batch", "select": "best"},
                "groups_per_step": 8,
                "completions_per_group": 4,
            },
            "too small",
        ),
        ({"loss": {"whiten_parts": 2}}, "nothing to whiten"),
    ],
)
def test_parts_that_cannot_be_whitened_are_refused(changes, message):
    allowed = {"loss": {"whiten_parts": 2, "whiten_advantages": "batch"}}
    sizes = {"groups_per_step": 23, "completions_per_group": 1}

    def resolved(changes):
        loss = {"name": "ppo", "advantages": "gae", **changes["loss"]}
        return run_config(**{**sizes, **changes, "loss": loss})

    assert resolved(allowed).loss.whiten_parts == 2
    with pytest.raises(ValueError, match=message):
        resolved(changes)
