"""Channels between machines, tested on one: TCP, keys, cut connections, executors that come back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import is_alive
from tcp_proxy import TcpProxy
from torch.distributed import HashStore, TCPStore

from slipstream.core import frames, links, wire
from slipstream.core.addresses import Address, StoreAddresses, grant_incarnation, numeric_address
from slipstream.core.channel import Ports, connect_by_book, make_transport_dir, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout, ConfigError
from slipstream.core.keys import RunKeys
from slipstream.core.lease import Lease
from slipstream.core.ports import Inbox, Outbox
from slipstream.core.service_messages import CheckpointSaved, Exported
from slipstream.core.types import Message, Stop

SPECS = [ChannelSpec("c", Kind.GATHER, "a.out", "b.in", capacity=64, deadline_s=5.0)]
KEYS = RunKeys.new()


class Books:
    """The address books of a run's processes; behind proxies where `is_proxied`."""

    def __init__(self, specs: Sequence[ChannelSpec], *, is_proxied: bool = False) -> None:
        self.specs, self.store, self.is_proxied = specs, HashStore(), is_proxied
        self.proxies: dict[Address, TcpProxy] = {}
        self.opened: list[Ports] = []

    def connect(self, executor: str, incarnation: int = 1, keys: RunKeys | None = KEYS) -> Ports:
        ports = connect_by_book(self.specs, [executor], ProxiedBook(self, keys), incarnation)[executor]
        self.opened.append(ports)
        return ports

    def address_of(self, port: str) -> Address:
        return StoreAddresses(self.specs, self.store, KEYS).find(port)

    def close(self) -> None:
        for ports in self.opened:
            ports.close()
        for proxy in self.proxies.values():
            proxy.close()


class ProxiedBook(StoreAddresses):
    def __init__(self, books: Books, keys: RunKeys | None) -> None:
        super().__init__(books.specs, books.store, keys, deadline_s=0.2)
        self._books = books

    def find(self, port: str, incarnation: int = 0) -> Address:
        address = super().find(port, incarnation)
        if not self._books.is_proxied:
            return address
        proxy = self._books.proxies.get(address)
        if proxy is None:
            proxy = self._books.proxies[address] = TcpProxy(address.at)
        return replace(address, at=proxy.address)


@pytest.fixture
def books() -> Iterator[Callable[..., Books]]:
    made: list[Books] = []

    def make(specs: Sequence[ChannelSpec] = SPECS, *, is_proxied: bool = False) -> Books:
        made.append(Books(specs, is_proxied=is_proxied))
        return made[-1]

    yield make
    for one in made:
        one.close()


def item(step: int, num_bytes: int = 1) -> CheckpointSaved:
    return CheckpointSaved(step=step, path="p" * num_bytes)


def drain(inbox: Inbox) -> list[int]:
    taken: list[int] = []
    while (message := inbox.get_nowait()) is not None:
        if message != Exported(path="alive"):
            assert isinstance(message, CheckpointSaved)
            taken.append(message.step)
    return taken


def take(target: Ports, count: int, source: Ports | None = None, *, timeout_s: float = 10.0) -> list[int]:
    """Take `count` messages of `in`, while the source pumps its connections."""
    taken: list[int] = []
    deadline_s = time.monotonic() + timeout_s
    while len(taken) < count:
        left_s = deadline_s - time.monotonic()
        outboxes = source.outputs.values() if source is not None else ()
        assert left_s > 0, f"only {len(taken)} of {count} arrived"
        wait([target.inputs["in"]], outboxes, timeout_s=min(left_s, 0.2))
        taken += drain(target.inputs["in"])
    return taken


def has_room(outbox: Outbox) -> bool:
    """Whether a `put` would not wait. Without a trace: after a no of `has_room_for`, each `wait` ends at once."""
    return all(link.has_room() for link in outbox._links if not link.is_closed)


def until(is_so: Callable[[], bool], ports: Sequence[Ports], timeout_s: float = 10.0) -> None:
    """Let the ports work until `is_so`: also where messages wait, at which `wait` ends at once."""
    deadline_s = time.monotonic() + timeout_s
    inboxes = [inbox for one in ports for inbox in one.inputs.values()]
    outboxes = [outbox for one in ports for outbox in one.outputs.values()]
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        wait(inboxes, outboxes, timeout_s=0.02)
        for end in (*inboxes, *outboxes):
            end.pump()


# Who may talk


def test_messages_pass_in_order_with_keys(books: Callable[..., Books]) -> None:
    run = books()
    b, a = run.connect("b"), run.connect("a")
    assert b.inputs["in"].addresses[0].startswith("tcp://127.0.0.1:")
    for step in range(50):
        a.outputs["out"].put(item(step))
    assert take(b, 50, a) == list(range(50))
    until(lambda: a.outputs["out"].depth == 0, [a, b])
    assert b.inputs["in"].stats.refused_peers == b.inputs["in"].stats.refused == 0


