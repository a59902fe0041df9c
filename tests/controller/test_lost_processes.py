"""Children that are lost, as the controller sees them: who is started again, when, how often, and what ends the run.

Real channels in one process; the children are played by the test, and the time is virtual where it decides.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from slipstream.controller import executors as module
from slipstream.controller.executors import CAUSE_DEADLINE_S, Executors
from slipstream.controller.pipeline import MEMBERSHIP, Node, Pipeline
from slipstream.controller.restarts import Patience
from slipstream.core.addresses import LocalAddresses
from slipstream.core.channel import Ports, connect_by_book, wait
from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ExecutorDied, ExecutorLost
from slipstream.core.executor import Context, Executor
from slipstream.core.peer_messages import Failed, Joined, PeerJoined, PeerLost, Peers
from slipstream.core.recipes import resolve
from slipstream.core.service_messages import Admit, Counters, Ready
from slipstream.core.types import CompletionFinished, Message, Prompt, ReplicaLost, StepDone
from slipstream.observe.timeline import Instant, Timeline

DEADLINE_S, LEASE_S = 60.0, 20.0
PROMPT = Prompt(prompt_id="0", text="", tokens=[], task="t")  # type: ignore[arg-type]
NODES = (
    Node("generator-0", os.path.join, ranks=2, is_replaceable=True),
    Node("generator-1", os.path.join, is_replaceable=True),
    Node("rewards", os.path.join, is_replaceable=True),
    Node("trainer", os.path.join, ranks=2),
)


class FakeChild:
    """Stands for a process: `code` once it has ended; `pidfd` is readable from then on."""

    def __init__(self, name: str, incarnation: int, incarnations: dict[str, int]) -> None:
        self.name, self.incarnation, self.incarnations = name, incarnation, incarnations
        self.pidfd, self._end = os.pipe()
        self.how_it_ended = ""
        self.is_killed = False

    def ends(self, how: str) -> None:
        self.how_it_ended = how
        os.write(self._end, b"x")

    @property
    def has_ended(self) -> bool:
        return bool(self.how_it_ended)

    def log_tail(self) -> str:
        return f"the log of {self.name}"

    def kill(self) -> None:
        assert not self.is_killed
        self.is_killed = True
        os.close(self.pidfd)
        os.close(self._end)

    def let_go(self) -> None:
        """Nothing."""

    def end(self, deadline_s: float) -> None:
        self.kill()


class Run:
    """Executors of NODES, with a virtual clock; `children` are those alive, `say` puts words into their mouths."""

    def __init__(self, folder: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch, max_restarts: int) -> None:
        self.clock = VirtualClock(1000.0)
        self.children: dict[str, FakeChild] = {}
        self.started: list[tuple[str, int]] = []
        self.ports: dict[str, Ports] = {}
        self.notes: list[str] = []
        self.lost: list[str] = []
        self.restarts: Counter[str] = Counter()
        self.opened, self.transport_dir = opened, folder / "t"
        self.transport_dir.mkdir(mode=0o700)
        self.timeline = Timeline("controller", None, self.clock)
        self.pipeline = Pipeline(NODES, ())
        monkeypatch.setattr(module.Child, "start", self._start)
        monkeypatch.setattr(Ports, "hear", lambda *_, **__: None)  # theirs is the wall's time: see `answering`
        config = resolve("quickstart", {"deadline_s": DEADLINE_S, "lease_s": LEASE_S, "max_restarts": max_restarts})
        self.executors = Executors(
            config,
            self.pipeline,
            folder,
            clock=self.clock,
            note=self.notes.append,
            lost=self.lost.extend,
            spans=self.timeline,
            restarts=self.restarts,
        )
        self.executors.launch(self.transport_dir, "run-1", None)
        opened.callback(self.executors.close)
        opened.callback(self.executors.end, lambda _: None, is_failed=True)
        for name in list(self.children):
            self.say(name, Ready(executor=name))
        assert [type(m) for m in self.hear(len(self.children))] == [Ready] * len(self.children)

    def _start(self, node: Node, rank: int, channels: Any, **spec: Any) -> FakeChild:
        child = FakeChild(node.members[rank], spec["incarnation"], dict(spec["incarnations"]))
        self.children[child.name] = child
        self.ports.pop(child.name, None)
        self.started.append((child.name, child.incarnation))
        return child

    def play(self, name: str) -> Ports:
        """The ports of the child `name`."""
        if name not in self.ports:
            child = self.children[name]
            book = LocalAddresses(self.pipeline.all_channels, self.transport_dir, child.incarnations)
            ports = connect_by_book(self.pipeline.all_channels, [name], book, child.incarnation)[name]
            self.opened.callback(ports.close)
            self.ports[name] = ports
        return self.ports[name]

    def say(self, name: str, *messages: Message) -> None:
        for message in messages:
            self.play(name).outputs["events"].put(message)

    def hear(self, count: int) -> list[Message]:
        """What the controller gets, until it is so much."""
        found: list[Message] = []
        for _ in range(100):
            if len(found) >= count:
                return found
            wait(self.executors._ports.inputs.values(), [p.outputs["events"] for p in self.ports.values()], (), 0.1)
            while (message := self.executors.receive()) is not None:
                found.append(message)
        raise AssertionError(f"{count} messages were to come, not {found}")

    def dies(self, name: str, how: str = "killed by SIGKILL") -> None:
        self.children[name].ends(how)
        self.ports.pop(name, None)

    def work(self) -> list[Message]:
        """What the controller does in a round of its loop; returns what it hears."""
        self.executors.work()
        found = []
        while (message := self.executors.receive()) is not None:
            found.append(message)
        return found

    def comes_back(self, *names: str) -> None:
        """Its back-off passes; it is started, is ready, and joins."""
        self.clock.advance(self.executors._restarts.wait_s())
        self.executors.work()
        for name in names:
            self.say(name, Ready(executor=name))
            self.say(name, Joined(executor=name, incarnation=self.children[name].incarnation))
        self.hear(len(names))
        for _ in range(50):
            if not self.executors._membership.is_absent(names[0]):
                return
            wait(self.executors._ports.inputs.values(), [p.outputs["events"] for p in self.ports.values()], (), 0.1)
            self.executors.receive()
        raise AssertionError(f"{names} did not join")

    def instants(self) -> list[tuple[str, Any]]:
        return [(r.name, r.args["executor"]) for r in self.timeline._buffer if isinstance(r, Instant)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with ExitStack() as opened:
        yield lambda max_restarts=3: Run(tmp_path, opened, monkeypatch, max_restarts)


def test_a_generator_that_is_killed_takes_its_ranks_along_and_comes_back(make: Any) -> None:
    run = make()
    other_rank = run.children["generator-0@1"]
    run.dies("generator-0")
    assert run.work() == [ReplicaLost(replica=0)]
    assert other_rank.is_killed
    assert run.executors.missing == ["generator-0", "generator-0@1"]
    assert run.lost == ["generator-0", "generator-0@1"]
    assert run.restarts == {"generator-0": 1}
    [note] = run.notes
    assert "generator-0 was lost: killed by SIGKILL" in note
    assert "started again in 0.5 s" in note
    assert "2 restarts of it left" in note
    assert "the log of generator-0" in note
    trainer = run.play("trainer").inputs[MEMBERSHIP]
    assert wait([trainer], run.executors._ports.outputs.values(), timeout_s=5)
    lost = tuple(PeerLost(executor=name, incarnation=1) for name in ("generator-0", "generator-0@1"))
    assert trainer.get_nowait() == Peers(changes=lost)

    num_started = len(run.started)
    run.clock.advance(0.4)
    assert run.work() == []
    assert len(run.started) == num_started, "not before its time"
    run.comes_back("generator-0", "generator-0@1")
    assert run.started[num_started:] == [("generator-0", 2), ("generator-0@1", 2)]
    assert run.children["generator-0"].incarnations == {"generator-0": 2, "generator-0@1": 2}
    assert run.executors.missing == []
    assert run.notes[-1] == "generator-0 has joined (incarnation 2)"
    assert run.instants() == [("lost", "generator-0"), ("started again", "generator-0"), ("joined", "generator-0")]
    told = []
    while wait([trainer], run.executors._ports.outputs.values(), timeout_s=0.3):
        told.append(trainer.get_nowait())
    back = tuple(PeerJoined(executor=name, incarnation=2) for name in ("generator-0", "generator-0@1"))
    assert told == [Peers(changes=back)]


def test_last_words_of_the_lost_are_heard_before_its_loss_and_not_after(make: Any) -> None:
    run = make()
    finished = CompletionFinished(ordinal=0, sample=0, replica=1, num_tokens=1, min_version=0, max_version=0)
    counters = Counters(executor="generator-1", values={"generated_tokens": 7.0})
    run.say("generator-1", counters)
    run.play("generator-1").outputs["events"].pump()
    assert wait(run.executors._ports.inputs.values(), [run.ports["generator-1"].outputs["events"]], (), 5.0)
    zombie = run.ports["generator-1"]
    run.dies("generator-1")
    run.executors.work()
    assert run.executors.receive() == counters
    assert run.lost == [], "what it has counted belongs to the one that is gone"
    assert run.executors.receive() == ReplicaLost(replica=1)
    assert run.lost == ["generator-1"]
    zombie.outputs["events"].put(finished)
    stats = run.executors._ports.inputs["events"].stats
    before = stats.refused
    while stats.refused == before:
        wait(run.executors._ports.inputs.values(), [zombie.outputs["events"]], (), 0.05)
        assert run.executors.receive() is None


def test_rewards_come_back_and_the_schedule_hears_nothing(make: Any) -> None:
    run = make()
    run.dies("rewards", "exit code 137")
    assert run.work() == []
    assert run.restarts == {"rewards": 1}
    run.comes_back("rewards")
    run.dies("rewards")
    run.work()
    assert run.executors._restarts.wait_s() == pytest.approx(1.0), "the second time after twice as long"


def test_what_was_started_while_others_were_lost_knows_where_they_are(make: Any) -> None:
    run = make()
    run.dies("rewards")
    run.work()
    run.comes_back("rewards")
    run.dies("generator-1")
    run.work()
    run.comes_back("generator-1")
    assert run.children["generator-1"].incarnations == {"rewards": 2, "generator-1": 2}


def test_one_loss_too_many_ends_the_run_and_says_how_often(make: Any) -> None:
    run = make(max_restarts=1)
    run.dies("generator-1")
    run.work()
    run.clock.advance(0.5)
    run.work()
    run.dies("generator-1", "exit code 1")  # while it starts
    with pytest.raises(ExecutorDied, match="'generator-1' was lost 2 times") as caught:
        run.work()
    assert not isinstance(caught.value, ExecutorLost), "to begin again would be to go over the budget"
    assert "max_restarts = 1" in str(caught.value)
    assert "exit code 1" in str(caught.value)
    assert "the log of generator-1" in str(caught.value)


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_without_a_trainers_rank_this_attempt_is_over_and_the_next_may_go_on(make: Any, max_restarts: int) -> None:
    run = make(max_restarts)
    run.dies("trainer@1")
    with pytest.raises(ExecutorLost, match="the process of 'trainer@1' ended") as caught:
        run.work()
    assert caught.value.executor == "trainer"
    assert run.restarts == {}


def failed(name: str, error: str, *, may_follow: bool) -> Failed:
    return Failed(executor=name, error=error, may_follow=may_follow)


def hears_failure(run: Run, message: Failed) -> None:
    """Until the controller has taken it."""
    run.say(message.executor, message)
    outbox = run.ports[message.executor].outputs["events"]
    while outbox.depth:
        wait(run.executors._ports.inputs.values(), [outbox], (), 0.05)
        run.executors.receive()


def test_an_executor_that_reports_an_error_is_not_tried_again(make: Any) -> None:
    run = make()
    run.say("generator-1", failed("generator-1", "ShapeError: no", may_follow=False))
    with pytest.raises(ExecutorDied, match="'generator-1' failed") as caught:
        hears_failure(run, failed("generator-1", "ShapeError: no", may_follow=False))
    assert "ShapeError: no" in str(caught.value)
    assert caught.value.hint == f"see {run.executors.run_dir / 'logs' / 'generator-1.log'}"
    assert not isinstance(caught.value, ExecutorLost)


def test_the_word_of_a_child_that_has_ended_is_heard_first(make: Any) -> None:
    run = make()
    run.say("rewards", failed("rewards", "ConfigError: no such verifier", may_follow=False))
    wait(run.executors._ports.inputs.values(), [run.ports["rewards"].outputs["events"]], (), 5.0)
    run.dies("rewards", "exit code 1")
    with pytest.raises(ExecutorDied, match="'rewards' failed"):
        run.work()


def test_survivors_of_a_collective_do_not_hide_who_died(make: Any) -> None:
    """The survivor's error may come first; the end of the other rank is what is told."""
    run = make()
    hears_failure(run, failed("trainer", "RuntimeError: Connection closed by peer", may_follow=True))
    run.dies("trainer", "exit code 1")
    assert run.work() == []
    run.dies("trainer@1")
    with pytest.raises(ExecutorLost, match="the process of 'trainer@1' ended") as caught:
        run.work()
    assert "SIGKILL" in str(caught.value)


