"""Links whose buckets have a way of their own, as between GPUs: gloo stands for NCCL, threads for ranks."""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from in_process import InProcess

from slipstream.core import wire
from slipstream.core.errors import CheckpointError, WeightSyncError
from slipstream.core.peer_messages import Holding, LinkMember, WeightsLinked, WeightsOffered
from slipstream.weight_sync import link_group
from slipstream.weight_sync.copying import HostMemory
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.link_group import Ends, LinkGroup, Tag, plan_of
from slipstream.weight_sync.relay import Shelf, SlotSource
from slipstream.weight_sync.resharding import Place
from slipstream.weight_sync.slots import Commit, Slots
from slipstream.weight_sync.weight_links import STAGING_NICENESS, Links, give_way

ROWS, COLUMNS = 60, 16
LINKED = WeightsLinked(replica=0, world=2, sources=2, epoch=1)


class GlooPair:
    """Stands for `nccl.Pair`, and holds its callers to the rules that NCCL needs."""

    users: ClassVar[defaultdict[tuple[int, str], set[str]]] = defaultdict(set)

    def __init__(self, store: Any, memory: DeviceMemory, *, is_source: bool, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timeout
        self.store, self.peer, self.sent = store, int(is_source), 0
        self.group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), 1 - self.peer, 2, options)

    def send(self, tensor: torch.Tensor) -> Any:
        self.sent += 1
        assert self.store.add("queued", 0) >= self.sent, "sent before the other end was ready"
        self.users[id(self), "sends"].add(threading.current_thread().name)
        return self.group.send([tensor], self.peer, 0)

    def receive(self, tensor: torch.Tensor) -> Any:
        work = self.group.recv([tensor], self.peer, 0)
        self.store.add("queued", 1)
        self.users[id(self), "receives"].add(threading.current_thread().name)
        return work

    def close(self) -> None: ...


def holding(rows: tuple[int, int], columns: tuple[int, int]) -> Holding:
    """A part of a matrix uint8 [ROWS, COLUMNS]."""
    width = columns[1] - columns[0]
    return Holding(
        num_bytes=(rows[1] - rows[0]) * width,
        names=("w",),
        shapes=((ROWS, COLUMNS),),
        types=("uint8",),
        item_bytes=(1,),
        tensor=np.zeros(1, np.int32),
        start=np.array([[rows[0], columns[0]]]),
        stop=np.array([[rows[1], columns[1]]]),
        offset=np.zeros(1, np.int64),
        strides=np.array([[width, 1]]),
    )


