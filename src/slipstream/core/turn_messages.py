"""The messages between generators and environments: turns that were sampled, and what comes behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.core.types import EpisodeRecord, FinishReason, Message, Prompt, Segment
from slipstream.core.unfinished_messages import PartialEpisode


class TurnSampled(Message, frozen=True):
    """Generator -> environments: turn `turn` of an episode was sampled, or, with turn 0, an episode is to begin.

    The opening brings the prompt. If `may_continue`, an episode that was begun on a replica that is lost goes on from
    there, or from `partial`, which a checkpoint held; its number is `opening`. `is_again`: it was begun before, by
    whomever. `segment` are the tokens of the turn; `finish_reason` says whether they end with a stop token. `life` is
    that of the observation which they follow, and so is `branch`.
    """

    ordinal: int
    sample: int
    replica: int
    turn: int
    eval_id: int = -1
    life: int = 0
    prompt: Prompt | None = None
    may_continue: bool = False
    is_again: bool = False
    partial: PartialEpisode | None = None
    segment: Segment | None = None
    finish_reason: FinishReason | None = None
    branch: int = 0
    opening: int = 0


class Observation(Message, frozen=True):
    """Environments -> generator: what comes behind turn `turn` of an episode; 0: behind its prompt.

    `tokens` are given; then the policy samples a turn of at most `max_new_tokens`. Where `record` is there the episode
    is over, and nothing is sampled any more. `replaces`: what the generator has of this episode is void; it is now
    `segments`, those of another replica or none, and `tokens` behind them. Each time it has another `life`: turns and
    observations of an earlier one, which may still be on their way, are void too, as are those that follow another
    `opening` than the generator's last one. With it comes the `prompt` of an episode whose environment speaks first: it
    ends with what was said.
    An agent's episode may have several branches, contexts of their own; all this is said of `branch` alone, and turns
    are counted in it. A branch begins with an observation that `replaces`, in the same life. With a record that
    `is_whole` the `segments` are those of all branches, and hold in the place of what the generator knows. Where it
    `replaces`, `versions` are those that have sampled the episode so far, in all branches. `finish_reason` is that of
    the episode's last turn.
    """

    ordinal: int
    sample: int
    replica: int
    turn: int
    tokens: np.ndarray  # int32 [T]
    eval_id: int = -1
    life: int = 0
    max_new_tokens: int = 0
    replaces: bool = False
    prompt: Prompt | None = None
    segments: tuple[Segment, ...] = ()
    record: EpisodeRecord | None = None
    branch: int = 0
    opening: int = 0
    is_whole: bool = False
    versions: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"


def with_branches(first: Sequence[Segment], others: Sequence[tuple[Prompt, Sequence[Segment]]]) -> list[Segment]:
    """Return the segments of an episode: those behind its prompt, then each further branch from its beginning on.

    A first branch without segments has an empty one, as no episode begins with a fork.
    """
    forks = [one for prompt, own in others for one in (Segment(tokens=prompt.tokens, begins=True), *own)]
    nothing = Segment(tokens=np.zeros(0, dtype=np.int32))
    return [*(first or ([nothing] if forks else [])), *forks]
