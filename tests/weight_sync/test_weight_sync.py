"""Publisher and subscriber together, over all transports: order, skips, damage, probes, buffers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import drawn
from file_handles import ipc
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import InProcess

from slipstream.controller.pipeline import weights
from slipstream.core.channel import connect_local, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import WeightsOffered
from slipstream.weight_sync.copying import HOST
from slipstream.weight_sync.publisher import MOST_UNREAD, Publisher, SlotLedger
from slipstream.weight_sync.reader import SegmentReader, Segments
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Commit, Transport
from slipstream.weight_sync.subscriber import Subscriber

TOKENS = np.arange(4, dtype=np.int32)
NUM_PARAMS = 5000


class Parameters:
    """Weights as one tensor and a pointer flip."""

    def __init__(self, num_params: int = NUM_PARAMS) -> None:
        self.flat = torch.zeros(num_params)
        self.holding = None

    reads_flat = True

    def prepare(self, flat: torch.Tensor) -> None: ...

    def rebind(self, flat: torch.Tensor) -> None:
        self.flat = flat


class Rig:
    """One publisher, `num_readers` subscribers, and weights whose every element is the version."""

    def __init__(
        self,
        transport: Transport,
        num_readers: int = 1,
        *,
        is_threaded: bool = False,
        num_slots: int = 2,
        away: tuple[int, ...] = (),
        capacity: int = 1024,
    ) -> None:
        specs = [
            spec
            for replica in range(num_readers)
            for spec in (
                ChannelSpec(f"offers_{replica}", Kind.WEIGHTS, "t.offers", f"g{replica}.offers", capacity=capacity),
                ChannelSpec(f"releases_{replica}", Kind.GATHER, f"g{replica}.releases", "t.releases"),
            )
        ]
        self.ports = connect_local(specs)
        trainer = self.ports["t"]
        self.live = torch.zeros(NUM_PARAMS)
        self.publisher = Publisher(
            trainer.outputs["offers"],
            trainer.inputs["releases"],
            transport,
            num_readers=num_readers,
            away=away,
            num_slots=num_slots,
        )
        self.publisher.open(self.live)
        self.parameters = [Parameters() for _ in range(num_readers)]
        self.subscribers = []
        for replica, parameters in enumerate(self.parameters):
            ports = self.ports[f"g{replica}"]
            subscriber = Subscriber(ports.inputs["offers"], ports.outputs["releases"], transport, replica=replica)

            def probe(tokens: np.ndarray, parameters: Parameters = parameters) -> np.ndarray:
                return parameters.flat[: len(tokens) - 1].numpy()

            subscriber.open(parameters, probe, 1e-3, is_threaded=is_threaded)
            self.subscribers.append(subscriber)

    def publish(self, version: int, probe_offsets: Sequence[float] = (0.0, 0.0, 0.0)) -> bool:
        self.live.fill_(float(version))
        return self.publisher.publish(version, TOKENS, np.array(probe_offsets, np.float32) + version)

    def close(self) -> None:
        self.publisher.close()
        for subscriber in self.subscribers:
            subscriber.close()
        for ports in self.ports.values():
            ports.close()


@pytest.fixture(params=["process", "memory", "ipc"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    if request.param == "ipc":
        return ipc("test", tmp_path)
    return SharedMemory("test", (tmp_path,)) if request.param == "process" else InProcess()


@pytest.fixture
def rig(transport: Transport) -> Iterator[Rig]:
    rig = Rig(transport)
    yield rig
    rig.close()


def test_a_version_arrives_bit_for_bit_and_only_at_commit(rig: Rig) -> None:
    rig.live.copy_(torch.randn(NUM_PARAMS))
    sent = rig.live.clone()
    assert rig.publisher.publish(0, TOKENS, sent[:3].numpy().copy())
    rig.live.zero_()  # the optimizer goes on at once
    (subscriber,), (parameters,) = rig.subscribers, rig.parameters
    assert subscriber.pending_version is None
    assert subscriber.commit() is None
    assert subscriber.poll()
    assert subscriber.pending_version == 0
    assert not parameters.flat.any(), "staging must not touch live weights"
    swap = subscriber.commit()
    assert swap is not None
    assert (swap.version, swap.probe_error) == (0, 0.0)
    assert swap.transfer_s > 0 < swap.pause_s
    assert torch.equal(parameters.flat, sent)
    assert (subscriber.version, subscriber.pending_version) == (0, None)


def test_the_flip_exchanges_two_buffers_and_copies_nothing(rig: Rig) -> None:
    (subscriber,), (parameters,) = rig.subscribers, rig.parameters
    first = parameters.flat.data_ptr()
    pointers = []
    for version in range(4):
        assert rig.publish(version)
        subscriber.poll()
        subscriber.commit()
        rig.publisher.poll()
        pointers.append(parameters.flat.data_ptr())
    assert pointers[0] == pointers[2] != pointers[1] == pointers[3] == first


def test_only_the_newest_counts_and_older_offers_are_released_unread(rig: Rig) -> None:
    (subscriber,) = rig.subscribers
    assert rig.publish(0)
    assert rig.publish(1)
    subscriber.poll()
    assert subscriber.pending_version == 1
    assert rig.publisher.poll(), "both slots were released"
    assert rig.publish(2)
    assert rig.publish(3)
    subscriber.poll()
    assert subscriber.pending_version == 3
    swap = subscriber.commit()
    assert swap is not None
    assert swap.version == 3
    assert subscriber.stats.num_passed_over == 3
    with pytest.raises(WeightSyncError, match="ascending"):
        rig.publish(3)


def test_a_stopped_reader_holds_no_version_back_from_the_others_until_its_channel_fills(transport: Transport) -> None:
    rig = Rig(transport, num_readers=2, capacity=weights("weights", "t.offers", "g.offers").capacity)
    fast, stopped = rig.subscribers
    offered = MOST_UNREAD + 2  # two slots, and what is taken back unread
    for version in range(offered + 3):
        assert rig.publish(version) == (version < offered)
        fast.poll()
        fast.commit()
        assert fast.version == min(version, offered - 1)
    stats = rig.publisher.stats
    assert (stats.num_published, stats.num_skipped) == (offered, 3), "and publishing never waits"
    rig.live.fill_(-1.0)  # what was skipped must not be read from the live weights later
    stopped.poll()
    assert stopped.pending_version == offered - 1
    assert rig.publisher.poll(), "the newest skipped version is offered on release"
    for subscriber, parameters in zip(rig.subscribers, rig.parameters, strict=True):
        while subscriber.poll():
            pass
        subscriber.commit()
        assert subscriber.version == offered + 2
        assert bool((parameters.flat == subscriber.version).all())
        assert subscriber.failure is None
    for version in range(offered + 3, 2 * offered):
        assert rig.publish(version), "it has read since, and may leave as many again"
        fast.poll()
    rig.close()


def test_the_version_that_is_being_read_stays_whole_whatever_comes_meanwhile(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(transport, num_readers=2, is_threaded=True)
    other, slow = rig.subscribers
    begun, may_go_on = threading.Event(), threading.Event()
    gather = SegmentReader.fetch

    def fetch(reader: SegmentReader, offer: WeightsOffered, shadow: torch.Tensor) -> None:
        if reader is slow._fetch and not begun.is_set():
            begun.set()
            assert may_go_on.wait(30)
        gather(reader, offer, shadow)

    def until_it_has(subscriber: Subscriber, version: int) -> None:
        while subscriber.pending_version != version:
            if not subscriber.poll():
                rig.publisher.poll()
                assert wait([], [], subscriber.wait_fds(), timeout_s=30)
        assert subscriber.commit() is not None

    monkeypatch.setattr(SegmentReader, "fetch", fetch)
    assert rig.publish(0)
    slow.poll()
    assert begun.wait(30)
    until_it_has(other, 0)
    for version in range(1, 6):
        assert rig.publish(version)
        slow.poll()  # it hears of all of them
        until_it_has(other, version)
    may_go_on.set()
    until_it_has(slow, 0)
    assert bool((rig.parameters[1].flat == 0.0).all())
    until_it_has(slow, 5)
    assert bool((rig.parameters[1].flat == 5.0).all())
    assert slow.failure is None
    rig.close()


@pytest.mark.parametrize("moment", ["before", "within", "after the first half"])
def test_a_version_that_is_written_again_while_it_is_read_is_passed_over(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """What was sent when it began had not arrived: the publisher took it for unread."""
    rig = Rig(transport, num_readers=1)
    (subscriber,), (parameters,) = rig.subscribers, rig.parameters
    memory = type(transport.memory)
    find, gather = Segments.find, memory.gather
    in_hand: list[int] = []

    def write_again() -> None:
        rig.live.fill_(9.0)
        rig.publisher._stage(rig.publisher._opened(), in_hand.pop(), 9)

    def found(segments: Segments, offer: WeightsOffered) -> Any:
        if moment == "before" and in_hand:
            write_again()
        return find(segments, offer)

    def gathered(self: Any, copies: Any, source: torch.Tensor, target: torch.Tensor, checksums: Any) -> None:
        if moment == "within" and in_hand:
            write_again()
        gather(self, copies, source, target, checksums)
        if moment == "after the first half" and in_hand:
            write_again()
            gather(self, copies, source, target, checksums)

    monkeypatch.setattr(Segments, "find", found)
    monkeypatch.setattr(memory, "gather", gathered)
    assert rig.publish(0)
    subscriber.poll()
    subscriber.commit()
    assert rig.publish(1)
    in_hand.append(rig.publisher._last.slot)
    subscriber.poll()
    assert not in_hand
    assert subscriber.pending_version is None
    assert (subscriber.stats.num_passed_over, subscriber.stats.num_failed_transfers) == (1, 0)
    assert bool((parameters.flat == 0.0).all())
    assert rig.publish(2)
    subscriber.poll()
    assert subscriber.pending_version == 2
    rig.close()


def test_a_slot_has_no_version_while_it_is_written_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that finds the slot then must not take it for the version that it had."""
    (subscriber,), slots = rig.subscribers, rig.publisher._opened()
    memory = type(rig.publisher._transport.memory)
    copy = memory.copy
    found: list[tuple[int, Commit | None]] = []

    def copied(self: Any, target: torch.Tensor, source: torch.Tensor, checksums: Any) -> int:
        [slot] = [one for one in range(slots.num_slots) if slots.data(one).data_ptr() == target.data_ptr()]
        found.append((slot, slots.committed(slot)))
        return copy(self, target, source, checksums)

    monkeypatch.setattr(memory, "copy", copied)
    for version in range(4):
        assert rig.publish(version)
        subscriber.poll()
        subscriber.commit()
        rig.publisher.poll()
    assert len({slot for slot, _ in found}) < len(found) == 4, "none was written again"
    assert {commit for _, commit in found} == {None}


