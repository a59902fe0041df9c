"""The schedule under random interleavings: bound, liveness, order, exactly-once."""

from __future__ import annotations

import copy
import random

import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.controller.schedule import Schedule
from slipstream.core.config import PRESETS
from slipstream.core.errors import SlipstreamError
from slipstream.core.run_log import ScheduleConfig
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


def swapped(replica: int, version: int) -> Swapped:
    return Swapped(replica=replica, version=version, transfer_s=0, pause_s=0, probe_error=0)


def finished(ordinal: int, sample: int, replica: int) -> CompletionFinished:
    return CompletionFinished(
        ordinal=ordinal, sample=sample, replica=replica, num_tokens=1, min_version=0, max_version=0
    )


def scored(ordinal: int, has_signal: bool = True, num_failed: int = 0) -> GroupScored:
    return GroupScored(
        ordinal=ordinal, has_signal=has_signal, mean_reward=0.5, num_failed=num_failed, min_version=0, max_version=0
    )


class World:
    """Generators, rewards and trainer as random events. It recomputes every claim with bookkeeping of its own."""

    def __init__(
        self,
        config: ScheduleConfig,
        *,
        replicas: int,
        publish_every: int,
        drop: float,
        rng: random.Random,
        fail: float = 0.0,
        tail: float = 0.0,
        away: int = 0,
    ):
        """`tail`: Pareto exponent of how long completions take; 0: all are alike. `fail`: a share of the drops.

        `away`: so many more replicas may join later, and are lost and join again as the others are.
        """
        self.config, self.publish_every, self.drop, self.rng = config, publish_every, drop, rng
        self.fail, self.tail = fail, tail
        self.schedule = Schedule(config)
        self.replica_version = dict.fromkeys(range(replicas), 0)
        self.admitted_at: dict[int, int] = {}  # ordinal -> the oldest version of a replica at an admission of it
        self.first_step: dict[int, int] = {}  # ordinal -> the step that was next when it was first admitted
        self.pace: dict[int, float] = {}  # ordinal -> how often, relative to others, a completion of it finishes
        self.ready: set[int] = set()  # scored, with signal, not handed to the trainer
        self.saved: tuple | None = None  # what a checkpoint of the last step has
        self.restores = 0
        self.started_at: dict[int, int] = {}  # ordinal -> the version of its replica when the last copy was admitted
        self.sampling: dict[int, tuple[int, int]] = {}  # ordinal -> (replica, unfinished completions)
        self.scoring: dict[int, int] = {}  # ordinal -> the replica it came from
        self.orphans: set[int] = set()  # on their way to a score when their replica was lost: regenerated meanwhile
        self.trained: list[int] = []
        self.skipped: set[int] = set()
        self.absent = set(range(replicas, replicas + away))
        self.to_train: TrainStep | None = None
        self.published = 0
        self.lost = 0
        for replica in self.replica_version:
            self.carry_out(self.schedule.apply(swapped(replica, 0)))

    def carry_out(self, commands: list) -> None:
        for command in commands:
            match command:
                case StartGroup(ordinal=ordinal, replica=replica):
                    assert ordinal not in self.sampling
                    assert ordinal not in self.scoring or ordinal in self.orphans
                    assert ordinal not in self.trained
                    load = sum(n for r, n in self.sampling.values() if r == replica)
                    assert load + self.config.completions_per_group <= self.config.capacity
                    version = self.started_at[ordinal] = self.replica_version[replica]
                    self.admitted_at[ordinal] = min(version, self.admitted_at.get(ordinal, version))
                    self.first_step.setdefault(ordinal, len(self.trained) // self.config.groups_per_step)
                    pareto = self.rng.paretovariate(self.tail) if self.tail else 1.0
                    self.pace.setdefault(ordinal, 1 / pareto)
                    self.sampling[ordinal] = (replica, self.config.completions_per_group)
                case TrainStep(step=step, ordinals=ordinals):
                    assert self.to_train is None
                    assert step == len(self.trained) // self.config.groups_per_step
                    assert len(ordinals) == self.config.groups_per_step
                    assert list(ordinals) == sorted(ordinals)
                    for ordinal in ordinals:
                        assert step - self.admitted_at[ordinal] <= self.config.max_staleness, "the bound"
                        assert step - self.first_step[ordinal] <= self.config.max_staleness, "nobody waits for longer"
                    assert set(ordinals) <= self.ready, "scored before it is trained"
                    assert max(ordinals) == sorted(self.ready)[len(ordinals) - 1], "the oldest first"
                    self.ready -= set(ordinals)
                    unfinished = [*self.sampling, *self.scoring]
                    if unfinished:
                        assert ordinals[-1] < min(unfinished) + self.config.reorder_window, "FIFO within the window"
                    self.to_train = command
                case Skip(ordinals=ordinals):
                    self.skipped.update(ordinals)

    def choices(self) -> list:
        possible: list = [("finish", o) for o in self.sampling]
        possible += [("score", o) for o in self.scoring]
        possible += [("swap", r) for r, v in self.replica_version.items() if v < self.published]
        possible += [("train", None)] * (self.to_train is not None)
        possible += [("join", r) for r in sorted(self.absent)]
        return possible

    def happen(self, kind: str, what) -> None:
        match kind:
            case "finish":
                replica, unfinished = self.sampling[what]
                sample = self.config.completions_per_group - unfinished
                if unfinished == 1 and what in self.orphans:
                    del self.sampling[what]  # a duplicate: the first copy is being scored
                elif unfinished == 1:
                    del self.sampling[what]
                    self.scoring[what] = replica
                else:
                    self.sampling[what] = (replica, unfinished - 1)
                self.carry_out(self.schedule.apply(finished(what, sample, replica)))
            case "score":
                del self.scoring[what]
                if what in self.orphans:  # the second copy is a duplicate from now on
                    self.orphans.remove(what)
                    self.sampling.pop(what, None)
                has_signal = self.rng.random() >= self.drop
                has_failed = not has_signal and self.rng.random() < self.fail
                if has_signal:
                    self.ready.add(what)
                self.carry_out(
                    self.schedule.apply(scored(what, has_signal, self.config.completions_per_group * has_failed))
                )
            case "swap":
                for ordinal, (replica, _) in self.sampling.items():
                    if replica == what:
                        age = self.published - self.started_at[ordinal]
                        assert age <= self.config.max_staleness, "k + 1 versions side by side are always enough"
                self.replica_version[what] = self.published
                self.carry_out(self.schedule.apply(swapped(what, self.published)))
            case "train":
                step = self.to_train
                self.to_train = None
                assert step is not None
                assert not set(step.ordinals) & set(self.trained), "trained twice"
                self.trained += step.ordinals
                if (step.step + 1) % self.publish_every == 0:
                    self.published = step.step + 1
                before = set(self.ready)
                self.carry_out(self.schedule.apply(StepDone(step=step.step, version=step.step + 1, metrics={})))
                self.saved = self.checkpoint(before)
            case "lose":
                del self.replica_version[what]
                self.absent.add(what)
                self.sampling = {o: (r, n) for o, (r, n) in self.sampling.items() if r != what}
                for ordinal in [o for o, r in self.scoring.items() if r == what and o not in self.orphans]:
                    if self.rng.random() < 0.5:  # its last words were lost, too
                        del self.scoring[ordinal]
                    else:
                        self.orphans.add(ordinal)
                self.lost += 1
                self.carry_out(self.schedule.apply(ReplicaLost(replica=what)))
            case "join":
                self.absent.remove(what)
                self.replica_version[what] = self.published
                self.carry_out(self.schedule.apply(swapped(what, self.published)))

    def check_held_back(self) -> None:
        """Whoever has room for a group and was given none is held back by its version, and by nothing else."""
        held_back = self.schedule.held_back()
        for replica, version in self.replica_version.items():
            load = sum(unfinished for at, unfinished in self.sampling.values() if at == replica)
            if load + self.config.completions_per_group <= self.config.capacity and not self.schedule.is_finished:
                assert version in held_back
        assert held_back <= set(self.replica_version.values())

    def checkpoint(self, finished_groups: set[int]) -> tuple:
        books = (self.trained, self.skipped, self.admitted_at, self.first_step)
        return (self.schedule.snapshot(), finished_groups, *(copy.copy(book) for book in books))

    def restore(self) -> None:
        """Killed, and resumed from the checkpoint: all that is not in it is gone, some finished groups excepted."""
        assert self.saved is not None
        snapshot, finished_groups, *books = self.saved
        assert set(snapshot.scored) == finished_groups, "what may be restored is what was scored"
        self.schedule = Schedule.restore(self.config, snapshot)
        self.trained, self.skipped, self.admitted_at, self.first_step = (copy.copy(book) for book in books)
        self.sampling, self.scoring, self.orphans, self.to_train = {}, {}, set(), None
        self.published = len(self.trained) // self.config.groups_per_step
        told = {ordinal for ordinal in finished_groups if self.rng.random() < 0.5}
        self.ready = set()
        for ordinal in self.rng.sample(sorted(told), len(told)):
            self.ready.add(ordinal)
            self.carry_out(self.schedule.apply(scored(ordinal)))
        self.restores += 1
        replicas = [*self.replica_version, *self.absent]
        self.replica_version, self.absent = {}, set(replicas)

    def run(self, lose: float = 0.0, restore: float = 0.0) -> None:
        for _ in range(100_000):
            if self.schedule.is_finished:
                break
            if restore and self.saved and self.rng.random() < restore / (1 + self.restores):
                self.restore()
                continue
            if lose and self.replica_version and self.rng.random() < lose:
                self.happen("lose", self.rng.choice(list(self.replica_version)))
                continue
            possible = self.choices()
            assert possible, f"deadlock after step {self.schedule.steps_done}: {self.schedule.waits_for()}"
            weights = [self.pace[what] if kind == "finish" else 1.0 for kind, what in possible]
            self.happen(*self.rng.choices(possible, weights)[0])
            self.check_held_back()
        self.check_end()

    def check_end(self) -> None:
        """Nothing was lost, nothing repeated."""
        assert self.schedule.is_finished
        assert not self.ready, "every group with signal was trained: no finished work is discarded"
        assert len(self.trained) == self.config.steps * self.config.groups_per_step
        assert len(set(self.trained)) == len(self.trained)
        assert set(self.trained) | self.skipped == set(range(self.schedule.next_ordinal)), "nothing lost"
        schedule = self.schedule
        assert not any((schedule.in_flight, schedule.ready, schedule.training, schedule.readmit))


@drawn(60, 150, data=st.data())
def test_bound_liveness_and_exactly_once_under_random_interleavings(data):
    groups_per_step = data.draw(st.integers(1, 5), "P")
    max_staleness = data.draw(st.integers(0, 3), "k")
    publish_every = data.draw(st.integers(1, max_staleness + 1), "publish_every")
    window = data.draw(st.integers(1, (max_staleness - publish_every + 1) * groups_per_step + 1), "W")
    samples = data.draw(st.integers(2, 3), "G")
    config = ScheduleConfig(
        groups_per_step=groups_per_step,
        completions_per_group=samples,
        max_staleness=max_staleness,
        reorder_window=window,
        steps=data.draw(st.integers(1, 8), "steps"),
        capacity=data.draw(st.integers(samples, 6 * samples), "capacity"),
    )
    world = World(
        config,
        replicas=data.draw(st.integers(1, 3), "replicas"),
        publish_every=publish_every,
        away=data.draw(st.sampled_from([0, 0, 1, 3]), "away"),
        drop=data.draw(st.sampled_from([0.0, 0.3, 0.8]), "drop"),
        fail=data.draw(st.sampled_from([0.0, 0.5]), "fail"),
        tail=data.draw(st.sampled_from([0.0, 0.7]), "tail"),
        rng=random.Random(data.draw(st.integers(0, 2**32), "seed")),
    )
    world.run(
        lose=data.draw(st.sampled_from([0.0, 0.05]), "lose"),
        restore=data.draw(st.sampled_from([0.0, 0.05]), "restore"),
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_preset_for_stragglers_is_live_for_any_batch_and_runs_no_further_ahead(data):
    """Its window is in steps: live for every P, and for every m up to k - overtake_steps + 1."""
    k, passing = PRESETS["tolerant"]["max_staleness"], PRESETS["tolerant"]["overtake_steps"]
    groups_per_step = data.draw(st.integers(1, 6), "P")
    publish_every = data.draw(st.integers(1, k - passing + 1), "publish_every")
    config = ScheduleConfig(
        groups_per_step=groups_per_step,
        completions_per_group=2,
        max_staleness=k,
        reorder_window=1 + passing * groups_per_step,
        steps=data.draw(st.integers(1, 12), "steps"),
        capacity=data.draw(st.integers(2, 40), "capacity"),
    )
    world = World(
        config,
        replicas=data.draw(st.integers(1, 3), "replicas"),
        publish_every=publish_every,
        drop=data.draw(st.sampled_from([0.0, 0.3]), "drop"),
        tail=data.draw(st.sampled_from([0.0, 0.3]), "tail"),
        rng=random.Random(data.draw(st.integers(0, 2**32), "seed")),
    )
    started = world.carry_out

    def carry_out(commands: list) -> None:
        started(commands)
        untrained = world.schedule.next_ordinal - len(world.schedule.dropped) - len(world.trained)
        assert untrained <= (k - passing + 1) * groups_per_step, "as far ahead as max_staleness = k - overtake_steps"

    world.carry_out = carry_out  # type: ignore[method-assign]
    world.run(lose=data.draw(st.sampled_from([0.0, 0.05]), "lose"))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), k=st.integers(0, 2), lose=st.sampled_from([0.05, 0.3]))