@pytest.mark.parametrize("keys", [RunKeys.new(), None], ids=["wrong key", "no key"])
def test_a_peer_without_the_key_is_refused_counted_and_harmless(
    books: Callable[..., Books], keys: RunKeys | None
) -> None:
    run = books([replace(SPECS[0], deadline_s=0.05)])
    b, a = run.connect("b"), run.connect("a")
    stranger = run.connect("a", incarnation=2, keys=keys)  # it even knows the address
    stranger.outputs["out"].put(item(666))
    refused = b.inputs["in"].stats
    until(lambda: refused.refused_peers >= 1 and stranger.outputs["out"].stats.refused_peers >= 1, [b, stranger])
    a.outputs["out"].put(item(1))
    assert take(b, 1, a) == [1]
    assert b.refusals() == {"refused_peers/b.in": refused.refused_peers}
    assert stranger.outputs["out"].connected == frozenset()
    for step in range(63):
        stranger.outputs["out"].put(item(step))
    with pytest.raises(ChannelTimeout, match=r"handshakes failed; has it the same run key\?"):
        stranger.outputs["out"].put(item(64))
    assert b.inputs["in"].stats.received == 1


def test_unread_refusals_block_no_channel_and_no_close(
    books: Callable[..., Books], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor in a long step reads no connection events; ZeroMQ's thread must not wait for it."""
    monkeypatch.setattr(links, "_RECONNECT_MS", 1)
    monkeypatch.setitem(zmq.Context.instance().sockopts, zmq.RCVHWM, 1)  # where nothing is set
    run = books()
    b = run.connect("b")
    stranger = run.connect("a", keys=RunKeys.new())
    refused = b.inputs["in"].stats
    until(lambda: refused.refused_peers >= 600, [b], timeout_s=120)  # of two events each: ZeroMQ alone keeps 1,001
    stranger.close()
    a = run.connect("a", incarnation=2)
    a.outputs["out"].put(item(1))
    assert take(b, 1, a) == [1]


def test_a_listener_without_the_key_gets_nothing(books: Callable[..., Books]) -> None:
    run = books()
    impostor, a = run.connect("b", keys=None), run.connect("a")
    a.outputs["out"].put(item(1))
    until(lambda: a.outputs["out"].stats.refused_peers >= 1, [a, impostor])
    assert drain(impostor.inputs["in"]) == []
    assert a.outputs["out"].depth == 1


def test_an_address_that_another_port_of_the_run_has_now_delivers_nothing() -> None:
    """Keys differ by port and incarnation, so an outdated address cannot deliver to another port of the run."""
    store = HashStore()
    other = [ChannelSpec("c", Kind.GATHER, "a.out", "x.in")]
    with ExitStack() as stack:
        x = connect_by_book(other, ["x"], StoreAddresses(other, store, KEYS), 1)["x"]
        stack.callback(x.close)
        stolen = {"b.in": x.inputs["in"].addresses}
        StoreAddresses(SPECS, store, KEYS).announce("b", 1, stolen)
        a = connect_by_book(SPECS, ["a"], StoreAddresses(SPECS, store, KEYS), 1)["a"]
        stack.callback(a.close)
        a.outputs["out"].put(item(1))
        until(lambda: x.inputs["in"].stats.refused_peers >= 1, [a, x])
        assert drain(x.inputs["in"]) == []


def test_nothing_of_a_message_or_key_is_on_the_wire_or_in_the_store() -> None:
    store, seen = HashStore(), bytearray()
    secret_path = "a path that nobody else should read"
    with ExitStack() as stack:
        b = connect_by_book(SPECS, ["b"], StoreAddresses(SPECS, store, KEYS), 1)["b"]
        stack.callback(b.close)
        proxy = TcpProxy(b.inputs["in"].addresses[0])
        stack.callback(proxy.close)
        proxy.tap = seen.extend
        StoreAddresses(SPECS, store, KEYS).announce("b", 2, {"b.in": [proxy.address]})

        class Redirected(StoreAddresses):
            def find(self, port: str, incarnation: int = 0) -> Address:
                return Address(proxy.address, 1)

        a = connect_by_book(SPECS, ["a"], Redirected(SPECS, store, KEYS), 1)["a"]
        stack.callback(a.close)
        a.outputs["out"].put(CheckpointSaved(step=1, path=secret_path))
        until(lambda: b.inputs["in"].depth == 1, [a, b])
        assert b.inputs["in"].get_nowait() == CheckpointSaved(step=1, path=secret_path)
    (secret,) = KEYS.as_environment().values()
    derived = KEYS._derived("listen", "b.in", 1)
    public = [derived, zmq.curve_public(derived), zmq.utils.z85.decode(zmq.curve_public(derived))]
    assert len(seen) > 500
    for text in (secret_path.encode(), bytes.fromhex(secret), *public):
        assert text not in seen
    stored = [bytes(store.get(f"slipstream/channels/{key}")) for key in ("a", "a/1", "b", "b/1", "b/2")]
    for text in (secret.encode(), bytes.fromhex(secret), *public):
        assert not any(text in value for value in stored)


# Junk


def raw_dealer(address: str, keys: RunKeys | None) -> zmq.Socket[bytes]:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.set(zmq.LINGER, 0)
    if keys is not None:
        keys.secure_caller(dealer, "b.in", 1)
    dealer.connect(address)
    return dealer


HEADERS = st.builds(
    lambda *values: frames._FRAME.pack(*values),
    st.sampled_from([b"SLP3", b"SLP2"]),
    st.integers(0, 3),
    st.integers(0, 12),
    st.sampled_from([0, 1, 2, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1) | st.integers(0, 5),
    st.integers(0, 2**64 - 1) | st.integers(0, 5),
    st.integers(0, 2**32 - 1) | st.integers(0, 3),
)
FRAMES = st.one_of(
    st.binary(max_size=80),
    st.builds(
        lambda header, name, rest: header + name + rest,
        HEADERS,
        st.sampled_from([b"c", b"d", b"\xff"]),
        st.binary(max_size=40),
    ),
    st.builds(
        lambda place, byte: b"".join((GOOD[:place], bytes([byte]), GOOD[place + 1 :])),
        st.integers(0, 60),
        st.integers(0, 255),
    ),
)
GOOD = frames.pack_data(b"d", 1, 1, 1, wire.encode(CheckpointSaved(step=5, path="p" * 50)))


@settings(deadline=None, max_examples=20, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(FRAMES, min_size=1, max_size=3), min_size=1, max_size=12))
def test_fuzzed_frames_of_a_member_never_crash_or_block(messages: list[list[bytes]]) -> None:
    """Every frame is taken, answered or refused, and the other channel of the port goes on."""
    specs = [
        ChannelSpec("d", Kind.GATHER, "x.out", "b.in", capacity=8),
        ChannelSpec("good", Kind.GATHER, "a.out", "b.in", capacity=8, deadline_s=5.0),
    ]
    run = Books(specs)
    dealer = None
    try:
        b, a = run.connect("b"), run.connect("a")
        dealer = raw_dealer(b.inputs["in"].addresses[0], KEYS)
        for parts in messages:
            dealer.send_multipart(parts)
        dealer.send(b"the last")
        inbox = b.inputs["in"]
        a.outputs["out"].put(Exported(path="good"))
        got: list[Message] = []

        def is_over() -> bool:
            while (message := inbox.get_nowait()) is not None:
                got.append(message)
            return Exported(path="good") in got and inbox.stats.refused >= 1 and a.outputs["out"].depth == 0

        until(is_over, [a, b])
        assert got.count(Exported(path="good")) == 1
        assert inbox.stats.refused <= len(messages) + 1
    finally:
        if dealer is not None:
            dealer.close()
        run.close()


@settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.binary(min_size=1, max_size=200) | st.just(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(100)),
        min_size=1,
        max_size=5,
    )
)
def test_bytes_that_are_not_zeromq_never_crash_or_block(chunks: list[bytes]) -> None:
    run = Books(SPECS)
    try:
        b, a = run.connect("b"), run.connect("a")
        host, _, port = b.inputs["in"].addresses[0].removeprefix("tcp://").rpartition(":")
        stats = b.inputs["in"].stats
        for chunk in chunks:
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(chunk)
        a.outputs["out"].put(item(1))
        assert take(b, 1, a) == [1]
        until(lambda: stats.refused_peers + stats.disconnects == len(chunks), [a, b])
        assert stats.refused == 0
    finally:
        run.close()


