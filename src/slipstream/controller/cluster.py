"""The controller's dealings with groups on other machines: lets them join, shuts out the silent, tells everybody.

a group's agent starts it -> Joined -> PeerJoined to all, who connect to its new addresses
silent for `lease_s`      -> lost   -> PeerLost to all, who forget it and refuse what still comes of it
its agent starts it again -> Joined, with a higher incarnation
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.controller.meeting import Listen, Meeting, RunSpec
from slipstream.controller.members import Change, Members
from slipstream.controller.pipeline import MEMBERSHIP, Pipeline, replica_of
from slipstream.core.addresses import AddressBook, StoreAddresses
from slipstream.core.channel import Ports
from slipstream.core.clock import Clock, wall_minus_clock_s
from slipstream.core.keys import RunKeys
from slipstream.core.lease import Lease
from slipstream.core.ranks import split_rank_name
from slipstream.core.types import Joined, PeerJoined, PeerLost

ALWAYS_REMOTE = frozenset({"trainer", "generator"})


@dataclass(frozen=True)
class Cluster:
    """That a run is on several machines: where its controller listens, the run's keys, and which groups join it.

    `remote` are names of groups, 'generator' for all replicas; the others are the controller's children.
    """

    listen: Listen
    keys: RunKeys
    remote: frozenset[str] = ALWAYS_REMOTE


class MeetingPlace:
    """Where the processes of a run on several machines meet: the store beside the controller, reached with its keys."""

    def __init__(self, cluster: Cluster, pipeline: Pipeline, *, lease_s: float, deadline_s: float) -> None:
        self._pipeline, self._keys = pipeline, cluster.keys
        self._deadline_s, self._lease_s = deadline_s, lease_s
        self._meeting = Meeting(cluster.listen, timeout_s=deadline_s)

    @property
    def host(self) -> str:
        """The address at which this machine is reached."""
        return self._meeting.host

    @property
    def address(self) -> str:
        """Of the store."""
        return f"{self.host}:{self._meeting.port}"

    def addresses(self, transport_dir: Path) -> AddressBook:
        """Where ports listen; children of this controller meet in `transport_dir`."""
        return StoreAddresses(
            self._pipeline.all_channels,
            self._meeting.store,
            self._keys,
            host=self._meeting.host,
            transport_dir=transport_dir,
            deadline_s=self._deadline_s,
        )

    def child_environment(self) -> dict[str, str]:
        """What a child of the controller needs to speak with the groups."""
        return self._keys.as_environment()

    def announce(self, run_dir: Path, run_id: str, *, delta: bool, relays: bool, started_s: float) -> None:
        """From here on groups may join. `delta`: versions travel as what they have changed; `relays`: through replicas
        that hand them on."""
        self._meeting.announce(
            RunSpec(
                run_id=run_id,
                run_dir=run_dir.resolve(),
                nodes=self._pipeline.nodes,
                channels=self._pipeline.all_channels,
                deadline_s=self._deadline_s,
                lease_s=self._lease_s,
                delta=delta,
                relays=relays,
                wall_minus_clock_s=wall_minus_clock_s(),
                started_s=started_s,
            ),
            self._keys,
        )


class RemoteGroups:
    """Which groups of a pipeline that torchrun jobs run, wherever they are, are there. In a run on one machine: none.

    Whoever calls hands in the controller's ports, to which everybody listens.
    """

    def __init__(self, pipeline: Pipeline, *, lease_s: float, clock: Clock) -> None:
        self._members = Members({node.name: node.members for node in pipeline.nodes if node.host == "torchrun"})
        self._lease = Lease(lease_s, clock)

    def __contains__(self, executor: str) -> bool:
        return split_rank_name(executor)[0] in self._members.groups

    def may_come_back(self, executor: str) -> bool:
        """Whether the run goes on without it until its agent has started it again: generators, on other machines."""
        return executor in self and replica_of(executor) is not None

    def lost(self, executor: str, ports: Ports) -> list[Change]:
        """`executor` has ended, and with it its group; nothing changes where that is known."""
        changes = self._members.lost(executor)
        self._tell(changes, ports)
        return changes

    @property
    def present(self) -> list[str]:
        return [name for name in self._members.groups if name not in self._members.absent]

    def is_absent(self, executor: str) -> bool:
        """Whether `executor` is of a group on another machine that has not joined, or was lost."""
        return split_rank_name(executor)[0] in self._members.absent

    def joined(self, message: Joined, ports: Ports) -> list[Change]:
        """`message.executor` is there: what changes by it, which everybody has been told."""
        if message.executor not in self:
            return []  # a child of the controller
        changes = self._members.joined(message.executor, message.incarnation)
        self._tell(changes, ports)
        return changes

    def check(self, ports: Ports, *, busy: Collection[str]) -> list[Change]:
        """Give a sign of life when one is due, and shut out the groups that have given none for too long.

        Processes in `busy` need not answer while they are connected: they load a model, or train.
        """
        if self.wait_s() > 0.0:
            return []
        if self._lease.is_beat_due():
            ports.beat()
        ports.hear(self._lease, busy=busy)
        changes = [change for name in self._lease.silent() for change in self._members.lost(name)]
        self._tell(changes, ports)
        return changes

    def left(self, executor: str) -> None:
        """`executor` has ended as it was told to."""
        if executor in self:
            self._members.lost(executor)

    def wait_s(self) -> float:
        """Seconds until `check` has work."""
        return self._lease.wait_s() if self._members.groups else math.inf

    def _tell(self, changes: Sequence[Change], ports: Ports) -> None:
        for change in changes:
            for member in change.members:
                if change.is_lost:
                    self._lease.forget(member)
                    ports.shut_out(member, change.incarnation)
                    ports.outputs[MEMBERSHIP].put(PeerLost(executor=member, incarnation=change.incarnation))
                else:
                    self._lease.watch(member)
                    ports.rejoin(member, change.incarnation)
                    ports.outputs[MEMBERSHIP].put(PeerJoined(executor=member, incarnation=change.incarnation))
