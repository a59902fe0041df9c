"""The requests and results of a generation engine, and the interface that every engine has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.fields import MIN_TEMPERATURE
from slipstream.core.spans import Spans
from slipstream.core.types import FinishReason, Segment, VersionSpan

KvOnUpdate = Literal["keep", "recompute", "recompute_if_older_than"]


@dataclass(frozen=True, eq=False)
class KeptSets:
    """The tokens each of T tokens was drawn from, where sampling is truncated: `tokens` row by row, `counts` of each.

    Token t was drawn from `tokens[sum(counts[:t]) : sum(counts[:t + 1])]`, ascending, and is one of them.
    """

    tokens: np.ndarray  # int32 [sum of counts]
    counts: np.ndarray  # int32 [T]

    @classmethod
    def of_rows(cls, rows: Sequence[np.ndarray]) -> KeptSets:
        """Join the sets of T tokens, int32 [count] each. Identity: `rows` gives them back."""
        tokens = np.concatenate([np.zeros(0, dtype=np.int32), *rows]).astype(np.int32)
        return cls(tokens, np.array([len(row) for row in rows], dtype=np.int32))

    def rows(self) -> list[np.ndarray]:
        """Return one int32 [count] per token."""
        return np.split(self.tokens, np.cumsum(self.counts)[:-1]) if len(self.counts) else []


class Session(NamedTuple):
    """One episode, in an engine: `sample` of group `ordinal` in `stream`; or one of its branches."""

    stream: int
    ordinal: int
    sample: int
    branch: int = 0


@dataclass(frozen=True, eq=False)
class Resume:
    """The T >= 0 tokens that a request had generated when it was exported."""

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]
    version_spans: tuple[VersionSpan, ...]
    started_s: float
    kept: KeptSets | None = None
    routes: np.ndarray | None = None  # as in `Segment`


@dataclass(frozen=True, eq=False)
class Request:
    """One completion to generate: `sample` of group `ordinal`; or one turn of an episode.

    A turn's `prompt_tokens` are the whole context, of which the last `num_before` came after the episode's prompt:
    earlier turns and observations. The noise of its token t is that of position num_before + t, so a turn that is
    sampled again is the same turn. With `parks` its keys stay when it has finished, for the next turn (`parked.py`).
    One that `goes_on` follows a turn that was sampled: it goes before what is new, also while admission is paused.
    `branch` tells apart the contexts of one episode; each has noise of its own.

    `max_new_tokens` counts from the completion's first token, also when resumed. `stream` separates uses that count
    ordinals on their own, so that their noise differs: 0 is training. Sampling is from softmax(logits / temperature),
    cut to the `top_k` likeliest tokens, then to the fewest that hold `top_p` of the mass, then to those with at least
    `min_p` of the likeliest one's probability; 0, 1 and 0 cut nothing. `keep_sets` reports what was left.
    A completion that takes longer than `time_limit_s` seconds from its start ends as it is, with reason "deadline", but
    never before its first token. `is_again`: it was sampled before, and lost; its prefill is one more.
    """

    ordinal: int
    sample: int
    prompt_tokens: np.ndarray  # int32 [Tp], Tp >= 1
    max_new_tokens: int
    temperature: float = 1.0
    stream: int = 0
    resume: Resume | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    keep_sets: bool = False
    time_limit_s: float | None = None
    is_again: bool = False
    num_before: int = 0
    parks: bool = False
    goes_on: bool = False
    branch: int = 0

    @property
    def session(self) -> Session:
        return Session(self.stream, self.ordinal, self.sample, self.branch)

    @property
    def noise_coordinates(self) -> tuple[int, int, int]:
        """Return what the noise is keyed by, beside the run's seed."""
        return self.stream, self.ordinal, self.sample + (self.branch << 32)

    def resumed_with(self, resume: Resume) -> Request:
        """The same request, to be continued after `resume`."""
        return replace(self, resume=resume)


@dataclass(frozen=True, eq=False)
class Finished:
    """A completion: its stop token, when it has one, is the last of `tokens`. `request` is what was asked."""

    request: Request
    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T]: behaviour logprobs
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    started_s: float
    finished_s: float
    kept: KeptSets | None = None
    routes: np.ndarray | None = None  # as in `Segment`

    @property
    def ordinal(self) -> int:
        return self.request.ordinal

    @property
    def sample(self) -> int:
        return self.request.sample


