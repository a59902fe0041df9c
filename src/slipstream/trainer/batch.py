"""From groups to training sequences: selection, masks, advantages, staleness; once per batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.core.config import RunConfig
from slipstream.core.errors import ShapeError
from slipstream.core.packed import TrainSequence, check_kept_sets
from slipstream.core.staleness import check_bound, staleness_of, token_versions
from slipstream.core.types import Completion, Group, Rollout
from slipstream.trainer.measure import Columns, Key, with_columns
from slipstream.trainer.scores import (
    effective_reward,
    is_truncated,
    key_of,
    penalises_reward,
    rollout_advantages,
    selected,
    split_baseline,
)
from slipstream.trainer.shaping import Shaping, targets_of

Measure = Callable[[Sequence[TrainSequence]], Mapping[str, Columns]]
"""Sequences -> the columns that the loss and the critic need, by name (`core.packed.OPTIONAL_COLUMNS`)."""


def train_sequence(completion: Completion) -> TrainSequence:
    """Prompt and completion as one sequence, its advantages still 0; sampled tokens are trained on.

    ShapeError for an empty prompt, and for kept sets that some sampled tokens have and others lack, or that do not
    contain their token.
    """
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
        **_kept_sets(completion),
    )


def _kept_sets(completion: Completion) -> dict[str, np.ndarray]:
    """`kept_tokens` and `kept_counts` of the sequence: all sampled segments have them, or none."""
    sampled = [segment for segment in completion.segments if segment.is_sampled]
    carrying = [segment for segment in sampled if segment.kept_tokens is not None and segment.kept_counts is not None]
    if not carrying:
        return {}
    if len(carrying) < len(sampled):
        raise ShapeError(
            "some sampled tokens of a completion have kept sets and others have none",
            got=f"{len(carrying)} of {len(sampled)} segments (ordinal {completion.ordinal})",
        )
    tokens: list[np.ndarray] = []
    counts = [np.zeros(len(completion.prompt.tokens), dtype=np.int32)]
    for segment in completion.segments:
        if segment.kept_tokens is None or segment.kept_counts is None:
            counts.append(np.zeros(len(segment.tokens), dtype=np.int32))
        else:
            check_kept_sets(segment.tokens, segment.kept_tokens, segment.kept_counts)
            tokens.append(segment.kept_tokens)
            counts.append(segment.kept_counts)
    return {"kept_tokens": np.concatenate(tokens), "kept_counts": np.concatenate(counts)}


def without_targets(sequence: TrainSequence) -> TrainSequence:
    """`sequence` with no token to train on: collation leaves it out."""
    nothing = np.zeros(len(sequence.tokens), dtype=np.float32)
    return replace(
        sequence,
        mask=np.zeros(len(sequence.tokens), dtype=bool),
        behaviour_logprobs=nothing,
        advantages=nothing,
        versions=np.full(len(sequence.tokens), -1, dtype=np.int32),
        kept_tokens=None if sequence.kept_tokens is None else sequence.kept_tokens[:0],
        kept_counts=None if sequence.kept_counts is None else np.zeros_like(sequence.kept_counts),
    )


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
