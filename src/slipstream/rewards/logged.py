"""Numbers and columns that reward functions log beside rewards, by TRL's keywords `log_metric` and `log_extra`."""

from __future__ import annotations

import math
from contextvars import ContextVar
from typing import Any, SupportsFloat

import msgspec

from slipstream.core.plain import shortened

Cell = str | bool | int | float | None
MAX_LOGGED_NAMES, MAX_LOGGED_NAME_CHARS = 8, 100
MAX_CELLS = 1024
"""Values of all columns of one call: a worker's answer is small."""
MAX_CELL_CHARS = 8192
"""Characters of a column's values in one call, shared among its completions."""


class Logged(msgspec.Struct, frozen=True):
    """Metrics (means by name) and columns (a value for each completion) that one call has logged."""

    metrics: dict[str, float] = {}
    columns: dict[str, list[Cell]] = {}

    def fault(self, count: int) -> str | None:
        """Say what no honest worker sends of a call for `count` completions; None where all is well."""
        names = [*self.metrics, *self.columns]
        is_named = all(0 < len(name) <= MAX_LOGGED_NAME_CHARS and name.isprintable() for name in names)
        is_whole = all(len(values) == count for values in self.columns.values())
        is_finite = all(math.isfinite(value) for value in self.metrics.values())
        is_small = max(len(self.metrics), len(self.columns)) <= MAX_LOGGED_NAMES
        return None if is_named and is_whole and is_finite and is_small else "what it logged is malformed"


class RewardLog:
    """Takes what the functions of one call log for its `count` completions."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._metrics: dict[str, list[float]] = {}
        self._columns: dict[str, list[Cell]] = {}

    def log_metric(self, name: str, value: SupportsFloat) -> None:
        """Log a number, of which metrics.jsonl has the mean over the calls of a step; not finite ones are left out."""
        self._check_name(name, self._metrics, "log_metric")
        if math.isfinite(number := float(value)):
            self._metrics.setdefault(name, []).append(number)

    def log_extra(self, column: str, values: Any) -> None:
        """Log a value for each completion, which its line of rollouts.jsonl has; what is no number is text there."""
        self._check_name(column, self._columns, "log_extra")
        given = list(values)
        if len(given) != self._count:
            raise ValueError(f"log_extra('{column}', ...) got {len(given)} values for {self._count} completions")
        if (len(self._columns) + 1) * self._count > MAX_CELLS:
            raise ValueError(f"log_extra takes {MAX_CELLS} values in all columns of a call")
        self._columns[column] = [self._cell(value) for value in given]

    def all(self) -> Logged:
        """Return what there is to tell."""
        return Logged(
            {name: math.fsum(one / len(of) for one in of) for name, of in self._metrics.items()}, self._columns
        )

    def _check_name(self, name: object, taken: dict[str, Any], what: str) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_LOGGED_NAME_CHARS or not name.isprintable():
            raise ValueError(f"{what} takes a name of up to {MAX_LOGGED_NAME_CHARS} characters")
        if name not in taken and len(taken) == MAX_LOGGED_NAMES:
            raise ValueError(f"{what} takes {MAX_LOGGED_NAMES} names in a call")

    def _cell(self, value: Any) -> Cell:
        if hasattr(value, "item") and hasattr(value, "ndim") and value.ndim == 0:
            value = value.item()  # a number of numpy's or torch's
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and abs(value) < 2**63:
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        text = str(value).encode("utf-8", "replace").decode("utf-8")
        return shortened(text, max(4, MAX_CELL_CHARS // self._count))


NOTHING = Logged()
CURRENT: ContextVar[RewardLog] = ContextVar("reward_log")
"""The log of the call that this thread or task makes."""
