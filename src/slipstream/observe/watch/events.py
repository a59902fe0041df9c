"""An index over `events.jsonl`: the state of the loop now and at any time before, without keeping all that happened."""

from __future__ import annotations

import bisect
from array import array
from collections import deque
from dataclasses import dataclass

import msgspec

from slipstream.core.run_log import PHASES, Decision, LoopState, Move, ScheduleBegan, decode_decision
from slipstream.core.types import StepDone, TrainStep
from slipstream.observe.watch.buckets import Buckets
from slipstream.observe.watch.tail import LineIndex

FIRST_SPACING = 512  # lines between two marks, as long as there are few
MAX_MARKS = 512
MAX_RECENT = 32  # marks `FIRST_SPACING` apart at the end of the file, where a live page asks
MAX_MARK_BYTES = 32_000_000
MAX_COUNTS = 300
MAX_REPLAYED_LINES = 40_000
"""Of `events.jsonl`, within one passage."""


@dataclass
class AttemptStretch:
    """One attempt's part of the run's time: `raw_s` of the machine's clock is `start_s` of the run's.

    The run's time begins with its first event. An attempt that was resumed follows the last event that is left of the
    one before: what was abandoned, and the time in between, are no time of the run.
    """

    raw_s: float
    start_s: float
    end_s: float

    def run_s(self, raw_s: float) -> float:
        return raw_s - self.raw_s + self.start_s


class SwapAt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """From `time_s` on `replica` samples from `version`, or from none (-1): it was lost, or the run begins again."""

    time_s: float
    replica: int
    version: int


class _Mark(msgspec.Struct, frozen=True):
    """The loop as it was when the line at `offset` was next."""

    offset: int
    time_s: float
    stretch: int
    loop: bytes


@dataclass
class Passage:
    """The loop at a moment, and its moves until `end_s`, in order, as far as they were read.

    `counts` are [time, how many groups are in each phase], at up to about `MAX_COUNTS` times.
    """

    end_s: float
    loop: LoopState
    moves: list[Move]
    swaps: list[SwapAt]
    steps: list[tuple[float, int]]  # when the trainer came to which version
    counts: list[list[float]]


