"""What a stage tells whoever watches, and the record that says it is done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.disk import replace_file
from slipstream.core.recipes import stage_dir
from slipstream.observe.display import Display

RECORD = "stage.json"


class Progress(Protocol):
    """Hears of a stage as it goes; must return at once."""

    def phase(self, name: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None: ...

    def note(self, text: str) -> None: ...


class Watcher(Progress, Protocol):
    """What is shown at the end, besides."""

    def evaluation_table(self, evaluation: Mapping[str, Any]) -> None: ...


class Quiet:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def phase(self, name: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None: ...

    def note(self, text: str) -> None: ...

    def evaluation_table(self, evaluation: Mapping[str, Any]) -> None: ...


def watch(config: RunConfig, stage: str, *, display: bool) -> Display | Quiet:
    """The terminal, or nobody; a context manager."""
    if not display:
        return Quiet()
    return Display({"stage": stage, "recipe": config.recipe}, steps=1, max_staleness=config.staleness_bound)


def record_path(run_dir: Path, stage: str) -> Path:
    return stage_dir(run_dir, stage) / RECORD


def write_record(run_dir: Path, stage: str, *, started_s: float, **values: Any) -> dict[str, Any]:
    """`stage.json` in the stage's folder, written last: the stage is done. Returns what it says."""
    record = {"stage": stage, "seconds": time.monotonic() - started_s, **values}
    replace_file(record_path(run_dir, stage), msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    return record


def read_record(run_dir: Path, stage: str) -> dict[str, Any]:
    record: dict[str, Any] = msgspec.json.decode(record_path(run_dir, stage).read_bytes())
    return record
