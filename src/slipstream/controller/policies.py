"""Scheduling policies by name: ours and, for honest comparison, the rules of other systems on the same machine.

Each rule is that of the named system for groups of completions, P to a step; what is around the rule (channels, pauses,
retries, weight transfer) is ours, and the same for all. n is the number of steps done, k = `max_staleness`. Beside the
rules, two things are alike: a lost group is regenerated first, and a group without signal is replaced.
`benchmarks/policies.py` compares them on one workload.
"""

from __future__ import annotations

from slipstream.controller.schedule import Schedule, SchedulingPolicy
from slipstream.core.config import RunConfig
from slipstream.core.run_log import Command, Event, ScheduleConfig, Snapshot
from slipstream.core.types import Swapped

DROPPED_PER_GROUP = 64  # so many groups in a row without signal, per group of a step, end the run


def _num_undropped(policy: SchedulingPolicy) -> int:
    """Return the number of groups ever admitted, less those known to be dropped."""
    return policy.next_ordinal - len(policy.dropped)


class DropStale(SchedulingPolicy):
    """Train on what is finished, in finish order; discard what has become staler than k.

    PRIME-RL's orchestrator (`max_off_policy_steps`, `TARGET_LAG = 1`: no new group while a whole batch lies ready
    ahead of the trainer), and verl's V1 `separate_async` with `max_off_policy_strategy = "drop"`. As in verl a group is
    discarded when it is finished; PRIME-RL also cancels groups in flight, and so wastes less, of the same groups.

    Guarantees: no token trained is staler than k. Does not: finished work is thrown away, long completions first.
    """

    name = "drop_stale"

    @property
    def staleness_bound(self) -> int:
        return self.config.max_staleness

    def _may_start(self, _ordinal: int, _version: int, /) -> bool:
        return len(self.ready) < self.config.groups_per_step

    def _stale(self) -> list[int]:
        oldest = self.steps_done - self.config.max_staleness
        return [ordinal for ordinal, version in self.ready.items() if 0 <= version < oldest]


class ArealAdmission(SchedulingPolicy):
    """Admit by count, train the oldest of what is finished.

        the r-th group may start on version i  iff  floor((r - 1) / P) <= i + k

    AReaL (arXiv:2505.24298, equation 3, with eta = k; `areal/infra/staleness_manager.py`: capacity = (eta + version +
    1) B - (accepted + running), where rejected groups count no longer). Version i is that of the newest replica.

    Guarantees: the mean lag is bounded, as counts are. Does not: no group is waited for, so a straggler is trained at
    whatever lag it has when it comes.
    """

    name = "areal"

    def _may_start(self, ordinal: int, _version: int, /) -> bool:
        newest = max(self.versions.values())
        limit = (self.config.max_staleness + newest + 1) * self.config.groups_per_step
        return ordinal < self.next_ordinal or _num_undropped(self) < limit

    def _next_batch(self) -> list[int] | None:
        return self._oldest_batch()


class OneStep(SchedulingPolicy):
    """Batches in lockstep: while the trainer is at batch b, the generators sample batch b + 1, and nothing else.

    Cleanba (arXiv:2310.00036, section 4: the rollout of iteration i + 1 uses the parameters before update i), and
    asynchronous RLHF (arXiv:2410.18252). Batch b starts when batch b - 1 is finished and its replica holds version
    b - 1 (0 for the first two). Cleanba takes exactly that version; here a newer one will do.

    Guarantees: at most one step stale, nothing discarded. Does not: the generators wait for the slowest completion of
    every batch.
    """

    name = "one_step"
    bounds_admissions = True

    @property
    def staleness_bound(self) -> int:
        return 1

    def _may_start(self, ordinal: int, version: int, /) -> bool:
        batch = self._batch_of(ordinal)
        oldest_unfinished = self.oldest_unfinished()
        is_turn = oldest_unfinished is None or self._batch_of(oldest_unfinished) >= batch
        return batch < self.config.steps and is_turn and version >= batch - 1

    def _batch_of(self, ordinal: int) -> int:
        return self.place(ordinal) // self.config.groups_per_step

    def _next_batch(self) -> list[int] | None:
        return self._oldest_batch(window=1)


