"""Summaries of a run of any length in memory of a fixed size: resolution is halved when there is no more room."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

NUM_BUCKETS = 1024
NUM_POINTS = 500


@dataclass
class Buckets:
    """Amounts by name over equal stretches of an axis from 0 that grows: when it is full, neighbours are joined.

    Identity: `sum(of(name))` is the sum of all amounts added under `name`.
    """

    width: float
    capacity: int = NUM_BUCKETS
    _sums: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    end: float = 0.0

    def add(self, name: str, start: float, end: float, amount: float) -> None:
        """Spread `amount` evenly over [start, end], which may be one point; what lies before 0 is put at 0."""
        start, end = max(start, 0.0), max(end, 0.0)
        while end >= self.width * self.capacity:
            self._halve()
        self.end = max(self.end, end)
        sums = self._sums.get(name)
        if sums is None:
            sums = self._sums[name] = np.zeros(self.capacity)
        first, last = int(start / self.width), int(end / self.width)
        if first >= last:
            sums[first] += amount
            return
        density = amount / (end - start)
        sums[first] += density * ((first + 1) * self.width - start)
        sums[first + 1 : last] += density * self.width
        sums[last] += density * (end - last * self.width)

    def of(self, name: str) -> np.ndarray:
        """The sums of each stretch up to the last one that was reached."""
        return self._sums[name][: int(self.end / self.width) + 1]

    @property
    def names(self) -> list[str]:
        return list(self._sums)

    def _halve(self) -> None:
        self.width *= 2
        half = self.capacity // 2
        for name, sums in self._sums.items():
            joined = np.zeros(self.capacity)
            joined[:half] = sums[0::2] + sums[1::2]
            self._sums[name] = joined


@dataclass
class BoundedCurve:
    """Points (x ascending, y) of any number, as at most `capacity` of (mean x, mean y, least y, greatest y)."""

    capacity: int = NUM_POINTS
    stride: int = 1  # values that make one point
    _columns: tuple[array[float], ...] = field(default_factory=lambda: tuple(array("d") for _ in range(4)), repr=False)
    _open: list[tuple[float, float]] = field(default_factory=list, repr=False)

    def add(self, x: float, y: float) -> None:
        self._open.append((x, y))
        if len(self._open) >= self.stride:
            self._append(self._open)
            self._open = []

    def points(self) -> list[tuple[float, float, float, float]]:
        """(x, mean, least, greatest), the part that is not full yet included."""
        points = list(zip(*self._columns, strict=True))
        return [*points, _point(self._open)] if self._open else points

    def _append(self, values: list[tuple[float, float]]) -> None:
        for column, value in zip(self._columns, _point(values), strict=True):
            column.append(value)
        if len(self._columns[0]) >= self.capacity:
            self.stride *= 2
            x, y, least, greatest = (np.frombuffer(column).reshape(-1, 2) for column in self._columns)
            joined = x.mean(axis=1), y.mean(axis=1), least.min(axis=1), greatest.max(axis=1)
            self._columns = tuple(array("d", column) for column in joined)


def _point(values: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    ys = [y for _, y in values]
    return sum(x for x, _ in values) / len(values), sum(ys) / len(ys), min(ys), max(ys)
