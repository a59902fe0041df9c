"""Leases of groups on other machines, in virtual time and without sockets."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from typing import Any

import pytest

from slipstream.controller.cluster import RemoteGroups
from slipstream.controller.members import Change
from slipstream.controller.pipeline import MEMBERSHIP, Node, Pipeline
from slipstream.core.clock import VirtualClock
from slipstream.core.lease import BEATS_PER_LEASE, Lease
from slipstream.core.types import Joined, Message, PeerJoined, PeerLost

LEASE_S = 8.0
TWO = ("generator-0", "generator-0@1")


class FakePorts:
    """The controller's: `answering` answer a beat, `connected` have at least a connection."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.answering: set[str] = set()
        self.connected: set[str] = set()
        self.beats: list[float] = []
        self.calls: list[tuple[Any, ...]] = []
        self.outputs = {MEMBERSHIP: self}

    def put(self, message: Message) -> None:
        self.calls.append((message,))

    def beat(self) -> None:
        self.beats.append(self._clock.now_s())

    def hear(self, lease: Lease, *, busy: Collection[str] = ()) -> None:
        for name in self.answering | (self.connected & set(busy)):
            lease.heard(name)

    def shut_out(self, executor: str, incarnation: int) -> None:
        self.calls.append(("shut_out", executor, incarnation))

    def rejoin(self, executor: str, incarnation: int) -> None:
        self.calls.append(("rejoin", executor, incarnation))


class Remote:
    """A generator of two ranks, and a trainer; and a child, `rewards`."""

    def __init__(self) -> None:
        nodes = (
            Node("generator-0", os.path.join, host="torchrun", ranks=2),
            Node("trainer", os.path.join, host="torchrun"),
            Node("rewards", os.path.join),
        )
        self.clock = VirtualClock(100.0)
        self.ports: Any = FakePorts(self.clock)
        self.groups = RemoteGroups(Pipeline(nodes, ()), lease_s=LEASE_S, clock=self.clock)

    def join(self, incarnation: int = 1) -> list[Change]:
        return [c for name in (*TWO, "trainer") for c in self.joined(name, incarnation)]

    def joined(self, name: str, incarnation: int = 1) -> list[Change]:
        return self.groups.joined(Joined(executor=name, incarnation=incarnation), self.ports)

    def live(self, seconds: float, *, busy: Collection[str] = ()) -> list[Change]:
        """As the controller's loop does: it sleeps no longer than it may, and looks."""
        changes, end_s = [], self.clock.now_s() + seconds
        while self.clock.now_s() < end_s:
            self.clock.advance(min(self.groups.wait_s(), end_s - self.clock.now_s()) + 1e-6)
            changes += self.groups.check(self.ports, busy=busy)
        return changes


@pytest.fixture
def remote() -> Remote:
    return Remote()


def test_everybody_is_told_who_is_there_after_the_way_to_it_is_open(remote: Remote) -> None:
    assert remote.groups.present == []
    assert remote.join() == [Change("generator-0", TWO, 1, False), Change("trainer", ("trainer",), 1, False)]
    assert remote.groups.present == ["generator-0", "trainer"]
    assert remote.ports.calls == [
        call
        for name in (*TWO, "trainer")
        for call in (("rejoin", name, 1), (PeerJoined(executor=name, incarnation=1),))
    ]
    assert remote.joined("rewards") == [], "a child of the controller"


def test_one_silent_rank_ends_its_group_after_a_lease_and_no_other(remote: Remote) -> None:
    remote.join()
    remote.ports.answering = {"generator-0", "trainer"}
    assert remote.live(LEASE_S - 0.5) == []
    remote.ports.calls.clear()
    assert remote.live(1.0) == [Change("generator-0", TWO, 1, is_lost=True)]
    assert remote.ports.calls == [
        call for name in TWO for call in (("shut_out", name, 1), (PeerLost(executor=name, incarnation=1),))
    ]
    assert remote.groups.is_absent("generator-0@1")
    assert remote.live(3 * LEASE_S) == [], "what is lost is lost once, and no lease of it is left"
    assert remote.join(2)[0] == Change("generator-0", TWO, 2, is_lost=False)
    remote.ports.answering |= set(TWO)
    assert remote.live(3 * LEASE_S) == []


def test_who_is_busy_need_only_be_connected(remote: Remote) -> None:
    remote.join()
    remote.ports.answering = set(TWO)
    remote.ports.connected = {"trainer"}
    assert remote.live(5 * LEASE_S, busy=["trainer"]) == []
    remote.ports.connected = set()
    assert remote.live(LEASE_S + 0.5, busy=["trainer"]) == [Change("trainer", ("trainer",), 1, is_lost=True)]


def test_beats_are_sent_several_times_in_a_lease(remote: Remote) -> None:
    remote.join()
    remote.ports.answering = {*TWO, "trainer"}
    remote.live(10 * LEASE_S)
    assert len(remote.ports.beats) == pytest.approx(10 * BEATS_PER_LEASE, abs=1)


def test_only_generators_may_be_lost_without_the_run(remote: Remote) -> None:
    assert remote.groups.may_come_back("generator-0@1")
    assert not remote.groups.may_come_back("trainer")
    assert not remote.groups.may_come_back("generator-1"), "a child"
    assert "rewards" not in remote.groups


def test_who_left_as_told_is_gone_and_nobody_is_told(remote: Remote) -> None:
    remote.join()
    remote.ports.calls.clear()
    remote.groups.left("generator-0")
    remote.groups.left("rewards")
    assert remote.groups.present == ["trainer"]
    assert remote.ports.calls == []


def test_on_one_machine_nobody_is_watched_and_nothing_is_due() -> None:
    clock = VirtualClock()
    ports: Any = FakePorts(clock)
    groups = RemoteGroups(Pipeline((Node("trainer", os.path.join),), ()), lease_s=LEASE_S, clock=clock)
    assert groups.wait_s() == math.inf
    clock.advance(100 * LEASE_S)
    assert groups.check(ports, busy=[]) == []
    assert ports.beats == []
    assert not groups.is_absent("trainer")
