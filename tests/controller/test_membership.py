"""Who is there, who is silent and who is told, of groups on other machines and of children, in virtual time."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slipstream.controller.membership import Change, Membership
from slipstream.controller.pipeline import CONTROLLER, MEMBERSHIP, Node, Pipeline
from slipstream.core.addresses import LocalAddresses
from slipstream.core.channel import Ports, connect_by_book, connect_local, wait
from slipstream.core.clock import VirtualClock
from slipstream.core.lease import BEATS_PER_LEASE, Lease
from slipstream.core.peer_messages import Joined, PeerJoined, PeerLost, Peers
from slipstream.core.types import Message

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
        self.groups = Membership(Pipeline(nodes, ()), lease_s=LEASE_S, clock=self.clock)

    def join(self, incarnation: int = 1) -> list[Change]:
        return [c for name in (*TWO, "trainer") for c in self.joined(name, incarnation)]

    def joined(self, name: str, incarnation: int = 1) -> list[Change]:
        return self.groups.joined(Joined(executor=name, incarnation=incarnation), self.ports)

    def live(
        self, seconds: float, *, busy: Collection[str] = (), patience: Mapping[str, float] | None = None
    ) -> list[Change]:
        """As the controller's loop does: it sleeps no longer than it may, looks, and gives up who is silent."""
        changes, end_s = [], self.clock.now_s() + seconds
        while self.clock.now_s() < end_s:
            self.clock.advance(min(self.groups.wait_s(), end_s - self.clock.now_s()) + 1e-6)
            for name in self.groups.check(self.ports, busy=busy, patience=patience or {}):
                changes += self.groups.lost(name, self.ports)
        return changes


@pytest.fixture
def remote() -> Remote:
    return Remote()


def test_everybody_is_told_who_is_there_after_the_way_to_it_is_open(remote: Remote) -> None:
    assert remote.groups.remote_present == []
    assert remote.join() == [Change("generator-0", TWO, 1, False), Change("trainer", ("trainer",), 1, False)]
    assert remote.groups.remote_present == ["generator-0", "trainer"]
    assert remote.ports.calls == [
        *(("rejoin", name, 1) for name in TWO),
        (Peers(changes=tuple(PeerJoined(executor=name, incarnation=1) for name in TWO)),),
        ("rejoin", "trainer", 1),
        (Peers(changes=(PeerJoined(executor="trainer", incarnation=1),)),),
    ]
    assert remote.joined("rewards") == [], "a child of the controller has no need to"


