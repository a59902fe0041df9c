"""The tree of feeders: each replica gets versions from the trainer, or from another replica that hands on what it gets.

A trainer that feeds every replica itself sends each version as often as there are replicas on other machines, and its
network is the first thing to be full. So a replica is fed by one on its own machine, if there is one: nothing crosses
the network. Else by the machine with the fewest copies to send, the trainer's before others. Then no machine sends
or receives more than one copy of a version, as in a broadcast through all of them; but each replica still has a link of
its own, which may break alone. (A replica whose link to its feeder broke avoids that one until it has been away: then
there may be more copies.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction

TRAINER = -1


@dataclass(frozen=True)
class _Fed:
    host: str
    world: int
    parent: int


class FeedingTree:
    """The replicas that are linked now, and who feeds each of them.

    `source_hosts`: the machines of the trainer's ranks; without `relays` the trainer feeds all.
    """

    def __init__(self, source_hosts: Collection[str], *, relays: bool = True) -> None:
        self._source_hosts, self._relays = frozenset(source_hosts), relays
        self._fed: dict[int, _Fed] = {}
        self._avoided: set[tuple[int, int]] = set()  # (replica, parent) that did not work

    def parent(self, replica: int) -> int | None:
        """None: not linked."""
        return self._fed[replica].parent if replica in self._fed else None

    def world(self, replica: int) -> int:
        """Ranks of a linked replica."""
        return self._fed[replica].world

    def feed(self, replica: int, host: str, world: int) -> int:
        """Choose the feeder of `replica`, of `world` ranks on `host`, from now on: another replica, or `TRAINER`.

        One that is linked already asks again because its link broke: not its last parent then, if that is a replica.
        Only replicas of equally many ranks feed one another, so that equal parts meet.
        """
        last = self.parent(replica)
        if last is not None and last != TRAINER:
            self._avoided.add((replica, last))
        self._fed.pop(replica, None)
        parent = self._best(replica, host, world)
        self._fed[replica] = _Fed(host, world, parent)
        return parent

    def leave(self, replica: int) -> list[int]:
        """`replica` is gone; returns those that it has fed, which need another parent (`feed`)."""
        self._fed.pop(replica, None)
        self._avoided = {pair for pair in self._avoided if replica not in pair}
        orphans = sorted(child for child, fed in self._fed.items() if fed.parent == replica)
        for child in orphans:
            self._fed[child] = replace(self._fed[child], parent=TRAINER)  # its last parent is no fault of its own
        return orphans

    def host(self, replica: int) -> str:
        return self._fed[replica].host

    def copies_sent(self, host: str) -> Fraction:
        """Copies of a version that `host` sends to others; of the trainer's machines each sends its share."""
        direct = sum(fed.parent == TRAINER and fed.host not in self._source_hosts for fed in self._fed.values())
        share = Fraction(direct, len(self._source_hosts)) if host in self._source_hosts else Fraction(0)
        crossing = [
            fed for fed in self._fed.values() if fed.parent in self._fed and self._fed[fed.parent].host != fed.host
        ]
        return share + sum(self._fed[fed.parent].host == host for fed in crossing)

    def _best(self, replica: int, host: str, world: int) -> int:
        if not self._relays or host in self._source_hosts:
            return TRAINER
        able = [
            other
            for other, fed in self._fed.items()
            if fed.world == world and (replica, other) not in self._avoided and not self._descends(other, replica)
        ]
        here = [other for other in able if self._fed[other].host == host]
        if here:
            return min(here, key=lambda other: (self._num_fed(other), other))
        trainers = max((self.copies_sent(source) for source in self._source_hosts), default=Fraction(0))
        away = min(
            able,
            key=lambda other: (self.copies_sent(self._fed[other].host), self._num_fed(other), other),
            default=None,
        )
        if away is None or trainers + Fraction(1, len(self._source_hosts)) <= 1 + self.copies_sent(
            self._fed[away].host
        ):
            return TRAINER
        return away

    def _num_fed(self, replica: int) -> int:
        return sum(fed.parent == replica for fed in self._fed.values())

    def _descends(self, replica: int, ancestor: int) -> bool:
        while replica in self._fed:
            if replica == ancestor:
                return True
            replica = self._fed[replica].parent
        return replica == ancestor
