"""From groups to training sequences: rewards, truncation, advantages, staleness; once per batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.advantages import (
    combine_rewards,
    gae,
    greedy_baseline,
    group_mean,
    group_normalised,
    leave_one_out,
    place_scores,
    vtrace,
    whiten,
)
from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.algorithms.losses import loss_named
from slipstream.algorithms.responses import has_token
from slipstream.core.config import GROUP_RELATIVE, RunConfig
from slipstream.core.errors import ShapeError
from slipstream.core.packed import TrainSequence
from slipstream.core.staleness import check_bound, staleness_of, token_versions
from slipstream.core.types import Completion, Group, Rollout
from slipstream.trainer.measure import Columns, Key, with_columns

Measure = Callable[[Sequence[TrainSequence]], Mapping[str, Columns]]
"""Sequences -> the columns that the loss and the critic need, by name (`core.packed.OPTIONAL_COLUMNS`)."""


def key_of(rollout: Rollout) -> Key:
    return rollout.completion.ordinal, rollout.completion.sample


# Rewards


def is_truncated(completion: Completion, config: RunConfig) -> bool:
    """True when the completion lacks its end: a stop token, or `rewards.truncate_token` where that is asked for."""
    token = config.rewards.truncate_token
    if token is None:
        return completion.finish_reason != "stop"
    tokens = np.concatenate([segment.tokens for segment in completion.segments])
    return not has_token(tokens, token, after=config.rewards.truncate_after)


def effective_reward(rollout: Rollout, config: RunConfig) -> float:
    """The reward advantages are made of: `loss.truncated` may replace or lower that of a truncated completion."""
    loss = config.loss
    if loss.truncated in ("penalty", "subtract") and is_truncated(rollout.completion, config):
        return loss.truncation_reward + (rollout.reward if loss.truncated == "subtract" else 0.0)
    return rollout.reward


def has_signal(group: Group, config: RunConfig) -> bool:
    """False when every rollout of `group` would get the advantage 0, or a pair of them be ranked by chance."""
    loss = config.loss
    is_pair = loss_named(loss.name, loss.params).atom == "pair"
    is_relative = loss.advantages in GROUP_RELATIVE and not penalises_reward(config)
    if not is_pair and not is_relative:
        return True
    columns = [[effective_reward(rollout, config) for rollout in group.rollouts]]
    if loss.several_rewards == "normalise_then_sum":  # rewards that differ may have equal sums
        columns = [list(column) for column in zip(*(_parts(r, config) for r in group.rollouts), strict=True)]
    scored = [[reward for reward in column if not math.isnan(reward)] for column in columns]
    return any(max(column) - min(column) > 1e-8 for column in scored if column)


def penalises_reward(config: RunConfig) -> bool:
    """True when the KL of policy and reference is taken off the reward."""
    return config.kl.coef > 0 and config.kl.place == "reward"


def split_baseline(group: Group, config: RunConfig) -> tuple[tuple[Rollout, ...], Rollout | None]:
    """The rollouts of `group` that may be trained on, and ReMax's greedy one, sampled behind them."""
    if config.samples_per_group == config.completions_per_group:
        return group.rollouts, None
    return group.rollouts[:-1], group.rollouts[-1]


def rollout_advantages(
    groups: Sequence[Group], config: RunConfig, penalties: Mapping[Key, float] | None = None
) -> dict[Key, float]:
    """One advantage per rollout; `penalties` are taken off the rewards (the KL of whole completions).

    Not for advantages = 'gae', whose tokens have their own.
    """
    loss = config.loss
    members = [split_baseline(group, config) for group in groups]
    rollouts = [rollout for trained, _ in members for rollout in trained]
    keys = [key_of(rollout) for rollout in rollouts]
    group_ids = torch.tensor([ordinal for ordinal, _ in keys], dtype=torch.int64)
    if loss.several_rewards == "normalise_then_sum":
        parts = torch.tensor([_parts(rollout, config) for rollout in rollouts], dtype=torch.float32)
        weights = torch.tensor([term.weight for term in config.rewards.weighted])
        normalised = combine_rewards(
            parts, weights, group_ids, normalise_first=True, std_eps=loss.std_eps, unbiased=loss.unbiased_std
        )
        return dict(zip(keys, normalised.tolist(), strict=True))
    rewards = torch.tensor([effective_reward(rollout, config) for rollout in rollouts], dtype=torch.float32)
    if penalties is not None:
        rewards -= torch.tensor([penalties[key] for key in keys], dtype=torch.float32)
    baselines = {
        group.ordinal: effective_reward(baseline, config)
        for group, (_, baseline) in zip(groups, members, strict=True)
        if baseline is not None
    }
    estimators: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "group_mean": group_mean,
        "group_normalised": partial(group_normalised, std_eps=loss.std_eps, unbiased=loss.unbiased_std),
        "leave_one_out": leave_one_out,
        "greedy_baseline": lambda r, ids: greedy_baseline(r, torch.tensor([baselines[i] for i in ids.tolist()])),
        "reward": lambda r, _: r,
    }
    return dict(zip(keys, estimators[loss.advantages](rewards, group_ids).tolist(), strict=True))


