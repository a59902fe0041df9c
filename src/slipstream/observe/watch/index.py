"""The indexes over a run's growing files that the watch page answers from, and the state that the run is in.

Memory is bounded but for 41 bytes per group and 16 per step; nothing is ever written. Files may be missing, torn, or
replaced by a resume at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.core.errors import SlipstreamError
from slipstream.core.recipes import read_toml, resolve
from slipstream.core.run_log import Metrics
from slipstream.observe.accounting import accounting_bytes, read_accounting
from slipstream.observe.attempts import attempt_folders
from slipstream.observe.display import config_summary
from slipstream.observe.health import ALARMS_FILE, Alarm, AlarmSpan, spans
from slipstream.observe.timeline import process_order
from slipstream.observe.tokens import TOKENS_FILE
from slipstream.observe.watch.buckets import BoundedCurve
from slipstream.observe.watch.events import AttemptStretch, EventIndex
from slipstream.observe.watch.rollouts import RolloutIndex, TokenIndex
from slipstream.observe.watch.tail import LineIndex
from slipstream.observe.watch.timelines import TimelineIndex

MARGIN_S = 0.5  # by which clocks of two machines may differ, and lines of one process come late
SILENT_AFTER_S = 20.0
"""Processes write at least once a second while they work: a run that has not for so long stands still, or is gone."""

MAX_NAMES = 1000  # of metrics
AXES = ("step", "version", "wall_s")
MIN_INTERVAL_S = 20.0  # between two verdicts
EARLY_INTERVAL_S = 5.0  # up to step 10: then the sentence changes most
MAX_SHARE = 0.02  # of one core, for accounting while a run goes on
MAX_BYTES = 128_000_000  # that accounting reads

RunLife = Literal["waiting", "running", "silent", "done", "failed", "interrupted"]
OVER = ("done", "failed", "interrupted")


class AlarmIndex(LineIndex[Alarm]):
    """The run's alarms, which are few."""

    kind = Alarm

    def reset(self) -> None:
        self.alarms: list[Alarm] = []

    def take(self, record: Alarm) -> None:
        self.alarms.append(record)

    def spans(self) -> list[AlarmSpan]:
        return spans(self.alarms)


class CurveIndex(LineIndex[Metrics]):
    """`curves` by name over steps: what is measured of version v, and not while a step was trained, lies at step v."""

    kind = Metrics

    def reset(self) -> None:
        self.curves: dict[str, BoundedCurve] = {}

    def take(self, record: Metrics) -> None:
        step = record.get("step")
        if not isinstance(step, int):
            raise ValueError("a line without its step")
        for name, value in record.items():
            is_measured = name not in AXES and isinstance(value, int | float) and not isinstance(value, bool)
            if is_measured and (name in self.curves or len(self.curves) < MAX_NAMES):
                self.curves.setdefault(name, BoundedCurve()).add(float(step), float(value))


@dataclass
class WholeFile:
    """A small file that is replaced as a whole, read again when it has changed."""

    path: Path
    _stamp: tuple[int, int] = (0, 0)
    data: bytes | None = None

    def advance(self) -> bool:
        try:
            stat = self.path.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return False
            self._stamp, self.data = stamp, self.path.read_bytes()
        except OSError:
            if self.data is None:
                return False
            self._stamp, self.data = (0, 0), None
        return True

    @property
    def changed_s(self) -> float:
        return self._stamp[0] * 1e-9


