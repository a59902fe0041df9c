"""Which slots lie next to each other: those of like lengths, so that a short one does not pay for the longest.

Attention over dense slots computes whole *spans* of neighbouring slots at the length of the longest in each. With a few
long sequences and many short ones, one span for all would read several times what is stored. So slots are kept in an
order: first those that hold more positions than the largest of some bounds, then those that hold more than the next
one, and so on. A slot that outgrows its kind changes places with a shorter one further to the front, which copies both
once in a while. Nothing but speed hangs on the order: a span is as long as its longest slot, wherever that lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ROW_MULTIPLE = 8
LENGTH_MULTIPLE = 32


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class SlotSpan:
    """Slots `start` to `stop`, computed over their first `bucket` positions."""

    start: int
    stop: int
    bucket: int


def bounds(longest: int) -> list[int]:
    """Lengths that slots are told apart by, ascending: 2, 3, 4, 6, 8, 12, ... LENGTH_MULTIPLE, all below `longest`."""
    found, bound = [], 2 * LENGTH_MULTIPLE
    while bound < longest:
        found += [bound, bound + bound // 2]
        bound *= 2
    return [one for one in found if one < longest]


def swaps(lengths: np.ndarray, num_slots: int) -> list[tuple[int, int]]:
    """Pairs of slots to exchange, one after the other, so that the longest come first and all fit below `num_slots`.

    `lengths` int64 [S] are positions stored in each slot, 0 for one that is free; at most `num_slots`, a multiple of
    ROW_MULTIPLE, are not free. The first slot of a pair lies further to the front, and holds less.

    Afterwards, for each of `bounds(max(lengths))`, the slots with more positions are all among the first of them, as
    many as there are, rounded up to ROW_MULTIPLE. Nothing is exchanged where that is so already.
    """
    lengths = lengths.copy()
    found: list[tuple[int, int]] = []
    for bound in (*reversed(bounds(int(lengths.max()))), 0):
        is_long = lengths > bound
        room = num_slots if bound == 0 else round_up(int(np.count_nonzero(is_long)), ROW_MULTIPLE)
        intruders = room + np.flatnonzero(is_long[room:])
        if len(intruders):
            shorter = np.flatnonzero(~is_long[:room])
            victims = shorter[np.argsort(lengths[shorter], kind="stable")][: len(intruders)]
            lengths[victims], lengths[intruders] = lengths[intruders], lengths[victims]
            found += zip(victims.tolist(), intruders.tolist(), strict=True)
    return found


def spans(lengths: np.ndarray) -> list[SlotSpan]:
    """All slots, of `lengths` int64 [S] >= 1, in spans; S is a multiple of ROW_MULTIPLE.

    A span ends where the longest of the next ROW_MULTIPLE slots lies between other `bounds`.
    """
    if (whole := int(lengths.max())) <= 2 * LENGTH_MULTIPLE:
        return [SlotSpan(0, len(lengths), round_up(whole, LENGTH_MULTIPLE))]
    longest = lengths.reshape(-1, ROW_MULTIPLE).max(axis=1)
    kinds = np.searchsorted(bounds(whole), longest)
    starts = np.concatenate([[0], 1 + np.flatnonzero(np.diff(kinds))])
    stops = np.append(starts[1:], len(longest))
    return [
        SlotSpan(
            int(start) * ROW_MULTIPLE,
            int(stop) * ROW_MULTIPLE,
            round_up(int(longest[start:stop].max()), LENGTH_MULTIPLE),
        )
        for start, stop in zip(starts, stops, strict=True)
    ]
