"""The schedule: which group starts where and when, and which groups each step trains. Pure: events in, commands out.

No clock, no I/O, no tensors: the controller feeds it real events, tests random ones, and a recorded log replays a run.

The bound
---------
Notation: P groups per step, k = `max_staleness`, W = `reorder_window`, groups numbered by *ordinal* o in admission
order. Step n trains P groups and starts from policy version n. Let d be the number of groups below o that are known to
be dropped (without signal, or failed) when o is admitted; dropped groups take no place in a step, so the *place* of o
is o - d: at most o - d undropped groups have lower ordinals.

    Training rule:   a group is trained in a step no later than every undropped group with an ordinal >= o + W
                     (equivalently: while o is unfinished, nothing with an ordinal >= o + W is trained).
    Admission rule:  o may start on a replica that holds version v  iff  floor((o - d + W - 1) / P) - v <= k.

*Safe.* When o is trained in step n, the groups trained in earlier steps are n P many. By the training rule each has an
ordinal < o + W, is not o, and is undropped; at most o - d have ordinals below o (later drops only
lower that)
and at most W - 1 lie in (o, o + W). Hence n P <= o - d + W - 1, so n <= floor((o - d + W - 1) / P). All tokens of o
come from versions >= v, because a replica's version never falls. So staleness n - v <= k.

*Live* iff 1 <= W <= (k - m + 1) P + 1, where versions are published every m steps. Suppose everything admitted is
finished and the trainer, after n steps, cannot form a batch. Then at most P - 1 undropped groups wait, so
o - d <= n P + P - 1. The replicas hold the newest published version, v >= n - (m - 1). The next ordinal
is admissible, as floor((n P + P - 1 + W - 1) / P) - v <= n + floor((P + W - 2) / P) - n + m - 1 <= k. For a larger W
the same state admits nothing and trains nothing: a deadlock.

`tests/controller/test_schedule.py` drives this with random interleavings, failures, windows and replicas.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Literal

import msgspec

from slipstream.core.errors import SlipstreamError
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

Event = Swapped | CompletionFinished | GroupScored | StepDone | ReplicaLost | Stop
Command = StartGroup | TrainStep | Skip
WaitReason = Literal["generation", "rewards", "straggler", "nothing"]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The dials. `capacity`: unfinished completions a replica may hold, that is its slots and one group in reserve."""

    groups_per_step: int
    completions_per_group: int
    max_staleness: int
    reorder_window: int
    steps: int
    capacity: int
    skip_no_signal: bool = True
    max_dropped_in_a_row: int = 1000


class InFlight(msgspec.Struct):
    """A group that was admitted and is not scored yet."""

    replica: int
    unfinished: int


class Snapshot(msgspec.Struct):
    """Everything the schedule knows, in JSON types."""

    next_ordinal: int
    steps_done: int
    dropped: list[int]
    dropped_in_a_row: int
    num_failed: int
    readmit: list[int]