class RunIndex:
    """Call `advance` now and then, from one thread at a time; all else reads what it has found.

    `revision` counts how often something that was known has become void. `end_s` is how far the run's time is known:
    its last event, or, where nothing is decided for long, what its processes have told since.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.events = EventIndex(run_dir / "events.jsonl")
        self.curves = CurveIndex(run_dir / "metrics.jsonl")
        self.rollouts = RolloutIndex(run_dir / "rollouts.jsonl")
        self.tokens = TokenIndex(run_dir / TOKENS_FILE)
        self.alarms = AlarmIndex(run_dir / ALARMS_FILE)
        self.timelines: dict[Path, TimelineIndex] = {}
        self._set_aside: dict[Path, float] = {}  # folders of timelines of earlier attempts -> their mtime when listed
        self.summary_file = WholeFile(run_dir / "summary.json")
        self.config_file = WholeFile(run_dir / "config.toml")
        self.revision = 0
        self.end_s = 0.0
        self.is_caught_up = False
        self.grew_s: float | None = None  # when the newest news came, on the clock of the day
        self.facts: dict[str, str] = {}
        self.summary: dict[str, Any] = {}

    @property
    def indexes(self) -> list[LineIndex[Any]]:
        return [self.events, self.curves, self.alarms, self.tokens, *self.timelines.values(), self.rollouts]

    def advance(self) -> bool:
        """Read at most one piece of each file that may have more; whether there was news."""
        self._find_timelines()
        told_s, revision = self._told_s(), self.revision
        has_news = False
        for index in self.indexes:
            if index.path.parent in self._set_aside and index.tail.offset == index.tail.size():
                continue
            offset = index.tail.offset
            has_news |= (grew := index.advance())
            self.revision += index.tail.offset < offset
            if grew and self.is_caught_up:
                self.grew_s = time.time()
        self.end_s = self._end_s(told_s if self.revision == revision else 0.0)
        if self.summary_file.advance():
            has_news, self.summary = True, _json(self.summary_file.data)
        if self.config_file.advance():
            has_news, self.facts = True, self._facts()
        if not has_news and not self.is_caught_up:
            self.is_caught_up = True
            changed = [_changed_s(index.path) for index in self.indexes]
            self.grew_s = self.grew_s or max(changed, default=0.0) or None
        return has_news

    def _find_timelines(self) -> None:
        folders = [self.run_dir / "timeline"]
        for folder in (attempt / "timeline" for attempt in attempt_folders(self.run_dir)):
            if (changed_s := _changed_s(folder)) != self._set_aside.get(folder):
                self._set_aside[folder] = changed_s
                folders.append(folder)
        for path in (path for folder in folders for path in folder.glob("*.jsonl")):
            if path not in self.timelines:
                self.timelines[path] = TimelineIndex(path)

    def _facts(self) -> dict[str, str]:
        """Describe the run in a few words; of a configuration that this version cannot read, by the recipe alone."""
        path = self.config_file.path
        with suppress(SlipstreamError, OSError):
            return config_summary(resolve(path))
        with suppress(SlipstreamError, OSError):
            return {"recipe": str(read_toml(path).get("recipe", ""))}
        return {}

    @property
    def progress(self) -> float:
        """Share of the files' bytes that are indexed."""
        sizes = [(index.tail.offset, index.tail.size()) for index in self.indexes]
        total = sum(size for _, size in sizes)
        return min(1.0, sum(offset for offset, _ in sizes) / total) if total else 1.0

    @property
    def num_damaged(self) -> int:
        return sum(index.num_damaged for index in self.indexes)

    def _told_s(self) -> float:
        """Return the time up to which the processes of the present attempt have reported."""
        if not self.events.stretches:
            return 0.0
        stretch = self.events.stretches[-1]
        told_ns = max((index.latest_ns for index in self._timelines_of(stretch)), default=0)
        return stretch.run_s(told_ns * 1e-9)

    def _end_s(self, told_s: float) -> float:
        """`told_s` was read before the events were: whatever happened until then is among them, if all are read."""
        is_read = self.events.tail.offset >= self.events.tail.size()
        return max(self.events.end_s, told_s - MARGIN_S if is_read else 0.0)

    def life(self) -> tuple[RunLife, float]:
        """Return the state of the run, and for how many seconds there has been no news.

        `summary.json` is written last. One that is older than the newest event is that of an attempt before.
        """
        silent_s = max(0.0, time.time() - self.grew_s) if self.grew_s is not None else 0.0
        status = self.summary.get("status")
        if not self.events.stretches:  # there is no RL, or not yet
            return status if status in OVER else "waiting", silent_s
        if status in OVER and self.summary.get("steps") == self.events.loop.version:
            is_newest = self.summary_file.changed_s >= _changed_s(self.events.path) - 0.5
            if is_newest or silent_s > SILENT_AFTER_S:
                return status, silent_s
        return ("silent" if silent_s > SILENT_AFTER_S else "running"), silent_s

    def lanes(self, start_s: float, end_s: float) -> Iterator[tuple[TimelineIndex, AttemptStretch, int, int]]:
        """Timelines that are of the window of the run's time, each with its part of the window in nanoseconds.

        A stretch has the folder whose controller had started just before its first event.
        """
        stretches = self.events.stretches
        for number, stretch in enumerate(stretches):
            is_last = number == len(stretches) - 1
            until_s = end_s if is_last else min(end_s, stretches[number + 1].start_s)
            from_s = start_s if number == 0 else max(start_s, stretch.start_s)
            if from_s < until_s:
                start_ns, end_ns = (round((at - stretch.start_s + stretch.raw_s) * 1e9) for at in (from_s, until_s))
                for index in self._timelines_of(stretch):
                    yield index, stretch, start_ns, end_ns

    def _timelines_of(self, stretch: AttemptStretch) -> list[TimelineIndex]:
        ahead_s = {
            path.parent: stretch.raw_s - index.lives[0].first_ns * 1e-9
            for path, index in self.timelines.items()
            if path.stem == "controller" and index.lives
        }
        near = [folder for folder, seconds in ahead_s.items() if 0 <= seconds < 3600]
        folder = min(near, key=ahead_s.__getitem__, default=None)
        return [index for path, index in self.timelines.items() if path.parent == folder and index.lives]

    @property
    def processes(self) -> list[str]:
        """Return the names of the processes of all attempts, in the order of the loop."""
        return sorted({index.process for index in self.timelines.values() if index.lives}, key=process_order)

    @property
    def num_attempts(self) -> int:
        """Attempts that were abandoned for a later one, and the present one."""
        return len(attempt_folders(self.run_dir)) + 1


