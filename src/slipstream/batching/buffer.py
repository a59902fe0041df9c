"""Where finished rollouts wait for the rest of their group, and groups for their step."""

from __future__ import annotations

from collections.abc import Iterable

from slipstream.core.errors import SlipstreamError
from slipstream.core.types import Group, Rollout


class GroupBuffer:
    """Rollouts in, whole groups out.

    A rollout arriving twice, or after its group was taken or forgotten, is dropped and counted in `num_duplicates`.
    Memory is bounded: at most `max_groups` groups may be waiting (admission bounds them, so more is a bug), and
    retired ordinals are remembered as a floor and the few above it.
    """

    def __init__(self, completions_per_group: int, *, max_groups: int = 1 << 20) -> None:
        self._completions_per_group = completions_per_group
        self._max_groups = max_groups
        self._rollouts: dict[int, dict[int, Rollout]] = {}
        self._retired: set[int] = set()
        self._retired_below = 0
        self.num_duplicates = 0

    def __len__(self) -> int:
        """Groups waiting, complete or not."""
        return len(self._rollouts)

    def add(self, rollout: Rollout) -> Group | None:
        """Keep `rollout`; the whole group when it was the last one missing."""
        ordinal, sample = rollout.completion.ordinal, rollout.completion.sample
        if not 0 <= sample < self._completions_per_group:
            raise SlipstreamError(
                f"rollout of group {ordinal} has a sample number outside its group",
                got=sample,
                allowed=f"0..{self._completions_per_group - 1}",
            )
        if ordinal < self._retired_below or ordinal in self._retired:
            self.num_duplicates += 1
            return None
        if ordinal not in self._rollouts and len(self._rollouts) == self._max_groups:
            raise SlipstreamError(
                "the group buffer is full: more groups were admitted than the schedule allows",
                got=f"group {ordinal} on top of {len(self._rollouts)}",
                allowed=self._max_groups,
            )
        samples = self._rollouts.setdefault(ordinal, {})
        if sample in samples:
            self.num_duplicates += 1
            return None
        samples[sample] = rollout
        return self._group(ordinal) if self.is_complete(ordinal) else None

    def is_complete(self, ordinal: int) -> bool:
        return len(self._rollouts.get(ordinal, ())) == self._completions_per_group

    def take(self, ordinals: Iterable[int]) -> list[Group]:
        """Remove and return these groups in canonical order: by ordinal, rollouts by sample. All must be complete."""
        wanted = sorted(ordinals)
        incomplete = [ordinal for ordinal in wanted if not self.is_complete(ordinal)]
        if incomplete:
            raise SlipstreamError(
                "a step asked for groups that are not complete",
                got=", ".join(f"{o} ({len(self._rollouts.get(o, ()))} rollouts)" for o in incomplete),
                allowed=f"groups of {self._completions_per_group} rollouts",
            )
        groups = [self._group(ordinal) for ordinal in wanted]
        self._retire(wanted)
        return groups

    def forget(self, ordinals: Iterable[int]) -> None:
        """Drop these groups, whatever of them is here; what still arrives of them is a duplicate."""
        self._retire(ordinals)

    def _group(self, ordinal: int) -> Group:
        samples = self._rollouts[ordinal]
        return Group(ordinal=ordinal, rollouts=tuple(samples[sample] for sample in sorted(samples)))

    def _retire(self, ordinals: Iterable[int]) -> None:
        for ordinal in ordinals:
            self._rollouts.pop(ordinal, None)
            if ordinal >= self._retired_below:
                self._retired.add(ordinal)
        while self._retired_below in self._retired:
            self._retired.remove(self._retired_below)
            self._retired_below += 1