def test_a_pool_grows_shrinks_and_goes_on_while_one_replica_is_there(seed, k, lose):
    """No join is needed to go on: nobody joins unless by chance, and all but one may leave."""
    config = ScheduleConfig(
        groups_per_step=3, completions_per_group=2, max_staleness=k, reorder_window=1, steps=8, capacity=4
    )
    world = World(config, replicas=1, away=3, publish_every=1, drop=0.2, rng=random.Random(seed))
    rng = world.rng
    for _ in range(10_000):
        if world.schedule.is_finished:
            break
        if rng.random() < lose and (world.absent or len(world.replica_version) > 1):
            if len(world.replica_version) > 1 and rng.random() < 0.5:
                world.happen("lose", rng.choice(sorted(world.replica_version)))
            elif world.absent:
                world.happen("join", rng.choice(sorted(world.absent)))
            continue
        possible = [choice for choice in world.choices() if choice[0] != "join"]
        assert possible, f"deadlock with {sorted(world.replica_version)}: {world.schedule.waits_for()}"
        world.happen(*rng.choice(possible))
        world.check_held_back()
    world.check_end()
    assert set(world.schedule.versions) == set(world.replica_version)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), after=st.integers(0, 60), k=st.integers(0, 2))
def test_a_stop_at_any_point_starts_nothing_and_its_snapshot_goes_on_to_the_end(seed, after, k):
    config = ScheduleConfig(
        groups_per_step=3, completions_per_group=2, max_staleness=k, reorder_window=1, steps=5, capacity=8
    )
    world = World(config, replicas=2, publish_every=1, drop=0.3, fail=0.5, rng=random.Random(seed))
    for _ in range(after):
        if world.schedule.is_finished:
            return
        world.happen(*world.rng.choice(world.choices()))
    assert not [c for c in world.schedule.apply(Stop()) if not isinstance(c, Skip)]
    in_flight = set(world.sampling) | set(world.scoring)
    while possible := world.choices():
        world.happen(*world.rng.choice(possible))
        assert set(world.sampling) | set(world.scoring) <= in_flight, "nothing starts"
    assert world.to_train is None, "the step that was begun came to its end"
    world.saved = world.checkpoint(set(world.ready))
    world.restore()
    world.run()