class LiveVerdict:
    """The sentence that says which side starves; None where it cannot be told, and before it is.

    `steps` says of how many steps it is; None: of the whole run. It is that of `summary.json` once a run is over, else
    from its files. Accounting reads all timelines and events, so it is done beside the page's answers, seldom, only
    where they have changed, and not at all for a run that is large.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.sentence: str | None = None
        self.steps: int | None = None
        self._due_s = 0.0
        self._size = -1  # of the files that `sentence` was told by

    def update(self, index: RunIndex, *, now_s: float) -> bool:
        """Whether there is a new one; takes as long as accounting does."""
        before = self.sentence, self.steps
        is_over = index.life()[0] in OVER
        if self.sentence is not None and self.steps is None and not is_over:
            self.sentence, self._size = None, -1  # the run was resumed: that was the verdict on the attempt before
        balance = index.summary.get("balance") if is_over else None
        if isinstance(balance, dict) and isinstance(balance.get("verdict"), str):
            self.sentence, self.steps = balance["verdict"] or None, None
        elif now_s >= self._due_s and (size := accounting_bytes(self.run_dir)) <= MAX_BYTES:
            if size != self._size:
                started_s, steps = time.thread_time(), index.events.loop.version
                with suppress(SlipstreamError, OSError):  # files that are being replaced, or are damaged
                    self.sentence, self.steps = read_accounting(self.run_dir).balance.verdict or None, steps
                    self._size = size
                least_s = MIN_INTERVAL_S if steps > 10 else EARLY_INTERVAL_S
                self._due_s = now_s + max(least_s, (time.thread_time() - started_s) / MAX_SHARE)
            self.steps = None if is_over and size == self._size else self.steps
        return (self.sentence, self.steps) != before


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _json(data: bytes | None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data or b"{}", type=dict[str, Any])
    except (ValueError, RecursionError):
        return {}
