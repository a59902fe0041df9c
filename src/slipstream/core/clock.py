"""Wall clock and virtual clock behind one interface; the loop never calls `time` directly."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a monotonic axis shared by all processes of one machine."""

    def now_s(self) -> float: ...


class WallClock:
    """`time.monotonic`, which on Linux is one axis for every process of the machine."""

    def now_s(self) -> float:
        return time.monotonic()


class ShiftedClock:
    """Another machine's axis: this machine's clock plus `offset_s`, as exact as their times of day agree."""

    def __init__(self, offset_s: float) -> None:
        self._offset_s = offset_s

    def now_s(self) -> float:
        return time.monotonic() + self._offset_s


def wall_minus_clock_s() -> float:
    """Return the time of day (seconds since 1970) minus `WallClock`'s; it serves to compare two machines' clocks."""
    return time.time() - time.monotonic()


class VirtualClock:
    """A clock that moves only by `advance`, for tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot go back by {seconds} s")
        self._now_s += seconds
