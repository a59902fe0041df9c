"""One replica ten times slower than the other: nothing is lost, it gets little work, and who waits for whom is told."""

from __future__ import annotations

import pytest

from benchmarks.policies import trained_of
from slipstream.controller.schedule import Schedule
from slipstream.core.run_log import ScheduleConfig
from slipstream.plan.simulated_run import Costs, MadeUp, SimulatedSetup
from slipstream.plan.simulator import simulate

P, G, STEPS, SLOTS = 8, 4, 40, 16


def run(speeds, *, staleness, window=1):
    schedule = Schedule(
        ScheduleConfig(
            groups_per_step=P,
            completions_per_group=G,
            max_staleness=staleness,
            reorder_window=window,
            steps=STEPS,
            capacity=SLOTS + G,
        )
    )
    costs = Costs(
        decode=lambda replica, *_: 1 / speeds[replica], train=lambda _: {"train": 0.5}, score_s=0.01, stage_s=0.05
    )
    return simulate(
        schedule, SimulatedSetup(replicas=len(speeds), slots=SLOTS), MadeUp(lengths=lambda _: (100,) * G), costs
    )


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_a_slow_replica_costs_time_and_no_group(staleness):
    trace = run((100.0, 10.0), staleness=staleness)
    assert len(trace.timed) == STEPS
    assert trained_of(trace) == list(range(P * STEPS))  # each once, in order
    assert trace.outcome.staleness_max <= staleness
    assert not trace.dropped
    both_fast = run((100.0, 100.0), staleness=staleness)
    both_slow = run((10.0, 10.0), staleness=staleness)
    assert both_fast.wall_s < trace.wall_s < both_slow.wall_s
    assert trace.started[1] > 0


def test_the_freest_replica_gets_the_next_group():
    even = run((100.0, 100.0), staleness=4)
    uneven = run((100.0, 10.0), staleness=4)
    assert even.started[1] == pytest.approx(even.started.total() / 2, rel=0.1)
    # A tenth of the speed, and whatever it holds when the bound lets nothing start elsewhere.
    assert uneven.started[1] < 0.2 * uneven.started.total()


def test_who_waits_for_whom_is_told():
    """Between even replicas the trainer waits for generation; beside a slow one finished groups wait for its groups."""
    even = run((100.0, 100.0), staleness=1)
    uneven = run((100.0, 10.0), staleness=1)
    assert even.accounting["trainer"].get("wait_straggler", 0.0) < 0.1 * even.wall_s
    assert uneven.accounting["trainer"].get("wait_straggler", 0.0) > 0.5 * uneven.wall_s


def test_a_wider_window_waits_less():
    narrow = run((100.0, 10.0), staleness=4)
    trace = run((100.0, 10.0), staleness=4, window=2 * P)
    assert sorted(trained_of(trace)) == list(range(P * STEPS))
    assert trace.outcome.staleness_max <= 4
    assert trace.wall_s <= narrow.wall_s
    assert trace.started.total() == P * STEPS


def test_a_replica_that_slow_is_worse_than_none():
    """What the bound costs here, said openly: every step waits for the groups that the slow one was given."""
    alone = run((100.0,), staleness=2)
    beside_slow = run((100.0, 10.0), staleness=2)
    assert 2 * alone.wall_s < beside_slow.wall_s < 3 * alone.wall_s