@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_wider_window_deadlocks(k):
    """The condition W <= k P + 1 is necessary, not only sufficient."""
    config = ScheduleConfig(
        groups_per_step=2, completions_per_group=2, max_staleness=k, reorder_window=2 * k + 3, steps=20, capacity=100
    )
    world = World(config, replicas=1, publish_every=1, drop=0.0, rng=random.Random(0))
    while possible := world.choices():  # every event uses up a group or a version, and 20 steps have few of them
        world.happen(*possible[0])
    assert not world.schedule.is_finished, "nothing can happen any more, and the run is not over"


def test_sync_trains_ordinals_in_order_and_replaces_dropped_groups_at_the_same_version():
    config = ScheduleConfig(
        groups_per_step=2, completions_per_group=2, max_staleness=0, reorder_window=1, steps=2, capacity=100
    )
    schedule = Schedule(config)
    assert [c.ordinal for c in schedule.apply(swapped(0, 0))] == [0, 1]
    assert schedule.apply(scored(1)) == []
    commands = schedule.apply(scored(0, has_signal=False))
    assert commands == [Skip(ordinals=(0,)), StartGroup(ordinal=2, replica=0)]
    assert schedule.apply(scored(2)) == [TrainStep(step=0, ordinals=(1, 2))]
    assert schedule.apply(StepDone(step=0, version=1, metrics={})) == []
    assert [c.ordinal for c in schedule.apply(swapped(0, 1))] == [3, 4]