def test_with_one_version_in_transit_the_newest_follows_when_that_is_read(tmp_path: Path) -> None:
    """As between GPUs, whose memory holds two: what comes meanwhile is written to the other slot, over and over."""
    rig = Rig(ipc("test", tmp_path), num_slots=1)
    (subscriber,), (parameters,) = rig.subscribers, rig.parameters
    assert [rig.publish(version) for version in range(4)] == [True, False, False, False]
    subscriber.poll()
    assert rig.publisher.poll(), "the newest skipped version is offered on release"
    subscriber.commit()
    assert subscriber.version == 0
    while subscriber.poll():
        pass
    subscriber.commit()
    assert subscriber.version == 3
    assert bool((parameters.flat == 3.0).all())
    rig.close()


def test_a_reader_that_is_away_from_the_start_holds_no_slot_and_gets_the_last_version(transport: Transport) -> None:
    rig = Rig(transport, num_readers=2, is_threaded=False, away=(1,))
    first, later = rig.subscribers
    for version in range(4):
        assert rig.publish(version), "who is away reads nothing"
        first.poll()
        first.commit()
        rig.publisher.poll()  # also takes that the other one asks
    offers = rig.ports["g1"].inputs["offers"]
    while offers.get_nowait() is not None:  # between processes its link is away, too
        pass
    rig.publisher.add_reader(1)
    later.poll()
    later.commit()
    assert later.version == 3
    assert rig.publish(4)
    for subscriber in rig.subscribers:
        subscriber.poll()
        subscriber.commit()
        assert subscriber.version == 4
    rig.close()


