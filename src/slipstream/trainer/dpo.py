"""Training a policy on preferences directly, without a reward model: DPO, IPO, KTO and SimPO."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.algorithms.losses import LOSSES, Loss, LossInputs, loss_named
from slipstream.algorithms.losses.kto import mismatched_kl
from slipstream.algorithms.segments import segment_mean, segment_sum
from slipstream.core.errors import ConfigError
from slipstream.core.packed import Batching, TrainSequence
from slipstream.core.stage_sections import DpoConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.sharded import Parameters
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import LogprobReader, measure, microbatch_logprobs, with_columns
from slipstream.trainer.optim import AdamW, require_finite_loss
from slipstream.trainer.reward_model import Preference, share_in_order, shuffled_batches

TEMPERATURE = 1.0


def preference_loss(config: DpoConfig) -> Loss:
    """Return the loss that `config` names, with its constants."""
    name = "dpo" if config.loss == "sigmoid" else config.loss
    given = vars(config)
    return loss_named(name, {param: given[param] for param in LOSSES[name].params if given[param] is not None})


@dataclass(frozen=True)
class PreferenceData:
    """Preferences as a loss reads them: the sequences of each, the preferred one of a pair first.

    `mismatched` are, for KTO, the prompt of each with a completion of another prompt. All sequences have the
    reference's logprobs, where the loss takes any.
    """

    preferences: tuple[Preference, ...]
    sequences: tuple[tuple[TrainSequence, ...], ...]
    mismatched: tuple[TrainSequence, ...] = ()

    def is_desirable(self, keys: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """Return the labels of the sequences `keys`, bool [S]; of a pair's, whether it is the preferred one."""
        ratings = (self.preferences[index].rating for index, _ in keys)
        labels = [not rank if rating is None else rating > 0 for rating, (_, rank) in zip(ratings, keys, strict=True)]
        return torch.tensor(labels, dtype=torch.bool, device=device)


def preference_data(
    preferences: Sequence[Preference],
    reference: Transformer,
    *,
    loss: Loss,
    others: Sequence[Preference],
    max_positions: int,
    microbatch_tokens: int,
    batching: Batching,
) -> PreferenceData:
    """Return `preferences` for `loss`, with logprobs under `reference` where it takes them: measured here, once.

    Completions are whole and end as they came; logprobs are at temperature 1. KTO's mismatched completions come from
    `others`, and are cut at `max_positions` tokens, those that policy and reference read (`_mismatched`).
    ConfigError without preferences, for pairs where single completions are needed, and the other way round.
    """
    _check(preferences, loss)
    sequences = [
        tuple(_sequence((index, rank), *sample) for rank, sample in enumerate(preference.samples))
        for index, preference in enumerate(preferences)
    ]
    mismatched = _mismatched(preferences, others, max_positions) if "reference_kl" in loss.requires else []
    if "reference_logprobs" in loss.requires:

        def with_reference(some: Sequence[TrainSequence]) -> list[TrainSequence]:
            columns = measure(
                LogprobReader(reference, TEMPERATURE), some, microbatch_tokens=microbatch_tokens, batching=batching
            )
            return [with_columns(one, reference_logprobs=columns[one.key]) for one in some]

        known = iter(with_reference([sequence for members in sequences for sequence in members]))
        sequences = [tuple(next(known) for _ in members) for members in sequences]
        mismatched = with_reference(mismatched)
    return PreferenceData(tuple(preferences), tuple(sequences), tuple(mismatched))


def _check(preferences: Sequence[Preference], loss: Loss) -> None:
    num_candidates = 2 if loss.atom == "pair" else 1
    if not preferences:
        raise ConfigError("learning from preferences takes some", got="none", allowed="at least one")
    for index, one in enumerate(preferences):
        if len(one.candidates) != num_candidates or (one.rating is None) != (num_candidates == 2):
            raise ConfigError(
                f"preference {index} is not what the loss learns from",
                got=f"{len(one.candidates)} completions, rating {one.rating}",
                allowed="two completions" if num_candidates == 2 else "one completion with a rating, 1 or 0",
            )


def _sequence(key: tuple[int, int], prompt: np.ndarray, completion: np.ndarray) -> TrainSequence:
    tokens = np.concatenate([prompt, completion])
    return TrainSequence.read_only(key, tokens, np.arange(len(tokens)) >= len(prompt))


