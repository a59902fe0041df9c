"""The schedule: the states of a group, which group starts where and when, and which groups each step trains.

    admitted -> sampling -> scored -+-> ready -> training -> trained
        ^           |               |     |
        |           v               |     +-> skipped  (stale, by policies that discard)
        +------- readmit            +-> skipped  (no signal)
                                    +-> failed   (all its completions failed in scoring)

Pure: events in, commands out; the controller feeds it real events, tests random ones, and a recorded log replays a run.
`SchedulingPolicy` is the state machine. A policy decides which group may start on which version, which scored groups
the next step trains, and which it discards. `Schedule`, at the end, is ours, with the two rules below;
`controller/policies.py` has those of other systems.

Notation
--------
P groups per step, k = `max_staleness`, W = `reorder_window`, m = `publish_every`, G completions per group. Groups are
numbered by *ordinal* o in admission order. Step n trains P groups, starts from policy version n and makes version n +
1; multiples of m are published. A group is *dropped* when it is scored without signal or with failures only; dropped
groups take no seat in a step. When o is admitted, d groups below o are known to be dropped, and the *place* of o is o -
d. A group is *unfinished* from its admission until it is scored, also while it waits to be readmitted.

    Training rule:   a step takes the P oldest scored groups; while o is unfinished, none with an ordinal >= o + W.
    Admission rule:  o may start on a replica that holds version v  iff  floor((o - d + W - 1) / P) - v <= k.

Safe
----
*No token is trained more than k steps after the version that sampled it, for every W >= 1.* Let o be trained in step n.
The earlier steps trained n P groups. None of these is o, none is dropped, and none has an ordinal o' >= o + W: while o
was unfinished the rule forbids it, and afterwards o, being older, is taken before or with o'. So at most o - d of them
lie below o: there are o ordinals there, and the d dropped ones are not trained, whatever becomes of the others. At most
W - 1 lie above, in (o, o + W). Hence n P <= o - d + W - 1, and n <= floor((o - d + W - 1) / P).

Let v be the version of the replica at the admission of the copy of o that a token is from. A replica's version never
falls while it lives, and no row began before, so the token is of v or later, and n - v <= k by the admission rule.
Nothing here asks whether o was admitted once: when a replica is lost and o starts again elsewhere, each copy passed the
rule with the v and d of its own admission, and the count above holds for each such d, as drops are never taken back. So
it does not matter which copy is scored, or how samples of several copies mix. The schedule's version of a replica may
lag behind the real one, in the safe direction: a command travels while the version rises.

A restore forgets all events after the snapshot, drops included. Unfinished groups that it brings back were admitted
before the snapshot. Finished groups that it brings back were scored before it (`Snapshot.scored`), or their own oldest
version passes the admission rule with the drops of the snapshot (`trainer/inbox.py`).

*In order, and soon.* o is trained at most k steps after the step that was next when o was admitted, since v was not
above that one: no ordinal starves. At most W - 1 younger groups overtake it.

Live
----
*With 1 <= W <= (k - m + 1) P + 1 and a capacity of at least G completions per replica, something can always happen
until the run is done,* provided that losses are finitely many, that a lost replica comes back or another one lives, and
that a published version reaches every living replica in the end. Suppose the run is not done after n steps, and nothing
is sampled, scored, trained or on its way. So all in flight is scored, every replica is empty and holds the newest
published version v >= n - (m - 1), and the trainer, though free, forms no batch. Let o be the next group to admit: the
oldest one to be readmitted, or a new one. All groups below o are settled: trained, dropped or ready. At most P - 1 of
them are ready, because P ready ones below o make a batch that the training rule allows. Hence o - d <= n P + P - 1, and

    floor((o - d + W - 1) / P) - v  <=  n + floor((P + W - 2) / P) - (n - m + 1)  <=  k

by the condition on W. An empty replica has room for G, and the place o - d is below the run's `steps` P places, so o is
admitted: a replica has work after all. As each group is sampled and scored once per loss at most and each step trained
once, the run ends. (A reward that never gives signal ends it with an error, `max_dropped_in_a_row`.)

*For a larger W every run of m or more steps deadlocks.* At version 0 the places 0 .. (k + 1) P - W are open: at most m
P - 1 undropped groups. They make at most m - 1 steps, and version m, which alone would open more, is never published.

*Nothing finished is discarded.* Only places below `steps` P are admitted, so at most `steps` P undropped groups ever
are, and a run that is done has trained them all, each once: a group leaves `ready` for one step only.

`tests/controller/test_schedule.py` tries random interleavings, `benchmarks/exploration.py` all of small instances.
"""

from __future__ import annotations

import bisect
import heapq
from abc import ABC, abstractmethod
from collections.abc import Collection
from functools import partial
from typing import ClassVar, Self

import msgspec

from slipstream.controller.replicas import Replicas
from slipstream.core.errors import ScheduleError, SlipstreamError
from slipstream.core.run_log import Command, Event, ScheduleBegan, ScheduleConfig, Snapshot
from slipstream.core.service_messages import WaitReason
from slipstream.core.staleness import oldest_version, place_of
from slipstream.core.types import (
    CompletionFinished,
    GroupScored,
    ReplicaLost,
    Skip,
    StartGroup,
    StepDone,
    Stop,
    StopCause,
    Swapped,
    TrainStep,
)


