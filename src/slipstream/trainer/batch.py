"""From groups to training sequences: selection, masks, advantages, staleness; once per batch.

What decides is known to every rank alike: the heads of all rollouts. Tokens, and what is measured on them, a rank has
of its own sequences only; where sums over all of them are needed, ranks add up theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.advantages import gae, place_scores, vtrace, whiten_parts
from slipstream.algorithms.kl import KL_ESTIMATORS
from slipstream.core.config import RunConfig
from slipstream.core.errors import ShapeError
from slipstream.core.packed import Numbered, TrainSequence, check_kept_sets
from slipstream.core.rank_group import RankGroup
from slipstream.core.staleness import check_bound, staleness_of, token_versions
from slipstream.core.training_sections import CriticConfig, KLConfig, LossConfig
from slipstream.core.types import Completion, Group, RolloutHead
from slipstream.trainer.measure import Columns, Key, with_columns
from slipstream.trainer.scores import (
    ScoredGroup,
    effective_reward,
    head_of,
    key_of,
    penalises_reward,
    rollout_advantages,
    scored_groups,
    selected,
    split_baseline,
    turn_advantages,
)
from slipstream.trainer.teacher import with_teacher


def train_sequence(completion: Completion) -> TrainSequence:
    """Return prompt and completion as one sequence, its advantages still 0; sampled tokens are trained on.

    Each branch of an episode is a context of it. ShapeError for an empty prompt, for a branch that begins without a
    given token, and for kept sets that some sampled tokens have and others lack, or that do not contain their token.
    """
    prompt, segments = completion.prompt.tokens, completion.segments
    if not len(prompt):
        what = "a prompt needs at least one token for the first completion token to be predicted from"
        raise ShapeError(what, got=f"an empty prompt ({completion.prompt.prompt_id})")
    mask = _behind(prompt, [np.full(len(segment.tokens), segment.is_sampled) for segment in segments], bool)
    behaviour = [
        np.zeros(len(segment.tokens)) if segment.behaviour_logprobs is None else segment.behaviour_logprobs
        for segment in segments
    ]
    return TrainSequence(
        key=(completion.ordinal, completion.sample),
        tokens=np.concatenate([prompt, *(segment.tokens for segment in segments)]).astype(np.int32),
        mask=mask,
        behaviour_logprobs=_behind(prompt, behaviour, np.float32),
        advantages=np.zeros(len(mask), dtype=np.float32),
        versions=np.where(mask, _behind(prompt, [token_versions(segments)], np.int32), np.int32(-1)),
        starts=_starts(completion),
        routes=segments[0].routes if len(segments) == 1 else None,
        **_kept_sets(completion),
    )


def _starts(completion: Completion) -> tuple[int, ...]:
    """Return the offsets in the sequence where the trunk and the further branches begin."""
    starts, end = [0], len(completion.prompt.tokens)
    for segment in completion.segments:
        if segment.begins:
            if segment.is_sampled or not len(segment.tokens):
                got = f"a {'sampled' if segment.is_sampled else 'given'} segment of {len(segment.tokens)} tokens"
                raise ShapeError("a branch begins with given tokens, its context", got=got)
            starts.append(end)
        end += len(segment.tokens)
    return tuple(starts)


def _behind(prompt: np.ndarray, columns: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    """Return the column of a sequence: 0 on the prompt, then those of its segments."""
    return np.concatenate([np.zeros(len(prompt), dtype=dtype), *columns]).astype(dtype)


def _turn_lengths(completion: Completion) -> np.ndarray:
    """Return int64 [turns]: the sampled tokens of each turn. Two turns may have nothing between them."""
    return np.array([len(one.tokens) for one in completion.segments if one.is_sampled], dtype=np.int64)


def _kept_sets(completion: Completion) -> dict[str, np.ndarray]:
    """Return `kept_tokens` and `kept_counts` of the sequence: all sampled segments have them, or none."""
    sampled = [segment for segment in completion.segments if segment.is_sampled]
    carrying = [segment for segment in sampled if segment.kept_tokens is not None and segment.kept_counts is not None]
    if not carrying:
        return {}
    if len(carrying) < len(sampled):
        got = f"{len(carrying)} of {len(sampled)} segments (ordinal {completion.ordinal})"
        raise ShapeError("some sampled tokens of a completion have kept sets and others have none", got=got)
    tokens: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for segment in completion.segments:
        if segment.kept_tokens is None or segment.kept_counts is None:
            counts.append(np.zeros(len(segment.tokens), dtype=np.int32))
        else:
            check_kept_sets(segment.tokens, segment.kept_tokens, segment.kept_counts)
            tokens.append(segment.kept_tokens)
            counts.append(segment.kept_counts)
    return {"kept_tokens": np.concatenate(tokens), "kept_counts": _behind(completion.prompt.tokens, counts, np.int32)}


def without_targets(sequence: TrainSequence) -> TrainSequence:
    """Return `sequence` with no token to train on: collation leaves it out."""
    nothing = np.zeros(len(sequence.tokens), dtype=np.float32)
    return replace(
        sequence,
        mask=np.zeros(len(sequence.tokens), dtype=bool),
        behaviour_logprobs=nothing,
        advantages=nothing,
        versions=np.full(len(sequence.tokens), -1, dtype=np.int32),
        kept_tokens=None if sequence.kept_tokens is None else sequence.kept_tokens[:0],
        kept_counts=None if sequence.kept_counts is None else np.zeros_like(sequence.kept_counts),
        teacher_tokens=None if sequence.teacher_tokens is None else sequence.teacher_tokens[:0],
        teacher_logprobs=None if sequence.teacher_logprobs is None else sequence.teacher_logprobs[:0],
    )


@dataclass(frozen=True)
class Selection:
    """The rollouts that a step trains on, chosen by their heads, before anything is measured on them.

    `trainable` are the heads of all that may be trained on. `keys` are those that `loss.select` takes, by ordinal, on
    any rank; `masked` those that are truncated and so have no token to train on. `measured` are those that columns are
    needed for, on any rank; `sequences` are this rank's own among `measured` and `masked`, `turn_lengths` how many of
    the targets of each belong to its turns, int64 [turns]. `lags` counts sampled tokens by staleness.
    """

    groups: list[ScoredGroup]
    trainable: list[RolloutHead]
    keys: dict[int, tuple[Key, ...]]
    masked: frozenset[Key]
    measured: list[Key]
    sequences: dict[Key, TrainSequence]
    turn_lengths: dict[Key, np.ndarray]
    lags: np.ndarray

    @property
    def to_measure(self) -> list[TrainSequence]:
        """This rank's sequences that columns are needed for."""
        return [self.sequences[key] for key in self.measured if key in self.sequences]