@pytest.mark.parametrize("is_restored", [False, True])
def test_no_signal_at_all_is_an_error_not_an_endless_run(is_restored):
    config = ScheduleConfig(
        groups_per_step=1,
        completions_per_group=2,
        max_staleness=0,
        reorder_window=1,
        steps=1,
        capacity=2,
        max_dropped_in_a_row=3,
    )
    schedule = Schedule(config)
    schedule.apply(swapped(0, 0))
    for ordinal in range(3):
        schedule.apply(scored(ordinal, has_signal=False))
        schedule.apply(finished(ordinal, 0, 0))
    if is_restored:
        schedule = Schedule.restore(config, schedule.snapshot())
        schedule.apply(swapped(0, 0))
    with pytest.raises(SlipstreamError, match="no signal"):
        schedule.apply(scored(3, has_signal=False))


def test_a_stopping_schedule_learns_but_starts_nothing():
    config = ScheduleConfig(
        groups_per_step=1, completions_per_group=1, max_staleness=1, reorder_window=1, steps=9, capacity=4
    )
    schedule = Schedule(config)
    schedule.apply(swapped(0, 0))
    assert schedule.apply(Stop()) == []
    assert schedule.apply(scored(0)) == [], "a batch is ready, and no step may begin"
    assert not schedule.training
    assert schedule.snapshot().readmit == [0, 1]


