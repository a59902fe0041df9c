"""`loss.credit = "turn"`: the advantage of each turn of an episode, against a plain computation in float64."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from drawn import drawn
from hypothesis import strategies as st
from pydantic import ValidationError
from training_data import columns, make_rollout, prepared, run_config, scored_group

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.types import EpisodeRecord, Group, Rollout, Segment, VersionSpan
from slipstream.core.vetting import MAX_REWARD, Limits, vetted
from slipstream.environments.checks import check_environments
from slipstream.trainer.loss_checks import check_loss
from slipstream.trainer.scores import head_of, rollout_advantages, turn_advantages

ENVIRONMENT = {"class_path": "guess"}


def configured(loss: dict[str, Any], *, weight: float = 1.0, **changes: Any) -> RunConfig:
    environment = ENVIRONMENT | {"reward_weight": weight}
    loss = {"name": "grpo", "credit": "turn"} | loss
    return run_config(loss=loss, environment=environment, model={"max_positions": 4096}, **changes)


def sampled(tokens: int) -> Segment:
    return Segment(
        tokens=np.arange(tokens, dtype=np.int32),
        behaviour_logprobs=np.full(tokens, -1.0, dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=0),) if tokens else (),
    )


def episode(
    sample: int, rewards: list[float | None], *, total: float, ordinal: int = 0, between: int = 1, **fields: Any
) -> Rollout:
    """An episode of a turn for each of `rewards`: turn t has t tokens, and `between` given ones behind it."""
    plain = make_rollout(ordinal, sample, np.random.default_rng(sample), finish_reason=fields.pop("ends", "stop"))
    given = [Segment(tokens=np.zeros(between, dtype=np.int32))] if between else []
    segments = [one for turn in range(1, len(rewards) + 1) for one in (sampled(turn), *given)]
    completion = msgspec.structs.replace(
        plain.completion,
        segments=tuple(segments[:-1] if between else segments),
        episode=EpisodeRecord(turn_rewards=rewards, reward=math.fsum(r or 0.0 for r in rewards)),
    )
    return Rollout(completion=completion, reward=total, **fields)


def by_brute_force(group: Group, config: RunConfig) -> dict[tuple[int, int], list[float]]:
    """(sample, turn from 0) -> advantage, by the definition."""
    loss, found = config.loss, {}
    returns: dict[int, list[float]] = {}
    for rollout in group.rollouts:
        record = rollout.completion.episode
        assert record is not None
        left, returns[rollout.sample] = rollout.reward, []
        for reward in record.turn_rewards:
            returns[rollout.sample].append(left)
            left -= config.environment.reward_weight * (0.0 if reward is None else reward)
    for turn in range(max(map(len, returns.values()))):
        at = {sample: (one[turn] if turn < len(one) else 0.0) for sample, one in returns.items()}
        values = np.array(list(at.values()), dtype=np.float64)
        for sample, value in at.items():
            if loss.advantages == "leave_one_out":
                advantage = value - (values.sum() - value) / (len(values) - 1)
            else:
                advantage = (value - values.mean()) / (values.std() + loss.std_eps)
            if turn < len(returns[sample]):
                found[sample, turn] = advantage
    return {(0, s): [found[s, t] for t in range(len(returns[s]))] for s in returns}


REWARDS = st.lists(st.one_of(st.none(), st.floats(-3, 3, width=32)), min_size=1, max_size=5)


@pytest.mark.parametrize("advantages", ["leave_one_out", "group_normalised"])
@drawn(
    20,
    60,
    episodes=st.lists(st.tuples(REWARDS, st.floats(-2, 2, width=32)), min_size=2, max_size=5),
    weight=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_random_groups(advantages: str, episodes: list[tuple[list[float | None], float]], weight: float) -> None:
    config = configured({"advantages": advantages}, weight=weight)
    group = Group(
        ordinal=0,
        rollouts=tuple(
            episode(sample, rewards, total=other + weight * math.fsum(r or 0.0 for r in rewards))
            for sample, (rewards, other) in enumerate(episodes)
        ),
    )
    found = turn_advantages([scored_group(group, config)], config)
    expected = by_brute_force(group, config)
    assert found.keys() == expected.keys()
    for key, of_turns in expected.items():
        np.testing.assert_allclose(found[key], of_turns, rtol=1e-4, atol=1e-4)
    whole = rollout_advantages([scored_group(group, config)], config)
    assert {key: of_turns[0] for key, of_turns in found.items()} == whole, "the first turn has it all before it"


@pytest.mark.parametrize("rewards", [[None, None, None], [0.0, None, 0.0]])
@pytest.mark.parametrize("advantages", ["group_mean", "group_normalised", "leave_one_out", "reward"])
def test_without_rewards_of_turns_every_turn_has_the_advantage_of_its_episode(
    rewards: list[float | None], advantages: str
) -> None:
    config = configured({"advantages": advantages})
    group = Group(ordinal=0, rollouts=tuple(episode(s, rewards, total=t) for s, t in enumerate((0.1, 1.7, -0.4))))
    scored, penalties = [scored_group(group, config)], {(0, 0): 0.3, (0, 1): 0.7, (0, 2): 0.1}
    whole = rollout_advantages(scored, config, penalties)
    assert turn_advantages(scored, config, penalties) == {key: [one] * 3 for key, one in whole.items()}


def test_of_a_weight_of_0_only_the_end_counts() -> None:
    config = configured({"advantages": "leave_one_out"}, weight=0.0)
    group = Group(ordinal=0, rollouts=tuple(episode(s, [5.0, -2.0], total=float(s)) for s in range(3)))
    scored = [scored_group(group, config)]
    assert turn_advantages(scored, config) == {k: [a] * 2 for k, a in rollout_advantages(scored, config).items()}


def test_groups_are_compared_with_themselves() -> None:
    config = configured({"advantages": "group_mean"})
    groups = [
        Group(ordinal=4, rollouts=(episode(0, [1.0], total=1.0, ordinal=4), episode(1, [0.0], total=0.0, ordinal=4))),
        Group(
            ordinal=7,
            rollouts=(episode(0, [1.0, 4.0], total=5.0, ordinal=7), episode(1, [3.0], total=3.0, ordinal=7)),
        ),
    ]
    found = turn_advantages([scored_group(group, config) for group in groups], config)
    assert found == {(4, 0): [0.5], (4, 1): [-0.5], (7, 0): [1.0, 2.0], (7, 1): [-1.0]}


def test_a_penalty_is_paid_at_the_end_and_nothing_is_left_behind_it() -> None:
    config = configured({"advantages": "group_mean"})
    group = Group(ordinal=0, rollouts=(episode(0, [1.0, 1.0], total=2.0), episode(1, [1.0], total=1.0)))
    found = turn_advantages([scored_group(group, config)], config, {(0, 0): 0.5, (0, 1): 8.0})
    assert found == {(0, 0): [4.25, 0.25], (0, 1): [-4.25]}


@pytest.mark.parametrize(
    ("loss", "fields"),
    [({}, {"failure": "gone"}), ({"truncated": "penalty", "truncation_reward": -1.0}, {"ends": "length"})],
)
def test_a_reward_in_place_of_another_holds_nothing_of_the_turns(loss: dict[str, Any], fields: dict[str, Any]) -> None:
    config = configured({"advantages": "reward"} | loss)
    group = Group(ordinal=0, rollouts=(episode(0, [3.0, 2.0], total=-1.0, **fields), episode(1, [3.0, 2.0], total=5.0)))
    assert turn_advantages([scored_group(group, config)], config) == {(0, 0): [-1.0, -1.0], (0, 1): [5.0, 2.0]}


def test_what_truncation_adds_is_paid_at_the_end() -> None:
    config = configured({"advantages": "reward", "truncated": "subtract", "truncation_reward": -1.0})
    group = Group(ordinal=0, rollouts=(episode(0, [3.0, 2.0], total=5.0, ends="length"),))
    assert turn_advantages([scored_group(group, config)], config) == {(0, 0): [4.0, 1.0]}


def test_an_episode_that_failed_before_its_first_turn_counts_once() -> None:
    config = configured({"advantages": "group_mean"})
    group = Group(ordinal=0, rollouts=(episode(0, [], total=-1.0, failure="gone"), episode(1, [1.0, None], total=1.0)))
    assert turn_advantages([scored_group(group, config)], config) == {(0, 0): [-1.0], (0, 1): [1.0, 0.0]}


@pytest.mark.parametrize("between", [0, 2], ids=["nothing is said", "something is said"])
def test_tokens_have_the_advantages_of_their_turns(between: int) -> None:
    """By hand: G = (3, 2) and (1, 4): the second episode is worse than the first, and its second turn is better."""
    config = configured({"advantages": "group_mean"}, groups_per_step=1, completions_per_group=2)
    rollouts = (
        episode(0, [1.0, 2.0], total=3.0, between=between),
        episode(1, [-3.0, 4.0], total=1.0, between=between),
    )
    batch = prepared([Group(ordinal=0, rollouts=rollouts)], config=config, step=0)
    found = {key: one.advantages[one.mask].tolist() for key, one in batch.sequences.items()}
    assert found == {(0, 0): [1.0, -1.0, -1.0], (0, 1): [-1.0, 1.0, 1.0]}
    for sequence in batch.sequences.values():
        assert not sequence.advantages[~sequence.mask].any()


def test_masked_empty_and_unrecorded_episodes_are_prepared() -> None:
    config = configured({"advantages": "reward", "truncated": "mask"}, groups_per_step=1, completions_per_group=4)
    unrecorded = episode(3, [1.0, 1.0], total=2.0)
    unrecorded = msgspec.structs.replace(
        unrecorded, completion=msgspec.structs.replace(unrecorded.completion, episode=None)
    )
    rollouts = (
        episode(0, [1.0, 2.0], total=3.0, ends="length"),
        episode(1, [], total=0.0, failure="gone"),
        episode(2, [1.0, 2.0], total=3.0),
        unrecorded,
    )
    batch = prepared([Group(ordinal=0, rollouts=rollouts)], config=config, step=0)
    found = {key[1]: one.advantages[one.mask].tolist() for key, one in batch.sequences.items()}
    assert found == {0: [], 1: [], 2: [3.0, 2.0, 2.0], 3: [2.0, 2.0, 2.0]}


def test_whitening_goes_over_tokens() -> None:
    loss = {"advantages": "reward", "whiten_advantages": "batch"}
    config = configured(loss, groups_per_step=1, completions_per_group=2)
    rollouts = (episode(0, [1.0, 2.0], total=3.0), episode(1, [0.0, 4.0], total=1.0))
    batch = prepared([Group(ordinal=0, rollouts=rollouts)], config=config, step=0)
    plain = np.array([3.0, 2.0, 2.0, 1.0, 1.0, 1.0])
    found = np.concatenate([batch.sequences[0, s].advantages[batch.sequences[0, s].mask] for s in (0, 1)])
    np.testing.assert_allclose(found, (plain - plain.mean()) / plain.std(), rtol=1e-5)


def test_a_kl_penalty_is_part_of_the_end() -> None:
    config = configured({"advantages": "reward"}, groups_per_step=1, completions_per_group=2, kl={"coef": 0.5})
    rollouts = (episode(0, [1.0, 2.0], total=3.0), episode(1, [0.0, 4.0], total=4.0))
    measure = columns(reference_logprobs=0.5)
    batch = prepared([Group(ordinal=0, rollouts=rollouts)], config=config, step=0, measure=measure)
    for sequence in batch.sequences.values():
        assert sequence.reference_logprobs is not None
        penalty = 0.5 * float((sequence.behaviour_logprobs - sequence.reference_logprobs)[sequence.mask].sum())
        first, second, third = (sequence.advantages[sequence.mask] + penalty).tolist()
        assert (first, second, third) == pytest.approx((3.0, 2.0, 2.0) if sequence.key[1] == 0 else (4.0, 4.0, 4.0))


def test_rewards_of_turns_travel_with_the_head() -> None:
    sent = head_of(episode(0, [1.0, None], total=1.0), configured({}).rewards)
    assert sent.episode is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=type(sent)).episode == sent.episode
    assert sent.episode.turn_rewards == (1.0, None)


@pytest.mark.parametrize("value", [math.nan, math.inf, -2 * MAX_REWARD])
def test_an_impossible_reward_of_a_turn_fails_its_rollout(value: float) -> None:
    [found] = vetted([episode(0, [1.0, value], total=1.0)], Limits(failure_reward=-7.0))
    assert found.reward == -7.0
    assert found.failure is not None
    assert found.failure.startswith(f"the reward of turn 2 is {value}")
    [found] = vetted([episode(0, [1.0, None], total=1.0)], Limits())
    assert found.failure is None


@pytest.mark.parametrize(
    ("loss", "lesson"),
    [
        ({"name": "ppo", "advantages": "gae"}, "a critic's advantages are of tokens"),
        ({"several_rewards": "normalise_then_sum"}, "taken off a sum of rewards"),
        ({"name": "online_dpo", "select": "best_and_worst"}, "turns have none of their own"),
        ({"name": "best_of_n", "select": "best"}, "turns have none of their own"),
        ({"name": "rloo"}, "turns have none of their own"),
    ],
)
def test_credit_by_turns_is_refused_where_it_would_do_nothing(loss: dict[str, Any], lesson: str) -> None:
    with pytest.raises((ConfigError, ValidationError), match=lesson):
        check_loss(configured(loss))


def test_credit_by_turns_needs_an_environment() -> None:
    config = resolve("quickstart", {"loss.credit": "turn"})
    with pytest.raises(ConfigError, match="about episodes of several turns"):
        check_environments(config, None)
    overrides = {"loss.credit": "turn", "environment.class_path": "guess", "environment.max_turns": 2}
    check_environments(resolve("quickstart", overrides), None)
