"""An index over the timeline of one process: what it did in any window, in full or, where that is much, in outline."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from slipstream.observe.timeline import Life, Record, Slice, gone, times_ns
from slipstream.observe.watch.buckets import Buckets
from slipstream.observe.watch.tail import LineIndex

FIRST_SPACING = 128  # lines between two marks, as long as there are few
MAX_MARKS = 4096
MAX_WINDOW_BYTES = 2_000_000
"""Of one file, for one answer; a window with more is shown in outline."""


class TimelineIndex(LineIndex[Record]):
    """`totals` are seconds by state over buckets from the first record on (`origin_ns`, on the machine's clock)."""

    kind = Record

    @property
    def process(self) -> str:
        return self.path.stem

    def reset(self) -> None:
        self.origin_ns: int | None = None
        self.lives: list[Life] = []
        self.totals = Buckets(width=0.25)
        self._marks: list[tuple[int, int]] = []  # latest end so far, and where the next line begins
        self._spacing = FIRST_SPACING
        self._num_lines = 0
        self.latest_ns = 0

    def take(self, record: Record) -> None:
        first_ns, last_ns = times_ns(record)
        if self.origin_ns is None:
            self.origin_ns = first_ns
        if self._num_lines % self._spacing == 0:
            self._mark(self.begin)
        self._num_lines += 1
        self.latest_ns = max(self.latest_ns, last_ns)
        Life.extend(self.lives, record)
        if isinstance(record, Slice):
            start_s, end_s = (first_ns - self.origin_ns) * 1e-9, (last_ns - self.origin_ns) * 1e-9
            self.totals.add(record.state, start_s, end_s, record.state_ns * 1e-9)
            for state, ns in record.also.items():
                self.totals.add(state, start_s, end_s, ns * 1e-9)

    def _mark(self, offset: int) -> None:
        self._marks.append((self.latest_ns, offset))
        if len(self._marks) > MAX_MARKS:
            self._marks = self._marks[::2]
            self._spacing *= 2

    def slices(self, start_ns: int, end_ns: int) -> list[Slice] | None:
        """Return the slices that lie in the window, whole ones; None where that is too much to read."""
        begin, end = self._offset_before(start_ns), self._offset_before(end_ns)
        if end - begin > MAX_WINDOW_BYTES:
            return None
        is_empty = not self._marks or self.latest_ns <= start_ns
        found = (one for one in self.lines_within(begin, 0 if is_empty else self.tail.offset) if isinstance(one, Slice))
        return [one for one in takewhile(lambda one: one.start_ns < end_ns, found) if one.end_ns > start_ns]

    def _offset_before(self, time_ns: int) -> int:
        """Return the start of a line before which everything had ended by `time_ns`."""
        index = bisect.bisect_right(self._marks, (time_ns, 1 << 62)) - 1
        return self._marks[index][1] if index >= 0 else 0

    def gone(self, start_ns: int, end_ns: int) -> list[tuple[str, int, int]]:
        """(state, start, end) within the window: before, between and after the lives, as far as that is known.

        What comes after the last record of a process that has not said that it ends is nobody's yet.
        """
        found = gone(self.lives, start_ns, end_ns)
        return [(s, max(a, start_ns), min(b, end_ns)) for s, a, b in found if max(a, start_ns) < min(b, end_ns)]

    def outline(self, start_ns: int, end_ns: int, count: int) -> Iterator[Bar]:
        """At most about `count` pieces of the window, each in the state that took most of it."""
        if self.origin_ns is None:
            return
        width = self.totals.width
        columns = {name: self.totals.of(name) for name in self.totals.names}
        first = max(0, int((start_ns - self.origin_ns) * 1e-9 / width))
        last = min(int(self.totals.end / width), int((end_ns - self.origin_ns) * 1e-9 / width))
        stride = max(1, -(-(last + 1 - first) // count))
        for index in range(first, last + 1, stride):
            seconds = {name: float(column[index : index + stride].sum()) for name, column in columns.items()}
            state = max(seconds, key=lambda name: seconds[name])
            if seconds[state] > 0:
                begin = self.origin_ns + round(index * width * 1e9)
                share = seconds[state] / (stride * width)
                yield begin, begin + round(stride * width * 1e9), state, share, {}, {}


Bar = tuple[int, int, str, float, dict[str, Any], dict[str, float]]
"""Start, end (ns), the state, its share of that time, arguments, and the shares of other states."""


def bars(slices: list[Slice], start_ns: int, end_ns: int, count: int) -> list[Bar]:
    """Slices as they are where they are few, else the state that most of each of `count` parts of the window was in."""
    found: list[Bar] = []
    if len(slices) <= count:
        for one in slices:
            if (length := one.end_ns - one.start_ns) > 0:
                also = {state: round(ns / length, 3) for state, ns in one.also.items()}
                found.append((one.start_ns, one.end_ns, one.state, one.state_ns / length, one.args, also))
        return found
    width = max(1, (end_ns - start_ns) // count)
    parts: dict[int, dict[str, int]] = {}
    for one in slices:
        begin, end = max(one.start_ns, start_ns), min(one.end_ns, end_ns)
        for index in range((begin - start_ns) // width, (end - start_ns - 1) // width + 1):
            left = start_ns + index * width
            part = parts.setdefault(index, {})
            part[one.state] = part.get(one.state, 0) + min(end, left + width) - max(begin, left)
    for index, part in sorted(parts.items()):
        state = max(part, key=part.__getitem__)
        share, left = min(1.0, part[state] / width), start_ns + index * width
        if found and found[-1][1:3] == (left, state) and abs(found[-1][3] - share) < 0.2:
            found[-1] = (found[-1][0], left + width, *found[-1][2:])
        else:
            found.append((left, left + width, state, share, {}, {}))
    return found
