"""Scores of rollouts: the reward after truncation, signal, selection, and advantages of whole completions.

All of it follows from the heads of a step's rollouts, which every rank has, whichever rank has the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from types import MappingProxyType

import torch
from torch import Tensor

from slipstream.algorithms.advantages import (
    greedy_baseline,
    group_mean,
    group_normalised,
    leave_one_out,
    normalise_then_sum,
    optimal,
)
from slipstream.algorithms.losses import loss_named
from slipstream.algorithms.responses import has_token
from slipstream.core.config import RunConfig
from slipstream.core.ranks import Dealt
from slipstream.core.sections import RewardsConfig
from slipstream.core.training_sections import GROUP_RELATIVE, KLConfig, LossConfig
from slipstream.core.types import Completion, EpisodeHead, EpisodeRecord, Rollout, RolloutHead
from slipstream.trainer.measure import Key

EQUAL_REWARDS = 1e-8
"""Rewards that differ by no more count as equal."""


@dataclass(frozen=True)
class ScoredGroup:
    """The heads of all rollouts of a group, by sample."""

    ordinal: int
    heads: tuple[RolloutHead, ...]


def head_of(rollout: Rollout, rewards: RewardsConfig) -> RolloutHead:
    """Return what is known of `rollout` besides its tokens."""
    completion = rollout.completion
    sampled = [segment for segment in completion.segments if segment.is_sampled]
    versions = [span.version for segment in sampled for span in segment.version_spans]
    return RolloutHead(
        ordinal=completion.ordinal,
        sample=completion.sample,
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        failure=rollout.failure,
        logged=rollout.logged,
        is_truncated=is_truncated(completion, rewards),
        is_stopped=completion.finish_reason == "stop",
        num_prompt=len(completion.prompt.tokens),
        num_tokens=completion.num_tokens,
        num_sampled=sum(len(segment.tokens) for segment in sampled),
        surprisal=-float(sum(float(s.behaviour_logprobs.sum()) for s in sampled if s.behaviour_logprobs is not None)),
        min_version=min(versions, default=0),
        max_version=max(versions, default=0),
        episode=None if completion.episode is None else _episode_head(completion, completion.episode),
    )


def _episode_head(completion: Completion, record: EpisodeRecord) -> EpisodeHead:
    return EpisodeHead(
        turns=(turns := sum(segment.is_sampled for segment in completion.segments)),
        turn_rewards=tuple(record.turn_rewards[:turns]),
        is_cut=record.is_cut,
        tool_calls=record.num_tool_calls,
        tool_errors=record.num_tool_errors,
        restarts=record.num_restarts,
        environment_s=record.environment_s,
        branches=completion.num_branches,
    )


def scored_groups(heads: Iterable[RolloutHead]) -> list[ScoredGroup]:
    """Return `heads`, those of a group side by side, by their groups."""
    return [ScoredGroup(ordinal, tuple(members)) for ordinal, members in groupby(heads, lambda head: head.ordinal)]


def key_of(head: RolloutHead) -> Key:
    return head.ordinal, head.sample


def is_truncated(completion: Completion, rewards: RewardsConfig) -> bool:
    """Tell whether the completion lacks its end: a stop token, or `truncate_token` where that is asked for."""
    if rewards.truncate_token is None:
        return completion.finish_reason != "stop"
    return not has_token(completion.trunk_tokens, rewards.truncate_token, after=rewards.truncate_after)


def effective_reward(head: RolloutHead, loss: LossConfig) -> float:
    """Return the reward that advantages are made of; of a truncated completion it depends on `loss.truncated`:

        penalty:   truncation_reward             the original RLHF code, its reproduction (N, item 26), TL;DR's (A)
        subtract:  reward + truncation_reward    TRL's missing_eos_penalty, with the sign turned round

    Otherwise, and where every completion has its end, the reward as it is.
    """
    if loss.truncated in ("penalty", "subtract") and head.is_truncated:
        return loss.truncation_reward + (head.reward if loss.truncated == "subtract" else 0.0)
    return head.reward


def has_signal(group: ScoredGroup, config: RunConfig) -> bool:
    """Tell whether `group` is worth training on.

    It is not when every rollout would get the advantage 0, or a pair of them be ranked by chance, or when all have
    failed and so nothing is known of any. A teacher teaches by every completion, whatever its reward.
    """
    loss = config.loss
    if config.has_teacher and not is_of_pairs(loss):
        return any(head.num_sampled for head in group.heads)
    if all(head.failure is not None for head in group.heads):
        return False
    rewards = [effective_reward(head, loss) for head in group.heads]
    if is_of_pairs(loss):
        return _differ(rewards)
    if loss.advantages not in GROUP_RELATIVE or penalises_reward(config.kl):
        return True
    if loss.several_rewards == "sum_then_normalise":
        return _differ(rewards)
    weights = config.part_weights
    columns = zip(*(_parts(head, len(weights)) for head in group.heads), strict=True)
    return any(
        _differ([part for part in column if not math.isnan(part)])
        for weight, column in zip(weights, columns, strict=True)
        if weight  # rewards that differ may have equal sums, and what is only measured counts for nothing
    )


def _differ(rewards: Sequence[float]) -> bool:
    return bool(rewards) and max(rewards) - min(rewards) > EQUAL_REWARDS


def is_of_pairs(loss: LossConfig) -> bool:
    """Tell whether the loss compares the two completions of a pair."""
    return loss_named(loss.name, loss.params).atom == "pair"


def dealt_by(loss: LossConfig) -> Dealt:
    """Return whether a trainer's ranks are dealt single rollouts, or whole groups: these where all of a group must be
    scored to know which of it is trained on."""
    return "groups" if is_of_pairs(loss) or loss.select != "all" else "samples"


def penalises_reward(kl: KLConfig) -> bool:
    """Tell whether the KL of policy and reference is taken off the reward."""
    return kl.coef > 0 and kl.place == "reward"


def split_baseline(group: ScoredGroup, config: RunConfig) -> tuple[tuple[RolloutHead, ...], RolloutHead | None]:
    """Return the rollouts of `group` that may be trained on, and ReMax's greedy one, sampled behind them."""
    if config.samples_per_group == config.completions_per_group:
        return group.heads, None
    return group.heads[:-1], group.heads[-1]


