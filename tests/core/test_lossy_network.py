"""A channel over a network that loses, delays, repeats and reorders frames: each message arrives once, in order.

The link's two ends are the real ones; between them, in place of ZeroMQ, lies a network that a seeded adversary runs.
It is worse than any connection: those keep their order and lose frames only when they break.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
import zmq

from slipstream.core import links
from slipstream.core.addresses import Address
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import ChannelClosed
from slipstream.core.links import ZmqLink
from slipstream.core.ports import Inbox
from slipstream.core.service_messages import CheckpointSaved

SPEC = ChannelSpec("c", Kind.BROADCAST, "a.out", "b.in", capacity=12)
NUM_MESSAGES = 1500


class Socket:
    """A fake socket: frames of the link go into the network, replies and connection events come out of it."""

    def __init__(self, network: Network) -> None:
        self.network, self.peer = network, b""
        self.replies: deque[bytes] = deque()
        self.events: deque[int] = deque()
        self.monitor = Monitor(self)
        self.is_open = True

    def set(self, *_: Any) -> None:
        """Ignore the options of ZeroMQ."""

    def connect(self, _: str) -> None:
        self.connection_is_made()

    def connection_is_made(self) -> None:
        if self.peer:
            self.events.append(zmq.EVENT_DISCONNECTED)
        self.peer = self.network.id_of(self.network.num_connections)
        self.network.num_connections += 1
        self.network.sockets[self.peer] = self
        self.events.append(zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def send(self, frame: bytes, _: int) -> None:
        self.network.frames.append((self.peer, frame))

    def getsockopt(self, _: int) -> int:
        return zmq.POLLIN if self.replies else 0

    def recv_multipart(self, _: int) -> list[bytes]:
        return [self.replies.popleft()]

    def disable_monitor(self) -> None: ...

    def close(self) -> None:
        self.is_open = False


class Monitor:
    def __init__(self, socket: Socket) -> None:
        self.socket = socket

    def getsockopt(self, _: int) -> int:
        return zmq.POLLIN if self.socket.events else 0

    def close(self, linger: int) -> None: ...


class Network:
    """The frames on their way to the target, the replies on their way back, and the target's listener."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_connections = 0
        self.id_of = self._as_libzmq if rng.random() < 0.75 else b"id %d".__mod__
        self.sockets: dict[bytes, Socket] = {}
        self.frames: list[tuple[bytes, bytes]] = []
        self.replies: list[tuple[bytes, bytes]] = []
        self.arrived: deque[tuple[bytes, bytes]] = deque()

    @staticmethod
    def _as_libzmq(number: int) -> bytes:
        """Numbers begin anywhere; here they begin anew at once."""
        return b"\0" + (number - 3).to_bytes(4, signed=True)

    # The target's listener

    def look(self) -> None: ...

    def receive(self) -> tuple[bytes, bytes] | None:
        return self.arrived.popleft() if self.arrived else None

    def send(self, peer: bytes, frame: bytes) -> None:
        self.replies.append((peer, frame))

    def close(self) -> None: ...

    # The adversary

    def disturb(self) -> None:
        """Deliver, repeat or lose one frame and one reply, in turn or not. Most arrive."""
        for queue, deliver in ((self.frames, self._to_target), (self.replies, self._to_source)):
            if not queue:
                continue
            place = 0 if self.rng.random() < 0.7 else self.rng.randrange(len(queue))
            fate = self.rng.random()
            if fate < 0.75:
                deliver(*queue.pop(place))
            elif fate < 0.85:
                deliver(*queue[place])  # and once more later
            else:
                queue.pop(place)

    def calm(self) -> None:
        while self.frames or self.replies:
            while self.frames:
                self._to_target(*self.frames.pop(0))
            while self.replies:
                self._to_source(*self.replies.pop(0))

    def _to_target(self, peer: bytes, frame: bytes) -> None:
        self.arrived.append((peer, frame))

    def _to_source(self, peer: bytes, frame: bytes) -> None:
        socket = self.sockets[peer]
        if socket.is_open and socket.peer == peer:  # of an earlier connection there is nobody to take it
            socket.replies.append(frame)