def test_a_reader_that_comes_back_gets_the_last_version_whoever_is_heard_first(transport: Transport) -> None:
    """It asks for it, and may be offered a new one before that is heard: it is read once, and released once."""
    rig = Rig(transport, num_readers=2, is_threaded=False)
    for version in (0, 1):
        rig.publish(version)
        for subscriber in rig.subscribers:
            subscriber.poll()
            subscriber.commit()
        rig.publisher.poll()
    rig.publisher.drop_reader(0)
    rig.publisher.add_reader(0)
    ports = rig.ports["g0"]
    assert rig.publish(2)  # offered to it as to all, before it is heard to ask
    parameters = Parameters()
    again = Subscriber(ports.inputs["offers"], ports.outputs["releases"], transport, replica=0)
    again.open(parameters, lambda tokens: parameters.flat[: len(tokens) - 1].numpy(), 1e-3, is_threaded=False)
    while (message := ports.inputs["offers"].get_nowait()) is not None:
        again._waiting = message  # as taken before the second offer comes
        again._newest_seen = message.version
    rig.publisher.poll()  # hears it ask, and offers again
    again.poll()
    assert ports.outputs["releases"].depth == 1, "the slot is released when it has been read, and only then"
    again.commit()
    assert again.version == 2
    assert torch.equal(parameters.flat, torch.full((NUM_PARAMS,), 2.0))
    rig.subscribers[1].poll()
    rig.publisher.poll()
    assert rig.publish(3)
    assert rig.publish(4), "no slot is held by anybody"
    again.close()
    rig.close()


