"""Channels behave alike over queues and over ZeroMQ."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from slipstream.core.channel import Ports, connect, connect_local, make_transport_dir, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout
from slipstream.core.ports import Inbox, Outbox
from slipstream.core.ranks import Dealt
from slipstream.core.service_messages import Admit, CheckpointSaved, Exported
from slipstream.core.types import Completion, Message, Prompt, Rollout, Stop

Connector = Callable[[Sequence[ChannelSpec]], dict[str, Ports]]


@pytest.fixture(params=["queue", "zmq"])
def connector(request: pytest.FixtureRequest) -> Iterator[Connector]:
    directory = make_transport_dir()
    opened: list[Ports] = []

    def make(specs: Sequence[ChannelSpec]) -> dict[str, Ports]:
        if request.param == "queue":
            ports = connect_local(specs, is_threaded=True)
        else:
            executors = {port.split(".")[0] for spec in specs for port in (spec.source, spec.target)}
            ports = {name: connect(specs, name, directory, incarnation=1) for name in executors}
        opened.extend(ports.values())
        return ports

    yield make
    for ports in opened:
        ports.close()
    shutil.rmtree(directory)


def spec(name: str = "c", kind: Kind = Kind.BROADCAST, source: str = "a.out", target: str = "b.in", **kw: object):
    return ChannelSpec(name, kind, source, target, **{"capacity": 8, "deadline_s": 5.0, **kw})  # type: ignore[arg-type]


def rollout(ordinal: int, sample: int) -> Rollout:
    prompt = Prompt(prompt_id="p", text="", tokens=np.zeros(2, np.int32), task="t")
    completion = Completion(ordinal=ordinal, sample=sample, prompt=prompt, segments=(), text="", finish_reason="stop")
    return Rollout(completion=completion, reward=0.0)


def item(step: int) -> CheckpointSaved:
    return CheckpointSaved(step=step, path="p")


def take(ports: Ports, count: int, port: str = "in") -> list[Message]:
    taken: list[Message] = []
    while len(taken) < count:
        assert wait([ports.inputs[port]], timeout_s=5), f"only {len(taken)} of {count} arrived"
        while len(taken) < count and (message := ports.inputs[port].get_nowait()) is not None:
            taken.append(message)
    return taken


def settle(outbox: Outbox, *inboxes: Inbox) -> None:
    """Let the targets tell what they have taken: they do it as they look, at the latest after 0.1 s."""
    deadline_s = time.monotonic() + 10
    while outbox.depth:
        assert time.monotonic() < deadline_s, "nobody tells what was taken"
        wait(inboxes, [outbox], timeout_s=0.02)


def put_often(ports: Ports, count: int) -> None:
    for step in range(count):
        ports.outputs["out"].put(item(step))


def steps(messages: Sequence[Message]) -> list[int]:
    return [m.step for m in messages if isinstance(m, CheckpointSaved)]


def test_order_is_kept_and_counted(connector: Connector) -> None:
    ports = connector([spec()])
    got = []
    for start in range(0, 40, 8):
        for step in range(start, start + 8):
            ports["a"].outputs["out"].put(item(step))
        got += take(ports["b"], 8)
        settle(ports["a"].outputs["out"], ports["b"].inputs["in"])  # one thread: while it waits for room, nobody looks
    assert steps(got) == list(range(40))
    assert ports["b"].inputs["in"].get_nowait() is None
    assert (ports["a"].outputs["out"].stats.sent, ports["b"].inputs["in"].stats.received) == (40, 40)


def test_what_is_put_in_one_turn_leaves_together_and_in_order(connector: Connector) -> None:
    ports = connector([spec(capacity=100, deadline_s=5), spec("d", target="c.in", capacity=100, deadline_s=5)])
    out = ports["a"].outputs["out"]
    with ports["a"].together():
        out.put(item(0))
        with ports["a"].together():
            put_often(ports["a"], 20)
        assert out.depth == 42, "they count against the capacity"
    for name in ("b", "c"):
        assert steps(take(ports[name], 21)) == [0, *range(20)]
    settle(out, ports["b"].inputs["in"], ports["c"].inputs["in"])
    with ports["a"].together():
        out.put(item(7))
        assert not wait([], [out], timeout_s=0.01)
        for name in ("b", "c"):
            assert steps(take(ports[name], 1)) == [7], "before a wait they leave"


def test_a_turn_with_more_than_a_channel_holds_waits_for_room(connector: Connector) -> None:
    ports = connector([spec(capacity=3, deadline_s=0.05)])
    with ports["a"].together(), pytest.raises(ChannelTimeout):
        put_often(ports["a"], 4)
    assert steps(take(ports["b"], 3)) == [0, 1, 2]


def test_broadcast_reaches_all_and_gather_joins_all(connector: Connector) -> None:
    ports = connector(
        [spec("to_b"), spec("to_c", target="c.in")]
        + [spec(f"from_{n}", Kind.GATHER, f"{n}.out", "a.in") for n in ("b", "c")]
    )
    ports["a"].outputs["out"].put(item(1))
    for name in ("b", "c"):
        assert steps(take(ports[name], 1)) == [1]
        ports[name].outputs["out"].put(Exported(path=name))
    assert {m.path for m in take(ports["a"], 2) if isinstance(m, Exported)} == {"b", "c"}


def test_scatter_follows_the_route(connector: Connector) -> None:
    ports = connector([spec(f"to_{i}", Kind.SCATTER, target=f"g{i}.in") for i in range(3)])
    prompt = Prompt(prompt_id="p", text="", tokens=np.zeros(2, np.int32), task="t")
    for ordinal, replica in enumerate((2, 0, 1, 2)):
        ports["a"].outputs["out"].put(Admit(ordinal=ordinal, replica=replica, prompt=prompt, num_samples=1))
    ports["a"].outputs["out"].put(Stop())
    for replica, ordinals in ((0, [1]), (1, [2]), (2, [0, 3])):
        *admits, last = take(ports[f"g{replica}"], len(ordinals) + 1)
        assert [m.ordinal for m in admits if isinstance(m, Admit)] == ordinals
        assert last == Stop()
    with pytest.raises(ChannelError, match="no such target"):
        ports["a"].outputs["out"].put(Admit(ordinal=0, replica=3, prompt=prompt, num_samples=1))


def test_a_full_channel_times_out_and_names_itself(connector: Connector) -> None:
    ports = connector([spec(capacity=3, deadline_s=0.05)])
    for step in range(3):
        ports["a"].outputs["out"].put(item(step))
    assert not ports["a"].outputs["out"].has_room_for(item(0))
    with pytest.raises(ChannelTimeout, match=r"'c' \(a.out -> b.in\)[\s\S]*3 messages wait[\s\S]*capacity 3"):
        ports["a"].outputs["out"].put(item(3))
    assert steps(take(ports["b"], 3)) == [0, 1, 2], "the refused message must not arrive"
    assert ports["a"].outputs["out"].stats.wait_s >= 0.05


def test_a_broadcast_that_times_out_reaches_nobody(connector: Connector) -> None:
    ports = connector([spec("to_b", capacity=1, deadline_s=0.05), spec("to_c", target="c.in", capacity=2)])
    ports["a"].outputs["out"].put(item(0))
    take(ports["c"], 1)
    with pytest.raises(ChannelTimeout, match="to_b"):
        ports["a"].outputs["out"].put(item(1))
    assert ports["c"].inputs["in"].get_nowait() is None


def test_back_pressure_ends_when_a_thread_takes(connector: Connector) -> None:
    ports = connector([spec(capacity=2)])
    got: list[Message] = []
    reader = threading.Thread(target=lambda: got.extend(take(ports["b"], 200)))
    reader.start()
    for step in range(200):
        ports["a"].outputs["out"].put(item(step))
        assert ports["a"].outputs["out"].depth <= 2
    reader.join()
    assert steps(got) == list(range(200))


def test_close_wakes_a_blocked_put(connector: Connector) -> None:
    ports = connector([spec(capacity=1, deadline_s=30.0)])
    ports["a"].outputs["out"].put(item(0))
    errors: list[ChannelError] = []
    started = threading.Event()

    def blocked() -> None:
        started.set()
        try:
            ports["a"].outputs["out"].put(item(1))
        except ChannelClosed as error:
            errors.append(error)

    writer = threading.Thread(target=blocked)
    writer.start()
    started.wait()
    ports["a"].outputs["out"].close()
    writer.join(5)
    assert len(errors) == 1
    with pytest.raises(ChannelClosed):
        ports["a"].outputs["out"].put(item(2))


def test_the_receivers_end_closes_the_senders(connector: Connector) -> None:
    ports = connector([spec(capacity=1, deadline_s=30.0)])
    ports["a"].outputs["out"].put(item(0))
    take(ports["b"], 1)
    ports["b"].inputs["in"].close()
    with pytest.raises(ChannelClosed):
        put_often(ports["a"], 3)  # over a socket the news takes a moment; then the capacity blocks until it is here
    with pytest.raises(ChannelClosed):
        ports["b"].inputs["in"].get_nowait()


def test_a_flush_ends_when_the_receiver_closes(connector: Connector) -> None:
    """Messages to a closed port will never be taken, so it must not wait for that until its deadline."""
    ports = connector([spec()])
    ports["a"].outputs["out"].put(item(0))
    assert wait([ports["b"].inputs["in"]], timeout_s=30)
    ports["b"].inputs["in"].close()
    ports["a"].outputs["out"].flush(5)
    assert ports["a"].outputs["out"].depth == 0


def test_close_wakes_a_waiting_reader(connector: Connector) -> None:
    ports = connector([spec()])
    inbox = ports["b"].inputs["in"]
    woken: list[bool] = []
    reader = threading.Thread(target=lambda: woken.append(wait([inbox], timeout_s=30)))
    reader.start()
    inbox.close()
    reader.join(5)
    assert woken == [True]


def test_wait_sees_messages_descriptors_and_time(connector: Connector) -> None:
    ports = connector([spec(capacity=1), spec("back", source="b.out", target="a.in")])
    outbox, inbox = ports["a"].outputs["out"], ports["b"].inputs["in"]
    assert not wait([inbox], [outbox], timeout_s=0)
    assert not wait([inbox], [outbox], timeout_s=0.01)
    outbox.put(item(0))
    assert wait([inbox], [outbox], timeout_s=5)
    assert not outbox.has_room_for(item(0))
    inbox.get_nowait()
    settle(outbox, inbox)
    assert outbox.has_room_for(item(0))
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"x")
    assert wait([inbox], [outbox], [read_fd], timeout_s=5)
    os.close(read_fd)
    os.close(write_fd)


def test_a_message_that_is_not_taken_now_ends_no_wait(connector: Connector) -> None:
    """Nor does it keep the process awake: of a second of waiting next to nothing is computed."""
    ports = connector([spec("to_b"), spec("other", source="a.second", target="b.second")])
    held, other = ports["b"].inputs["in"], ports["b"].inputs["second"]
    ports["a"].outputs["out"].put(item(0))
    assert wait([held, other], timeout_s=5)
    began_s = time.thread_time()
    assert not wait([held, other], timeout_s=1.0, held=[held])
    assert time.thread_time() - began_s < 0.5
    ports["a"].outputs["out"].put(item(1))
    assert not wait([held, other], timeout_s=0.2, held=[held])
    ports["a"].outputs["second"].put(item(2))
    assert wait([held, other], timeout_s=5, held=[held])
    assert steps(take(ports["b"], 2)) == [0, 1]


def test_broadcasts_pass_a_dead_target_by(connector: Connector) -> None:
    ports = connector([spec("to_b", capacity=1), spec("to_c", target="c.in", capacity=4)])
    outbox = ports["a"].outputs["out"]
    outbox.put(item(0))
    outbox.disconnect("b")
    outbox.put(item(1))
    assert steps(take(ports["c"], 2)) == [0, 1]
    outbox.disconnect("c")
    outbox.put(item(2))  # both may come back; nobody has asked for it


@pytest.mark.parametrize("kind", [Kind.GATHER, Kind.SCATTER])
def test_a_message_for_a_dead_target_alone_is_refused(connector: Connector, kind: Kind) -> None:
    ports = connector([spec(kind=kind)])
    ports["a"].outputs["out"].disconnect("b")
    prompt = Prompt(prompt_id="p", text="", tokens=np.zeros(2, np.int32), task="t")
    with pytest.raises(ChannelClosed, match="disconnected"):
        ports["a"].outputs["out"].put(Admit(ordinal=0, replica=0, prompt=prompt, num_samples=1))


def test_offers_without_a_target_are_no_error_and_broadcasts_are(connector: Connector) -> None:
    ports = connector([spec("offers", Kind.WEIGHTS, "a.weights"), spec("other", source="a.out", target="b.other")])
    take_none = [ports["b"].inputs["in"], ports["b"].inputs["other"]]
    for name in ("weights", "out"):
        ports["a"].outputs[name].put(item(0))
    for inbox in take_none:
        assert wait([inbox], timeout_s=5)
        inbox.close()
    with pytest.raises(ChannelClosed):
        put_often(ports["a"], 9)
    for step in range(9):  # the capacity is 8
        ports["a"].outputs["weights"].put(item(step))


def test_a_full_target_blocks_only_messages_for_it(connector: Connector) -> None:
    ports = connector([spec(f"to_{i}", Kind.SCATTER, target=f"g{i}.in", capacity=1, deadline_s=0.05) for i in range(2)])
    outbox = ports["a"].outputs["out"]
    prompt = Prompt(prompt_id="p", text="", tokens=np.zeros(2, np.int32), task="t")
    first, second = (Admit(ordinal=0, replica=replica, prompt=prompt, num_samples=1) for replica in range(2))
    outbox.put(first)
    assert not outbox.has_room_for(first)
    assert outbox.has_room_for(second)
    outbox.put(second)
    with pytest.raises(ChannelTimeout, match="to_0"):
        outbox.put(first)


def test_the_deadline_of_the_full_target_counts(connector: Connector) -> None:
    specs = [
        spec("short", Kind.SCATTER, target="g0.in", capacity=1, deadline_s=0.02),
        spec("long", Kind.SCATTER, target="g1.in", capacity=1, deadline_s=0.2),
    ]
    ports = connector(specs)
    outbox = ports["a"].outputs["out"]
    prompt = Prompt(prompt_id="p", text="", tokens=np.zeros(2, np.int32), task="t")
    message = Admit(ordinal=0, replica=1, prompt=prompt, num_samples=1)
    outbox.put(message)
    with pytest.raises(ChannelTimeout, match=r"long[\s\S]*0.2 s"):
        outbox.put(message)
    assert outbox.stats.wait_s >= 0.2


@pytest.mark.parametrize("by", ["samples", "groups"])
def test_rollouts_are_scattered_by_the_permutation(connector: Connector, by: Dealt) -> None:
    num_ranks = 3
    ports = connector(
        [
            spec(f"to_{i}", Kind.SCATTER, target=f"t{i}.in", capacity=64, route=f"rollouts/{by}")
            for i in range(num_ranks)
        ]
    )
    dealt = [(ordinal, sample) for ordinal in range(5) for sample in range(4)]
    for ordinal, sample in dealt:
        ports["a"].outputs["out"].put(rollout(ordinal, sample))
    ports["a"].outputs["out"].put(Stop())
    for rank in range(num_ranks):
        expected = [(o, s) for o, s in dealt if (o + s if by == "samples" else o) % num_ranks == rank]
        *got, last = take(ports[f"t{rank}"], len(expected) + 1)
        assert [(m.completion.ordinal, m.completion.sample) for m in got if isinstance(m, Rollout)] == expected
        assert last == Stop()


def test_only_the_declared_types_pass(connector: Connector) -> None:
    ports = connector([spec(accepts=("Stop", "Exported"))])
    ports["a"].outputs["out"].put(Stop())
    with pytest.raises(ChannelError, match="CheckpointSaved"):
        ports["a"].outputs["out"].put(item(0))
    assert take(ports["b"], 1) == [Stop()]


def test_a_single_thread_cannot_wait_for_itself() -> None:
    ports = connect_local([spec(capacity=2, deadline_s=60.0)])
    for step in range(2):
        ports["a"].outputs["out"].put(item(step))
    with pytest.raises(ChannelTimeout, match="share a thread"):
        ports["a"].outputs["out"].put(item(2))


@pytest.mark.parametrize(
    "specs",
    [
        [spec(), spec()],
        [spec("x", Kind.GATHER), spec("y", Kind.GATHER, target="c.in")],
        [spec("x", Kind.SCATTER), spec("y", Kind.BROADCAST, target="c.in")],
        [spec("x", Kind.SCATTER, route="replika")],
        [spec(accepts=("Stopp",))],
    ],
)
def test_specs_that_do_not_fit_are_refused(specs: list[ChannelSpec]) -> None:
    with pytest.raises(ChannelError):
        connect_local(specs)


@pytest.mark.parametrize("bad", [{"source": "a"}, {"target": "a.b.c"}, {"capacity": 0}, {"name": ""}])
def test_a_bad_spec_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ChannelError):
        spec(**bad)  # type: ignore[arg-type]
