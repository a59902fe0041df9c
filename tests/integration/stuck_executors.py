"""Executors that never come back: from `init`, and from `step`."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

from slipstream.core.executor import Context, Executor
from slipstream.core.service_messages import Ready


class Stuck(Executor):
    """Waits for ever in `where`, and leaves a file when it begins to. Amid `init` no thread of Python can run."""

    inputs, outputs = ("completions",), ("rollouts",)
    is_finished = False

    def __init__(self, where: str, mark: str) -> None:
        self.where, self.mark = where, mark

    def init(self, context: Context) -> None:
        if self.where == "init":
            Path(self.mark).touch()
            ctypes.PyDLL(None).sleep(100_000)  # with the interpreter's lock, as an import of a library may
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        Path(self.mark).touch()
        time.sleep(100_000)
        return True