def test_a_dropped_reader_frees_its_slots(transport: Transport) -> None:
    rig = Rig(transport, num_readers=2, num_slots=1)
    assert rig.publish(0)
    rig.subscribers[0].poll()
    rig.subscribers[0].poll()
    assert not rig.publish(1)
    rig.publisher.drop_reader(1)
    rig.publisher.poll()
    rig.subscribers[0].poll()
    rig.subscribers[0].poll()
    assert rig.subscribers[0].pending_version == 1
    rig.close()


def test_a_damaged_slot_is_refused_a_torn_one_passed_over_and_the_old_version_runs_on(rig: Rig) -> None:
    (subscriber,), (parameters,) = rig.subscribers, rig.parameters
    assert rig.publish(0)
    subscriber.poll()
    subscriber.commit()
    slots = rig.publisher._slots
    assert slots is not None
    for version in (1, 2):
        assert rig.publish(version)
        for slot in range(slots.num_slots):
            commit = slots.committed(slot)
            if commit is not None and commit.version == version:
                if version == 1:
                    slots.data(slot)[1234] ^= 1
                else:
                    slots.invalidate(slot)
        subscriber.poll()
        assert subscriber.pending_version is None
        assert "damaged" in str(subscriber.failure)
        assert (subscriber.stats.num_failed_transfers, subscriber.stats.num_passed_over) == (1, version - 1)
        assert bool((parameters.flat == 0.0).all())
    assert rig.publish(3), "what could not be read is released too"
    subscriber.poll()
    assert subscriber.commit() is not None


