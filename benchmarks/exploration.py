"""All interleavings of a small run: breadth first through every state that events can lead the schedule to.

    consumes      an instance: the dials, and how much may go wrong
    produces      how many states there are, and the shortest way to the first one that breaks a promise
    ends when     no state is left unseen: every event is used up by something finite

`World` is the rest of the system with nothing left to chance: where it could go one way or another it goes both. A
completion finishes, or its score overtakes the news of it; a group is scored with signal or without; a replica takes
the newest version, or one before; it is lost with all it had, or what it had finished is scored all the same, now or
later; the run is stopped at any point and restored from the last step, with the finished groups or without. It keeps
books of its own, and checks every command of the schedule against them:

    bound         a group in step n was admitted, by its oldest copy that may be trained, at a version >= n - k
    order         nothing is trained W or more ordinals before something that is unfinished
    once          a group is trained or dropped once, and starts again only when it was lost
    capacity      a replica is given no more completions than it may hold
    nothing lost  at the end every admitted group is trained or dropped: nothing finished was discarded

Then the graph of states answers for liveness: it has no cycle, and in every state that is not the end there is an event
that must happen (a late score of a lost replica need not). So every run ends, whatever the order of events.
`benchmarks/model_check.py` prints how many states that are.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from slipstream.controller.policies import make_policy
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.errors import ScheduleError
from slipstream.core.run_log import Event, ScheduleConfig, Snapshot
from slipstream.core.types import (
    CompletionFinished,
    GroupScored,
    ReplicaLost,
    Skip,
    StartGroup,
    StepDone,
    Swapped,
    TrainStep,
)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A small run: P, k, W, m, G, replicas, steps, capacity; and how many drops, losses and restores may happen."""

    groups_per_step: int = 1
    max_staleness: int = 1
    reorder_window: int = 1
    publish_every: int = 1
    completions_per_group: int = 1
    replicas: int = 1
    steps: int = 3
    capacity: int = 4
    drops: int = 0
    losses: int = 0
    restores: int = 0
    policy: str = "oldest_first"

    @property
    def schedule_config(self) -> ScheduleConfig:
        return ScheduleConfig(
            groups_per_step=self.groups_per_step,
            completions_per_group=self.completions_per_group,
            max_staleness=self.max_staleness,
            reorder_window=self.reorder_window,
            publish_every=self.publish_every,
            steps=self.steps,
            capacity=self.capacity,
        )

    def __str__(self) -> str:
        dials = (
            f"P={self.groups_per_step} k={self.max_staleness} W={self.reorder_window} m={self.publish_every} "
            f"G={self.completions_per_group} replicas={self.replicas} steps={self.steps} capacity={self.capacity}"
        )
        faults = ", ".join(
            f"{count} {name}" for name, count in vars(self).items() if name in ("drops", "losses", "restores") and count
        )
        return dials + (f"; {faults}" if faults else "")


@dataclass(frozen=True)
class Explored:
    """What there is. `way` leads to the first broken promise or deadlock, event by event; `broken` says what it is."""

    num_states: int
    num_transitions: int
    num_ends: int
    num_stuck: int
    longest_run: int
    broken: str | None = None
    way: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.broken is None


@dataclass(frozen=True)
class _Cut:
    """What a checkpoint has: it was taken after a step."""

    snapshot: Snapshot
    steps: int
    admitted: int
    trained: frozenset[int]
    dropped: frozenset[int]
    scored: frozenset[int]
    oldest: tuple[tuple[int, int], ...]  # of all that is untrained: what is half done is kept, too
    drops: int