def test_a_message_too_large_for_its_channel_is_refused_at_both_ends(books: Callable[..., Books]) -> None:
    small = replace(SPECS[0], max_bytes=100)
    big = ChannelSpec("big", Kind.GATHER, "x.out", "b.in", max_bytes=1000)
    run = books([small, big])
    b, a = run.connect("b"), run.connect("a")
    with pytest.raises(ChannelError, match=r"too large for channel 'c'[\s\S]*100 bytes"):
        a.outputs["out"].put(CheckpointSaved(step=1, path="p" * 100))
    dealer = raw_dealer(b.inputs["in"].addresses[0], KEYS)
    stats = b.inputs["in"].stats
    dealer.send(frames.pack_data(b"c", 1, 1, 1, wire.encode(CheckpointSaved(step=1, path="p" * 200))))
    until(lambda: stats.refused == 1, [a, b])
    dealer.send(frames.pack_data(b"c", 1, 1, 1, b"x" * 10_000))  # larger than any channel of the port may send
    until(lambda: stats.disconnects == 1, [a, b])
    dealer.close()
    a.outputs["out"].put(item(1))
    assert take(b, 1, a) == [1]
    assert a.outputs["out"].stats.sent == 1


def test_a_sender_that_ignores_the_capacity_fills_no_memory(books: Callable[..., Books]) -> None:
    run = books([replace(SPECS[0], capacity=4)])
    b = run.connect("b")
    dealer = raw_dealer(b.inputs["in"].addresses[0], KEYS)
    for sequence in range(1, 101):
        dealer.send(frames.pack_data(b"c", 1, 1, sequence, wire.encode(item(sequence))))
    stats = b.inputs["in"].stats
    until(lambda: stats.refused >= 1, [b])
    assert b.inputs["in"].depth == 4
    dealer.close()


# Addresses


def test_sockets_stay_on_loopback_without_keys() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::"):
        with pytest.raises(ConfigError, match="loopback only"):
            StoreAddresses(SPECS, HashStore(), None, host=host)
    for host in ("0.0.0.0", "::", "224.0.0.1"):
        with pytest.raises(ConfigError, match="others can reach"):
            StoreAddresses(SPECS, HashStore(), KEYS, host=host)
    with pytest.raises(ConfigError, match="no such host"):
        StoreAddresses(SPECS, HashStore(), KEYS, host="no.such.host.invalid")
    assert StoreAddresses(SPECS, HashStore(), KEYS, host="192.0.2.1").listen_at("b.in", 1) == ("tcp://192.0.2.1:*",)
    assert StoreAddresses(SPECS, HashStore(), None).listen_at("b.in", 1) == ("tcp://127.0.0.1:*",)
    assert StoreAddresses(SPECS, HashStore(), KEYS, host="::1").listen_at("b.in", 1) == ("tcp://[::1]:*",)
    assert numeric_address("127.0.0.1").is_loopback


