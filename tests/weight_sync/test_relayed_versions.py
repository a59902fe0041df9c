"""Versions that replicas hand on to one another over links, all in one process: order, faults, and who is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from in_process import InProcess

from slipstream.controller.build import default_pipeline
from slipstream.core.channel import connect_local, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import CheckpointError, WeightSyncError
from slipstream.core.peer_messages import Holding, WeightsLinked, WeightsOffered, WeightsWanted
from slipstream.core.recipes import resolve
from slipstream.weight_sync.copying import HOST
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.relay import Availability, Shelf, SlotSource
from slipstream.weight_sync.resharding import Place
from slipstream.weight_sync.subscriber import Subscriber
from slipstream.weight_sync.weight_links import _WHOLE, LinkReader, Links, _Sender

TOKENS = np.arange(4, dtype=np.int32)
NUM_BYTES = 40_000
BUCKET_BYTES = 10_000
DEADLINE_S = 30.0


def holding() -> Holding:
    """One vector of float32."""
    return Holding(
        num_bytes=NUM_BYTES,
        names=("w",),
        shapes=((NUM_BYTES // 4,),),
        types=("float32",),
        item_bytes=(4,),
        tensor=np.zeros(1, np.int32),
        start=np.array([[0]]),
        stop=np.array([[NUM_BYTES // 4]]),
        offset=np.zeros(1, np.int64),
        strides=np.array([[4]]),
    )


def weights_of(version: int) -> torch.Tensor:
    return torch.randn(NUM_BYTES // 4, generator=torch.Generator().manual_seed(version))


class Parameters:
    def __init__(self) -> None:
        self.flat = torch.zeros(NUM_BYTES // 4)
        self.holding = holding()

    reads_flat = True

    def prepare(self, flat: torch.Tensor) -> None: ...

    def rebind(self, flat: torch.Tensor) -> None:
        self.flat = flat


class Replica:
    """A replica, or a rank of one that is of `world`."""

    def __init__(self, ports: Any, links: Links, number: int, *, rank: int = 0, world: int = 1) -> None:
        self.ports, self.number = ports, number
        self.parameters = Parameters()
        self.subscriber = Subscriber(
            ports.inputs["offers"],
            ports.outputs["releases"],
            InProcess(),
            replica=number,
            rank=rank,
            world=world,
            links=links,
        )
        self.subscriber.open(self.parameters, lambda tokens: np.zeros(3, np.float32), 1e9, is_threaded=True)

    @property
    def parent(self) -> int:
        fetch = self.subscriber._fetch
        assert isinstance(fetch, LinkReader)
        return fetch._linked.parent

    def poll(self) -> bool:
        """As the generator's loop does it: what is ready becomes live."""
        news = self.subscriber.poll()
        return self.subscriber.commit() is not None or news


