"""The metrics of a run of any length as curves of bounded size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slipstream.observe.watch.buckets import Curve
from slipstream.observe.watch.lines import LineIndex

MAX_NAMES = 1000
AXES = ("step", "version", "wall_s")


class CurveIndex(LineIndex):
    """`curves` by name over steps: what is measured of version v, and not while a step was trained, lies at step v."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reset()

    def reset(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.last: dict[str, Any] = {}

    def take(self, line: bytes, offset: int) -> None:  # noqa: ARG002 - lines are not read again
        try:
            found = msgspec.json.decode(line, type=dict[str, Any])
        except (ValueError, RecursionError):
            self.num_damaged += 1
            return
        step = found.get("step")
        if not isinstance(step, int):
            self.num_damaged += 1
            return
        for name, value in found.items():
            if name in AXES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if name not in self.curves and len(self.curves) >= MAX_NAMES:
                continue
            self.curves.setdefault(name, Curve()).add(float(step), float(value))
        self.last.update({name: found[name] for name in AXES if name in found})
