"""Imported by every Python process that has this folder in PYTHONPATH: it changes the timeline of a run's processes.

TIMELINE_HOOK = "count": each process notes in TIMELINE_COUNTS/<process> how many spans it had closed when it wrote.
TIMELINE_HOOK = "off": spans cost nothing, and no timeline is written. `benchmarks/overhead.py --timeline` does both.
TIMELINE_HOOK = "cpu": each process writes the CPU seconds of each of its states, of all its threads, to
TIMELINE_COUNTS/<process>; what a decode step computes has states of its own. `benchmarks/overhead.py` reads them.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

COMPUTED = {  # module -> (object, function, state): the parts of a decode step that are arithmetic
    "slipstream.models.transformer": [
        ("Transformer", "forward", "model"),
        ("Transformer", "prefill", "model"),
        ("Transformer", "logits", "model"),
    ],
    "slipstream.generator.slot_runner": [("", "uniform", "sample"), ("", "sample_tokens", "sample")],
}


class _Hook(importlib.abc.MetaPathFinder):
    """Replaces what is to be replaced as soon as its module is imported."""

    def __init__(self, mode: str) -> None:
        self._waiting: dict[str, Any] = {"slipstream.observe.timeline": _replace_timeline}
        if mode == "cpu":
            self._waiting |= dict.fromkeys(COMPUTED, _label)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        change = self._waiting.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        load = loader.exec_module

        def load_and_change(module: Any) -> None:
            load(module)
            change(module)

        loader.exec_module = load_and_change
        return spec


def _replace_timeline(module: Any) -> None:
    module.Timeline = {"count": _counting, "off": _off, "cpu": _cpu}[os.environ["TIMELINE_HOOK"]](module.Timeline)


def _label(module: Any) -> None:
    """Let the functions of COMPUTED be spans of their process's timeline, inside of those of generating."""
    for owner, name, state in COMPUTED[module.__name__]:
        place = getattr(module, owner) if owner else module
        setattr(place, name, _labelled(getattr(place, name), state))


def _labelled(function: Any, state: str) -> Any:
    @functools.wraps(function)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        timeline = _timelines.get(threading.get_ident())
        if timeline is None or timeline.innermost not in ("decode", "prefill", "re_prefill", "evaluate", "drain"):
            return function(*args, **kwargs)
        with timeline.span(state):
            return function(*args, **kwargs)

    return labelled


_timelines: dict[int, Any] = {}  # thread -> its timeline


def _cpu(timeline: Any) -> Any:
    class Cpu(timeline):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen_s = time.process_time()
            self.cpu_s = Counter(start_up=self.seen_s)
            super().__init__(*args, **kwargs)
            _timelines[threading.get_ident()] = self

        @property
        def innermost(self) -> str:
            return self._stack[-1].state if self._stack else ""

        def _cut(self, now_s: float) -> None:
            used_s = time.process_time()
            self.cpu_s[self._stack[-1].state] += used_s - self.seen_s
            self.seen_s = used_s
            super()._cut(now_s)

        def close(self) -> None:
            super().close()
            (Path(os.environ["TIMELINE_COUNTS"]) / self.process).write_text(json.dumps(self.cpu_s))

    return Cpu


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
    sys.meta_path.insert(0, _Hook(os.environ["TIMELINE_HOOK"]))
