"""A day of a 10,000-GPU run in virtual time: how many decisions of the real schedule that is, and how long it takes.

    python benchmarks/simulator_speed.py [--hours 24] [--max-staleness 4] [--profile]

Llama 3.1 405B on 10,000 H100s, half of them decoding in fp8 by the cost model's times (`plan/cost_model.py`), prompts
of 1,000 tokens and completions with a mean of 9,000 and a 99th percentile of 40,000 tokens. Events are those that the
schedule takes: a completion is finished, a group scored, a step done, a version swapped in. CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import sys
import time

from slipstream.controller.policies import make_policy
from slipstream.core.run_log import ScheduleConfig
from slipstream.observe.summary import versions
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import cluster
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, TrainerLayout, Workload
from slipstream.plan.lengths import lengths_with_tail
from slipstream.plan.planner import simulated_plan
from slipstream.plan.question import ARCHITECTURES
from slipstream.plan.simulated_run import MadeUp, Simulated
from slipstream.plan.simulator import simulate

GROUPS, COMPLETIONS, SLOTS = 1024, 8, 64
LENGTHS = lengths_with_tail(1000.0, 9000.0, 40_000.0, 65_536)
PLAN = AsynchronousPlan(
    trainer=TrainerLayout(devices=4992, tensor_parallel=8, microbatch=1.0),
    generator=GeneratorLayout(devices=5008, tensor_parallel=8, slots=SLOTS, precision="fp8"),
)


def run(steps: int, max_staleness: int) -> Simulated:
    workload = Workload(groups=GROUPS, group_size=COMPLETIONS, lengths=LENGTHS)
    setup, costs = simulated_plan(CostModel(ARCHITECTURES["llama-3.1-405b"], cluster("h100", 10_000), workload), PLAN)
    config = ScheduleConfig(
        groups_per_step=GROUPS,
        completions_per_group=COMPLETIONS,
        max_staleness=max_staleness,
        reorder_window=GROUPS,
        steps=steps,
        capacity=SLOTS + COMPLETIONS,
    )
    drawn = LENGTHS.drawn(0, steps * GROUPS, COMPLETIONS)
    return simulate(
        make_policy("oldest_first", config), setup, MadeUp(lengths=drawn.__getitem__, prompt_tokens=1000), costs
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--max-staleness", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    print(" ".join(sys.argv), versions(), platform.machine(), sep="\n")
    warm = run(12, options.max_staleness)
    steps = max(12, round(options.hours * 3600 / warm.outcome.step_s))
    profile = cProfile.Profile()
    started_s = time.process_time()
    found = profile.runcall(run, steps, options.max_staleness) if options.profile else run(steps, options.max_staleness)
    cpu_s = time.process_time() - started_s
    print(
        f"{len(found.timed)} steps of {GROUPS} x {COMPLETIONS} in {found.wall_s / 3600:.1f} h: "
        f"{found.outcome.step_s:.0f} s a step, {found.outcome.trained_tokens_per_s:,.0f} tokens/s, "
        f"trainer idle {found.outcome.idle['trainer']:.1%}, generators {found.outcome.idle['generator']:.1%}, "
        f"staleness {found.outcome.staleness_mean:.2f}"
    )
    print(
        f"{found.num_events:,} events, {found.num_jumps:,} jumps of the clock in {cpu_s:.1f} s of CPU: "
        f"{1e6 * cpu_s / found.num_events:.1f} us an event, 1,000,000 in {1e6 * cpu_s / found.num_events:.1f} s"
    )
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
