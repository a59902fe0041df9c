"""A few training steps out of a run's timelines, however long these are, for the Gantt chart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from slipstream.core.errors import SlipstreamError
from slipstream.observe.states import in_words
from slipstream.observe.svg_blocks import Bar, Row
from slipstream.observe.timeline import TRAINED, Instant, Record, Slice, process_files

WINDOW_STEPS = 4
LAST_S = 5.0  # where nothing was trained: the last seconds of the run
MAX_ROWS = 12
READ_AHEAD = 1 << 18  # bytes that records may lie apart from their order in time


@dataclass(frozen=True)
class Window:
    """What happened between two moments, seconds on the run's clock. `num_left_out` processes have no row."""

    start_s: float
    end_s: float
    title: str
    origin: str  # what the first moment is, where it is something
    rows: list[Row]
    num_left_out: int


def read_window(run_dir: Path) -> Window | None:
    """WINDOW_STEPS steps from the middle of the run; its last seconds where few were trained, None without files."""
    files = process_files(run_dir)
    found = next((steps for path in files if path.stem == "trainer" and (steps := _steps_inside(path))), None)
    if found is None:
        end_s = max((_end_ns(record) * 1e-9 for path in files for record in read_from(path, -1)), default=0.0)
        start_s, title, origin = end_s - LAST_S, f"the last {LAST_S:g} seconds", ""
    else:
        (before, start_s), (last, end_s) = found
        title = f"steps {before + 1} to {last}" if last > before + 1 else f"step {last}"
        origin = f"the end of step {before}"
    shown = [path for path in files if path.stem != "controller"] if len(files) > MAX_ROWS else files
    rows = [read_row(path, start_s, end_s) for path in shown[:MAX_ROWS]]
    return Window(start_s, end_s, title, origin, rows, len(files) - len(rows)) if files else None


def _steps_inside(path: Path) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """(step, its end) before and at the end of WINDOW_STEPS steps near the middle of the trainer's file; of fewer, or
    from its start, where there are no more."""
    for offset in (path.stat().st_size // 2, 0):
        ends = (r for r in read_from(path, offset) if isinstance(r, Instant) and r.name == TRAINED)
        found = [(int(end.args["step"]), end.time_ns * 1e-9) for end in islice(ends, WINDOW_STEPS + 1)]
        if len(found) > WINDOW_STEPS or (len(found) > 1 and not offset):
            return found[0], found[-1]
    return None


def read_row(path: Path, start_s: float, end_s: float) -> Row:
    """What the process of a timeline did between two moments, seconds on the run's clock."""
    bars, marks = [], []
    for record in read_from(path, _offset_of(path, round(start_s * 1e9))):
        if _start_ns(record) > end_s * 1e9 + 1e9:
            break
        match record:
            case Slice() if record.end_ns * 1e-9 > start_s and record.start_ns * 1e-9 < end_s:
                bars.append(_bar(record))
            case Instant() if start_s <= record.time_ns * 1e-9 <= end_s:
                marks.append((record.time_ns * 1e-9, ", ".join([record.name, *_args(record)])))
    return Row(path.stem, bars, marks)


def _bar(record: Slice) -> Bar:
    """In the state that took most of it: a slice may hold others that are too short for lines of their own."""
    states = {record.state: record.state_ns} | record.also
    most = max(states, key=lambda state: states[state])
    others = [f"{in_words(state)} {ns * 1e-6:.1f} ms of it" for state, ns in states.items() if state != most]
    text = f"step {record.args['step']}" if "step" in record.args else ""
    return Bar(most, record.start_ns * 1e-9, record.end_ns * 1e-9, ", ".join([*_args(record), *others]), text)


def _args(record: Slice | Instant) -> list[str]:
    return [f"{key} {value}" for key, value in record.args.items()]


# Reading from the middle


def read_from(path: Path, offset: int) -> Iterator[Record]:
    """The records of a timeline behind byte `offset`, from its last READ_AHEAD bytes on where that is negative."""
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
    with path.open("rb") as file:
        if offset < 0:
            offset = max(0, path.stat().st_size - READ_AHEAD)
        file.seek(offset)
        if offset:
            file.readline()  # the rest of a line that began before
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except (ValueError, RecursionError) as error:
                raise SlipstreamError(f"{path.name} is damaged", got=error, hint=f"inspect {path}") from error


def _offset_of(path: Path, time_ns: int) -> int:
    """A byte from which on every record lies that ends after `time_ns`: slices of a process are in order of time."""
    low, high = 0, path.stat().st_size
    while high - low > READ_AHEAD:
        middle = (low + high) // 2
        found = next((record for record in read_from(path, middle) if isinstance(record, Slice)), None)
        if found is None or found.end_ns >= time_ns:
            high = middle
        else:
            low = middle
    return max(0, low - READ_AHEAD)


def _start_ns(record: Record) -> int:
    return record.start_ns if isinstance(record, Slice) else record.time_ns


def _end_ns(record: Record) -> int:
    return record.end_ns if isinstance(record, Slice) else record.time_ns
