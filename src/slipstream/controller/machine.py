"""What every scheduling policy shares: the states of a group, the events that move it, and a snapshot of it all.

    admitted -> sampling -> scored -+-> ready -> training -> trained
        ^           |               |     |
        |           v               |     +-> skipped  (stale, by policies that discard)
        +------- readmit            +-> skipped  (no signal)
                                    +-> failed   (all its completions failed in scoring)

Pure: events in, commands out. No clock, no I/O, no tensors: the controller feeds it real events, tests random ones, and
a recorded log replays a run. A policy adds two decisions: which group may start on which version, and which scored
groups the next step trains. Ours is `controller/schedule.py`; those of others are in `controller/policies.py`.
"""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar, Literal, Self

import msgspec

from slipstream.core.errors import ScheduleError, SlipstreamError
from slipstream.core.run_log import Command, Event, ScheduleBegan, ScheduleConfig, Snapshot
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

WaitReason = Literal["generation", "rewards", "straggler", "nothing"]


class InFlight(msgspec.Struct, frozen=True):
    """A group that was admitted and is not scored yet: where it is sampled, and how many completions are to come."""

    replica: int
    unfinished: int


class SchedulingPolicy(ABC):
    """The state machine. Feed events to `apply`; carry out the commands it returns, in order."""

    name: ClassVar[str]
    """What `schedule.policy` calls it."""
    bounds_admissions: ClassVar[bool] = False
    """Whether `staleness_bound` holds from each admission of a group on, whichever copy of it is trained."""

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.next_ordinal = 0
        self.steps_done = 0
        self.dropped: list[int] = []  # ascending: without signal, failed or stale; they are never trained
        self.num_failed = 0
        self.dropped_in_a_row = 0
        self.versions: dict[int, int] = {}  # replica -> version it samples from
        self.in_flight: dict[int, InFlight] = {}  # admitted, not scored
        self.ready: dict[int, int] = {}  # scored, not yet handed to the trainer -> oldest version; in finish order
        self.training: tuple[int, ...] = ()
        self.is_stopping = False  # the run is being interrupted: learn what happens, start nothing
        self.readmit: list[int] = []  # admitted once, lost with their replica; regenerated before anything new
        # The same once more, in the order in which it is asked for: an event costs no look at every group or replica.
        self._ready_in_order: list[int] = []
        self._admitted: list[int] = []  # heap of ordinals; those that are in flight no more leave it when they are met
        self._load: dict[int, int] = {}  # replica -> unfinished completions
        self._by_load: list[tuple[int, int, int]] = []  # ascending: load, -version, replica
        self._num_holding: dict[int, int] = {}  # version -> replicas

    # What a policy decides

    @property
    @abstractmethod
    def staleness_bound(self) -> int | None:
        """The most steps that a consumed token may be old, if the policy promises any."""

    @abstractmethod
    def _may_start(self, ordinal: int, version: int, /) -> bool:
        """Whether group `ordinal` may start on a replica that holds `version`, as far as capacity allows.

        It is the next new one, or below `next_ordinal`: one that was admitted before and lost.
        """

    @abstractmethod
    def _next_batch(self) -> Collection[int] | None:
        """The P ready groups of the next step; asked while the trainer is free and at least P are ready."""

    def _stale(self) -> list[int]:
        """The ready groups to discard before the next step is put together."""
        return []

    # What others ask

    @property
    def is_finished(self) -> bool:
        return self.steps_done >= self.config.steps

    @property
    def num_handed(self) -> int:
        """Groups trained or in training."""
        return self.steps_done * self.config.groups_per_step + len(self.training)

    @property
    def num_undropped(self) -> int:
        """Groups ever admitted, less those known to be dropped."""
        return self.next_ordinal - len(self.dropped)

    @property
    def num_pending(self) -> int:
        return len(self.in_flight) + len(self.ready) + len(self.training) + len(self.readmit)

    def place(self, ordinal: int) -> int:
        """The most undropped groups that may lie below `ordinal`, as far as drops are known."""
        return ordinal - bisect.bisect_left(self.dropped, ordinal)

    def waits_for(self) -> WaitReason:
        """What the trainer lacks: sampled groups, their scores, or one old group that holds up finished ones."""
        if self.training or self.is_finished:
            return "nothing"
        oldest = self._oldest_in_flight()
        if oldest is not None and self.in_flight[oldest].unfinished == 0:
            return "rewards"
        return "straggler" if len(self.ready) >= self.config.groups_per_step else "generation"

    def held_back(self) -> frozenset[int]:
        """The versions, of those that replicas hold, on which no further group may start, whatever room there is.

        Asked while there are steps to be trained.
        """
        ordinal = self.readmit[0] if self.readmit else self.next_ordinal
        return frozenset(version for version in self._num_holding if not self._may_start(ordinal, version))

    def oldest_unfinished(self) -> int | None:
        """The lowest ordinal that is admitted and not scored, if there is one."""
        oldest = self._oldest_in_flight()
        if self.readmit and (oldest is None or self.readmit[0] < oldest):
            return self.readmit[0]
        return oldest

    def _oldest_in_flight(self) -> int | None:
        admitted = self._admitted
        while admitted and admitted[0] not in self.in_flight:
            heapq.heappop(admitted)
        return admitted[0] if admitted else None

    # The machine

    def apply(self, event: Event) -> list[Command]:
        """Take one event; return what is to be done now, in order. ScheduleError for one that cannot have happened."""
        commands: list[Command] = []
        match event:
            case Swapped():
                self._hold(event.replica, event.version)
            case CompletionFinished():
                self._finished(event)
            case GroupScored():
                commands += self._scored(event)
            case StepDone():
                if not self.training or event.step != self.steps_done:
                    now = f"step {self.steps_done}" if self.training else "nothing"
                    raise ScheduleError(
                        "a step was done that was not begun", got=f"step {event.step}", allowed=f"{now} is in training"
                    )
                self.steps_done += 1
                self.training = ()
            case ReplicaLost():
                self._lose(event.replica)
            case Stop():
                self.is_stopping = True
        if not self.is_stopping:
            commands += self._discard()
            commands += self._train()
            commands += self._admit()
        return commands

    def _hold(self, replica: int, version: int) -> None:
        """`replica` has come, or swapped; it never goes back to an older version."""
        load = self._load.get(replica, 0)
        if replica in self.versions:
            self._leave(replica)
        self.versions[replica] = version = max(version, self.versions.get(replica, 0))
        self._load[replica] = load
        self._num_holding[version] = self._num_holding.get(version, 0) + 1
        bisect.insort(self._by_load, (load, -version, replica))

    def _leave(self, replica: int) -> None:
        version, load = self.versions[replica], self._load.pop(replica)
        del self._by_load[bisect.bisect_left(self._by_load, (load, -version, replica))]
        self._num_holding[version] -= 1
        if not self._num_holding[version]:
            del self._num_holding[version]

    def _give(self, replica: int, count: int) -> None:
        """`replica` has `count` completions more to do."""
        by_load, version, load = self._by_load, self.versions[replica], self._load[replica]
        del by_load[bisect.bisect_left(by_load, (load, -version, replica))]
        bisect.insort(by_load, (load + count, -version, replica))
        self._load[replica] = load + count

    def _finished(self, event: CompletionFinished) -> None:
        """One completion fewer to come, where that is news: its score may have overtaken it on another channel."""
        group = self.in_flight.get(event.ordinal)
        if group is not None and group.replica == event.replica and group.unfinished > 0:
            self.in_flight[event.ordinal] = InFlight(group.replica, group.unfinished - 1)
            self._give(group.replica, -1)

    def _scored(self, event: GroupScored) -> list[Command]:
        """The group is ready, or dropped. It may be one to be readmitted: whose replica was lost, or of a checkpoint.

        If its second copy is being sampled already, that is forgotten here: whatever comes of it is a duplicate.
        """
        group = self.in_flight.pop(event.ordinal, None)
        if group is not None:
            if group.unfinished:
                self._give(group.replica, -group.unfinished)
        elif event.ordinal in self.readmit:
            self.readmit.remove(event.ordinal)
        else:
            raise ScheduleError("a group was scored that nobody waits for", got=f"group {event.ordinal}")
        has_failed = event.num_failed >= self.config.completions_per_group
        if event.has_signal or not (self.config.skip_no_signal or has_failed):
            self.ready[event.ordinal] = event.min_version
            bisect.insort(self._ready_in_order, event.ordinal)
            self.dropped_in_a_row = 0
            return []
        bisect.insort(self.dropped, event.ordinal)
        self.num_failed += has_failed
        self.dropped_in_a_row += 1
        if self.dropped_in_a_row > self.config.max_dropped_in_a_row:
            raise self._nothing_to_train(event)
        return [Skip(ordinals=(event.ordinal,), cause="failed" if has_failed else "no_signal")]

    def _nothing_to_train(self, event: GroupScored) -> SlipstreamError:
        got = f"{self.dropped_in_a_row} groups in a row without a signal, the last with"
        allowed = f"at most {self.config.max_dropped_in_a_row}"
        if event.num_failed >= self.config.completions_per_group:
            return SlipstreamError(
                "there is nothing to train on: every completion of a group fails",
                got=f"{got} {event.num_failed} failures, the first: {event.failure}",
                allowed=allowed,
                hint="rollouts.jsonl has the `failure` of each",
            )
        return SlipstreamError(
            "the reward gives no signal: every completion of a group gets the same reward",
            got=f"{got} mean reward {event.mean_reward:.3g}",
            allowed=allowed,
            hint="look at rollouts.jsonl and the reward; a warm start, an easier task or more completions per "
            "group help; loss.skip_no_signal = false trains on them anyway",
        )

    def _lose(self, replica: int) -> None:
        """All that is not scored is to be regenerated: what the replica said it had finished may be lost on its way.

        If it is not, the group is scored before its second copy is; whatever comes of that is a duplicate.
        """
        if replica in self.versions:
            self._leave(replica)
            del self.versions[replica]
        lost = [o for o, group in self.in_flight.items() if group.replica == replica]
        for ordinal in lost:
            del self.in_flight[ordinal]
        self.readmit = sorted(self.readmit + lost)

    def _discard(self) -> list[Command]:
        stale = [] if self.training or self.is_finished else self._stale()
        for ordinal in stale:
            self._take(ordinal)
            bisect.insort(self.dropped, ordinal)
        return [Skip(ordinals=tuple(sorted(stale)), cause="stale")] if stale else []

    def _train(self) -> list[Command]:
        if self.training or self.is_finished or len(self.ready) < self.config.groups_per_step:
            return []
        batch = self._next_batch()
        if batch is None:
            return []
        for ordinal in batch:
            self._take(ordinal)
        self.training = tuple(sorted(batch))
        return [TrainStep(step=self.steps_done, ordinals=self.training)]

    def _take(self, ordinal: int) -> None:
        """It is ready no more."""
        del self.ready[ordinal]
        del self._ready_in_order[bisect.bisect_left(self._ready_in_order, ordinal)]

    def _oldest_batch(self, window: int | None = None) -> list[int] | None:
        """The oldest P ready groups; with a `window`, if nothing unfinished is so many or more ordinals older."""
        last = self._ready_in_order[self.config.groups_per_step - 1]
        oldest_unfinished = None if window is None else self.oldest_unfinished()
        if window is None or oldest_unfinished is None or last < oldest_unfinished + window:
            return self._ready_in_order[: self.config.groups_per_step]
        return None

    def _admit(self) -> list[Command]:
        """Start groups in order, each on the least loaded replica that has room and is fresh enough for it."""
        commands: list[Command] = []
        size = self.config.completions_per_group
        while not self.is_finished:
            ordinal = self.readmit[0] if self.readmit else self.next_ordinal
            replica = self._replica_for(ordinal)
            if replica is None:
                break
            if self.readmit:
                self.readmit.pop(0)
            else:
                self.next_ordinal += 1
            self.in_flight[ordinal] = InFlight(replica, size)
            heapq.heappush(self._admitted, ordinal)
            self._give(replica, size)
            commands.append(StartGroup(ordinal=ordinal, replica=replica))
        return commands

    def _replica_for(self, ordinal: int) -> int | None:
        """Of equally loaded ones the freshest, of these the first; None while there is none."""
        most = self.config.capacity - self.config.completions_per_group
        refused: set[int] = set()
        for load, minus_version, replica in self._by_load:
            if load > most:
                return None
            if minus_version in refused:
                continue
            if self._may_start(ordinal, -minus_version):
                return replica
            refused.add(minus_version)
            if len(refused) == len(self._num_holding):
                return None
        return None

    # Saving

    def began(self) -> ScheduleBegan:
        """What a log of this schedule's decisions begins with: asked before the first event."""
        is_restored = self.next_ordinal > 0
        return ScheduleBegan(policy=self.name, config=self.config, snapshot=self.snapshot() if is_restored else None)

    def snapshot(self) -> Snapshot:
        """State after the last step that is done. What was not trained by then is regenerated after `restore`."""
        return Snapshot(
            next_ordinal=self.next_ordinal,
            steps_done=self.steps_done,
            dropped=list(self.dropped),
            dropped_in_a_row=self.dropped_in_a_row,
            num_failed=self.num_failed,
            readmit=sorted([*self.readmit, *self.in_flight, *self.ready, *self.training]),
            scored=sorted([*self.ready, *self.training]),
        )

    @classmethod
    def restore(cls, config: ScheduleConfig, snapshot: Snapshot) -> Self:
        schedule = cls(config)
        schedule.next_ordinal = snapshot.next_ordinal
        schedule.steps_done = snapshot.steps_done
        schedule.dropped = list(snapshot.dropped)
        schedule.dropped_in_a_row = snapshot.dropped_in_a_row
        schedule.num_failed = snapshot.num_failed
        schedule.readmit = list(snapshot.readmit)
        return schedule
