"""Where every group is: against the schedule itself under random events, and against the rollouts' times."""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from made_up_loop import RAW_START_S, Loop
from written import loop_at

from slipstream.controller.schedule import Schedule
from slipstream.core.clock import VirtualClock
from slipstream.core.run_log import (
    PHASES,
    Decision,
    GroupState,
    LoopState,
    ScheduleBegan,
    ScheduleConfig,
    Snapshot,
    decode_decision,
)
from slipstream.core.types import (
    CompletionFinished,
    GroupScored,
    ReplicaLost,
    Skip,
    StartGroup,
    StepDone,
    Stop,
    Swapped,
    TrainStep,
)
from slipstream.observe.recorder import EventRecorder


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For runs that never happened: nobody accounts for their seconds."""
    return tmp_path_factory.mktemp("made_up")


def decisions(path: Path) -> list[Decision]:
    return [decode_decision(line) for line in path.read_bytes().splitlines()]


class Driver:
    """Random events for a real schedule, recorded by the real recorder."""

    CONFIG = ScheduleConfig(
        groups_per_step=3, completions_per_group=2, max_staleness=2, reorder_window=3, steps=12, capacity=8
    )

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = VirtualClock(100.0)
        self.recorder = EventRecorder(path, self.clock)
        self.schedule = Schedule(self.CONFIG)
        self.recorder.record(self.schedule.began(), [])
        self.sampling: list[tuple[int, int, int]] = []  # ordinal, replica, sample
        self.scoring: Counter[int] = Counter()
        self.training: int | None = None
        self.late: list[tuple[int, int, int]] = []  # completions of replicas that were lost, which are told of anyway
        self.orphans: list[int] = []  # groups whose replica was lost when all their completions were on their way
        for replica in (0, 1, 2):
            self.tell(Swapped(replica=replica, version=0, transfer_s=0, pause_s=0, probe_error=float("nan")))

    def tell(self, event: Any) -> None:
        self.clock.advance(self.random.choice([0.0, 0.125]))
        commands = self.schedule.apply(event)
        self.recorder.record(event, commands)
        self.recorder.flush()
        for command in commands:
            match command:
                case StartGroup(ordinal=ordinal, replica=replica):
                    self.sampling += [(ordinal, replica, 0), (ordinal, replica, 1)]
                    self.scoring.pop(ordinal, None)
                case TrainStep(step=step):
                    self.training = step
                case Skip():
                    pass

    def choices(self) -> list[Any]:
        able: list[Any] = [lambda one=one: self.finish(*one) for one in self.sampling]
        able += [lambda o=o: self.score(o) for o, count in self.scoring.items() if count == 2]
        able += [lambda one=one: self.finish_late(*one) for one in self.late]
        able += [lambda o=o: self.score_orphan(o) for o in self.orphans]
        versions = self.schedule.versions
        able += [lambda r=r: self.swap(r) for r in (0, 1, 2) if versions.get(r, -1) < self.schedule.steps_done]
        if self.training is not None:
            able.append(self.train)
        if len(versions) > 1 and self.random.random() < 0.04:
            able.append(lambda: self.lose(self.random.choice(sorted(versions))))
        return able

    def finish(self, ordinal: int, replica: int, sample: int) -> None:
        self.sampling.remove((ordinal, replica, sample))
        self.scoring[ordinal] += 1
        event = CompletionFinished(
            ordinal=ordinal, sample=sample, replica=replica, num_tokens=3, min_version=0, max_version=0
        )
        self.tell(event)

    def score(self, ordinal: int) -> None:
        self.scoring.pop(ordinal, None)
        fate = self.random.random()
        event = GroupScored(
            ordinal=ordinal, has_signal=fate > 0.2, mean_reward=0.5, num_failed=2 * (fate < 0.05),
            min_version=0, max_version=0,
        )  # fmt: skip
        self.tell(event)

    def swap(self, replica: int) -> None:
        version = self.schedule.steps_done
        self.tell(Swapped(replica=replica, version=version, transfer_s=0, pause_s=0, probe_error=0))

    def train(self) -> None:
        step, self.training = self.training, None
        assert step is not None
        self.tell(StepDone(step=step, version=step + 1, metrics={"loss": float("nan")}))

    def finish_late(self, ordinal: int, replica: int, sample: int) -> None:
        self.late.remove((ordinal, replica, sample))
        event = CompletionFinished(
            ordinal=ordinal, sample=sample, replica=replica, num_tokens=3, min_version=0, max_version=0
        )
        self.tell(event)

    def score_orphan(self, ordinal: int) -> None:
        """Where nobody waits for it any more, the trainer's buffer knows a duplicate."""
        self.orphans.remove(ordinal)
        if ordinal in self.schedule.in_flight or ordinal in self.schedule.readmit:
            self.sampling = [one for one in self.sampling if one[0] != ordinal]
            self.score(ordinal)

    def lose(self, replica: int) -> None:
        lost = {ordinal for ordinal, group in self.schedule.in_flight.items() if group.replica == replica}
        self.late += [one for one in self.sampling if one[0] in lost and self.random.random() < 0.5]
        self.sampling = [one for one in self.sampling if one[0] not in lost]
        for ordinal in lost:
            if self.scoring.pop(ordinal, 0) == 2:
                self.orphans.append(ordinal)
        self.tell(ReplicaLost(replica=replica))

    def resume(self) -> None:
        """As from a checkpoint of this moment: what was on its way is owed, and nobody holds a version."""
        self.schedule = Schedule.restore(self.CONFIG, self.schedule.snapshot())
        began = self.schedule.began()
        assert isinstance(began, ScheduleBegan)
        assert began.snapshot is not None or self.schedule.next_ordinal == 0
        self.recorder.record(began, [])
        self.sampling, self.late, self.orphans, self.training = [], [], [], None
        self.scoring.clear()
        self.swap(0)  # the others come when they come