def weights(version: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(version)
    return torch.randint(0, 256, (ROWS, COLUMNS), dtype=torch.uint8, generator=seed)


def offer(version: int) -> WeightsOffered:
    return WeightsOffered(
        version=version,
        slot=0,
        segments=("", ""),
        checksums=(0, 0),
        probe_tokens=np.zeros(1, np.int32),
        probe_logprobs=np.zeros(0, np.float32),
    )


@pytest.mark.timeout(60)
def test_a_source_sends_to_receives_that_are_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows to columns and to whole rows: what is packed, and what travels as it lies."""
    monkeypatch.setattr(link_group, "Pair", GlooPair)
    monkeypatch.setattr(link_group.Ends, "has_pairs", True)
    memory = DeviceMemory(torch.device("cpu"))
    halves = [(0, 25), (25, ROWS)]
    parts = [((0, ROWS), (0, 6)), ((10, 40), (0, COLUMNS))]

    def new_links() -> Links:
        store = dist.FileStore(str(tmp_path / "links"), -1)
        return Links(store, memory=memory, bucket_bytes=100, timeout_s=10.0)

    ends = [new_links() for _ in range(4)]
    slots: list[Slots] = [
        InProcess(memory).create(COLUMNS * (b - a), 1, holding((a, b), (0, COLUMNS))) for a, b in halves
    ]
    for rank, end in enumerate(ends[:2]):
        end.serve(LINKED, SlotSource(slots[rank]), rank)
    readers = [end.receive(LINKED, rank, Shelf(holding(*parts[rank]))) for rank, end in enumerate(ends[2:])]

    def fetch(reader: Any, version: int, shadow: torch.Tensor) -> None:
        try:
            reader.fetch(offer(version), shadow)
        except WeightSyncError as error:
            failures.append(str(error))

    failures: list[str] = []
    for version in range(3):
        for (first, last), each in zip(halves, slots, strict=True):
            each.data(0).copy_(weights(version)[first:last].reshape(-1))
            each.commit(0, Commit(version, 0))
        shadows = [torch.zeros((b - a) * (d - c), dtype=torch.uint8) for (a, b), (c, d) in parts]
        threads = [
            threading.Thread(target=fetch, args=(reader, version, shadow), name=f"reader-{n}")
            for n, (reader, shadow) in enumerate(zip(readers, shadows, strict=True))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert failures == []
        for ((a, b), (c, d)), shadow in zip(parts, shadows, strict=True):
            assert torch.equal(shadow, weights(version)[a:b, c:d].reshape(-1))
    assert len(GlooPair.users) == 8
    senders = [names for (_, what), names in GlooPair.users.items() if what == "sends"]
    assert all(len(names) == 1 for names in senders), "one thread for a pair"
    for reader in readers:
        reader.close()
    for end in ends:
        end.close()


# What others write into the store


def member(**changes: Any) -> bytes:
    """What a source of all columns tells of itself, but for `changes`."""
    whole = holding((0, ROWS), (0, COLUMNS))
    return wire.encode(LinkMember(holding=msgspec.structs.replace(whole, **changes), host="", device=""))


BIG = np.array([[1 << 40, 1 << 40]])
HOSTILE = {
    "junk": b"junk",
    "no such tensor": member(tensor=np.array([7], np.int32)),
    "fewer names than boxes": member(names=()),
    "another number of boxes": member(offset=np.zeros(3, np.int64)),
    "flat boxes": member(start=np.zeros(2, np.int64)),
    "many dimensions": member(start=np.zeros((1, 9), np.int64)),
    "negative extent": member(stop=np.array([[-1, -1]])),
    "huge items": member(item_bytes=(1 << 40,)),
    "items that wrap around": member(item_bytes=((1 << 62) + 1,)),
    "huge box": member(stop=BIG, shapes=((1 << 40, 1 << 40),)),
}


@pytest.mark.parametrize("written", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("is_source", [False, True], ids=["receives", "sends"])
def test_no_plan_reaches_beyond_what_a_rank_holds(written: bytes, is_source: bool) -> None:
    """Whoever reaches the store may write what the other end tells of itself, and what this one did."""
    mine = LinkMember(holding=holding((0, ROWS), (0, COLUMNS)), host="", device="")
    rank = 0 if is_source else 1
    told = [written, written]
    try:
        plan = plan_of(told, mine, rank, 1)
    except WeightSyncError:
        return
    for copies in plan.copies.values():
        for first, last in (copies.reads if is_source else copies.writes,):
            assert 0 <= first <= last <= mine.holding.num_bytes


def test_an_honest_plan_is_made() -> None:
    mine = LinkMember(holding=holding((0, ROWS), (0, 6)), host="", device="")
    plan = plan_of([member(), b"overwritten by now"], mine, 1, 1)
    assert plan.copies[0, 0].num_bytes == ROWS * 6


# Links that break


@pytest.fixture
def link() -> Iterator[tuple[LinkGroup, LinkGroup]]:
    """Both ends of a link, whose own timeout no test would outlive."""
    place, store = Place("here", "cpu"), dist.HashStore()
    ends = Ends(store, "127.0.0.1", place, timedelta(seconds=300), HostMemory())
    linked = WeightsLinked(replica=0, world=1, sources=1, epoch=1)
    with ThreadPoolExecutor(2) as pool:
        source, destination = pool.map(lambda rank: LinkGroup(ends, linked, rank), range(2))
        yield source, destination
        source.close()
        destination.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("closing", [0, 1], ids=["own", "peers"])
def test_no_send_outlives_its_link(link: tuple[LinkGroup, LinkGroup], closing: int) -> None:
    """The last one waits in gloo's queue behind half a gigabyte that is on its way, and gloo forgets it."""
    data, arrived = torch.zeros(64 << 20, dtype=torch.uint8), torch.zeros(64 << 20, dtype=torch.uint8)
    arriving = [link[1].receive(arrived, 0, Tag.HEADER) for _ in range(8)]
    sent = [link[0].send(data, 1, Tag.HEADER) for _ in arriving]
    failures: list[str] = []

    def wait() -> None:
        try:
            sent[-1].wait(timedelta(seconds=300))
        except RuntimeError as error:
            failures.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    link[closing].close()
    waiting.join(30)
    assert not waiting.is_alive()
    assert failures


def test_more_may_be_sent_than_are_ever_waited_for(link: tuple[LinkGroup, LinkGroup]) -> None:
    """Whoever sends on waits for the oldest by itself."""
    tensors = [torch.full((3,), float(n)) for n in range(50)]

    def receive_all() -> list[float]:
        arrived = torch.zeros(3)
        values = []
        for _ in tensors:
            link[1].receive(arrived, 0, Tag.HEADER).wait(timedelta(seconds=30))
            values.append(float(arrived[0]))
        return values

    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(receive_all)
        last = [link[0].send(tensor, 1, Tag.HEADER) for tensor in tensors][-1]
        last.wait(timedelta(seconds=30))
        last.wait(timedelta(seconds=30))  # at once
        assert values.result(30) == list(range(50))


def test_a_receiver_with_another_base_is_told_so_and_not_linked_again(tmp_path: Path) -> None:
    """No version will ever fit: a lost transfer would be asked for again without end."""

    def new_links() -> Links:
        return Links(dist.FileStore(str(tmp_path / "links"), -1), memory=HostMemory(), bucket_bytes=100, timeout_s=20.0)

    linked, whole = msgspec.structs.replace(LINKED, world=1, sources=1), holding((0, ROWS), (0, COLUMNS))
    theirs, ours = (msgspec.structs.replace(whole, base=base * 64) for base in "ab")
    sending, receiving = new_links(), new_links()
    sending.serve(linked, SlotSource(InProcess(HostMemory()).create(ROWS * COLUMNS, 1, theirs)), 0)
    reader = receiving.receive(linked, 0, Shelf(ours))
    with pytest.raises(CheckpointError, match="different base models"):
        reader.fetch(offer(0), torch.zeros(ROWS * COLUMNS, dtype=torch.uint8))
    reader.close()
    sending.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
@pytest.mark.parametrize("niceness", [STAGING_NICENESS - 5, STAGING_NICENESS + 5])
def test_a_thread_gives_way_and_never_asks_for_more(niceness: int) -> None:
    """More than it began with is refused to all but root, and then no version would ever be staged."""
    found: list[int] = []
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))

    def staging() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
        give_way()
        found.append(os.getpriority(os.PRIO_PROCESS, thread))

    thread = threading.Thread(target=staging)
    thread.start()
    thread.join(30)
    assert found == [max(niceness, STAGING_NICENESS)]


def test_a_thread_that_may_not_give_way_stages_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a filter of system calls (systemd's `~@resources`). Else its thread would end, and nothing be staged."""

    def refuse(*_: int) -> None:
        raise PermissionError("setpriority")

    monkeypatch.setattr(os, "setpriority", refuse)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(give_way).result(30)
