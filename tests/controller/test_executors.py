"""Groups on other machines that fail, are started again and end, as the controller sees them.

A real controller and real channels over loopback; the groups are played by the test, message by message.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import UnionType

import numpy as np
import pytest

from slipstream.controller import executors, pool
from slipstream.controller.controller import Controller
from slipstream.controller.meeting import Cluster, Listen, attend, read_spec
from slipstream.controller.membership import Membership
from slipstream.controller.observers import Observers
from slipstream.controller.pipeline import MEMBERSHIP, Node, Pipeline, RunInput
from slipstream.controller.schedule import Schedule
from slipstream.controller.tally import Tally
from slipstream.controller.waiting import work_left
from slipstream.core.addresses import StoreAddresses, grant_incarnation
from slipstream.core.channel import Ports, connect_by_book, wait
from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ChannelClosed, ExecutorDied, ExecutorLost
from slipstream.core.interrupts import Interrupted
from slipstream.core.keys import RunKeys
from slipstream.core.peer_messages import Failed, Joined, Leaving, Left, PeerJoined, PeerLost, Peers
from slipstream.core.recipes import resolve
from slipstream.core.run_log import ScheduleConfig
from slipstream.core.service_messages import Admit, Checkpoint, CheckpointSaved, Counters, Exported, Noted, Ready
from slipstream.core.types import (
    CompletionFinished,
    GroupScored,
    Message,
    Prompt,
    Skip,
    StepDone,
    Stop,
    Swapped,
    TrainStep,
)

PROMPT = Prompt(prompt_id="0", text="", tokens=np.zeros(1, np.int32), task="t")
TIMEOUT_S = 30.0

METRICS = {
    "tokens_trained": 8.0,
    "tokens_read": 8.0,
    "padding_frac": 0.0,
    "staleness_updates_max": 0.0,
    "reward_mean": 0.5,
}
"""Of a step, as much as the controller reads."""


class Played:
    """A process of a group, whose executor is the test."""

    def __init__(self, name: str, incarnation: int, ports: Ports) -> None:
        self.name, self.incarnation, self.ports = name, incarnation, ports

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.ports.outputs["events"].put(message)

    def join(self) -> None:
        self.say(Joined(executor=self.name, incarnation=self.incarnation))

    def hears(self, kind: type[Message] | UnionType, *, port: str = "commands") -> Message:
        """The next message of this kind; others before it are dropped."""
        while True:
            assert wait([self.ports.inputs[port]], self.ports.outputs.values(), timeout_s=TIMEOUT_S), str(kind)
            while (message := self.ports.inputs[port].get_nowait()) is not None:
                if isinstance(message, kind):
                    return message

    def hears_of(self, change: PeerJoined | PeerLost) -> Peers:
        """The next message that tells of `change`."""
        while True:
            message = self.hears(Peers, port=MEMBERSHIP)
            if isinstance(message, Peers) and change in message.changes:
                return message

    def hears_nothing_more(self, *, port: str = "commands") -> bool:
        return not wait([self.ports.inputs[port]], self.ports.outputs.values(), timeout_s=0.2)


class Notes:
    """An observer that keeps what is for people."""

    hears = (Noted,)

    def __init__(self) -> None:
        self.notes: list[str] = []

    def take(self, news: object) -> None:
        if isinstance(news, Noted):
            self.notes.append(news.text)


class Run:
    """Trainer, generator-0 of two ranks and generator-1, all on other machines; steps of two groups of two.

    generator-2 may join later.
    """

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.keys, self.address, self.out = RunKeys.new(), folder / "address", folder / "run"
        self.out.mkdir()
        self.transport_dir = folder / "t"
        self.transport_dir.mkdir(mode=0o700)
        self.opened, self.observer = opened, Notes()
        config = resolve(
            "quickstart",
            {
                "groups_per_step": 2,
                "completions_per_group": 2,
                "steps": 4,
                "deadline_s": TIMEOUT_S,
                "lease_s": TIMEOUT_S,
            },
        )
        ranks = {"trainer": 1, "generator-0": 2, "generator-1": 1}
        nodes = tuple(Node(name, os.path.join, host="torchrun", ranks=count) for name, count in ranks.items())
        nodes += (Node("generator-2", os.path.join, host="torchrun", joins_later=True),)
        self.pipeline = Pipeline(nodes, (), deadline_s=TIMEOUT_S)
        self.schedule = Schedule(
            ScheduleConfig(
                groups_per_step=2, completions_per_group=2, max_staleness=1, reorder_window=1, steps=4, capacity=4
            )
        )
        self.controller = Controller(
            config,
            self.pipeline,
            self.schedule,
            RunInput(lambda ordinal: PROMPT, (), None),
            Observers(config, self.out, Tally(config, started_s=0.0), screen=self.observer),
            run_dir=self.out,
            cluster=Cluster(Listen(address_file=self.address), self.keys),
        )
        self.controller.tally.status = "failed"  # nobody is waited for in the end
        self.opened.callback(self.controller._shut_down)

    def start(self) -> dict[str, Played]:
        """All are there, and hold version 0."""
        with ThreadPoolExecutor(4) as threads:
            coming = [threads.submit(self.connect, name) for name in self.pipeline.members[:-1]]
            self.controller.executors.launch(self.transport_dir, "run-1", self.controller.cluster)
            played = {one.name: one for one in (future.result() for future in coming)}
        for one in played.values():
            one.join()
            one.say(Ready(executor=one.name))
        self.until(lambda: not self.controller.executors.missing, "all are ready")
        for replica in range(2):
            played[f"generator-{replica}"].say(swapped(replica))
            self.until(lambda replica=replica: replica in self.schedule.versions, "it holds the first version")
        return played

    def connect(self, name: str, incarnation: int = 1) -> Played:
        store = attend(str(self.address), timeout_s=TIMEOUT_S)
        spec = read_spec(store, self.keys, timeout_s=TIMEOUT_S)
        book = StoreAddresses(spec.channels, store, self.keys.of_start(spec.start), deadline_s=TIMEOUT_S)
        ports = connect_by_book(spec.channels, [name], book, incarnation)[name]
        self.opened.callback(ports.close)
        return Played(name, incarnation, ports)

    def start_again(self, group: str) -> list[Played]:
        """What a group's agent does."""
        store = attend(str(self.address), timeout_s=TIMEOUT_S)
        incarnation = 1 + grant_incarnation(store, group)
        members = next(node.members for node in self.pipeline.nodes if node.name == group)
        return [self.connect(member, incarnation) for member in reversed(members)][::-1]

    def until(self, is_so, what: str) -> None:
        self.controller._run_until(is_so, what)

    def events(self) -> list[dict]:
        return [json.loads(line)["event"] for line in (self.out / "events.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with ExitStack() as opened:
        yield Run(tmp_path, opened)


def swapped(replica: int, version: int = 0) -> Swapped:
    return Swapped(replica=replica, version=version, transfer_s=0.0, pause_s=0.0, probe_error=0.0)


def finished(ordinal: int, replica: int) -> CompletionFinished:
    return CompletionFinished(ordinal=ordinal, sample=0, replica=replica, num_tokens=1, min_version=0, max_version=0)


def scored(ordinal: int, num_failed: int = 0) -> GroupScored:
    return GroupScored(
        ordinal=ordinal,
        has_signal=num_failed < 2,
        mean_reward=0.5,
        num_failed=num_failed,
        min_version=0,
        max_version=0,
    )


def failed(name: str, error: str = "RuntimeError: boom", *, may_follow: bool = False) -> Failed:
    return Failed(executor=name, error=error, may_follow=may_follow)


def ordinals(played: Played, count: int) -> list[int]:
    return [message.ordinal for _ in range(count) if isinstance(message := played.hears(Admit), Admit)]


def test_a_generator_that_fails_is_shut_out_its_groups_go_elsewhere_and_it_comes_back(run: Run) -> None:
    played = run.start()
    trainer, lead, follower, other = (played[n] for n in ("trainer", "generator-0", "generator-0@1", "generator-1"))
    assert ordinals(lead, 2) == [0, 1]
    assert ordinals(other, 2) == [2, 3]
    lead.say(Counters(executor="generator-0", values={"generated_tokens": 7.0}))
    run.until(lambda: run.controller.tally.generated_tokens == 7, "what it has counted")

    follower.say(failed("generator-0@1"))  # one rank; the whole group is gone
    run.until(lambda: 0 not in run.schedule.versions, "the loss")
    assert run.observer.notes[-2:] == [
        "generator-0@1 failed: RuntimeError: boom",
        "generator-0 was lost; its unfinished groups go elsewhere",
    ]
    assert run.schedule.readmit == [0, 1], "the other replica is full"
    assert run.controller.executors.missing == ["generator-0", "generator-0@1"]
    for peer in (trainer, other):
        lost = tuple(PeerLost(executor=name, incarnation=1) for name in ("generator-0", "generator-0@1"))
        assert peer.hears_of(lost[0]) == Peers(changes=lost)

    for _ in range(2):
        other.say(finished(2, replica=1))
    run.until(lambda: run.schedule.readmit == [1], "room at the other replica")
    assert ordinals(other, 1) == [0]

    stats = run.controller.executors._ports.inputs["events"].stats
    refused = stats.refused
    lead.say(finished(1, replica=0))  # late words of one that does not know yet
    run.until(lambda: stats.refused > refused, "they are refused")
    wait([], [lead.ports.outputs["events"]], timeout_s=0.5)
    with pytest.raises(ChannelClosed, match="incarnation 1 was replaced by 2"):
        lead.say(finished(1, replica=0))

    lead, follower = run.start_again("generator-0")
    lead.join()
    lead.say(swapped(0))  # not yet: one of its ranks is missing
    other.say(Counters(executor="generator-1", values={"seen": 1.0}))
    run.until(lambda: "seen" in run.controller.tally.counters.get("generator-1", {}), "a later message")
    assert 0 not in run.schedule.versions
    follower.join()
    run.until(lambda: not run.controller.executors._membership.is_absent("generator-0"), "it is there again")
    assert run.observer.notes[-1] == "generator-0 has joined (incarnation 2)"
    for peer in (trainer, other):
        joined = tuple(PeerJoined(executor=name, incarnation=2) for name in ("generator-0", "generator-0@1"))
        assert peer.hears_of(joined[0]) == Peers(changes=joined)
    for one in (lead, follower):
        one.say(Ready(executor=one.name))
    lead.say(swapped(0), Counters(executor="generator-0", values={"generated_tokens": 1.0}))
    assert_regenerated(run, trainer, lead)


def test_what_a_step_dropped_is_in_the_ledger_before_its_checkpoint_is_asked_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = run.start()
    commands = [TrainStep(step=1, ordinals=(2, 3)), Skip(ordinals=(1,), cause="stale")]
    monkeypatch.setattr(run.controller.schedule, "apply", lambda event: commands)
    synced: list[str] = []
    monkeypatch.setattr(run.controller.ledger, "sync", lambda: synced.append(run.controller.ledger.states[1]))
    run.controller.is_checkpoint_wanted = True
    run.controller._decide(StepDone(step=0, version=1, metrics={}))
    assert synced == ["skipped"]
    heard: list[type[Message]] = []
    while TrainStep not in heard:
        heard.append(type(played["trainer"].hears(Skip | Checkpoint | TrainStep)))
    assert heard == [Skip, Checkpoint, TrainStep]


def test_while_prompts_do_not_come_other_machines_hear_of_the_controller(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start()
    executors = run.controller.executors
    beats: list[Ports] = []
    monkeypatch.setattr(Ports, "beat", lambda ports: beats.append(ports))
    clock = VirtualClock()
    clock.advance(run.controller.clock.now_s() + TIMEOUT_S / 2)
    monkeypatch.setattr(executors._membership._lease, "_clock", clock)
    monkeypatch.setattr(executors, "_clock", clock)
    executors.keep_in_touch()
    executors.keep_in_touch()
    assert beats == [executors._ports], "one is due"
    assert executors.heard_s == clock.now_s(), "and the run is not taken for one in which nothing happens"


def assert_regenerated(run: Run, trainer: Played, lead: Played) -> None:
    """What the lost one had not finished is trained, once, and all that was counted counts."""
    run.until(lambda: not run.schedule.readmit, "it gets what is left")
    assert ordinals(lead, 1) == [1]
    trainer.say(scored(0), scored(1))
    run.until(lambda: run.schedule.training == (0, 1), "a step")
    assert trainer.hears(TrainStep) == TrainStep(step=0, ordinals=(0, 1))
    run.until(lambda: run.controller.tally.generated_tokens == 8, "counts of both incarnations")
    assert [event["type"] for event in run.events()].count("ReplicaLost") == 1
    assert not [e for e in run.events() if e["type"] == "CompletionFinished" and e["replica"] == 0]
    counts = run.controller.ledger.counts()
    assert (counts["admitted"], counts["lost"], counts["repeated"]) == (4, 0, 0)


def test_who_may_join_later_is_not_waited_for_gets_work_and_leaves_its_number(run: Run) -> None:
    played = run.start()
    assert ordinals(played["generator-1"], 2) == [2, 3]
    played["generator-1"].say(failed("generator-1"))
    run.until(lambda: run.schedule.readmit == [2, 3], "groups without a replica")
    store = attend(str(run.address), timeout_s=TIMEOUT_S)
    for incarnation in (1, 2):
        assert pool.hold_any(store, ["generator-2"], "its command") == "generator-2"
        assert pool.hold(store, "generator-2", "its command", incarnation)
        new = run.connect("generator-2", incarnation)
        new.join()
        new.say(Ready(executor="generator-2"), swapped(2))
        run.until(lambda: 2 in run.schedule.versions, "it holds a version")
        assert ordinals(new, 2) == [2, 3], "what nobody else has room for"
        news = PeerJoined(executor="generator-2", incarnation=incarnation)
        assert played["trainer"].hears_of(news) == Peers(changes=(news,))
        assert not pool.hold(store, "generator-2", "another command")
        new.say(Left(executor="generator-2"))
        run.until(lambda: run.schedule.readmit == [2, 3], "the loss")
        assert run.observer.notes[-1] == "generator-2 has left; its unfinished groups go elsewhere"
    assert pool.hold(store, "generator-2", "another command"), "its number is free"


def test_a_group_that_was_killed_and_started_again_unnoticed_is_lost_first(run: Run) -> None:
    played = run.start()
    assert ordinals(played["generator-1"], 2) == [2, 3]
    [again] = run.start_again("generator-1")
    again.join()
    run.until(lambda: 1 not in run.schedule.versions, "the loss")
    assert run.schedule.readmit == [2, 3]
    assert run.controller.executors.missing == ["generator-1"]
    again.say(Ready(executor="generator-1"), swapped(1))
    run.until(lambda: not run.schedule.readmit, "its own groups, once more")
    assert ordinals(again, 2) == [2, 3]
    assert again.hears_nothing_more()


def test_a_group_that_ended_is_found_out_by_sending_to_it(run: Run) -> None:
    played = run.start()
    assert ordinals(played["generator-1"], 2) == [2, 3]
    played["generator-1"].ports.close()
    outbox = run.controller.executors._ports.outputs["to-generator-1"]
    run.until(lambda: not outbox.connected, "its last reply")
    for _ in range(2):
        run.controller.executors.send("generator-1", Stop())
    run.until(lambda: 1 not in run.schedule.versions, "the loss")
    assert run.schedule.readmit == [2, 3]
    assert [event["type"] for event in run.events()].count("ReplicaLost") == 1


LOST_A_RANK = failed("trainer", "RankError: rank 1 is gone", may_follow=True)


@pytest.mark.parametrize(
    ("endings", "kind", "what"),
    [
        ([failed("trainer")], ExecutorDied, "'trainer' failed"),
        ([Joined(executor="trainer", incarnation=2)], ExecutorLost, "was lost"),
        ([failed("trainer", "RuntimeError: shapes", may_follow=True)], ExecutorDied, "'trainer' failed\n.*shapes"),
        ([failed("trainer", "RuntimeError: [gloo/pair.cc:5] reset", may_follow=True)], ExecutorLost, "was lost"),
        ([LOST_A_RANK], ExecutorLost, "'trainer' was lost\n.*rank 1 is gone"),
        ([LOST_A_RANK, failed("trainer", "ValueError: no")], ExecutorDied, "'trainer' failed\n.*ValueError: no"),
        ([failed("generator-0", "NonFiniteError: nan")], ExecutorDied, "'generator-0' failed"),
        ([failed("generator-0", "NotReproducedError: no")], ExecutorDied, "'generator-0' failed"),
    ],
)
def test_without_the_trainer_or_with_broken_weights_there_is_no_run(
    run: Run, endings: list[Message], kind: type[ExecutorDied], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank that is lost the run may go on (ExecutorLost), of an error it may not."""
    monkeypatch.setattr(executors, "CAUSE_DEADLINE_S", TIMEOUT_S if len(endings) > 1 else 0.0)
    played = run.start()
    [speaker] = {ending.executor for ending in endings}  # type: ignore[attr-defined]
    speaks = run.start_again("trainer")[0] if isinstance(endings[0], Joined) else played[speaker]
    speaks.say(*endings)
    with pytest.raises(ExecutorDied, match=what) as raised:
        run.until(lambda: False, "never")
    assert type(raised.value) is kind


def test_a_trainer_that_gave_up_before_it_joined_and_comes_again_is_no_loss(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "CAUSE_DEADLINE_S", TIMEOUT_S)
    with ThreadPoolExecutor(4) as threads:
        coming = [threads.submit(run.connect, name) for name in run.pipeline.members[:-1]]
        run.controller.executors.launch(run.transport_dir, "run-1", run.controller.cluster)
        played = {one.name: one for one in (future.result() for future in coming)}
    played["trainer"].say(LOST_A_RANK)
    run.until(lambda: "trainer" in run.controller.executors._suspects, "its error")
    [again] = run.start_again("trainer")
    again.join()
    run.until(lambda: not run.controller.executors._membership.is_absent("trainer"), "it is there")
    run.controller.executors._clock = VirtualClock(1e9)  # long after
    run.controller.executors.work()


def test_a_machine_that_alone_cannot_take_a_version_ends_no_run(run: Run) -> None:
    """Its disk is full, or it has just come and computes something else than the replicas that have that version."""
    played = run.start()
    played["generator-1"].say(failed("generator-1", "WeightSyncError: no room"))
    run.until(lambda: 1 not in run.schedule.versions, "the loss")
    [again] = run.start_again("generator-1")
    again.join()
    run.until(lambda: not run.controller.executors._membership.is_absent("generator-1"), "it is there again")
    again.say(failed("generator-1", "NotReproducedError: no"))
    run.until(lambda: run.controller.executors._membership.is_absent("generator-1"), "it is lost again")
    assert run.observer.notes[-2] == "generator-1 failed: NotReproducedError: no"
    assert sorted(run.schedule.versions) == [0]


def test_who_loads_a_model_or_trains_may_be_silent(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(Membership, "check", lambda _, ports, *, busy, patience: seen.append(list(busy)) or [])
    run.controller.executors.work()
    assert seen.pop() == ["trainer", "generator-0", "generator-0@1", "generator-1", "generator-2"], (
        "nobody is ready yet"
    )
    played = run.start()
    run.controller.executors.work()
    assert seen.pop() == ["trainer", "generator-2"]
    played["generator-0@1"].say(failed("generator-0@1"))
    run.until(lambda: 0 not in run.schedule.versions, "a loss")
    run.controller.executors.work()
    assert seen.pop() == ["trainer", "generator-0", "generator-0@1", "generator-2"]


def test_reports_of_counters_are_no_sign_that_the_run_goes_on(run: Run) -> None:
    played = run.start()
    sides, clock = run.controller.executors, VirtualClock(1e9)
    sides._clock = clock
    heard_s = sides.heard_s
    played["trainer"].say(Counters(executor="trainer", values={"seen": 1.0}))
    run.until(lambda: "seen" in run.controller.tally.counters.get("trainer", {}), "counters")
    assert sides.heard_s == heard_s
    played["trainer"].say(scored(0))
    run.until(lambda: 0 in run.schedule.ready, "an event")
    assert sides.heard_s == 1e9


def test_at_the_end_groups_are_told_and_their_last_words_heard(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    played = run.start()
    monkeypatch.setattr(executors, "STOP_DEADLINE_S", 0.5)  # one of them has hung up
    for name in ("trainer", "generator-0"):
        played[name].say(Counters(executor=name, values={"last": 1.0}), Left(executor=name))
    played["generator-0@1"].say(Left(executor="generator-0@1"))
    heard: list[Message] = []
    run.controller.executors.end(heard.append, is_failed=False)
    for name in ("trainer", "generator-0", "generator-1"):
        assert played[name].hears(Stop) == Stop()
    left = {message.executor for message in heard if isinstance(message, Left)}
    assert left == {"trainer", "generator-0", "generator-0@1"}
    assert {message.executor for message in heard if isinstance(message, Counters)} == {"trainer", "generator-0"}
    assert run.controller.executors._membership.remote_present == ["generator-1"]


def test_after_a_failure_nobody_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    played = run.start()
    monkeypatch.setattr(executors, "STOP_DEADLINE_S", float("inf"))
    run.controller.executors.end(lambda _: None, is_failed=True)
    ordinals(played["generator-1"], 2)
    assert played["generator-1"].hears_nothing_more()


def test_a_resume_may_bring_a_whole_batch_which_is_trained_before_any_generator_is_there(run: Run) -> None:
    run.schedule.next_ordinal, run.schedule.readmit = 2, [0, 1]  # as a snapshot has them
    for ordinal in (0, 1):
        run.controller.ledger.admit(ordinal)
    with ThreadPoolExecutor(4) as pool:
        coming = [pool.submit(run.connect, name) for name in run.pipeline.members]
        run.controller.executors.launch(run.transport_dir, "run-1", run.controller.cluster)
        played = {one.name: one for one in (future.result() for future in coming)}
    trainer = played["trainer"]
    trainer.join()
    trainer.say(Ready(executor="trainer"))
    for ordinal in (0, 1):
        trainer.say(scored(ordinal))
    run.until(lambda: bool(run.schedule.training), "the step")
    assert work_left(run.schedule, has_begun=run.controller.has_begun) == "finishing step 1, then a checkpoint"
    trainer.say(StepDone(step=0, version=1, metrics=METRICS))
    run.until(lambda: run.schedule.steps_done == 1, "its end")
    assert run.controller.executors.missing == ["generator-0", "generator-0@1", "generator-1"]
    assert run.controller.ledger.counts()["trained"] == 2
    assert run.controller.tally.steps_done == 1
    assert run.controller.has_begun, "a signal throws nothing away"


def test_a_trainer_that_is_taken_away_saves_what_it_has_after_the_step(run: Run) -> None:
    """A scheduler told its group to end, and the run goes on: the next attempt should begin from here."""
    assert run.controller.config.trainer.checkpoint_every > 1
    trainer = run.start()["trainer"]
    trainer.say(scored(0), scored(1))
    run.until(lambda: run.schedule.training == (0, 1), "a step")
    trainer.say(Leaving(executor="trainer"))
    run.until(lambda: run.controller.is_checkpoint_wanted, "it is heard")
    assert run.controller.cut_at is None
    assert run.observer.notes[-1] == "trainer was told to end: a checkpoint is made when no step is in training"
    trainer.say(StepDone(step=0, version=1, metrics=METRICS), scored(2), scored(3))
    run.until(lambda: run.schedule.training == (2, 3), "the next step")
    assert trainer.hears(Checkpoint).step == 1
    assert trainer.hears(TrainStep) == TrainStep(step=1, ordinals=(2, 3)), "the checkpoint comes before it"
    trainer.say(StepDone(step=1, version=2, metrics=METRICS))
    run.until(lambda: run.schedule.steps_done == 2, "its end")
    assert run.controller.cut_at is not None
    assert run.controller.cut_at[0] == 1, "one is enough"


def test_failures_of_groups_that_wait_at_a_checkpoint_are_counted_once_after_it(run: Run) -> None:
    """A resume, or a lost trainer, hears of these groups anew: restored, or sampled and scored again."""
    trainer = run.start()["trainer"]
    trainer.say(scored(0, num_failed=1), scored(1))
    run.until(lambda: run.schedule.training == (0, 1), "a step")
    trainer.say(scored(2, num_failed=1))
    run.until(lambda: 2 in run.schedule.ready, "a group that waits for its step")
    trainer.say(scored(3, num_failed=2))
    run.until(lambda: 3 in run.schedule.dropped, "one that no resume admits again")
    trainer.say(Leaving(executor="trainer"), StepDone(step=0, version=1, metrics=METRICS))
    run.until(lambda: run.schedule.steps_done == 1, "the checkpoint")
    saved = trainer.hears(Checkpoint)
    assert isinstance(saved, Checkpoint)
    assert saved.schedule["scored"] == [2]
    whole = run.controller.tally
    assert (whole.scored_completions, whole.failed_completions) == (8, 4)
    resumed = Tally(run.controller.config, started_s=0.0)
    resumed.restore(saved.run)
    assert (resumed.scored_completions, resumed.failed_completions) == (6, 3)
    for _ in range(2):  # its next checkpoint finds that it still waits
        resumed.take(scored(2, num_failed=1))
        assert (resumed.scored_completions, resumed.failed_completions) == (8, 4)
        later = resumed.saved([2])
        resumed = Tally(run.controller.config, started_s=0.0)
        resumed.restore(later)
    resumed.take(scored(2, num_failed=1))
    trained = resumed.saved([])
    assert (trained["scored_completions"], trained["failed_completions"]) == (8.0, 4.0)


def test_a_trainer_that_is_taken_away_while_it_waits_saves_what_it_has_at_once(run: Run) -> None:
    """Generation may take longer than its grace. All ranks say so, and one checkpoint is under way."""
    played = run.start()
    trainer = played["trainer"]
    trainer.say(Leaving(executor="trainer"))
    run.until(lambda: run.controller.is_checkpoint_wanted, "it is heard")
    assert trainer.hears(Checkpoint).step == 0
    played["generator-1"].say(finished(2, replica=1))
    trainer.say(Leaving(executor="trainer"), scored(0), scored(1))
    run.until(lambda: run.schedule.training == (0, 1), "a step")
    assert run.controller.num_unsaved == 1
    trainer.say(StepDone(step=0, version=1, metrics=METRICS))
    run.until(lambda: run.controller.num_unsaved == 2, "the step that it had time for")


def test_the_last_checkpoint_is_waited_for_also_where_an_earlier_one_is_of_the_same_step(run: Run, monkeypatch) -> None:
    trainer, controller = run.start()["trainer"], run.controller
    controller._checkpoint()
    controller._decide(finished(0, replica=0))  # so the last cut is another one
    controller.interrupts.number = signal.SIGINT
    was_enough: list[bool] = []

    def answering(is_done, what: str) -> None:
        if what == "checkpoint and export":
            saved = CheckpointSaved(step=0, path="step_0")
            trainer.say(saved, Exported(path=str(controller.run_dir / "model")))
            Controller._run_until(controller, lambda: controller.is_exported, "the first, and the export")
            was_enough.append(is_done())
            trainer.say(saved)
        Controller._run_until(controller, is_done, what)

    monkeypatch.setattr(controller, "_run_until", answering)
    controller._finish()
    assert was_enough == [False]


@pytest.mark.parametrize("waits_for", ["groups", "prompts"])
def test_the_first_signal_ends_a_wait_before_the_run(run: Run, waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For groups of other machines, or for a stream of prompts to come to where a resumed run asks for them."""
    interrupts = run.controller.interrupts
    run.opened.pop_all()  # the run shuts itself down

    def waiting(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal was only noted")

    if waits_for == "groups":
        monkeypatch.setattr(run.controller.executors, "launch", waiting)
    else:
        run.controller.work = replace(run.controller.work, first_ordinal=7, prompt_of=waiting)
    with pytest.raises(Interrupted), interrupts, interrupts.deferred(60.0):
        run.controller.run()
    assert interrupts.is_at_once
    assert run.controller.tally.ended_s > 0
