"""What a checkpoint costs: its size, and how long the trainer stands still for it.

    python benchmarks/checkpoint_cost.py [RECIPE] [FOLDER]

RECIPE is a recipe's name or path (quickstart), with a trainer of one CPU rank; FOLDER is on the disk to be measured
(a temporary one). Saves ten times after a step's worth of moments, as the trainer does: write, sync, rename.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from slipstream.core.recipes import resolve
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions
from slipstream.trainer.policy import Policy

REPEATS = 10


def main(recipe: str = "quickstart", folder: str | None = None) -> None:
    config = resolve(recipe)
    policy = Policy(config)
    seconds = []
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for step in range(REPEATS):
            started_s = time.perf_counter()
            policy.save(Path(name) / f"step_{step}", step=step, extra={}, others={})
            policy.saved(wait=True)
            seconds.append(time.perf_counter() - started_s)
        newest = Path(name) / f"step_{REPEATS - 1}"
        size = sum(file.stat().st_size for file in newest.iterdir())
    told = versions()
    out = sys.stdout.write
    out(f"python {' '.join(sys.argv)}\n")
    out(f"commit {told.commit}, torch {told.torch}, {describe()}\n")
    out(f"{recipe}: {policy.num_params:,} parameters, a checkpoint of {size / 1e6:.1f} MB\n")
    out(
        f"saved in {statistics.median(seconds) * 1e3:.0f} ms (median of {REPEATS}; "
        f"{min(seconds) * 1e3:.0f} to {max(seconds) * 1e3:.0f})\n"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
