"""The states of a process: every second of it belongs to exactly one (`observe/states.py` lists them)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Spans(Protocol):
    """The record of what an executor does and when; `observe.timeline.Timeline` keeps it."""

    def span(self, state: str, **args: Any) -> AbstractContextManager[None]:
        """Put the process into `state` for the time of this context; `args` (JSON types) are shown with it."""
        ...

    def did(self, units: int) -> None:
        """Count one piece of work, of `units` tokens, for the innermost open span."""
        ...

    def instant(self, name: str, **args: Any) -> None:
        """Record that `name` happened now."""
        ...

    def counter(self, name: str, **values: float) -> None:
        """Record the present values of a quantity."""
        ...

    def set_idle_state(self, state: str) -> None:
        """Set the state in which the process is from now on whenever `step` has nothing to do."""
        ...


class NoSpans:
    """Spans that record nothing, for work outside of a run."""

    def span(self, state: str, **args: Any) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def did(self, units: int) -> None: ...

    def instant(self, name: str, **args: Any) -> None: ...

    def counter(self, name: str, **values: float) -> None: ...

    def set_idle_state(self, state: str) -> None: ...
