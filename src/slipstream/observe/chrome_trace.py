"""`timeline.json`: a run's timelines as one Chrome trace, which opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

    process   the run: viewers show all of one, and fold several
    thread    a rank of an executor, in the order of the loop; the attempts of a run lie one behind the other
    X         a slice of `timeline/<process>.jsonl`: what the rank did, with its version or step, and whether it is work
    s, t, f   an arrow. Of a group: its admission, where its decoding begins and ends, its last score, and the step that
              trained it or the decision to drop it. Of a version: its publish, and the swap of each rank that took it
    i         a process begins or ends, a replica is lost ...
    C         how many groups are where; versions, staleness, reward

Events are in order of time. An arrow's ends lie inside slices, which is how viewers know what it joins. The file stays
of a size that they open: at most `MAX_SLICES` slices, the shortest being left out of a longer run, and the arrows of at
most `MAX_GROUPS` groups and `MAX_SWAPS` swaps: of more those of every 2nd, 4th, 8th ... ordinal or version. A rank has
at most `MAX_POINTS` marks, and values of a counter, of one name. `otherData` says what is left out.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.core.disk import disk_errors, replacing
from slipstream.core.jsonl import intact_lines
from slipstream.core.ranks import data_parallel_rank, split_rank_name
from slipstream.observe import timeline
from slipstream.observe.attempts import Attempt, read_attempts
from slipstream.observe.group_flow import MAX_GROUPS, MAX_POINTS, GroupPath, Thinned, read_group_flow
from slipstream.observe.states import UNLABELLED, is_missed, kind

MAX_SLICES = 1_000_000
MAX_SWAPS = 100_000
SNAP_NS = 5_000_000
"""An arrow's end in no slice goes to the nearest one of its track, if there is one so near; else it is left out."""
_CONTROLLER, _TRAINER = "controller", "trainer"
_STATIONS = ("rewards", "reward_models")  # by which completions get their scores, in this order
_GIVES, _TAKES = frozenset({"publish", "stage"}), "swap"  # states of slices with a `version` that its arrows join

_PID = 1

Event = dict[str, Any]
Timed = tuple[int, Event]
"""An event and when it is, in nanoseconds on the newest attempt's clock."""


def merge_timelines(
    run_dir: Path, *, max_slices: int = MAX_SLICES, max_groups: int = MAX_GROUPS, max_swaps: int = MAX_SWAPS
) -> Path:
    """Write `timeline.json` from the files of all attempts; time 0 is the earliest record.

    A damaged file is drawn up to its damage. DiskError where the trace cannot be written.
    """
    attempts = read_attempts(run_dir)
    tracks = _read_tracks(attempts)
    versions_apart = _leave_out_versions(list(tracks.values()), max_swaps)
    longer_than_ns, num_left_out = _limit(list(tracks.values()), max_slices)
    flow = read_group_flow(attempts, max_groups=max_groups)
    arrows = _Arrows(tracks)
    for path in flow.paths:
        arrows.add_group(path)
    arrows.add_versions()
    marks = [mark for track in tracks.values() for thinned in track.marks.values() for _, mark in thinned.points]
    streams: list[Iterable[Timed]] = [_slices(track) for track in tracks.values()]
    first_ns = [time_ns for time_ns, _ in marks] + [ns for track in tracks.values() for ns in track.starts_ns[:1]]
    if _CONTROLLER in tracks:
        controller = tracks[_CONTROLLER]
        first_ns += [points[0][0] for points in flow.curves.values()]
        streams += [_curve(controller, name, points) for name, points in flow.curves.items()]
        if len(attempts) > 1:
            begun = {"ph": "i", "s": "g", **controller.place}
            marks += [(ns, begun | {"name": f"attempt {number}"}) for number, ns in controller.attempts.items()]
    in_time = itemgetter(0)
    streams += [sorted(marks, key=in_time), sorted(arrows.events, key=in_time)]
    origin_ns = min(first_ns, default=0)
    notes = {
        "time 0": _day(attempts[-1], origin_ns),
        "attempts": len(attempts),
        "slices left out": num_left_out,
        "these are at most, ms": longer_than_ns / 1e6,
        "groups with arrows": "all" if flow.stride == 1 else f"every {flow.stride}th by ordinal",
        "versions with arrows": "all" if versions_apart == 1 else f"every {versions_apart}th",
        "arrows left out": arrows.num_left_out,
        "ends of arrows left out": arrows.num_ends_left_out,
    }
    target = run_dir / "timeline.json"
    encode = msgspec.json.Encoder().encode
    with disk_errors(target), replacing(target) as temporary, temporary.open("wb", buffering=1 << 20) as out:
        out.write(b'{"displayTimeUnit":"ms","otherData":' + encode(notes) + b',"traceEvents":[\n')
        timed = heapq.merge(*streams, key=in_time)
        events = (event | {"ts": (time_ns - origin_ns) / 1e3} for time_ns, event in timed)
        for index, event in enumerate(chain(_names(run_dir.resolve().name, tracks.values()), events)):
            out.write((b",\n" if index else b"") + encode(event))
        out.write(b"\n]}\n")
    return target