def expected(schedule: Schedule) -> dict[str, set[Any]]:
    size = Driver.CONFIG.completions_per_group
    flight = schedule.in_flight.items()
    return {
        "waiting": set(schedule.readmit),
        "sampling": {(o, g.replica, size - g.unfinished) for o, g in flight if g.unfinished},
        "scoring": {o for o, g in flight if not g.unfinished},
        "ready": set(schedule.ready),
        "training": {(o, schedule.steps_done) for o in schedule.training},
    }


def shown(loop: LoopState) -> dict[str, set[Any]]:
    of: dict[str, list[GroupState]] = {phase: [] for phase in PHASES}
    for group in loop.groups.values():
        of[group.phase].append(group)
    return {
        "waiting": {g.ordinal for g in of["waiting"]},
        "sampling": {(g.ordinal, g.replica, g.finished) for g in of["sampling"]},
        "scoring": {g.ordinal for g in of["scoring"]},
        "ready": {g.ordinal for g in of["ready"]},
        "training": {(g.ordinal, g.step) for g in of["training"]},
    }


@pytest.mark.parametrize("seed", range(6))
def test_the_fold_has_the_schedules_state_after_every_event(tmp_path: Path, seed: int) -> None:
    driver = Driver(tmp_path / "events.jsonl", seed)
    with closing(driver.recorder):
        compare(driver, tmp_path / "events.jsonl", resumes=bool(seed % 2))


