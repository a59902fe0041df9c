"""From scores to advantages of tokens: the KL penalty, a critic's GAE or V-trace, whitening."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.advantages import gae, place_scores, vtrace, whiten_parts
from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.core.config import RunConfig
from slipstream.core.packed import TrainSequence
from slipstream.trainer.measure import Key, with_columns


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
        part_ids = _parts_of([sequences[index] for index in trained], self.config.loss.whiten_parts)[segment_ids]
        columns: dict[str, Tensor] = {}
        if self.advantages is None:
            columns["advantages"], columns["returns"] = self._token_advantages(
                [sequences[index] for index in trained], segment_ids, part_ids
            )
        else:
            whole = torch.tensor([self.advantages[sequences[index].key] for index in trained], dtype=torch.float32)
            columns["advantages"] = whole[segment_ids]
        if self.config.loss.whiten_advantages != "no":
            columns["advantages"] = self._whitened(columns["advantages"], part_ids)
        shaped = list(sequences)
        split_at = np.cumsum([counts[index] for index in trained])[:-1]
        for name, column in columns.items():
            for index, values in zip(trained, np.split(column.numpy(), split_at), strict=True):
                shaped[index] = with_columns(shaped[index], **{name: values})
        return shaped

    def _whitened(self, values: Tensor, part_ids: Tensor, *, shift_mean: bool = True) -> Tensor:
        return whiten_parts(values, part_ids, shift_mean=shift_mean, unbiased=self.config.loss.whiten_unbiased)

    def _token_advantages(
        self, sequences: Sequence[TrainSequence], segment_ids: Tensor, part_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
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
            rewards = self._whitened(rewards, part_ids, shift_mean=False)
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


def _parts_of(sequences: Sequence[TrainSequence], num_parts: int) -> Tensor:
    """int64 [S]: the part of each sequence: contiguous shares of their canonical order, sizes at most one apart."""
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].key)
    parts = torch.empty(len(sequences), dtype=torch.int64)
    parts[order] = torch.arange(len(sequences)) * num_parts // len(sequences)
    return parts


def targets_of(sequences: Sequence[TrainSequence], name: str) -> Tensor:
    """float32 [T]: column `name` of all targets, sequence after sequence."""
    return torch.from_numpy(np.concatenate([vars(sequence)[name][sequence.mask] for sequence in sequences]))
