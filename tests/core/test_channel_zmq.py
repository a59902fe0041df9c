"""Channels between processes: lost connections, restarts, outdated incarnations, junk on the socket."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from covering import with_slow

from slipstream.core import frames, wire
from slipstream.core.addresses import LocalAddresses
from slipstream.core.channel import Ports, connect, connect_by_book, connect_local, make_transport_dir, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import ChannelClosed, ChannelError
from slipstream.core.ports import Inbox
from slipstream.core.service_messages import CheckpointSaved
from slipstream.core.types import Message, Stop

SPECS = [ChannelSpec("c", Kind.BROADCAST, "a.out", "b.in", capacity=64, deadline_s=5.0)]


@pytest.fixture
def directory() -> Iterator[Path]:
    path = make_transport_dir()
    yield path
    shutil.rmtree(path)


def item(step: int) -> CheckpointSaved:
    return CheckpointSaved(step=step, path="p")


def take(inbox: Inbox, count: int, *, timeout_s: float = 5.0) -> list[int]:
    taken: list[Message] = []
    while len(taken) < count:
        assert wait([inbox], timeout_s=timeout_s), f"only {len(taken)} of {count} arrived"
        while len(taken) < count and (message := inbox.get_nowait()) is not None:
            taken.append(message)
    return [m.step for m in taken if isinstance(m, CheckpointSaved)]


def put_until_told(source: Ports, target: Ports) -> None:
    while not wait([target.inputs["in"]], [source.outputs["out"]], timeout_s=0.01):
        source.outputs["out"].put(item(2))


def test_a_sender_may_come_first_and_a_restarted_receiver_gets_what_was_not_taken(directory: Path) -> None:
    a = connect(SPECS, "a", directory, 1)
    out = a.outputs["out"]
    for step in range(10):
        out.put(item(step))
    b = connect(SPECS, "b", directory, 1)
    inbox = b.inputs["in"]
    assert take(inbox, 4) == [0, 1, 2, 3]
    for socket in inbox.pollables()[1:]:
        assert not isinstance(socket, int)
        socket.close()  # as a killed process would: nothing is said to the sender

    restarted = connect(SPECS, "b", directory, 1)  # a later incarnation listens elsewhere
    got: list[int] = []
    while not got or got[-1] != 9:
        assert wait(list(restarted.inputs.values()), [out], timeout_s=5)
        while isinstance(message := restarted.inputs["in"].get_nowait(), CheckpointSaved):
            got.append(message.step)
    assert got == list(range(got[0], 10))
    assert got[0] <= 4, "nothing untaken may be lost; what was taken comes again if its acknowledgement was lost"
    while out.depth:
        assert not wait(list(restarted.inputs.values()), [out], timeout_s=0.02)
    a.close()
    restarted.close()


def test_every_socket_is_monitored_at_an_address_of_its_own(directory: Path) -> None:
    """The system assigns the descriptor of a closed socket again before ZeroMQ gives up an address named after it."""
    seen = set()
    for incarnation in range(1, 51):
        ports = connect(SPECS, "b", directory, incarnation)
        router, monitor = ports.inputs["in"].pollables()[1:]
        assert isinstance(router, zmq.Socket)
        assert isinstance(monitor, zmq.Socket)
        seen.add(monitor.getsockopt(zmq.LAST_ENDPOINT))
        ports.close()
    assert len(seen) == 50


def test_a_successor_has_a_new_address_and_later_processes_find_it(directory: Path) -> None:
    """A message on its way to a dead process never reaches the next one."""
    a = connect(SPECS, "a", directory, 1)
    a.outputs["out"].put(item(0))
    b = connect(SPECS, "b", directory, 2)
    assert not wait([b.inputs["in"]], [a.outputs["out"]], timeout_s=0.3)
    later = connect_by_book(SPECS, ["a"], LocalAddresses(SPECS, directory, {"b": 2}), 1)["a"]
    later.outputs["out"].put(item(1))
    assert take(b.inputs["in"], 1) == [1]
    a.rejoin("b", 2)
    a.outputs["out"].put(item(2))
    assert a.outputs["out"].targets == {"b"}
    for ports in (a, b, later):
        ports.close()


def test_nothing_of_a_successor_is_read_before_it_is_announced(directory: Path) -> None:
    """The reader learns of the loss first; then it gets all messages of the successor, in order."""
    b = connect(SPECS, "b", directory, 1)
    inbox = b.inputs["in"]
    inbox.await_word()
    old = connect(SPECS, "a", directory, 1)
    old.outputs["out"].put(item(0))
    assert take(inbox, 1) == [0], "the first one needs no word"
    new = connect(SPECS, "a", directory, 2)
    for step in range(10, 74):
        new.outputs["out"].put(item(step))
    assert not new.outputs["out"].has_room_for(item(0))
    assert not wait([inbox], [new.outputs["out"], old.outputs["out"]], timeout_s=0.3)
    old.outputs["out"].put(item(1))
    assert take(inbox, 1) == [1], "until then the old one counts"
    b.shut_out("a", 1)
    assert take(inbox, 64) == list(range(10, 74))
    until_empty([inbox], new)
    assert inbox.stats.duplicates == 0
    for ports in (old, new, b):
        ports.close()


def until_empty(inboxes: list[Inbox], source: Ports) -> None:
    """Wait until all messages of `source` are acknowledged; once it has room again, waits end without a look."""
    end_s = time.monotonic() + 30.0
    while time.monotonic() < end_s:
        source.outputs["out"].pump()
        if not source.outputs["out"].depth:
            return
        wait(inboxes, [source.outputs["out"]], timeout_s=0.05)
    raise AssertionError(f"{source.outputs['out'].depth} messages have found nobody")


def test_a_wait_ends_when_there_is_room_where_there_was_none(directory: Path) -> None:
    a, b = connect(SPECS, "a", directory, 1), connect(SPECS, "b", directory, 1)
    out, other = a.outputs["out"], connect_local([ChannelSpec("d", Kind.BROADCAST, "x.out", "y.in")])["y"]
    for step in range(64):
        assert out.has_room_for(item(step))
        out.put(item(step))
    assert not wait(other.inputs.values(), [out], timeout_s=0.05), "nobody has asked for room"
    assert not out.has_room_for(item(64))
    assert not wait(other.inputs.values(), [out], timeout_s=0.05)
    take(b.inputs["in"], 64)
    assert wait(other.inputs.values(), [out], timeout_s=5)
    assert out.has_room_for(item(64))
    assert not wait(other.inputs.values(), [out], timeout_s=0.05), "once"
    for ports in (a, b, other):
        ports.close()


def test_a_lower_incarnation_is_refused_and_told(directory: Path) -> None:
    b = connect(SPECS, "b", directory, 1)
    inbox = b.inputs["in"]
    old, new = connect(SPECS, "a", directory, 1), connect(SPECS, "a", directory, 2)
    old.outputs["out"].put(item(0))
    assert take(inbox, 1) == [0]
    new.outputs["out"].put(item(10))
    assert take(inbox, 1) == [10]
    old.outputs["out"].put(item(1))
    with pytest.raises(ChannelClosed, match="replaced by 2"):
        put_until_told(old, b)
    assert inbox.stats.refused >= 1
    assert inbox.get_nowait() is None
    for ports in (old, new, b):
        ports.close()


def test_a_fence_holds_before_the_new_incarnation_arrives(directory: Path) -> None:
    a, b = connect(SPECS, "a", directory, 1), connect(SPECS, "b", directory, 1)
    b.inputs["in"].fence("a", 5)
    a.outputs["out"].put(item(0))
    with pytest.raises(ChannelClosed, match="replaced by 5"):
        put_until_told(a, b)
    a.close()
    b.close()


@pytest.fixture
def raw(directory: Path) -> Iterator[tuple[Inbox, zmq.Socket[bytes]]]:
    b = connect(SPECS, "b", directory, 1)
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.connect(f"ipc://{directory}/0.sock")
    yield b.inputs["in"], socket
    socket.close(linger=0)
    b.close()


def test_a_turn_is_one_frame_and_as_many_as_its_bytes_need(directory: Path) -> None:
    ports = connect(SPECS, "a", directory, 1)
    context = zmq.Context.instance()
    router = context.socket(zmq.ROUTER)
    address = LocalAddresses(SPECS, directory).listen_at("b.in", 1)[0]
    router.bind(address)

    def received() -> list[int]:
        counts = []
        while router.poll(60_000 if sum(counts) < 5 else 200):  # all of them, then a surplus
            frame = router.recv_multipart()[1]
            if not (messages := frames.unpack(frame))[0].is_probe:
                counts.append(len(messages))
        return counts

    out = ports.outputs["out"]
    with ports.together():
        for step in range(5):
            out.put(item(step))
    assert received() == [5]
    with ports.together():
        for step in range(5):
            out.put(CheckpointSaved(step=step, path="p" * 30_000))
    assert received() == [2, 2, 1]
    ports.close()
    router.close(linger=0)


def test_junk_is_refused_counted_and_harmless(raw: tuple[Inbox, zmq.Socket[bytes]]) -> None:
    inbox, socket = raw
    good = wire.encode(item(1))
    junk = [
        [b""],
        [b"x" * 40],
        [b"a", b"b"],
        [frames.pack_data(b"nobody", 1, 1, 1, good)],
        [frames.pack_data(b"\xff", 1, 1, 1, good)],
        [frames.pack_data(b"c", 1, 2, 1, good)],  # base beyond sequence
        [frames.pack_data(b"c", 1, 1, 1, b"\xc1 not msgpack")],
        [frames.pack_data(b"c", 1, 1, 2, good)[:20]],
        [frames.pack_data(b"c", 1, 1, 2, good, good)[:-1]],  # lengths beyond the frame
        [frames.pack_data(b"c", 1, 1, 2)],  # of no message
        [frames.pack_data(b"c", 1, 1, 2, *[b""] * (frames.MAX_MESSAGES + 1))],
    ]
    for parts in junk:
        socket.send_multipart(parts)
    socket.send(frames.pack_data(b"c", 1, 1, 2, good))
    assert take(inbox, 1) == [1]
    assert inbox.stats.refused == len(junk)


def test_duplicates_are_dropped_and_gaps_asked_for(raw: tuple[Inbox, zmq.Socket[bytes]]) -> None:
    inbox, socket = raw
    for sequence in (1, 2, 1, 2, 4, 5):
        socket.send(frames.pack_data(b"c", 1, 1, sequence, wire.encode(item(sequence))))
    assert take(inbox, 2) == [1, 2]
    replies: list[bytes] = []
    awaited = {frames.pack_reply(frames.Reply.RESEND, 1, 2), frames.pack_reply(frames.Reply.TAKEN, 1, 2)}
    while awaited.difference(replies) or socket.poll(200):
        assert inbox.get_nowait() is None
        if socket.poll(10):
            replies.append(socket.recv())
    assert replies.count(frames.pack_reply(frames.Reply.RESEND, 1, 2)) == 1, "a gap is asked for once"
    assert inbox.stats.duplicates == 2
    for sequence in (3, 4, 5):
        socket.send(frames.pack_data(b"c", 1, 3, sequence, wire.encode(item(sequence))))
    assert take(inbox, 3) == [3, 4, 5]


def test_of_messages_that_come_again_together_with_later_ones_only_these_count(
    raw: tuple[Inbox, zmq.Socket[bytes]],
) -> None:
    inbox, socket = raw
    socket.send(frames.pack_data(b"c", 1, 1, 1, *(wire.encode(item(n)) for n in (1, 2))))
    socket.send(frames.pack_data(b"c", 1, 1, 1, *(wire.encode(item(n)) for n in (1, 2, 3))))
    assert take(inbox, 3) == [1, 2, 3]
    assert inbox.stats.duplicates == 2


def test_a_late_acknowledgement_to_a_dead_receiver_leaves_no_gap(raw: tuple[Inbox, zmq.Socket[bytes]]) -> None:
    inbox, socket = raw
    socket.send(frames.pack_data(b"c", 1, 1, 9, wire.encode(item(9))))  # sent before 1..8 were known to be taken
    socket.send(frames.pack_data(b"c", 1, 9, 9, wire.encode(item(9))))  # sent again after
    assert take(inbox, 1) == [9]


CHILD = """
import sys
from pathlib import Path
from slipstream.core.channel import connect, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.service_messages import CheckpointSaved
from slipstream.core.types import Stop
specs = [
    ChannelSpec("to", Kind.BROADCAST, "a.out", "b.in", capacity=16, deadline_s=10.0),
    ChannelSpec("back", Kind.GATHER, "b.out", "a.in", capacity=16, deadline_s=10.0),
]
ports = connect(specs, "b", Path(sys.argv[1]), int(sys.argv[2]))
while True:
    if not wait(ports.inputs.values(), ports.outputs.values(), timeout_s=60):
        sys.exit(1)
    while (message := ports.inputs["in"].get_nowait()) is not None:
        ports.outputs["out"].put(message)
        if message == Stop():
            ports.outputs["out"].flush(5)
            ports.close()
            sys.exit(0)
