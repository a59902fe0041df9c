"""Indexes over `rollouts.jsonl` and `tokens.jsonl`: where the lines of each group lie, to read any of them at once."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import msgspec

from slipstream.core.run_log import Outcome, RolloutLine
from slipstream.observe.tokens import TokenHead, TokenLine
from slipstream.observe.watch.tail import LineIndex, records_within

MAX_GROUP_BYTES = 8_000_000
MAX_AHEAD = 1_000_000  # how far ordinals may be ahead of how many groups there are, before a line is taken for damaged
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


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


class RolloutIndex(LineIndex[_Head]):
    """Groups in the order of their fates, 40 bytes each: whatever was said in between is read when it is asked for."""

    kind = _Head

    def reset(self) -> None:
        self._ordinals, self._offsets, self._ends = array("q"), array("q"), array("q")
        self._steps, self._counts, self._outcomes = array("i"), array("i"), array("b")
        self._rewards = array("f")  # sums
        self._row_of = array("i")  # ordinal -> row, -1 where there is none
        self._trained_rows, self._trained_steps = array("i"), array("i")  # of each step, where it begins

    @property
    def num_groups(self) -> int:
        return len(self._ordinals)

    def take(self, record: _Head) -> None:
        if not 0 <= record.ordinal < MAX_AHEAD + 4 * self.num_groups or not 0 <= (record.step or 0) < 1 << 31:
            raise ValueError(f"group {record.ordinal} of step {record.step} behind {self.num_groups}")
        if not self._ordinals or self._ordinals[-1] != record.ordinal:
            self._begin(record)
        self._ends[-1] = self.end
        self._counts[-1] += 1
        self._rewards[-1] += record.reward or 0.0

    def _begin(self, head: _Head) -> None:
        row = len(self._ordinals)
        self._ordinals.append(head.ordinal)
        self._offsets.append(self.begin)
        self._ends.append(self.begin)
        self._steps.append(-1 if head.step is None else head.step)
        self._counts.append(0)
        self._outcomes.append(OUTCOMES.index(head.outcome))
        self._rewards.append(0.0)
        if head.ordinal >= len(self._row_of):
            self._row_of.extend(array("i", [-1]) * (head.ordinal + 1 - len(self._row_of)))
        self._row_of[head.ordinal] = row
        if head.step is not None and (not self._trained_steps or self._trained_steps[-1] < head.step):
            self._trained_steps.append(head.step)
            self._trained_rows.append(row)

    def row_of(self, ordinal: int) -> int | None:
        """The row of a group, None for one whose fate is not known."""
        row = self._row_of[ordinal] if 0 <= ordinal < len(self._row_of) else -1
        return None if row < 0 else row

    def row_of_step(self, step: int) -> int:
        """The first row that `step` trained, or of the first step after it; all rows where there is none."""
        place = bisect.bisect_left(self._trained_steps, step)
        return self._trained_rows[place] if place < len(self._trained_rows) else self.num_groups

    def group(self, row: int) -> GroupRow:
        step, count = self._steps[row], self._counts[row]
        return GroupRow(
            row=row,
            ordinal=self._ordinals[row],
            step=None if step < 0 else step,
            outcome=OUTCOMES[self._outcomes[row]],
            count=count,
            mean_reward=self._rewards[row] / count if count else None,
        )

    def lines(self, row: int, *, limit: int | None = None) -> list[RolloutLine]:
        """The rollouts of a group, the first `limit` of them."""
        return list(islice(_read(self.path, self._offsets[row], self._ends[row], RolloutLine), limit))


class TokenIndex(LineIndex[TokenHead]):
    """`places` of groups in `tokens.jsonl`, by ordinal: from which byte to which."""

    kind = TokenHead

    def reset(self) -> None:
        self.places: dict[int, tuple[int, int]] = {}

    def take(self, record: TokenHead) -> None:
        self.places[record.ordinal] = (self.places.get(record.ordinal, (self.begin, 0))[0], self.end)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self.places

    def lines(self, ordinal: int) -> list[TokenLine]:
        """Return the lines of all completions of a group; none for a group that is not in the file."""
        return list(_read(self.path, *self.places.get(ordinal, (0, 0)), TokenLine))


def _read(path: Path, begin: int, end: int, kind: Any) -> Iterator[Any]:
    return records_within(path, begin, min(end, begin + MAX_GROUP_BYTES), msgspec.json.Decoder(kind).decode)
