"""The groups of processes of a run, as the controller knows them: which are there, which are silent, and who is told.

    a group's agent starts it      -> Joined -> PeerJoined to all, who connect to its new addresses
    it has ended, or is silent     -> lost   -> PeerLost to all, who forget it and refuse what still comes of it
    it is started again            -> Joined, with a higher incarnation

A change is one message (`Peers`), and so is all that a process which joins has missed: many may join while others load
a model or train, and read nothing.

Groups on other machines are started by their agents, which start them again, too. The controller's own children are
there from the beginning, and `controller/executors.py` starts them again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from slipstream.controller.pipeline import MEMBERSHIP, Pipeline
from slipstream.core.channel import Ports
from slipstream.core.clock import Clock
from slipstream.core.errors import ChannelClosed
from slipstream.core.lease import Lease
from slipstream.core.peer_messages import Joined, PeerJoined, PeerLost, Peers
from slipstream.core.ranks import split_rank_name


@dataclass(frozen=True)
class Change:
    """Group `group`, with these processes, is there with `incarnation`; or that incarnation `is_lost`."""

    group: str
    members: tuple[str, ...]
    incarnation: int
    is_lost: bool


@dataclass
class _Presence:
    members: tuple[str, ...]
    incarnation: int = 0  # 0: has never joined
    is_lost: bool = True
    joining: dict[str, int] = field(default_factory=dict)  # member -> the incarnation it came with
    left: set[str] = field(default_factory=set)  # members of this incarnation that have ended as they were told to


class Incarnations:
    """The incarnation of each group, and whether it is there. Pure: no clock, no I/O.

    A group has joined when all its ranks have said so with one incarnation; a higher one replaces it, since its agent,
    or the controller, has started it again. A group that was lost comes back with a higher incarnation only.

    `groups`: name -> the names of its processes, by rank; `present` are there from the beginning, with incarnation 1;
    those that come `later` are known to everybody as away.
    """

    def __init__(
        self, groups: Mapping[str, Sequence[str]], present: Collection[str] = (), later: Collection[str] = ()
    ) -> None:
        self._later = frozenset(later)
        self._groups = {
            name: _Presence(tuple(members), 1, is_lost=False) if name in present else _Presence(tuple(members))
            for name, members in groups.items()
        }
        self.absent = [name for name in groups if name not in present]  # not joined yet, or lost

    @property
    def groups(self) -> list[str]:
        return list(self._groups)

    def news(self) -> list[Change]:
        """Return what a process must be told that knows each group as it was at first."""
        return [
            Change(name, group.members, group.incarnation, is_lost=group.is_lost)
            for name, group in self._groups.items()
            if group.incarnation > (name not in self._later) or (group.is_lost and group.incarnation)
        ]

    def joined(self, executor: str, incarnation: int) -> list[Change]:
        """Take that `executor` is there; return what follows: a loss, if it comes back unannounced, and a joining.

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
        self.absent.remove(name)
        group.joining.clear()
        group.left.clear()
        return [*changes, Change(name, group.members, incarnation, is_lost=False)]

    def lost(self, executor: str) -> list[Change]:
        """Take that rank `executor`, and with it its group, is gone; nothing follows if it was already."""
        name, _ = split_rank_name(executor)
        group = self._groups[name]
        if group.is_lost:
            return []
        group.is_lost = True
        self.absent.append(name)
        return [Change(name, group.members, group.incarnation, is_lost=True)]

    def left(self, executor: str) -> None:
        """Take that rank `executor` has ended as it was told to; its group is gone when all its ranks have."""
        group = self._groups[split_rank_name(executor)[0]]
        group.left.add(executor)
        if group.left.issuperset(group.members):
            self.lost(executor)


