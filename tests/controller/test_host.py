"""A host: who it takes to and who it forgets, when it looks whether it is still wanted, and what it says in the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.controller.host import CHECK_TETHER_EVERY_S, Host, report, serve
from slipstream.controller.pipeline import MEMBERSHIP, HostKind, Node, Pipeline
from slipstream.core.channel import Ports, connect_local
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ChannelClosed, ChannelTimeout, RankError, ShapeError
from slipstream.core.executor import Context, Executor
from slipstream.core.peer_messages import Failed, Left, PeerJoined, PeerLost, Peers
from slipstream.core.ports import Outbox
from slipstream.core.rank_group import RankGroup
from slipstream.core.service_messages import Ready
from slipstream.core.types import Message
from slipstream.observe.timeline import ProcessEnd, account_file, read_timeline, timeline_path

PEERS = ("generator-0", "generator-1", "rewards")


class Counting(Executor):
    """Works for so many steps, each of which takes `step_s`, and ends; or is idle for ever."""

    def __init__(self, num_steps: int | None = None, step_s: float = 0.0, clock: VirtualClock | None = None) -> None:
        self.num_steps, self.step_s, self.clock = num_steps, step_s, clock
        self.num_closed = 0

    def init(self, context: Context) -> None:
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        if self.num_steps is None:
            return False
        self.num_steps -= 1
        if self.clock is not None:
            self.clock.advance(self.step_s)
        return True

    @property
    def is_finished(self) -> bool:
        return self.num_steps == 0

    def close(self) -> None:
        self.num_closed += 1


class Tether:
    """Cut when it is looked at for the n-th time."""

    def __init__(self, cut_at: int | None = None) -> None:
        self.fds: list[int] = []
        self.cut_at, self.num_looks = cut_at, 0

    def is_cut(self) -> bool:
        self.num_looks += 1
        return self.num_looks == self.cut_at


class Readers:
    """Stands for the publisher: who is there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def add_reader(self, replica: int) -> None:
        self.calls.append(("add", replica))

    def drop_reader(self, replica: int) -> None:
        self.calls.append(("drop", replica))


class Trainer:
    """A trainer's host in this process, and the other ends of its channels."""

    def __init__(self, folder: Path, executor: Executor, clock: VirtualClock, where: HostKind = "inline") -> None:
        node = Node("trainer", lambda: executor, host=where)
        others = tuple(Node(name, Counting, host="torchrun") for name in PEERS)
        outputs = tuple(ChannelSpec(f"to/{name}", Kind.BROADCAST, "trainer.out", f"{name}.in") for name in PEERS)
        channels = Pipeline((node, *others), outputs).all_channels
        self.ends = connect_local(channels)
        self.host = Host(node, self.ends["trainer"], channels, folder, run_id="run-1", clock=clock)

    def told(self, *changes: PeerJoined | PeerLost) -> None:
        self.ends["controller"].outputs[MEMBERSHIP].put(Peers(changes=changes))

    def said(self) -> list[Message]:
        inbox, found = self.ends["controller"].inputs["events"], []
        while (message := inbox.get_nowait()) is not None:
            found.append(message)
        return found

    def close(self) -> None:
        self.host.close()
        for ports in self.ends.values():
            ports.close()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    hosts: list[Trainer] = []

    def make(executor: Executor, clock: VirtualClock | None = None, where: HostKind = "inline") -> Trainer:
        hosts.append(Trainer(tmp_path, executor, VirtualClock() if clock is None else clock, where))
        return hosts[-1]

    yield make
    for one in hosts:
        one.close()


@pytest.mark.parametrize(("where", "is_remote"), [("torchrun", True), ("process", False), ("inline", False)])
def test_an_executor_is_told_whether_its_process_has_joined(made: Any, where: HostKind, is_remote: bool) -> None:
    assert made(Counting(), where=where).host.context.is_remote is is_remote