def compare(driver: Driver, path: Path, *, resumes: bool) -> None:
    loop, num_folded, num_compared = LoopState(), 0, 0
    while not driver.schedule.is_finished:
        if resumes and num_compared in (40, 90):
            driver.resume()
        else:
            driver.random.choice(driver.choices())()
        lines = decisions(path)
        for decision in lines[num_folded:]:
            loop.take(decision, decision.time_s)
        num_folded = len(lines)
        schedule = driver.schedule
        assert shown(loop) == expected(schedule)
        assert loop.counts == {phase: len(groups) for phase, groups in expected(schedule).items()}
        assert loop.version == schedule.steps_done
        assert loop.versions == schedule.versions
        in_flight = [(group.replica, group.unfinished) for group in schedule.in_flight.values()]
        for held_by in loop.versions:
            assert loop.unfinished.get(held_by, 0) == sum(count for replica, count in in_flight if replica == held_by)
        assert loop.next_ordinal == schedule.next_ordinal
        fates = loop.fates
        assert fates.get("trained", 0) == schedule.steps_done * driver.CONFIG.groups_per_step
        assert sum(fates.get(cause, 0) for cause in ("no_signal", "failed", "stale")) == len(schedule.dropped)
        assert fates.get("failed", 0) == schedule.num_failed
        num_compared += 1
    assert num_compared > 100
    driver.tell(Stop())
    loop.take(decisions(path)[-1], 0.0)
    assert loop.is_stopping


def by_the_rollouts(groups: dict[int, list[dict[str, Any]]], steps: dict[int, tuple[float, float]], at_s: float) -> Any:
    """Phases at `at_s` from what each rollout says of its times, and from when the trainer was in which step."""
    found: dict[str, set[Any]] = {phase: set() for phase in PHASES}
    for ordinal, rollouts in groups.items():
        step = rollouts[0]["step"]
        begin, end = steps.get(step, (float("inf"), float("inf")))
        scored_s = max(one["scored_s"] for one in rollouts)
        num_finished = sum(one["finished_s"] <= at_s for one in rollouts)
        if at_s < min(one["started_s"] for one in rollouts) or at_s >= end or (step is None and at_s >= scored_s):
            continue
        if at_s >= begin:
            found["training"].add((ordinal, step))
        elif at_s >= scored_s:
            found["ready"].add(ordinal)
        elif num_finished == len(rollouts):
            found["scoring"].add(ordinal)
        else:
            found["sampling"].add((ordinal, rollouts[0]["replica"], num_finished))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_state_at_any_time_is_what_the_rollouts_times_say(folder: Path, seed: int) -> None:
    made = Loop(seed=seed, staleness=seed, steps=8).run()
    made.write(folder)
    groups: dict[int, list[dict[str, Any]]] = {}
    for line in (folder / "rollouts.jsonl").read_text().splitlines():
        rollout = json.loads(line)
        groups.setdefault(rollout["ordinal"], []).append(rollout)
    ends = {line["event"]["step"]: line["time_s"] for line in made.lines if line["event"]["type"] == "StepDone"}
    begins = {int(args["step"]): start_s for start_s, _, state, args in made.spans["trainer"] if state[0] == "f"}
    steps = {step: (begins[step], ends[step]) for step in ends}
    lines = [(decision, decision.time_s) for decision in decisions(folder / "events.jsonl")]
    # What was on its way when the last step was done has no line among the rollouts.
    pending = {group.ordinal for group in loop_at(lines, float("inf")).groups.values()}
    rng = random.Random(seed)
    times = [rng.uniform(RAW_START_S, made.now_s) for _ in range(300)]
    seen: Counter[str] = Counter()
    for at_s in times:
        loop = loop_at(lines, at_s)
        loop.groups = {o: group for o, group in loop.groups.items() if o not in pending}
        truth = by_the_rollouts(groups, steps, at_s)
        assert shown(loop) == truth, f"at {at_s}"
        seen.update({phase: len(members) for phase, members in truth.items()})
    assert min(seen[phase] for phase in ("sampling", "scoring", "ready", "training")) > 10, "the test sees all phases"


