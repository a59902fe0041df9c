"""Columns measured on a batch before its first update: logprobs under frozen policies, and the critic's values.

One float32 per token that is trained on, by (ordinal, sample); nothing here is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slipstream.algorithms.logprobs import kept_token_logprobs, probe_logprobs, token_logprobs_and_entropy
from slipstream.core.config import RunConfig
from slipstream.core.errors import ShapeError
from slipstream.core.packed import Batching, PackedMicrobatch, TrainSequence, empty_microbatch, sent
from slipstream.core.rank_group import RankGroup
from slipstream.core.spans import Spans
from slipstream.core.types import Group, Rollout
from slipstream.models.config import MAX_LOGITS, config_from_hf
from slipstream.models.head import head_logprobs
from slipstream.models.hf import read_hf_config
from slipstream.models.packed import at_targets
from slipstream.models.transformer import OneRank, Transformer
from slipstream.trainer.critic import Critic
from slipstream.trainer.loss_checks import needed_columns, needs_reference
from slipstream.trainer.teacher import Teacher

if TYPE_CHECKING:
    from slipstream.trainer.critic_link import CriticLink

Key = tuple[int, int]  # (ordinal, sample)
Columns = dict[Key, np.ndarray]
Read = Callable[[PackedMicrobatch], Tensor]
"""A microbatch -> one number per target, float32 [M]."""

MEASURED_IN = {
    "behaviour_logprobs": "proximal",
    "reference_logprobs": "reference",
    "proximal_logprobs": "proximal",
    "values": "values",
}
"""The state of the timeline in which each column is measured."""


@dataclass(frozen=True)
class Auxiliary:
    """The trainer's models besides the policy: the frozen `reference` and `teacher`, and the `critic`, if it has them.

    `own_critic` leads to a critic with an executor of its own, in place of `critic`. `kl_coef` is the present
    coefficient of an adaptive KL penalty; None takes `kl.coef`.
    """

    reference: Transformer | None = None
    critic: Critic | None = None
    kl_coef: float | None = None
    teacher: Teacher | None = None
    own_critic: CriticLink | None = None


@dataclass(frozen=True)
class StepContext:
    """Step `number` of a run, and the ranks that make it together."""

    config: RunConfig
    number: int
    batching: Batching
    ranks: RankGroup
    spans: Spans


def brings_reference(config: RunConfig) -> bool:
    """Tell whether rollouts come with the reference's logprobs, measured by an executor of its own."""
    return config.kl.executor == "own" and "reference_logprobs" in needed_columns(config)


def follows_warm_start(config: RunConfig) -> bool:
    """Tell whether the reference is what the warm start makes: no checkpoint has it before the trainer writes one."""
    return config.kl.reference is None and config.warm_start.steps > 0


def reference_path(config: RunConfig, run_dir: Path) -> str | None:
    """Return the folder of the reference's checkpoint; None: the model that the policy starts from."""
    return str(run_dir / "reference") if follows_warm_start(config) else config.kl.reference


def least_vocabulary(config: RunConfig, vocab_size: int) -> int:
    """Return how many token ids all models know that read what a policy of `vocab_size` has sampled.

    Checkpoints of one family may have unlike numbers of rows for ids that are no tokens; a policy may sample its own.
    """
    reference = config.kl.reference if needs_reference(config) else None
    critic = config.critic.path if config.has_critic and config.critic.model == "own" else None
    paths = [Path(path) for path in (reference, critic, config.teacher.path) if path is not None]
    return min([vocab_size, *(config_from_hf(read_hf_config(path)).vocab_size for path in paths)])


def measured_columns(
    model: Transformer,
    auxiliary: Auxiliary,
    groups: Sequence[Group],
    sequences: Sequence[TrainSequence],
    step: StepContext,
) -> dict[str, Columns]:
    """Return the columns that the config needs of `sequences`, rollouts of `groups`, under the present weights.

    Those of a reference with an executor of its own are what the rollouts have brought. All ranks call it, each with
    its own sequences.
    """
    config = step.config
    of_policy: Read = LogprobReader(model, config.logprob_temperature, replays=True)
    readers: dict[str, Read] = {
        "behaviour_logprobs": of_policy,  # at staleness 0, the only case
        "reference_logprobs": LogprobReader(auxiliary.reference, config.logprob_temperature),
        "proximal_logprobs": of_policy,
        "values": partial(_values, model, auxiliary.critic),
    }
    columns: dict[str, Columns] = {}
    if auxiliary.own_critic is not None:  # it reads them while the other columns are measured here
        auxiliary.own_critic.ask_values(sequences, step.number)
    for name in needed_columns(config):
        if name == "values" and auxiliary.own_critic is not None:
            columns[name] = auxiliary.own_critic.values(sequences)
            continue
        if name == "reference_logprobs" and brings_reference(config):
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            columns[name] = brought(rollouts, sequences)
            continue
        with step.spans.span(MEASURED_IN[name], step=step.number):
            capacity = config.trainer.microbatch_tokens
            columns[name] = measure(
                readers[name], sequences, microbatch_tokens=capacity, batching=step.batching, ranks=step.ranks
            )
    return columns


