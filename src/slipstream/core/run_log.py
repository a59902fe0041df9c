"""The schema of what a run writes down, line by line, and the state of its loop that the decisions add up to.

    events.jsonl      `Decision`: an event that the schedule was given, and its commands; `ScheduleBegan` comes first
    ledger.jsonl      `LedgerLine`: the new state of an ordinal
    rollouts.jsonl    `RolloutLine`: what the model said, and what came of it
    metrics.jsonl     `Metrics`: a flat table of names, of which `MetricsHead` is in every line

`DecisionHead`, `RolloutFate`, `RolloutTimes` and `MetricsHead` are parts of a line, for readers that need no more.
`LoopState` is the one fold of the decisions: replay, waste, group flow, the watch page and the calibration use it.

    waiting -> sampling -> scoring -> ready -> training -> trained
                  |           |         |
                  +-----------+---------+-> no_signal, failed, stale

`sampling` ends when the last completion of the group is finished, `scoring` when all are scored. A group is `waiting`
when it was admitted before and has to be sampled again: its replica was lost, or the run was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.core.jsonl import intact_lines, read_jsonl
from slipstream.core.types import (
    CompletionFinished,
    GroupScored,
    ReplicaLost,
    Skip,
    SkipCause,
    StartGroup,
    StepDone,
    Stop,
    Swapped,
    TrainStep,
)

Event = Swapped | CompletionFinished | GroupScored | StepDone | ReplicaLost | Stop
Command = StartGroup | TrainStep | Skip


# events.jsonl


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The dials. `capacity`: unfinished completions a replica may hold, that is its slots and one group in reserve.

    `staleness_threshold` and `queue_groups` are those of `SampleBudget` and `FinishOrder` (`controller/policies.py`).
    """

    groups_per_step: int
    completions_per_group: int
    max_staleness: int
    reorder_window: int
    steps: int
    capacity: int
    publish_every: int = 1
    skip_no_signal: bool = True
    max_dropped_in_a_row: int = 1000
    staleness_threshold: float = 0.0
    queue_groups: int = 0


class Snapshot(msgspec.Struct, frozen=True):
    """The part of the schedule's state that outlives the process, in JSON types."""

    next_ordinal: int
    steps_done: int
    dropped: list[int]
    dropped_in_a_row: int
    num_failed: int
    readmit: list[int]  # admitted, not trained: regenerated first
    scored: list[int] = []  # those of them that lie beside the trainer: they may be restored with it


class ScheduleBegan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first line of `events.jsonl`, and of what a resume appends: with it the file replays by itself.

    `snapshot` is that of the checkpoint the run was resumed from.
    """

    policy: str
    config: ScheduleConfig
    snapshot: Snapshot | None = None


class DecisionHead(msgspec.Struct, frozen=True):
    """The number of a decision, from 0 on over all resumes, and when it was taken, on the run's monotonic clock."""

    seq: int
    time_s: float


class Decision(DecisionHead, frozen=True, omit_defaults=True):
    """A line of `events.jsonl`: the schedule was given `event`, and answered with `commands`.

    `error` is what ended the run instead of an answer.
    """

    event: Event | ScheduleBegan
    commands: list[Command]
    error: str | None = None

    @property
    def begins(self) -> bool:
        """Whether it starts a group, or trains what a resume has brought."""
        return any(isinstance(command, StartGroup | TrainStep) for command in self.commands)


_DECISIONS = msgspec.json.Decoder(Decision)
_MEASURES = ("transfer_s", "pause_s", "probe_error", "mean_reward")


def decode_decision(line: bytes) -> Decision:
    """Return the decision of a line of `events.jsonl`, with nan where the line has null for a number.

    ValueError or RecursionError for a damaged line, and for an event that this version does not know.
    """
    try:
        return _DECISIONS.decode(line)
    except msgspec.ValidationError:  # JSON has no nan and no infinity
        return msgspec.convert(_with_nan(msgspec.json.decode(line)), Decision)


def _with_nan(line: Any) -> Any:
    match line:
        case {"event": {"metrics": dict(metrics)} as event}:
            metrics |= {name: math.nan for name, value in metrics.items() if value is None}
        case {"event": dict(event)}:
            event |= {name: math.nan for name in _MEASURES if event.get(name, 0.0) is None}
    return line


def read_decisions(path: Path) -> Iterator[Decision]:
    """Yield the decisions of `events.jsonl`, in order, as `read_jsonl` does."""
    yield from read_jsonl(path, Decision, decode_decision)


def intact_decisions(path: Path) -> Iterator[Decision]:
    """Yield the decisions of `events.jsonl`, in order, up to the first torn or undecodable line."""
    return (decision for _, decision in intact_lines(path, Decision, decode_decision))


def num_missing(path: Path) -> int:
    """Return how many decisions of `events.jsonl` are gone, by the numbers left out before the last one."""
    next_seq = num_lines = 0
    for line in read_jsonl(path, DecisionHead):
        next_seq, num_lines = max(next_seq, line.seq + 1), num_lines + 1
    return next_seq - num_lines