def rollout_advantages(
    groups: Sequence[ScoredGroup], config: RunConfig, penalties: Mapping[Key, float] | None = None
) -> dict[Key, float]:
    """Return one advantage per rollout; `penalties` are taken off the rewards (the KL of whole completions).

    Not for advantages = 'gae', whose tokens have their own.
    """
    loss = config.loss
    members = [split_baseline(group, config) for group in groups]
    heads = [head for trained, _ in members for head in trained]
    keys = [key_of(head) for head in heads]
    group_ids = torch.tensor([ordinal for ordinal, _ in keys], dtype=torch.int64)
    if loss.several_rewards == "normalise_then_sum":
        weights = torch.tensor(config.part_weights, dtype=torch.float32)
        parts = torch.tensor([_parts(head, len(weights)) for head in heads], dtype=torch.float32)
        normalised = normalise_then_sum(parts, weights, group_ids, std_eps=loss.std_eps, unbiased=loss.unbiased_std)
        return dict(zip(keys, normalised.tolist(), strict=True))
    rewards = torch.tensor([effective_reward(head, loss) for head in heads], dtype=torch.float32)
    if penalties is not None:
        rewards -= torch.tensor([penalties[key] for key in keys], dtype=torch.float32)
    baselines = {
        group.ordinal: effective_reward(baseline, loss)
        for group, (_, baseline) in zip(groups, members, strict=True)
        if baseline is not None
    }
    return dict(zip(keys, _estimated(rewards, group_ids, loss, baselines).tolist(), strict=True))


