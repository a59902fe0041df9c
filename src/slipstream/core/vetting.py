"""Whether a completion or a rollout may be believed: the one place that looks at what came over a channel as data.

Channels refuse malformed messages; a well-formed one may still say what cannot be: a logprob that is no number, a token
that no vocabulary has, a version that nobody has published. Whoever computes with such data vets it when it arrives. A
completion that fails is *poisoned*: it stays in its group as a failed rollout whose `failure` says what is wrong, with
the configured reward and without a token, so that nothing can be computed from it or trained on it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import msgspec
import numpy as np

from slipstream.core.config import RunConfig
from slipstream.core.errors import ShapeError
from slipstream.core.packed import check_kept_sets
from slipstream.core.types import Completion, Rollout, Segment

MAX_LOGPROB = 1e-3
"""Largest logprob in nats: at most 0, but engines that compute in bfloat16 and subtract come out slightly above."""

MAX_REWARD = 1e12
"""Largest size of a reward: whitening squares it in float32, and sums the squares of a batch."""

POISONED = "poisoned completion: "
"""Prefix of the `failure` of a poisoned completion."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that the receiver knows; None where it does not, or does not care.

    `max_new_tokens` bounds sampled tokens, `max_positions` prompt and completion together. With `keeps_sets` (True or
    False) every sampled token has the set it was drawn from, or none has; of the first `num_trained` samples of a group
    at least, since a greedy baseline behind them is drawn from no set.
    `may_be_given`: a text of which nothing was sampled is welcome, a reference that is to be scored.
    """

    vocab_size: int | None = None
    max_new_tokens: int | None = None
    max_positions: int | None = None
    keeps_sets: bool | None = None
    num_trained: int | None = None
    brings_reference: bool = False
    may_be_given: bool = False
    failure_reward: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, *, vocab_size: int, max_positions: int, brings_reference: bool) -> Limits:
        """Return the limits of a run's trainer; `vocab_size` and `max_positions` are its policy's."""
        return cls(
            vocab_size=vocab_size,
            max_new_tokens=config.generator.max_new_tokens,
            max_positions=max_positions,
            keeps_sets=config.generator.keep_sets,
            num_trained=config.completions_per_group,
            brings_reference=brings_reference,
            failure_reward=config.rewards.failure_reward,
        )


def vetted(rollout: Rollout, limits: Limits, *, newest_version: int | None = None) -> Rollout:
    """Return `rollout`, poisoned where its completion cannot be, failed where only its reward cannot.

    `newest_version` is the newest one published so far, where the caller knows it. Idempotent. Of a failed reward the
    completion stays as it is, and is trained on with `limits.failure_reward` like that of any failed verifier.
    """
    if rollout.failure is not None and rollout.failure.startswith(POISONED):
        return emptied(rollout, rollout.failure, failure_reward=limits.failure_reward)
    fault = completion_fault(rollout.completion, limits, newest_version=newest_version)
    if fault is None:
        fault = _reference_fault(rollout, limits)
    if fault is not None:
        return emptied(rollout, POISONED + fault, failure_reward=limits.failure_reward)
    fault = reward_fault(rollout)
    if fault is not None:
        return msgspec.structs.replace(rollout, reward=limits.failure_reward, reward_parts={}, failure=fault)
    return rollout


def emptied(rollout: Rollout, failure: str, *, failure_reward: float) -> Rollout:
    """Return `rollout` as a failed one without a token; its text stays, to be read."""
    return msgspec.structs.replace(
        rollout,
        completion=without_tokens(rollout.completion),
        reward=failure_reward,
        reward_parts={},
        failure=failure,
        scored_s=rollout.scored_s if math.isfinite(rollout.scored_s) else 0.0,
        reference_logprobs=np.zeros(0, dtype=np.float32),
    )


def without_tokens(completion: Completion) -> Completion:
    """Return `completion` with one token of a prompt: it can be packed, and has nothing to train on."""
    prompt = msgspec.structs.replace(completion.prompt, tokens=np.zeros(1, dtype=np.int32))
    times = (completion.started_s, completion.finished_s)
    started_s, finished_s = times if all(map(math.isfinite, times)) else (0.0, 0.0)
    return msgspec.structs.replace(
        completion,
        prompt=prompt,
        segments=(Segment(tokens=np.zeros(0, dtype=np.int32)),),
        started_s=started_s,
        finished_s=finished_s,
    )


def completion_fault(completion: Completion, limits: Limits, *, newest_version: int | None = None) -> str | None:
    """Return what cannot be about `completion`, in words that name the place; None for a sound one.

    Checked: shapes and types of all arrays, token ids, lengths, behaviour logprobs (finite, at most 0), version spans
    (from the first token on, ascending, none from the future), kept sets, times.
    """
    fault = _completion_fault(completion, limits, newest_version)
    if fault is None:
        return None
    versions = [span.version for segment in completion.segments for span in segment.version_spans]
    of = f"versions {min(versions)}..{max(versions)}" if versions else "no version"
    return f"{fault} ({of}, replica {completion.replica})"


def reward_fault(rollout: Rollout) -> str | None:
    """Return what cannot be about the reward and its parts; None for a sound one."""
    for name, value in {"reward": rollout.reward, **rollout.reward_parts}.items():
        if value is not None and not abs(value) <= MAX_REWARD:  # a comparison with NaN is false
            return f"{name} is {value}, allowed are numbers up to {MAX_REWARD:g}"
    return None


def is_of_run(rollout: Rollout, *, samples_per_group: int) -> bool:
    """Whether `rollout` names a place that a group has; else it belongs nowhere and can only be dropped."""
    return rollout.ordinal >= 0 and 0 <= rollout.sample < samples_per_group


def _completion_fault(completion: Completion, limits: Limits, newest_version: int | None) -> str | None:
    if not len(completion.prompt.tokens.shape) or not completion.prompt.tokens.size:
        return "the prompt has no token"
    if (fault := _tokens_fault(completion.prompt.tokens, limits.vocab_size)) is not None:
        return f"the prompt has {fault}"
    if not (math.isfinite(completion.started_s) and math.isfinite(completion.finished_s)):
        return f"it started at {completion.started_s} s and finished at {completion.finished_s} s"
    num_sampled, length, version = 0, len(completion.prompt.tokens), 0
    for segment in completion.segments:
        fault = _tokens_fault(segment.tokens, limits.vocab_size)
        if fault is None and segment.behaviour_logprobs is not None:
            fault = _sampled_fault(segment, oldest=version, newest=newest_version)
            num_sampled += len(segment.tokens) if fault is None else 0
            version = max([version, *(span.version for span in segment.version_spans)])
        elif fault is None and segment.version_spans:
            fault = "versions on tokens that were given"
        if fault is not None:
            return fault
        length += len(segment.tokens)
    if not num_sampled and not (limits.may_be_given and length > len(completion.prompt.tokens)):
        return "no token was sampled"
    if limits.max_new_tokens is not None and num_sampled > limits.max_new_tokens:
        return f"{num_sampled} sampled tokens, at most {limits.max_new_tokens} were asked for"
    if limits.max_positions is not None and length > limits.max_positions:
        return f"{length} tokens with its prompt, the model reads {limits.max_positions}"
    is_trained = limits.num_trained is None or completion.sample < limits.num_trained
    return _kept_fault(completion, limits.keeps_sets) if is_trained else None


def _is_row(array: np.ndarray, kind: str) -> bool:
    return array.ndim == 1 and array.dtype.kind == kind


def _tokens_fault(tokens: np.ndarray, vocab_size: int | None) -> str | None:
    if not _is_row(tokens, "i"):
        return f"tokens of shape {list(tokens.shape)} and type {tokens.dtype}"
    if not len(tokens):
        return None
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        wrong = low if low < 0 else high
        place = int(np.argmax(tokens == wrong))
        return f"token id {wrong} at {place}, where the vocabulary has {vocab_size or 'no negative ones'}"
    return None


def _sampled_fault(segment: Segment, *, oldest: int, newest: int | None) -> str | None:
    logprobs, length = segment.behaviour_logprobs, len(segment.tokens)
    assert logprobs is not None
    if not _is_row(logprobs, "f") or len(logprobs) != length:
        return f"behaviour logprobs of shape {list(logprobs.shape)} and type {logprobs.dtype} for {length} tokens"
    possible = np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)
    if not possible.all():
        place = int(np.argmin(possible))
        return f"behaviour logprob {logprobs[place]} at token {place} of {length}"
    if not length:
        return None if not segment.version_spans else "versions without tokens"
    starts = [span.start for span in segment.version_spans]
    versions = [span.version for span in segment.version_spans]
    if not starts or starts[0] != 0 or starts[-1] >= length or any(a >= b for a, b in itertools.pairwise(starts)):
        return f"version spans that start at {starts} of {length} tokens"
    if versions != sorted(versions) or versions[0] < oldest:
        return f"versions {versions} that fall"
    if newest is not None and versions[-1] > newest:
        return f"version {versions[-1]} from the future, the newest is {newest}"
    return None


def _kept_fault(completion: Completion, keeps_sets: bool | None) -> str | None:
    sampled = [segment for segment in completion.segments if segment.is_sampled]
    carrying = [segment for segment in sampled if segment.kept_tokens is not None or segment.kept_counts is not None]
    if keeps_sets is False and carrying:
        return "kept sets that nobody asked for"
    if carrying and len(carrying) < len(sampled):
        return f"kept sets in {len(carrying)} of {len(sampled)} segments"
    if keeps_sets and not carrying:
        return "no kept sets"
    for segment in carrying:
        tokens, counts = segment.kept_tokens, segment.kept_counts
        if tokens is None or counts is None or not _is_row(tokens, "i") or not _is_row(counts, "i"):
            return "kept sets of the wrong shape or type"
        if len(counts) and int(counts.min()) < 1:
            return "an empty kept set"
        try:
            check_kept_sets(segment.tokens, tokens, counts)
        except ShapeError as error:
            return f"{error.what}: {error.got}"
    return None


def _reference_fault(rollout: Rollout, limits: Limits) -> str | None:
    logprobs = rollout.reference_logprobs
    if logprobs is None:
        return "it came without the reference's logprobs" if limits.brings_reference else None
    num_sampled = sum(len(segment.tokens) for segment in rollout.completion.segments if segment.is_sampled)
    if not _is_row(logprobs, "f") or len(logprobs) != num_sampled:
        return f"reference logprobs of shape {list(logprobs.shape)} for {num_sampled} sampled tokens"
    if not np.isfinite(logprobs).all():
        place = int(np.argmin(np.isfinite(logprobs)))
        return f"reference logprob {logprobs[place]} at token {place} of {num_sampled}"
    return None
