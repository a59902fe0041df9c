"""A run's timelines as one Chrome trace: `timeline.json`, which opens in Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.disk import disk_errors, replacing
from slipstream.observe.timeline import (
    Counter,
    Instant,
    ProcessEnd,
    ProcessStart,
    Record,
    Slice,
    process_files,
    read_timeline,
)


def merge_timelines(run_dir: Path) -> Path:
    """Write `timeline.json` (Chrome trace event format) from `timeline/*.jsonl`; time 0 is the earliest record.

    Slices become complete events (`X`, microseconds), instants `i`, counters `C`. Written line by line, then renamed.
    """
    files = process_files(run_dir)
    origin_ns = min((_time_ns(record) for path in files for record in read_timeline(path)), default=0)
    target = run_dir / "timeline.json"
    encode = msgspec.json.Encoder().encode
    with disk_errors(target), replacing(target) as temporary, temporary.open("wb") as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for pid, path in enumerate(files, start=1):
            for event in _trace_events(path, pid, origin_ns):
                out.write(separator + encode(event))
                separator = b",\n"
        out.write(b"\n]}\n")
    return target


def _time_ns(record: Record) -> int:
    return record.start_ns if isinstance(record, Slice) else record.time_ns


def _trace_events(path: Path, pid: int, origin_ns: int) -> Iterator[dict[str, Any]]:
    base = {"pid": pid, "tid": 1}
    yield {**base, "ph": "M", "name": "process_name", "args": {"name": path.stem}}
    yield {**base, "ph": "M", "name": "process_sort_index", "args": {"sort_index": pid}}
    yield {**base, "ph": "M", "name": "thread_name", "args": {"name": "states"}}
    for record in read_timeline(path):
        start_us = (_time_ns(record) - origin_ns) / 1e3
        match record:
            case Slice():
                duration_us = (record.end_ns - record.start_ns) / 1e3
                event = {"ph": "X", "name": record.state, "ts": start_us, "dur": duration_us, "args": record.args}
            case Instant():
                event = {"ph": "i", "s": "p", "name": record.name, "ts": start_us, "args": record.args}
            case Counter():
                event = {"ph": "C", "name": record.name, "ts": start_us, "args": record.values}
            case ProcessStart():
                args = {"os_pid": record.pid}
                event = {"ph": "i", "s": "p", "name": "process started", "ts": start_us, "args": args}
            case ProcessEnd():
                event = {"ph": "i", "s": "p", "name": "process ended", "ts": start_us, "args": {}}
        yield base | event
