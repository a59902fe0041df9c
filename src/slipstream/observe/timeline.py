"""Exclusive spans of one process, and their accounting.

At every moment a process is in the innermost open span's state, in its idle state, or `unlabelled`; before it was
there and after its end it is `absent`, and of one that was killed all after its last written line is `lost`. What is
stored are the resulting *slices*: flat, disjoint, ascending, in integer nanoseconds. Sums over slices are therefore
exact, and a killed process is accounted for by the file it left behind.

    timeline/<process>.jsonl   written while the run goes on, at most once a second

A line is a slice of one state, or of several that alternate within milliseconds, with the nanoseconds of each: a decode
loop of 1000 steps a second writes ten lines. As a file grows its lines get coarser, never its sums.

`observe.chrome_trace` draws them.
"""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from slipstream.core.background import background_cpu_s
from slipstream.core.clock import Clock
from slipstream.core.errors import DiskError
from slipstream.core.jsonl import JsonlWriter, read_jsonl
from slipstream.core.ranks import split_rank_name
from slipstream.observe.states import COMPUTES, UNLABELLED

ABSENT = "absent"
LOST = "lost"
TRAINED = "trained"  # the instant in a trainer's timeline at which it has trained `step`
TIME_PREFIX = "time/"  # of values in `Counters` that are seconds spent in a state (`Timeline.totals`)
FLUSH_EVERY_S = 1.0
MERGE_GAP_S = 1e-3  # slices closer than this become one line of the file, with other states that are as short ...
MERGE_LENGTH_S = 0.1  # ... as long as the line stays this short, so that pictures and windows keep their resolution
COARSER_AFTER = 50_000  # lines: from then on both are twice as long, and again after as many

Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**61), le=2**61)]
"""73 years: sums and differences of three fit in 64 bits. A file may have been written by anybody."""


class ProcessStart(msgspec.Struct, frozen=True, omit_defaults=True, tag="process", tag_field="kind"):
    """A process began to write here, again after it was started again: it computes with `threads` on `device`.

    `threads_alone`: so many while no other computes. `within`: the process that this one is only a part of, as an
    executor inside the controller's is (`host = "inline"`).
    `zero_ns`: the time of day (since 1970) at which its clock stood at zero, which tells the clocks of two boots apart.
    """

    process: str
    pid: int
    time_ns: Nanoseconds
    threads: int = 1
    threads_alone: int = 1
    device: str = "cpu"
    within: str = ""
    zero_ns: Nanoseconds = 0


class CpuSoFar(msgspec.Struct, frozen=True, omit_defaults=True, tag="cpu", tag_field="kind"):
    """The CPU seconds of a process from its `ProcessStart` to `time_ns`, up to which all slices are written.

    `cpu_ns` of all its threads; of these `main_ns` of the one that this timeline is of, and `background_ns` of those
    beside it that are no part of a team (`core/background.py`). For `kept_ns` that one could have run and had no core,
    because others had them: seconds that its states have, and that say nothing about its work. `model_ns` are those of
    all threads in states that compute the model.
    """

    time_ns: Nanoseconds
    cpu_ns: Nanoseconds = 0
    main_ns: Nanoseconds = 0
    background_ns: Nanoseconds = 0
    kept_ns: Nanoseconds = 0
    model_ns: Nanoseconds = 0


class ProcessEnd(CpuSoFar, frozen=True, omit_defaults=True, tag="end", tag_field="kind"):
    """The last record of a process, which one that was killed lacks."""


class Slice(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="slice", tag_field="kind"):
    """The process was in `state` from `start_ns` to `end_ns`, except for what other states took in between.

    These are `also` (state -> nanoseconds, each time too short for a line of its own) and `gap_ns`, which is
    unlabelled. `count` pieces of work with `units` were done in `state`: decode steps and their tokens, microbatches
    and theirs.
    """

    state: str
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    gap_ns: Nanoseconds = 0
    args: dict[str, Any] = {}
    also: dict[str, Nanoseconds] = {}
    count: int = 0
    units: int = 0

    @property
    def state_ns(self) -> int:
        """Nanoseconds in `state` itself."""
        return self.end_ns - self.start_ns - self.gap_ns - sum(self.also.values())


