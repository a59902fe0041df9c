"""The buffer in which finished rollouts wait for the rest of their group, and groups for their step."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Generic

from slipstream.core.errors import SlipstreamError
from slipstream.core.packed import AnySample, Expects


class GroupBuffer(Generic[AnySample]):
    """Collect rollouts, or their heads, into whole groups.

    `expects` names which of the `completions_per_group` samples of a group come here, by default all: a trainer's rank
    is dealt a part of each group, or none. A group is complete when they are here. A rollout arriving twice, or
    after its group was taken, is dropped and counted in `num_duplicates`. Memory is bounded: at most
    `max_groups` groups may be waiting (admission bounds them, so more is a bug), and retired ordinals are remembered as
    runs. Those that a resume does not bring back are gaps between them, which are few.
    """

    def __init__(
        self, completions_per_group: int, *, max_groups: int = 1 << 20, expects: Expects | None = None
    ) -> None:
        self._completions_per_group = completions_per_group
        self._max_groups = max_groups
        self._expects = expects
        self._waiting: dict[int, dict[int, AnySample]] = {}
        self._retired: list[int] = []  # begin and end of each run, ascending
        self.num_duplicates = 0

    def __len__(self) -> int:
        """Groups waiting, complete or not."""
        return len(self._waiting)

    def add(self, item: AnySample) -> bool:
        """Keep `item`; False for a duplicate, which is dropped."""
        ordinal, sample = item.ordinal, item.sample
        if not 0 <= sample < self._completions_per_group:
            what = f"rollout of group {ordinal} has a sample number outside its group"
            raise SlipstreamError(what, got=sample, allowed=f"0..{self._completions_per_group - 1}")
        if self._expects is not None and not self._expects(ordinal, sample):
            what = "a rollout came to a rank that does not train it"
            allowed = f"samples {list(self._expected(ordinal))} of this group"
            raise SlipstreamError(what, got=f"sample {sample} of group {ordinal}", allowed=allowed)
        samples = self._waiting.get(ordinal, {})
        if self._is_retired(ordinal) or sample in samples:
            self.num_duplicates += 1
            return False
        if not samples and len(self._waiting) == self._max_groups:
            what = "the group buffer is full: more groups were admitted than the schedule allows"
            raise SlipstreamError(what, got=f"group {ordinal} on top of {len(self._waiting)}", allowed=self._max_groups)
        self._waiting.setdefault(ordinal, {})[sample] = item
        return True

    def is_complete(self, ordinal: int) -> bool:
        """Tell whether all of group `ordinal` that is to come here waits here; also where that is nothing."""
        return len(self._waiting.get(ordinal, ())) == len(self._expected(ordinal))

    def group(self, ordinal: int) -> tuple[AnySample, ...]:
        """Return what waits here of group `ordinal`, by sample."""
        samples = self._waiting.get(ordinal, {})
        return tuple(samples[sample] for sample in sorted(samples))

    def take(self, ordinals: Iterable[int]) -> dict[int, tuple[AnySample, ...]]:
        """Remove and return these groups in canonical order: by ordinal, each by sample. All must be complete."""
        wanted = sorted(ordinals)
        incomplete = [ordinal for ordinal in wanted if not self.is_complete(ordinal)]
        if incomplete:
            raise SlipstreamError(
                "a step asked for groups that are not complete",
                got=", ".join(f"{o} ({len(self._waiting.get(o, ()))} rollouts)" for o in incomplete),
                allowed=", ".join(f"{o} ({len(self._expected(o))} rollouts)" for o in incomplete),
            )
        groups = {ordinal: self.group(ordinal) for ordinal in wanted}
        self._retire(wanted)
        return groups

    def _expected(self, ordinal: int) -> Sequence[int]:
        samples = range(self._completions_per_group)
        if self._expects is None:
            return samples
        return [sample for sample in samples if self._expects(ordinal, sample)]

    def _retire(self, ordinals: Iterable[int]) -> None:
        for ordinal in ordinals:
            self._waiting.pop(ordinal, None)
            if self._is_retired(ordinal):
                continue
            for bound in (ordinal, ordinal + 1):  # one that is there already is now within a run
                place = bisect.bisect_left(self._retired, bound)
                if self._retired[place : place + 1] == [bound]:
                    del self._retired[place]
                else:
                    self._retired.insert(place, bound)

    def _is_retired(self, ordinal: int) -> bool:
        return bisect.bisect_right(self._retired, ordinal) % 2 == 1