def select_batch(
    groups: Sequence[Group],
    *,
    config: RunConfig,
    step: int,
    heads: Sequence[RolloutHead] | None = None,
    ranks: RankGroup = RankGroup.alone(),
) -> Selection:
    """Select what step `step` trains on. StalenessError, on every rank alike, if a token is outside the bound.

    `groups` are this rank's rollouts, `heads` those of all `ranks` in canonical order (None: `groups` are all there
    are); all ranks call it. A KL penalty in the reward is measured on all rollouts, since those that are not selected,
    or masked as truncated, are in their group's baseline.
    """
    own = {(rollout.ordinal, rollout.sample): rollout for group in groups for rollout in group.rollouts}
    if heads is None:
        heads = [head_of(rollout, config.rewards) for group in groups for rollout in group.rollouts]
    scored = scored_groups(heads)
    # ReMax's greedy completions are consumed too: the bound holds for all that decides an update.
    lags = _lags([rollout.completion for rollout in own.values()], config, step=step, ranks=ranks)
    trainable = [head for group in scored for head in split_baseline(group, config)[0]]
    keys = {group.ordinal: tuple(key_of(head) for head in selected(group, config)) for group in scored}
    is_chosen = {key for chosen in keys.values() for key in chosen}
    masked = frozenset(key_of(head) for head in trainable if config.loss.truncated == "mask" and head.is_truncated)
    measures_all = penalises_reward(config.kl)
    measured = [key_of(head) for head in trainable if measures_all or key_of(head) in is_chosen - masked]
    needed = {*measured, *(masked & is_chosen)}
    sequences = {
        key: with_teacher(train_sequence(rollout.completion), rollout, config)
        for key, rollout in own.items()
        if key in needed
    }
    lengths = {key: _turn_lengths(own[key].completion) for key in sequences}
    return Selection(scored, trainable, keys, masked, measured, sequences, lengths, lags)


