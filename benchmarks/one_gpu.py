"""One GPU for both sides: steps by turns, overlapped, and overlapped with CUDA's Multi-Process Service.

    python benchmarks/one_gpu.py [--size medium] [--steps 14] [--out runs/one_gpu] [--ways turns overlap mps]

A few steps of the experiment `gpu` (`experiments/gpu/README.md`): its task, whose answers are long-tailed, a policy of
2.6, 27 or 218 M parameters, warm-started once, `max_staleness` 4 where both sides overlap. For each way: the median of
a step's seconds without the first two, completions/s of the whole run, mean staleness, and the reward at the end. `mps`
starts the daemon for itself, in a folder of its own, and ends it; it changes nothing of the GPU's settings.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.async_vs_sync.task import write
from experiments.gpu.runs import CONTINUOUS, SIZES, SYNC, run, start
from experiments.lab import Lab, metrics, summary
from slipstream.observe.hardware import describe

WAYS = {"turns": SYNC, "overlap": CONTINUOUS, "mps": CONTINUOUS}
COLD_STEPS = 2
DAEMON_S = 20.0


@contextmanager
def service() -> Iterator[None]:
    """CUDA's Multi-Process Service, for processes that begin inside."""
    daemon = shutil.which("nvidia-cuda-mps-control")
    if daemon is None:
        raise SystemExit("nvidia-cuda-mps-control is not on the PATH: leave out --ways mps")
    with tempfile.TemporaryDirectory() as folder:
        own = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in own.values():
            Path(path).mkdir()
        os.environ |= own
        try:
            subprocess.run([daemon, "-d"], check=True, timeout=DAEMON_S)
            yield
        finally:
            subprocess.run([daemon], input="quit\n", text=True, timeout=DAEMON_S)
            for name in own:
                del os.environ[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("runs/one_gpu"))
    given = parser.parse_args()
    if given.steps <= COLD_STEPS:
        parser.error(f"--steps must be more than {COLD_STEPS}, which are not counted")
    print(describe())
    lab = Lab(given.out, say=lambda line: print(line, file=sys.stderr, flush=True))
    dataset = write("tailed", given.out)
    model = lab.run(start(given.size, dataset)) / "model"
    print("| way | s a step | completions/s | staleness | reward |\n|---|---|---|---|---|")
    for way in given.ways:
        spec = run((f"{WAYS[way]}, {given.size}", 0), dataset=dataset, start=model).with_overrides(steps=given.steps)
        with service() if way == "mps" else nullcontext():
            folder = lab.run(replace(spec, name=f"one gpu {way} {given.size}"))
        told, steps = summary(folder), [line for line in metrics(folder) if "step_s" in line]
        print(
            f"| {way} | {statistics.median(line['step_s'] for line in steps[COLD_STEPS:]):.2f} "
            f"| {told['throughput']['completions_per_s']:,.0f} | {told['staleness']['mean']:.2f} "
            f"| {steps[-1]['reward']:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