class EventIndex(LineIndex[Decision]):
    """`loop` is the present state, `stretches` the run's time, `step_starts`, `step_ends` when each step was trained.

    Marks of the state lie so far apart that there are at most `MAX_MARKS`, of `MAX_MARK_BYTES` together, and
    `MAX_RECENT` more at the end; an answer is folded from the last one before it. `phases` are group-seconds in each
    phase: divided by a bucket's width, how many groups were in it on average.
    """

    kind = Decision

    def decode(self, line: bytes) -> Decision:
        return decode_decision(line)

    def reset(self) -> None:
        self.loop = LoopState()
        self.stretches: list[AttemptStretch] = []
        self.step_starts, self.step_ends = array("d"), array("d")
        self.first_s: float | None = None  # when the first group was admitted, or trained
        self.phases = Buckets(width=0.25)
        self._phases_s = 0.0  # up to where `phases` is counted
        self._group_seconds = dict.fromkeys(PHASES, 0.0)  # since then
        self._last_s = 0.0
        self._num_lines = 0
        self._spacing = FIRST_SPACING
        self._marks: list[_Mark] = []
        self._recent: deque[_Mark] = deque(maxlen=MAX_RECENT)

    @property
    def end_s(self) -> float:
        """Time of the last event."""
        return self.stretches[-1].end_s if self.stretches else 0.0

    def take(self, record: Decision) -> None:
        if self._num_lines % FIRST_SPACING == 0:
            self._mark(self.begin)
        self._num_lines += 1
        time_s = self._time_of(record)
        self._count_phases(time_s)
        self.loop.take(record, time_s)
        self._count_steps(record, time_s)

    def _time_of(self, decision: Decision) -> float:
        if isinstance(decision.event, ScheduleBegan) or not self.stretches:
            self.stretches.append(AttemptStretch(decision.time_s, self.end_s, self.end_s))
        stretch = self.stretches[-1]
        stretch.end_s = max(stretch.end_s, stretch.run_s(decision.time_s))
        return stretch.end_s

    def _count_phases(self, time_s: float) -> None:
        """Add the time since the event before to the phases of the groups."""
        waited_s, self._last_s = time_s - self._last_s, time_s
        for phase, count in self.loop.counts.items():
            self._group_seconds[phase] += count * waited_s
        if time_s - self._phases_s >= self.phases.width / 4:
            for phase, amount in self._group_seconds.items():
                self.phases.add(phase, self._phases_s, time_s, amount)
                self._group_seconds[phase] = 0.0
            self._phases_s = time_s

    def _count_steps(self, decision: Decision, time_s: float) -> None:
        if decision.commands and self.first_s is None:
            self.first_s = time_s
        for command in decision.commands:
            if isinstance(command, TrainStep):
                _put_at(self.step_starts, command.step, time_s)
        if isinstance(decision.event, StepDone):
            _put_at(self.step_ends, decision.event.step, time_s)

    def _mark(self, offset: int) -> None:
        mark = _Mark(offset, self.end_s, len(self.stretches), msgspec.msgpack.encode(self.loop))
        self._recent.append(mark)
        if self._num_lines % self._spacing:
            return
        self._marks.append(mark)
        if len(self._marks) > MAX_MARKS or sum(len(mark.loop) for mark in self._marks) > MAX_MARK_BYTES:
            self._marks = self._marks[::2]
            self._spacing *= 2

    def passage(self, start_s: float, end_s: float) -> Passage:
        """Return the passage from `start_s` to `end_s`; a shorter one where more than `MAX_REPLAYED_LINES` tell of it.

        All events until `end_s` are to be known.
        """
        base = LoopState()
        found = Passage(end_s, base, [], [], [], [])
        if not self._marks:
            return found
        before = (one for one in (*self._marks, *self._recent) if one.time_s <= start_s)
        mark = max(before, key=lambda one: one.offset, default=self._marks[0])
        loop = base = _decoded(mark.loop)
        stretch, last_s, apart_s = mark.stretch, mark.time_s, (end_s - start_s) / MAX_COUNTS
        num_told = 0
        for decision in self.lines_within(mark.offset, self.tail.offset):
            stretch += isinstance(decision.event, ScheduleBegan)
            time_s = max(last_s, self.stretches[stretch - 1].run_s(decision.time_s))
            if time_s > found.end_s:
                break
            last_s = time_s
            if time_s > start_s and loop is base:
                loop = _decoded(msgspec.msgpack.encode(base))
                found.counts.append([start_s, *base.counts.values()])
            held = dict(loop.versions)
            moves = loop.take(decision, time_s)
            if time_s > start_s:
                num_told += 1
                if num_told == MAX_REPLAYED_LINES:
                    found.end_s = time_s  # what else happened at this time is still told
                found.moves += moves
                if time_s - found.counts[-1][0] >= apart_s:
                    found.counts.append([time_s])
                found.counts[-1][1:] = loop.counts.values()
                changed = {**dict.fromkeys(held, -1), **loop.versions}
                found.swaps += [SwapAt(time_s, r, version) for r, version in changed.items() if held.get(r) != version]
                if isinstance(decision.event, StepDone):
                    found.steps.append((time_s, decision.event.version))
        found.loop = base
        return found

    def step_at(self, time_s: float) -> int:
        """Return the last step that had begun by `time_s`; -1 before the first."""
        return bisect.bisect_right(self.step_starts, time_s) - 1


def _decoded(loop: bytes) -> LoopState:
    return msgspec.msgpack.decode(loop, type=LoopState)


def _put_at(column: array[float], index: int, value: float) -> None:
    """`column[index] = value`, with the last value where there is a hole; after a resume a step may come again."""
    del column[index + 1 :]
    while len(column) < index:
        column.append(column[-1] if column else value)
    column[index:] = array("d", [value])
