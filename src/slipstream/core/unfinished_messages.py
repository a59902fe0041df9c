"""Unfinished work at a checkpoint: completions and episodes that go on after a resume (`core/saved.py`)."""

from __future__ import annotations

from slipstream.core.types import EpisodeRecord, FinishReason, Message, Prompt, Segment


class Partial(Message, frozen=True):
    """The unfinished completion `sample` of group `ordinal` at a checkpoint: T >= 1 sampled tokens.

    `prompt_crc32` is that of the prompt's tokens, as bytes: what was sampled after another prompt is of no use.
    `finish_reason` is there where the completion had ended. `handed_over_by`, where it had not: the replica that left.
    """

    ordinal: int
    sample: int
    prompt_crc32: int
    segment: Segment
    finish_reason: FinishReason | None = None
    handed_over_by: int = -1

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(span.version for span in self.segment.version_spans)


class PartialEpisode(Message, frozen=True):
    """The episode `sample` of group `ordinal` at a checkpoint: one turn or more, and what is known of it.

    `segments` are those behind the prompt, and behind `prompt` where the environment has spoken first; what was given
    last may be one of them. `prompt_crc32` is that of the row's tokens, as in `Partial`. `state` is the environment's
    own, as JSON, at its last answer; a turn that has no reward in the `record` is still to be answered. Without a
    `state` the episode is over, and waited for its verdict.
    """

    ordinal: int
    sample: int
    prompt_crc32: int
    segments: tuple[Segment, ...]
    record: EpisodeRecord
    prompt: Prompt | None = None
    state: str | None = None
    charges: int = 0
    finish_reason: FinishReason = "stop"

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(span.version for segment in self.segments for span in segment.version_spans)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens behind the prompt."""
        return sum(len(segment.tokens) for segment in self.segments)


Unfinished = Partial | PartialEpisode


class HandedOver(Message, frozen=True):
    """The work on group `ordinal` of a replica that leaves: another one goes on with it (`Admit.partials`)."""

    ordinal: int
    partials: tuple[Unfinished, ...]