class World:
    """One state: the schedule, and everything around it. Events are `(name, *what)`; see the module's docstring."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.schedule: SchedulingPolicy = make_policy(instance.policy, instance.schedule_config)
        self.held: dict[int, int] = {}  # replica -> version; those that are away are not in it
        self.copies: dict[int, tuple[int, int]] = {}  # ordinal -> replica, unfinished
        self.late: frozenset[int] = frozenset()  # finished elsewhere, and may be scored yet
        self.owed: frozenset[int] = frozenset()  # admitted, lost, to be started again
        self.oldest: dict[int, int] = {}  # ordinal -> the oldest version it was admitted at, until it is trained
        self.scored: frozenset[int] = frozenset()
        self.admitted = 0
        self.trained: frozenset[int] = frozenset()
        self.dropped: frozenset[int] = frozenset()
        self.in_training: tuple[int, ...] = ()
        self.steps = 0
        self.restored_version = 0
        self.drops, self.losses, self.restores = instance.drops, instance.losses, instance.restores
        self.cut: _Cut | None = None

    def copy(self) -> World:
        other = copy(self)
        other.schedule = copy(self.schedule)
        other.schedule._replicas = copy(self.schedule._replicas)
        for owner in (other, other.schedule, other.schedule._replicas):
            for name, value in vars(owner).items():
                if isinstance(value, dict | list):
                    setattr(owner, name, value.copy())
        other.schedule._replicas._by_load = {v: [*each] for v, each in self.schedule._replicas._by_load.items()}
        return other

    def key(self) -> tuple[Any, ...]:
        """Equal for states from which the same can happen."""
        schedule = self.schedule
        ready = schedule.ready.items()
        return (
            schedule.next_ordinal,
            tuple(schedule.dropped),
            tuple(sorted(schedule.versions.items())),
            tuple(sorted((o, group.replica, group.unfinished) for o, group in schedule.in_flight.items())),
            tuple(sorted(ready) if schedule.bounds_admissions else ready),
            schedule.training,
            tuple(schedule.readmit),
            tuple(sorted(self.held.items())),
            tuple(sorted(self.copies.items())),
            self.late,
            self.owed,
            tuple(sorted(self.oldest.items())),
            self.scored,
            self.admitted,
            self.trained,
            self.dropped,
            self.in_training,
            self.steps,
            self.restored_version,
            self.drops,
            self.losses,
            self.restores,
            self._cut_key() if self.restores else None,
        )

    def _cut_key(self) -> tuple[Any, ...] | None:
        if self.cut is None:
            return None
        snapshot = self.cut.snapshot
        return (
            snapshot.next_ordinal,
            tuple(snapshot.dropped),
            tuple(snapshot.readmit),
            self.cut.trained,
            self.cut.scored,
            self.cut.oldest,
        )

    # What can happen

    @property
    def is_done(self) -> bool:
        return self.steps >= self.instance.steps

    @property
    def published(self) -> int:
        """The newest version that generators are offered."""
        every = self.instance.publish_every
        return self.steps if self.is_done else max(self.steps // every * every, self.restored_version)

    def must(self) -> Iterator[tuple[Any, ...]]:
        """Events that happen sooner or later, if nothing else does first."""
        for ordinal, (_, unfinished) in self.copies.items():
            yield ("score", ordinal, True)
            if unfinished:
                yield ("finish", ordinal)
        if self.in_training:
            yield ("step",)
        for replica in range(self.instance.replicas):
            if replica not in self.held:
                yield ("join", replica)
            elif self.held[replica] < self.published:
                yield ("swap", replica, self.published)

    def may(self) -> Iterator[tuple[Any, ...]]:
        """Events that may never happen."""
        if self.drops:
            yield from (("score", ordinal, False) for ordinal in self.copies)
        yield from (("score", ordinal, True) for ordinal in self.late if ordinal not in self.copies)
        every = self.instance.publish_every
        for replica, version in self.held.items():
            yield from (("swap", replica, older) for older in range(version + 1, self.published) if older % every == 0)
        if self.losses:
            yield from (("lose", replica) for replica in self.held)
        if self.restores and self.cut is not None:
            yield ("restore",)

    # What then comes of it

    def happen(self, name: str, *what: Any) -> None:
        """Change to the state after this event. ScheduleError where the schedule answers with a broken promise."""
        match name:
            case "finish":
                replica, unfinished = self.copies[what[0]]
                self.copies[what[0]] = (replica, unfinished - 1)
                sample = self.instance.completions_per_group - unfinished
                self._tell(_finished(what[0], sample, replica))
            case "score":
                self._score(*what)
            case "swap" | "join":
                replica, version = what[0], what[1] if name == "swap" else self.published
                self.held[replica] = version
                self._tell(Swapped(replica=replica, version=version, transfer_s=0.0, pause_s=0.0, probe_error=0.0))
            case "step":
                self._step()
            case "lose":
                self._lose(what[0])
            case "restore":
                self._restore()
        if self.is_done:
            self._check_end()

    def _score(self, ordinal: int, has_signal: bool) -> None:
        self.copies.pop(ordinal, None)
        self.late -= {ordinal}
        self.owed -= {ordinal}
        if has_signal:
            self.scored |= {ordinal}
        else:
            self.drops -= 1
        version = self.oldest[ordinal]
        answer = self._tell(
            GroupScored(
                ordinal=ordinal,
                has_signal=has_signal,
                mean_reward=0.0,
                num_failed=0,
                min_version=version,
                max_version=version,
            )
        )
        if (Skip(ordinals=(ordinal,)) in answer) == has_signal:
            raise ScheduleError(f"group {ordinal} was dropped, or kept, against its signal")

    def _step(self) -> None:
        self.trained |= set(self.in_training)
        for ordinal in self.in_training:
            del self.oldest[ordinal]
        self.in_training = ()
        self.steps += 1
        self._tell(StepDone(step=self.steps - 1, version=self.steps, metrics={}))
        self.cut = _Cut(
            self.schedule.snapshot(),
            self.steps,
            self.admitted,
            self.trained,
            self.dropped,
            self.scored | set(self.in_training),
            tuple(sorted(self.oldest.items())),
            self.drops,
        )

    def _lose(self, replica: int) -> None:
        del self.held[replica]
        self.losses -= 1
        lost = {ordinal for ordinal, (where, _) in self.copies.items() if where == replica}
        for ordinal in lost:
            del self.copies[ordinal]
        self.owed |= lost
        self.late |= lost
        self._tell(ReplicaLost(replica=replica))

    def _restore(self) -> None:
        """Every process is new. Finished groups of the checkpoint may be told of again, half done ones go on."""
        cut = self.cut
        assert cut is not None
        instance = self.instance
        self.schedule = make_policy(instance.policy, instance.schedule_config, cut.snapshot)
        self.held, self.copies, self.in_training, self.scored = {}, {}, (), frozenset()
        self.steps = self.restored_version = cut.steps
        self.admitted, self.trained, self.dropped, self.drops = cut.admitted, cut.trained, cut.dropped, cut.drops
        self.owed = frozenset(range(cut.admitted)) - cut.trained - cut.dropped
        self.oldest = dict(cut.oldest)
        self.late = cut.scored
        if set(cut.snapshot.scored) != self.late:
            raise ScheduleError(f"the snapshot has {cut.snapshot.scored} as scored, and {sorted(self.late)} were")
        self.restores -= 1

    def _tell(self, event: Event) -> list[Any]:
        commands = self.schedule.apply(event)
        for command in commands:
            match command:
                case StartGroup():
                    self._check_start(command.ordinal, command.replica)
                case TrainStep():
                    self._check_batch(command.step, command.ordinals)
                case Skip():
                    self.dropped |= set(command.ordinals)
                    for ordinal in command.ordinals:
                        del self.oldest[ordinal]
        return commands

    def _check_start(self, ordinal: int, replica: int) -> None:
        size = self.instance.completions_per_group
        if ordinal == self.admitted:
            self.admitted += 1
        elif ordinal in self.owed:
            self.owed -= {ordinal}
        else:
            raise ScheduleError(
                f"once: group {ordinal} was started, {self.admitted} is next, {set(self.owed)} are owed"
            )
        if replica not in self.held:
            raise ScheduleError(f"group {ordinal} was started on replica {replica}, which is away")
        self.copies[ordinal] = (replica, size)
        load = sum(unfinished for where, unfinished in self.copies.values() if where == replica)
        if load > self.instance.capacity:
            raise ScheduleError(f"capacity: replica {replica} has {load} completions to do")
        version = self.held[replica]
        self.oldest[ordinal] = min(version, self.oldest.get(ordinal, version))

    def _check_batch(self, step: int, ordinals: tuple[int, ...]) -> None:
        if self.in_training or step != self.steps or len(set(ordinals)) != self.instance.groups_per_step:
            raise ScheduleError(f"step {step} with groups {ordinals} after {self.steps} steps")
        if not self.scored >= set(ordinals):
            raise ScheduleError(f"once: of {ordinals} only {set(self.scored)} were there to be trained")
        oldest = min(self.oldest[ordinal] for ordinal in ordinals)
        if step - oldest > self.instance.max_staleness:
            raise ScheduleError(f"bound: step {step} trains a group of version {oldest}")
        unfinished = min([*self.copies, *self.owed], default=max(ordinals))
        if max(ordinals) >= unfinished + self.instance.reorder_window:
            raise ScheduleError(f"order: {ordinals} are trained while {unfinished} is unfinished")
        self.scored -= set(ordinals)
        self.in_training = ordinals

    def _check_end(self) -> None:
        left = set(range(self.admitted)) - self.trained - self.dropped
        if left or len(self.trained) != self.steps * self.instance.groups_per_step or self.trained & self.dropped:
            raise ScheduleError(f"nothing lost: at the end groups {left} are neither trained nor dropped")


def _finished(ordinal: int, sample: int, replica: int) -> CompletionFinished:
    return CompletionFinished(
        ordinal=ordinal, sample=sample, replica=replica, num_tokens=1, min_version=0, max_version=0
    )


def explore(instance: Instance, *, max_states: int = 10_000_000) -> Explored:
    """Go through all states of `instance`; stops at the first broken promise. ScheduleError beyond `max_states`."""
    start = World(instance)
    number = {start.key(): 0}
    came_by: list[tuple[int, tuple[Any, ...]]] = [(-1, ())]
    edges = array("I")  # from, to, from, to ...
    queue: deque[tuple[int, World]] = deque([(0, start)])
    num_ends = num_stuck = 0
    first_stuck: int | None = None

    def way_to(state: int, *last: tuple[Any, ...]) -> tuple[str, ...]:
        events = list(last)
        while state > 0:
            state, event = came_by[state]
            events.insert(0, event)
        return tuple(" ".join(map(str, event)) for event in events)

    def result(broken: str | None, way: tuple[str, ...] = (), longest: int = 0) -> Explored:
        return Explored(len(number), len(edges) // 2, num_ends, num_stuck, longest, broken, way)

    while queue:
        state, world = queue.popleft()
        if world.is_done:
            num_ends += 1
            continue
        certain = list(world.must())
        if not certain:
            num_stuck += 1
            first_stuck = state if first_stuck is None else first_stuck
        for event in dict.fromkeys([*certain, *world.may()]):
            then = world.copy()
            try:
                then.happen(*event)
            except ScheduleError as error:
                return result(str(error), way_to(state, event))
            key = then.key()
            seen = number.get(key)
            if seen is None:
                if len(number) >= max_states:
                    raise ScheduleError("the instance is too large", got=f"{instance}", allowed=f"{max_states} states")
                seen = number[key] = len(number)
                came_by.append((state, event))
                queue.append((seen, then))
            edges.extend((state, seen))
    longest = _longest_path(len(number), edges)
    if first_stuck is not None:
        return result("deadlock: nothing must happen any more", way_to(first_stuck), longest or 0)
    return result("a run may go round in a circle" if longest is None else None, longest=longest or 0)


def _longest_path(num_states: int, edges: array[int]) -> int | None:
    """Events of the longest run, or None where there is a cycle (Kahn's algorithm)."""
    successors: list[list[int]] = [[] for _ in range(num_states)]
    missing = array("I", bytes(4 * num_states))
    for state, then in zip(edges[::2], edges[1::2], strict=True):
        successors[state].append(then)
        missing[then] += 1
    length = array("I", bytes(4 * num_states))
    ready = deque(state for state in range(num_states) if not missing[state])
    num_sorted = 0
    while ready:
        state = ready.popleft()
        num_sorted += 1
        for then in successors[state]:
            length[then] = max(length[then], length[state] + 1)
            missing[then] -= 1
            if not missing[then]:
                ready.append(then)
    return max(length) if num_sorted == num_states else None


def instances(base: Instance) -> list[Instance]:
    """`base` with every P, k <= 2, every W and m that are live for them, G <= 2, and 1 or 2 replicas."""
    return [
        replace(
            base,
            groups_per_step=groups,
            max_staleness=k,
            reorder_window=window,
            publish_every=every,
            completions_per_group=completions,
            replicas=replicas,
            capacity=max(base.capacity, completions),
        )
        for groups in (1, 2)
        for k in (0, 1, 2)
        for every in range(1, k + 2)
        for window in range(1, (k - every + 1) * groups + 2)
        for completions in (1, 2)
        for replicas in (1, 2)
    ]
