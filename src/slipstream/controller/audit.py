"""The promises of a schedule, recounted from the log of its decisions without its code; and the result of a replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.run_log import Decision, LoopState, ScheduleBegan
from slipstream.core.types import GroupScored, ReplicaLost, Skip, StartGroup, StepDone, Swapped, TrainStep

MAX_VIOLATIONS = 20


@dataclass(frozen=True)
class Divergence:
    """Line `line` of the file (from 1): upon `event` the log has `recorded`, and the schedule says `replayed` now."""

    line: int
    event: str
    recorded: str
    replayed: str


@dataclass
class Replay:
    """The result of a replay. `violations` are sentences about the log itself, each with its line."""

    path: Path
    policies: list[str] = field(default_factory=list)  # one per ScheduleBegan: the run's start and its resumes
    num_decisions: int = 0
    num_steps: int = 0
    num_admitted: int = 0
    num_trained: int = 0
    num_dropped: dict[str, int] = field(default_factory=dict)  # by cause
    num_lost: int = 0  # replicas
    max_staleness: int = 0  # of the groups trained, by the oldest version in each
    ended_with: str | None = None  # the error that the schedule ended the run with, as recorded
    divergence: Divergence | None = None
    violations: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what the log does not have, in sentences
    num_unchecked: int = 0  # lines behind missing ones

    @property
    def is_sound(self) -> bool:
        """Whether the schedule decides as it did, and kept its promises, in all that is recorded."""
        return self.divergence is None and not self.violations

    @property
    def is_complete(self) -> bool:
        return not self.missing


class Audit:
    """The promises, recounted line by line from the log alone: each is checked against `loop`, which then goes on.

    Lines are numbered without gaps; steps are trained in order, of P groups each; a group is trained or dropped once,
    and only after it was scored; none starts twice unless it was lost; nothing starts after a stop; no replica is given
    more than it holds; and no group is trained staler than the policy's bound, by the oldest version in it, and by the
    oldest one it was admitted at where the policy bounds admissions.
    """

    def __init__(self, policy: SchedulingPolicy, result: Replay) -> None:
        self.config, self.bound, self.result = policy.config, policy.staleness_bound, result
        self.bounds_admissions = policy.bounds_admissions
        self.next_seq: int | None = None
        self.loop = LoopState()
        self.admitted_at: dict[int, int] = {}  # ordinal -> the oldest version that it was admitted at
        self.steps_done = 0
        self.training: TrainStep | None = None

    def begin(self, number: int, line: Decision, began: ScheduleBegan) -> None:
        """A process begins: nothing is in flight, and what the snapshot owes may start, or be scored, once more."""
        self._count(number, line.seq)
        self.loop.take(line)
        self.admitted_at.clear()
        self.training = None
        if began.snapshot is not None and self.steps_done == 0:  # the log's head is missing
            self.steps_done = began.snapshot.steps_done

    def check(self, number: int, line: Decision) -> None:
        self._count(number, line.seq)
        self._check_event(number, line.event)
        self.loop.hear(line.event, line.time_s)
        for command in line.commands:
            match command:
                case StartGroup():
                    self._start(number, command)
                case TrainStep():
                    self._train(number, command)
                case Skip():
                    self._skip(number, command)
            self.loop.obey(command, line.time_s)
            if isinstance(command, StartGroup):
                self._check_room(number, command.replica)

    def _count(self, number: int, seq: int) -> None:
        if self.next_seq is not None and seq != self.next_seq:
            self._break(number, f"has seq {seq}, not {self.next_seq}: lines are missing or repeated")
        self.next_seq = seq + 1

    def _check_event(self, number: int, event: object) -> None:
        match event:
            case Swapped(replica=replica, version=version):
                if version < self.loop.versions.get(replica, 0):
                    self._break(number, f"replica {replica} went back to version {version}")
            case GroupScored(ordinal=ordinal):
                group = self.loop.groups.get(ordinal)
                if group is None or group.phase in ("ready", "training"):
                    self._break(number, f"group {ordinal} was scored, and was not admitted, or for the second time")
            case StepDone():
                self._check_step(number, event)
            case ReplicaLost():
                self.result.num_lost += 1

    def _check_step(self, number: int, event: StepDone) -> None:
        if self.training is None or event.step != self.training.step:
            self._break(number, f"step {event.step} was done and is not in training")
        elif event.version != event.step + 1:
            self._break(number, f"step {event.step} made version {event.version}")
        else:
            self.steps_done += 1
            self.result.num_steps += 1
            self.result.num_trained += len(self.training.ordinals)
            self.training = None

    def _is_settled(self, ordinal: int) -> bool:
        """Return whether the group was trained or dropped."""
        return ordinal < self.loop.next_ordinal and ordinal not in self.loop.groups

    def _start(self, number: int, command: StartGroup) -> None:
        ordinal, replica = command.ordinal, command.replica
        if self.loop.is_stopping:
            self._break(number, f"group {ordinal} was started after the run was stopped")
        group = self.loop.groups.get(ordinal)
        if ordinal == self.loop.next_ordinal:
            self.result.num_admitted += 1
        elif group is None or group.phase != "waiting":
            self._break(number, f"group {ordinal} was started out of turn: {self.loop.next_ordinal} is next")
        if self._is_settled(ordinal):
            self._break(number, f"group {ordinal} was started after it was trained or dropped")
        if replica not in self.loop.versions:
            self._break(number, f"group {ordinal} was started on replica {replica}, which has no weights")
            return
        version = self.loop.versions[replica]
        self.admitted_at[ordinal] = min(version, self.admitted_at.get(ordinal, version))

    def _check_room(self, number: int, replica: int) -> None:
        held = self.loop.unfinished.get(replica, 0)
        if replica in self.loop.versions and held > self.config.capacity:
            self._break(number, f"replica {replica} holds {held} of {self.config.capacity} completions")

    def _train(self, number: int, command: TrainStep) -> None:
        if self.loop.is_stopping:
            self._break(number, f"step {command.step} began after the run was stopped")
        if command.step != self.steps_done or self.training is not None:
            self._break(number, f"step {command.step} began, {self.steps_done} steps being done")
        if len(set(command.ordinals)) != self.config.groups_per_step:
            self._break(number, f"step {command.step} trains {len(set(command.ordinals))} groups")
        for ordinal in command.ordinals:
            if self._is_settled(ordinal):
                self._break(number, f"group {ordinal} was trained or dropped before")
            group = self.loop.groups.get(ordinal)
            if group is None or group.phase != "ready":
                self._break(number, f"group {ordinal} is trained and was not scored")
                continue
            oldest, admitted_at = group.version, self.admitted_at.pop(ordinal, None)
            self._check_age(number, command.step, ordinal, oldest if oldest >= 0 else command.step, "has tokens of")
            if self.bounds_admissions and admitted_at is not None:  # restored groups were admitted before
                self._check_age(number, command.step, ordinal, admitted_at, "was admitted at")
        self.training = command

    def _check_age(self, number: int, step: int, ordinal: int, version: int, what: str) -> None:
        age = step - version
        if what == "has tokens of":
            self.result.max_staleness = max(self.result.max_staleness, age)
        if age < 0 or (self.bound is not None and age > self.bound):
            bound = "none" if self.bound is None else self.bound
            self._break(number, f"group {ordinal}, trained in step {step}, {what} version {version}: bound {bound}")

    def _skip(self, number: int, command: Skip) -> None:
        for ordinal in command.ordinals:
            group = self.loop.groups.get(ordinal)
            if self._is_settled(ordinal):
                self._break(number, f"group {ordinal} was dropped after it was trained or dropped")
            if group is None or group.phase != "ready":
                self._break(number, f"group {ordinal} was dropped and was not scored")
            self.admitted_at.pop(ordinal, None)
        dropped = self.result.num_dropped
        dropped[command.cause] = dropped.get(command.cause, 0) + len(command.ordinals)

    def _break(self, number: int, what: str) -> None:
        if len(self.result.violations) < MAX_VIOLATIONS:
            self.result.violations.append(f"line {number}: {what}")