def _day(attempt: Attempt, origin_ns: int) -> str | None:
    if attempt.zero_ns is None:
        return None
    return datetime.fromtimestamp((attempt.zero_ns + origin_ns) / 1e9, UTC).isoformat(timespec="milliseconds")


# Tracks


@dataclass
class _Track:
    """The records of rank `name` ('trainer@1') in all attempts. All times are on the newest attempt's clock."""

    name: str
    place: dict[str, int]  # pid and tid
    files: list[tuple[Path, Attempt]] = field(default_factory=list)
    marks: dict[str, Thinned[Timed]] = field(default_factory=dict)  # by name
    attempts: dict[int, int] = field(default_factory=dict)  # number -> its first slice's start
    starts_ns: array[int] = field(default_factory=lambda: array("q"))  # of slices, ascending
    ends_ns: array[int] = field(default_factory=lambda: array("q"))
    of_versions: list[tuple[int, int]] = field(default_factory=list)  # (version, index of slice) that its arrows join
    steps: dict[tuple[int, int], int] = field(default_factory=dict)  # (attempt, step) -> start of its first slice
    given: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (attempt, version) -> ends of slices
    taken: list[tuple[int, int, int]] = field(default_factory=list)  # (attempt, version, start of slice)
    is_kept: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # [slices]: what is drawn

    def slices(self) -> Iterator[tuple[int, int, int, timeline.Slice]]:
        """(attempt, start, end, slice), ascending and disjoint: two processes that wrote at once take turns."""
        last_ns = None
        for attempt, record in self._records():
            if isinstance(record, timeline.Slice):
                start_ns, end_ns = record.start_ns + attempt.shift_ns, record.end_ns + attempt.shift_ns
                if last_ns is not None and start_ns < last_ns:
                    start_ns = last_ns
                if start_ns < end_ns:
                    last_ns = end_ns
                    yield attempt.number, start_ns, end_ns, record

    def read(self) -> None:
        """Fill everything, from the files."""
        for number, start_ns, end_ns, piece in self.slices():
            self.attempts.setdefault(number, start_ns)
            version, step = piece.args.get("version"), piece.args.get("step")
            if isinstance(version, int) and piece.state in _GIVES:
                self.of_versions.append((version, len(self.starts_ns)))
                self.given.setdefault((number, version), []).append(end_ns - 1)
            if isinstance(version, int) and piece.state == _TAKES:
                self.of_versions.append((version, len(self.starts_ns)))
                self.taken.append((number, version, start_ns))
            if isinstance(step, int):
                self.steps.setdefault((number, step), start_ns)
            self.starts_ns.append(start_ns)
            self.ends_ns.append(end_ns)
        for number, (attempt, record) in enumerate(self._records()):  # thinned by number: times may go back
            if not isinstance(record, timeline.Slice) and (mark := self._mark(record)) is not None:
                timed = record.time_ns + attempt.shift_ns, mark
                self.marks.setdefault(mark["name"], Thinned(MAX_POINTS)).add(number, timed)

    def _records(self) -> Iterator[tuple[Attempt, timeline.Record]]:
        kinds: Any = timeline.Record
        for path, attempt in self.files:
            for _, record in intact_lines(path, kinds):
                yield attempt, record

    def _mark(self, record: timeline.Mark) -> Event | None:
        match record:
            case timeline.Counter():
                return {"ph": "C", **self.place, "name": record.name, "args": record.values}
            case timeline.Instant(name=name, args=args):
                pass
            case timeline.ProcessStart():
                name = "process started"
                args = {"os_pid": record.pid, "threads": record.threads, "device": record.device}
            case timeline.ProcessEnd():
                name, args = "process ended", {"cpu_s": record.cpu_ns / 1e9}
            case timeline.CpuSoFar():
                return None
        return {"ph": "i", "s": "t", **self.place, "name": name, "args": args}

    def keep(self, longer_than_ns: int) -> int:
        """Keep the slices that are longer than that, and those of versions; return how many are left out."""
        starts, ends = np.array(self.starts_ns, np.int64), np.array(self.ends_ns, np.int64)
        self.is_kept = ends - starts > longer_than_ns
        self.is_kept[[index for _, index in self.of_versions]] = True
        self._starts, self._ends = starts[self.is_kept], ends[self.is_kept]
        return int((~self.is_kept).sum())

    def find(self, time_ns: int, not_before_ns: int) -> int | None:
        """The time nearest to `time_ns`, and not before the other, that lies in a slice; None if all are too far."""
        wanted_ns = max(time_ns, not_before_ns)
        i = int(np.searchsorted(self._starts, wanted_ns, side="right")) - 1
        near = [min(wanted_ns, int(self._ends[i]) - 1)] if i >= 0 else []
        near += [int(self._starts[i + 1])] if i + 1 < len(self._starts) else []
        allowed = [at_ns for at_ns in near if at_ns >= not_before_ns and abs(at_ns - time_ns) <= SNAP_NS]
        return min(allowed, key=lambda at_ns: abs(at_ns - time_ns), default=None)


