"""The schedule: which group starts where and when, and which groups each step trains. Two rules, and why they hold.

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
falls while it lives, so the token is of version v or later, and n - v <= k by the admission rule. Nothing here asks
whether o was admitted once: when a replica is lost and o starts again elsewhere, each copy passed the rule with the v
and d of its own admission, and the count above holds for each such d, as drops are never taken back. So it does not
matter which copy is scored, or how samples of several copies mix. What the schedule believes of a replica lags behind
the truth, in the safe direction: a command travels while the version rises. After a restore what came behind the
snapshot has not happened, its drops included; finished groups that are restored with it are of those that were scored
before it (`Snapshot.scored`), or pass the admission rule by the drops that it knows and their own oldest version
(`trainer/executor.py`); unfinished ones were admitted before it.

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
admitted: somebody has work after all. As each group is sampled and scored once per loss at most and each step trained
once, the run ends. (A reward that never gives signal ends it with an error, `max_dropped_in_a_row`.)

*For a larger W every run of m or more steps deadlocks.* At version 0 the places 0 .. (k + 1) P - W are open: at most m
P - 1 undropped groups. They make at most m - 1 steps, and version m, which alone would open more, is never published.

*Nothing finished is discarded.* Only places below `steps` P are admitted, so at most `steps` P undropped groups ever
are, and a run that is done has trained them all, each once: a group leaves `ready` for one step only.

`tests/controller/test_schedule.py` drives this with random interleavings, and `benchmarks/exploration.py` goes through
all interleavings of small instances.
"""

from __future__ import annotations

from slipstream.controller.machine import SchedulingPolicy


class Schedule(SchedulingPolicy):
    """Oldest first, admitted so that the bound holds for every token."""

    name = "oldest_first"
    bounds_admissions = True

    @property
    def staleness_bound(self) -> int:
        return self.config.max_staleness

    def _may_start(self, ordinal: int, version: int, /) -> bool:
        """The admission rule of the module's docstring, within the run's length."""
        place = self.place(ordinal)
        return place < self.config.steps * self.config.groups_per_step and self.is_admissible(place, version)

    def is_admissible(self, place: int, version: int) -> bool:
        """The admission rule alone: the last step that could train `place` is at most k above `version`."""
        last_step = (place + self.config.reorder_window - 1) // self.config.groups_per_step
        return last_step - version <= self.config.max_staleness

    def _next_batch(self) -> list[int] | None:
        """The training rule."""
        return self._oldest_batch(self.config.reorder_window)