class InFlight(msgspec.Struct, frozen=True):
    """A group that was admitted and is not scored yet: where it is sampled, and how many completions are to come."""

    replica: int
    unfinished: int


class SchedulingPolicy(ABC):
    """The state machine. Feed events to `apply`; carry out the commands it returns, in order."""

    name: ClassVar[str]
    """The value of `schedule.policy`."""
    bounds_admissions: ClassVar[bool] = False
    """Whether `staleness_bound` holds from each admission of a group on, whichever copy of it is trained."""

    def __init__(self, config: ScheduleConfig) -> None:
        self.config = config
        self.next_ordinal = self.steps_done = self.num_failed = self.dropped_in_a_row = 0
        self.dropped: list[int] = []  # ascending: without signal, failed or stale; they are never trained
        self._replicas = Replicas()
        self.in_flight: dict[int, InFlight] = {}  # admitted, not scored
        self.ready: dict[int, int] = {}  # scored, not yet handed to the trainer -> oldest version; in finish order
        self.training: tuple[int, ...] = ()
        self.is_stopping = False  # the run is being interrupted, or ended: learn what happens, start nothing
        self.stopped_because: StopCause | None = None  # it is ended
        self.readmit: list[int] = []  # admitted once, lost with their replica; regenerated before anything new
        # Indexes of the above, so that an event costs no scan of all groups:
        self._ready_in_order: list[int] = []
        self._admitted: list[int] = []  # heap of ordinals; one that is no longer in flight is removed when it comes up

    # Decisions of a policy

    @property
    def staleness_bound(self) -> int | None:
        """Return the most steps that a consumed token may be old; None where the policy promises none."""
        return None

    @abstractmethod
    def _may_start(self, ordinal: int, version: int, /) -> bool:
        """Return whether group `ordinal` may start on a replica that holds `version` and has room.

        It is the next new one, or below `next_ordinal`: one that was admitted before and lost.
        """

    def _next_batch(self) -> Collection[int] | None:
        """Return the P ready groups of the next step, or None. Called while the trainer is free and P are ready."""
        return list(self.ready)[: self.config.groups_per_step]  # in the order in which they were finished

    def _stale(self) -> list[int]:
        """Return the ready groups to discard before the next step is put together."""
        return []

    # Queries

    @property
    def versions(self) -> dict[int, int]:
        """The version that each replica samples from."""
        return self._replicas.versions

    @property
    def is_finished(self) -> bool:
        is_ended = self.stopped_because is not None and not self.training
        return is_ended or self.steps_done >= self.config.steps

    def place(self, ordinal: int) -> int:
        """Return how many groups below `ordinal` may be trained, as far as drops are known."""
        return place_of(ordinal, self.dropped)

    def waits_for(self) -> WaitReason:
        """Return what the trainer lacks: sampled groups, their scores, or one old group that holds up finished ones."""
        if self.training or self.is_finished:
            return "nothing"
        oldest = self._oldest_in_flight()
        if oldest is not None and not self.in_flight[oldest].unfinished:
            return "rewards"
        return "straggler" if len(self.ready) >= self.config.groups_per_step else "generation"

    def held_back(self) -> frozenset[int]:
        """Return the held versions on which no further group may start, whatever room there is; before the end."""
        ordinal = next(iter(self.readmit), self.next_ordinal)
        return frozenset(version for version in self._replicas.held if not self._may_start(ordinal, version))

    def oldest_unfinished(self) -> int | None:
        """Return the lowest ordinal that is admitted and not scored, if there is one."""
        return min((o for o in (self._oldest_in_flight(), *self.readmit[:1]) if o is not None), default=None)

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
                self._replicas.hold(event.replica, event.version)
            case CompletionFinished():
                self._finished(event)
            case GroupScored():
                commands += self._scored(event)
            case StepDone() if self.training and event.step == self.steps_done:
                self.steps_done, self.training = self.steps_done + 1, ()
            case StepDone():
                begun = f"step {self.steps_done}" if self.training else "none is in training"
                raise ScheduleError("a step was done that was not begun", got=f"step {event.step}", allowed=begun)
            case ReplicaLost():
                self._lose(event.replica)
            case Stop():
                self.is_stopping = True
                self.stopped_because = event.because or self.stopped_because
        if not self.is_stopping:
            commands += [*self._discard(), *self._train(), *self._admit()]
        return commands

    def _finished(self, event: CompletionFinished) -> None:
        """Count a finished completion, unless its score has overtaken it on another channel."""
        group = self.in_flight.get(event.ordinal)
        if group is not None and group.replica == event.replica and group.unfinished > 0:
            self.in_flight[event.ordinal] = InFlight(group.replica, group.unfinished - 1)
            self._replicas.give(group.replica, -1)

    def _scored(self, event: GroupScored) -> list[Command]:
        """Make the group ready, or drop it; also one that is sampled again, whose second copy the trainer will drop."""
        if (group := self.in_flight.pop(event.ordinal, None)) is not None:
            if group.unfinished:
                self._replicas.give(group.replica, -group.unfinished)
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
        if event.num_failed >= self.config.completions_per_group:
            what = "there is nothing to train on: every completion of a group fails"
            last = f"{event.num_failed} failures, the first: {event.failure}"
            hint = "rollouts.jsonl has the `failure` of each"
        else:
            what = "the reward gives no signal: every completion of a group gets the same reward"
            last = f"mean reward {event.mean_reward:.3g} as scored, before loss.truncated"
            hint = "look at rollouts.jsonl and the reward; a warm start, an easier task or more completions per "
            hint += "group help; loss.skip_no_signal = false trains on them anyway"
        got = f"{self.dropped_in_a_row} groups in a row without a signal, the last with {last}"
        return SlipstreamError(what, got=got, allowed=f"at most {self.config.max_dropped_in_a_row}", hint=hint)

    def _lose(self, replica: int) -> None:
        """Regenerate all that is not scored: completions that the replica had finished may be lost on their way."""
        if replica in self.versions:
            self._replicas.remove(replica)
        lost = [o for o, group in self.in_flight.items() if group.replica == replica]
        self.in_flight = {o: group for o, group in self.in_flight.items() if group.replica != replica}
        self.readmit = sorted(self.readmit + lost)

    def _discard(self) -> list[Command]:
        stale = [] if self.training or self.is_finished else self._stale()
        for ordinal in stale:
            self._take(ordinal)
            bisect.insort(self.dropped, ordinal)
        return [Skip(ordinals=tuple(sorted(stale)), cause="stale")] if stale else []

    def _train(self) -> list[Command]:
        is_possible = not self.training and not self.is_finished and len(self.ready) >= self.config.groups_per_step
        batch = self._next_batch() if is_possible else None
        if batch is None:
            return []
        for ordinal in batch:
            self._take(ordinal)
        self.training = tuple(sorted(batch))
        return [TrainStep(step=self.steps_done, ordinals=self.training)]

    def _take(self, ordinal: int) -> None:
        """Remove `ordinal` from the ready groups."""
        del self.ready[ordinal]
        del self._ready_in_order[bisect.bisect_left(self._ready_in_order, ordinal)]

    def _oldest_batch(self, window: int | None = None) -> list[int] | None:
        """Return the oldest P ready groups; with a `window`, if nothing unfinished is that many ordinals older."""
        batch = self._ready_in_order[: self.config.groups_per_step]
        oldest = None if window is None else self.oldest_unfinished()
        return batch if window is None or oldest is None or batch[-1] < oldest + window else None

    def _admit(self) -> list[Command]:
        """Start groups in order, each on the least loaded replica that has room and is fresh enough for it."""
        commands: list[Command] = []
        size = self.config.completions_per_group
        while not self.is_finished:
            ordinal = self.readmit[0] if self.readmit else self.next_ordinal
            replica = self._replicas.least_loaded(self.config.capacity - size, partial(self._may_start, ordinal))
            if replica is None:
                break
            if self.readmit:
                self.readmit.pop(0)
            else:
                self.next_ordinal += 1
            self.in_flight[ordinal] = InFlight(replica, size)
            heapq.heappush(self._admitted, ordinal)
            self._replicas.give(replica, size)
            commands.append(StartGroup(ordinal=ordinal, replica=replica))
        return commands

    # Saving

    def began(self) -> ScheduleBegan:
        """Return what a log of this schedule's decisions begins with. Called before the first event."""
        restored = self.snapshot() if self.next_ordinal else None
        return ScheduleBegan(policy=self.name, config=self.config, snapshot=restored)

    def snapshot(self) -> Snapshot:
        """Return the state after the last step that is done. What was not trained is regenerated after `restore`."""
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
        schedule.next_ordinal, schedule.steps_done = snapshot.next_ordinal, snapshot.steps_done
        schedule.dropped, schedule.readmit = list(snapshot.dropped), list(snapshot.readmit)
        schedule.dropped_in_a_row, schedule.num_failed = snapshot.dropped_in_a_row, snapshot.num_failed
        return schedule


class Schedule(SchedulingPolicy):
    """Oldest first, admitted so that the bound holds for every token."""

    name = "oldest_first"
    bounds_admissions = True

    @property
    def staleness_bound(self) -> int:
        return self.config.max_staleness

    def _may_start(self, ordinal: int, version: int, /) -> bool:
        """Apply the admission rule of the module's docstring, within the run's length."""
        place = self.place(ordinal)
        return place < self.config.steps * self.config.groups_per_step and self.is_admissible(place, version)

    def is_admissible(self, place: int, version: int) -> bool:
        """Apply the admission rule alone (`core/staleness.py` has its formula)."""
        size, window, most = self.config.groups_per_step, self.config.reorder_window, self.config.max_staleness
        return version >= oldest_version(place, groups_per_step=size, reorder_window=window, max_staleness=most)

    def _next_batch(self) -> list[int] | None:
        """Apply the training rule."""
        return self._oldest_batch(self.config.reorder_window)