def _read_tracks(attempts: Sequence[Attempt]) -> dict[str, _Track]:
    """Return the tracks by name, numbered from 1 in the order of the loop."""
    files: dict[str, list[tuple[Path, Attempt]]] = {}
    for attempt in attempts:
        for path in timeline.process_files(attempt.folder):
            files.setdefault(path.stem, []).append((path, attempt))
    tracks = {}
    for tid, name in enumerate(sorted(files, key=timeline.process_order), start=1):
        tracks[name] = _Track(name, {"pid": _PID, "tid": tid}, files[name])
        tracks[name].read()
    return tracks


def _leave_out_versions(tracks: Sequence[_Track], max_swaps: int) -> int:
    """Leave every n-th version to arrows, so that they join at most so many swaps; return n."""
    n = 1
    while sum(version % n == 0 for track in tracks for _, version, _ in track.taken) > max_swaps:
        n *= 2
    for track in tracks:
        track.of_versions = [one for one in track.of_versions if one[0] % n == 0]
        track.taken = [one for one in track.taken if one[1] % n == 0]
    return n


def _limit(tracks: Sequence[_Track], max_slices: int) -> tuple[int, int]:
    """Keep the longest slices. Returns the length in nanoseconds that one must exceed for it, and how many do not."""
    lengths = [np.array(track.ends_ns, np.int64) - np.array(track.starts_ns, np.int64) for track in tracks]
    longer_than_ns = 0
    if (num_too_many := sum(map(len, lengths)) - max_slices) > 0:
        longer_than_ns = int(np.partition(np.concatenate(lengths), num_too_many - 1)[num_too_many - 1])
    return longer_than_ns, sum(track.keep(longer_than_ns) for track in tracks)


def _names(run: str, tracks: Iterable[_Track]) -> Iterator[Event]:
    yield {"ph": "M", "pid": _PID, "name": "process_name", "args": {"name": run}}
    for track in tracks:
        yield {"ph": "M", **track.place, "name": "thread_name", "args": {"name": track.name}}
        yield {"ph": "M", **track.place, "name": "thread_sort_index", "args": {"sort_index": track.place["tid"]}}


