"""Spans that note what they hear."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipstream.core.spans import NoSpans


class Heard(NoSpans):
    """`spans`: (state, arguments) as they were opened; `work`: state -> pieces and units done in it; and more."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, dict[str, Any]]] = []
        self.work: dict[str, tuple[int, int]] = {}
        self.instants: list[tuple[str, dict[str, Any]]] = []
        self.counters: list[tuple[str, dict[str, float]]] = []
        self.idle = "idle"
        self._open: list[str] = []

    @contextmanager
    def span(self, state: str, **args: Any) -> Iterator[None]:
        self.spans.append((state, args))
        self._open.append(state)
        yield
        self._open.pop()

    def did(self, units: int) -> None:
        count, so_far = self.work.get(self._open[-1], (0, 0))
        self.work[self._open[-1]] = (count + 1, so_far + units)

    def instant(self, name: str, **args: Any) -> None:
        self.instants.append((name, args))

    def counter(self, name: str, **values: float) -> None:
        self.counters.append((name, values))

    def set_idle_state(self, state: str) -> None:
        self.idle = state

    @property
    def states(self) -> set[str]:
        return {state for state, _ in self.spans}
