"""The ids of one episode: what was sampled and what was given, in order. Pure data, no processes, no text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from slipstream.core.errors import ShapeError
from slipstream.core.types import Completion, FinishReason, Prompt, Purpose, Segment, VersionSpan


class Transcript:
    """The prompt, and behind it segments that are in turn sampled and given.

    Identity: `context` is the prompt's ids and all that was added, in order and bit for bit.
    """

    def __init__(self, prompt_tokens: np.ndarray) -> None:
        self._prompt = _row(prompt_tokens)
        self._segments: list[Segment] = []
        self._finish_reasons: list[FinishReason] = []

    def add_sampled(self, segment: Segment, finish_reason: FinishReason) -> None:
        """Append a turn of at least one token. ShapeError for one that cannot be, or of an older version than before.

        Turns with nothing between them become one segment.
        """
        _check_turn(segment, oldest=max(self.max_version, 0))
        if self._segments and self._segments[-1].is_sampled:
            self._segments[-1] = _joined(self._segments[-1], segment)
        else:
            self._segments.append(segment)
        self._finish_reasons.append(finish_reason)

    def add_given(self, tokens: np.ndarray) -> None:
        """Append given ids, int [T]; they become one segment with given ones before them."""
        tokens = _row(tokens)
        if not len(tokens):
            return
        if self._segments and not self._segments[-1].is_sampled:
            tokens = np.concatenate([self._segments.pop().tokens, tokens])
        self._segments.append(Segment(tokens=tokens))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def context(self) -> np.ndarray:
        """All ids, int32 [Tp + T]: what the policy reads before the next turn."""
        return np.concatenate([self._prompt, *(segment.tokens for segment in self._segments)])

    @property
    def num_before(self) -> int:
        """The number of ids behind the prompt: the position in the completion of the next one."""
        return sum(len(segment.tokens) for segment in self._segments)

    @property
    def num_sampled(self) -> int:
        return sum(len(segment.tokens) for segment in self._segments if segment.is_sampled)

    @property
    def num_turns(self) -> int:
        return len(self._finish_reasons)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The end of the last turn; None before the first."""
        return self._finish_reasons[-1] if self._finish_reasons else None

    @property
    def min_version(self) -> int:
        """The oldest version that sampled a token; -1 where none is sampled."""
        return min(self._versions(), default=-1)

    @property
    def max_version(self) -> int:
        """The newest version that sampled a token; -1 where none is sampled."""
        return max(self._versions(), default=-1)

    def room(self, *, max_turns: int, max_episode_tokens: int, max_len: int) -> int:
        """Return how many tokens the next turn may have; 0 ends the episode.

        `max_episode_tokens` counts what is sampled and given behind the prompt, `max_len` the prompt with it.
        """
        if self.num_turns >= max_turns:
            return 0
        num_before = self.num_before
        return max(0, min(max_episode_tokens - num_before, max_len - len(self._prompt) - num_before))

    def as_completion(
        self,
        prompt: Prompt,
        *,
        ordinal: int,
        sample: int,
        text: str,
        finish_reason: FinishReason | None = None,
        replica: int = 0,
        purpose: Purpose = "train",
        eval_id: int = -1,
        started_s: float = 0.0,
        finished_s: float = 0.0,
    ) -> Completion:
        """Return the episode as a completion of `prompt`, whose tokens are the transcript's; it ends as its last turn.

        Given ids behind the last turn are left out: nothing was sampled after them. ShapeError where no turn is there,
        or the prompt is another one.
        """
        last = self.finish_reason
        if last is None:
            raise ShapeError("an episode without a turn is no completion")
        if not np.array_equal(prompt.tokens, self._prompt):
            raise ShapeError("the prompt is not the one of this transcript", got=prompt.prompt_id)
        return Completion(
            ordinal=ordinal,
            sample=sample,
            prompt=prompt,
            segments=self.segments if self._segments[-1].is_sampled else self.segments[:-1],
            text=text,
            finish_reason=finish_reason or last,
            replica=replica,
            purpose=purpose,
            eval_id=eval_id,
            started_s=started_s,
            finished_s=finished_s,
        )

    def _versions(self) -> Sequence[int]:
        return [span.version for segment in self._segments for span in segment.version_spans]


def cut_observation(tokens: np.ndarray, room: int) -> np.ndarray | None:
    """Return `tokens`, or None where they leave no token of `room` for the next turn: the episode ends without them.

    `room` is the transcript's before they are added.
    """
    return tokens if len(tokens) < room else None


def _row(tokens: np.ndarray) -> np.ndarray:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ShapeError("ids are a row of integers", got=f"shape {list(tokens.shape)}, {tokens.dtype}")
    return tokens.astype(np.int32)


def _check_turn(segment: Segment, *, oldest: int) -> None:
    logprobs, spans, length = segment.behaviour_logprobs, segment.version_spans, len(_row(segment.tokens))
    if logprobs is None or logprobs.shape != (length,) or not length:
        raise ShapeError(
            "a turn needs tokens and one behaviour logprob for each",
            got=f"{length} tokens, logprobs {'none' if logprobs is None else list(logprobs.shape)}",
        )
    starts, versions = [span.start for span in spans], [oldest, *(span.version for span in spans)]
    is_ordered = all(a < b for a, b in itertools.pairwise(starts)) and versions == sorted(versions)
    if not starts or starts[0] != 0 or starts[-1] >= length or not is_ordered:
        raise ShapeError(
            "a turn's versions begin with its first token and never fall",
            got=f"versions {versions[1:]} from tokens {starts} of {length}",
            allowed=f"versions from {oldest} on",
        )


def _joined(first: Segment, second: Segment) -> Segment:
    """Return two sampled segments as one. ShapeError where only one has kept sets."""
    if (first.kept_counts is None) != (second.kept_counts is None):
        raise ShapeError("kept sets in one of two turns that follow each other")
    assert first.behaviour_logprobs is not None, "only sampled segments are joined"
    assert second.behaviour_logprobs is not None, "only sampled segments are joined"
    newest = first.version_spans[-1].version
    spans = [
        VersionSpan(start=len(first.tokens) + span.start, version=span.version)
        for span in second.version_spans
        if span.version != newest
    ]
    return Segment(
        tokens=np.concatenate([first.tokens, second.tokens]),
        behaviour_logprobs=np.concatenate([first.behaviour_logprobs, second.behaviour_logprobs]),
        version_spans=(*first.version_spans, *spans),
        kept_tokens=_behind(first.kept_tokens, second.kept_tokens),
        kept_counts=_behind(first.kept_counts, second.kept_counts),
    )


def _behind(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray | None:
    return None if first is None or second is None else np.concatenate([first, second])