def _slices(track: _Track) -> Iterator[Timed]:
    # A process that still writes may have added slices since they were counted: these are left out.
    for is_kept, (_, start_ns, end_ns, record) in zip(track.is_kept.tolist(), track.slices(), strict=False):
        if not is_kept:
            continue
        args = dict(record.args)
        if record.count:
            args |= {"count": record.count, "tokens": record.units}
        if record.also:
            args["also, ms"] = {state: ns / 1e6 for state, ns in record.also.items()}
        if record.gap_ns:
            args["unlabelled, ms"] = record.gap_ns / 1e6
        of_kind = kind(record.state)
        event: Event = {"ph": "X", **track.place, "name": record.state, "cat": of_kind or UNLABELLED}
        event["dur"] = (end_ns - start_ns) / 1e3
        if of_kind == "wait":
            event["cname"] = "bad" if is_missed(record.state) else "grey"  # of the viewer's own colours, "bad" is amber
        if args:
            event["args"] = args
        yield start_ns, event


def _curve(track: _Track, name: str, points: Iterable[tuple[int, dict[str, float]]]) -> Iterator[Timed]:
    for time_ns, values in points:
        yield time_ns, {"ph": "C", **track.place, "name": name, "args": values}


# Arrows


class _Arrows:
    """Flow events: `s`, `t` ..., `f`, with one `id`. Viewers join the slices that these lie in."""

    def __init__(self, tracks: Mapping[str, _Track]) -> None:
        self._tracks = tracks
        station = [name for name in _STATIONS if name in tracks][-1:]
        self._scorers = [track for name, track in tracks.items() if split_rank_name(name)[0] in station]
        self._num = 0
        self.events: list[Timed] = []
        self.num_left_out = 0
        self.num_ends_left_out = 0

    def add_group(self, path: GroupPath) -> None:
        """Add the arrow of a group; the ranks of the last station are dealt its completions one by one."""
        points = []
        if path.admitted_ns is not None:
            points.append((_CONTROLLER, path.admitted_ns))
        replica = f"generator-{path.replica}"
        points += [(replica, path.started_ns), (replica, path.finished_ns)]
        if self._scorers:
            dealt = data_parallel_rank(path.ordinal, path.last_sample, len(self._scorers), by="samples")
            points.append((self._scorers[dealt].name, path.scored_ns))
        if path.dropped_ns is not None:
            points.append((_CONTROLLER, path.dropped_ns))
        elif path.step is not None and _TRAINER in self._tracks:
            begin_ns = self._tracks[_TRAINER].steps.get((path.attempt, path.step))
            points += [] if begin_ns is None else [(_TRAINER, begin_ns)]
        if path.step is None:
            self._add("dropped group", f"group {path.ordinal}, dropped", points)
        else:
            self._add("group", f"group {path.ordinal}, step {path.step}", points)

    def add_versions(self) -> None:
        """Add arrows from the end of the newest publish of a version before it was taken to each rank that took it."""
        given = self._tracks[_TRAINER].given if _TRAINER in self._tracks else {}
        for track in self._tracks.values():
            for attempt, version, taken_ns in track.taken:
                ends_ns = given.get((attempt, version), [])
                before = [end_ns for end_ns in ends_ns if end_ns <= taken_ns] or ends_ns[:1]
                self._add(
                    "weights", f"version {version}", [*((_TRAINER, end) for end in before[-1:]), (track.name, taken_ns)]
                )

    def _add(self, category: str, name: str, points: Sequence[tuple[str, int]]) -> None:
        bound: list[tuple[_Track, int]] = []
        last_ns = -(1 << 62)
        for process, time_ns in points:
            track = self._tracks.get(process)
            at_ns = None if track is None else track.find(time_ns, last_ns)
            if track is None or at_ns is None:
                self.num_ends_left_out += 1
                continue
            bound.append((track, at_ns))
            last_ns = at_ns
        if len(bound) < 2:
            self.num_left_out += 1
            return
        self._num += 1
        ends: list[Event] = [{"ph": "s"}, *({"ph": "t"} for _ in bound[2:]), {"ph": "f", "bp": "e"}]
        for (track, at_ns), end in zip(bound, ends, strict=True):
            self.events.append((at_ns, {**track.place, "cat": category, "name": name, "id": self._num} | end))