def _mismatched(
    preferences: Sequence[Preference], others: Sequence[Preference], max_positions: int
) -> list[TrainSequence]:
    """Return the prompt of each of `preferences` with a completion of another prompt, cut at `max_positions` tokens.

    It is that of `others` as many places on as preferences of the same prompt stand side by side, so that of pairs
    taken apart desirable ones go with desirable ones, and each with one of its own; or the first behind that place.
    """
    found: list[TrainSequence] = []
    for _, same in groupby(preferences, key=lambda one: one.prompt_tokens.tobytes()):
        run = list(same)
        for one in run:
            other = _of_another_prompt(one, others, len(found) + len(run))
            found.append(_sequence((len(found), 0), one.prompt_tokens, other[: max_positions - len(one.prompt_tokens)]))
    return found


def _of_another_prompt(one: Preference, others: Sequence[Preference], place: int) -> np.ndarray:
    """Return the completion of the first of `others` from `place` on, in a circle, that has another prompt."""
    for offset in range(len(others)):
        other = others[(place + offset) % len(others)]
        if not np.array_equal(other.prompt_tokens, one.prompt_tokens):
            return other.candidates[0]
    raise ConfigError(
        "KTO compares with completions of other prompts", got="one prompt alone", allowed="at least two prompts"
    )


@dataclass(frozen=True)
class PreferenceMeasure:
    """The loss on preferences, and the implicit rewards of chosen (desirable) and rejected (undesirable) completions.

    `accuracy` is the share of pairs whose chosen completion has the larger reward, a tie counting half; of single
    completions, of all pairs of a desirable and an undesirable one. NaN where there is no pair. `margin` is the
    difference of the mean rewards.
    """

    loss: float
    accuracy: float
    margin: float
    chosen_reward: float
    rejected_reward: float

    @classmethod
    def of(cls, loss: float, rewards: np.ndarray, is_chosen: np.ndarray, *, is_paired: bool) -> PreferenceMeasure:
        """Summarise `rewards` float64 [S] with their labels `is_chosen` bool [S]; pairs are in one order on both."""
        chosen, rejected = rewards[is_chosen], rewards[~is_chosen]
        of_chosen, of_rejected = (float(part.mean()) if len(part) else math.nan for part in (chosen, rejected))
        if is_paired:
            accuracy = float(((chosen > rejected) + 0.5 * (chosen == rejected)).mean())
        else:
            accuracy = share_in_order((rejected, chosen), tie=0.5)
        return cls(loss, accuracy, of_chosen - of_rejected, of_chosen, of_rejected)


@dataclass(frozen=True)
class DpoUpdate:
    """An update that was made, `index` counted from 0; `measure` is of its preferences, before it.

    `reference_kl` is KTO's estimate of KL(policy, reference), else 0.
    """

    index: int
    measure: PreferenceMeasure
    reference_kl: float
    grad_norm: float
    lr: float
    num_preferences: int


def dpo_updates(
    model: Transformer,
    data: PreferenceData,
    *,
    config: DpoConfig,
    microbatch_tokens: int,
    seed: int,
    batching: Batching,
    parameters: Parameters | None = None,
    offloads: bool = False,
) -> Iterator[DpoUpdate]:
    """Minimise the loss of `config` on `data`; yields after each update.

    Batches come from seeded shuffles, each preference used once per pass; a pass ends with a smaller batch if need be.
    Logprobs are summed over a completion's tokens (SimPO: averaged), at temperature 1, and losses divided by the
    batch's number of pairs or completions. KTO's estimate of the KL is measured before the update, on the whole batch.
    `parameters` and `offloads` are as for `AdamW`; None: `model` is whole on one CPU.
    NonFiniteError before an update that is not finite. Identity: microbatches change nothing, up to rounding.
    """
    loss = preference_loss(config)
    num_updates = config.steps or config.epochs * math.ceil(len(data.preferences) / config.batch_size)
    stored = FlatParameters(model) if parameters is None else parameters
    optimizer = AdamW(stored, config.optimizer, total_updates=num_updates, offloads=offloads)
    reading: dict[str, Any] = {"microbatch_tokens": microbatch_tokens, "batching": batching}
    batches = shuffled_batches(len(data.preferences), config.batch_size, seed)
    for index, chosen in zip(range(num_updates), batches, strict=False):
        optimizer.zero_grad()
        mismatched = [data.mismatched[one] for one in chosen] if data.mismatched else []
        reference_kl = _reference_kl(model, mismatched, **reading)
        found = _accumulate(model, data, chosen, loss, reference_kl, **reading)
        require_finite_loss(found.loss, update=index, kind="preferences", chosen=chosen)
        lr = optimizer.lr
        grad_norm = optimizer.step()
        yield DpoUpdate(index, found, float(reference_kl), grad_norm, lr, len(chosen))