def test_an_address_that_is_not_ours_cannot_be_bound() -> None:
    with pytest.raises(ChannelError, match=r"port 'b.in' cannot listen[\s\S]*192.0.2.1"):
        connect_by_book(SPECS, ["b"], StoreAddresses(SPECS, HashStore(), KEYS, host="192.0.2.1"), 1)


def test_a_peer_that_does_not_come_is_named(books: Callable[..., Books]) -> None:
    run = books()
    with pytest.raises(ChannelTimeout, match=r"'b' did not come[\s\S]*0.2 s"):
        run.connect("a")
    b = run.connect("b")
    a = run.connect("a")
    with pytest.raises(ChannelTimeout, match="'b' did not come: nobody of that name has announced incarnation 2"):
        a.outputs["out"].reconnect("b", 2)
    b.close()


def test_a_signal_ends_the_wait_for_a_peer() -> None:
    """The second Ctrl-C at a controller that waits for groups depends on it."""

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    book = StoreAddresses(SPECS, HashStore(), KEYS, deadline_s=3600.0)
    previous = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1])
    try:
        timer.start()
        with pytest.raises(Interrupted):
            book.find("b.in")
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, previous)
        book.announce("b", 1, {"b.in": ["tcp://127.0.0.1:1"]})  # ends the thread that waits on


def test_channels_that_differ_between_processes_are_named(books: Callable[..., Books]) -> None:
    run = books()
    run.connect("b")
    run.specs = [ChannelSpec("c", Kind.GATHER, "a.out", "b.elsewhere")]
    with pytest.raises(ChannelError, match=r"'b' does not listen at 'b.elsewhere'[\s\S]*b.in"):
        run.connect("a")


def test_incarnations_are_granted_once_and_a_replaced_one_may_not_announce_itself() -> None:
    store = HashStore()
    assert [grant_incarnation(store, "b") for _ in range(3)] == [1, 2, 3]
    assert grant_incarnation(store, "a") == 1
    book = StoreAddresses(SPECS, store, KEYS)
    book.announce("b", 3, {"b.in": ["tcp://127.0.0.1:3"]})
    with pytest.raises(ChannelClosed, match="incarnation 2 of 'b' was replaced by 3"):
        book.announce("b", 2, {"b.in": ["tcp://127.0.0.1:2"]})
    assert book.find("b.in") == Address("tcp://127.0.0.1:3", 3)


def test_executors_of_one_machine_connect_by_ipc_and_others_by_tcp() -> None:
    specs = [ChannelSpec(f"{s}b", Kind.GATHER, f"{s}.out", "b.in", capacity=8, deadline_s=5.0) for s in ("a", "far")]
    store, here, there = HashStore(), make_transport_dir(), make_transport_dir()
    dirs = {"b": here, "a": here, "far": there, "near": None}
    found: dict[str, Ports] = {}
    try:
        for name in ("b", "a", "far"):
            book = StoreAddresses(specs, store, KEYS, transport_dir=dirs[name])
            found[name] = connect_by_book(specs, [name], book, 1)[name]
        schemes = {n: StoreAddresses(specs, store, KEYS, transport_dir=d).find("b.in").at[:4] for n, d in dirs.items()}
        assert schemes == {"b": "ipc:", "a": "ipc:", "far": "tcp:", "near": "tcp:"}
        paths = {StoreAddresses(specs, store, KEYS, transport_dir=here).listen_at("b.in", n)[0] for n in (1, 2)}
        assert len(paths) == 2, "one that ends late must not remove its successor's socket"
        for name in ("a", "far"):
            found[name].outputs["out"].put(Exported(path=name))
        got: set[str] = set()
        while got != {"a", "far"}:
            assert wait([found["b"].inputs["in"]], timeout_s=5)
            while isinstance(message := found["b"].inputs["in"].get_nowait(), Exported):
                got.add(message.path)
    finally:
        for ports in found.values():
            ports.close()
        shutil.rmtree(here)
        shutil.rmtree(there)


# Membership


def test_an_executor_that_came_back_gets_new_messages_only(books: Callable[..., Books]) -> None:
    specs = [
        ChannelSpec("to_b", Kind.BROADCAST, "a.out", "b.in", capacity=8, deadline_s=5.0),
        ChannelSpec("to_c", Kind.BROADCAST, "a.out", "c.in", capacity=8, deadline_s=5.0),
    ]
    run = books(specs)
    b, c = run.connect("b"), run.connect("c")
    a = run.connect("a")
    out = a.outputs["out"]
    out.put(item(0))
    assert take(b, 1, a) == take(c, 1, a) == [0]
    out.put(item(1))  # b dies with this in its queue
    a.shut_out("b", 1)
    out.put(item(2))
    again = run.connect("b", incarnation=2)
    out.put(item(3))
    a.rejoin("b", 2)
    a.rejoin("b", 2)  # twice is once
    a.rejoin("b", 1)  # and old news is none
    out.put(item(4))
    assert take(again, 1, a) == [4]
    assert take(c, 4, a) == [1, 2, 3, 4]
    until(lambda: out.depth == 0, [a, again, c])
    assert drain(again.inputs["in"]) == []