def test_an_error_on_one_rank_is_told_instead_of_what_it_did_to_the_others(make: Any) -> None:
    run = make()
    hears_failure(run, failed("trainer", "RankError: a collective failed", may_follow=True))
    with pytest.raises(ExecutorDied, match="'trainer@1' failed") as caught:
        hears_failure(run, failed("trainer@1", "ShapeError: 3 != 4", may_follow=False))
    assert "ShapeError" in str(caught.value)


def test_an_error_that_follows_from_nothing_is_told_after_a_moment(make: Any) -> None:
    run = make()
    hears_failure(run, failed("generator-1", "ChannelTimeout: nothing was taken", may_follow=True))
    run.dies("generator-1", "exit code 1")
    run.clock.advance(CAUSE_DEADLINE_S - 0.1)
    assert run.work() == []
    run.clock.advance(0.2)
    with pytest.raises(ExecutorDied, match="'generator-1' failed") as caught:
        run.work()
    assert "ChannelTimeout" in str(caught.value)


def test_a_generators_survivor_is_started_again_with_the_one_that_died(make: Any) -> None:
    run = make()
    hears_failure(run, failed("generator-0", "RankError: it did not come", may_follow=True))
    run.dies("generator-0", "exit code 1")
    run.dies("generator-0@1")
    assert run.work() == [ReplicaLost(replica=0)]
    assert run.restarts == {"generator-0": 1}, "one loss"
    run.clock.advance(CAUSE_DEADLINE_S + 1)
    run.work()
    assert run.started[-2:] == [("generator-0", 2), ("generator-0@1", 2)]


