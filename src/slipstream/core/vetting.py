"""Whether a completion or a rollout may be believed: the one place that looks at what came over a channel as data.

Channels refuse malformed messages; a well-formed one may still say what cannot be: a logprob that is no number, a token
that no vocabulary has, a version that nobody has published. Whoever computes with such data vets it when it arrives. A
completion that fails is *poisoned*: it stays in its group as a failed rollout whose `failure` says what is wrong, with
the configured reward and without a token, so that nothing can be computed from it or trained on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
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

MAX_BRANCHES = 256
"""Most branches of an episode: it bounds its tokens, which are at most as many times the positions of the model."""

POISONED = "poisoned completion: "
"""Prefix of the `failure` of a poisoned completion."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that the receiver knows; None where it does not, or does not care.

    `max_new_tokens` bounds sampled tokens, `max_positions` prompt and completion together, and each further branch; of
    a receiver that `reads_branches` not at all, the trunk alone. With `keeps_sets` (True or False) every sampled token
    has the set it was drawn from, or none has; of the first `num_trained` samples of a group at least, since a greedy
    baseline behind them is drawn from no set.
    Each sampled token has `teacher_top_k` tokens of a teacher, which one without an executor of its own does not send.
    `routed`, layers, experts of a token, all experts: a completion of one segment has those of its tokens; all 0: none.
    `may_be_given`: a text of which nothing was sampled is welcome, a reference that is to be scored.
    """

    vocab_size: int | None = None
    max_new_tokens: int | None = None
    max_positions: int | None = None
    reads_branches: bool = True
    keeps_sets: bool | None = None
    num_trained: int | None = None
    brings_reference: bool = False
    teacher_top_k: int | None = None
    may_be_given: bool = False
    failure_reward: float = 0.0
    routed: tuple[int, int, int] | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        *,
        vocab_size: int,
        max_positions: int,
        brings_reference: bool,
        routed: tuple[int, int, int] | None = None,
    ) -> Limits:
        """Return the limits of a run's trainer: `max_positions` and `routed` of its policy, the least `vocab_size` of
        all models that read what it gets."""
        return cls(
            vocab_size=vocab_size,
            max_new_tokens=config.longest_completion,
            max_positions=max_positions,
            keeps_sets=config.generator.keep_sets,
            num_trained=config.completions_per_group,
            brings_reference=brings_reference,
            teacher_top_k=config.teacher.top_k if config.has_own_teacher else None,
            failure_reward=config.rewards.failure_reward,
            routed=routed if config.generator.routing_replay and routed is not None else (0, 0, 0),
        )


def vetted(rollouts: Sequence[Rollout], limits: Limits, *, newest_version: int | None = None) -> list[Rollout]:
    """Return `rollouts`, poisoned where a completion cannot be, failed where only a reward cannot.

    `newest_version` is the newest one published so far, where the caller knows it. Idempotent. Of a failed reward the
    completion stays as it is, and is trained on with `limits.failure_reward` like that of any failed verifier.
    """
    faults = completion_faults([one.completion for one in rollouts], limits, newest_version=newest_version)
    return [_vetted(rollout, fault, limits) for rollout, fault in zip(rollouts, faults, strict=True)]


def _vetted(rollout: Rollout, fault: str | None, limits: Limits) -> Rollout:
    failure = rollout.failure
    if failure is not None and (failure.startswith(POISONED) or never_began(rollout.completion)):
        return emptied(rollout, failure, failure_reward=limits.failure_reward)
    if fault := fault or _reference_fault(rollout, limits) or _teacher_fault(rollout, limits):
        return emptied(rollout, POISONED + fault, failure_reward=limits.failure_reward)
    turns = rollout.completion.episode.turn_rewards if rollout.completion.episode is not None else ()
    of_turns = {f"the reward of turn {turn}": value for turn, value in enumerate(turns, start=1)}
    for name, value in {"reward": rollout.reward, **rollout.reward_parts, **of_turns}.items():
        if value is not None and not abs(value) <= MAX_REWARD:  # a comparison with NaN is false
            fault = f"{name} is {value}, allowed are numbers up to {MAX_REWARD:g}"
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
        teacher_tokens=None,
        teacher_logprobs=None,
    )


def without_tokens(completion: Completion) -> Completion:
    """Return `completion` with one token of a prompt: it can be packed, and has nothing to train on."""
    times = (completion.started_s, completion.finished_s)
    started_s, finished_s = times if all(map(math.isfinite, times)) else (0.0, 0.0)
    return msgspec.structs.replace(
        completion,
        prompt=msgspec.structs.replace(completion.prompt, tokens=np.zeros(1, dtype=np.int32)),
        segments=(Segment(tokens=np.zeros(0, dtype=np.int32)),),
        started_s=started_s,
        finished_s=finished_s,
    )


def never_began(completion: Completion) -> bool:
    """Whether it is an episode whose environment failed before the first turn: it has no token, and says why."""
    has_failed = completion.episode is not None and completion.episode.failure is not None
    return has_failed and not any(segment.is_sampled for segment in completion.segments)


def completion_faults(
    completions: Sequence[Completion], limits: Limits, *, newest_version: int | None = None
) -> list[str | None]:
    """Return what cannot be about each completion, in words that name the place; None for a sound one.

    Checked: shapes and types of all arrays, token ids, lengths, behaviour logprobs (finite, at most 0), version spans
    (from the first token on, ascending in each branch, none from the future), kept sets, branches (given contexts that
    are not empty), times. Numbers are first looked at together.
    """
    faults = [_form_fault(completion, limits, newest_version) for completion in completions]
    formed = [completion for completion, fault in zip(completions, faults, strict=True) if fault is None]
    if not _are_numbers_possible(formed, limits.vocab_size):
        faults = [old or _number_fault(one, limits.vocab_size) for one, old in zip(completions, faults, strict=True)]
    return [None if fault is None else _placed(fault, one) for one, fault in zip(completions, faults, strict=True)]


def is_of_run(rollout: Rollout, *, samples_per_group: int) -> bool:
    """Whether `rollout` names a place that a group has; else it belongs nowhere and can only be dropped."""
    return rollout.ordinal >= 0 and 0 <= rollout.sample < samples_per_group


def _placed(fault: str, completion: Completion) -> str:
    versions = [span.version for segment in completion.segments for span in segment.version_spans]
    of = f"versions {min(versions)}..{max(versions)}" if versions else "no version"
    return f"{fault} ({of}, replica {completion.replica})"


def _form_fault(completion: Completion, limits: Limits, newest_version: int | None) -> str | None:
    """Return what cannot be about all but the tokens and logprobs themselves."""
    prompt, started_s, finished_s = completion.prompt.tokens, completion.started_s, completion.finished_s
    if not prompt.shape or not prompt.size:
        return "the prompt has no token"
    if not _is_row(prompt, "i"):
        return f"the prompt has tokens of shape {list(prompt.shape)} and type {prompt.dtype}"
    if not (math.isfinite(started_s) and math.isfinite(finished_s)):
        return f"it started at {started_s} s and finished at {finished_s} s"
    num_sampled, lengths, version, has_kept = 0, [len(prompt)], 0, False
    for index, segment in enumerate(completion.segments):
        if not _is_row(segment.tokens, "i"):
            return f"tokens of shape {list(segment.tokens.shape)} and type {segment.tokens.dtype}"
        if segment.begins:
            if not index:
                return "a further branch at the prompt, where the trunk begins"
            if segment.is_sampled or not len(segment.tokens):
                return f"a branch that begins with {'sampled' if segment.is_sampled else 'no'} tokens (segment {index})"
            lengths.append(0)
            version = 0  # branches may have been sampled side by side
        if segment.behaviour_logprobs is not None:
            if (fault := _sampled_fault(segment, oldest=version, newest=newest_version)) is not None:
                return fault
            num_sampled += len(segment.tokens)
            version = segment.version_spans[-1].version if segment.version_spans else version
        elif segment.version_spans:
            return "versions on tokens that were given"
        has_kept |= segment.kept_tokens is not None or segment.kept_counts is not None
        lengths[-1] += len(segment.tokens)
    is_given = limits.may_be_given and sum(lengths) > len(prompt)
    if not num_sampled and not is_given and not never_began(completion):
        return "no token was sampled"
    if limits.max_new_tokens is not None and num_sampled > limits.max_new_tokens:
        return f"{num_sampled} sampled tokens, at most {limits.max_new_tokens} were asked for"
    if (fault := _length_fault(lengths, limits)) is not None:
        return fault
    if (fault := _routes_fault(completion, limits.routed)) is not None:
        return fault
    is_trained = limits.num_trained is None or completion.sample < limits.num_trained
    return _kept_fault(completion, limits) if is_trained and (has_kept or limits.keeps_sets) else None


def _routes_fault(completion: Completion, routed: tuple[int, int, int] | None) -> str | None:
    """Return what cannot be about the recorded experts, of a completion whose segments are sound."""
    found = [segment.routes for segment in completion.segments if segment.routes is not None]
    if routed is None:
        return None
    if not routed[0] or len(completion.segments) != 1:
        return "experts of tokens that nobody asked for" if found else None
    layers, per_token, num_experts = routed
    shape = (len(completion.prompt.tokens) + len(completion.segments[0].tokens) - 1, layers, per_token)
    if not found or found[0].shape != shape or found[0].dtype not in (np.uint8, np.int16):
        return f"experts of tokens of shape {[list(one.shape) for one in found]}, expected {list(shape)}"
    [routes] = found
    is_possible = (routes >= 0) & (routes < num_experts) | (routes == np.iinfo(routes.dtype).max)
    return None if is_possible.all() else f"expert {routes[~is_possible][0]} of {num_experts}"


def _length_fault(lengths: Sequence[int], limits: Limits) -> str | None:
    """Return which branch is longer than what the model reads; `lengths` are those of the trunk and the others."""
    if len(lengths) > MAX_BRANCHES:
        return f"{len(lengths)} branches, at most {MAX_BRANCHES} are read"
    read = lengths if limits.reads_branches else lengths[:1]
    if limits.max_positions is None or max(read) <= limits.max_positions:
        return None
    if lengths[0] > limits.max_positions:
        return f"{lengths[0]} tokens with its prompt, the model reads {limits.max_positions}"
    return f"{max(read)} tokens in a branch, the model reads {limits.max_positions}"


def _is_row(array: np.ndarray, kind: str) -> bool:
    return array.ndim == 1 and array.dtype.kind == kind


def _are_numbers_possible(completions: Sequence[Completion], vocab_size: int | None) -> bool:
    """Return whether all tokens and logprobs are possible, of completions whose form is sound."""
    segments = [segment for completion in completions for segment in completion.segments]
    tokens = np.concatenate([*(s.tokens for s in segments), *(one.prompt.tokens for one in completions), [0]])
    logprobs = np.concatenate([*(s.behaviour_logprobs for s in segments if s.behaviour_logprobs is not None), [0.0]])
    is_known = tokens.min() >= 0 and tokens.max() < (vocab_size or np.inf)
    return bool(is_known and -np.inf < logprobs.min() and logprobs.max() <= MAX_LOGPROB)  # NaN is in no order


def _number_fault(completion: Completion, vocab_size: int | None) -> str | None:
    """Return which token or logprob cannot be, of a completion whose form is sound."""
    named = [("the prompt has ", completion.prompt.tokens), *(("", segment.tokens) for segment in completion.segments)]
    for name, tokens in named:
        if (wrong := (tokens < 0) | (tokens >= (vocab_size or np.inf))).any():
            place, known = int(np.argmax(wrong)), vocab_size or "no negative ones"
            return f"{name}token id {tokens[place]} at {place}, where the vocabulary has {known}"
    for logprobs in [s.behaviour_logprobs for s in completion.segments if s.behaviour_logprobs is not None]:
        if not (possible := np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB)).all():
            place = int(np.argmin(possible))
            return f"behaviour logprob {logprobs[place]} at token {place} of {len(logprobs)}"
    return None


def _sampled_fault(segment: Segment, *, oldest: int, newest: int | None) -> str | None:
    logprobs, spans, length = segment.behaviour_logprobs, segment.version_spans, len(segment.tokens)
    assert logprobs is not None
    if not _is_row(logprobs, "f") or len(logprobs) != length:
        return f"behaviour logprobs of shape {list(logprobs.shape)} and type {logprobs.dtype} for {length} tokens"
    if not length:
        return None if not spans else "versions without tokens"
    starts, versions = [span.start for span in spans], [span.version for span in spans]
    if not starts or starts[0] != 0 or starts[-1] >= length or any(a >= b for a, b in itertools.pairwise(starts)):
        return f"version spans that start at {starts} of {length} tokens"
    if versions != sorted(versions) or versions[0] < oldest:
        return f"versions {versions} that fall"
    if newest is not None and versions[-1] > newest:
        return f"version {versions[-1]} from the future, the newest is {newest}"
    return None


def _kept_fault(completion: Completion, limits: Limits) -> str | None:
    keeps_sets, vocab_size = limits.keeps_sets, limits.vocab_size or math.inf
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
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            return f"kept sets of token ids {tokens.min()}..{tokens.max()}, where the vocabulary has {vocab_size}"
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


def _teacher_fault(rollout: Rollout, limits: Limits) -> str | None:
    """Return what cannot be about the distributions of an own executor's teacher, for a receiver that needs them."""
    if limits.teacher_top_k is None:
        return None
    tokens, logprobs = rollout.teacher_tokens, rollout.teacher_logprobs
    if tokens is None or logprobs is None:
        return "it came without what the teacher says"
    shape = (rollout.completion.num_sampled, limits.teacher_top_k)
    if tokens.shape != shape or tokens.dtype.kind != "i" or logprobs.shape != (shape[0], shape[1] + 1):
        return f"the teacher's tokens of shape {list(tokens.shape)} and logprobs of shape {list(logprobs.shape)}"
    is_ordered = tokens.min(initial=0) >= 0 and (np.diff(tokens, axis=1) > 0).all()
    if not is_ordered or tokens.max(initial=0) >= (limits.vocab_size or np.inf):
        return "the teacher's tokens are not distinct ones of the vocabulary, in ascending order"
    total = np.exp(logprobs, dtype=np.float64).sum(axis=1)
    if logprobs.dtype.kind != "f" or not np.isfinite(logprobs).all() or not (np.abs(total - 1.0) < MAX_LOGPROB).all():
        return "the teacher's probabilities are not those of a distribution"
    return None
