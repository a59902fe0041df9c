"""How to divide devices over executors that work at the same time, each of which gets faster with more of them.

    minimise over the choices   max_e seconds_e(choice_e)    subject to   sum_e devices_e(choice_e) <= devices

Executors share nothing but the devices, so the problem falls apart: to be done within T, each needs the fewest devices
of its choices that take at most T. The sum of those falls as T rises, so the best T is found by bisection over the
finitely many times that occur. That is exact, whatever the times look like.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

What = TypeVar("What")


@dataclass(frozen=True)
class Choice(Generic[What]):
    """An executor's way to work: on so many devices, it takes `seconds` for its share of one step."""

    devices: int
    seconds: float
    what: What


class Frontier(Generic[What]):
    """The choices of one executor that no other one beats with as few devices, by rising devices and falling time."""

    def __init__(self, choices: Sequence[Choice[What]]) -> None:
        self.choices: list[Choice[What]] = []
        for choice in sorted(choices, key=lambda choice: (choice.devices, choice.seconds)):
            if not self.choices or choice.seconds < self.choices[-1].seconds:
                self.choices.append(choice)
        self._rising = [-choice.seconds for choice in self.choices]

    def within(self, seconds: float) -> Choice[What] | None:
        """The one with the fewest devices that takes at most `seconds`."""
        index = bisect.bisect_left(self._rising, -seconds)
        return self.choices[index] if index < len(self.choices) else None

    def with_devices(self, devices: int) -> Choice[What] | None:
        """The fastest one on at most `devices`."""
        index = bisect.bisect_right(self.choices, devices, key=lambda choice: choice.devices)
        return self.choices[index - 1] if index else None


def best_split(frontiers: Mapping[str, Frontier[What]], devices: int) -> dict[str, Choice[What]] | None:
    """The choices with the lowest largest time; None where `devices` do not suffice for one of each.

    Among those the second largest time is lowest, and so on (leximin): devices that cannot help the slowest executor
    help the next one, and what helps nobody is left over.
    """
    chosen = _within_best_time(frontiers, devices)
    if chosen is None or len(frontiers) == 1:
        return chosen
    best: dict[str, Choice[What]] | None = None
    slowest_s = max(choice.seconds for choice in chosen.values())
    for name, choice in chosen.items():
        if choice.seconds < slowest_s:
            continue  # one of those that tie is the slowest for good; the others may still get faster
        others = {other: frontier for other, frontier in frontiers.items() if other != name}
        rest = best_split(others, devices - choice.devices)
        assert rest is not None, "they fitted before"
        found = {each: choice if each == name else rest[each] for each in frontiers}
        if best is None or _falling(found) < _falling(best):
            best = found
    return best


def _falling(chosen: Mapping[str, Choice[What]]) -> list[float]:
    return sorted((choice.seconds for choice in chosen.values()), reverse=True)


def _within_best_time(frontiers: Mapping[str, Frontier[What]], devices: int) -> dict[str, Choice[What]] | None:
    """For the lowest T that can be kept, each executor's choice with the fewest devices that keeps it."""
    times = sorted({choice.seconds for frontier in frontiers.values() for choice in frontier.choices})

    def within(seconds: float) -> dict[str, Choice[What]] | None:
        chosen = {name: frontier.within(seconds) for name, frontier in frontiers.items()}
        kept = {name: choice for name, choice in chosen.items() if choice is not None}
        is_enough = len(kept) == len(frontiers) and sum(choice.devices for choice in kept.values()) <= devices
        return kept if is_enough else None

    first = bisect.bisect_left(times, True, key=lambda seconds: within(seconds) is not None)
    return within(times[first]) if first < len(times) else None
