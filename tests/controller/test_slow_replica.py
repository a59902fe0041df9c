"""One replica ten times slower than the other: nothing is lost, it gets little work, and who waits for whom is told."""

from __future__ import annotations

from collections import Counter

import pytest

from slipstream.controller import simulate
from slipstream.controller.machine import ScheduleConfig
from slipstream.controller.schedule import Schedule
from slipstream.controller.simulate import Workload
from slipstream.core.types import StartGroup

P, G, STEPS, SLOTS = 8, 4, 40, 16


class Observed(Schedule):
    """Notes where groups start, and how long the trainer waits for what."""

    def __init__(self, config):
        super().__init__(config)
        self.started, self.waited_s = Counter(), Counter()
        self.simulation, self.last_s = None, 0.0

    def apply(self, event):
        self.waited_s[self.waits_for()] += self.simulation.now_s - self.last_s
        self.last_s = self.simulation.now_s
        commands = super().apply(event)
        self.started.update(command.replica for command in commands if isinstance(command, StartGroup))
        return commands


def run(speeds, *, staleness, window=1):
    schedule = Observed(
        ScheduleConfig(
            groups_per_step=P,
            completions_per_group=G,
            max_staleness=staleness,
            reorder_window=window,
            steps=STEPS,
            capacity=SLOTS + G,
        )
    )
    work = Workload(lengths=lambda _: (100,) * G, speeds=speeds, slots=SLOTS, step_s=0.5, score_s=0.01, swap_s=0.05)
    schedule.simulation = simulate._Simulation(schedule, work)
    return schedule, schedule.simulation.run()


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
def test_a_slow_replica_costs_time_and_no_group(staleness):
    schedule, trace = run((100.0, 10.0), staleness=staleness)
    assert len(trace.steps) == STEPS
    assert trace.trained == list(range(P * STEPS))  # each once, in order
    assert trace.staleness_max <= staleness
    assert not trace.dropped
    _, both_fast = run((100.0, 100.0), staleness=staleness)
    _, both_slow = run((10.0, 10.0), staleness=staleness)
    assert both_fast.wall_s < trace.wall_s < both_slow.wall_s
    assert schedule.started[1] > 0


def test_the_freest_replica_gets_the_next_group():
    even, _ = run((100.0, 100.0), staleness=4)
    uneven, _ = run((100.0, 10.0), staleness=4)
    assert even.started[1] == pytest.approx(even.started.total() / 2, rel=0.1)
    # A tenth of the speed, and whatever it holds when the bound lets nothing start elsewhere.
    assert uneven.started[1] < 0.2 * uneven.started.total()


def test_who_waits_for_whom_is_told():
    """Between even replicas the trainer waits for generation; beside a slow one finished groups wait for its groups."""
    even, even_trace = run((100.0, 100.0), staleness=1)
    uneven, uneven_trace = run((100.0, 10.0), staleness=1)
    assert even.waited_s["straggler"] < 0.1 * even_trace.wall_s
    assert uneven.waited_s["straggler"] > 0.5 * uneven_trace.wall_s


def test_a_wider_window_waits_less():
    _, narrow = run((100.0, 10.0), staleness=4)
    wide, trace = run((100.0, 10.0), staleness=4, window=2 * P)
    assert sorted(trace.trained) == list(range(P * STEPS))
    assert trace.staleness_max <= 4
    assert trace.wall_s <= narrow.wall_s
    assert wide.started.total() == P * STEPS


def test_a_replica_that_slow_is_worse_than_none():
    """What the bound costs here, said openly: every step waits for the groups that the slow one was given."""
    _, alone = run((100.0,), staleness=2)
    _, beside_slow = run((100.0, 10.0), staleness=2)
    assert 2 * alone.wall_s < beside_slow.wall_s < 3 * alone.wall_s