def test_a_replaced_executor_is_told_and_its_puts_raise(books: Callable[..., Books]) -> None:
    specs = [ChannelSpec(f"{s}b", Kind.GATHER, f"{s}.out", "b.in", capacity=8, deadline_s=5.0) for s in ("a", "x")]
    run = books(specs)
    b = run.connect("b")
    old, other = run.connect("a"), run.connect("x")
    inbox = b.inputs["in"]
    for step in range(3):
        old.outputs["out"].put(item(step))
    other.outputs["out"].put(item(50))
    until(lambda: inbox.depth == 4, [old, other, b])
    b.shut_out("a", 1)
    assert inbox.stats.refused == 3
    assert drain(inbox) == [50], "of a dead one nothing is taken any more, also not what had arrived"
    new = run.connect("a", incarnation=2)
    b.rejoin("a", 2)
    new.outputs["out"].put(item(100))
    assert take(b, 1, new) == [100]
    refused = inbox.stats.refused  # a probe may have come, on a slow machine: it is a frame, too
    old.outputs["out"].put(item(3))  # the stopped process goes on, and is told
    until(lambda: inbox.stats.refused > refused, [b])
    wait([], [old.outputs["out"]], timeout_s=0.2)
    with pytest.raises(ChannelClosed, match="incarnation 1 was replaced by 2"):
        old.outputs["out"].put(item(4))
    new.outputs["out"].put(item(101))
    assert take(b, 1, new) == [101]


def test_messages_of_a_replaced_executor_are_no_sign_of_life(books: Callable[..., Books]) -> None:
    """Otherwise they would renew the lease of its successor."""
    run = books()
    b, old = run.connect("b"), run.connect("a")
    inbox = b.inputs["in"]
    old.outputs["out"].put(item(0))
    assert take(b, 1, old) == [0]
    heard_s, refused = inbox.heard_s["a"], inbox.stats.refused
    b.shut_out("a", 1)
    with contextlib.suppress(ChannelClosed):  # a probe has come before, on a slow machine, and `a` was told
        old.outputs["out"].put(item(1))
    until(lambda: inbox.stats.refused > refused, [b])
    assert inbox.heard_s["a"] == heard_s


def test_one_target_that_knows_a_successor_is_enough_to_be_told(books: Callable[..., Books]) -> None:
    """The other targets may not know yet; a replaced executor must not go on with them."""
    specs = [
        ChannelSpec("to_b", Kind.BROADCAST, "a.out", "b.in", capacity=8, deadline_s=5.0),
        ChannelSpec("to_c", Kind.BROADCAST, "a.out", "c.in", capacity=8, deadline_s=5.0),
    ]
    run = books(specs)
    b, c = run.connect("b"), run.connect("c")
    old = run.connect("a")
    b.shut_out("a", 1)
    old.outputs["out"].put(item(0))
    until(lambda: any(link.is_fenced for link in old.outputs["out"]._links), [b, old])
    with pytest.raises(ChannelClosed, match="incarnation 1 was replaced by 2"):
        old.outputs["out"].put(item(1))
    assert take(c, 1) == [0]


def test_late_news_of_a_loss_loses_only_messages_on_their_way(books: Callable[..., Books]) -> None:
    """A process that started late finds the new incarnation first, and hears of the old one's end afterwards."""
    run = books()
    b, a = run.connect("b", incarnation=2), run.connect("a")
    a.outputs["out"].put(item(0))
    assert take(b, 1, a) == [0]
    a.shut_out("b", 1)
    a.rejoin("b", 2)
    a.outputs["out"].put(item(1))
    assert take(b, 1, a) == [1]


def test_taking_what_a_dead_executor_left_acknowledges_nothing_of_its_successor(books: Callable[..., Books]) -> None:
    run = books([replace(SPECS[0], capacity=4)])  # every message is acknowledged
    b, old = run.connect("b"), run.connect("a")
    inbox = b.inputs["in"]
    for step in range(3):
        old.outputs["out"].put(item(step))
    until(lambda: inbox.depth == 3, [old, b])
    new = run.connect("a", incarnation=2)
    new.outputs["out"].put(item(10))
    until(lambda: inbox.depth == 4, [new, b])
    assert [inbox.get_nowait() for _ in range(3)] == [item(step) for step in range(3)]
    new.beat()
    wait([], [new.outputs["out"]], timeout_s=0.2)
    assert new.outputs["out"].depth == 1, "it is still to be taken"
    assert take(b, 1, new) == [10]
    until(lambda: new.outputs["out"].depth == 0, [new, b])