def test_one_silent_rank_ends_its_group_after_a_lease_and_no_other(remote: Remote) -> None:
    remote.join()
    remote.ports.answering = {"generator-0", "trainer"}
    assert remote.live(LEASE_S - 0.5) == []
    remote.ports.calls.clear()
    assert remote.live(1.0) == [Change("generator-0", TWO, 1, is_lost=True)]
    assert remote.ports.calls == [
        *(("shut_out", name, 1) for name in TWO),
        (Peers(changes=tuple(PeerLost(executor=name, incarnation=1) for name in TWO)),),
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


def test_a_child_is_there_from_the_beginning_and_comes_back_with_a_higher_incarnation(remote: Remote) -> None:
    assert not remote.groups.is_absent("rewards")
    assert not remote.groups.is_remote("rewards")
    assert remote.groups.incarnations == {}
    assert remote.groups.lost("rewards", remote.ports) == [Change("rewards", ("rewards",), 1, is_lost=True)]
    assert remote.groups.is_absent("rewards")
    assert remote.groups.incarnations == {"rewards": 1}
    assert remote.joined("rewards", 1) == [], "last words of the dead one"
    assert remote.joined("rewards", 2) == [Change("rewards", ("rewards",), 2, is_lost=False)]
    assert remote.groups.incarnations == {"rewards": 2}


def test_a_newcomer_alone_hears_what_has_become_of_the_others_meanwhile(remote: Remote) -> None:
    """It knows them as they were when it was started; one that was lost and came back since has another address."""
    remote.join()
    remote.groups.lost("rewards", remote.ports)
    remote.joined("rewards", 2)
    remote.groups.lost("trainer", remote.ports)
    remote.groups.lost("generator-0", remote.ports)
    remote.ports.calls.clear()
    remote.joined("generator-0", 2)
    remote.joined("generator-0@1", 2)
    told = [call[0] for call in remote.ports.calls if len(call) == 1]
    missed = (PeerLost(executor="trainer", incarnation=1), PeerJoined(executor="rewards", incarnation=2))
    assert told == [
        Peers(changes=tuple(PeerJoined(executor=name, incarnation=2) for name in TWO)),
        *(Peers(changes=missed, member=number) for number in (0, 1)),
    ]
    assert [call[:2] for call in remote.ports.calls if len(call) > 1] == [("rejoin", name) for name in TWO]


class Fleet:
    """A trainer and replicas on other machines, and the controller's real channels to them."""

    def __init__(self, folder: Path, opened: ExitStack, num_replicas: int) -> None:
        folder.chmod(0o700)
        names = ["trainer", *(f"generator-{number}" for number in range(num_replicas))]
        self.pipeline = Pipeline(tuple(Node(name, os.path.join, host="torchrun") for name in names), (), deadline_s=0.5)
        self.opened, self.book = opened, LocalAddresses(self.pipeline.all_channels, folder)
        self.membership = Membership(self.pipeline, lease_s=LEASE_S, clock=VirtualClock())
        self.controller = self.connect(CONTROLLER, 1)

    def connect(self, name: str, incarnation: int) -> Ports:
        ports = connect_by_book(self.pipeline.all_channels, [name], self.book, incarnation)[name]
        self.opened.callback(ports.close)
        return ports

    def joined(self, name: str, incarnation: int) -> None:
        self.membership.joined(Joined(executor=name, incarnation=incarnation), self.controller)

    def told(self, ports: Ports, count: int) -> list[Peers]:
        """The next so many messages at the port of a process."""
        found: list[Peers] = []
        while len(found) < count:
            assert wait([ports.inputs[MEMBERSHIP]], self.controller.outputs.values(), timeout_s=50), found
            while (message := ports.inputs[MEMBERSHIP].get_nowait()) is not None:
                assert isinstance(message, Peers)
                found.append(message)
        return found


def test_many_that_come_back_at_once_wait_for_nobody_who_trains_or_loads(tmp_path: Path) -> None:
    """Nobody reads meanwhile. Each hears of each change once, in one message, and a newcomer of all it has missed."""
    with ExitStack() as opened:
        fleet = Fleet(tmp_path, opened, 60)
        trainer, replicas = fleet.connect("trainer", 1), fleet.pipeline.members[1:]
        for name in fleet.pipeline.members:
            fleet.joined(name, 1)
        last = fleet.connect(replicas[-1], 2)
        for name in replicas:
            fleet.membership.lost(name, fleet.controller)
        for name in replicas:
            fleet.joined(name, 2)  # ChannelTimeout where each join told all of all changes
        assert fleet.controller.outputs[MEMBERSHIP].stats.wait_s == 0.0
        news = fleet.told(trainer, 61 + 60 + 60)
        assert news[-1] == Peers(changes=(PeerJoined(executor=replicas[-1], incarnation=2),))
        own, missed = fleet.told(last, 2)
        assert own == news[-1]
        back = tuple(PeerJoined(executor=name, incarnation=2) for name in replicas[:-1])
        assert missed == Peers(changes=back, member=len(replicas))


def test_a_first_start_of_many_has_room_for_what_all_are_told() -> None:
    nodes = tuple(Node(f"generator-{number}", os.path.join, host="torchrun") for number in range(1200))
    pipeline = Pipeline((Node("trainer", os.path.join, host="torchrun"), *nodes), ())
    ports = connect_local([c for c in pipeline.all_channels if c.target == f"trainer.{MEMBERSHIP}"])
    membership = Membership(pipeline, lease_s=LEASE_S, clock=VirtualClock())
    for name in pipeline.members:
        membership.joined(Joined(executor=name, incarnation=1), ports[CONTROLLER])  # else ChannelTimeout
    assert ports["trainer"].inputs[MEMBERSHIP].depth == 1201


def test_a_childs_lease_begins_when_it_is_started_and_some_may_be_silent_for_longer(remote: Remote) -> None:
    remote.groups.watch(["rewards"])
    assert remote.live(LEASE_S + 1, patience={"rewards": 3 * LEASE_S}) == []
    assert remote.live(2 * LEASE_S - 2, patience={"rewards": 3 * LEASE_S}) == []
    lost = remote.live(2, patience={"rewards": 3 * LEASE_S})
    assert lost == [Change("rewards", ("rewards",), 1, is_lost=True)]


def test_a_controller_that_was_stopped_accuses_nobody_of_having_been_silent_meanwhile(remote: Remote) -> None:
    remote.join()
    remote.groups.watch(["rewards"])
    remote.ports.answering = {*TWO, "trainer", "rewards"}
    assert remote.live(LEASE_S) == []
    remote.ports.answering = set()
    remote.clock.advance(10 * LEASE_S)
    assert remote.groups.check(remote.ports, busy=(), patience={}) == [], "their answers may be on their way"
    assert remote.live(LEASE_S - 1) == []
    assert len(remote.live(2)) == 3, "from then on as ever"


def test_the_most_silent_is_who_was_not_heard_of_for_a_lease_at_least(remote: Remote) -> None:
    remote.groups.watch(["rewards"])
    remote.join()
    remote.ports.answering = {*TWO}
    patience = {"trainer": 100.0, "rewards": 100.0}
    remote.live(LEASE_S - 1, patience=patience)
    assert remote.groups.most_silent() is None
    remote.live(2, patience=patience)
    assert remote.groups.most_silent() == "rewards"
    assert remote.groups.silence_s("rewards") == pytest.approx(LEASE_S + 1)


def test_who_left_as_told_is_gone_and_nobody_is_told(remote: Remote) -> None:
    remote.join()
    remote.ports.calls.clear()
    remote.groups.left("generator-0")
    remote.groups.left("rewards")
    assert remote.groups.remote_present == ["generator-0", "trainer"], "its other rank is still to be heard"
    remote.groups.left("generator-0@1")
    assert remote.groups.remote_present == ["trainer"]
    assert remote.ports.calls == []


def test_without_processes_nobody_is_watched_and_nothing_is_due() -> None:
    clock = VirtualClock()
    ports: Any = FakePorts(clock)
    groups = Membership(Pipeline((Node("trainer", os.path.join, host="inline"),), ()), lease_s=LEASE_S, clock=clock)
    assert groups.wait_s() == math.inf
    clock.advance(100 * LEASE_S)
    assert groups.check(ports, busy=[], patience={}) == []
    assert ports.beats == []
    assert not groups.is_absent("trainer")