# ledger.jsonl

LedgerState = Literal["admitted", "trained", "skipped", "failed"]


class LedgerLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of `ledger.jsonl`: ordinal `ordinal` came into `state`; `step` is set for trained ones."""

    ordinal: int
    state: LedgerState
    step: int = -1


# rollouts.jsonl

Outcome = Literal["trained", "skipped", "failed"]


class RolloutFate(msgspec.Struct, frozen=True, kw_only=True):
    """The rollout a line of `rollouts.jsonl` is about, and its fate, as `RolloutLine` has them."""

    ordinal: int
    sample: int
    step: int | None
    outcome: Outcome


class EpisodeLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a `RolloutLine` that only episodes have.

    `messages` are the chat behind the prompt; `turn_rewards` are the environment's, null for a turn without one.
    `environment_s` was spent in its answers, `restarts` are from its reset on, and `is_cut`: a limit ended it.
    `branches` are the chats of its forks, each from its beginning; before the first turn of each come the messages of
    its context, as many as `contexts` says.
    """

    messages: list[dict[str, Any]]
    turns: int
    turn_rewards: list[float | None]
    environment_s: float
    tool_calls: int = 0
    tool_errors: int = 0
    restarts: int = 0
    is_cut: bool = False
    branches: list[list[dict[str, Any]]] = []
    contexts: list[int] = []