def test_an_interrupt_leaves_a_run_ended_that_was_about_to_end():
    config = ScheduleConfig(
        groups_per_step=1, completions_per_group=1, max_staleness=1, reorder_window=1, steps=9, capacity=4
    )
    schedule = Schedule(config)
    schedule.apply(swapped(0, 0))
    schedule.apply(scored(0))
    schedule.apply(Stop(because="patience"))
    schedule.apply(Stop())
    schedule.apply(StepDone(step=0, version=1, metrics={}))
    assert (schedule.stopped_because, schedule.is_finished) == ("patience", True)


def test_waits_for_names_the_culprit():
    config = ScheduleConfig(
        groups_per_step=1, completions_per_group=1, max_staleness=3, reorder_window=1, steps=9, capacity=4
    )
    schedule = Schedule(config)
    schedule.apply(swapped(0, 0))
    assert schedule.waits_for() == "generation"
    schedule.apply(scored(1))
    assert schedule.waits_for() == "straggler"
    schedule.apply(finished(0, 0, 0))
    assert schedule.waits_for() == "rewards"


def test_snapshot_restores_and_regenerates_what_was_in_flight():
    config = ScheduleConfig(
        groups_per_step=2, completions_per_group=1, max_staleness=1, reorder_window=1, steps=4, capacity=8
    )
    schedule = Schedule(config)
    schedule.apply(swapped(0, 0))
    schedule.apply(scored(0))
    snapshot = schedule.snapshot()
    again = Schedule.restore(config, snapshot)
    assert [c.ordinal for c in again.apply(swapped(0, 0))] == [0, 1, 2, 3]


def test_a_snapshot_while_the_next_step_is_trained_is_of_the_state_before_it():
    config = ScheduleConfig(
        groups_per_step=1, completions_per_group=1, max_staleness=2, reorder_window=1, steps=4, capacity=8
    )
    schedule = Schedule(config)
    schedule.apply(swapped(0, 0))
    for ordinal in range(3):
        schedule.apply(scored(ordinal))
    schedule.apply(StepDone(step=0, version=1, metrics={}))
    assert schedule.training == (1,)
    again = Schedule.restore(config, schedule.snapshot())
    assert again.steps_done == 1
    assert [c.ordinal for c in again.apply(swapped(0, 1))] == [1, 2, 3]
