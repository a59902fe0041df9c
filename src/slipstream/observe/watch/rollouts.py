"""Indexes over `rollouts.jsonl` and `tokens.jsonl`: where the lines of each group lie, to read any of them at once."""

from __future__ import annotations

import bisect
import struct
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slipstream.core.run_log import Outcome, RolloutLine
from slipstream.observe.tokens import TokenHead, TokenLine
from slipstream.observe.watch.tail import LineIndex, records_within

MAX_GROUP_BYTES = 8_000_000
MAX_AHEAD = 1_000_000  # how far ordinals may be ahead of how many groups there are, before a line is taken for damaged
OUTCOMES: tuple[Outcome, ...] = ("trained", "skipped", "failed")


class _Head(msgspec.Struct, frozen=True):
    ordinal: int
    step: int | None
    outcome: Outcome
    reward: float | None = None


class GroupRow(msgspec.Struct, frozen=True):
    """A group in the file: `step` is null for one that was dropped."""

    row: int
    ordinal: int
    step: int | None
    outcome: Outcome
    count: int
    mean_reward: float | None


class _Place(NamedTuple):
    """A group's lines in the file; `latest` is the last step that trained this group or one before it."""

    ordinal: int
    begin: int
    end: int
    step: int
    latest: int
    size: int
    outcome: int
    reward: float  # the sum


_PLACE = struct.Struct("<qqqiiibd")


class RolloutIndex(LineIndex[_Head]):
    """Groups in the order of their fates, 45 bytes each: whatever was said in between is read when it is asked for."""

    kind = _Head

    def reset(self) -> None:
        self._places = bytearray()
        self._row_of = array("i")  # ordinal -> row, -1 where there is none

    @property
    def num_groups(self) -> int:
        return len(self._places) // _PLACE.size

    def _place(self, row: int) -> _Place:
        return _Place(*_PLACE.unpack_from(self._places, row * _PLACE.size))

    def take(self, record: _Head) -> None:
        step = -1 if record.step is None else record.step
        if not 0 <= record.ordinal < MAX_AHEAD + 4 * self.num_groups or not -1 <= step < 1 << 31:
            raise ValueError(f"group {record.ordinal} of step {record.step} behind {self.num_groups}")
        place = self._place(self.num_groups - 1) if self._places else None
        if place is None or place.ordinal != record.ordinal:
            latest = max(step, -1 if place is None else place.latest)
            outcome = OUTCOMES.index(record.outcome)
            place = _Place(record.ordinal, self.begin, self.end, step, latest, 0, outcome, 0.0)
            self._row_of.extend(array("i", [-1]) * (record.ordinal + 1 - len(self._row_of)))
            self._row_of[record.ordinal] = self.num_groups
            self._places += bytes(_PLACE.size)
        reward = place.reward + (record.reward or 0.0)
        place = place._replace(end=self.end, size=place.size + 1, reward=reward)
        _PLACE.pack_into(self._places, len(self._places) - _PLACE.size, *place)

    def row_of(self, ordinal: int) -> int | None:
        """The row of a group, None for one whose fate is not known."""
        row = self._row_of[ordinal] if 0 <= ordinal < len(self._row_of) else -1
        return None if row < 0 else row

    def row_of_step(self, step: int) -> int:
        """The first row that `step` trained, or of the first step after it; all rows where there is none."""
        return bisect.bisect_left(range(self.num_groups), step, key=lambda row: self._place(row).latest)

    def group(self, row: int) -> GroupRow:
        place = self._place(row)
        return GroupRow(
            row=row,
            ordinal=place.ordinal,
            step=None if place.step < 0 else place.step,
            outcome=OUTCOMES[place.outcome],
            count=place.size,
            mean_reward=place.reward / place.size,
        )

    def lines(self, row: int, *, limit: int | None = None) -> list[RolloutLine]:
        """The rollouts of a group, the first `limit` of them."""
        place = self._place(row)
        return list(islice(_read(self.path, place.begin, place.end, RolloutLine), limit))


class TokenIndex(LineIndex[TokenHead]):
    """Where the tokens of which groups are."""

    kind = TokenHead

    def reset(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}

    def take(self, record: TokenHead) -> None:
        self._places[record.ordinal] = (self._places.get(record.ordinal, (self.begin, 0))[0], self.end)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._places

    def lines(self, ordinal: int) -> list[TokenLine]:
        """Return the lines of all completions of a group; none for a group that is not in the file."""
        return list(_read(self.path, *self._places.get(ordinal, (0, 0)), TokenLine))


def _read(path: Path, begin: int, end: int, kind: Any) -> Iterator[Any]:
    return records_within(path, begin, min(end, begin + MAX_GROUP_BYTES), msgspec.json.Decoder(kind).decode)