class Ends:
    """The present source and its target, and earlier sources that do not know that they were replaced."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.network = Network(self.rng)
        self.made: list[Socket] = []
        monkeypatch.setattr(links, "_socket", self._socket)
        monkeypatch.setattr(links, "_monitor_of", lambda socket, _: socket.monitor)
        monkeypatch.setattr(
            links, "recv_monitor_message", lambda monitor, _: {"event": monitor.socket.events.popleft()}
        )
        self.inbox = Inbox("b.in", [SPEC])
        listener: Any = self.network
        self.inbox._listener = listener
        self.inbox.await_word()
        self.incarnation, self.next = 1, 0
        self.waiting: deque[int] = deque()
        self.zombies: list[ZmqLink] = []
        self.link = self._link()
        self.got: list[int] = []

    def _socket(self, *_: Any) -> Socket:
        self.made.append(Socket(self.network))
        return self.made[-1]

    def _link(self) -> ZmqLink:
        return ZmqLink(SPEC, Address("nowhere"), self.incarnation)

    def put(self) -> None:
        """Send a message; some leave at once, others together with later ones."""
        if self.link.has_room():
            self.link.send(CheckpointSaved(step=self.next, path=""))
            if self.rng.random() < 0.5:
                self.link.release()
            self.waiting.append(self.next)
            self.next += 1

    def take(self) -> None:
        message = self.inbox.get_nowait()
        if message is not None:
            assert isinstance(message, CheckpointSaved)
            assert message.step == self.waiting.popleft(), "once, in order, and of the living source"
            self.got.append(message.step)

    def breaks(self) -> None:
        """Break the connection, lose half of the frames on their way, and connect again."""
        self.network.frames = [f for f in self.network.frames if self.rng.random() < 0.5]
        self.network.replies = [r for r in self.network.replies if self.rng.random() < 0.5]
        self.rng.choice(self.made).connection_is_made()

    def beat(self) -> None:
        self.link.pump()
        self.link.probe()

    def replace_source(self) -> None:
        """Replace the source. The successor may send before the target is told of it."""
        self.zombies.append(self.link)
        self.incarnation += 1
        self.link = self._link()
        lost, self.waiting = self.waiting, deque()
        for _ in range(self.rng.randrange(6)):
            self.put()
            self.network.disturb()
        self.waiting, announced = lost, self.waiting
        for _ in range(self.rng.randrange(3)):
            self.take()  # still the old one's
        self.inbox.fence("a", self.incarnation)
        self.waiting = announced

    def put_by_zombie(self) -> None:
        for zombie in self.zombies:
            try:
                if zombie.has_room():
                    zombie.send(CheckpointSaved(step=-1, path=""))
                    zombie.release()
            except ChannelClosed:
                assert zombie.is_fenced

    def finish(self) -> None:
        """Deliver all without faults: owed messages arrive, and the source learns that they were taken."""
        for _ in range(6):
            self.beat()
            self.network.calm()
            while self.waiting and self.inbox.depth:
                self.take()
        assert not self.waiting
        self.beat()
        self.network.calm()
        assert self.inbox.get_nowait() is None, "nothing comes twice"
        self.beat()
        self.network.calm()
        self.link.pump()
        assert self.link.depth == 0


@pytest.mark.parametrize("seed", range(8))
def test_everything_arrives_once_and_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(seed, monkeypatch)
    while ends.next < NUM_MESSAGES:
        match ends.rng.choices(["put", "take", "disturb", "break", "beat"], [30, 30, 60, 1, 10])[0]:
            case "put":
                ends.put()
            case "take":
                ends.take()
            case "disturb":
                ends.network.disturb()
            case "break":
                ends.breaks()
            case "beat":
                ends.beat()
    ends.finish()
    assert ends.got == list(range(NUM_MESSAGES))
    assert ends.inbox.stats.duplicates > 100, "the network has tried"
    assert ends.inbox.stats.received == NUM_MESSAGES


@pytest.mark.parametrize("seed", range(8))
def test_sources_that_are_replaced_lose_untaken_messages_only(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends(seed, monkeypatch)
    while ends.next < NUM_MESSAGES:
        match ends.rng.choices(
            ["put", "take", "disturb", "break", "beat", "replace", "zombie"], [30, 30, 60, 1, 10, 0.3, 5]
        )[0]:
            case "put":
                ends.put()
            case "take":
                ends.take()
            case "disturb":
                ends.network.disturb()
            case "break":
                ends.breaks()
            case "beat":
                ends.beat()
            case "replace":
                ends.replace_source()
            case "zombie":
                ends.put_by_zombie()
    ends.finish()
    assert ends.incarnation > 3
    assert ends.got == sorted(set(ends.got))
    assert -1 not in ends.got
    assert ends.inbox.stats.refused > 0, "frames of sources that were replaced are counted"


def test_frames_of_a_successor_lost_before_its_announcement_are_asked_for_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The successor probes only when it has reconnected, so that probe has to be answered after the announcement."""
    ends = Ends(0, monkeypatch)
    ends.put()
    ends.link.release()
    ends.network.calm()
    ends.take()
    ends.incarnation = 2
    ends.link = ends._link()
    for _ in range(3):
        ends.put()
    ends.link.release()
    ends.network.frames.clear()
    ends.made[-1].connection_is_made()
    ends.link.pump()
    ends.network.calm()
    assert ends.inbox.get_nowait() is None
    ends.inbox.fence("a", 2)
    ends.network.calm()
    ends.link.pump()
    ends.network.calm()
    for _ in range(3):
        ends.take()
    assert ends.got == [0, 1, 2, 3]