def test_who_gave_up_because_of_another_is_lost_like_it(make: Any) -> None:
    run = make()
    hears_failure(run, failed("generator-1", "ChannelClosed: 'rewards' has ended", may_follow=True))
    run.dies("generator-1", "exit code 1")
    run.dies("rewards")
    assert run.work() == [ReplicaLost(replica=1)]
    assert run.restarts == {"rewards": 1, "generator-1": 1}


def test_silence_ends_a_lease_and_the_process_for_certain(make: Any) -> None:
    """A generator may be silent for a lease, a trainer for the deadline; the one that is stopped cannot come back."""
    run = make()
    stopped = run.children["generator-1"]
    others = [name for name in run.children if name != "generator-1"]
    answering(run, others, LEASE_S + 1)
    assert stopped.is_killed
    assert run.restarts == {"generator-1": 1}
    assert "silent for" in run.notes[0]
    answering(run, [name for name in others if name != "trainer@1"], DEADLINE_S - 2 * LEASE_S)
    with pytest.raises(ExecutorLost, match=r"'trainer@1' was lost") as caught:
        answering(run, [name for name in others if name != "trainer@1"], 3 * LEASE_S)
    assert caught.value.executor == "trainer"


def answering(run: Run, names: list[str], seconds: float) -> None:
    """So much time passes, while these speak and read."""
    end_s = run.clock.now_s() + seconds
    while run.clock.now_s() < end_s:
        run.clock.advance(1.0)
        for name in names:
            if name in run.children and not run.children[name].is_killed:
                run.executors._membership._lease.heard(name)
        run.work()