def _reference_kl(
    model: Transformer, mismatched: Sequence[TrainSequence], *, microbatch_tokens: int, batching: Batching
) -> Tensor:
    """Estimate KTO's KL on `mismatched`; 0 of none, for the other losses."""
    if not mismatched:
        return torch.zeros((), dtype=torch.float64)
    columns = measure(
        LogprobReader(model, TEMPERATURE), mismatched, microbatch_tokens=microbatch_tokens, batching=batching
    )
    sums = [float((columns[one.key] - _known(one)).sum(dtype=np.float64)) for one in mismatched]
    return mismatched_kl(torch.tensor(sums, dtype=torch.float64))


def _known(sequence: TrainSequence) -> np.ndarray:
    """Return the reference's logprobs of the targets."""
    assert sequence.reference_logprobs is not None, "measured by preference_data"
    known: np.ndarray = sequence.reference_logprobs[sequence.mask]
    return known


def _accumulate(
    model: Transformer,
    data: PreferenceData,
    chosen: Sequence[int],
    loss: Loss,
    reference_kl: Tensor,
    *,
    microbatch_tokens: int,
    batching: Batching,
) -> PreferenceMeasure:
    """Leave the gradient of one update in the parameters; return what was measured on its preferences."""
    total = 0.0
    rewards: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    is_paired = loss.atom == "pair"
    batch = [sequence for one in chosen for sequence in data.sequences[one]]
    for microbatch in batching.collate(batch, microbatch_tokens, atom_size=2 if is_paired else 1):
        logprobs, _ = microbatch_logprobs(model, microbatch, temperature=TEMPERATURE)
        columns = microbatch.tensors(logprobs.device)
        inputs = LossInputs(
            policy_logprobs=logprobs,
            advantages=None,
            mask=torch.ones(len(logprobs), dtype=torch.bool, device=logprobs.device),
            segment_ids=columns["segment_ids"],
            lengths=columns["lengths"],
            num_units=len(chosen),
            reference_logprobs=columns.get("reference_logprobs"),
            is_desirable=data.is_desirable(microbatch.keys, logprobs.device),
            reference_kl=reference_kl.to(logprobs.device),
        )
        value, _ = loss(inputs)
        torch.autograd.backward(value)
        total += float(value.detach())
        rewards.append(_rewards(inputs, loss))
        labels.append(inputs.need("is_desirable").cpu().numpy())
    return PreferenceMeasure.of(total, np.concatenate(rewards), np.concatenate(labels), is_paired=is_paired)


@torch.no_grad()
def _rewards(inputs: LossInputs, loss: Loss) -> np.ndarray:
    """Return implicit rewards, float64 [S]: beta log pi/ref(y), of SimPO beta times the mean of log pi(y_t)."""
    logprobs = inputs.need("policy_logprobs").double()
    if inputs.reference_logprobs is None:
        found = segment_mean(logprobs, *inputs.segments)
    else:
        found = segment_sum(logprobs - inputs.reference_logprobs, *inputs.segments)
    rewards: np.ndarray = (found * float(loss.params["beta"])).cpu().numpy()
    return rewards


@torch.no_grad()
def measure_preferences(
    model: Transformer, data: PreferenceData, *, config: DpoConfig, microbatch_tokens: int, batching: Batching
) -> PreferenceMeasure:
    """Measure the loss of `dpo_updates` on preferences that it may not have seen, all of them as one batch.

    Identity: a model that is the reference has rewards of exactly 0, so DPO's loss is log 2 and its accuracy 1/2.
    """
    loss = preference_loss(config)
    reading: dict[str, Any] = {"microbatch_tokens": microbatch_tokens, "batching": batching}
    sequences = [sequence for members in data.sequences for sequence in members]
    columns = measure(LogprobReader(model, TEMPERATURE), sequences, **reading)
    known = [_known(one) for one in sequences] if "reference_logprobs" in loss.requires else []
    logprobs = torch.from_numpy(np.concatenate([columns[one.key] for one in sequences]))
    labels = data.is_desirable([one.key for one in sequences], logprobs.device)
    inputs = LossInputs(
        policy_logprobs=logprobs,
        advantages=None,
        mask=torch.ones(len(logprobs), dtype=torch.bool),
        segment_ids=torch.arange(len(sequences)).repeat_interleave(torch.tensor([s.num_targets for s in sequences])),
        num_units=len(data.preferences),
        reference_logprobs=torch.from_numpy(np.concatenate(known)) if known else None,
        is_desirable=labels,
        reference_kl=_reference_kl(model, data.mismatched, **reading),
    )
    value, _ = loss(inputs)
    rewards = _rewards(inputs, loss)
    return PreferenceMeasure.of(float(value), rewards, labels.numpy(), is_paired=loss.atom == "pair")