@pytest.mark.parametrize("offsets", [[0.5] * 3, [float("nan")] * 3, [0.3, -0.3, 0.0], [0.0]], ids=str)
def test_a_failed_probe_rolls_back(rig: Rig, offsets: list[float]) -> None:
    (subscriber,), (parameters,) = rig.subscribers, rig.parameters
    assert rig.publish(0)
    subscriber.poll()
    subscriber.commit()
    before = parameters.flat
    assert rig.publish(1, offsets)
    subscriber.poll()
    with pytest.raises(WeightSyncError, match=r"version 1 does not reproduce[\s\S]*version 0 runs on"):
        subscriber.commit()
    assert parameters.flat is before
    assert bool((before == 0.0).all())
    assert (subscriber.version, subscriber.pending_version, subscriber.stats.num_failed_probes) == (0, None, 1)
    assert rig.publish(2)
    subscriber.poll()
    assert subscriber.commit() is not None


def test_an_exchange_that_fails_is_not_undone_by_another(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot exchange weights has kept the old ones, and its error is the one that is seen."""
    (subscriber,), (parameters,) = rig.subscribers, rig.parameters
    asked: list[object] = []

    def rebind(flat: torch.Tensor) -> None:
        asked.append(flat)
        raise RuntimeError(f"exchange {len(asked)} failed")

    monkeypatch.setattr(parameters, "rebind", rebind)
    assert rig.publish(0)
    subscriber.poll()
    with pytest.raises(RuntimeError, match="exchange 1 failed"):
        subscriber.commit()
    assert subscriber.version == -1


def test_staging_in_a_thread_wakes_the_host(transport: Transport) -> None:
    rig = Rig(transport, is_threaded=True)
    (subscriber,), (parameters,) = rig.subscribers, rig.parameters
    for version in range(20):
        assert rig.publish(version)
        while subscriber.pending_version is None:
            if not subscriber.poll():
                assert wait([], [], subscriber.wait_fds(), timeout_s=5)
        swap = subscriber.commit()
        assert swap is not None
        assert swap.version == version
        assert bool((parameters.flat == version).all())
    rig.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["publish", "trainer", "poll0", "poll1", "commit0", "commit1"]), max_size=60))
def test_any_interleaving_keeps_versions_whole_and_ascending(actions: list[str]) -> None:
    rig = Rig(InProcess(), num_readers=2)
    version, seen = 0, [[-1], [-1]]
    for action in [*actions, *["trainer", "poll0", "poll1", "commit0", "commit1"] * 4]:
        if action == "publish":
            rig.publish(version)
            version += 1
        elif action == "trainer":
            rig.publisher.poll()
        else:
            replica = int(action[-1])
            subscriber, flat = rig.subscribers[replica], rig.parameters[replica].flat
            if action.startswith("poll"):
                before = flat.clone()
                subscriber.poll()
                assert torch.equal(flat, before), "live weights changed without a commit"
            elif (swap := subscriber.commit()) is not None:
                seen[replica].append(swap.version)
                assert bool((rig.parameters[replica].flat == swap.version).all())
    for history in seen:
        assert history == sorted(set(history))
        assert history[-1] == version - 1, "the newest version always arrives in the end"
    assert all(subscriber.failure is None for subscriber in rig.subscribers)
    rig.close()


@drawn(
    25,
    60,
    actions=st.lists(st.sampled_from(["publish", "trainer", "poll0", "poll1", "commit0", "commit1"]), max_size=40),
)
def test_whatever_one_reader_does_or_not_the_other_gets_the_newest(actions: list[str]) -> None:
    rig = Rig(InProcess(), num_readers=2)
    for version, action in enumerate([*actions[:MOST_UNREAD], "publish"]):
        match action[:-1], action:
            case _, "publish":
                rig.publish(version)
                newest = version
            case _, "trainer":
                rig.publisher.poll()
            case "poll", _:
                rig.subscribers[int(action[-1])].poll()
            case _:
                rig.subscribers[int(action[-1])].commit()
    for _ in range(3):  # the one in hand, what was held back for it, and what it then reads
        rig.subscribers[0].poll()
        rig.subscribers[0].commit()
        rig.publisher.poll()
    rig.subscribers[0].poll()
    rig.subscribers[0].commit()
    assert rig.subscribers[0].version == newest
    assert bool((rig.parameters[0].flat == newest).all())
    rig.close()


@drawn(40, 100, data=st.data())
def test_a_slot_is_rewritten_only_when_every_living_reader_released_it(data: st.DataObject) -> None:
    num_slots, readers = data.draw(st.integers(1, 3)), {(replica, 0) for replica in range(3)}
    ledger = SlotLedger(num_slots, readers)
    reading: dict[int, tuple[int, set[tuple[int, int]]]] = {
        slot: (-1, set()) for slot in range(num_slots)
    }  # an independent model
    for version in range(data.draw(st.integers(0, 20))):
        free = ledger.free_slots()
        assert set(free) == {slot for slot, (_, users) in reading.items() if not users}
        if free:
            slot = free[0]
            ledger.write(slot, version)
            reading[slot] = (version, set())
            if data.draw(st.booleans()):
                ledger.offer(slot)
                reading[slot] = (version, set(readers))
        number, target = data.draw(st.integers(0, 3)), data.draw(st.integers(0, num_slots - 1))
        held, users = reading[target]
        claimed = data.draw(st.sampled_from([held, held - 1]))
        assert ledger.release((number, 0), claimed, target) == (claimed == held and (number, 0) in users)
        if claimed == held:
            users.discard((number, 0))
        if data.draw(st.booleans()) and len(readers) > 1:
            gone = readers.pop()
            ledger.drop_replica(gone[0])
            for _, others in reading.values():
                others.discard(gone)


@drawn(50, 200, data=st.data())
def test_what_is_taken_back_is_what_nobody_can_have_begun_to_read(data: st.DataObject) -> None:
    """Readers that take one version after the other, the newest they know of; the model knows what each one reads."""
    num_slots, readers = data.draw(st.integers(2, 4)), [(replica, 0) for replica in range(3)]
    copying = data.draw(st.sets(st.sampled_from(range(3))))
    ledger = SlotLedger(num_slots, readers)
    known: dict[tuple[int, int], list[tuple[int, int]]] = {one: [] for one in readers}  # (version, slot), in order
    for version in range(data.draw(st.integers(1, 30))):
        if not ledger.free_slots():
            ledger.take_back(copying)
        if free := ledger.free_slots():
            for reader, offers in known.items():
                if reader[0] not in copying:
                    assert all(slot != free[0] for _, slot in offers), "it may read any of them"
                elif offers:
                    assert offers[0][1] != free[0], "the one in hand"
            ledger.write(free[0], version)
            ledger.offer(free[0])
            for offers in known.values():
                offers[1:] = [offer for offer in offers[1:] if offer[1] != free[0]]  # it will find them gone
                offers.append((version, free[0]))
        for reader in readers:
            while known[reader] and data.draw(st.booleans()):
                assert ledger.release(reader, *known[reader].pop(0))


def test_a_new_publisher_is_read_from_its_own_slots_also_after_a_torn_one() -> None:
    transport = InProcess()
    reader = SegmentReader(transport, None)
    shadow = torch.zeros(8)
    for value in (1.0, 2.0):
        slots = transport.create(32, 1)
        checksum = HOST.copy(slots.data(0), HOST.bytes_of(torch.full((8,), value)), slots.checksums(0))
        offer = WeightsOffered(
            version=0,
            slot=0,
            segments=(slots.name,),
            checksums=(checksum,),
            probe_tokens=TOKENS,
            probe_logprobs=np.zeros(3, np.float32),
        )
        with pytest.raises(WeightSyncError, match="does not hold version 0"):
            reader.fetch(offer, shadow)
        slots.commit(0, Commit(0, checksum))
        reader.fetch(offer, shadow)
        assert torch.equal(shadow, torch.full((8,), value))
