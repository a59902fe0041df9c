"""Who did what, when: exclusive spans of one process and their accounting.

At every moment a process is in the innermost open span's state, in its idle state, or `unlabelled`. What is stored
are the resulting *slices*: flat, disjoint, ascending, in integer nanoseconds. Sums over slices are therefore exact, and
a killed process is accounted for by the file it left behind.

    timeline/<process>.jsonl   written while the run goes on, at most once a second

`observe.chrome_trace` draws them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from slipstream.core.clock import Clock
from slipstream.core.errors import DiskError
from slipstream.observe.jsonl import JsonlWriter, read_jsonl

UNLABELLED = "unlabelled"
TIME_PREFIX = "time/"  # of values in `Counters` that are seconds spent in a state (`Timeline.totals`)
FLUSH_EVERY_S = 1.0
MERGE_GAP_S = 1e-3  # adjacent slices of one state closer than this become one line of the file ...
MERGE_LENGTH_S = 0.1  # ... as long as the line stays this short, so that pictures and windows keep their resolution


class ProcessStart(msgspec.Struct, frozen=True, tag="process", tag_field="kind"):
    """Header: a process began to write here (again, after a resume)."""

    process: str
    pid: int
    time_ns: int


class Slice(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag="slice", tag_field="kind"):
    """The process was in `state` from `start_ns` to `end_ns`, except for `gap_ns` in between (merged slices)."""

    state: str
    start_ns: int
    end_ns: int
    gap_ns: int = 0
    args: dict[str, Any] = {}


class Instant(msgspec.Struct, frozen=True, omit_defaults=True, tag="instant", tag_field="kind"):
    """Something happened: a swap, a publish."""

    name: str
    time_ns: int
    args: dict[str, Any] = {}


class Counter(msgspec.Struct, frozen=True, tag="counter", tag_field="kind"):
    """A quantity had these values: staleness, queue depth."""

    name: str
    time_ns: int
    values: dict[str, float]


Record = ProcessStart | Slice | Instant | Counter


class _Frame:
    """An open span: a context manager that lives on the timeline's stack."""

    __slots__ = ("_timeline", "args", "state")

    def __init__(self, timeline: Timeline, state: str, args: dict[str, Any]) -> None:
        self._timeline = timeline
        self.state = state
        self.args = args

    def __enter__(self) -> None:
        timeline = self._timeline
        now_s = timeline._now_s()
        if timeline._stack:
            timeline._cut(now_s)
        timeline._since_s = now_s
        timeline._stack.append(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timeline = self._timeline
        timeline._cut(timeline._now_s())
        timeline._stack.pop()


class Timeline:
    """The spans of one process (`core.executor.Spans`), used from one thread.

    Nested spans subtract from the outer one. With `path = None` nothing is written and slices stay in memory. A span
    costs about a microsecond; slices are encoded in batches.

    Identity: `sum(accounting(a, b).values()) == b - a` for every window, to the nanosecond.
    """

    def __init__(self, process: str, path: Path | None, clock: Clock) -> None:
        self.process = process
        self.path = path
        self._now_s = clock.now_s
        self._stack: list[_Frame] = []
        self._since_s = 0.0  # where the slice of the innermost frame begins
        self._idle_state = "idle"
        self._totals_s: dict[str, float] = {}
        self._buffer: list[Record] = []
        self._writer = None if path is None else JsonlWriter(path)
        start_s = self._now_s()
        self._flushed_s = start_s
        # The last slice is held back as long as it may grow: state, args, start, end, gap (all seconds).
        self._last_state = ""
        self._last_args: dict[str, Any] = {}
        self._last_start_s = self._last_end_s = start_s
        self._last_gap_s = 0.0
        self._buffer.append(ProcessStart(process, os.getpid(), _ns(start_s)))

    def span(self, state: str, **args: Any) -> AbstractContextManager[None]:
        """The process is in `state` inside this context; `args` (JSON types) are shown with the slice."""
        return _Frame(self, state, args)

    def idle(self) -> AbstractContextManager[None]:
        """The process waits: labelled with the current idle state, relabelled when that changes meanwhile."""
        return _Frame(self, self._idle_state, _IDLE)

    def set_idle_state(self, state: str) -> None:
        """What the process waits for from now on; a wait in progress is split here."""
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
        now_s = self._now_s()
        self._release_last()
        self._buffer.append(Slice(state, _ns(since_s), _ns(now_s)))
        self._totals_s[state] = self._totals_s.get(state, 0.0) + (now_s - since_s)

    def instant(self, name: str, **args: Any) -> None:
        """Mark that `name` happened now."""
        self._buffer.append(Instant(name, _ns(self._now_s()), args))

    def counter(self, name: str, **values: float) -> None:
        """Record the present values of a quantity, drawn as a curve."""
        self._buffer.append(Counter(name, _ns(self._now_s()), values))

    def totals(self) -> dict[str, float]:
        """Seconds spent in each state so far, without `unlabelled`; cheap, for the live display."""
        if self._stack:
            self._cut(self._now_s())
        return dict(self._totals_s)

    def accounting(self, start_s: float, end_s: float) -> dict[str, float]:
        """Seconds in each state within [start_s, end_s]; the rest of it is `unlabelled`."""
        self.flush()
        records = self._buffer if self.path is None else read_timeline(self.path)
        return account(records, start_s, end_s)

    def flush(self) -> None:
        """Write what is known, the part of open spans that lies in the past included."""
        if self._stack:
            self._cut(self._now_s())
        self._release_last()
        self._write()

    def close(self) -> None:
        """Flush and release the file; what happens later is not recorded."""
        self.flush()
        self._stop_writing()

    def _cut(self, now_s: float) -> None:
        """End the slice of the innermost frame at `now_s` and begin its next one there."""
        start_s = self._since_s
        self._since_s = now_s
        if now_s <= start_s:
            return
        frame = self._stack[-1]
        state = frame.state
        self._totals_s[state] = self._totals_s.get(state, 0.0) + (now_s - start_s)
        gap_s = start_s - self._last_end_s
        if (
            state == self._last_state
            and gap_s < MERGE_GAP_S
            and now_s - self._last_start_s < MERGE_LENGTH_S
            and frame.args == self._last_args
        ):
            self._last_end_s = now_s
            self._last_gap_s += gap_s
            return
        self._release_last()
        self._last_state, self._last_args = state, frame.args
        self._last_start_s, self._last_end_s, self._last_gap_s = start_s, now_s, 0.0
        if now_s - self._flushed_s >= FLUSH_EVERY_S:
            self._flushed_s = now_s
            self._write()

    def _release_last(self) -> None:
        if self._last_state:
            self._buffer.append(
                Slice(
                    self._last_state,
                    _ns(self._last_start_s),
                    _ns(self._last_end_s),
                    _ns(self._last_gap_s),
                    self._last_args,
                )
            )
            self._last_state = ""

    def _write(self) -> None:
        """A disk that refuses is told by those whose files matter; who only watches goes without, and disturbs none."""
        if self._writer is not None:
            try:
                self._writer.write(*self._buffer)
            except DiskError:
                self._stop_writing()
            self._buffer.clear()

    def _stop_writing(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


_IDLE: dict[str, Any] = {}  # marks idle frames by identity


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def account(records: Iterable[Record], start_s: float, end_s: float) -> dict[str, float]:
    """Seconds in each state within the window; what no slice covers is `unlabelled`, so that all sum to its length.

    A merged slice that the window cuts gives its gaps in proportion.
    """
    start_ns, end_ns = _ns(start_s), _ns(end_s)
    if end_ns < start_ns:
        raise ValueError(f"the window ends before it starts: {start_s} s to {end_s} s")
    totals_ns: dict[str, int] = {}
    for record in records:
        if isinstance(record, Slice):
            inside = min(record.end_ns, end_ns) - max(record.start_ns, start_ns)
            if inside > 0:
                gap_ns = record.gap_ns * inside // (record.end_ns - record.start_ns)
                totals_ns[record.state] = totals_ns.get(record.state, 0) + inside - gap_ns
    totals_ns[UNLABELLED] = totals_ns.get(UNLABELLED, 0) + (end_ns - start_ns) - sum(totals_ns.values())
    return {state: ns * 1e-9 for state, ns in totals_ns.items()}


def read_timeline(path: Path) -> Iterator[Record]:
    """The records of one process's file, a torn last line left out."""
    kinds: Any = Record
    yield from read_jsonl(path, kinds)


def account_file(path: Path, start_s: float, end_s: float) -> dict[str, float]:
    """The accounting of a process that can no longer be asked, from its file (all `unlabelled` without one)."""
    return account(read_timeline(path), start_s, end_s)


def timeline_path(run_dir: Path, process: str) -> Path:
    return run_dir / "timeline" / f"{process}.jsonl"


def process_files(run_dir: Path) -> list[Path]:
    """The timeline files of a run's processes, in the order of the loop."""
    return sorted((run_dir / "timeline").glob("*.jsonl"), key=lambda path: _process_order(path.stem))


def _process_order(process: str) -> tuple[int, str]:
    """Processes in the order of the loop, whatever their numbering."""
    order = ("controller", "generator", "rewards", "reward_models", "reference", "trainer")
    return next((i for i, name in enumerate(order) if process.startswith(name)), len(order)), process