class Rig:
    """A trainer on machine 't' and a replica on each of `hosts`, or one on all of them. `delta`, `timeout_s`: of the
    links."""

    def __init__(
        self,
        folder: Path,
        hosts: Sequence[str],
        *,
        delta: bool = False,
        timeout_s: float = 20.0,
        num_slots: int = 2,
        is_one: bool = False,
    ) -> None:
        specs = [
            spec
            for number in range(len(hosts))
            for spec in (
                ChannelSpec(f"offers_{number}", Kind.WEIGHTS, "t.offers", f"g{number}.offers"),
                ChannelSpec(f"releases_{number}", Kind.GATHER, f"g{number}.releases", "t.releases"),
            )
        ]
        store = dist.FileStore(str(folder / "links"), -1)

        def links(host: str) -> Links:
            return Links(store, place=Place(host), timeout_s=timeout_s, bucket_bytes=BUCKET_BYTES, delta=delta)

        self.ports = connect_local(specs)
        trainer = self.ports["t"]
        self.live = torch.zeros(NUM_BYTES // 4)
        self.publisher = Publisher(
            trainer.outputs["offers"],
            trainer.inputs["releases"],
            InProcess(),
            num_readers=1 if is_one else len(hosts),
            reader_ranks=len(hosts) if is_one else 1,
            num_slots=num_slots,
            links=links("t"),
        )
        self.publisher.open(self.live, holding=holding())
        self.replicas = [
            Replica(self.ports[f"g{n}"], links(host), 0, rank=n, world=len(hosts))
            if is_one
            else Replica(self.ports[f"g{n}"], links(host), n)
            for n, host in enumerate(hosts)
        ]

    def publish(self, version: int) -> bool:
        self.live.copy_(weights_of(version))
        return self.publisher.publish(version, TOKENS, np.zeros(3, np.float32))

    def until(self, condition: Callable[[], bool], replicas: Sequence[Replica] | None = None) -> None:
        """Let the trainer and `replicas` (all) work until `condition`."""
        working = self.replicas if replicas is None else replicas
        while not condition():
            news = [self.publisher.poll(), *(replica.poll() for replica in working)]
            if not any(news) and not condition():
                inputs = [one for replica in working for one in replica.ports.inputs.values()]
                fds = [fd for replica in working for fd in replica.subscriber.wait_fds()]
                failures = [replica.subscriber.failure for replica in working]
                assert wait([*inputs, *self.ports["t"].inputs.values()], [], fds, timeout_s=DEADLINE_S), failures

    def take(self, version: int, replicas: Sequence[Replica] | None = None) -> None:
        working = self.replicas if replicas is None else replicas
        self.until(lambda: all(replica.subscriber.version == version for replica in working), replicas)
        for replica in working:
            assert torch.equal(replica.parameters.flat, weights_of(version)), replica.number

    def close(self) -> None:
        self.publisher.close()
        for replica in self.replicas:
            replica.subscriber.close()
        for ports in self.ports.values():
            ports.close()


@contextmanager
def running(folder: Path, hosts: Sequence[str], **how: Any) -> Iterator[Rig]:
    rig = Rig(folder, hosts, **how)
    try:
        yield rig
    finally:
        rig.close()


@pytest.mark.parametrize("delta", [False, True])
def test_versions_go_from_one_to_the_next_bit_for_bit(delta: bool, tmp_path: Path) -> None:
    with running(tmp_path, "bbct", delta=delta) as rig:
        for version in range(5):
            rig.publish(version)
            rig.take(version)
        assert [replica.parent for replica in rig.replicas] == [-1, 0, 1, -1]
        assert [replica.subscriber.stats.num_failed_transfers for replica in rig.replicas] == [0] * 4
        assert rig.publisher.stats.num_skipped == 0


@pytest.mark.parametrize(("hosts", "holds_back"), [("bb", True), ("bt", False), ("bc", True)])
def test_a_stopped_one_holds_versions_back_only_where_it_may_be_reading_what_they_overwrite(
    hosts: str, holds_back: bool, tmp_path: Path
) -> None:
    """One that another feeds reads that one's buffer, which is written again two versions later."""
    with running(tmp_path, hosts) as rig:
        going = rig.replicas[:1]
        assert rig.publish(0)
        rig.take(0)
        assert (rig.replicas[1].parent == 0) == holds_back
        for version in range(1, 6):
            is_offered = version < 3 or not holds_back
            assert rig.publish(version) == is_offered
            rig.take(version if is_offered else 2, going)
        rig.take(5)
        assert all(replica.subscriber.failure is None for replica in rig.replicas)


class Gate:
    """Lets the trainer send `extent` of a version only once it is open; what lies before it goes at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first_byte: int) -> None:
        self.open = threading.Event()
        wait_for_slot = SlotSource.wait

        def gated(
            source: SlotSource, version: int, slot: int, extent: tuple[int, int], timeout_s: float
        ) -> Availability:
            if extent[1] > first_byte and not self.open.wait(timeout_s):
                return Availability.AWAITED
            return wait_for_slot(source, version, slot, extent, timeout_s)

        monkeypatch.setattr(SlotSource, "wait", gated)


def test_a_bucket_is_handed_on_before_the_next_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, "bbb") as rig:
        rig.publish(0)
        rig.take(0)
        gate = Gate(monkeypatch, 2 * BUCKET_BYTES)
        rig.publish(1)
        last = rig.replicas[-1]
        shelf = last.subscriber._shelf
        assert shelf is not None
        rig.until(lambda: all(replica.subscriber._staging is not None for replica in rig.replicas))
        assert shelf.wait(1, 0, (0, BUCKET_BYTES), DEADLINE_S) is Availability.READY
        assert shelf.wait(1, 0, (2 * BUCKET_BYTES, 3 * BUCKET_BYTES), 0.0) is Availability.AWAITED
        gate.open.set()
        rig.take(1)


def test_who_is_fed_waits_for_what_its_source_has_not_begun(tmp_path: Path) -> None:
    with running(tmp_path, "bb") as rig:
        rig.publish(0)
        rig.take(0)
        first, second = rig.replicas
        rig.publish(1)
        # The first replica does not look for offers yet; the second asks it for what it does not have.
        rig.until(lambda: second.subscriber._staging is not None, [second])
        rig.take(1, [first])
        rig.take(1, [second])
        assert second.parent == 0
        assert second.subscriber.stats.num_failed_transfers == 0


def test_a_version_that_the_source_passed_over_is_passed_over(tmp_path: Path) -> None:
    with running(tmp_path, "bb") as rig:
        rig.publish(0)
        rig.take(0)
        first, second = rig.replicas
        rig.publish(1)
        rig.until(lambda: second.subscriber._staging is not None, [second])
        rig.publish(2)
        rig.take(2)  # the first takes the newest of two
        assert first.subscriber.stats.num_passed_over == 1
        assert second.subscriber.stats.num_passed_over == 1
        assert second.subscriber.stats.num_failed_transfers == 0
        assert [first.parent, second.parent] == [-1, 0]


def test_a_source_that_is_lost_amid_a_version_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain of three: the second and the third miss nothing, and every slot comes free."""
    with running(tmp_path, "bbb") as rig:
        rig.publish(0)
        rig.take(0)
        gate = Gate(monkeypatch, 2 * BUCKET_BYTES)
        rig.publish(1)
        dead, *alive = rig.replicas
        shelf = alive[0].subscriber._shelf
        assert shelf is not None
        rig.until(lambda: all(replica.subscriber._staging is not None for replica in rig.replicas))
        assert shelf.wait(1, 0, (0, BUCKET_BYTES), DEADLINE_S) is Availability.READY
        rig.publisher.drop_reader(0)
        gate.open.set()
        rig.take(1, alive)
        assert [replica.parent for replica in alive] == [-1, 1]
        for version in range(2, 6):
            rig.publish(version)
            rig.take(version, alive)
        assert rig.publisher.stats.num_skipped == 0
        rig.until(lambda: len(rig.publisher._ledger.free_slots()) == 3, alive)

        rig.publisher.add_reader(0)  # it never was away: it finds its link closed, and asks for another
        rig.take(5)
        assert dead.parent == 2


def test_a_source_that_does_nothing_is_given_up(tmp_path: Path) -> None:
    """The first replica hangs before it hears of the link: the second asks again, and is fed by the trainer."""
    with running(tmp_path, "bb", timeout_s=1.0) as rig:
        first, second = rig.replicas
        rig.publish(0)
        rig.until(lambda: rig.publisher._tree.parent(0) == -1, [])
        rig.until(lambda: second.subscriber._fetch is not None and second.parent == 0, [second])
        rig.take(0, [second])
        assert second.parent == -1
        assert second.subscriber.stats.num_failed_transfers == 1
        rig.take(0, [first])


def test_another_base_ends_the_replica(tmp_path: Path) -> None:
    """As a lost transfer it would be asked for again without end."""
    with running(tmp_path, "b") as rig:
        subscriber = rig.replicas[0].subscriber
        assert subscriber._shelf is not None
        subscriber._shelf.holding = msgspec.structs.replace(holding(), base="b" * 64)
        rig.publish(0)
        with pytest.raises(CheckpointError, match="different base models"):
            rig.until(lambda: subscriber.stats.num_failed_transfers > 0)
        assert subscriber.stats.num_failed_transfers == 0


def test_a_replica_that_still_loads_does_not_hold_up_the_links_of_a_hundred_others(tmp_path: Path) -> None:
    """Each is told of every link, and offered again what was there before; it reads nothing of that meanwhile."""
    number = 100
    config = resolve("quickstart", {"generator": {"replicas": number}})
    channels = default_pipeline(config, remote=("trainer", "generator")).all_channels
    ports = connect_local([channel for channel in channels if channel.name.startswith("weights/")])
    trainer = ports["trainer"]
    store = dist.FileStore(str(tmp_path / "links"), -1)
    links = Links(store, place=Place("t"), timeout_s=1.0, bucket_bytes=BUCKET_BYTES)
    publisher = Publisher(
        trainer.outputs["weights"],
        trainer.inputs["weights-released"],
        InProcess(),
        num_readers=number,
        links=links,
    )
    with closing(publisher):
        publisher.open(torch.zeros(NUM_BYTES // 4), holding=holding())
        publisher.publish(0, TOKENS, np.zeros(3, np.float32))
        for replica in range(number - 1):
            publisher.add_reader(replica)
            asks = WeightsWanted(replica=replica, rank=0, world=1, is_linked=True, host="b")
            ports[f"generator-{replica}"].outputs["weights-released"].put(asks)
            publisher.poll()  # ChannelTimeout, where there was no room
        assert ports[f"generator-{number - 1}"].inputs["weights"].depth == 1 + 2 * (number - 1)
    for each in ports.values():
        each.close()


@pytest.mark.parametrize("broken", [[0], [1], [0, 1]])
def test_a_link_that_breaks_at_some_ranks_of_a_replica_is_made_anew_for_all(broken: list[int], tmp_path: Path) -> None:
    with running(tmp_path, "bb", is_one=True) as rig:
        rig.publish(0)
        rig.take(0)
        for rank in broken:
            group = rig.replicas[rank].subscriber._fetch._group  # type: ignore[union-attr]
            group.close()
        for version in range(1, 4):
            rig.publish(version)
            rig.take(version)
        assert [rank.subscriber._epoch for rank in rig.replicas] == [2, 2], "one link for all, and once"
        assert [rank.subscriber.stats.num_failed_transfers for rank in rig.replicas][broken[0]] == 1
        rig.until(lambda: len(rig.publisher._ledger.free_slots()) == 3)


def test_one_that_cannot_keep_up_is_fed_by_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source writes the buffer that it reads: never a mixture, and the next version comes from elsewhere.

    With two versions in transit the trainer waits for the slower one, and there is no third to be written.
    """
    with running(tmp_path, "bb", num_slots=4) as rig:
        rig.publish(0)
        rig.take(0)
        first, second = rig.replicas
        reader, may_land, has_begun = second.subscriber._fetch, threading.Event(), threading.Event()
        land = LinkReader._land

        def slow(self: LinkReader, *args: Any) -> None:
            if self is reader:
                has_begun.set()
                assert may_land.wait(DEADLINE_S)
            land(self, *args)

        monkeypatch.setattr(LinkReader, "_land", slow)
        rig.publish(1)
        rig.until(lambda: second.subscriber._staging is not None)
        assert has_begun.wait(DEADLINE_S)
        for version in (2, 3):
            rig.until(lambda version=version: first.subscriber.version == version - 1)  # type: ignore[misc]
            rig.publish(version)
        rig.until(lambda: first.subscriber.version == 3)
        may_land.set()
        rig.take(3)
        assert second.parent == -1
        assert second.subscriber.stats.num_failed_transfers == 1
        rig.publish(4)
        rig.take(4)


TIMEOUT_S = 2.0


def test_silence_is_a_fault_and_slowness_is_none(tmp_path: Path) -> None:
    """A source that gets pieces for longer than a timeout is waited for; one that gets nothing for so long is not."""
    store = dist.FileStore(str(tmp_path / "links"), -1)
    ends = [Links(store, timeout_s=TIMEOUT_S, bucket_bytes=BUCKET_BYTES) for _ in range(2)]
    linked = WeightsLinked(replica=1, world=1, sources=1, epoch=1, parent=0)
    source, extents = Shelf(holding()), [(first, first + 2000) for first in range(0, NUM_BYTES, 2000)]
    ends[0].serve(linked, source, 0)
    reader = ends[1].receive(linked, 0, Shelf(holding()))

    def offer(version: int) -> WeightsOffered:
        return WeightsOffered(
            version=version,
            slot=0,
            segments=(),
            checksums=(),
            probe_tokens=TOKENS,
            probe_logprobs=np.zeros(3, np.float32),
        )

    def land() -> None:
        source.begin(1, weights_of(1), extents)
        for index in range(len(extents)):
            time.sleep(TIMEOUT_S / 10)
            source.landed(index)

    slow = threading.Thread(target=land)
    shadow = torch.zeros(NUM_BYTES // 4)
    try:
        started_s = time.monotonic()
        slow.start()
        reader.fetch(offer(1), shadow)
        assert time.monotonic() - started_s > 1.5 * TIMEOUT_S
        assert torch.equal(shadow, weights_of(1))
        slow.join(DEADLINE_S)
        with pytest.raises(WeightSyncError, match="does not arrive there"):
            reader.fetch(offer(2), shadow)
        assert time.monotonic() - started_s < DEADLINE_S
    finally:
        reader.close()
        for end in ends:
            end.close()


class _Once:
    """Work of c10d: what has arrived ends one wait for it, and no second one."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, _: timedelta) -> None:
        self.waits += 1
        assert self.waits == 1, "gloo would wait here until the timeout"


@pytest.mark.parametrize("num_there", range(5))
def test_everything_sent_is_waited_for_once_wherever_a_version_goes_away(num_there: int) -> None:
    sent: list[_Once] = []

    def send(*_: Any) -> _Once:
        sent.append(_Once())
        return sent[-1]

    def state_of(_version: int, _slot: int, extent: tuple[int, int], _timeout_s: float) -> Availability:
        return Availability.READY if extent[0] < num_there else Availability.GONE

    buckets = [
        SimpleNamespace(
            num_bytes=1,
            copies=SimpleNamespace(is_one_run=True, source=None),
            taken_from=(first, first + 1),
            slice_of=lambda _, first=first: slice(first, first + 1),
        )
        for first in range(4)
    ]
    links = SimpleNamespace(delta=False, memory=HOST, timeout=timedelta(seconds=1))
    source = SimpleNamespace(wait=state_of, data=lambda *_: torch.zeros(4, dtype=torch.uint8))
    _Sender(links, SimpleNamespace(send=send), source, buckets, 1).send(1, 0, -1)  # type: ignore[arg-type]
    assert [work.waits for work in sent] == [1] * (2 * min(num_there, 4) + (num_there < 4))


def test_a_bucket_whose_source_begins_the_version_again_is_sent_when_it_is_there_again() -> None:
    """The source loses its own source while the bucket is packed: nobody is told that it will not come."""
    states = iter([Availability.READY, Availability.AWAITED, Availability.READY, Availability.READY])
    sent: list[torch.Tensor] = []

    def send(tensor: torch.Tensor, *_: Any) -> _Once:
        sent.append(tensor)
        return _Once()

    copies = SimpleNamespace(is_one_run=True, source=np.array([0]), reads=(0, 4), packed=lambda: None)
    bucket: Any = SimpleNamespace(
        num_bytes=4, copies=copies, packing=None, unpacking=None, taken_from=(0, 4), slice_of=lambda _: slice(0, 4)
    )
    links = SimpleNamespace(delta=False, memory=HOST, timeout=timedelta(seconds=1))
    data = torch.arange(4, dtype=torch.uint8)
    source = SimpleNamespace(wait=lambda *_: next(states), data=lambda *_: data)
    sender = _Sender(links, SimpleNamespace(send=send), source, [bucket], 1)  # type: ignore[arg-type]
    sender.send(1, 0, -1)
    header, payload = sent
    assert header.tolist()[:2] == [_WHOLE, 4]
    assert torch.equal(payload, data)
    assert next(states, None) is None
