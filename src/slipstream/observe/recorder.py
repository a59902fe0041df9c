"""`events.jsonl` (every scheduling decision, replayable) and `rollouts.jsonl` (what did the model say?)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from slipstream.core.clock import Clock
from slipstream.core.types import Completion, Group, Message, Rollout
from slipstream.observe.jsonl import JsonlWriter, finite, read_jsonl

Outcome = Literal["trained", "skipped", "failed"]


class EventLine(msgspec.Struct, frozen=True):
    """The schedule was given `event` and answered with `commands`, both as JSON with their `type`.

    The first line's event is `ScheduleBegan`, as is the first one after a resume: `controller/replay.py` replays the
    run from them. `error`: what ended the run instead of an answer.
    """

    seq: int
    time_s: float
    event: dict[str, Any]
    commands: list[dict[str, Any]]
    error: str | None = None


class _Numbered(msgspec.Struct, frozen=True):
    seq: int


class EventRecorder:
    """Appends one line per event, in the order of decisions. `seq` counts from 0, over resumes too.

    `num_events` is how many there were before, by the checkpoint that is gone on from: where lines of them have been
    lost, numbers are skipped.
    """

    def __init__(self, path: Path, clock: Clock, *, num_events: int = 0) -> None:
        self._writer = JsonlWriter(path)
        self._now_s = clock.now_s
        self._seq = max([num_events, *(line.seq + 1 for line in read_jsonl(path, _Numbered))])

    @property
    def num_events(self) -> int:
        """Events recorded, over resumes too, whether or not their lines are still there."""
        return self._seq

    def record(self, event: msgspec.Struct, commands: Iterable[Message], *, error: str | None = None) -> int:
        """Write one decision, or the `error` that was raised instead; returns its sequence number."""
        line = {"seq": self._seq, "time_s": self._now_s(), "event": event, "commands": list(commands)}
        self._writer.write(line if error is None else line | {"error": error})
        self._seq += 1
        return self._seq - 1

    def sync(self) -> None:
        """Return once every line is on the disk (a step's commit)."""
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def num_missing(path: Path) -> int:
    """Events of `events.jsonl` whose lines are gone, by the numbers that are left out before the last one."""
    next_seq = num_lines = 0
    for line in read_jsonl(path, _Numbered):
        next_seq, num_lines = max(next_seq, line.seq + 1), num_lines + 1
    return next_seq - num_lines


def read_events(path: Path) -> Iterator[EventLine]:
    """The decisions of `events.jsonl`, in order, a torn last line left out."""
    yield from read_jsonl(path, EventLine)


class RolloutLine(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as it was trained (`step`), or dropped (`step` is null and `outcome` says how).
    A group that was dropped is `failed` if any of its rollouts failed, else `skipped`.

    `versions` are runs over the completion's tokens: [[first token, version], ...], -1 for given tokens.
    `mean_behaviour_logprob` is over sampled tokens, in nats, null without any. Times are on the run's monotonic clock.
    """

    ordinal: int
    sample: int
    step: int | None
    outcome: Outcome
    prompt_id: str
    task: str
    prompt: str
    completion: str
    answer: str | None
    reward: float | None
    parts: dict[str, float | None]
    failure: str | None
    finish_reason: str
    num_tokens: int
    versions: list[tuple[int, int]]
    mean_behaviour_logprob: float | None
    replica: int
    started_s: float
    finished_s: float
    scored_s: float


class RolloutRecorder:
    """Appends every rollout of every `every`-th group (by ordinal), once the group's fate is known."""

    def __init__(self, path: Path, *, every: int = 1) -> None:
        self._writer = JsonlWriter(path)
        self._every = every

    def record_group(self, group: Group, *, step: int | None) -> None:
        """`step` trained on `group`; None when it was dropped."""
        self.record([rollout_line(rollout) for rollout in group.rollouts], step=step)

    def record(self, lines: Iterable[RolloutLine], *, step: int | None) -> None:
        """The lines of whole groups, in any order, with their fate: `step` trained on them, or they were dropped."""
        ordered = sorted(lines, key=lambda line: (line.ordinal, line.sample))
        failed = {line.ordinal for line in ordered if line.failure is not None}
        fates: dict[bool, Outcome] = {True: "failed", False: "skipped"}
        self._writer.write(
            *(
                msgspec.structs.replace(
                    line, step=step, outcome=fates[line.ordinal in failed] if step is None else "trained"
                )
                for line in ordered
                if line.ordinal % self._every == 0
            )
        )

    def sync(self) -> None:
        """Return once every line is on the disk (a checkpoint comes after what it was trained on)."""
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def rollout_line(rollout: Rollout) -> RolloutLine:
    """The line of `rollout`, as if it had been skipped: `RolloutRecorder.record` knows better."""
    completion = rollout.completion
    return RolloutLine(
        ordinal=completion.ordinal,
        sample=completion.sample,
        step=None,
        outcome="skipped",
        prompt_id=completion.prompt.prompt_id,
        task=completion.prompt.task,
        prompt=completion.prompt.text,
        completion=completion.text,
        answer=completion.prompt.answer,
        reward=finite(rollout.reward),
        parts=finite(rollout.reward_parts),
        failure=rollout.failure,
        finish_reason=completion.finish_reason,
        num_tokens=completion.num_tokens,
        versions=version_runs(completion),
        mean_behaviour_logprob=mean_behaviour_logprob(completion),
        replica=completion.replica,
        started_s=completion.started_s,
        finished_s=completion.finished_s,
        scored_s=rollout.scored_s,
    )


def read_rollouts(path: Path) -> Iterator[RolloutLine]:
    """The rollouts of `rollouts.jsonl`, in training order, a torn last line left out."""
    yield from read_jsonl(path, RolloutLine)


def version_runs(completion: Completion) -> list[tuple[int, int]]:
    """[(first token, version), ...] over the whole completion; consecutive runs of one version are joined."""
    runs: list[tuple[int, int]] = []
    first = 0
    for segment in completion.segments:
        spans = [(first + span.start, span.version) for span in segment.version_spans] or [(first, -1)]
        for start, version in spans:
            if not runs or runs[-1][1] != version:
                runs.append((start, version))
        first += len(segment.tokens)
    return runs


def mean_behaviour_logprob(completion: Completion) -> float | None:
    """Mean over sampled tokens, in nats; None for a completion without any (or with a non-finite one)."""
    logprobs = [s.behaviour_logprobs for s in completion.segments if s.behaviour_logprobs is not None]
    if not sum(map(len, logprobs)):
        return None
    mean: float | None = finite(float(np.concatenate(logprobs).mean(dtype=np.float64)))
    return mean