class Membership:
    """The groups of processes of a pipeline that are there. Inline executors always are.

    The caller hands in the controller's ports, to which everybody listens. A process that is silent for `lease_s` is
    taken for lost, also when the fault is the network's; `check` says who may be silent for longer.
    """

    def __init__(self, pipeline: Pipeline, *, lease_s: float, clock: Clock) -> None:
        local = [node.name for node in pipeline.nodes if node.host == "process"]
        self._remote = frozenset(node.name for node in pipeline.nodes if node.host == "torchrun")
        self._known = Incarnations(
            {node.name: node.members for node in pipeline.nodes if node.host != "inline"},
            present=local,
            later=[node.name for node in pipeline.nodes if node.joins_later],
        )
        self._numbers = {member: number for number, member in enumerate(pipeline.members)}
        self._lease = Lease(lease_s, clock)

    def __contains__(self, executor: str) -> bool:
        return split_rank_name(executor)[0] in self._known.groups

    def is_remote(self, executor: str) -> bool:
        """Return whether its group is on another machine."""
        return split_rank_name(executor)[0] in self._remote

    def is_absent(self, executor: str) -> bool:
        """Return whether `executor` is of a group that has not joined, or was lost."""
        return split_rank_name(executor)[0] in self._known.absent

    @property
    def remote_present(self) -> list[str]:
        """Return the groups on other machines that are there."""
        return [name for name in self._known.groups if name in self._remote and name not in self._known.absent]

    @property
    def incarnations(self) -> dict[str, int]:
        """Return the incarnation of each process: that of its group, or of the last one that was there."""
        return {member: change.incarnation for change in self._known.news() for member in change.members}

    def watch(self, members: Sequence[str]) -> None:
        """Begin the leases of children that have been started."""
        for member in members:
            self._lease.watch(member)

    def lost(self, executor: str, ports: Ports) -> list[Change]:
        """Take that `executor` has ended, and with it its group; nothing changes where that is known."""
        changes = self._known.lost(executor)
        self._tell(changes, ports)
        return changes

    def joined(self, message: Joined, ports: Ports) -> list[Change]:
        """Take that `message.executor` is there; return what changes, which everybody has been told."""
        if message.executor not in self:
            return []
        changes = self._known.joined(message.executor, message.incarnation)
        self._tell(changes, ports)
        if changes and (missed := [news for news in self._known.news() if news not in changes]):
            # The newcomer knows the others as they were when it was started. To everybody else this is no news.
            for member in changes[-1].members:
                with suppress(ChannelClosed):  # it has ended meanwhile
                    ports.outputs[MEMBERSHIP].put(_peers(missed, member=self._numbers[member]))
        return changes

    def check(self, ports: Ports, *, busy: Collection[str], patience: Mapping[str, float]) -> list[str]:
        """Give a sign of life when one is due; the processes that have given none for too long, the worst first.

        Those in `busy` need not answer while they are connected: they load a model, or train. Those in `patience` may
        be silent for so many seconds, in place of a lease.
        """
        if self.wait_s() > 0.0:
            return []
        for member in self._lease.watched:
            self._lease.allow(member, patience.get(member, self._lease.lease_s))
        if self._lease.is_beat_due():
            ports.beat()
        ports.hear(self._lease, busy=busy)
        self._lease.listens()
        return self._lease.silent()

    def silence_s(self, executor: str) -> float:
        """Return the seconds since it was heard of."""
        return self._lease.silence_s(executor)

    def most_silent(self) -> str | None:
        """Return the process that has been silent for longest, where that is a lease at least."""
        watched = [name for name in self._lease.watched if self._lease.silence_s(name) >= self._lease.lease_s]
        return max(watched, key=self._lease.silence_s, default=None)

    def left(self, executor: str) -> None:
        """Take that `executor` has ended as it was told to."""
        if executor in self:
            self._known.left(executor)
            self._lease.forget(executor)

    def wait_s(self) -> float:
        """Return the seconds until `check` has work."""
        return self._lease.wait_s() if self._remote or self._lease.watched else math.inf

    def _tell(self, changes: Sequence[Change], ports: Ports) -> None:
        for change in changes:
            for member in change.members:
                if change.is_lost:
                    self._lease.forget(member)
                    ports.shut_out(member, change.incarnation)
                else:
                    self._lease.watch(member)
                    ports.rejoin(member, change.incarnation)
            ports.outputs[MEMBERSHIP].put(_peers([change]))


def _peers(changes: Sequence[Change], *, member: int = -1) -> Peers:
    told = (
        (PeerLost if change.is_lost else PeerJoined)(executor=name, incarnation=change.incarnation)
        for change in changes
        for name in change.members
    )
    return Peers(changes=tuple(told), member=member)
