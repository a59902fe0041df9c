"""Scheduling policies on one workload, in virtual time: what each wastes, how stale it trains, and what it leaves out.

    python benchmarks/policies.py [--steps 200] [--seeds 3] [--max-staleness 2]

Lengths are lognormal with a heavy tail; two replicas, one at half speed; generation and training take about as long.
Every policy gets the same completions: a group's lengths depend on its ordinal alone. The workload is the file's.
`sample_budget` has staleness_threshold 0.5, `finish_order` a queue of k P groups. Mean over the seeds, and in brackets
half the range.

    tokens wasted   generated and discarded for their age, of all that were generated
    left            generated and untrained at the end of the run, of all: what an endless run would train or discard
    length bias     mean length of the trained groups against that of all that were admitted and have signal
    longest 1 %     which share of their longest hundredth was trained (100: none left out)
    idle            share of the time that trainer, and decode slots, had nothing to do
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import mean

import numpy as np

from slipstream.controller.policies import POLICIES, make_policy
from slipstream.core.run_log import ScheduleConfig
from slipstream.plan.simulated_run import Costs, MadeUp, Simulated, SimulatedSetup
from slipstream.plan.simulator import simulate

GROUPS, COMPLETIONS = 16, 8
SLOTS = 64


SPEEDS = (100.0, 50.0)  # tokens per second of a row, however many there are
STEP_S = 4.0


def steps_of(found: Simulated) -> list[tuple[int, ...]]:
    """The groups of each step."""
    return [step.ordinals for step in found.timed]


def trained_of(found: Simulated) -> list[int]:
    """The groups that were trained, in order."""
    return [ordinal for step in found.timed for ordinal in step.ordinals]


def slot_idle_frac(found: Simulated) -> float:
    """Share of decode slots times time that was empty. Both are sums of many parts, and may round apart."""
    return max(0.0, 1 - found.slot_busy_s / max(found.slot_s, 1e-9))


def heavy_tailed(
    seed: int, *, completions: int, median: float = 200.0, sigma: float = 1.0, longest: int = 4000
) -> Callable[[int], tuple[int, ...]]:
    """Lognormal lengths, cut at `longest`: at sigma = 1 the mean is 1.65 medians, and one in 100 beyond 10 medians."""

    def lengths(ordinal: int) -> tuple[int, ...]:
        drawn = np.random.default_rng((seed, ordinal)).lognormal(np.log(median), sigma, completions)
        return tuple(int(length) for length in np.clip(drawn, 1, longest))

    return lengths


def workload(seed: int) -> MadeUp:
    return MadeUp(
        lengths=heavy_tailed(seed, completions=COMPLETIONS),
        has_signal=lambda ordinal: (ordinal * 7919 + seed) % 5 != 0,  # one in five is without signal
    )


COSTS = Costs(
    decode=lambda replica, *_: 1 / SPEEDS[replica], train=lambda _: {"train": STEP_S}, score_s=0.1, stage_s=0.5
)
SETUP = SimulatedSetup(replicas=len(SPEEDS), slots=SLOTS)


def config(policy: str, *, steps: int, max_staleness: int, reorder_window: int) -> ScheduleConfig:
    return ScheduleConfig(
        groups_per_step=GROUPS,
        completions_per_group=COMPLETIONS,
        max_staleness=1 if policy == "one_step" else max_staleness,
        reorder_window=reorder_window,
        steps=steps,
        capacity=SLOTS + COMPLETIONS,
        staleness_threshold=0.5,
        queue_groups=max(1, max_staleness) * GROUPS,
    )


def numbers(trace: Simulated, lengths) -> dict[str, float]:
    """The columns of one run."""
    without = {ordinal for ordinal, cause in trace.dropped.items() if cause != "stale"}
    size = {ordinal: sum(lengths(ordinal)) for ordinal in range(trace.started.total()) if ordinal not in without}
    trained = trained_of(trace)
    longest = sorted(size, key=lambda ordinal: -size[ordinal])[: max(1, len(size) // 100)]
    return {
        "steps/h": len(trace.timed) / trace.wall_s * 3600,
        "tokens wasted %": 100 * trace.stale_tokens / trace.generated_tokens,
        "left %": 100 * trace.left_tokens / trace.generated_tokens,
        "staleness mean": trace.outcome.staleness_mean,
        "max": float(trace.outcome.staleness_max),
        "length bias %": 100 * (mean(size[o] for o in trained) / mean(size.values()) - 1),
        "longest 1 % trained": 100 * len(set(longest) & set(trained)) / len(longest),
        "trainer idle %": 100 * trace.outcome.idle["trainer"],
        "slots idle %": 100 * slot_idle_frac(trace),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-staleness", type=int, default=2)
    options = parser.parse_args()
    k = options.max_staleness
    rows = [(name, name, 1) for name in POLICIES]
    rows.insert(1, (f"oldest_first, W = {GROUPS}", "oldest_first", GROUPS))
    first = True
    for label, policy, window in rows:
        found = []
        for seed in range(options.seeds):
            work = workload(seed)
            dials = config(policy, steps=options.steps, max_staleness=k, reorder_window=window)
            trace = simulate(make_policy(policy, dials), SETUP, work, COSTS)
            found.append(numbers(trace, work.lengths))
        if first:
            print("| policy | " + " | ".join(found[0]) + " |\n|---|" + "---:|" * len(found[0]))
            first = False
        cells = [[row[name] for row in found] for name in found[0]]
        texts = [f"{mean(values):.2f} ({(max(values) - min(values)) / 2:.2f})" for values in cells]
        print(f"| {label} | " + " | ".join(texts) + " |")


if __name__ == "__main__":
    main()