class Schedule:
    """The state machine. Feed events to `apply`; carry out the commands it returns, in order."""

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.next_ordinal = 0
        self.steps_done = 0
        self.dropped: list[int] = []  # ascending
        self.num_failed = 0
        self.dropped_in_a_row = 0
        self.versions: dict[int, int] = {}  # replica -> version it samples from
        self.in_flight: dict[int, InFlight] = {}  # admitted, not scored
        self.ready: set[int] = set()  # scored, with signal, not yet handed to the trainer
        self.training: tuple[int, ...] = ()
        self.is_stopping = False  # the run is being interrupted: learn what happens, start nothing
        self.readmit: list[int] = []  # admitted once, lost with their replica; regenerated before anything new

    # What others ask

    @property
    def is_finished(self) -> bool:
        return self.steps_done >= self.config.steps

    @property
    def num_trained(self) -> int:
        return self.steps_done * self.config.groups_per_step

    @property
    def num_pending(self) -> int:
        return len(self.in_flight) + len(self.ready) + len(self.training) + len(self.readmit)

    def waits_for(self) -> WaitReason:
        """What the trainer lacks: sampled groups, their scores, or one old group that holds up finished ones."""
        if self.training or self.is_finished:
            return "nothing"
        oldest = min(self.in_flight, default=None)
        if oldest is not None and self.in_flight[oldest].unfinished == 0:
            return "rewards"
        return "straggler" if len(self.ready) >= self.config.groups_per_step else "generation"

    # The machine

    def apply(self, event: Event) -> list[Command]:
        """Take one event; return what is to be done now, in order."""
        commands: list[Command] = []
        match event:
            case Swapped():
                self.versions[event.replica] = max(event.version, self.versions.get(event.replica, 0))
            case CompletionFinished():
                group = self.in_flight.get(
                    event.ordinal
                )  # its score may overtake it: they travel on different channels
                if group is not None and group.replica == event.replica:
                    group.unfinished -= 1
            case GroupScored():
                commands += self._scored(event)
            case StepDone():
                assert self.training
                assert event.step == self.steps_done, f"step {event.step} was not being trained"
                self.steps_done += 1
                self.training = ()
            case ReplicaLost():
                self._lose(event.replica)
            case Stop():
                self.is_stopping = True
        if not self.is_stopping:
            commands += self._train()
            commands += self._admit()
        return commands

    def _scored(self, event: GroupScored) -> list[Command]:
        if self.in_flight.pop(event.ordinal, None) is None:  # its replica was lost with the completions on their way
            self.readmit.remove(event.ordinal)
        has_failed = event.num_failed >= self.config.completions_per_group
        if event.has_signal or not (self.config.skip_no_signal or has_failed):
            self.ready.add(event.ordinal)
            self.dropped_in_a_row = 0
            return []
        bisect.insort(self.dropped, event.ordinal)
        self.num_failed += has_failed
        self.dropped_in_a_row += 1
        if self.dropped_in_a_row > self.config.max_dropped_in_a_row:
            raise SlipstreamError(
                "the reward gives no signal: every completion of a group gets the same reward",
                got=f"{self.dropped_in_a_row} such groups in a row, the last with mean reward {event.mean_reward:.3g}",
                allowed=f"at most {self.config.max_dropped_in_a_row}",
                hint="look at rollouts.jsonl and the reward; a warm start, an easier task or more completions per "
                "group help; loss.skip_no_signal = false trains on them anyway",
            )
        return [Skip(ordinals=(event.ordinal,))]

    def _lose(self, replica: int) -> None:
        """All that is not scored is to be regenerated: what the replica said it had finished may be lost on its way.

        If it is not, the group is scored before its second copy is; whatever comes of that is a duplicate.
        """
        self.versions.pop(replica, None)
        lost = [o for o, group in self.in_flight.items() if group.replica == replica]
        for ordinal in lost:
            del self.in_flight[ordinal]
        self.readmit = sorted(self.readmit + lost)

    def _train(self) -> list[Command]:
        """The oldest P ready groups, if nothing unfinished is W or more ordinals older than one of them."""
        if self.training or self.is_finished or len(self.ready) < self.config.groups_per_step:
            return []
        batch = sorted(self.ready)[: self.config.groups_per_step]
        oldest_unfinished = min([*self.in_flight, *self.readmit], default=None)
        if oldest_unfinished is not None and batch[-1] >= oldest_unfinished + self.config.reorder_window:
            return []
        self.ready.difference_update(batch)
        self.training = tuple(batch)
        return [TrainStep(step=self.steps_done, ordinals=self.training)]

    def _admit(self) -> list[Command]:
        """Start groups while the bound, the run's length and a replica's capacity allow; the freest replica first."""
        commands: list[Command] = []
        load = dict.fromkeys(self.versions, 0)
        for group in self.in_flight.values():
            load[group.replica] = load.get(group.replica, 0) + group.unfinished
        while self.versions and not self.is_finished:
            ordinal = self.readmit[0] if self.readmit else self.next_ordinal
            place = ordinal - bisect.bisect_left(self.dropped, ordinal)
            if not self.readmit and place >= self.config.steps * self.config.groups_per_step:
                break
            replica = min(self.versions, key=lambda r: (load[r], -self.versions[r], r))
            if load[replica] + self.config.completions_per_group > self.config.capacity:
                break
            if not self.is_admissible(place, self.versions[replica]):
                replica = max(self.versions, key=lambda r: (self.versions[r], -load[r], -r))
                is_full = load[replica] + self.config.completions_per_group > self.config.capacity
                if is_full or not self.is_admissible(place, self.versions[replica]):
                    break
            if self.readmit:
                self.readmit.pop(0)
            else:
                self.next_ordinal += 1
            self.in_flight[ordinal] = InFlight(replica=replica, unfinished=self.config.completions_per_group)
            load[replica] += self.config.completions_per_group
            commands.append(StartGroup(ordinal=ordinal, replica=replica))
        return commands

    def is_admissible(self, place: int, version: int) -> bool:
        """The admission rule of the module's docstring."""
        last_step = (place + self.config.reorder_window - 1) // self.config.groups_per_step
        return last_step - version <= self.config.max_staleness

    # Saving

    def snapshot(self) -> Snapshot:
        """State after the last step that is done. What was not trained by then is regenerated after `restore`."""
        return Snapshot(
            next_ordinal=self.next_ordinal,
            steps_done=self.steps_done,
            dropped=list(self.dropped),
            dropped_in_a_row=self.dropped_in_a_row,
            num_failed=self.num_failed,
            readmit=sorted([*self.readmit, *self.in_flight, *self.ready, *self.training]),
        )

    @classmethod
    def restore(cls, config: ScheduleConfig, snapshot: Snapshot) -> Schedule:
        schedule = cls(config)
        schedule.next_ordinal = snapshot.next_ordinal
        schedule.steps_done = snapshot.steps_done
        schedule.dropped = list(snapshot.dropped)
        schedule.dropped_in_a_row = snapshot.dropped_in_a_row
        schedule.num_failed = snapshot.num_failed
        schedule.readmit = list(snapshot.readmit)
        return schedule