class Instant(msgspec.Struct, frozen=True, omit_defaults=True, tag="instant", tag_field="kind"):
    """An event without a length: a swap, a publish."""

    name: str
    time_ns: Nanoseconds
    args: dict[str, Any] = {}


class Counter(msgspec.Struct, frozen=True, tag="counter", tag_field="kind"):
    """A quantity had these values: staleness, queue depth."""

    name: str
    time_ns: Nanoseconds
    values: dict[str, float]


Mark = ProcessStart | CpuSoFar | ProcessEnd | Instant | Counter
Record = Slice | Mark


class _Frame:
    """An open span: a context manager that lives on the timeline's stack."""

    __slots__ = ("_timeline", "args", "computes", "state")

    def __init__(self, timeline: Timeline, state: str, args: dict[str, Any]) -> None:
        self._timeline = timeline
        self.state = state
        self.args = args
        self.computes = state in COMPUTES

    def __enter__(self) -> None:
        timeline = self._timeline
        now_s = timeline._now_s()
        if timeline._stack:
            timeline._cut(now_s)
        timeline._since_s = now_s
        timeline._stack.append(self)
        if self.computes:
            timeline._computing_since_s = time.process_time()

    def __exit__(self, *_: object) -> None:
        timeline = self._timeline
        timeline._cut(timeline._now_s())
        timeline._stack.pop()
        if timeline._stack and timeline._stack[-1].computes:
            timeline._computing_since_s = time.process_time()