def test_what_a_lost_replica_had_is_sampled_again(folder: Path) -> None:
    made = Loop(seed=2, lost_at_s=4.0).run()
    made.write(folder)
    lines = [(decision, decision.time_s) for decision in decisions(folder / "events.jsonl")]
    lost_s = next(line["time_s"] for line in made.lines if line["event"]["type"] == "ReplicaLost")
    before, after = loop_at(lines, lost_s - 1e-6), loop_at(lines, lost_s)
    had = {o for o, g in before.groups.items() if g.replica == 1 and g.phase in ("sampling", "scoring")}
    assert had, "the test needs something to lose"
    assert 1 not in after.versions
    assert all(after.groups[o].phase == "waiting" or after.groups[o].replica == 0 for o in had)
    assert loop_at(lines, float("inf")).version == made.steps


@pytest.mark.parametrize(
    "line",
    [b'{"seq":0,"time_s":1,"event":{"type":"Teleported"},"commands":[]}', b"\x00\x00\x00", b"[" * 100_000, b"[]"],
    ids=["unknown", "zeros", "deep", "list"],
)
def test_a_line_that_is_no_decision_is_refused(line: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        decode_decision(line)


def test_fields_of_later_versions_are_passed_over() -> None:
    decision = decode_decision(b'{"seq":0,"time_s":1,"event":{"type":"Stop","why":"more is fine"},"commands":[]}')
    assert decision == Decision(0, 1.0, Stop(), [])


def began(snapshot: Snapshot | None = None) -> ScheduleBegan:
    config = ScheduleConfig(
        groups_per_step=1, completions_per_group=2, max_staleness=0, reorder_window=1, steps=5, capacity=4
    )
    return ScheduleBegan(policy="oldest_first", config=config, snapshot=snapshot)


def started(*ordinals: int, replica: int = 0) -> Decision:
    return Decision(0, 0.0, began(), [StartGroup(ordinal=ordinal, replica=replica) for ordinal in ordinals])


def scored(ordinal: int, version: int, reward: float) -> GroupScored:
    return GroupScored(
        ordinal=ordinal, has_signal=True, mean_reward=reward, num_failed=0, min_version=version, max_version=version
    )


def finished(ordinal: int, replica: int) -> CompletionFinished:
    return CompletionFinished(ordinal=ordinal, sample=0, replica=replica, num_tokens=3, min_version=0, max_version=0)


def test_a_score_that_overtakes_the_last_completion() -> None:
    loop = LoopState()
    loop.take(started(0))
    assert loop.unfinished == {0: 2}
    loop.take(Decision(1, 1.0, scored(0, 3, 0.25), []))
    assert loop.groups[0] == GroupState(0, "ready", 1.0, 0, 2, 3, -1, 0.25)
    assert loop.unfinished == {0: 0}
    assert loop.take(Decision(2, 2.0, finished(0, 0), [])) == []


def test_a_group_that_waits_to_be_sampled_again_may_be_scored_before_it_is() -> None:
    loop = LoopState()
    loop.take(started(7, replica=1))
    loop.take(Decision(1, 1.0, ReplicaLost(replica=1), []))
    assert loop.groups[7].phase == "waiting"
    assert loop.unfinished == {1: 0}
    loop.take(Decision(2, 2.0, scored(7, 0, 1.0), []))
    assert loop.groups[7].phase == "ready"


def test_a_resume_takes_away_what_its_snapshot_does_not_know() -> None:
    loop = LoopState()
    loop.take(started(0, 1))
    snapshot = Snapshot(next_ordinal=5, steps_done=4, dropped=[], dropped_in_a_row=0, num_failed=0, readmit=[1, 3])
    moves = loop.take(Decision(1, 1.0, began(snapshot), []))
    assert {o: group.phase for o, group in loop.groups.items()} == {1: "waiting", 3: "waiting"}
    assert (loop.version, loop.next_ordinal, loop.counts["sampling"], loop.counts["waiting"]) == (4, 5, 0, 2)
    assert [(move.group.ordinal, move.fate) for move in moves] == [(0, "cut"), (1, None), (3, None)]