def test_a_put_blocked_by_a_dead_target_goes_on_when_that_is_shut_out(books: Callable[..., Books]) -> None:
    specs = [
        ChannelSpec("to_b", Kind.BROADCAST, "a.out", "b.in", capacity=1, deadline_s=30.0),
        ChannelSpec("to_c", Kind.BROADCAST, "a.out", "c.in", capacity=8, deadline_s=30.0),
    ]
    run = books(specs)
    run.connect("b")
    c = run.connect("c")
    a = run.connect("a")
    out = a.outputs["out"]
    out.put(item(0))
    assert not has_room(out)
    a.shut_out("b", 1)
    assert has_room(out)
    out.put(item(1))
    assert take(c, 2, a) == [0, 1]


# Bad networks


def test_a_connection_that_breaks_loses_nothing(books: Callable[..., Books]) -> None:
    run = books(is_proxied=True)
    b, a = run.connect("b"), run.connect("a")
    (proxy,) = run.proxies.values()
    out, got = a.outputs["out"], []
    for round_ in range(8):
        for step in range(20):
            until(lambda: has_room(out), [a, b])  # acknowledgements that were cut off come when `b` is back
            out.put(item(20 * round_ + step))
            if step == 13:
                proxy.cut()  # with acknowledgements and messages in flight
        sent = 20 * (round_ + 1)
        got += take(b, max(10, sent - len(got) - 40), a)  # nobody else takes: 20 more must find room, of 64
    got += take(b, 160 - len(got), a)
    assert got == list(range(160))
    until(lambda: out.depth == 0, [a, b])
    assert proxy.num_accepted > 1
    assert a.outputs["out"].stats.disconnects >= 1


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_lost_acknowledgement_is_asked_for_again(books: Callable[..., Books], num_more: int) -> None:
    """Also where messages were lost with it, which nobody takes: a sender that would like to put sees the room."""
    run = books(is_proxied=True)
    b, a = run.connect("b"), run.connect("a")
    (proxy,) = run.proxies.values()
    a.outputs["out"].put(item(0))
    until(lambda: b.inputs["in"].depth == 1, [a, b])
    proxy.stall()
    assert drain(b.inputs["in"]) == [0]  # the acknowledgement goes nowhere
    for step in range(num_more):
        a.outputs["out"].put(item(step))
    proxy.cut()
    proxy.restore()
    until(lambda: (a.outputs["out"].depth, b.inputs["in"].depth) == (num_more, num_more), [a, b])
    assert b.inputs["in"].stats.received == 1


@pytest.mark.parametrize("is_together", [False, True])
def test_what_a_broken_connection_left_unread_takes_no_acknowledgement(
    books: Callable[..., Books], is_together: bool
) -> None:
    """ZeroMQ delivers in turns what came over both connections; the answers must go to the one that is left."""
    run = books(is_proxied=True)
    b, a = run.connect("b"), run.connect("a")
    (proxy,) = run.proxies.values()
    out = a.outputs["out"]
    until(lambda: bool(out.connected), [a])
    before = proxy.num_bytes
    with a.together() if is_together else contextlib.nullcontext():
        for step in range(8):
            out.put(item(step, 1000))
    until(lambda: proxy.num_bytes >= before + 8000, [a])  # all comes to `b`, which is in a long step
    before = proxy.num_bytes
    out.beat()  # a `put` that waits for room asks, too
    until(lambda: proxy.num_bytes > before, [a])
    proxy.cut()
    until(lambda: out.stats.disconnects == 1 and bool(out.connected), [a])
    assert take(b, 8, a) == list(range(8))
    until(lambda: out.depth == 0, [a, b])


