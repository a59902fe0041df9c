"""Replay: the recorded events of a run, once more through the schedule; a bug report is one `events.jsonl`.

    consumes      the lines of `events.jsonl`, one at a time
    produces      the first line whose commands the schedule would not give now, and what the log itself breaks
    ends when     the log does, also in a torn last line: that is a writer that was killed

Two questions are asked at once. *Does the schedule decide as it did then?* It is built from the `ScheduleBegan` at the
head of the log and fed the recorded events. *Is what was decided then sound?* `Audit` recounts the promises from the
log alone, without the schedule's code. A resumed run has one more `ScheduleBegan` where it went on; the snapshot in it
must be the state the replay has come to.

Where lines are missing the state is not known: nothing is said of what follows, up to the next `ScheduleBegan`, whose
snapshot is taken at its word. `missing` says where that is; numbers of events go on over what a resume found missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.controller.machine import SchedulingPolicy
from slipstream.controller.policies import POLICIES, make_policy
from slipstream.core.errors import ConfigError, SlipstreamError, clip
from slipstream.core.files import open_regular, read_lines
from slipstream.core.jsonl import intact_lines
from slipstream.core.run_log import (
    Command,
    Decision,
    Event,
    LedgerLine,
    LoopState,
    ScheduleBegan,
    Snapshot,
    decode_decision,
)
from slipstream.core.types import (
    GroupScored,
    ReplicaLost,
    Skip,
    StartGroup,
    StepDone,
    Swapped,
    TrainStep,
)

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
    """What came of a replay. `violations` are sentences about the log itself, each with its line."""

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


def events_file(path: Path) -> Path:
    """`events.jsonl` of a run's folder or of an `attempt_<n>/` in it; a file is itself. ConfigError without one."""
    found = path / "events.jsonl" if path.is_dir() else path
    if not found.exists():
        raise ConfigError(
            "there are no events to replay",
            got=path,
            allowed="the folder of a run, of an attempt_<n> in it, or an events.jsonl",
        )
    return found


def replay(path: str | Path) -> Replay:
    """Run the recorded events of `path` through the schedule.

    Stops at the first divergence: all that comes after follows from it. ConfigError for a file that is no log of events
    or has a damaged line. Memory does not grow with the log, but for the ordinals that were dropped.
    """
    result = Replay(events_file(Path(path)))
    steps_done = _steps_of_ledger(result.path.with_name("ledger.jsonl"))
    schedule: SchedulingPolicy | None = None
    audit: Audit | None = None
    next_seq = number = 0
    for number, line in _read(result.path):
        event = line.event
        is_gap, next_seq = line.seq != next_seq, line.seq + 1
        if isinstance(event, ScheduleBegan):
            if is_gap or (number == 1 and event.snapshot is not None and event.snapshot.next_ordinal):
                result.missing.append(_before(number, line.seq))
                schedule = None
            result.policies.append(event.policy)
            result.divergence = _compare_states(number, event, schedule)
            if result.divergence is not None:
                break
            is_known, schedule = schedule is not None, _build(number, event, result.path)
            if audit is None or not is_known:
                audit = Audit(schedule, result)
            audit.begin(number, line, event)
            continue
        if audit is None:
            raise ConfigError(
                "the log does not say what it began with",
                got=f"a first line with {type(event).__name__} in {result.path}",
                allowed="ScheduleBegan",
                hint="it was cut at its head, or comes from an older version",
            )
        if is_gap and schedule is not None:
            audit.check(number, line)  # which says that the numbers are wrong
            schedule = None
            result.missing.append(f"line {number}: lines before it are missing or repeated, so the state is unknown")
        if schedule is None:
            result.num_unchecked += 1
            continue
        result.num_decisions += 1
        audit.check(number, line)
        result.divergence = _decide(number, event, line, schedule)
        if result.divergence is not None:
            break
        result.ended_with = line.error
    if not result.policies:
        raise ConfigError(
            "the log is empty",
            got=result.path,
            hint="the run ended before its first decision, or the file was cut",
        )
    if audit is not None and result.divergence is None and audit.steps_done < steps_done:
        result.missing.append(f"line {number} is the last, {steps_done - audit.steps_done} steps before the ledger's")
    return result