def test_replicas_that_come_and_go_get_versions_or_not(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, readers, ports = made(Counting()), Readers(), []
    one.host.context.publisher = readers
    for name in ("rejoin", "shut_out"):
        monkeypatch.setattr(Ports, name, lambda _, executor, n, name=name: ports.append((name, executor, n)))
    one.told(PeerJoined(executor="generator-1", incarnation=1), PeerJoined(executor="generator-1@1", incarnation=1))
    one.told(PeerJoined(executor="rewards", incarnation=1))
    one.told(PeerLost(executor="generator-1", incarnation=1), PeerLost(executor="generator-1@1", incarnation=1))
    one.told(PeerJoined(executor="generator-1", incarnation=2))
    one.host.step()
    assert readers.calls == [("add", 1), ("drop", 1), ("add", 1)], "once for all ranks of a replica"
    assert ports == [
        ("rejoin", "generator-1", 1),
        ("rejoin", "generator-1@1", 1),
        ("rejoin", "rewards", 1),
        ("shut_out", "generator-1", 1),
        ("shut_out", "generator-1@1", 1),
        ("rejoin", "generator-1", 2),
    ]


def test_a_replica_gets_versions_when_the_way_to_all_its_ranks_is_open(made: Any) -> None:
    """A version that is offered in between would reach some of them only, and they would wait for each other."""
    one, readers = made(Counting()), Readers()
    one.host.context.publisher = readers
    one.host._reader_ranks = {"generator-1": 2}
    for incarnation in (1, 2):
        for name in ("generator-1", "generator-1@1"):
            one.told(PeerLost(executor=name, incarnation=incarnation))
        one.told(PeerJoined(executor="generator-1", incarnation=incarnation + 1))
        one.host.step()
        assert readers.calls == [("drop", 1)]
        one.told(PeerJoined(executor="generator-1@1", incarnation=incarnation + 1))
        one.host.step()
        assert readers.calls == [("drop", 1), ("add", 1)]
        readers.calls.clear()


def test_what_is_known_is_no_news(made: Any) -> None:
    """Others are told, too, whenever one joins: who has heard it does nothing."""
    counting = Counting()
    rejoined: list[str] = []
    counting.rejoined = rejoined.append  # type: ignore[method-assign]
    one, readers = made(counting), Readers()
    one.host.context.publisher = readers
    lost, back = (kind(executor="generator-1", incarnation=n) for kind, n in ((PeerLost, 1), (PeerJoined, 2)))
    one.told(lost, lost, back, back, PeerJoined(executor="rewards", incarnation=2), back)
    one.host.step()
    one.told(back, PeerLost(executor="generator-1", incarnation=2))
    one.host.step()
    assert readers.calls == [("drop", 1), ("add", 1), ("drop", 1)]
    assert rejoined == ["generator-1", "rewards"], "the executor hears of each successor once"


@pytest.mark.parametrize(
    ("error", "num_ranks", "may_follow"),
    [
        (RankError("a collective failed"), 1, True),
        (ChannelClosed("'rewards' has ended"), 1, True),
        (ChannelTimeout("nothing was taken"), 1, True),
        (RuntimeError("Connection closed by peer"), 2, True),
        (torch.distributed.DistNetworkError("reset"), 2, True),
        (RuntimeError("no such operator"), 1, False),
        (torch.OutOfMemoryError("no memory"), 2, False),
        (ShapeError("they do not fit"), 2, False),
    ],
)
def test_only_what_anothers_end_leads_to_may_follow_from_it(
    made: Any, error: Exception, num_ranks: int, may_follow: bool
) -> None:
    one = made(Counting())
    report(one.host.ports, "trainer", error, num_ranks=num_ranks)
    assert [m.may_follow for m in one.said() if isinstance(m, Failed)] == [may_follow]


def test_rank_0_alone_tells_the_publisher(made: Any) -> None:
    one, readers = made(Counting()), Readers()
    one.host.context.publisher = readers
    one.host.context.group = RankGroup(1, 2, object())  # type: ignore[arg-type]
    one.told(PeerLost(executor="generator-1", incarnation=1))
    one.host.step()
    assert readers.calls == []


def test_a_peer_that_was_lost_is_passed_by(made: Any) -> None:
    one = made(Counting())
    one.told(PeerLost(executor="generator-1", incarnation=1))
    one.host.step()
    one.ends["trainer"].outputs["out"].put(Ready(executor="x"))
    assert one.ends["generator-0"].inputs["in"].depth == 1
    assert one.ends["generator-1"].inputs["in"].depth == 0


def test_a_busy_process_looks_at_its_tether_now_and_then(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tether, clock, flushed = Tether(), VirtualClock(50.0), []
    monkeypatch.setattr(Outbox, "flush", lambda outbox, deadline_s: flushed.append((outbox.port, deadline_s)))
    one = made(Counting(num_steps=100, step_s=CHECK_TETHER_EVERY_S / 10 + 1e-6, clock=clock), clock)
    one.host.init()
    assert serve(one.host, tether) == 0
    assert 9 <= tether.num_looks <= 11
    assert one.said()[-1] == Left(executor="trainer"), "its last word"
    assert set(flushed) == {("trainer.events", 10.0), ("trainer.out", 10.0)}, "and nothing of it stays behind"


def test_who_hears_that_a_process_has_left_reads_all_of_it(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, clock, read = Counting(num_steps=2), VirtualClock(50.0), []
    one = made(executor, clock, "process")
    events, path = one.host.ports.outputs["events"], timeline_path(tmp_path, "trainer")
    put = events.put

    def look(message: Message) -> None:
        if isinstance(message, Left):
            read.append((executor.num_closed, list(read_timeline(path))))
        put(message)

    monkeypatch.setattr(events, "put", look)
    monkeypatch.setattr(Outbox, "flush", lambda outbox, deadline_s: None)  # both ends are in this thread
    one.host.init()
    assert serve(one.host, Tether()) == 0
    one.host.close()
    assert read == [(1, list(read_timeline(path)))]
    assert isinstance(read[0][1][-1], ProcessEnd)


def test_a_process_is_in_some_state_from_its_beginning_to_its_end(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two spans, where it may wait for the disk to take its timeline."""
    monkeypatch.setattr(Outbox, "flush", lambda outbox, deadline_s: None)
    clock = VirtualClock(50.0)
    one = made(Counting(num_steps=2, step_s=1.0, clock=clock), clock, "process")
    clock.advance(2.0)
    one.host.timeline.backdate("start_up", 49.0)
    clock.advance(1.0)
    one.host.init()
    clock.advance(1.0)
    assert serve(one.host, Tether()) == 0
    told = account_file(timeline_path(tmp_path, "trainer"), 49.0, clock.now_s())
    assert told == pytest.approx({"start_up": 3.0, "overhead": 4.0, "unlabelled": 0.0})


def test_a_process_that_is_cut_off_ends_with_an_error_and_without_a_word(made: Any) -> None:
    clock = VirtualClock(50.0)
    one = made(Counting(num_steps=10**6, step_s=CHECK_TETHER_EVERY_S, clock=clock), clock)
    one.host.init()
    assert serve(one.host, Tether(cut_at=3)) == 1
    assert not [message for message in one.said() if isinstance(message, Left)]


def test_an_idle_process_looks_whenever_it_wakes(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tether = VirtualClock(50.0), Tether(cut_at=3)
    one = made(Counting(), clock)
    monkeypatch.setattr(one.host, "wait", lambda fds, timeout_s: None)  # awake at once, by whatever it was
    one.host.init()
    assert serve(one.host, tether) == 1


def test_an_error_is_reported_with_its_kind_and_where_it_was(made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    one = made(Counting())
    try:
        raise ValueError("boom")
    except ValueError as error:
        code = report(one.host.ports, "trainer", error, num_ranks=1)
    assert code == 1
    [failed] = [message for message in one.said() if isinstance(message, Failed)]
    assert (failed.executor, failed.error, failed.may_follow) == ("trainer", "ValueError: boom", False)
    log = capsys.readouterr().err
    assert 'raise ValueError("boom")' in log
    assert "ValueError: boom" in log
    one.ends["controller"].inputs["events"].close()
    assert report(one.host.ports, "trainer", ValueError("boom"), num_ranks=1) == 1, "also when nobody listens"


def test_an_executor_is_closed_once_also_when_its_init_fails(made: Any) -> None:
    executor = Counting()
    one = made(executor)

    def refuse(_: Context) -> None:
        raise ValueError("no")

    executor.init = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no"):
        one.host.init()
    one.host.close()
    one.host.close()
    assert executor.num_closed == 1