"""


def test_a_killed_process_is_restarted_and_nothing_waits_forever(directory: Path) -> None:
    specs = [
        ChannelSpec("to", Kind.BROADCAST, "a.out", "b.in", capacity=16, deadline_s=10.0),
        ChannelSpec("back", Kind.GATHER, "b.out", "a.in", capacity=16, deadline_s=10.0),
    ]
    a = connect(specs, "a", directory, 1)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(directory), "1"])
    for step in range(8):
        a.outputs["out"].put(item(step))
    assert take(a.inputs["in"], 8, timeout_s=60) == list(range(8))
    child.send_signal(signal.SIGKILL)
    child.wait()
    a.outputs["out"].put(item(99))  # goes with it
    a.shut_out("b", 1)
    a.outputs["out"].put(item(98))  # passes it by
    again = subprocess.Popen([sys.executable, "-c", CHILD, str(directory), "2"])
    a.rejoin("b", 2)
    for step in range(8, 16):
        a.outputs["out"].put(item(step))
    a.outputs["out"].put(Stop())
    seen: list[int] = []
    while True:
        assert wait(a.inputs.values(), a.outputs.values(), timeout_s=60)
        message = a.inputs["in"].get_nowait()
        if message == Stop():
            break
        if isinstance(message, CheckpointSaved):
            seen.append(message.step)
    until_s = time.monotonic() + 10
    while again.poll() is None and time.monotonic() < until_s:  # it waits for the news that its last word was taken
        wait(a.inputs.values(), a.outputs.values(), timeout_s=0.02)
    assert again.wait(0) == 0
    assert seen == list(range(8, 16))
    a.close()


def test_one_process_may_host_several_executors(directory: Path) -> None:
    specs = [
        ChannelSpec("ab", Kind.BROADCAST, "a.out", "b.in", capacity=4, deadline_s=5.0),
        ChannelSpec("ac", Kind.BROADCAST, "a.out", "c.in", capacity=4, deadline_s=5.0),
        ChannelSpec("cb", Kind.GATHER, "c.out", "b.in", capacity=4, deadline_s=5.0),
    ]
    here = connect_by_book(specs, ["a", "b"], LocalAddresses(specs, directory), 1)
    there = connect(specs, "c", directory, 1)
    here["a"].outputs["out"].put(item(1))
    assert take(there.inputs["in"], 1) == [1]
    there.outputs["out"].put(item(2))
    assert take(here["b"].inputs["in"], 2) == [1, 2]
    for ports in (*here.values(), there):
        ports.close()


def test_sockets_need_a_private_directory_with_a_short_path(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir(mode=0o700)
    with pytest.raises(ChannelError, match="too long"):
        connect(SPECS, "b", deep, 1)
    shared = make_transport_dir()
    shared.chmod(0o755)
    with pytest.raises(ChannelError, match="other users"):
        connect(SPECS, "b", shared, 1)
    shared.rmdir()


@pytest.mark.parametrize("count", with_slow([4_000], [20_000]))
def test_thousands_of_messages_are_cheap(directory: Path, count: int) -> None:
    """A round trip per message would take seconds here. This is no benchmark."""
    a, b = connect(SPECS, "a", directory, 1), connect(SPECS, "b", directory, 1)
    out, inbox = a.outputs["out"], b.inputs["in"]
    num_taken = 0
    for start in range(0, count, 40):  # with those that are not acknowledged yet there is room
        for step in range(start, start + 40):
            out.put(item(step))
        num_taken += len(take(inbox, 40))
    assert num_taken == count
    a.close()
    b.close()


def test_local_ports_need_no_directory() -> None:
    assert set(connect_local(SPECS)) == {"a", "b"}


def test_a_process_has_room_for_the_channels_of_a_large_fleet(directory: Path) -> None:
    """600 channels are 1,200 sockets; ZeroMQ's own limit is 1,023 in a process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 8_192:
        pytest.skip("this user may not have so many open files")
    code = (
        "import resource, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "from slipstream.core.channel import connect\n"
        "from slipstream.core.channel_spec import ChannelSpec, Kind\n"
        "specs = [ChannelSpec(f'c{n}', Kind.BROADCAST, 'a.out', f'b{n}.in', capacity=4) for n in range(600)]\n"
        "connect(specs, 'a', Path(sys.argv[1]), 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
