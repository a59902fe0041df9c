"""`tokens.jsonl`: what single tokens of some trained groups were worth, for people to read.

It is written for the watch page alone and never read by a run: where the disk refuses, it ends, and the run goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.core.errors import DiskError
from slipstream.core.jsonl import JsonlWriter, cut_jsonl, read_jsonl
from slipstream.core.types import Completion, Segment
from slipstream.observe.recorder import version_runs

TOKENS_FILE = "tokens.jsonl"
MAX_TOKENS = 4096
"""Tokens written of one completion: its first ones."""

Texts = Callable[[Sequence[int]], list[str]]
"""Token ids -> the text that each adds."""

log = logging.getLogger(__name__)


class TokenLine(msgspec.Struct, frozen=True, kw_only=True):
    """The first `MAX_TOKENS` of the `num_tokens` of a completion, one entry each, as step `step` trained on them.

    Logprobs are in nats. `policy_logprobs` are those of the policy that was updated, at the first update with this
    completion; they and `advantages` are null on tokens that were not trained on, `behaviour_logprobs` on given tokens.
    `versions` are runs: [[first token, version], ...], -1 for given tokens. `turns` are the first tokens of an
    episode's turns, `branches` those of its branches behind the trunk; both are empty without an environment. The rest
    of the rollout has its line in `rollouts.jsonl`.
    """

    ordinal: int
    sample: int
    step: int
    num_tokens: int
    tokens: list[int]
    texts: list[str]
    versions: list[tuple[int, int]]
    behaviour_logprobs: list[float | None]
    policy_logprobs: list[float | None]
    advantages: list[float | None]
    turns: list[int] = []
    branches: list[int] = []


def token_line(
    completion: Completion, trained: tuple[np.ndarray, np.ndarray] | None, *, step: int, texts: Texts
) -> TokenLine:
    """`trained`: policy logprobs and advantages of the sampled tokens, in their order; None where none was trained."""
    tokens = completion.tokens[:MAX_TOKENS].tolist()
    is_sampled = np.concatenate([np.full(len(s.tokens), s.is_sampled) for s in completion.segments])
    behaviour = [s.behaviour_logprobs for s in completion.segments if s.behaviour_logprobs is not None]
    nothing = np.full(np.count_nonzero(is_sampled), np.nan, dtype=np.float32)
    policy, advantages = (nothing, nothing) if trained is None else trained

    def column(values: np.ndarray) -> list[float | None]:
        whole = np.full(len(is_sampled), np.nan)
        whole[is_sampled] = values
        return [value if np.isfinite(value) else None for value in whole[:MAX_TOKENS].round(4).tolist()]

    return TokenLine(
        ordinal=completion.ordinal,
        sample=completion.sample,
        step=step,
        num_tokens=completion.num_tokens,
        tokens=tokens,
        texts=texts(tokens),
        versions=[(first, version) for first, version in version_runs(completion) if first < MAX_TOKENS],
        behaviour_logprobs=column(np.concatenate([*behaviour, nothing[:0]])),
        policy_logprobs=column(policy),
        advantages=column(advantages),
        turns=[] if completion.episode is None else _starts(completion, lambda segment: segment.is_sampled),
        branches=_starts(completion, lambda segment: segment.begins),
    )


def _starts(completion: Completion, is_meant: Callable[[Segment], bool]) -> list[int]:
    """Return the first tokens of the segments that are meant."""
    ends = np.cumsum([len(segment.tokens) for segment in completion.segments]).tolist()
    starts = [start for start, one in zip([0, *ends], completion.segments, strict=False) if is_meant(one)]
    return [start for start in starts if start < MAX_TOKENS]


class TokenHead(msgspec.Struct, frozen=True):
    """The group that a line of `tokens.jsonl` is about, for readers that need no more."""

    ordinal: int


class TokenRecorder:
    """Appends the lines of groups whose ordinal is a multiple of `every`.

    Once the file is larger than `max_bytes`, every second group in it is dropped, and from then on half as many are
    written: it holds groups of the whole run, evenly, however long that is.
    """

    def __init__(self, path: Path, *, every: int, max_bytes: int) -> None:
        self._path = path
        self.every = every
        self._max_bytes = max_bytes
        self._writer: JsonlWriter | None = JsonlWriter(path)
        self._go_on()

    def _go_on(self) -> None:
        """Write as few as before a resume: in a file of some size every second group is missing once it was thinned."""
        if self._path.stat().st_size > self._max_bytes // 4:
            ordinals = {line.ordinal for line in read_jsonl(self._path, TokenHead)} - {0}
            while ordinals and not any(ordinal % (2 * self.every) for ordinal in ordinals):
                self.every *= 2

    def record(self, lines: Sequence[TokenLine]) -> None:
        """Write the lines of whole groups, in any order, those of them that are due."""
        due = sorted((line for line in lines if line.ordinal % self.every == 0), key=lambda x: (x.ordinal, x.sample))
        if self._writer is None or not due:
            return
        try:
            self._writer.write(*due)
            while self._path.stat().st_size > self._max_bytes and self._thin():
                pass
        except (DiskError, FileNotFoundError) as error:
            log.warning("%s is not written any more: %s", self._path.name, error)
            self.close()

    def _thin(self) -> bool:
        """Drop every second group of the file; return whether it is smaller."""
        assert self._writer is not None
        self._writer.close()
        self.every *= 2
        before = self._path.stat().st_size
        cut_jsonl(self._path, TokenHead, lambda line: line.ordinal % self.every == 0)
        self._writer = JsonlWriter(self._path)
        return self._path.stat().st_size < before

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_tokens(path: Path) -> Iterator[TokenLine]:
    """The lines of `tokens.jsonl`, in training order, a torn last line left out."""
    kinds: Any = TokenLine
    yield from read_jsonl(path, kinds)