class RolloutLine(RolloutFate, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `rollouts.jsonl`: a rollout as it was trained (`step`), or dropped (`step` is null).

    Of a dropped group, `outcome` is `failed` if any of its rollouts failed, else `skipped`. `versions` are runs over
    the completion's tokens: [[first token, version], ...], -1 for given tokens. `mean_behaviour_logprob` is over
    sampled tokens, in nats, null without any. `episode` is there with an environment, `logged` and `extra` where
    reward functions log. Times are on the run's monotonic clock.
    """

    prompt_id: str
    task: str
    prompt: str
    completion: str
    answer: str | None
    reward: float | None
    parts: dict[str, float | None]
    failure: str | None
    finish_reason: str
    num_tokens: int
    versions: list[tuple[int, int]]
    mean_behaviour_logprob: float | None
    replica: int
    started_s: float
    finished_s: float
    scored_s: float
    episode: EpisodeLine | None = None
    logged: dict[str, float] = {}
    extra: dict[str, str | bool | int | float | None] = {}


class RolloutTimes(RolloutFate, frozen=True, kw_only=True, gc=False):
    """The replica and the times of a `RolloutLine`, without its texts."""

    replica: int
    started_s: float
    finished_s: float
    scored_s: float


def read_rollouts(path: Path) -> Iterator[RolloutLine]:
    """Yield the rollouts of `rollouts.jsonl`, in training order, as `read_jsonl` does."""
    yield from read_jsonl(path, RolloutLine)


# metrics.jsonl

Metrics = dict[str, Any]
"""A line of `metrics.jsonl`: the names of `MetricsHead`, and others with numbers, null for nan, or strings."""


class MetricsHead(msgspec.Struct, frozen=True):
    """The names that every line of `metrics.jsonl` has: `wall_s` is in seconds since the start of the run."""

    step: int
    version: int
    wall_s: float


def read_metrics(path: Path) -> list[Metrics]:
    """Return every whole line of `metrics.jsonl`; empty for a missing file."""
    return list(read_jsonl(path, dict[str, Any]))


# The loop

Phase = Literal["waiting", "sampling", "scoring", "ready", "training"]
PHASES: tuple[Phase, ...] = ("waiting", "sampling", "scoring", "ready", "training")
Fate = SkipCause | Literal["trained", "cut"]
"""How a group leaves the loop; `cut`: a resume knows nothing of it."""


class GroupState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group that has no fate yet, in `phase` since `since_s`.

    `replica` samples it, -1 where that is not known, and has finished `finished` of its completions. `version` is what
    the replica held at the admission, or the oldest of the group's tokens once they are scored; `step` is -1 until it
    is trained.
    """

    ordinal: int
    phase: Phase
    since_s: float
    replica: int = -1
    finished: int = 0
    version: int = 0
    step: int = -1
    reward: float | None = None


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """At `time_s` a group came into this state; `fate` is there for one that leaves the loop."""

    time_s: float
    group: GroupState
    fate: Fate | None = None


@dataclass
class LoopState:
    """The state of the loop after the decisions taken so far: the groups without a fate, and who holds what."""

    groups: dict[int, GroupState] = field(default_factory=dict)
    counts: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))  # of `groups`
    unfinished: dict[int, int] = field(default_factory=dict)  # replica -> completions that it still samples
    versions: dict[int, int] = field(default_factory=dict)  # replica -> the version it samples from
    version: int = 0  # the trainer's
    next_ordinal: int = 0
    fates: dict[Fate, int] = field(default_factory=dict)  # how many groups
    config: ScheduleConfig | None = None
    policy: str = ""
    is_stopping: bool = False
    error: str | None = None

    def take(self, decision: Decision, time_s: float | None = None) -> list[Move]:
        """Go on by one decision, taken at `time_s` (its own time, if None); return the moves of groups, in order."""
        time_s = decision.time_s if time_s is None else time_s
        moves = self.hear(decision.event, time_s)
        for command in decision.commands:
            moves += self.obey(command, time_s)
        self.error = decision.error or self.error
        return moves

    def hear(self, event: Event | ScheduleBegan, time_s: float) -> list[Move]:
        """Return the moves that `event` is the news of; none for a group that is not in the loop.

        A score may overtake the end of the group's last completion, which is then no news.
        """
        match event:
            case CompletionFinished():
                return self._finished(event, time_s)
            case GroupScored(ordinal=ordinal, min_version=version, mean_reward=reward):
                group = self.groups.get(ordinal)
                if group is None or group.phase in ("ready", "training"):
                    return []
                size = group.finished if self.config is None else self.config.completions_per_group
                known = reward if math.isfinite(reward) else None
                scored = GroupState(ordinal, "ready", time_s, group.replica, size, version, reward=known)
                return [self._put(scored, time_s)]
            case Swapped(replica=replica, version=version):
                self.versions[replica] = max(version, self.versions.get(replica, 0))
            case StepDone(version=version):
                self.version = version
                done = [group for group in self.groups.values() if group.phase == "training"]
                return [self._leave(group, "trained", time_s) for group in done]
            case ReplicaLost(replica=replica):
                self.versions.pop(replica, None)
                lost = [g for g in self.groups.values() if g.replica == replica and g.phase in ("sampling", "scoring")]
                return [self._put(GroupState(group.ordinal, "waiting", time_s), time_s) for group in lost]
            case Stop():
                self.is_stopping = True
            case ScheduleBegan():
                return self._begin(event, time_s)
        return []

    def obey(self, command: Command, time_s: float) -> list[Move]:
        """Return the moves that `command` makes."""
        match command:
            case StartGroup(ordinal=ordinal, replica=replica):
                self.next_ordinal = max(self.next_ordinal, ordinal + 1)
                version = self.versions.get(replica, 0)
                return [self._put(GroupState(ordinal, "sampling", time_s, replica, version=version), time_s)]
            case TrainStep(step=step):
                return [
                    self._put(msgspec.structs.replace(group, phase="training", since_s=time_s, step=step), time_s)
                    for group in self._known(command.ordinals)
                ]
            case Skip(cause=cause):
                return [self._leave(group, cause, time_s) for group in self._known(command.ordinals)]

    def _known(self, ordinals: Iterable[int]) -> list[GroupState]:
        return [self.groups[ordinal] for ordinal in ordinals if ordinal in self.groups]

    def _begin(self, began: ScheduleBegan, time_s: float) -> list[Move]:
        """The run starts, or goes on from a checkpoint: then all that was on its way is owed again."""
        self.config, self.policy = began.config, began.policy
        self.versions.clear()
        self.is_stopping, self.error = False, None
        snapshot = began.snapshot
        owed = dict.fromkeys([] if snapshot is None else snapshot.readmit)
        moves = [self._leave(group, "cut", time_s) for group in [*self.groups.values()] if group.ordinal not in owed]
        if snapshot is not None:
            self.version, self.next_ordinal = snapshot.steps_done, snapshot.next_ordinal
        return moves + [self._put(GroupState(ordinal, "waiting", time_s), time_s) for ordinal in owed]

    def _finished(self, event: CompletionFinished, time_s: float) -> list[Move]:
        group = self.groups.get(event.ordinal)
        if group is None or group.phase != "sampling" or group.replica != event.replica:
            return []
        finished = group.finished + 1
        is_last = self.config is not None and finished >= self.config.completions_per_group
        phase: Phase = "scoring" if is_last else "sampling"
        since_s = time_s if is_last else group.since_s
        return [self._put(msgspec.structs.replace(group, phase=phase, since_s=since_s, finished=finished), time_s)]

    def _put(self, group: GroupState, time_s: float) -> Move:
        if (before := self.groups.get(group.ordinal)) is not None:
            self._count(before, -1)
        self._count(group, 1)
        self.groups[group.ordinal] = group
        return Move(time_s, group)

    def _leave(self, group: GroupState, fate: Fate, time_s: float) -> Move:
        del self.groups[group.ordinal]
        self._count(group, -1)
        self.fates[fate] = self.fates.get(fate, 0) + 1
        return Move(time_s, group, fate)

    def _count(self, group: GroupState, sign: int) -> None:
        self.counts[group.phase] += sign
        if group.phase == "sampling" and self.config is not None:
            left = self.config.completions_per_group - group.finished
            self.unfinished[group.replica] = self.unfinished.get(group.replica, 0) + sign * left