def _parts(rollout: Rollout, config: RunConfig) -> list[float]:
    """The rewards of each term, NaN where a term does not apply; a failed rollout has its reward for every term."""
    if rollout.failure is not None:
        return [rollout.reward] * len(config.rewards.weighted)
    return [float("nan") if part is None else part for part in rollout.reward_parts.values()]


# Sequences


def train_sequence(completion: Completion) -> TrainSequence:
    """Prompt and completion as one sequence, its advantages still 0; sampled tokens are trained on."""
    prompt = completion.prompt.tokens
    if not len(prompt):
        raise ShapeError(
            "a prompt needs at least one token for the first completion token to be predicted from",
            got=f"an empty prompt ({completion.prompt.prompt_id})",
        )
    sampled = [np.zeros(len(prompt), dtype=bool)]
    behaviour = [np.zeros(len(prompt), dtype=np.float32)]
    for segment in completion.segments:
        sampled.append(np.full(len(segment.tokens), segment.is_sampled))
        if segment.behaviour_logprobs is None:
            behaviour.append(np.zeros(len(segment.tokens), dtype=np.float32))
        else:
            behaviour.append(segment.behaviour_logprobs)
    mask = np.concatenate(sampled)
    versions = np.concatenate([np.full(len(prompt), -1, dtype=np.int32), token_versions(completion.segments)])
    return TrainSequence(
        key=(completion.ordinal, completion.sample),
        tokens=np.concatenate([prompt, *(segment.tokens for segment in completion.segments)]).astype(np.int32),
        mask=mask,
        behaviour_logprobs=np.where(mask, np.concatenate(behaviour), 0).astype(np.float32),
        advantages=np.zeros(len(mask), dtype=np.float32),
        versions=np.where(mask, versions, np.int32(-1)),
    )


def without_targets(sequence: TrainSequence) -> TrainSequence:
    """`sequence` with no token to train on: collation leaves it out."""
    nothing = np.zeros(len(sequence.tokens), dtype=np.float32)
    return replace(
        sequence,
        mask=np.zeros(len(sequence.tokens), dtype=bool),
        behaviour_logprobs=nothing,
        advantages=nothing,
        versions=np.full(len(sequence.tokens), -1, dtype=np.int32),
    )


def selected(group: Group, config: RunConfig) -> list[Rollout]:
    """The rollouts of `group` that `loss.select` trains on: all by sample, the best, or the best and then the worst.

    A5: K completions are sampled, two are trained on. Rewards are compared before any KL penalty, as preferences are.
    Of equal ones the lowest sample is best, and the highest of the others worst.
    """
    rollouts, _ = split_baseline(group, config)
    if config.loss.select == "all":
        return list(rollouts)
    ranked = sorted(rollouts, key=lambda rollout: -effective_reward(rollout, config))
    return ranked[:1] if config.loss.select == "best" else [ranked[0], ranked[-1]]


# Batches


