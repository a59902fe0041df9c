"""Imported by every Python process that has this folder in PYTHONPATH: counts a run's spans, or switches them off.

TIMELINE_HOOK = "count": each process notes in TIMELINE_COUNTS/<process> how many spans it had closed when it wrote.
TIMELINE_HOOK = "off": spans cost nothing, and no timeline is written. `benchmarks/overhead.py --timeline` does both.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


class _Hook(importlib.abc.MetaPathFinder):
    """Replaces `Timeline` as soon as its module is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "slipstream.observe.timeline":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        load = loader.exec_module

        def load_and_replace(module: Any) -> None:
            load(module)
            module.Timeline = {"count": _counting, "off": _off}[os.environ["TIMELINE_HOOK"]](module.Timeline)

        loader.exec_module = load_and_replace
        return spec


def _counting(timeline: Any) -> Any:
    class Counting(timeline):
        num_spans = 0

        def _cut(self, now_s: float) -> None:
            self.num_spans += 1
            super()._cut(now_s)

        def _write(self) -> None:
            with (Path(os.environ["TIMELINE_COUNTS"]) / self.process).open("a") as out:
                out.write(f"{self._now_s()} {self.num_spans} {len(self._buffer)}\n")
            super()._write()

    return Counting


def _off(timeline: Any) -> Any:
    nothing = contextlib.nullcontext()

    class Off(timeline):
        def __init__(self, process: str, path: Any, clock: Any, **more: Any) -> None:
            super().__init__(process, None, clock, **more)

        def span(self, state: str, **args: Any) -> Any:
            return nothing

        def idle(self) -> Any:
            return nothing

        def did(self, units: int) -> None: ...

        def set_idle_state(self, state: str) -> None: ...

        def backdate(self, state: str, since_s: float) -> None: ...

        def instant(self, name: str, **args: Any) -> None: ...

        def totals(self) -> dict[str, float]:
            return {}

        def close(self) -> None: ...

    return Off


if "TIMELINE_HOOK" in os.environ:
    sys.meta_path.insert(0, _Hook())