class SampleBudget(SchedulingPolicy):
    """A budget of groups per published version, then pause; train in finish order.

        started since the newest version arrived, with what was left over then  <  floor((1 + s) m P)

    verl's `fully_async_policy` (`max_required_samples = int(required_samples * (staleness_threshold + 1) *
    trigger_parameter_sync_step)` in `fully_async_rollouter.py`; left over are samples in flight and in the message
    queue), with s = `staleness_threshold` and m = `publish_every`.

    Guarantees: at most s m P groups more than m steps need are under way. Does not: a group's lag has no bound, as a
    ratio of samples says nothing of the one that is still being sampled.
    """

    name = "sample_budget"

    def __init__(self, config: ScheduleConfig) -> None:
        super().__init__(config)
        self.budget = int((1 + config.staleness_threshold) * config.publish_every * config.groups_per_step)
        self.synced_version = -1
        self.handed_at_sync = 0

    def apply(self, event: Event) -> list[Command]:
        if isinstance(event, Swapped) and event.version > self.synced_version:
            num_handed = self.steps_done * self.config.groups_per_step + len(self.training)  # trained or in training
            self.synced_version, self.handed_at_sync = event.version, num_handed
        return super().apply(event)

    def _may_start(self, ordinal: int, _version: int, /) -> bool:
        return ordinal < self.next_ordinal or _num_undropped(self) - self.handed_at_sync < self.budget


class FinishOrder(SchedulingPolicy):
    """Generators never stop, batches in finish order, and a queue of at most Q finished groups that blocks.

    Magistral (arXiv:2506.10910, section 3): "we accumulate incoming generations into a blocking queue with a fixed size
    limit that controls off-policy degree". Theirs counts completions; here a group enters the queue as a whole. A full
    queue stops new groups; those in flight are finished and wait behind it.

    Guarantees: a finished group is trained, within about Q / P steps. Does not: a group's lag has no bound, and at any
    time the long completions are missing among the trained, as they finish last.
    """

    name = "finish_order"

    def _may_start(self, _ordinal: int, _version: int, /) -> bool:
        return len(self.ready) < self.config.queue_groups


POLICIES: dict[str, type[SchedulingPolicy]] = {
    policy.name: policy for policy in (Schedule, DropStale, ArealAdmission, OneStep, SampleBudget, FinishOrder)
}
"""By the names of `schedule.policy`."""


def make_policy(name: str, config: ScheduleConfig, snapshot: Snapshot | None = None) -> SchedulingPolicy:
    """The policy `name`, from a run's start or from a checkpoint's snapshot."""
    policy = POLICIES[name]
    return policy(config) if snapshot is None else policy.restore(config, snapshot)


def schedule_for(config: RunConfig, snapshot: Snapshot | None = None) -> SchedulingPolicy:
    """The schedule of a run, from its start or from a checkpoint's snapshot."""
    group = config.samples_per_group
    schedule_config = ScheduleConfig(
        groups_per_step=config.groups_per_step,
        completions_per_group=group,
        max_staleness=config.max_staleness,
        reorder_window=config.window,
        steps=config.steps,
        # One group in reserve keeps slots and sessions full while an admission is on its way.
        capacity=max(config.sessions, group) + group,
        publish_every=config.publish_every,
        skip_no_signal=config.loss.skip_no_signal,
        max_dropped_in_a_row=DROPPED_PER_GROUP * config.groups_per_step,
        staleness_threshold=config.schedule.staleness_threshold or 0.0,
        queue_groups=config.schedule.queue_groups or 0,
    )
    return make_policy(config.schedule.policy, schedule_config, snapshot)
