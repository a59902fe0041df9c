"""Where every group is at any moment, from the scheduling decisions in `events.jsonl`; pure.

    waiting -> sampling -> scoring -> ready -> training -> trained
                  |           |         |
                  +-----------+---------+-> no_signal, failed, stale

`sampling` ends when the last of its completions is finished, `scoring` when all are scored. A group is `waiting` when
it was admitted before and has to be sampled again: its replica was lost, or the run was resumed. One fold of the events
serves the live page and the replay: `Loop.take` moves groups on, and what it returns is what a page draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Phase = Literal["waiting", "sampling", "scoring", "ready", "training"]
Fate = Literal["trained", "no_signal", "failed", "stale", "cut"]
"""How a group leaves the loop; `cut`: a resume knows nothing of it."""

PHASES: tuple[Phase, ...] = ("waiting", "sampling", "scoring", "ready", "training")


class _Snapshot(msgspec.Struct, frozen=True):
    next_ordinal: int
    steps_done: int
    readmit: list[int]
    dropped: list[int] = []


class Dials(msgspec.Struct, frozen=True):
    """What the page says of the schedule's configuration."""

    groups_per_step: int
    completions_per_group: int
    max_staleness: int
    steps: int


class Began(msgspec.Struct, frozen=True, tag="ScheduleBegan"):
    config: Dials
    policy: str = ""
    snapshot: _Snapshot | None = None


class Swapped(msgspec.Struct, frozen=True, tag="Swapped"):
    replica: int
    version: int


class Finished(msgspec.Struct, frozen=True, tag="CompletionFinished"):
    ordinal: int
    replica: int


class Scored(msgspec.Struct, frozen=True, tag="GroupScored"):
    ordinal: int
    min_version: int
    mean_reward: float | None = None


class Done(msgspec.Struct, frozen=True, tag="StepDone"):
    step: int
    version: int


class Lost(msgspec.Struct, frozen=True, tag="ReplicaLost"):
    replica: int


class Stopped(msgspec.Struct, frozen=True, tag="Stop"):
    pass


class Start(msgspec.Struct, frozen=True, tag="StartGroup"):
    ordinal: int
    replica: int


class Train(msgspec.Struct, frozen=True, tag="TrainStep"):
    step: int
    ordinals: list[int]


class Drop(msgspec.Struct, frozen=True, tag="Skip"):
    ordinals: list[int]
    cause: Literal["no_signal", "failed", "stale"] = "no_signal"


class Decision(msgspec.Struct, frozen=True):
    """What the page reads of a line of `events.jsonl`."""

    time_s: float
    event: Began | Swapped | Finished | Scored | Done | Lost | Stopped
    commands: list[Start | Train | Drop] = []
    error: str | None = None


