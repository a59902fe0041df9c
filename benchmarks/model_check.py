"""Goes through all interleavings of small instances of the schedule; prints how many states there are.

    python benchmarks/model_check.py [--faults 1] [--steps 2] [--stride 1]

Every P, k <= 2, all W and m that are live for them, G <= 2, one and two replicas; `--faults` drops, replica losses
and restores each may happen. Rows add up the instances of a kind. Exit code 1, and the shortest way to it, where a
promise is broken. With `--deadlocks`: W one above the limit, where every run must get stuck.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import replace

from exploration import Explored, Instance, explore, instances


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--stride", type=int, default=1, help="only every n-th instance")
    parser.add_argument("--deadlocks", action="store_true")
    options = parser.parse_args()
    faults = 0 if options.deadlocks else options.faults
    base = Instance(steps=options.steps, drops=faults, losses=faults, restores=faults)
    chosen = instances(base)[:: options.stride]
    if options.deadlocks:
        chosen = [
            replace(one, reorder_window=one.reorder_window + 1, steps=max(options.steps, one.publish_every))
            for one in chosen
            if one.reorder_window == (one.max_staleness - one.publish_every + 1) * one.groups_per_step + 1
        ]
    rows: dict[tuple[int, int], list[Explored]] = defaultdict(list)
    started_s = time.perf_counter()
    for instance in chosen:
        found = explore(instance)
        rows[instance.groups_per_step, instance.replicas].append(found)
        is_as_said = found.num_ends == 0 and found.num_stuck > 0 if options.deadlocks else found.holds
        if not is_as_said:
            print(f"{instance}: {found.broken}\n  " + "\n  ".join(found.way))
            return 1
    print("| P | replicas | instances | states | transitions | longest run, events | ends | stuck |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for (groups, replicas), found in sorted(rows.items()):
        sums = [
            sum(getattr(one, name) for one in found)
            for name in ("num_states", "num_transitions", "num_ends", "num_stuck")
        ]
        states, transitions, ends, stuck = (f"{number:,}" for number in sums)
        longest = max(one.longest_run for one in found)
        print(f"| {groups} | {replicas} | {len(found)} | {states} | {transitions} | {longest} | {ends} | {stuck} |")
    print(f"\n{len(chosen)} instances in {time.perf_counter() - started_s:.0f} s, steps = {options.steps}, ", end="")
    print(f"faults of each kind: {faults}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
