"""Write `metrics.jsonl`: one JSON line per step, and one per evaluation. `metrics.toml` says what the names mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.core.jsonl import JsonlWriter, finite
from slipstream.core.plain import flat
from slipstream.core.run_log import Metrics

LEAST_S = 0.01
"""A rate is told of so many seconds or more: in less, the time between two events is that of their messages."""


def rate(count: float, seconds: float) -> float | None:
    """`count` over `seconds`; None where these are fewer than `LEAST_S`."""
    return count / seconds if seconds >= LEAST_S else None


class MetricsWriter:
    """Appends flat lines of numbers and strings; each is on its way to the disk when `write` returns."""

    def __init__(self, path: Path, *, sinks: Sequence[Callable[[Metrics], None]] = ()) -> None:
        self._writer = JsonlWriter(path)
        self._sinks = sinks

    def write(self, *, step: int, version: int, wall_s: float, metrics: Mapping[str, Any]) -> Metrics:
        """Write one line to the file and to all sinks, and return it.

        Nested mappings are flattened with `/`; nan and inf, which JSON cannot say, become null.
        """
        line = {"step": step, "version": version, "wall_s": wall_s} | flatten(metrics)
        self._writer.write(line)
        for sink in self._sinks:
            sink(line)
        return line

    def sync(self) -> None:
        """Return once every line is on the disk."""
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def flatten(metrics: Mapping[str, Any]) -> Metrics:
    """`{"a": {"b": 1}}` as `{"a/b": 1}`, with None for nan and inf."""
    return {name: finite(value) for name, value in flat(metrics, "/").items()}