class Group(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A group that has no fate yet. Times are of the run (`Stretch`).

    `replica`: where it is sampled, -1 where that is not known. `finished` of its completions are; `version` is what its
    replica held at its admission, or the oldest of its tokens once they are scored; `step` is -1 until it is trained.
    """

    ordinal: int
    phase: Phase
    since_s: float
    replica: int
    finished: int
    version: int
    step: int
    reward: float | None


class Move(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """At `time_s` a group came into this state; `fate` is there for one that leaves the loop."""

    time_s: float
    group: Group
    fate: Fate | None = None


@dataclass
class Loop:
    """The state of the loop after the decisions taken so far."""

    groups: dict[int, Group] = field(default_factory=dict)
    counts: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))  # of `groups`
    versions: dict[int, int] = field(default_factory=dict)  # replica -> the version it samples from
    version: int = 0  # the trainer's
    next_ordinal: int = 0
    fates: dict[Fate, int] = field(default_factory=dict)  # how many groups
    dials: Dials | None = None
    policy: str = ""
    is_stopping: bool = False
    error: str | None = None

    def take(self, decision: Decision, time_s: float) -> list[Move]:
        """Go on by one line, which was written at `time_s`; returns what has moved, in order.

        An event about a group that nobody knows of moves nothing: a score may overtake the end of its last completion.
        """
        moves: list[Move] = []
        match decision.event:
            case Finished(ordinal=ordinal, replica=replica):
                self._finished(ordinal, replica, time_s, moves)
            case Scored(ordinal=ordinal) as scored:
                group = self.groups.get(ordinal)
                if group is not None and group.phase in ("waiting", "sampling", "scoring"):
                    size = self.dials.completions_per_group if self.dials is not None else group.finished
                    reward = scored.mean_reward
                    whole = Group(ordinal, "ready", time_s, group.replica, size, scored.min_version, -1, reward)
                    self._put(whole, time_s, moves)
            case Swapped(replica=replica, version=version):
                self.versions[replica] = max(version, self.versions.get(replica, 0))
            case Done(version=version):
                self.version = version
                for group in [one for one in self.groups.values() if one.phase == "training"]:
                    self._leave(group, "trained", time_s, moves)
            case Lost(replica=replica):
                self.versions.pop(replica, None)
                for group in [one for one in self.groups.values() if one.replica == replica]:
                    if group.phase in ("sampling", "scoring"):
                        self._put(_waiting(group.ordinal, time_s), time_s, moves)
            case Stopped():
                self.is_stopping = True
            case Began() as began:
                self._begin(began, time_s, moves)
        for command in decision.commands:
            self._obey(command, time_s, moves)
        self.error = decision.error or self.error
        return moves

    def _begin(self, began: Began, time_s: float, moves: list[Move]) -> None:
        """The run starts, or goes on from a checkpoint: then all that was on its way is owed again."""
        self.dials, self.policy = began.config, began.policy
        self.versions.clear()
        self.is_stopping, self.error = False, None
        snapshot = began.snapshot
        owed = set() if snapshot is None else set(snapshot.readmit)
        for group in [one for one in self.groups.values() if one.ordinal not in owed]:
            self._leave(group, "cut", time_s, moves)
        if snapshot is not None:
            self.version, self.next_ordinal = snapshot.steps_done, snapshot.next_ordinal
            for ordinal in snapshot.readmit:
                self._put(_waiting(ordinal, time_s), time_s, moves)

    def _finished(self, ordinal: int, replica: int, time_s: float, moves: list[Move]) -> None:
        group = self.groups.get(ordinal)
        if group is None or group.phase != "sampling" or group.replica != replica:
            return
        finished = group.finished + 1
        is_last = self.dials is not None and finished >= self.dials.completions_per_group
        phase: Phase = "scoring" if is_last else "sampling"
        since_s = time_s if is_last else group.since_s
        self._put(Group(ordinal, phase, since_s, replica, finished, group.version, -1, None), time_s, moves)

    def _obey(self, command: Start | Train | Drop, time_s: float, moves: list[Move]) -> None:
        match command:
            case Start(ordinal=ordinal, replica=replica):
                self.next_ordinal = max(self.next_ordinal, ordinal + 1)
                version = self.versions.get(replica, 0)
                self._put(Group(ordinal, "sampling", time_s, replica, 0, version, -1, None), time_s, moves)
            case Train(step=step, ordinals=ordinals):
                for group in [self.groups[ordinal] for ordinal in ordinals if ordinal in self.groups]:
                    moved = msgspec.structs.replace(group, phase="training", since_s=time_s, step=step)
                    self._put(moved, time_s, moves)
            case Drop(ordinals=ordinals, cause=cause):
                for group in [self.groups[ordinal] for ordinal in ordinals if ordinal in self.groups]:
                    self._leave(group, cause, time_s, moves)

    def _put(self, group: Group, time_s: float, moves: list[Move]) -> None:
        before = self.groups.get(group.ordinal)
        if before is not None:
            self.counts[before.phase] -= 1
        self.counts[group.phase] += 1
        self.groups[group.ordinal] = group
        moves.append(Move(time_s, group))

    def _leave(self, group: Group, fate: Fate, time_s: float, moves: list[Move]) -> None:
        del self.groups[group.ordinal]
        self.counts[group.phase] -= 1
        self.fates[fate] = self.fates.get(fate, 0) + 1
        moves.append(Move(time_s, group, fate))


def _waiting(ordinal: int, time_s: float) -> Group:
    return Group(ordinal, "waiting", time_s, -1, 0, 0, -1, None)


def loop_at(decisions: Iterable[tuple[Decision, float]], time_s: float) -> Loop:
    """The state at `time_s` of the run, from all decisions with their times, in order."""
    loop = Loop()
    for decision, at_s in decisions:
        if at_s > time_s:
            break
        loop.take(decision, at_s)
    return loop


def decode_decision(line: bytes) -> Decision | None:
    """A line of `events.jsonl`; None for an event that this version does not know, or a damaged line."""
    try:
        decision: Decision = _DECODER.decode(line)
    except (ValueError, RecursionError):
        return None
    return decision


_kinds: Any = Decision
_DECODER = msgspec.json.Decoder(_kinds)