class Timeline:
    """The spans of one process (`core.spans.Spans`), used from one thread.

    Nested spans subtract from the outer one. With `path = None` nothing is written and slices stay in memory. A span
    costs about a microsecond; slices are encoded in batches.

    Identity: `sum(accounting(a, b).values()) == b - a` for every window, to the nanosecond.
    """

    def __init__(
        self,
        process: str,
        path: Path | None,
        clock: Clock,
        *,
        threads: int = 1,
        threads_alone: int = 1,
        device: str = "cpu",
        within: str = "",
    ) -> None:
        self.process = process
        self.path = path
        self._now_s = clock.now_s
        self._stack: list[_Frame] = []
        self._since_s = 0.0  # where the slice of the innermost frame begins
        self._idle_state = "idle"
        self._totals_s: dict[str, float] = {}
        self._buffer: list[Record] = []
        self._writer = None if path is None else JsonlWriter(path)
        self._num_written = 0
        self._gap_s, self._length_s = MERGE_GAP_S, MERGE_LENGTH_S
        self._cpu_s = _cpu_s()
        self._model_s = self._computing_since_s = 0.0  # of CPU time
        start_s = self._now_s()
        self._flushed_s = start_s
        self._count = self._units = 0  # of the open slice
        # The last slice is held back as long as it may grow: state, args, start, end, gap, others (all seconds), work.
        self._last_state = ""
        self._last_args: dict[str, Any] = {}
        self._last_start_s = self._last_end_s = start_s
        self._last_gap_s = 0.0
        self._last_also_s: dict[str, float] = {}
        self._last_count = self._last_units = 0
        self._is_closed = False
        zero_ns = time.time_ns() - to_ns(start_s)
        self._buffer.append(
            ProcessStart(process, os.getpid(), to_ns(start_s), threads, threads_alone, device, within, zero_ns)
        )

    def span(self, state: str, **args: Any) -> AbstractContextManager[None]:
        """The process is in `state` inside this context; `args` (JSON types) are shown with the slice."""
        return _Frame(self, state, args)

    def did(self, units: int) -> None:
        """Count one piece of work, of `units` tokens, for the innermost open span."""
        self._count += 1
        self._units += units

    def idle(self) -> AbstractContextManager[None]:
        """The process waits: labelled with the current idle state, relabelled when that changes meanwhile."""
        return _Frame(self, self._idle_state, _IDLE)

    def set_idle_state(self, state: str) -> None:
        """Set what the process waits for from now on; a wait in progress is split here."""
        if state == self._idle_state:
            return
        self._idle_state = state
        for frame in self._stack:
            if frame.args is _IDLE:
                if frame is self._stack[-1]:
                    self._cut(self._now_s())
                frame.state = state

    def backdate(self, state: str, since_s: float) -> None:
        """The process was in `state` from `since_s` until now, before this timeline existed (its imports)."""
        now_s = self._since_s = self._now_s()
        self._release_last()
        self._buffer.append(Slice(state, to_ns(since_s), to_ns(now_s)))
        self._totals_s[state] = self._totals_s.get(state, 0.0) + (now_s - since_s)

    def instant(self, name: str, **args: Any) -> None:
        """Mark that `name` happened now."""
        self._buffer.append(Instant(name, to_ns(self._now_s()), args))

    def counter(self, name: str, **values: float) -> None:
        """Record the present values of a quantity, drawn as a curve."""
        self._buffer.append(Counter(name, to_ns(self._now_s()), values))

    def totals(self) -> dict[str, float]:
        """Seconds spent in each state so far, without `unlabelled`; cheap, for the live display."""
        if self._stack:
            self._cut(self._now_s())
        return dict(self._totals_s)

    def accounting(self, start_s: float, end_s: float) -> dict[str, float]:
        """Seconds in each state within [start_s, end_s]; the rest of it is `unlabelled`."""
        self.flush()
        records = self._buffer if self.path is None else list(read_timeline(self.path))
        return account(records, start_s, end_s)

    def flush(self) -> None:
        """Write what is known, the part of open spans that lies in the past included."""
        now_s = self._now_s()
        if self._stack:
            self._cut(now_s)
        self._write_until(now_s)

    def close(self) -> None:
        """Flush, with the CPU seconds so far, and release the file; what happens later is not recorded.

        Called by the thread that has made this.
        """
        if self._is_closed:
            return
        self._is_closed = True
        used_ns = self._used_ns()
        ended_s = self._now_s()  # also of the open span: nothing is read or written in between
        if self._stack:
            self._cut(ended_s)
        self._release_last()
        self._buffer.append(ProcessEnd(to_ns(ended_s), *used_ns, model_ns=to_ns(self._model_s)))
        self._write()
        self._stop_writing()

    def _used_ns(self) -> tuple[int, int, int, int]:
        cpu, main, background, kept = (to_ns(now - then) for now, then in zip(_cpu_s(), self._cpu_s, strict=True))
        return cpu, main, background, kept

    def _write_until(self, now_s: float) -> None:
        """Write all slices up to here, and the CPU seconds: one that is killed later has told of all that it tells."""
        self._flushed_s = now_s
        self._release_last()
        self._buffer.append(CpuSoFar(to_ns(now_s), *self._used_ns(), model_ns=to_ns(self._model_s)))
        self._write()

    def _cut(self, now_s: float) -> None:
        """End the slice of the innermost frame at `now_s` and begin its next one there."""
        start_s = self._since_s
        self._since_s = now_s
        frame = self._stack[-1]
        if frame.computes:
            used_s = time.process_time()
            self._model_s += used_s - self._computing_since_s
            self._computing_since_s = used_s
        if now_s <= start_s:
            return
        state = frame.state
        self._totals_s[state] = self._totals_s.get(state, 0.0) + (now_s - start_s)
        gap_s = start_s - self._last_end_s
        if self._last_state and gap_s < self._gap_s and now_s - self._last_start_s < self._length_s:
            if state == self._last_state and frame.args == self._last_args:
                self._last_end_s = now_s
                self._last_gap_s += gap_s
                if self._count:
                    self._last_count += self._count
                    self._last_units += self._units
                    self._count = self._units = 0
                return
            if now_s - start_s < self._gap_s and not frame.args and not self._count:
                self._last_end_s = now_s
                self._last_gap_s += gap_s
                self._last_also_s[state] = self._last_also_s.get(state, 0.0) + (now_s - start_s)
                return
        self._release_last()
        self._last_state, self._last_args = state, frame.args
        self._last_start_s, self._last_end_s, self._last_gap_s = start_s, now_s, 0.0
        self._last_count, self._last_units = self._count, self._units
        self._count = self._units = 0
        if now_s - self._flushed_s >= FLUSH_EVERY_S:
            self._write_until(now_s)

    def _release_last(self) -> None:
        """The line of the last slice: of the state that it had work or arguments of, else of the longest one."""
        if not self._last_state:
            return
        start_ns, end_ns, gap_ns = to_ns(self._last_start_s), to_ns(self._last_end_s), to_ns(self._last_gap_s)
        also = {state: to_ns(seconds) for state, seconds in self._last_also_s.items()}
        state = self._last_state
        if also and not self._last_count and not self._last_args:
            also[state] = end_ns - start_ns - gap_ns - sum(also.values())
            state = max(also, key=also.__getitem__)
            del also[state]
        self._buffer.append(
            Slice(state, start_ns, end_ns, gap_ns, self._last_args, also, self._last_count, self._last_units)
        )
        self._last_state = ""
        self._last_also_s = {}

    def _write(self) -> None:
        """A disk that refuses is told by those whose files matter; who only watches goes without, and disturbs none."""
        if self._writer is not None:
            try:
                self._writer.write(*self._buffer)
            except DiskError:
                self._stop_writing()
            self._num_written += len(self._buffer)
            self._buffer.clear()
            if self._num_written >= COARSER_AFTER:
                self._num_written = 0
                self._gap_s, self._length_s = 2 * self._gap_s, 2 * self._length_s

    def _stop_writing(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_IDLE: dict[str, Any] = {}  # marks idle frames by identity


def _cpu_s() -> tuple[float, float, float, float]:
    """CPU seconds so far, of the process, of this thread and of those in the background; and what this thread waited
    for a core."""
    return time.process_time(), time.thread_time(), background_cpu_s(), kept_s()


def kept_s() -> float:
    """Seconds that this thread has been ready without running; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


def account(records: Sequence[Record], start_s: float, end_s: float, *, is_over: bool = False) -> dict[str, float]:
    """Seconds in each state within the window; what nothing covers is `unlabelled`, so that all sum to its length.

    `absent` and `lost` are as in `presence`. A slice that the window cuts gives what other states took of it in
    proportion.
    """
    start_ns, end_ns = to_ns(start_s), to_ns(end_s)
    if end_ns < start_ns:
        raise ValueError(f"the window ends before it starts: {start_s} s to {end_s} s")
    return account_windows(presence(records, start_ns, end_ns, is_over=is_over), [start_ns, end_ns])[0]


def account_windows(slices: Iterable[Slice], bounds_ns: Sequence[int]) -> list[dict[str, float]]:
    """Return `account` of each window between two neighbours of the ascending `bounds_ns`, in one pass."""
    totals: list[dict[str, int]] = [{} for _ in bounds_ns[1:]]
    for piece in slices:
        length = piece.end_ns - piece.start_ns
        index = max(0, bisect.bisect_right(bounds_ns, piece.start_ns) - 1)
        while index < len(totals) and bounds_ns[index] < piece.end_ns:
            inside = min(piece.end_ns, bounds_ns[index + 1]) - max(piece.start_ns, bounds_ns[index])
            if inside > 0:
                _add(totals[index], piece, inside, length)
            index += 1
    for index, window in enumerate(totals):
        length = bounds_ns[index + 1] - bounds_ns[index]
        window[UNLABELLED] = window.get(UNLABELLED, 0) + length - sum(window.values())
    return [{state: ns * 1e-9 for state, ns in window.items()} for window in totals]


def _add(totals_ns: dict[str, int], piece: Slice, inside_ns: int, length_ns: int) -> None:
    rest = inside_ns - piece.gap_ns * inside_ns // length_ns
    for state, ns in piece.also.items():
        part = ns * inside_ns // length_ns
        totals_ns[state] = totals_ns.get(state, 0) + part
        rest -= part
    totals_ns[piece.state] = totals_ns.get(piece.state, 0) + rest


def presence(records: Sequence[Record], start_ns: int, end_ns: int, *, is_over: bool = False) -> list[Slice]:
    """The slices among the records of one process, with those of the states `absent` and `lost` from `start_ns` on.

    The process is `absent` before its first record and from a `ProcessEnd` on, until it writes again. From the last
    record of one that was killed to the first of its successor it is `lost`; without a successor it is if the run
    `is_over`, else what comes after its last record is nobody's yet.
    """
    lives: list[Life] = []
    for record in records:
        Life.extend(lives, record)
    slices = [record for record in records if isinstance(record, Slice)]
    return slices + [Slice(*one) for one in gone(lives, start_ns, end_ns, is_over=is_over) if one[1] < one[2]]


@dataclass
class Life:
    """One process that wrote a file, of those that were started one after the other under its name."""

    first_ns: int
    last_ns: int
    has_ended: bool = False

    @staticmethod
    def extend(lives: list[Life], record: Record) -> None:
        """Add the next record of a file to the last of its `lives`, or begin another one with it."""
        first_ns, last_ns = times_ns(record)
        if isinstance(record, ProcessStart) or not lives:
            lives.append(Life(first_ns, last_ns))
        life = lives[-1]
        life.first_ns, life.last_ns = min(life.first_ns, first_ns), max(life.last_ns, last_ns)
        life.has_ended |= isinstance(record, ProcessEnd)


def gone(lives: Sequence[Life], start_ns: int, end_ns: int, *, is_over: bool = False) -> Iterator[tuple[str, int, int]]:
    """(state, start, end) before, between and after `lives`, as `presence` says; some may be empty, or end before."""
    if not lives:
        if is_over:  # it was killed before it wrote
            yield ABSENT, start_ns, end_ns
        return
    yield ABSENT, start_ns, lives[0].first_ns
    for life, successor in zip(lives, [*lives[1:], None], strict=True):
        if life.has_ended or successor is not None or is_over:
            state = ABSENT if life.has_ended else LOST
            yield state, life.last_ns, end_ns if successor is None else successor.first_ns


def times_ns(record: Record) -> tuple[int, int]:
    """Return when a record began and ended, the same time for one without a length."""
    return (record.start_ns, record.end_ns) if isinstance(record, Slice) else (record.time_ns, record.time_ns)


def read_timeline(path: Path, *, offset: int = 0) -> Iterator[Record]:
    """The records of one process's file, a torn last line left out; `offset` as in `read_jsonl`."""
    kinds: Any = Record
    yield from read_jsonl(path, kinds, offset=offset)


def account_file(path: Path, start_s: float, end_s: float, *, is_over: bool = False) -> dict[str, float]:
    """The accounting of a process that can no longer be asked, from its file (all `unlabelled` without one)."""
    return account(list(read_timeline(path)), start_s, end_s, is_over=is_over)


def timeline_path(run_dir: Path, process: str) -> Path:
    return run_dir / "timeline" / f"{process}.jsonl"


def process_files(run_dir: Path) -> list[Path]:
    """The timeline files of a run's processes, in the order of the loop."""
    return sorted((run_dir / "timeline").glob("*.jsonl"), key=lambda path: process_order(path.stem))


def process_order(process: str) -> tuple[int, str, int, int]:
    """Processes in the order of the loop, replicas and ranks by their numbers."""
    order = (
        *("controller", "generator", "environments", "rewards", "reward_models"),
        *("reference", "teacher", "critic", "trainer"),
    )
    executor, rank = split_rank_name(process)
    name, _, number = executor.rpartition("-")
    if not number.isdigit():
        name, number = executor, "0"
    return next((i for i, known in enumerate(order) if name == known), len(order)), name, int(number), rank
