"""All interleavings of small instances, and whether the checker would notice if the rules were other ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from covering import with_slow

from benchmarks.exploration import Explored, Instance, explore, instances
from slipstream.controller.schedule import Schedule, SchedulingPolicy

FAULTS = {"drops": 1, "losses": 1, "restores": 1}


def report(name: str, found: list[Explored], record_property) -> None:
    """`pytest -s` shows it, and a JUnit report keeps it."""
    states, transitions = sum(one.num_states for one in found), sum(one.num_transitions for one in found)
    record_property("states", states)
    print(f"\n{name}: {len(found)} instances, {states:,} states, {transitions:,} transitions")  # noqa: T201


def check_all(name: str, chosen: list[Instance], record_property) -> None:
    found = []
    for instance in chosen:
        one = explore(instance)
        assert one.holds, f"{instance}: {one.broken}\n" + "\n".join(one.way)
        assert one.num_ends > 0
        found.append(one)
    report(name, found, record_property)


def test_a_run_small_enough_to_count_by_hand():
    """Twice: (started, finished, in training), where the score may overtake the news; a join, a swap, and the end."""
    found = explore(Instance(groups_per_step=1, max_staleness=0, completions_per_group=1, steps=2))
    assert found == Explored(num_states=9, num_transitions=10, num_ends=1, num_stuck=0, longest_run=8)


@pytest.mark.parametrize("end", with_slow([4], [8]))
def test_every_order_of_events_without_faults(end, record_property):
    chosen = instances(Instance(steps=2))
    small = [one for one in chosen if one.groups_per_step * one.replicas * one.completions_per_group < end]
    check_all("no faults", small, record_property)


def test_every_order_of_events_with_a_drop_a_loss_and_a_restore(record_property):
    chosen = [one for one in instances(Instance(steps=2, **FAULTS)) if one.groups_per_step * one.replicas == 1]
    pairs = Instance(groups_per_step=2, max_staleness=1, reorder_window=2, replicas=2, steps=1, **FAULTS)
    check_all("with faults", [*chosen, pairs], record_property)


@pytest.mark.slow
def test_every_order_of_events_at_length(record_property):
    check_all("no faults, 3 steps", instances(Instance(steps=3)), record_property)
    chosen = [one for one in instances(Instance(steps=2, **FAULTS)) if one.groups_per_step * one.replicas < 4]
    check_all("with faults", chosen, record_property)


def test_a_window_above_the_limit_always_gets_stuck(record_property):
    """W <= (k - m + 1) P + 1 is necessary: no order of events gets a run of m or more steps to its end."""
    found = []
    for instance in instances(Instance(steps=3)):
        k, m, groups = instance.max_staleness, instance.publish_every, instance.groups_per_step
        limit = (k - m + 1) * groups + 1
        if instance.reorder_window == limit and instance.completions_per_group == 1:
            one = explore(replace(instance, reorder_window=limit + 1))
            assert one.num_ends == 0
            assert one.num_stuck > 0
            assert one.broken.startswith("deadlock")
            found.append(one)
            short = replace(instance, reorder_window=limit + 1, steps=m - 1)
            assert m == 1 or explore(short).num_ends > 0, "a run of m - 1 steps is not stuck"
    report("stuck", found, record_property)


def test_too_little_capacity_for_a_group_gets_stuck():
    assert explore(Instance(completions_per_group=2, capacity=1)).broken.startswith("deadlock")


WIDE = Instance(groups_per_step=2, max_staleness=1, reorder_window=2, replicas=2, steps=2)


def admits_one_place_more(self, place, version):
    return (place + self.config.reorder_window - 2) // self.config.groups_per_step - version <= (
        self.config.max_staleness
    )


def forgets_the_window(self):
    return self._oldest_batch(window=None)


def places_by_ordinal(self, ordinal):
    return ordinal


def loses_only_what_is_unsampled(self, replica):
    sampled = {o for o, group in self.in_flight.items() if group.replica == replica and not group.unfinished}
    kept_lose(self, replica)
    self.readmit = [o for o in self.readmit if o not in sampled]


def forgets_what_was_ready(self):
    snapshot = kept_snapshot(self)
    return type(snapshot)(
        next_ordinal=snapshot.next_ordinal,
        steps_done=snapshot.steps_done,
        dropped=snapshot.dropped,
        dropped_in_a_row=0,
        num_failed=0,
        readmit=[o for o in snapshot.readmit if o not in snapshot.scored],
        scored=snapshot.scored,
    )


kept_snapshot = SchedulingPolicy.snapshot
kept_lose = SchedulingPolicy._lose


def ignores_capacity(self):
    self.config = replace(self.config, capacity=100)
    return kept_admit(self)


kept_admit = SchedulingPolicy._admit


@pytest.mark.parametrize(
    ("method", "broken", "instance", "what"),
    [
        ("is_admissible", admits_one_place_more, replace(WIDE, steps=3), "bound"),
        ("_next_batch", forgets_the_window, WIDE, "order"),
        ("place", places_by_ordinal, Instance(groups_per_step=2, max_staleness=0, drops=1), "deadlock"),
        ("_lose", loses_only_what_is_unsampled, Instance(losses=1), "order|nobody waits for|deadlock"),
        ("snapshot", forgets_what_was_ready, Instance(restores=1), "once|nobody waits for|deadlock|lost"),
        ("_admit", ignores_capacity, Instance(capacity=1, max_staleness=2), "capacity"),
    ],
)
def test_a_broken_rule_is_found(monkeypatch, method, broken, instance, what):
    assert explore(instance).holds
    monkeypatch.setattr(Schedule, method, broken)
    found = explore(instance)
    assert not found.holds
    assert any(found.broken.startswith(word) or word in found.broken for word in what.split("|")), found
    assert found.way, "and how it comes to that"