@pytest.mark.parametrize("seconds", [0.5, pytest.param(10.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["stall", "go_down"])
def test_a_link_that_is_cut_for_a_while_needs_no_call(books: Callable[..., Books], how: str, seconds: float) -> None:
    specs = [*SPECS, ChannelSpec("back", Kind.GATHER, "b.out", "a.in", capacity=64, deadline_s=30.0)]
    run = books(specs, is_proxied=True)
    made: dict[str, Ports] = {}
    starter = threading.Thread(target=lambda: made.update(b=run.connect("b")))
    starter.start()
    made["a"] = run.connect("a")
    starter.join()
    a, b = made["a"], made["b"]
    a.outputs["out"].put(item(0))
    assert take(b, 1, a) == [0]
    for proxy in run.proxies.values():
        getattr(proxy, how)()
    for step in range(1, 40):
        a.outputs["out"].put(item(step))
        b.outputs["out"].put(item(step))
    with pytest.raises(AssertionError):
        until(lambda: b.inputs["in"].depth > 0, [a, b], timeout_s=seconds)
    for proxy in run.proxies.values():
        proxy.restore()
    assert take(b, 39, a) == take(a, 39, b) == list(range(1, 40))


def test_an_address_that_a_foreign_program_had_for_a_while_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ gives up an address at which it finds another protocol."""
    monkeypatch.setattr(links, "_REOPEN_S", 0.2)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # no security

    class Fixed(StoreAddresses):
        at = ""

        def listen_at(self, port: str, incarnation: int) -> tuple[str, ...]:
            return (self.at,)

        def find(self, port: str, incarnation: int = 0) -> Address:
            return Address(self.at, 1)

    book = Fixed(SPECS, HashStore(), KEYS)
    with ExitStack() as stack:
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            book.at = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
            a = connect_by_book(SPECS, ["a"], book, 1)["a"]
            stack.callback(a.close)
            a.outputs["out"].put(item(0))
            stranger.settimeout(10)
            caller, _ = stranger.accept()
            with caller:
                caller.sendall(greeting)
                until(lambda: a.outputs["out"].stats.refused_peers >= 1, [a])
        b = connect_by_book(SPECS, ["b"], book, 1)["b"]
        stack.callback(b.close)
        assert take(b, 1, a) == [0]


def test_back_pressure_holds_across_a_cut(books: Callable[..., Books]) -> None:
    run = books([replace(SPECS[0], capacity=5, deadline_s=0.05)], is_proxied=True)
    b, a = run.connect("b"), run.connect("a")
    out = a.outputs["out"]
    for step in range(5):
        out.put(item(step))
    until(lambda: b.inputs["in"].depth == 5, [a, b])
    for proxy in run.proxies.values():
        proxy.cut()
    until(lambda: out.connected == {"b"} and out.stats.disconnects == 1, [a])
    assert not has_room(out)
    with pytest.raises(ChannelTimeout, match=r"5 messages wait[\s\S]*capacity 5"):
        out.put(item(5))
    assert take(b, 5, a) == list(range(5))
    until(lambda: has_room(out), [a, b])
    out.put(item(5))
    assert take(b, 1, a) == [5]


class Interleaving:
    """A source and a target that both may be replaced, over connections that break, and the messages still owed."""

    def __init__(self) -> None:
        specs = [ChannelSpec("c", Kind.BROADCAST, "a.out", "b.in", capacity=6, deadline_s=5.0)]
        self.run = Books(specs, is_proxied=True)
        self.incarnation = {"a": 1, "b": 1}
        self.b = self.run.connect("b")
        self.a = self.run.connect("a")
        self.zombies: list[Ports] = []
        self.waiting: list[int] = []
        """What the living target must still get from the living source, in order."""
        self.next = 0

    @property
    def proxy(self) -> TcpProxy:
        return self.run.proxies[max(self.run.proxies, key=lambda address: address.incarnation)]

    def put(self) -> None:
        if has_room(self.a.outputs["out"]):
            self.a.outputs["out"].put(item(self.next))
            self.waiting.append(self.next)
            self.next += 1

    def take(self) -> None:
        wait([self.b.inputs["in"]], [self.a.outputs["out"]], timeout_s=0.01)
        message = self.b.inputs["in"].get_nowait()
        if message is not None:
            assert isinstance(message, CheckpointSaved)
            assert message.step == self.waiting.pop(0)

    def beat(self) -> None:
        self.a.beat()

    def cut(self) -> None:
        self.proxy.cut()

    def stall(self) -> None:
        self.proxy.stall()

    def restore(self) -> None:
        self.proxy.restore()

    def replace_target(self) -> None:
        self.a.shut_out("b", self.incarnation["b"])
        self.zombies.append(self.b)
        self.incarnation["b"] += 1
        self.b = self.run.connect("b", self.incarnation["b"])
        self.b.inputs["in"].fence("a", self.incarnation["a"])
        self.a.rejoin("b", self.incarnation["b"])
        self.waiting.clear()

    def replace_source(self) -> None:
        self.zombies.append(self.a)
        self.b.shut_out("a", self.incarnation["a"])
        self.incarnation["a"] += 1
        self.a = self.run.connect("a", self.incarnation["a"])
        self.b.rejoin("a", self.incarnation["a"])
        self.waiting.clear()

    def put_by_zombie(self) -> None:
        for zombie in self.zombies:
            if "out" in zombie.outputs and has_room(zombie.outputs["out"]):
                try:
                    zombie.outputs["out"].put(item(-1))
                except ChannelClosed:
                    continue

    def finish(self) -> None:
        for proxy in self.run.proxies.values():
            proxy.restore()
        deadline_s = time.monotonic() + 10
        while self.waiting:
            assert time.monotonic() < deadline_s, f"{self.waiting} did not arrive"
            self.take()
        self.a.outputs["out"].put(item(self.next))
        assert take(self.b, 1, self.a) == [self.next], "nothing comes twice"
        until(lambda: self.a.outputs["out"].depth == 0, [self.a, self.b])


STEPS = (
    ["put"] * 6
    + ["take"] * 4
    + ["cut", "stall", "restore", "beat", "replace_target", "replace_source", "put_by_zombie"]
)


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(STEPS), max_size=40))
def test_the_living_get_everything_once_and_in_order(steps: list[str]) -> None:
    interleaving = Interleaving()
    try:
        for step in steps:
            getattr(interleaving, step)()
        interleaving.finish()
    finally:
        interleaving.run.close()


# Signs of life


def test_a_lease_sees_who_answers_who_is_busy_and_who_is_gone(books: Callable[..., Books]) -> None:
    specs = [ChannelSpec(f"to_{n}", Kind.GATHER, f"a.to-{n}", f"{n}.in", capacity=8) for n in ("b", "busy")]
    run = books(specs, is_proxied=True)
    b = run.connect("b")
    run.connect("busy")
    a = run.connect("a")
    until(lambda: all(outbox.connected for outbox in a.outputs.values()), [a])
    strict, lenient, of_b = (Lease(0.3, WallClock()) for _ in range(3))
    for lease in (strict, lenient):
        lease.watch("b")
        lease.watch("busy")
    of_b.watch("a")

    def live() -> None:
        """Let all but `busy` read their ports: that one is in a long step."""
        if strict.is_beat_due():
            a.beat()
        wait(b.inputs.values(), a.outputs.values(), timeout_s=strict.wait_s() or 0.01)
        a.hear(strict)
        a.hear(lenient, busy=["busy"])
        b.hear(of_b)
        assert "b" not in strict.silent()
        assert of_b.silent() == [], "a beat is a sign of life for the one that gets it"

    while strict.silent() != ["busy"]:
        live()
    assert lenient.silent() == []
    proxies = {address: proxy for address, proxy in run.proxies.items() if address == run.address_of("busy.in")}
    for proxy in proxies.values():
        proxy.go_down()
    while lenient.silent() != ["busy"]:
        live()


# Processes

CHILDREN = """
import os, sys
from datetime import timedelta
from torch.distributed import TCPStore
from slipstream.core.addresses import StoreAddresses, grant_incarnation
from slipstream.core.channel import connect_by_book, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.keys import RunKeys
from slipstream.core.service_messages import Exported
from slipstream.core.types import Stop
specs = [
    ChannelSpec("to", Kind.GATHER, "a.out", "b.in", capacity=16, deadline_s=60.0),
    ChannelSpec("back", Kind.GATHER, "b.out", "a.in", capacity=16, deadline_s=60.0),
]
for line in sys.stdin:  # it starts a process, or waits for one: torch is imported once for all of them
    if line != "start\\n":
        print(os.waitstatus_to_exitcode(os.waitpid(int(line), 0)[1]), flush=True)
    elif child := os.fork():
        print(child, flush=True)
    else:
        break
else:
    sys.exit()
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60))
keys = RunKeys.take()
assert "SLIPSTREAM_RUN_KEY" not in os.environ
book = StoreAddresses(specs, store, keys, deadline_s=60.0)
incarnation = grant_incarnation(store, "b")
ports = connect_by_book(specs, ["b"], book, incarnation)["b"]
while True:
    if not wait(ports.inputs.values(), ports.outputs.values(), timeout_s=0.5):
        ports.outputs["out"].put(Exported(path="alive"))
    while (message := ports.inputs["in"].get_nowait()) is not None:
        ports.outputs["out"].put(message)
        if message == Stop():
            ports.outputs["out"].flush(5)
            ports.close()
            sys.stdout.flush()
            os._exit(0)