def _steps_of_ledger(path: Path) -> int:
    """Steps that the ledger beside the log calls trained; 0 without one."""
    return max((entry.step + 1 for _, entry in intact_lines(path, LedgerLine) if entry.state == "trained"), default=0)


def _before(number: int, seq: int) -> str:
    """That events before a resume are missing."""
    count = f"the {seq} events" if number == 1 and seq else "events"
    return f"line {number}: {count} before it, of the run until it was resumed, are missing"


def _read(path: Path) -> Iterator[tuple[int, Decision]]:
    number = 0
    try:
        with open_regular(path) as file:
            for number, line in enumerate(read_lines(file), start=1):
                if line.endswith(b"\n"):
                    yield number, decode_decision(line)
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read", got=error.strerror) from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
        raise ConfigError(
            f"line {number or 1} is no event of a schedule", got=clip(error), hint=f"sed -n {number or 1}p {path}"
        ) from error


def _build(number: int, began: ScheduleBegan, path: Path) -> SchedulingPolicy:
    if began.policy not in POLICIES:
        raise ConfigError(
            f"line {number} names an unknown scheduling policy in {path}",
            got=began.policy,
            allowed=", ".join(POLICIES),
        )
    return make_policy(began.policy, began.config, began.snapshot)


def _compare_states(number: int, began: ScheduleBegan, schedule: SchedulingPolicy | None) -> Divergence | None:
    """A resume goes on from where the log before it ends; at the head of a log any snapshot is taken as it is."""
    if schedule is None:
        return None
    recorded, replayed = (
        _lasting(began.snapshot or type(schedule)(began.config).snapshot()),
        _lasting(schedule.snapshot()),
    )
    if recorded == replayed:
        return None
    return Divergence(number, f"ScheduleBegan({began.policy}): the run was resumed", str(recorded), str(replayed))


def _lasting(snapshot: Snapshot) -> Snapshot:
    """Without what a restored schedule cannot know: which of the groups it owes lie scored beside the trainer."""
    return msgspec.structs.replace(snapshot, scored=[])


def _decide(number: int, event: Event, line: Decision, schedule: SchedulingPolicy) -> Divergence | None:
    error: str | None = None
    commands: list[Command] = []
    try:
        commands = schedule.apply(event)
    except SlipstreamError as raised:
        error = raised.what
    if (commands, error) == (line.commands, line.error):
        return None
    return Divergence(number, _in_words([event]), _answer(line.commands, line.error), _answer(commands, error))


def _answer(commands: list[Command], error: str | None) -> str:
    return f"the run ended: {error}" if error is not None else _in_words(commands)


def _in_words(messages: Sequence[msgspec.Struct]) -> str:
    """`StartGroup(ordinal=3, replica=0), ...`, without fields that are as ever."""
    texts = []
    for message in messages:
        fields = {f.name: (getattr(message, f.name), f.default) for f in msgspec.structs.fields(message)}
        shown = ", ".join(f"{name}={value!r}" for name, (value, default) in fields.items() if value != default)
        texts.append(f"{type(message).__name__}({shown})")
    return ", ".join(texts) or "nothing"


class Audit:
    """The promises, recounted line by line from the log alone: each is checked against `loop`, which then goes on.

    Lines are numbered without gaps; steps are trained in order, of P groups each; a group is trained or dropped once,
    and only after it was scored; none starts twice unless it was lost; no replica is given more than it holds; and no
    group is trained staler than the policy's bound, by the oldest version in it, and by the oldest one it was admitted
    at where the policy bounds admissions.
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