@dataclass(frozen=True)
class LogprobReader:
    """A `Read` of the logprobs of a microbatch's targets under a model; `replays`: `at_targets`.

    `given` is the model, None where the config needs none and nothing is read. A model in pipeline stages reads all
    microbatches on their way through these, and none alone.
    """

    given: Transformer | None
    temperature: float
    replays: bool = False

    @property
    def model(self) -> Transformer:
        assert self.given is not None, "the config needs a reference policy, and none was built"
        return self.given

    def __call__(self, microbatch: PackedMicrobatch) -> Tensor:
        return self.at_states(microbatch, at_targets(self.model, microbatch, replays=self.replays))

    def at_states(self, microbatch: PackedMicrobatch, states: Tensor) -> Tensor:
        return microbatch_logprobs(self.model, microbatch, temperature=self.temperature, states=states)[0]


def _values(model: Transformer, critic: Critic | None, microbatch: PackedMicrobatch) -> Tensor:
    assert critic is not None, "the config needs a critic, and none was built"
    states = at_targets(model, microbatch, replays=True) if critic.is_head else torch.empty(0, dtype=torch.float32)
    return critic.values(microbatch, states)


@torch.no_grad()
def measure(
    read: Read,
    sequences: Sequence[TrainSequence],
    *,
    microbatch_tokens: int,
    batching: Batching,
    ranks: RankGroup = RankGroup.alone(),
) -> Columns:
    """Return what `read` gives for the targets of each sequence, float32 [num_targets]: [0] where it has none.

    `read` maps a microbatch to [M], one number per target. `sequences` are this rank's own; all `ranks` call it, and
    all stages of a model that has them, with the same.
    Identity: equals reading every sequence alone.
    """
    columns = {sequence.key: np.zeros(0, dtype=np.float32) for sequence in sequences}
    microbatches = in_step(batching.collate(sequences, microbatch_tokens), ranks)
    if isinstance(read, LogprobReader) and read.model.passes is not None:
        found = read.model.passes.read(microbatches, read.at_states, replays=read.replays)
    else:
        found = [read(microbatch).float() for microbatch in microbatches]
    # A GPU is waited for when it has got all.
    on_host = torch.cat(found).cpu() if found else torch.empty(0, dtype=torch.float32)
    for microbatch, values in zip(microbatches, torch.split(on_host, list(map(len, found))), strict=False):
        columns |= per_sequence(microbatch, values.numpy())
    return columns


def probed(model: Transformer, tokens: np.ndarray, batching: Batching) -> np.ndarray:
    """Return `probe_logprobs` of a model that may lie in pipeline stages, which all call it."""
    if model.passes is None:
        return probe_logprobs(model, tokens)
    sequence = TrainSequence.read_only((0, 0), tokens, np.arange(len(tokens)) > 0)
    columns = measure(LogprobReader(model, 1.0), [sequence], microbatch_tokens=len(tokens), batching=batching)
    return columns[sequence.key]


def per_sequence(microbatch: PackedMicrobatch, values: np.ndarray) -> Columns:
    """Return the `values` [M, ...] of the targets of each sequence of `microbatch`."""
    ends = np.cumsum(np.bincount(microbatch.segment_ids, minlength=len(microbatch.keys)))
    return dict(zip(microbatch.keys, np.split(values, ends)[: len(ends)], strict=True))


COPIES_COMPARED = 4  # of a chunk's logits, where policy and teacher are compared: both, scaled, and their logprobs


