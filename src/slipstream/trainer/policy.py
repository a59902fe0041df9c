"""From groups to training sequences: rewards, truncation, advantages, staleness; once per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.advantages import group_mean, group_normalised
from slipstream.core.config import LossConfig
from slipstream.core.errors import ShapeError
from slipstream.core.packed import TrainSequence
from slipstream.core.staleness import check_bound, staleness_of, token_versions
from slipstream.core.types import Completion, Group, Rollout


@dataclass(frozen=True)
class PreparedBatch:
    """The training sequences of a batch by (ordinal, sample), and what is known of it before any update."""

    sequences: dict[tuple[int, int], TrainSequence]
    metrics: dict[str, float]

    def of(self, groups: Sequence[Group]) -> list[TrainSequence]:
        """The sequences of `groups`, in their order."""
        return [
            self.sequences[rollout.completion.ordinal, rollout.completion.sample]
            for group in groups
            for rollout in group.rollouts
        ]


def is_truncated(completion: Completion) -> bool:
    """True when the completion was cut (by length or deadline) and not ended by a stop token."""
    return completion.finish_reason != "stop"


def effective_reward(rollout: Rollout, config: LossConfig) -> float:
    """The reward advantages are made of: under truncated = 'penalty' a truncated completion has its own."""
    if config.truncated == "penalty" and is_truncated(rollout.completion):
        return config.truncation_reward
    return rollout.reward


def rollout_advantages(groups: Sequence[Group], config: LossConfig) -> np.ndarray:
    """float32 [R]: one advantage per rollout, in the order of `groups` and their rollouts."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = torch.tensor([effective_reward(rollout, config) for rollout in rollouts], dtype=torch.float32)
    group_ids = torch.tensor([rollout.completion.ordinal for rollout in rollouts], dtype=torch.int64)
    estimators: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "group_mean": group_mean,
        "group_normalised": partial(group_normalised, std_eps=config.std_eps),
    }
    advantages: np.ndarray = estimators[config.advantages](rewards, group_ids).numpy()
    return advantages


def train_sequence(completion: Completion, advantage: float, *, is_masked: bool = False) -> TrainSequence:
    """Prompt and completion as one sequence; trained on are sampled tokens (none under `is_masked`)."""
    prompt = completion.prompt.tokens
    if not len(prompt):
        raise ShapeError(
            "a prompt needs at least one token for the first completion token to be predicted from",
            got=f"an empty prompt ({completion.prompt.prompt_id})",
        )
    given = np.zeros(len(prompt), dtype=np.float32)
    sampled = [np.zeros(len(prompt), dtype=bool)]
    behaviour = [given]
    for segment in completion.segments:
        sampled.append(np.full(len(segment.tokens), segment.is_sampled))
        if segment.behaviour_logprobs is None:
            behaviour.append(np.zeros(len(segment.tokens), dtype=np.float32))
        else:
            behaviour.append(segment.behaviour_logprobs)
    mask = np.concatenate(sampled) & (not is_masked)
    versions = np.concatenate([np.full(len(prompt), -1, dtype=np.int32), token_versions(completion.segments)])
    return TrainSequence(
        key=(completion.ordinal, completion.sample),
        tokens=np.concatenate([prompt, *(segment.tokens for segment in completion.segments)]).astype(np.int32),
        mask=mask,
        behaviour_logprobs=np.where(mask, np.concatenate(behaviour), 0).astype(np.float32),
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        versions=np.where(mask, versions, np.int32(-1)),
    )


def prepare_batch(groups: Sequence[Group], *, config: LossConfig, step: int, max_staleness: int) -> PreparedBatch:
    """Advantages, loss masks and staleness of a batch. StalenessError if a token is outside the bound."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    staleness = np.concatenate(
        [staleness_of(token_versions(rollout.completion.segments), step=step) for rollout in rollouts]
    )
    check_bound(staleness, max_staleness=max_staleness, step=step)
    sequences = [
        train_sequence(
            rollout.completion,
            float(advantage),
            is_masked=config.truncated == "mask" and is_truncated(rollout.completion),
        )
        for rollout, advantage in zip(rollouts, rollout_advantages(groups, config), strict=True)
    ]
    metrics = _reward_metrics(rollouts) | _staleness_metrics(staleness)
    return PreparedBatch({sequence.key: sequence for sequence in sequences}, metrics)


def _reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
    metrics = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "completion_tokens_mean": float(np.mean([rollout.completion.num_tokens for rollout in rollouts])),
        "truncated_frac": float(np.mean([is_truncated(rollout.completion) for rollout in rollouts])),
        "failed_frac": float(np.mean([rollout.failure is not None for rollout in rollouts])),
    }
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.reward_parts.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    return metrics | {f"reward_parts/{name}": float(np.mean(values)) for name, values in parts.items()}


def _staleness_metrics(staleness: np.ndarray) -> dict[str, float]:
    lags, counts = np.unique(staleness, return_counts=True)
    return {
        "staleness_mean": float(staleness.mean()) if staleness.size else 0.0,
        "staleness_max": float(staleness.max()) if staleness.size else 0.0,
        **{f"staleness_tokens/lag_{lag}": float(count) for lag, count in zip(lags, counts, strict=True)},
    }