"""


class Children:
    """The process that starts them, and their ids."""

    def __init__(self, store: TCPStore, keys: RunKeys) -> None:
        environment = os.environ | keys.as_environment() | {"OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, "-c", CHILDREN, str(store.port)], subprocess.PIPE
        self._starter = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
        self._pids: list[int] = []

    def _told(self, line: object) -> int:
        assert self._starter.stdin is not None
        assert self._starter.stdout is not None
        print(line, file=self._starter.stdin, flush=True)
        return int(self._starter.stdout.readline())

    def start(self) -> int:
        self._pids.append(self._told("start"))
        return self._pids[-1]

    def code_of(self, pid: int) -> int:
        """Return the exit code of one that has ended."""
        self._pids.remove(pid)
        return self._told(pid)

    def end(self) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)
        self._starter.kill()
        self._starter.communicate(timeout=60)


def test_processes_connect_by_the_store_and_a_killed_one_is_replaced() -> None:
    specs = [
        ChannelSpec("to", Kind.GATHER, "a.out", "b.in", capacity=16, deadline_s=60.0),
        ChannelSpec("back", Kind.GATHER, "b.out", "a.in", capacity=16, deadline_s=60.0),
    ]
    keys = RunKeys.new()
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    children = Children(store, keys)
    a: Ports | None = None
    try:
        first = children.start()
        book = StoreAddresses(specs, store, keys, deadline_s=60.0)
        a = connect_by_book(specs, ["a"], book, grant_incarnation(store, "a"))["a"]
        for step in range(8):
            a.outputs["out"].put(item(step))
        assert take(a, 8, a, timeout_s=60) == list(range(8))
        os.kill(first, signal.SIGSTOP)  # a process that hangs, is given up, and wakes up later
        for step in range(8, 12):
            a.outputs["out"].put(item(step))
        a.shut_out("b", 1)
        second = children.start()
        a.rejoin("b", 2)
        for step in range(20, 24):
            a.outputs["out"].put(item(step))
        assert take(a, 4, a, timeout_s=60) == list(range(20, 24))
        os.kill(first, signal.SIGCONT)
        inbox = a.inputs["in"]
        deadline_s = time.monotonic() + 60
        while is_alive(first):  # its next put tells it that it was replaced
            assert time.monotonic() < deadline_s
            wait([inbox], a.outputs.values(), timeout_s=0.05)
            assert drain(inbox) == []
        assert children.code_of(first) != 0
        a.outputs["out"].put(Stop())
        deadline_s = time.monotonic() + 60
        last: Message | None = None
        while last != Stop():
            assert wait([inbox], a.outputs.values(), timeout_s=60)
            last = inbox.get_nowait()
        while is_alive(second):  # it flushes: somebody has to tell it that its last message was taken
            assert time.monotonic() < deadline_s
            wait([inbox], a.outputs.values(), timeout_s=0.05)
        assert children.code_of(second) == 0
    finally:
        children.end()
        if a is not None:
            a.close()
