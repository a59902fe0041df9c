"""The progress of a stage for display, its times, and the record that marks it as done."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from rich.console import Console

from slipstream.core.background import repeated
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.disk import disk_errors, replace_file, sync_files
from slipstream.core.files import load_json
from slipstream.core.recipes import stage_dir
from slipstream.observe.display import Display
from slipstream.observe.states import UNLABELLED
from slipstream.observe.timeline import ABSENT, Timeline, kept_s

RECORD = "stage.json"
TELL_EVERY_S = 2.0


@contextmanager
def told_of(what: str, *, display: bool) -> Iterator[None]:
    """Say every `TELL_EVERY_S` that `what` goes on, with the seconds; from a thread, as what it is about takes all."""
    console, started_s = Console(stderr=True), time.monotonic()

    def tell() -> None:
        console.print(f"{what}, {time.monotonic() - started_s:.0f} s", highlight=False, markup=False)

    with repeated(tell, every_s=TELL_EVERY_S) if display else nullcontext():
        yield


class StageProgress(Protocol):
    """Receives the progress of a stage; must return at once."""

    def phase(self, name: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None: ...

    def note(self, text: str) -> None: ...


class Quiet:
    """A watcher that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def phase(self, name: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None: ...

    def note(self, text: str) -> None: ...

    def evaluation_table(self, evaluation: Mapping[str, Any]) -> None: ...


def watch(config: RunConfig, stage: str, *, display: bool) -> Display | Quiet:
    """Return the terminal's display, or a quiet one; a context manager."""
    if not display:
        return Quiet()
    return Display({"stage": stage, "recipe": config.recipe}, steps=1, max_staleness=config.staleness_bound)


class StageTimes:
    """Seconds of a stage by state, from now on: states as in `observe/states.py`."""

    def __init__(self) -> None:
        self._clock = WallClock()
        self._started_s, self._kept_s = self._clock.now_s(), kept_s()
        self._timeline = Timeline("stage", None, self._clock)

    def span(self, state: str) -> AbstractContextManager[None]:
        """Count the time inside this context for `state`."""
        return self._timeline.span(state)

    def so_far(self) -> dict[str, Any]:
        """Return `seconds`, `accounting`: state -> seconds, which sum to them, and `kept_s`: without a core."""
        ended_s = self._clock.now_s()
        accounting = self._timeline.accounting(self._started_s, ended_s)
        absent_s = accounting.pop(ABSENT, 0.0)  # until the timeline was there
        accounting[UNLABELLED] += absent_s
        return {"seconds": ended_s - self._started_s, "accounting": accounting, "kept_s": kept_s() - self._kept_s}


def fresh_folder(run_dir: Path, stage: str) -> Path:
    """Make the stage's folder, without what an interrupted attempt left in it."""
    folder = stage_dir(run_dir, stage)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def record_path(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / RECORD


def recent_mean(values: Sequence[float]) -> float:
    """Return the mean of the last ten values but NaN: a small batch at a pass's end may have nothing to compare."""
    last = [value for value in values[-10:] if not math.isnan(value)]
    return math.fsum(last) / len(last) if last else math.nan


def write_record(run_dir: Path, stage: str, *, times: StageTimes, **values: Any) -> dict[str, Any]:
    """Write `stage.json` into the stage's folder, last: the stage is done, and on the disk. Return its content."""
    record, path = {"stage": stage, **times.so_far(), **values}, record_path(run_dir, stage)
    for folder in (path.parent / "model", path.parent):
        if folder.is_dir():
            with disk_errors(folder):
                sync_files(folder)
    replace_file(path, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    return record


def read_record(run_dir: Path, stage: str) -> dict[str, Any]:
    return load_json(record_path(run_dir, stage), dict[str, Any])
