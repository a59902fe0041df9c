"""The writers of `events.jsonl` and `rollouts.jsonl`; `core/run_log.py` has the lines and reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from slipstream.core.clock import Clock
from slipstream.core.jsonl import JsonlWriter, finite, read_jsonl
from slipstream.core.run_log import (
    Command,
    Decision,
    DecisionHead,
    EpisodeLine,
    Event,
    Outcome,
    RolloutLine,
    ScheduleBegan,
)
from slipstream.core.types import Completion, EpisodeRecord, Rollout

_LAST_BYTES = 1 << 20


class EventRecorder(JsonlWriter):
    """Append one line per event, in the order of decisions, at a `flush`. `seq` counts from 0, over resumes too.

    `num_events` is how many there were before, by the checkpoint that the run goes on from: where lines of them have
    been lost, numbers are skipped.
    """

    def __init__(self, path: Path, clock: Clock, *, num_events: int = 0) -> None:
        super().__init__(path, in_blocks=True)
        self._now_s = clock.now_s
        last = read_jsonl(path, DecisionHead, offset=-_LAST_BYTES)  # they ascend
        self._seq = max([num_events, *(line.seq + 1 for line in last)])

    @property
    def num_events(self) -> int:
        """Return how many events were recorded, over resumes too, whether or not their lines are still there."""
        return self._seq

    def record(
        self, event: Event | ScheduleBegan, commands: Sequence[Command], *, error: str | None = None
    ) -> Decision:
        """Write a decision, or the `error` that was raised instead, and return it as written."""
        decision = Decision(self._seq, self._now_s(), event, list(commands), error)
        self.write(decision)
        self._seq += 1
        return decision


class RolloutRecorder(JsonlWriter):
    """Append every rollout of every `every`-th group (by ordinal), once the group's fate is known."""

    def __init__(self, path: Path, *, every: int = 1) -> None:
        super().__init__(path)
        self._every = every

    def record(self, lines: Iterable[RolloutLine], *, step: int | None) -> None:
        """Write the lines of whole groups, in any order, with their fate: `step` trained them, or they were dropped."""
        ordered = sorted(lines, key=lambda line: (line.ordinal, line.sample))
        failed = {line.ordinal for line in ordered if line.failure is not None}
        fates: dict[bool, Outcome] = {True: "failed", False: "skipped"}
        self.write(
            *(
                msgspec.structs.replace(
                    line, step=step, outcome=fates[line.ordinal in failed] if step is None else "trained"
                )
                for line in ordered
                if line.ordinal % self._every == 0
            )
        )


def rollout_line(rollout: Rollout) -> RolloutLine:
    """Return the line of `rollout` before its fate is known; `RolloutRecorder.record` fills in `step`, `outcome`."""
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
        logged=rollout.logged,
        extra=rollout.extra,
        finish_reason=completion.finish_reason,
        num_tokens=completion.num_tokens,
        versions=version_runs(completion),
        mean_behaviour_logprob=mean_behaviour_logprob(completion),
        replica=completion.replica,
        started_s=completion.started_s,
        finished_s=completion.finished_s,
        scored_s=rollout.scored_s,
        episode=None if completion.episode is None else _episode_line(completion, completion.episode),
    )


def _episode_line(completion: Completion, record: EpisodeRecord) -> EpisodeLine:
    return EpisodeLine(
        messages=record.messages,
        turns=sum(segment.is_sampled for segment in completion.segments),
        turn_rewards=finite(record.turn_rewards),
        environment_s=record.environment_s,
        tool_calls=record.num_tool_calls,
        tool_errors=record.num_tool_errors,
        restarts=record.num_restarts,
        is_cut=record.is_cut,
        branches=record.branches,
        contexts=record.contexts,
    )


def version_runs(completion: Completion) -> list[tuple[int, int]]:
    """Return [(first token, version), ...] over the whole completion; consecutive runs of one version are joined."""
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
    """Return the mean over sampled tokens, in nats; None for a completion without any (or with a non-finite one)."""
    logprobs = [s.behaviour_logprobs for s in completion.segments if s.behaviour_logprobs is not None]
    if not sum(map(len, logprobs)):
        return None
    mean: float | None = finite(float(np.concatenate(logprobs).mean(dtype=np.float64)))
    return mean
