"""How far short rehearsals of a plan, and the search's rules of thumb, are from long ones.

    python benchmarks/rehearsal.py [--steps 60]

For each model and bound k the best configuration that the search finds (`plan/search.py`): the step time by its rules
of thumb, by the rehearsal that `slipstream plan` makes (`plan/planner.py`), and by one of so many steps. Lengths:
mean 1024, p99 four means, lognormal; 512 prompts x 4 completions. Deterministic.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time

from slipstream.observe.summary import versions
from slipstream.plan import planner
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import cluster
from slipstream.plan.layouts import Workload
from slipstream.plan.lengths import lengths_with_tail
from slipstream.plan.question import ARCHITECTURES
from slipstream.plan.search import Search, default_space

CASES = (("llama-3.1-8b", 16), ("llama-3.1-70b", 128), ("llama-3.1-405b", 1024))
BOUNDS = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of the long rehearsal")
    arguments = parser.parse_args()
    print(f"command: python {shlex.join(sys.argv)}\ncommit: {versions().commit}\n")
    print("| model | GPUs | k | rules of thumb | rehearsed | long | off | staleness, rehearsed | long | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    workload = Workload(groups=512, group_size=4, lengths=lengths_with_tail(512, 1024, 4096, 8192))
    for name, devices in CASES:
        model = CostModel(ARCHITECTURES[name], cluster("h100", devices), workload)
        space = default_space(model.model, model.cluster, workload, precisions=("bfloat16", "fp8"), max_stages=1)
        search = Search(model, space)
        for bound in BOUNDS:
            found = next(iter(search.asynchronous(bound).values()))
            started_s = time.process_time()
            short = planner.rehearse(model, found.plan, bound)
            cpu_s = time.process_time() - started_s
            long = planner.rehearse(model, found.plan, bound, steps=arguments.steps)
            print(
                f"| {name} | {devices} | {bound} | {found.seconds:.3g} s | {short.step_s:.3g} s | {long.step_s:.3g} s "
                f"| {short.step_s / long.step_s - 1:+.1%} | {short.staleness_mean:.1f} | {long.staleness_mean:.1f} "
                f"| {cpu_s:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