@dataclass(frozen=True)
class Shaping:
    """The step from rewards to advantages of tokens: the KL penalty, GAE or V-trace, whitening.

    `advantages` float32 are those of whole completions, [1], or of the targets of this rank's, [targets], or None under
    GAE: then `scores` are placed on tokens, less `kl_coef` times the KL of behaviour and reference policy where the
    penalty is a part of the reward. `has_slot` is False for completions cut at the length limit: they have no step
    after their last token. All else here, and `num_targets`, the tokens of each that are trained on, are of the whole
    batch, whichever of `ranks` has which sequence.

    An episode with branches is one sequence here: its score lies on the last token of its last branch, and GAE and
    V-trace carry credit from a branch to the one before it, in the order of segments, as if they followed one another.
    """

    loss: LossConfig
    critic: CriticConfig
    kl: KLConfig
    kl_coef: float
    scores: Mapping[Key, float]
    has_slot: Mapping[Key, bool]
    num_targets: Mapping[Key, int]
    advantages: Mapping[Key, np.ndarray] | None
    ranks: RankGroup

    def apply(self, sequences: Sequence[TrainSequence], keys: Iterable[Key]) -> list[TrainSequence]:
        """Return `sequences` with advantages, and returns under GAE, on their targets.

        They are this rank's own among `keys`, the batch or minibatch over all ranks, which all call it.
        """
        part_of = _parts_of([key for key in keys if self.num_targets[key]], self.loss.whiten_parts)
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
            targets = [np.broadcast_to(self.advantages[sequence.key], sequence.num_targets) for sequence in own]
            columns["advantages"] = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.float32), *targets]))
        if self.loss.whiten_advantages != "no":
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
            num_parts=self.loss.whiten_parts,
            shift_mean=shift_mean,
            unbiased=self.loss.whiten_unbiased,
            over_ranks=self.ranks.sum,
        )

    def _token_advantages(
        self, sequences: Sequence[TrainSequence], segment_ids: Tensor, part_ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        critic, kl = self.critic, self.kl
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
    """Return the part of each sequence: contiguous shares of their canonical order, sizes at most one apart."""
    return {key: index * num_parts // len(keys) for index, key in enumerate(sorted(keys))}


def targets_of(sequences: Sequence[TrainSequence], name: str) -> Tensor:
    """Return float32 [T]: column `name` of all targets, sequence after sequence."""
    columns = [vars(sequence)[name][sequence.mask] for sequence in sequences]
    return torch.from_numpy(np.concatenate(columns)) if columns else torch.zeros(0, dtype=torch.float32)


@dataclass(frozen=True)
class PreparedBatch:
    """The training sequences of a batch, and what is known of it before any update.

    `keys` are those trained on, by ordinal, in the order of `selected`, on any rank; `sequences` are this rank's.
    """

    sequences: dict[Key, TrainSequence]
    keys: dict[int, tuple[Key, ...]]
    shaping: Shaping
    metrics: dict[str, float]

    def of(self, groups: Sequence[Numbered]) -> list[TrainSequence]:
        """Return this rank's sequences of `groups`, in their order: its part of a minibatch. All ranks call it."""
        keys = [key for group in groups for key in self.keys[group.ordinal]]
        sequences = [self.sequences[key] for key in keys if key in self.sequences]
        is_shaped = self.shaping.loss.whiten_advantages != "minibatch"
        return sequences if is_shaped else self.shaping.apply(sequences, keys)


def prepare_batch(
    selection: Selection,
    columns: Mapping[str, Columns] = MappingProxyType({}),
    *,
    config: RunConfig,
    kl_coef: float | None = None,
    ranks: RankGroup = RankGroup.alone(),
) -> PreparedBatch:
    """Give the selected sequences their columns and advantages. All ranks call it.

    `columns` are those that the loss and the critic need, by name, for `selection.to_measure`; `kl_coef` is the present
    coefficient, by default the configured one. A KL penalty in the reward is that of the sampled tokens, behaviour
    policy against reference.
    """
    kl_coef = config.kl.coef if kl_coef is None else kl_coef
    measured = {
        sequence.key: with_columns(sequence, **{name: values[sequence.key] for name, values in columns.items()})
        for sequence in selection.to_measure
    }
    kl: dict[Key, float] = {}
    if "reference_logprobs" in columns:
        of_all = _of_all_ranks(_reference_kl(measured, config.kl.estimator), ranks)
        kl = {key: of_all[key] for key in selection.measured}
    penalties = {key: kl_coef * total for key, total in kl.items()} if penalises_reward(config.kl) and kl else None
    num_sampled = {key_of(head): head.num_sampled for head in selection.trainable}
    shaping = Shaping(
        loss=config.loss,
        critic=config.critic,
        kl=config.kl,
        kl_coef=kl_coef,
        scores={key_of(head): effective_reward(head, config.loss) for head in selection.trainable},
        has_slot={key_of(head): head.is_stopped for head in selection.trainable},
        num_targets=num_sampled | dict.fromkeys(selection.masked, 0),
        advantages=None if config.has_critic else _advantages(selection, config, penalties),
        ranks=ranks,
    )
    metrics = _reward_metrics(selection.trainable, config.loss) | _staleness_metrics(selection.lags)
    if kl:
        metrics |= {
            "kl_reference": sum(kl.values()) / max(sum(num_sampled[key] for key in kl), 1),
            "kl_reference_sum": float(np.mean(list(kl.values()))),
            "kl_coef": kl_coef,
            "kl_penalty": float(np.mean(list(penalties.values()))) if penalties else 0.0,
        }
    keys = [key for group in selection.groups for key in selection.keys[group.ordinal] if key in selection.sequences]
    trained = [without_targets(selection.sequences[key]) if key in selection.masked else measured[key] for key in keys]
    shaped = shaping.apply(trained, [key for chosen in selection.keys.values() for key in chosen])
    names = {"advantage": "advantages"} | ({"value_before": "values"} if "values" in columns else {})
    metrics |= _token_metrics(shaped, names, ranks)
    return PreparedBatch({sequence.key: sequence for sequence in shaped}, selection.keys, shaping, metrics)


def _advantages(
    selection: Selection, config: RunConfig, penalties: Mapping[Key, float] | None
) -> dict[Key, np.ndarray]:
    """Return the advantages of the targets of each sequence, float32: [1] for all of them, or of each one, by turns."""
    if config.loss.credit == "episode":
        whole = rollout_advantages(selection.groups, config, penalties)
        return {key: np.array([advantage], dtype=np.float32) for key, advantage in whole.items()}
    of_turns = turn_advantages(selection.groups, config, penalties)
    return {  # one that is poisoned has no turn, and one without a record is a single one
        key: np.repeat(np.broadcast_to(np.array(of_turns[key], dtype=np.float32), len(lengths)), lengths)
        for key, lengths in selection.turn_lengths.items()
    }


def _token_metrics(sequences: Sequence[TrainSequence], names: Mapping[str, str], ranks: RankGroup) -> dict[str, float]:
    """Return means and deviations of columns over the tokens that are trained on, before the first update."""
    trained = [sequence for sequence in sequences if sequence.num_targets]
    metrics: dict[str, float] = {}
    for name, column in names.items():
        values = targets_of(trained, column).double()
        total, count = ranks.sum(torch.stack([values.sum(), torch.tensor(len(values))])).tolist()
        if not count:
            return {}
        mean = total / count
        squares = float(ranks.sum((values - mean).square().sum()))
        metrics |= {f"{name}_mean": mean, f"{name}_std": math.sqrt(squares / count)}
    return metrics


def _reference_kl(sequences: Mapping[Key, TrainSequence], estimator: str) -> dict[Key, float]:
    """Return the KL of behaviour policy and reference, summed over each completion's sampled tokens."""
    estimate = KL_ESTIMATORS[estimator]
    return {
        key: float(
            estimate(targets_of([sequence], "behaviour_logprobs"), targets_of([sequence], "reference_logprobs"))
            .double()
            .sum()
        )
        for key, sequence in sequences.items()
    }


def _of_all_ranks(values: Mapping[Key, float], ranks: RankGroup) -> dict[Key, float]:
    """Return the `values` of all ranks, each of which has those of its own rollouts."""
    parts = ranks.gather(msgspec.msgpack.encode(list(values.items())))
    return dict(item for part in parts for item in msgspec.msgpack.decode(part, type=list[tuple[Key, float]]))


def _reward_metrics(heads: Sequence[RolloutHead], loss: LossConfig) -> dict[str, float]:
    rewards = np.array([head.reward for head in heads], dtype=np.float64)
    metrics = {
        "score_mean": float(np.mean([effective_reward(head, loss) for head in heads])),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "behaviour_surprisal_sum": float(np.mean([head.surprisal for head in heads])),
        "completion_tokens_mean": float(np.mean([head.num_tokens for head in heads])),
        "truncated_frac": float(np.mean([head.is_truncated for head in heads])),
        "failed_frac": float(np.mean([head.failure is not None for head in heads])),
    }
    parts: dict[str, list[float]] = {}
    for head in heads:
        named = {f"reward_parts/{name}": value for name, value in head.reward_parts.items()}
        for name, value in (named | {f"logged/{name}": value for name, value in head.logged.items()}).items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    return metrics | {name: float(np.mean(values)) for name, values in parts.items()}


def _lags(completions: Iterable[Completion], config: RunConfig, *, step: int, ranks: RankGroup) -> np.ndarray:
    """Return int64 [oldest + 1]: how many of the sampled tokens of all ranks are stale by 0, 1, ... steps.

    StalenessError, on every rank alike, when one of them is outside the bound.
    """
    none = np.zeros(0, dtype=np.int32)
    found = np.concatenate([none, *(staleness_of(token_versions(one.segments), step=step) for one in completions)])
    ends = [int(found.max()), -int(found.min())] if found.size else [0, 0]  # 0 is inside every bound
    oldest_and_newest = ranks.max(torch.tensor(ends)).numpy() * np.array([1, -1])
    check_bound(oldest_and_newest, max_staleness=config.staleness_bound, step=step)
    lags: np.ndarray = ranks.sum(torch.from_numpy(np.bincount(found, minlength=int(oldest_and_newest[0]) + 1))).numpy()
    return lags


def _staleness_metrics(lags: np.ndarray) -> dict[str, float]:
    present = np.flatnonzero(lags)
    total = float(lags.sum())
    return {
        "staleness_mean": float(present @ lags[present]) / total if total else 0.0,
        "staleness_max": float(present.max(initial=0)),
        **{f"staleness_tokens/lag_{lag}": float(lags[lag]) for lag in present},
    }