def started_again(run: Run, name: str) -> Any:
    """Return the child that follows one which dies."""
    run.dies(name)
    run.work()
    run.clock.advance(0.5)
    run.work()
    return run.children[name]


def test_one_that_does_not_come_up_in_time_is_lost_again(make: Any) -> None:
    run = make()
    late = started_again(run, "rewards")
    others = [name for name in run.children if name != "rewards"]
    answering(run, others, DEADLINE_S + 1)
    assert late.is_killed
    assert run.restarts == {"rewards": 2}
    assert "not there 60 s after it was started" in run.notes[-1]


def test_when_nothing_goes_on_the_silent_one_is_named(make: Any) -> None:
    run = make()
    assert not run.executors.accuse_the_silent(), "nobody was silent for a lease"
    run.clock.advance(LEASE_S + 1)
    for name in run.children:
        if name not in ("trainer", "rewards"):
            run.executors._membership._lease.heard(name)
    run.executors._membership._lease.heard("trainer", ago_s=LEASE_S + 0.5)
    assert run.executors.accuse_the_silent(), "the run may go on with another"
    assert run.restarts == {"rewards": 1}
    assert run.executors.heard_s == run.clock.now_s()
    with pytest.raises(ExecutorLost, match=r"'trainer' was lost"):
        run.executors.accuse_the_silent()