def rows_at_once(model: Transformer, num_copies: int = 1, device: str = "cpu") -> int:
    """Return how many rows of logits, in so many copies, are held at once on a type of device.

    Larger heads run in chunks that are computed again in the backward pass.
    """
    most = model.max_logits or MAX_LOGITS["cpu" if device == "cpu" else "cuda"]
    return max(1, most // (num_copies * model.config.vocab_size))


def microbatch_logprobs(
    model: Transformer,
    microbatch: PackedMicrobatch,
    *,
    temperature: float,
    states: Tensor | None = None,
    teacher: Teacher | None = None,
    said: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Return the policy's logprobs of the microbatch's targets and its entropies there, float32 [M] each; behind them
    what it is compared in with a `teacher` who has `said` something there (`Teacher.compare`).

    `states` are the final ones at those targets, for a caller who has them. Logits are computed only where a target
    is predicted. Where the microbatch has kept sets, logprobs are those over the sets; entropies never are.
    Of ranks that read a microbatch together each brings `states` and what is `said` of its own targets; all get all M.
    """
    predicting = at_targets(model, microbatch) if states is None else states
    kept_sets, own = microbatch.kept_sets, model.reader.targets(microbatch)
    of_targets = (microbatch.targets,) if kept_sets is None else (microbatch.targets, kept_sets)
    numbers: list[np.ndarray | Tensor] = [*(one[own] for one in of_targets), *said]
    columns = [predicting, *(sent(one, predicting.device) for one in numbers)]
    found = _head_columns(model, columns, temperature, kept_sets is not None, teacher, len(said))
    return model.reader.joined(microbatch, *found)


def _head_columns(
    model: Transformer,
    columns: Sequence[Tensor],
    temperature: float,
    has_kept_sets: bool,
    teacher: Teacher | None,
    num_said: int,
) -> tuple[Tensor, ...]:
    """Return `microbatch_logprobs` of `columns`: states, targets, kept sets if there are any, what is said."""
    predicting = columns[0]

    def head(rows: Tensor, targets: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        logits = model.logits(rows)
        logprobs, entropies = token_logprobs_and_entropy(logits, targets, temperature)
        if has_kept_sets:
            logprobs = kept_token_logprobs(logits, targets, others[0], temperature)
        return logprobs, entropies, *(() if teacher is None else teacher.compare(logits, *others[-num_said:]))

    at_once = rows_at_once(model, 1 if teacher is None else COPIES_COMPARED, predicting.device.type)
    weight, ranks = model.head_weight, model.ranks
    is_plain = predicting.dtype == torch.float32 and len(predicting) <= at_once and isinstance(ranks, OneRank)
    if weight is not None and teacher is None and not is_plain:
        states, *others = columns
        return head_logprobs(states, weight, *others, temperature=temperature, at_once=at_once, ranks=ranks)
    if len(predicting) <= at_once:
        return head(*columns)
    chunks = [
        checkpoint(head, *chunk, use_reentrant=False)
        for chunk in zip(*(torch.split(column, at_once) for column in columns), strict=True)
    ]
    return tuple(torch.cat(parts) for parts in zip(*chunks, strict=True))


def brought(rollouts: Iterable[Rollout], sequences: Sequence[TrainSequence]) -> Columns:
    """Return the reference logprobs that `rollouts` have come with, for `sequences` of theirs.

    ShapeError where a rollout has none, or not one for each sampled token.
    """
    found = {(rollout.ordinal, rollout.sample): rollout.reference_logprobs for rollout in rollouts}
    columns: Columns = {}
    for sequence in sequences:
        logprobs = found[sequence.key]
        if logprobs is None or logprobs.shape != (sequence.num_targets,):
            what = "a rollout has to bring the reference's logprobs of its sampled tokens (kl.executor = 'own')"
            got = f"{'none' if logprobs is None else logprobs.shape} for (ordinal, sample) {sequence.key}"
            raise ShapeError(what, got=got, allowed=(sequence.num_targets,))
        columns[sequence.key] = logprobs
    return columns


def in_step(microbatches: Sequence[PackedMicrobatch], ranks: RankGroup) -> list[PackedMicrobatch]:
    """Return `microbatches`, and empty ones behind them until every rank has as many as the one with most."""
    most = int(ranks.max(torch.tensor([len(microbatches)])))
    return filled(microbatches, most)


def filled(microbatches: Sequence[PackedMicrobatch], count: int) -> list[PackedMicrobatch]:
    """Return `microbatches` and empty ones, `count` in all."""
    return [*microbatches, *(empty_microbatch() for _ in range(count - len(microbatches)))]


def with_columns(sequence: TrainSequence, **columns: np.ndarray) -> TrainSequence:
    """Return `sequence` with these columns, each given for its targets: float32 [num_targets]. Without any, itself."""
    spread: dict[str, Any] = {}
    for name, values in columns.items():
        spread[name] = np.zeros(len(sequence.tokens), dtype=np.float32)
        spread[name][sequence.mask] = values
    return replace(sequence, **spread) if spread else sequence