def segment_of(sampled: Resume | Finished) -> Segment:
    """Return the tokens of a completion, whole or as far as it is, as messages carry them."""
    kept = sampled.kept
    return Segment(
        tokens=sampled.tokens,
        behaviour_logprobs=sampled.logprobs,
        version_spans=sampled.version_spans,
        kept_tokens=None if kept is None else kept.tokens,
        kept_counts=None if kept is None else kept.counts,
        routes=sampled.routes,
    )


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Sort `requests` by stream, ordinal, sample and branch."""
    return sorted(requests, key=lambda request: request.session)


class StateSpans(Protocol):
    """The part of `core.spans.Spans` that engines use, to tell prefill from decode time."""

    def span(self, state: str) -> AbstractContextManager[None]: ...

    def did(self, units: int) -> None: ...


class Labelled:
    """The spans of an engine, with the version that it samples from; all in one state while `state` is set."""

    def __init__(self, spans: Spans, *, state: str | None = None) -> None:
        self.version: int | None = None
        self.state = state
        self._spans = spans
        self.did = spans.did

    def span(self, state: str) -> AbstractContextManager[None]:
        return self._spans.span(self.state or state, version=self.version)


class GenerationEngine(Protocol):
    """Requests in, completions out, as the generator's executor drives it: our own engine, or vLLM in its process."""

    version: int

    @property
    def num_live(self) -> int: ...

    @property
    def num_begun(self) -> int:
        """Completions that have begun, here or elsewhere, and are not finished: live ones, resumed ones that wait."""
        ...

    @property
    def versions_in_use(self) -> set[int]:
        """Where versions are side by side: those that what has begun, waits or is an open episode goes on with."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def is_idle(self) -> bool: ...

    @property
    def num_re_prefilled(self) -> int:
        """Tokens so far whose keys and values were made once more: after a swap, or to go on after a break."""
        ...

    @property
    def session_counts(self) -> dict[str, int]:
        """Counters of the keys that were kept between the turns of episodes; empty for an engine that keeps none."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue `requests` in this order; resumed ones go before everything that has not started."""
        ...

    def pause_admission(self, is_paused: bool, *, holds_turns: bool = False) -> None:
        """While paused nothing new starts; what has begun goes on, further turns of episodes not with `holds_turns`."""
        ...

    def step(self) -> list[Finished]:
        """One bounded piece of work without waiting; what finished."""
        ...

    def set_version(self, version: int, *, kv_on_update: KvOnUpdate = "keep", max_kv_age: int = 0) -> None:
        """The weights are `version` from here on; called between two steps, after they were replaced."""
        ...

    def begun(self) -> list[Request]:
        """Every completion that has tokens, as `submit` could resume it elsewhere; here it goes on undisturbed."""
        ...

    def export_live(self) -> list[Request]:
        """Take every live completion out, resumable by `submit` here or elsewhere; by ordinal and sample."""
        ...

    def let_go_on(self, session: Session) -> None:
        """An episode has begun: its other branches go on while admission is paused."""
        ...

    def release(self, session: Session) -> None:
        """The episode has ended: forget what is kept for its next turn, if anything is."""
        ...


def check_request(request: Request, *, max_len: int) -> None:
    """Raise ConfigError when `request` cannot be served in sequences of `max_len` tokens."""
    num_prompt = len(request.prompt_tokens)
    if num_prompt == 0:
        raise ConfigError("a prompt needs at least one token", got=f"ordinal {request.ordinal} with an empty prompt")
    if not 0 <= request.num_before < num_prompt:
        what = "an episode begins with a prompt of at least one token"
        got = f"num_before = {request.num_before} of {num_prompt} prompt tokens"
        raise ConfigError(what, got=got, allowed=f"0..{num_prompt - 1}")
    if request.max_new_tokens < 1:
        raise ConfigError("max_new_tokens must be positive", got=request.max_new_tokens)
    if request.temperature != 0 and not MIN_TEMPERATURE <= request.temperature < math.inf:
        allowed = f"0, which means greedy, or {MIN_TEMPERATURE:g} and more"
        raise ConfigError("this is no temperature to sample at", got=request.temperature, allowed=allowed)
    if request.top_k < 0 or not 0 < request.top_p <= 1 or not 0 <= request.min_p <= 1:
        got = f"top_k = {request.top_k}, top_p = {request.top_p}, min_p = {request.min_p}"
        allowed = "top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1"
        raise ConfigError("sampling cannot be cut like this", got=got, allowed=allowed)
    if request.keep_sets and (request.top_k < 1 or request.temperature == 0):
        what = "the tokens that a token was drawn from are kept only where top_k bounds them"
        got = f"keep_sets with top_k = {request.top_k}, temperature = {request.temperature}"
        raise ConfigError(what, got=got, allowed="top_k >= 1 and temperature > 0")
    if request.time_limit_s is not None and not request.time_limit_s > 0:
        raise ConfigError("a time limit must be positive", got=f"{request.time_limit_s} s")
    if num_prompt + request.max_new_tokens > max_len:
        raise ConfigError(
            f"prompt and completion of ordinal {request.ordinal} do not fit into a slot",
            got=f"{num_prompt} prompt tokens + {request.max_new_tokens} new tokens",
            allowed=f"{max_len} tokens",
            hint="raise the engine's max_len, lower max_new_tokens or drop long prompts",
        )
    if request.resume is not None:
        _check_resume(request, request.resume)


def _check_resume(request: Request, resume: Resume) -> None:
    num_tokens = len(resume.tokens)
    if num_tokens >= request.max_new_tokens:
        what = f"ordinal {request.ordinal} sample {request.sample} is already complete"
        raise ConfigError(what, got=f"{num_tokens} tokens of at most {request.max_new_tokens}")
    starts = [span.start for span in resume.version_spans]
    num_kept = 0 if resume.kept is None else len(resume.kept.counts)
    if (
        len(resume.logprobs) != num_tokens
        or (num_tokens > 0 and starts[:1] != [0])
        or any(start >= num_tokens for start in starts)
        or starts != sorted(set(starts))
        or num_kept != (num_tokens if request.keep_sets else 0)
    ):
        raise ConfigError(
            f"what ordinal {request.ordinal} sample {request.sample} is to be resumed after does not fit together",
            got=f"{num_tokens} tokens, {len(resume.logprobs)} logprobs, versions from {starts}, {num_kept} kept sets",
            allowed="a logprob and a version for each token, and a kept set exactly with keep_sets",
        )


def extended_spans(spans: list[VersionSpan], *, start: int, version: int) -> list[VersionSpan]:
    """`spans` with tokens from `start` on sampled by `version`; a span that got no token is replaced."""
    kept = [span for span in spans if span.start < start]
    if kept and kept[-1].version == version:
        return kept
    return [*kept, VersionSpan(start=start, version=version)]