@dataclass(frozen=True)
class Shaping:
    """From rewards to advantages of tokens, over the batch or over each minibatch.

    `advantages` are those of whole completions, or None under GAE: then `scores` are placed on tokens, less `kl_coef`
    times the KL of behaviour and reference policy where the penalty is a part of the reward. `has_slot` is False for
    completions cut at the length limit: they have no step after their last token.
    """

    config: RunConfig
    scores: Mapping[Key, float]
    has_slot: Mapping[Key, bool]
    advantages: Mapping[Key, float] | None
    kl_coef: float

    def apply(self, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """`sequences` with advantages, and returns under GAE, on their targets."""
        counts = [sequence.num_targets for sequence in sequences]
        if not sum(counts):
            return list(sequences)
        trained = [index for index, count in enumerate(counts) if count]
        segment_ids = torch.repeat_interleave(torch.tensor([counts[index] for index in trained]))
        columns: dict[str, Tensor] = {}
        if self.advantages is None:
            columns["advantages"], columns["returns"] = self._token_advantages(
                [sequences[index] for index in trained], segment_ids
            )
        else:
            whole = torch.tensor([self.advantages[sequences[index].key] for index in trained], dtype=torch.float32)
            columns["advantages"] = whole[segment_ids]
        if self.config.loss.whiten_advantages != "no":
            columns["advantages"] = whiten(columns["advantages"])
        shaped = list(sequences)
        split_at = np.cumsum([counts[index] for index in trained])[:-1]
        for name, column in columns.items():
            for index, values in zip(trained, np.split(column.numpy(), split_at), strict=True):
                shaped[index] = with_columns(shaped[index], **{name: values})
        return shaped

    def _token_advantages(self, sequences: Sequence[TrainSequence], segment_ids: Tensor) -> tuple[Tensor, Tensor]:
        critic, kl = self.config.critic, self.config.kl
        behaviour, values = targets_of(sequences, "behaviour_logprobs"), targets_of(sequences, "values")
        penalty = None
        if self.kl_coef and kl.place == "reward":
            penalty = KL_ESTIMATORS[kl.estimator](behaviour, targets_of(sequences, "reference_logprobs"))
        rewards = place_scores(
            torch.tensor([self.scores[sequence.key] for sequence in sequences], dtype=torch.float32),
            penalty,
            segment_ids,
            kl_coef=self.kl_coef,
            place=critic.score_place,
            discount=critic.gamma * critic.lam,
            has_slot=torch.tensor([self.has_slot[sequence.key] for sequence in sequences]),
        )
        if critic.whiten_rewards:
            rewards = whiten(rewards, shift_mean=False)
        if not critic.vtrace:
            return gae(rewards, values, segment_ids, gamma=critic.gamma, lam=critic.lam)
        ratios = (targets_of(sequences, "proximal_logprobs") - behaviour).exp()
        return vtrace(
            rewards,
            values,
            ratios,
            segment_ids,
            gamma=critic.gamma,
            lam=critic.lam,
            max_rho=critic.max_rho,
            max_c=critic.max_c,
        )


def targets_of(sequences: Sequence[TrainSequence], name: str) -> Tensor:
    """float32 [T]: column `name` of all targets, sequence after sequence."""
    return torch.from_numpy(np.concatenate([vars(sequence)[name][sequence.mask] for sequence in sequences]))


@dataclass(frozen=True)
class PreparedBatch:
    """The training sequences of a batch, and what is known of it before any update.

    `keys` are those trained on, by ordinal, in the order of `selected`.
    """

    sequences: dict[Key, TrainSequence]
    keys: dict[int, tuple[Key, ...]]
    shaping: Shaping
    metrics: dict[str, float]

    def of(self, groups: Sequence[Group]) -> list[TrainSequence]:
        """The sequences of `groups`, in their order: a minibatch."""
        sequences = [self.sequences[key] for group in groups for key in self.keys[group.ordinal]]
        return self.shaping.apply(sequences) if self.shaping.config.loss.whiten_advantages == "minibatch" else sequences


def prepare_batch(
    groups: Sequence[Group],
    *,
    config: RunConfig,
    step: int,
    measure: Measure | None = None,
    kl_coef: float | None = None,
) -> PreparedBatch:
    """Selection, loss masks, advantages and staleness of a batch. StalenessError if a token is outside the bound.

    `measure` reads the columns that the loss and the critic need (None: they need none), and `kl_coef` is the present
    coefficient, by default the configured one. A KL penalty in the reward is that of the sampled tokens, behaviour
    policy against reference: it is measured on all rollouts, since those that are not selected, or masked as
    truncated, are in their group's baseline.
    """
    kl_coef = config.kl.coef if kl_coef is None else kl_coef
    # ReMax's greedy completions are consumed too: the bound holds for all that decides an update.
    consumed = [rollout.completion for group in groups for rollout in group.rollouts]
    staleness = np.concatenate([staleness_of(token_versions(one.segments), step=step) for one in consumed])
    check_bound(staleness, max_staleness=config.max_staleness, step=step)
    rollouts = [rollout for group in groups for rollout in split_baseline(group, config)[0]]
    chosen = {group.ordinal: tuple(key_of(rollout) for rollout in selected(group, config)) for group in groups}
    is_chosen = {key for keys in chosen.values() for key in keys}
    masked = {key_of(r) for r in rollouts if config.loss.truncated == "mask" and is_truncated(r.completion, config)}
    measures_all = penalises_reward(config)
    sequences = {
        key_of(rollout): train_sequence(rollout.completion)
        for rollout in rollouts
        if measures_all or key_of(rollout) in is_chosen - masked
    }
    columns = {} if measure is None else measure(list(sequences.values()))
    sequences = {
        key: with_columns(sequence, **{name: values[key] for name, values in columns.items()})
        for key, sequence in sequences.items()
    }
    kl = _reference_kl(sequences, config) if "reference_logprobs" in columns else {}
    penalties = {key: kl_coef * total for key, total in kl.items()} if measures_all and kl else None
    shaping = Shaping(
        config=config,
        scores={key_of(rollout): effective_reward(rollout, config) for rollout in rollouts},
        has_slot={key_of(rollout): rollout.completion.finish_reason == "stop" for rollout in rollouts},
        advantages=None if config.has_critic else rollout_advantages(groups, config, penalties),
        kl_coef=kl_coef,
    )
    metrics = _reward_metrics(rollouts, config) | _staleness_metrics(staleness)
    if kl:
        num_sampled = sum(sequence.num_targets for sequence in sequences.values())
        metrics |= {
            "kl_reference": sum(kl.values()) / max(num_sampled, 1),
            "kl_reference_sum": float(np.mean(list(kl.values()))),
            "kl_coef": kl_coef,
            "kl_penalty": float(np.mean(list(penalties.values()))) if penalties else 0.0,
        }
    completions = {key_of(rollout): rollout.completion for rollout in rollouts}
    trained = [
        without_targets(train_sequence(completions[key])) if key in masked else sequences[key]
        for group in groups
        for key in chosen[group.ordinal]
    ]
    shaped = shaping.apply(trained)
    return PreparedBatch(
        {sequence.key: sequence for sequence in shaped}, chosen, shaping, metrics | _token_metrics(shaped)
    )


def _token_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Means and deviations over the tokens that are trained on, before the first update."""
    trained = [sequence for sequence in sequences if sequence.num_targets]
    if not trained:
        return {}
    columns = {"advantage": "advantages"} | ({"value_before": "values"} if trained[0].values is not None else {})
    metrics: dict[str, float] = {}
    for name, column in columns.items():
        values = targets_of(trained, column).double()
        metrics |= {f"{name}_mean": float(values.mean()), f"{name}_std": float(values.std(correction=0))}
    return metrics


def _reference_kl(sequences: Mapping[Key, TrainSequence], config: RunConfig) -> dict[Key, float]:
    """KL of behaviour policy and reference by `kl.estimator`, summed over each completion's sampled tokens."""
    estimate = KL_ESTIMATORS[config.kl.estimator]
    return {
        key: float(
            estimate(targets_of([sequence], "behaviour_logprobs"), targets_of([sequence], "reference_logprobs"))
            .double()
            .sum()
        )
        for key, sequence in sequences.items()
    }


def _reward_metrics(rollouts: Sequence[Rollout], config: RunConfig) -> dict[str, float]:
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    metrics = {
        "score_mean": float(np.mean([effective_reward(rollout, config) for rollout in rollouts])),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "behaviour_surprisal_sum": float(np.mean([_surprisal(rollout.completion) for rollout in rollouts])),
        "completion_tokens_mean": float(np.mean([rollout.completion.num_tokens for rollout in rollouts])),
        "truncated_frac": float(np.mean([is_truncated(rollout.completion, config) for rollout in rollouts])),
        "failed_frac": float(np.mean([rollout.failure is not None for rollout in rollouts])),
    }
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    return metrics | {f"reward_parts/{name}": float(np.mean(values)) for name, values in parts.items()}


def _surprisal(completion: Completion) -> float:
    """-log mu(y | x): its mean estimates the entropy of whole completions."""
    return -sum(float(s.behaviour_logprobs.sum()) for s in completion.segments if s.behaviour_logprobs is not None)


def _staleness_metrics(staleness: np.ndarray) -> dict[str, float]:
    lags, counts = np.unique(staleness, return_counts=True)
    return {
        "staleness_mean": float(staleness.mean()) if staleness.size else 0.0,
        "staleness_max": float(staleness.max()) if staleness.size else 0.0,
        **{f"staleness_tokens/lag_{lag}": float(count) for lag, count in zip(lags, counts, strict=True)},
    }
