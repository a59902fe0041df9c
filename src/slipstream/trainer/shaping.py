"""From scores to advantages of tokens: the KL penalty, a critic's GAE or V-trace, whitening."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.advantages import gae, place_scores, vtrace, whiten_parts
from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.core.config import RunConfig
from slipstream.core.packed import TrainSequence
from slipstream.core.rank_group import RankGroup
from slipstream.trainer.measure import Key, with_columns


@dataclass(frozen=True)
class Shaping:
    """From rewards to advantages of tokens, over the batch or over each minibatch.

    `advantages` are those of whole completions, or None under GAE: then `scores` are placed on tokens, less `kl_coef`
    times the KL of behaviour and reference policy where the penalty is a part of the reward. `has_slot` is False for
    completions cut at the length limit: they have no step after their last token. All of these, and `num_targets`, the
    tokens of each that are trained on, are of the whole batch, whichever of `ranks` has which sequence.
    """

    config: RunConfig
    scores: Mapping[Key, float]
    has_slot: Mapping[Key, bool]
    num_targets: Mapping[Key, int]
    advantages: Mapping[Key, float] | None
    kl_coef: float
    ranks: RankGroup

    def apply(self, sequences: Sequence[TrainSequence], keys: Iterable[Key]) -> list[TrainSequence]:
        """`sequences` with advantages, and returns under GAE, on their targets.

        They are this rank's own among `keys`, the batch or minibatch over all ranks, which all call it.
        """
        part_of = _parts_of([key for key in keys if self.num_targets[key]], self.config.loss.whiten_parts)
        if not part_of:
            return list(sequences)
        trained = [index for index, sequence in enumerate(sequences) if sequence.num_targets]
        own = [sequences[index] for index in trained]
        counts = [sequence.num_targets for sequence in own]
        segment_ids = torch.repeat_interleave(torch.tensor(counts, dtype=torch.int64))
        part_ids = torch.tensor([part_of[sequence.key] for sequence in own], dtype=torch.int64)[segment_ids]
        columns: dict[str, Tensor] = {}
        if self.advantages is None:
            columns["advantages"], columns["returns"] = self._token_advantages(own, segment_ids, part_ids)
        else:
            whole = torch.tensor([self.advantages[sequence.key] for sequence in own], dtype=torch.float32)
            columns["advantages"] = whole[segment_ids]
        if self.config.loss.whiten_advantages != "no":
            columns["advantages"] = self._whitened(columns["advantages"], part_ids)
        shaped = list(sequences)
        for name, column in columns.items():
            pieces = np.split(column.numpy(), np.cumsum(counts, dtype=np.int64))[: len(trained)]
            for index, values in zip(trained, pieces, strict=True):
                shaped[index] = with_columns(shaped[index], **{name: values})
        return shaped

    def _whitened(self, values: Tensor, part_ids: Tensor, *, shift_mean: bool = True) -> Tensor:
        return whiten_parts(
            values,
            part_ids,
            num_parts=self.config.loss.whiten_parts,
            shift_mean=shift_mean,
            unbiased=self.config.loss.whiten_unbiased,
            over_ranks=self.ranks.sum,
        )

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
            has_slot=torch.tensor([self.has_slot[sequence.key] for sequence in sequences], dtype=torch.bool),
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


def _parts_of(keys: Sequence[Key], num_parts: int) -> dict[Key, int]:
    """The part of each sequence: contiguous shares of their canonical order, sizes at most one apart."""
    return {key: index * num_parts // len(keys) for index, key in enumerate(sorted(keys))}


def targets_of(sequences: Sequence[TrainSequence], name: str) -> Tensor:
    """float32 [T]: column `name` of all targets, sequence after sequence."""
    columns = [vars(sequence)[name][sequence.mask] for sequence in sequences]
    return torch.from_numpy(np.concatenate(columns)) if columns else torch.zeros(0)
