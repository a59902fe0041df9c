"""Garbage, floods and idle connections at every port that a run listens at: it goes on, and gives back what it had."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from listeners import listening
from torch.distributed import HashStore, TCPStore

from slipstream.controller.meeting import Listen, host_store
from slipstream.core.addresses import StoreAddresses
from slipstream.core.channel import connect_by_book, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.keys import RunKeys
from slipstream.core.ports import Inbox
from slipstream.core.service_messages import CheckpointSaved
from slipstream.launch import MAX_DESCRIPTORS, allow_connections
from slipstream.observe.watch.server import Watch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for ports in /proc")

NUM_IDLE = 1000
FLOOD_BYTES, PIECE_BYTES, SEND_TIMEOUT_S = 4 << 20, 1 << 16, 1.0
DEADLINE_S = 60.0
STORE_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)  # what c10d's store wants to hear first
ZMQ_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(33)


def garbage() -> Iterator[bytes]:
    """For a store, ZeroMQ, gloo and HTTP: starts that are right, lengths that are not, and noise."""
    noise = random.Random(7)
    yield b""
    yield b"\0"
    yield b"\xff" * 64
    yield b"GET /api/live HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999\r\n\r\n"
    yield b"GET /" + b"a" * 100_000
    yield ZMQ_GREETING + b"\x06\xff" + b"\xff" * 8 + noise.randbytes(100)
    yield ZMQ_GREETING + b"\x04\x05HELLO" + noise.randbytes(194)
    for operation in range(20):
        yield STORE_MAGIC + bytes([operation]) + struct.pack("<Q", (1 << 63) - 1) + noise.randbytes(50)
    for number in range(32, 40):
        yield struct.pack("<q", number) + noise.randbytes(300)
    for _ in range(20):
        yield noise.randbytes(noise.randrange(1, 4000))


@contextmanager
def store() -> Iterator[tuple[int, Callable[[], None]]]:
    server = host_store(Listen(), timeout=timedelta(seconds=DEADLINE_S))
    said = 0

    def works() -> None:
        nonlocal said
        said += 1
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
        client.set("said", str(said))
        assert server.get("said") == str(said).encode()

    yield server.port, works


@contextmanager
def channel() -> Iterator[tuple[int, Callable[[], None]]]:
    specs = [ChannelSpec("c", Kind.GATHER, "a.out", "b.in", capacity=64, deadline_s=DEADLINE_S)]
    book = StoreAddresses(specs, HashStore(), RunKeys.new(), deadline_s=DEADLINE_S)
    with ExitStack() as stack:
        b, a = (stack.enter_context(closing(connect_by_book(specs, [name], book, 1)[name])) for name in ("b", "a"))
        inbox = b.inputs["in"]
        assert isinstance(inbox, Inbox)

        def works() -> None:
            a.outputs["out"].put(CheckpointSaved(step=1, path="p"))
            deadline_s = time.monotonic() + DEADLINE_S
            while inbox.get_nowait() is None:
                assert time.monotonic() < deadline_s, "the message does not arrive"
                wait([inbox], [a.outputs["out"]], timeout_s=0.2)

        for end in (inbox, a.outputs["out"]):
            end.wake.fileno()  # else opened by the first wait, which may come in the test
        yield int(inbox.addresses[0].rpartition(":")[2]), works


@contextmanager
def gloo() -> Iterator[tuple[int, Callable[[], None]]]:
    """Two ranks that have met, as those of a group or a link; before that, who connects first is taken for a rank."""
    before, met = listening(os.getpid()), HashStore()
    groups: list[dist.ProcessGroup] = []

    def join(rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=DEADLINE_S)
        groups.append(dist.ProcessGroupGloo(met, rank, 2, options))

    ranks = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(DEADLINE_S)
    sender, receiver = sorted(groups, key=lambda group: group.rank())

    def works() -> None:
        work, received = sender.send([torch.ones(3)], 1, 0), torch.zeros(3)
        receiver.recv([received], 0, 0).wait(timedelta(seconds=DEADLINE_S))
        work.wait(timedelta(seconds=DEADLINE_S))
        assert received.tolist() == [1.0] * 3

    yield min(port for _, port in listening(os.getpid()) - before), works


@contextmanager
def watch(folder: Path) -> Iterator[tuple[int, Callable[[], None]]]:
    with Watch(folder) as page:

        def works() -> None:
            with urllib.request.urlopen(page.url, timeout=DEADLINE_S) as answer:
                assert answer.status == 200

        yield page.port, works


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def come_back_to(count: int, what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while num_descriptors() > count:
        assert time.monotonic() < deadline_s, f"{what}: {num_descriptors()} descriptors, {count} before"
        time.sleep(0.05)


def connect(port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
    peer.settimeout(SEND_TIMEOUT_S)
    return peer


PORTS = ("store", "channel", "gloo", "watch")


@pytest.fixture(params=PORTS)
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """(what, port, a check that it works) of each kind of port."""
    opened = {"store": store, "channel": channel, "gloo": gloo, "watch": lambda: watch(tmp_path)}[request.param]
    with opened() as (port, works):
        works()
        yield request.param, port, works


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Ask for it before `listener`, which may close its connections only at its end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * NUM_IDLE:
        pytest.skip("both ends of all connections are in this process, which may not have so many")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3 * NUM_IDLE), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_garbage_is_refused_and_costs_nothing(listener: tuple[str, int, Callable[[], None]]) -> None:
    what, port, works = listener
    before = num_descriptors()
    count = 0
    for junk in garbage():
        count += 1
        with closing(connect(port)) as peer, suppress(OSError):
            peer.sendall(junk)
            peer.shutdown(socket.SHUT_WR)
    works()
    come_back_to(before + count * (what == "gloo"), what)  # gloo keeps what connects: docs/cluster.md


def test_a_flood_stops_nobody(listener: tuple[str, int, Callable[[], None]]) -> None:
    what, port, works = listener
    before, noise = num_descriptors(), random.Random(7).randbytes(PIECE_BYTES)
    for start in (b"", STORE_MAGIC, ZMQ_GREETING, b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with closing(connect(port)) as peer, suppress(OSError):  # it hangs up, or reads no more
            peer.sendall(start)
            for _ in range(FLOOD_BYTES // PIECE_BYTES):
                peer.sendall(noise)
    works()
    come_back_to(before + 4 * (what == "gloo"), what)


@pytest.mark.parametrize("listener", [*PORTS[:-1], pytest.param(PORTS[-1], marks=pytest.mark.slow)], indirect=True)
def test_a_thousand_idle_connections_stop_nobody(
    many_descriptors: None, listener: tuple[str, int, Callable[[], None]]
) -> None:
    """Of the watch page, which has 96 at a time, they may stop others, until they have been idle for ten seconds."""
    what, port, works = listener
    before = num_descriptors()
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            stack.enter_context(closing(connect(port)))
        if what != "watch":
            works()
    until_it_works(works)
    come_back_to(before + NUM_IDLE * (what == "gloo"), what)


def until_it_works(works: Callable[[], None]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            works()
        except (urllib.error.HTTPError, OSError):
            assert time.monotonic() < deadline_s, "the page does not come back"
            time.sleep(0.1)
        else:
            return


def test_a_run_on_several_machines_may_have_as_many_descriptors_as_the_system_allows() -> None:
    """With the usual 1,024 the connections above would end a process that has a port of gloo's."""
    soft_before, hard_before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard_before))
    try:
        allow_connections()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_before, hard_before))
    assert hard == hard_before
    assert soft == (MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS))