def turn_advantages(
    groups: Sequence[ScoredGroup], config: RunConfig, penalties: Mapping[Key, float] | None = None
) -> dict[Key, list[float]]:
    """Return one advantage per turn of each episode: `rollout_advantages` of the turn's return, not of the reward.

        G_{i,t} = R_i - w * sum_{u<t} r_{i,u}

    R_i is the effective reward less the penalty, r_{i,u} the environment's reward of turn u (None counts as 0), w is
    environment.reward_weight. Turn t is compared with turn t of the group's other episodes. An episode that ended
    before turn t counts there with G = 0. A failed rollout's reward, and one that loss.truncated = 'penalty' has
    replaced, contains no rewards of turns: it is the return of every turn.
    Identities: the first turn has the advantage of `rollout_advantages`; so has every turn, where no turn was rewarded
    and all episodes of a group have equally many turns.
    """
    heads = [head for group in groups for head in group.heads]
    keys = [key_of(head) for head in heads]
    group_ids = torch.tensor([ordinal for ordinal, _ in keys], dtype=torch.int64)
    returns = [_returns(head, config) for head in heads]
    taken_off = [0.0 if penalties is None else penalties[key] for key in keys]
    advantages: dict[Key, list[float]] = {key: [] for key in keys}
    for turn in range(max(map(len, returns), default=0)):
        has_turn = [turn < len(one) for one in returns]
        brought = [one[turn] if has else 0.0 for has, one in zip(has_turn, returns, strict=True)]
        penalty = [one if has else 0.0 for has, one in zip(has_turn, taken_off, strict=True)]
        rewards = torch.tensor(brought, dtype=torch.float32) - torch.tensor(penalty, dtype=torch.float32)
        for key, has, advantage in zip(
            keys, has_turn, _estimated(rewards, group_ids, config.loss).tolist(), strict=True
        ):
            if has:
                advantages[key].append(advantage)
    return advantages


def _returns(head: RolloutHead, config: RunConfig) -> list[float]:
    """Return the reward that an episode brings from each of its turns on; of one without a turn, its reward."""
    loss, weight = config.loss, config.environment.reward_weight
    reward, episode = effective_reward(head, loss), head.episode
    if episode is None:
        return [reward]
    is_replaced = head.failure is not None or (loss.truncated == "penalty" and head.is_truncated)
    known = () if is_replaced else episode.turn_rewards
    earned = [0.0 if one is None else weight * one for one in known] + [0.0] * (episode.turns - len(known))
    return [reward - before for before in accumulate(earned[:-1], initial=0.0)]


def _estimated(
    rewards: Tensor, group_ids: Tensor, loss: LossConfig, baselines: Mapping[int, float] = MappingProxyType({})
) -> Tensor:
    """Return the advantages of `rewards` [R] by the configured estimator; `baselines` are ReMax's, by group."""
    estimators: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "group_mean": group_mean,
        "group_normalised": partial(group_normalised, std_eps=loss.std_eps, unbiased=loss.unbiased_std),
        "leave_one_out": leave_one_out,
        "optimal": partial(optimal, beta=loss.optimal_beta),
        "greedy_baseline": lambda r, ids: greedy_baseline(r, r.new_tensor([baselines[i] for i in ids.tolist()])),
        "reward": lambda r, _: r,
    }
    return estimators[loss.advantages](rewards, group_ids)


def _parts(head: RolloutHead, num_parts: int) -> list[float]:
    """Return the parts of the reward, NaN where one does not apply; a failed rollout has its reward for every part."""
    if head.failure is not None:
        return [head.reward] * num_parts
    return [float("nan") if part is None else part for part in head.reward_parts.values()]


def selected(group: ScoredGroup, config: RunConfig) -> list[RolloutHead]:
    """Return the rollouts of `group` that `loss.select` trains on: all by sample, the best, or best and then worst.

    As in Asynchronous RLHF, K completions are sampled, two are trained on. Rewards are compared before any KL penalty,
    as preferences are. Of equal ones the lowest sample is best, and the highest of the others worst; losses of pairs
    get none of a group whose best is no better than its worst.
    """
    (heads, _), loss = split_baseline(group, config), config.loss
    if loss.select == "all":
        return list(heads)
    ranked = sorted((head for head in heads if head.num_sampled), key=lambda head: -effective_reward(head, loss))
    if loss.select == "best":
        return ranked[:1]
    if len(ranked) < 2:  # the others are poisoned
        return []
    best, worst = ranked[0], ranked[-1]
    is_tie = not _differ([effective_reward(best, loss), effective_reward(worst, loss)])
    return [] if is_tie and is_of_pairs(loss) else [best, worst]
