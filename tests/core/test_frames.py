"""When a receiver acknowledges: rarely, in time, and at once when it is asked."""

from __future__ import annotations

import pytest

from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.frames import Arrival, ChannelFrame, Stream

PEER = b"peer"


def stream_of(capacity: int = 1024, size: int = 10, count: int = 200) -> tuple[Stream, list[ChannelFrame]]:
    """A stream at which `count` messages of `size` bytes have arrived."""
    stream = Stream(ChannelSpec("c", Kind.BROADCAST, "a.out", "b.in", capacity=capacity))
    frames = [ChannelFrame(False, "c", 1, 1, 1 + index, b"x" * size) for index in range(count)]
    assert {stream.admit(PEER, frame) for frame in frames} == {Arrival.NEW}
    return stream, frames


def acknowledgements(stream: Stream, frames: list[ChannelFrame], *, now_s: float = 0.0) -> list[int]:
    """Take all; the sequence numbers at which it acknowledges, as more wait behind each."""
    told = []
    for frame in frames:
        stream.take(frame)
        if stream.owes(now_s, is_empty=False):
            stream.acknowledged(now_s)
            told.append(frame.sequence)
    return told


@pytest.mark.parametrize(("capacity", "size", "every"), [(1024, 10, 64), (40, 10, 10), (3, 10, 1), (1024, 1 << 17, 2)])
def test_one_acknowledgement_is_for_many_messages(capacity: int, size: int, every: int) -> None:
    count = min(capacity, 192)
    stream, frames = stream_of(capacity, size, count)
    assert acknowledgements(stream, frames) == list(range(every, count + 1, every))


def test_few_messages_are_acknowledged_after_a_while() -> None:
    stream, frames = stream_of(count=3)
    assert not stream.owes(0.0, is_empty=True), "nothing is taken"
    stream.take(frames[0])
    assert not stream.owes(0.0, is_empty=False)
    assert stream.owes(0.0, is_empty=True), "the first ones at once"
    stream.acknowledged(0.0)
    stream.take(frames[1])
    assert not stream.owes(0.09, is_empty=True)
    assert stream.owes(0.11, is_empty=True)


def test_a_sender_that_asks_hears_when_all_was_taken() -> None:
    stream, frames = stream_of(count=5)
    acknowledgements(stream, frames[:2])
    stream.acknowledged(0.0)
    assert stream.admit(PEER, ChannelFrame(True, "c", 1, 1, 5, b"")) is Arrival.COMPLETE
    assert acknowledgements(stream, frames[2:]) == [5]
    assert stream.admit(PEER, ChannelFrame(True, "c", 1, 6, 5, b"")) is Arrival.COMPLETE
    assert not stream.is_asked, "there is nothing to wait for"


def test_a_successor_of_one_that_was_never_heard_waits_for_its_word() -> None:
    stream = Stream(ChannelSpec("c", Kind.BROADCAST, "a.out", "b.in"))
    stream.awaits_word = True
    assert stream.admit(PEER, ChannelFrame(False, "c", 1, 1, 1, b"x")) is Arrival.NEW, "the first needs none"
    stream.fence(2)
    assert stream.admit(PEER, ChannelFrame(False, "c", 3, 1, 1, b"x")) is Arrival.EARLY
    assert stream.admit(PEER, ChannelFrame(False, "c", 2, 1, 1, b"x")) is Arrival.NEW


@pytest.mark.parametrize("first", [7, 2**32 - 1], ids=["near", "the numbers begin again"])
def test_answers_go_to_the_last_connection_of_the_last_incarnation(first: int) -> None:
    earlier, later = (b"\0" + (number % 2**32).to_bytes(4) for number in (first, first + 1))
    stream = Stream(ChannelSpec("c", Kind.BROADCAST, "a.out", "b.in"))
    stream.admit(earlier, ChannelFrame(False, "c", 1, 1, 1, b"x"))
    assert stream.admit(later, ChannelFrame(True, "c", 1, 1, 3, b"")) is Arrival.GAP
    assert stream.admit(earlier, ChannelFrame(False, "c", 1, 1, 2, b"x")) is Arrival.NEW, "it counts all the same"
    assert stream.peer == later
    stream.admit(earlier, ChannelFrame(False, "c", 2, 1, 1, b"x"))
    assert stream.peer == earlier, "the one that was replaced had connected again after its successor"