def test_a_run_that_was_stopped_and_goes_on_accuses_nobody(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z and fg, or `docker pause`: nobody was heard while it slept, and nobody could be."""
    monkeypatch.setattr(module, "WAKE_EVERY_S", 0.0)
    run = make()
    starting = started_again(run, "rewards")

    @contextmanager
    def stopped() -> Iterator[None]:
        yield
        run.clock.advance(10 * DEADLINE_S)

    run.executors.sleep(stopped)
    run.executors.check_deadline("training", 100 * DEADLINE_S, "rollouts")
    run.work()
    assert not starting.is_killed, "it has its time to start yet"
    assert run.restarts == {"rewards": 1}
    run.clock.advance(DEADLINE_S + 1)
    run.executors.check_deadline("training", 100 * DEADLINE_S, "rollouts")
    assert run.restarts == {"rewards": 1, "generator-0": 1}, "from then on as ever"


def test_a_replica_may_take_as_long_to_start_vllm_as_its_own_limit_says(make: Any) -> None:
    """Nothing else happens meanwhile, for longer than the deadline of the run."""
    run = make()
    config = run.executors.config
    generator = config.generator.model_copy(update={"engine": "vllm"})
    run.executors._patience = Patience(config.model_copy(update={"generator": generator}))
    vllm, num_waits = generator.vllm, 0
    assert vllm.start_timeout_s > 3 * DEADLINE_S
    run.executors.ready.discard("generator-1")
    child, others = run.children["generator-1"], [name for name in run.children if name != "generator-1"]
    end_s = run.clock.now_s() + vllm.start_timeout_s
    while run.clock.now_s() < end_s:
        answering(run, others, 10.0)
        run.executors.check_deadline("all executors to be ready", 100 * DEADLINE_S, "")
        num_waits += 1
        assert not child.is_killed, f"after {10 * num_waits} s"
    answering(run, others, vllm.answer_timeout_s + 10.0)
    assert child.is_killed


def test_what_is_sent_to_one_that_is_away_is_dropped(make: Any) -> None:
    run = make()
    run.dies("generator-1")
    run.work()
    run.executors.send("generator-1", Admit(ordinal=0, replica=1, prompt=PROMPT, num_samples=1))
    run.comes_back("generator-1")
    inbox = run.ports["generator-1"].inputs["commands"]
    assert not wait([inbox], run.executors._ports.outputs.values(), timeout_s=0.2)


def test_a_run_goes_on_while_counters_and_steps_come(make: Any) -> None:
    run = make()
    run.clock.advance(5.0)
    run.say("trainer", Counters(executor="trainer", values={}), StepDone(step=0, version=1, metrics={}))
    assert len(run.hear(2)) == 2
    assert run.executors.heard_s == run.clock.now_s()


def test_processes_that_load_are_told_of_until_they_are_ready(make: Any) -> None:
    run = make()
    run.clock.advance(2.5)
    run.executors.work()
    assert run.notes == [], "all are ready"
    run.dies("generator-0")
    run.work()
    del run.notes[:]
    for _ in range(9):
        run.clock.advance(0.5)
        run.executors.work()
    assert run.notes == [f"loading: generator-0, generator-0@1, {seconds} s" for seconds in (2, 4)]
    run.say("generator-0@1", Counters(executor="generator-0@1", values={}))
    run.hear(1)
    run.clock.advance(2.5)
    run.executors.work()
    assert run.notes[2:] == ["loading: generator-0, 7 s"], "one that counts has loaded, and warms up"
    run.say("generator-0", Ready(executor="generator-0"))
    run.hear(1)
    del run.notes[:]
    run.clock.advance(2.5)
    run.executors.work()
    assert run.notes == []


def test_a_group_elsewhere_that_is_gone_does_not_load(make: Any) -> None:
    run = make()
    run.dies("generator-0")
    run.work()
    del run.notes[:]
    run.executors._membership._remote = frozenset(["generator-0"])
    run.clock.advance(2.5)
    run.executors._tell_of_loading()
    assert run.notes == []
    run.executors._membership._remote = frozenset()
    run.clock.advance(2.5)
    run.executors._tell_of_loading()
    assert run.notes == ["loading: generator-0, generator-0@1, 5 s"]


def test_one_that_loads_for_long_is_told_of_as_often(make: Any) -> None:
    run = make()
    started_again(run, "rewards")
    del run.notes[:]
    answering(run, [name for name in run.children if name != "rewards"], 50.0)
    assert run.notes == [f"loading: rewards, {seconds} s" for seconds in range(2, 51, 2)]


class Loading(Executor):
    """Takes as long as `load` does, and is finished then."""

    def __init__(self, load: Callable[[], None]) -> None:
        self.load = load

    def init(self, context: Context) -> None:
        self.load()

    def step(self) -> bool:
        return False

    @property
    def is_finished(self) -> bool:
        return True


def test_a_launch_tells_what_loads_while_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the process that the others are forked from, and for an executor inside the controller's process."""
    clock, notes, told = VirtualClock(1000.0), Queue[str](), list[str]()

    def load() -> None:
        """Go on once this has been told of."""
        clock.advance(2.0)
        told.append(notes.get(timeout=60))

    def start(node: Node, *_: Any, **__: Any) -> FakeChild:
        load()
        return FakeChild(node.name, 1, {})

    monkeypatch.setattr(module.Child, "start", start)
    nodes = (Node("trainer", os.path.join), Node("rewards", Loading, {"load": load}, host="inline"))
    executors = Executors(
        resolve("quickstart"),
        Pipeline(nodes, ()),
        tmp_path,
        clock=clock,
        note=notes.put,
        lost=lambda _: None,
        spans=Timeline("controller", None, clock),
        restarts=Counter(),
    )
    (tmp_path / "t").mkdir(mode=0o700)
    with ExitStack() as opened:
        opened.callback(executors.close)
        opened.callback(executors.end, lambda _: None, is_failed=True)
        executors.launch(tmp_path / "t", "run-1", None)
    assert told == [f"loading: rewards, trainer, {seconds} s" for seconds in (2, 4)]
    assert notes.empty()
