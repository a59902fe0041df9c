"""Training a reward model on preferences, which of several completions of one prompt is best, or on ratings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.core.errors import ConfigError, NonFiniteError, ShapeError
from slipstream.core.packed import Batching, PackedMicrobatch
from slipstream.core.stage_sections import RewardModelConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.scalar import ScalarModel
from slipstream.models.scoring import Sample, microbatch_scores, score, scored_sequence
from slipstream.models.sharded import Parameters
from slipstream.trainer.optim import AdamW, require_finite_loss

LOSSES: dict[int, tuple[str, dict[str, int]]] = {
    1: ("rating", {}),
    2: ("bradley_terry", {}),
    4: ("choice", {"num_candidates": 4}),
}
"""The loss, and its constants, by the number of candidates."""


@dataclass(frozen=True)
class Preference:
    """A label: of `candidates`, completions of one prompt with their EOS, the one at index `best` was chosen.

    A single candidate was not chosen but rated: `rating`, a number on the data's own scale. Token arrays are int32.
    """

    prompt_tokens: np.ndarray
    candidates: tuple[np.ndarray, ...]
    best: int = 0
    rating: float | None = None

    @property
    def samples(self) -> list[Sample]:
        """Candidates behind their prompt, the best one first."""
        others = [tokens for index, tokens in enumerate(self.candidates) if index != self.best]
        return [(self.prompt_tokens, tokens) for tokens in [self.candidates[self.best], *others]]


@dataclass(frozen=True)
class RewardModelUpdate:
    """An update that was made, `index` counted from 0; all but `grad_norm` and `lr` are means over its preferences,
    before it.

    `loss` is nats per preference, or the squared error per rating. `accuracy` is the share whose best candidate scored
    above all others (a tie is wrong), of ratings the share of pairs that scores and ratings order alike. `chosen_mean`
    and `rejected_mean` are the scores of best candidates and of all the others: of ratings, of all and NaN.
    """

    index: int
    loss: float
    accuracy: float
    chosen_mean: float
    rejected_mean: float
    grad_norm: float
    lr: float
    num_preferences: int


def reward_model_updates(
    model: ScalarModel,
    preferences: Sequence[Preference],
    *,
    config: RewardModelConfig,
    microbatch_tokens: int,
    seed: int,
    batching: Batching,
    samples: Sequence[Sample] = (),
    parameters: Parameters | None = None,
    offloads: bool = False,
) -> Iterator[RewardModelUpdate]:
    """Maximise the likelihood of the choices given the scores of the last tokens; yields after each update.

        L = -(1/num_preferences) * sum over preferences of log softmax(scores of the candidates)[best]

    Pairs take the table's `bradley_terry`, which is that for two candidates (arXiv:2009.01325, section 3.4), four take
    `choice` (arXiv:1909.08593, equation 1). Ratings of single candidates take `rating`, the mean squared error. Batches
    come from seeded shuffles, each preference used once per pass; a pass ends with a smaller batch if need be.
    Temperature, dropout and padding do not occur.

    `samples` are what `config.normalise` measures: completions of the untrained policy for "before_and_after",
    reference completions for "reference_bias". Before training, scores get the mean and (population's) deviation of
    the ratings, where there are any; else, and after training, 0 and 1. That follows the last update: exhaust the
    iterator. `parameters` and `offloads` are as for `AdamW`; None: `model` is whole on one CPU.

    ConfigError without preferences or samples, with preferences of another number of candidates, or with ratings that
    are all equal; NonFiniteError before an update that is not finite.
    """
    _check(preferences, config, samples)
    num_updates = config.steps or config.epochs * math.ceil(len(preferences) / config.batch_size)
    stored = FlatParameters(model) if parameters is None else parameters
    optimizer = AdamW(stored, config.optimizer, total_updates=num_updates, offloads=offloads)
    reading: dict[str, Any] = {"microbatch_tokens": microbatch_tokens, "batching": batching}
    unbiased = config.normalise_unbiased
    if config.normalise == "before_and_after":
        mean, std = _target_scale(preferences)
        normalise(model, samples, target_mean=mean, target_std=std, unbiased=unbiased, **reading)
    batches = shuffled_batches(len(preferences), config.batch_size, seed)
    for index, chosen in zip(range(num_updates), batches, strict=False):
        batch = [preferences[one] for one in chosen]
        optimizer.zero_grad()
        loss, scores = _accumulate(model, batch, microbatch_tokens, batching)
        require_finite_loss(loss, update=index, kind="preferences", chosen=chosen)
        lr = optimizer.lr
        grad_norm = optimizer.step()
        yield RewardModelUpdate(
            index=index,
            loss=loss,
            accuracy=_accuracy(scores, batch),
            chosen_mean=float(scores[:, 0].mean()),
            rejected_mean=float(scores[:, 1:].mean()) if config.candidates > 1 else math.nan,
            grad_norm=grad_norm,
            lr=lr,
            num_preferences=len(batch),
        )
    if config.normalise == "before_and_after":
        normalise(model, samples, unbiased=unbiased, **reading)
    elif config.normalise == "reference_bias":
        normalise_on_references(model, samples, **reading)


def _accumulate(
    model: ScalarModel, batch: Sequence[Preference], microbatch_tokens: int, batching: Batching
) -> tuple[float, np.ndarray]:
    """Leave the gradient of one update in the parameters; return its loss, and all scores, float64 [P, candidates],
    the best first."""
    total = 0.0
    num_candidates = len(batch[0].candidates)
    loss = loss_named(*LOSSES[num_candidates])
    table = np.zeros((len(batch), num_candidates))
    for microbatch in _microbatches(batch, microbatch_tokens, batching):
        scores, keys = microbatch_scores(model, microbatch)
        rated = [batch[ordinal].rating for ordinal, _ in keys]
        microbatch_loss, _ = loss(
            LossInputs(
                policy_logprobs=None,
                advantages=None,
                mask=torch.ones(len(keys), dtype=torch.bool, device=scores.device),
                segment_ids=torch.arange(len(keys), device=scores.device),
                num_units=len(batch),
                scores=scores,
                labels=torch.zeros(len(keys) // num_candidates, dtype=torch.int64, device=scores.device),
                ratings=scores.new_tensor([math.nan if one is None else one for one in rated]),
            )
        )
        torch.autograd.backward(microbatch_loss)
        total += float(microbatch_loss.detach())
        table[tuple(np.transpose(keys))] = scores.detach().double().cpu().numpy()
    return total, table


def _microbatches(
    preferences: Sequence[Preference], microbatch_tokens: int, batching: Batching
) -> list[PackedMicrobatch]:
    """Whole preferences in microbatches of at most `microbatch_tokens` rows; a longer one gets one of its own.

    Keys are (preference, candidate), the best candidate at 0.
    """
    sequences = [
        scored_sequence((ordinal, rank), *sample)
        for ordinal, preference in enumerate(preferences)
        for rank, sample in enumerate(preference.samples)
    ]
    return batching.collate(sequences, microbatch_tokens, atom_size=len(preferences[0].candidates))


def shuffled_batches(count: int, batch_size: int, seed: int) -> Iterator[list[int]]:
    """Yield the batches of endless passes over 0..count-1, each in another order; a pass ends with what is left."""
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(count).tolist()
        yield from (order[start : start + batch_size] for start in range(0, count, batch_size))


def _check(preferences: Sequence[Preference], config: RewardModelConfig, samples: Sequence[Sample]) -> None:
    """Raise ConfigError where there is nothing to train on, or to normalise on."""
    if not preferences:
        raise ConfigError("a reward model needs preferences", got="none", allowed="at least one")
    if config.normalise != "none" and not samples:
        got = f"no samples with reward_model.normalise = '{config.normalise}'"
        hint = "pass samples, or set reward_model.normalise = 'none'"
        raise ConfigError("there is nothing to normalise the reward model on", got=got, hint=hint)
    _check_labels(preferences, config.candidates)


def _check_labels(preferences: Sequence[Preference], num_candidates: int) -> None:
    for index, preference in enumerate(preferences):
        if len(preference.candidates) != num_candidates:
            what = f"preference {index} has another number of candidates"
            hint = "set reward_model.candidates to what the data has"
            raise ConfigError(what, got=len(preference.candidates), allowed=num_candidates, hint=hint)
        if (preference.rating is not None and math.isfinite(preference.rating)) != (num_candidates == 1):
            what = f"preference {index} is not labelled as its candidates are"
            got = f"rating = {preference.rating} with {num_candidates} candidates"
            raise ConfigError(what, got=got, allowed="a finite rating of one candidate, and none of several")
        if not 0 <= preference.best < num_candidates:
            what = f"preference {index} chooses a candidate that is not there"
            raise ConfigError(what, got=f"best = {preference.best}", allowed=f"0..{num_candidates - 1}")
        if not len(preference.prompt_tokens) or not all(map(len, preference.candidates)):
            raise ShapeError(f"preference {index} has an empty prompt or candidate")


def _target_scale(preferences: Sequence[Preference]) -> tuple[float, float]:
    """Return (mean, standard deviation) that scores start with: of the ratings, 0 and 1 where there are none."""
    ratings = np.array([one.rating for one in preferences if one.rating is not None])
    if not len(ratings):
        return 0.0, 1.0
    if np.ptp(ratings) == 0.0:
        raise ConfigError("there is nothing to learn from ratings that are all equal", got=f"{ratings[0]:g}")
    return float(ratings.mean()), float(ratings.std())


def _accuracy(scores: np.ndarray, preferences: Sequence[Preference]) -> float:
    """Return the share of rows [P, candidates] whose first score is above all others.

    For ratings it is the share of the pairs of rows of different ratings that scores order alike; NaN without such.
    """
    if scores.shape[1] > 1:
        return float(np.mean(scores[:, 0] > scores[:, 1:].max(axis=1)))
    ratings = np.array([one.rating for one in preferences], dtype=np.float64)
    order = np.argsort(ratings)
    return share_in_order(np.split(scores[order, 0], np.flatnonzero(np.diff(ratings[order])) + 1), tie=0.0)


def share_in_order(groups: Sequence[np.ndarray], *, tie: float) -> float:
    """Return the share of the pairs of numbers from two of `groups` in which that of the later group is the larger one.

    A pair of equal numbers counts as `tie`. NaN without pairs. The pairs themselves are never in memory.
    """
    num_pairs = (sum(map(len, groups)) ** 2 - sum(len(group) ** 2 for group in groups)) // 2
    return _num_in_order(groups, tie) / num_pairs if num_pairs else math.nan


def _num_in_order(groups: Sequence[np.ndarray], tie: float) -> float:
    if len(groups) < 2:
        return 0.0
    lower, upper = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    known, asked = np.sort(np.concatenate(lower)), np.concatenate(upper)
    below, up_to = (int(np.searchsorted(known, asked, side).sum()) for side in ("left", "right"))
    return below + tie * (up_to - below) + _num_in_order(lower, tie) + _num_in_order(upper, tie)


def preference_accuracy(
    model: ScalarModel, preferences: Sequence[Preference], *, microbatch_tokens: int, batching: Batching
) -> float:
    """Return the share of preferences whose best candidate the model scores above all others, or of pairs of ratings
    that it orders alike; a tie is wrong.

    ConfigError without preferences, or when their numbers of candidates differ.
    """
    if not preferences:
        raise ConfigError("accuracy needs preferences", got="none", allowed="at least one")
    num_candidates = len(preferences[0].candidates)
    _check_labels(preferences, num_candidates)
    samples = [sample for preference in preferences for sample in preference.samples]
    scores = score(model, samples, microbatch_tokens=microbatch_tokens, batching=batching)
    return _accuracy(scores.reshape(-1, num_candidates), preferences)


def normalise(
    model: ScalarModel,
    samples: Sequence[Sample],
    *,
    target_mean: float = 0.0,
    target_std: float = 1.0,
    unbiased: bool = False,
    microbatch_tokens: int,
    batching: Batching,
) -> None:
    """Set the model's gain and bias so that `samples` score with `target_mean` and `target_std`.

        gain = target_std / std,   bias = target_mean - gain * mean,   of the scores under gain 1 and bias 0

    Ziegler et al. (arXiv:1909.08593), section 2, with samples of the untrained policy. Their code takes the
    population's standard deviation; `unbiased` divides by n - 1, as PyTorch's `std` does in a later reproduction.
    ConfigError for fewer than two samples or equal scores, NonFiniteError for others that have no moments; gain is 1
    and bias 0 then.
    """
    if len(samples) < 2:
        raise ConfigError("normalising takes samples", got=len(samples), allowed="at least 2")
    with torch.no_grad():
        model.gain.fill_(1.0)
        model.bias.zero_()
    scores = score(model, samples, microbatch_tokens=microbatch_tokens, batching=batching).astype(np.float64)
    mean, std = float(scores.mean()), float(scores.std(ddof=int(unbiased)))
    if not (math.isfinite(mean) and math.isfinite(std)):
        raise NonFiniteError("the reward model's scores are not finite", got=f"mean {mean}, standard deviation {std}")
    if np.ptp(scores) == 0.0:
        what = "the reward model cannot be normalised: all samples score the same"
        hint = "a head that starts at zero, or samples that are all equal? take head_init = 'reward'"
        raise ConfigError(what, got=f"{mean:g} for {len(samples)} samples", hint=hint)
    gain = target_std / std
    with torch.no_grad():
        model.gain.fill_(gain)
        model.bias.fill_(target_mean - gain * mean)


def normalise_on_references(
    model: ScalarModel, references: Sequence[Sample], *, microbatch_tokens: int, batching: Batching
) -> float:
    """Shift the model's bias so that `references` score 0 on average; returns the average it took away.

    Huang et al. (arXiv:2403.17031): the gain stays, so differences between scores do. ConfigError without references.
    """
    if not references:
        raise ConfigError("normalising takes references", got="none", allowed="at least one")
    scores = score(model, references, microbatch_tokens=microbatch_tokens, batching=batching)
    mean = float(scores.mean(dtype=np.float64))
    if not math.isfinite(mean):
        raise NonFiniteError("the reward model's scores are not finite", got=f"mean {mean}")
    with torch.no_grad():
        model.bias.sub_(mean)
    return mean
