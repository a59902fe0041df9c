"""One tree for everything that can go wrong; each error says what, got, allowed and a hint.

SlipstreamError
  ConfigError          the user's input is wrong (exit code 2, nothing was started)
  ShapeError           tensors do not fit together
  MissingInputError    a loss needs something that its batch does not carry
    MissingLogprobsError  log-probabilities of an anchor
  ScheduleError        the schedule was told what cannot have happened: a bug, or a log that was edited
  StalenessError       the staleness bound was broken: a bug in the schedule, never the user's
  ChannelError
    ChannelTimeout     a wait on a channel passed its deadline
    ChannelClosed      the other side is gone
  WeightSyncError      a version could not be staged, verified or committed
    NotReproducedError   its weights are here, and compute other logprobs than the trainer's
  ExecutorDied         a process of the run reported an error, or was lost more often than `max_restarts` allows
    ExecutorLost         a process was lost without which this attempt cannot go on; the next one may succeed
  RankError            ranks that run one model together lost each other, or no longer do the same
  RunIsOver            a group that would join a run finds that it is done: nothing is wrong
  AlarmError           an alarm rang that `health.stop_on` names
  NonFiniteError       NaN or inf in a loss or gradient; weights were not changed
  CheckpointError      a checkpoint is missing, torn or of another model
  DiskError            a file of the run could not be written: the disk is full, read-only, broken
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

_MAX_SHOWN = 210  # characters of the beginning and of the end of a part


class SlipstreamError(Exception):
    """Base of the tree. `what` is one sentence; the rest is optional and rendered on lines of its own."""

    def __init__(self, what: str, *, got: object = None, allowed: object = None, hint: str | None = None) -> None:
        self.what, self.got, self.allowed, self.hint = what, got, allowed, hint
        lines = [_in_part(what)]
        if got is not None:
            lines.append(f"  got:     {_in_part(str(got))}")
        if allowed is not None:
            lines.append(f"  allowed: {_in_part(str(allowed))}")
        if hint is not None:
            lines.append(f"  hint:    {_in_part(hint)}")
        super().__init__("\n".join(lines))

    @classmethod
    def unknown(
        cls, what: str, word: str, known: Iterable[str], *, got: object = None, none: str = "", hint: str | None = None
    ) -> Self:
        """Return the error of a `word` that is none of `known` (`none`: there are none), with the nearest as a hint."""
        names = list(known)
        return cls(what, got=got, allowed=", ".join(names) or none, hint=did_you_mean(word, names) or hint)


def reason(error: BaseException) -> str:
    """Return `error` in a line of at most a screen's width or two, without what was allowed and the hint."""
    if not isinstance(error, SlipstreamError):
        return clip(f"{type(error).__name__}: {error}")
    return clip(error.what if error.got is None else f"{error.what} ({error.got})")


class ConfigError(SlipstreamError, ValueError):
    """The user's configuration or input is wrong."""


class ShapeError(SlipstreamError, ValueError):
    """Tensors do not fit together."""


class MissingInputError(SlipstreamError, ValueError):
    """A loss needs an input that the batch does not carry."""


class MissingLogprobsError(MissingInputError):
    """A loss needs log-probabilities that the batch does not carry."""


class ScheduleError(SlipstreamError):
    """The schedule was told of an event that cannot have happened."""


class StalenessError(SlipstreamError):
    """A batch broke the staleness bound at consumption."""


class ChannelError(SlipstreamError):
    """A channel cannot do what was asked."""


class ChannelTimeout(ChannelError, TimeoutError):
    """A wait on a channel passed its deadline; the message names the channel and the other side."""


class ChannelClosed(ChannelError):
    """The other side of the channel is gone."""


class WeightSyncError(SlipstreamError):
    """A policy version could not be staged, verified or committed; the old version keeps running."""


class NotReproducedError(WeightSyncError):
    """A replica computes other logprobs than the trainer with a version that arrived undamaged."""


class ExecutorDied(SlipstreamError):
    """A process of the run reported an error, or was lost more often than `max_restarts` allows."""


class ExecutorLost(ExecutorDied):
    """A process was killed, ended without a word or fell silent, and this attempt cannot go on without it.

    No error of its own: the run may go on from its last checkpoint. `executor` is the name of the group that lost it.
    """

    def __init__(
        self, what: str, *, executor: str, got: object = None, allowed: object = None, hint: str | None = None
    ) -> None:
        super().__init__(what, got=got, allowed=allowed, hint=hint)
        self.executor = executor


class RankError(SlipstreamError):
    """Ranks that run one model together lost one of them, or no longer do the same."""


class RunIsOver(SlipstreamError):
    """A group would join a run that is done: it has nothing to do."""


class AlarmError(SlipstreamError):
    """An alarm began that is to end the run (`health.stop_on`)."""


class NonFiniteError(SlipstreamError, ArithmeticError):
    """NaN or inf in a loss or gradient; weights were not changed. `report` (JSON types) says more than fits a line."""

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        allowed: object = None,
        hint: str | None = None,
        report: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(what, got=got, allowed=allowed, hint=hint)
        self.report: dict[str, Any] = dict(report or {})


class CheckpointError(SlipstreamError):
    """A checkpoint is missing, torn or belongs to another model."""


class DiskError(SlipstreamError):
    """A file of the run could not be written; what it held before is still there."""


def _in_part(text: str) -> str:
    """Return `text`, or its beginning and end: an error may quote a value of megabytes, and has one screen."""
    if len(text) <= 2 * _MAX_SHOWN:
        return text
    return f"{text[:_MAX_SHOWN]} ... ({len(text):,} characters) ... {text[-_MAX_SHOWN:]}"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return `did you mean 'max_staleness'?` for the nearest of `known`, or None when nothing is near.

    Names of models have a size (`-7b`): one of the same size is nearer than any other.
    """
    names = [name for name in known if len(word) < 3 * len(name)]  # no other is near; difflib would read megabytes
    size = re.search(r"(?<![\d.])[\d.]+b$", word)
    alike = [name for name in names if size and re.search(rf"(?<![\d.]){re.escape(size[0])}$", name)]
    near = (difflib.get_close_matches(word, some, n=1, cutoff=0.6) for some in (alike, names) if some)
    close = next(filter(None, near), None)
    return f"did you mean '{close[0]}'?" if close else None


def clip(value: object, length: int = 200) -> str:
    """Return `value` as one line of at most `length` characters: what a foreign file holds need not fit a screen."""
    text = " ".join(str(value)[: 4 * length].split())
    return text if len(text) <= length else f"{text[:length]}..."
