"""Which groups are there, and in which incarnation. Pure: no clock, no I/O.

A group has joined when all its ranks have said so with one incarnation; a higher one replaces it, since its agent, or
the controller, has started it again. A group that was lost comes back with a higher incarnation only. Those that the
controller has started are there from the beginning, with incarnation 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core.ranks import split_rank_name


@dataclass(frozen=True)
class Change:
    """Group `group`, with these processes, is there with `incarnation`; or that incarnation `is_lost`."""

    group: str
    members: tuple[str, ...]
    incarnation: int
    is_lost: bool


@dataclass
class _Group:
    members: tuple[str, ...]
    incarnation: int = 0  # 0: has never joined
    is_lost: bool = True
    joining: dict[str, int] = field(default_factory=dict)  # member -> the incarnation it came with


class Members:
    """`groups`: name -> the names of its processes, by rank; `present`: those that need not join at first."""

    def __init__(self, groups: Mapping[str, Sequence[str]], present: Collection[str] = ()) -> None:
        self._groups = {
            name: _Group(tuple(members), 1, is_lost=False) if name in present else _Group(tuple(members))
            for name, members in groups.items()
        }

    @property
    def groups(self) -> list[str]:
        return list(self._groups)

    def news(self) -> list[Change]:
        """What somebody must be told who knows each group as it was at first; nothing of those that never joined."""
        return [
            Change(name, group.members, group.incarnation, is_lost=group.is_lost)
            for name, group in self._groups.items()
            if group.incarnation > 1 or (group.is_lost and group.incarnation)
        ]

    @property
    def absent(self) -> list[str]:
        """Groups that have not joined, or were lost."""
        return [name for name, group in self._groups.items() if group.is_lost]

    def joined(self, executor: str, incarnation: int) -> list[Change]:
        """`executor` says that it is there. What follows: a loss, if it comes back unannounced, and then a joining.

        Nothing follows from a lower or the present incarnation, or while ranks of the group are missing.
        """
        name, _ = split_rank_name(executor)
        group = self._groups[name]
        if incarnation <= group.incarnation:
            return []
        group.joining[executor] = incarnation
        if any(group.joining.get(member) != incarnation for member in group.members):
            return []
        changes = self.lost(name)
        group.incarnation, group.is_lost = incarnation, False
        group.joining.clear()
        return [*changes, Change(name, group.members, incarnation, is_lost=False)]

    def lost(self, executor: str) -> list[Change]:
        """Rank `executor`, and with it its group, is gone; nothing follows if it was already."""
        name, _ = split_rank_name(executor)
        group = self._groups[name]
        if group.is_lost:
            return []
        group.is_lost = True
        return [Change(name, group.members, group.incarnation, is_lost=True)]
