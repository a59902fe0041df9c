"""What a run waits for before its first decode step, and what its processes compute until then.

    python benchmarks/startup.py [--runs 3] [--against PYTHON] [RECIPE] [--a.b value ...]

Runs RECIPE (the quickstart) for one step, with one step of warm start, and prints for each run the seconds from the
command to the first decode step and to its end, and the CPU seconds of all its processes; then the seconds of `--help`
and `import slipstream`. `--against` names the interpreter of another installation: runs of both are made in turns, as
these machines are noisy, and the last line is the ratio of their medians.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from slipstream.observe.hardware import describe
from slipstream.observe.timeline import Slice, read_timeline, timeline_path

SMALL = ["--steps", "1", "--warm-start.steps", "1", "--eval.num-prompts", "8"]
DECODING = ("decode", "prefill", "evaluate")
COLUMNS = ("first decode, s", "end, s", "CPU, s", "--help, s", "import, s")


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def seconds_of(*command: str) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start_s


def first_decode_ns(run_dir: Path) -> int:
    """When a generator began to decode, on the clock that processes of one boot share."""
    slices = [record for record in read_timeline(timeline_path(run_dir, "generator-0")) if isinstance(record, Slice)]
    return min(piece.start_ns for piece in slices if piece.state in DECODING)


def measure(python: str, recipe: list[str]) -> tuple[float, ...]:
    """One run's COLUMNS."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        before_s, start_ns = children_s(), time.monotonic_ns()
        end_s = seconds_of(python, "-m", "slipstream", "run", *recipe, "--out", str(run_dir), *SMALL)
        cpu_s = children_s() - before_s
        first_s = (first_decode_ns(run_dir) - start_ns) * 1e-9
    help_s = seconds_of(python, "-m", "slipstream", "--help")
    return first_s, end_s, cpu_s, help_s, seconds_of(python, "-c", "import slipstream")


def row(name: str, values: tuple[float, ...]) -> None:
    print(f"{name:<12}" + "".join(f"{value:>17.2f}" for value in values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="of each installation")
    parser.add_argument("--against", metavar="PYTHON", help="interpreter of another installation")
    options, recipe = parser.parse_known_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print(f"commit {commit.strip() or 'unknown'}, load {os.getloadavg()[0]:.1f}")
    for name, value in describe().lines().items():
        print(f"{name:<10} {value}")
    print(f"{'':<12}" + "".join(f"{column:>17}" for column in COLUMNS))
    pythons = {"this": sys.executable} | ({"other": options.against} if options.against else {})
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in pythons}
    for _ in range(options.runs):
        for name, python in pythons.items():
            found[name].append(measure(python, recipe or ["quickstart"]))
            row(name, found[name][-1])
    medians = {name: tuple(map(statistics.median, zip(*rows, strict=True))) for name, rows in found.items()}
    for name, values in medians.items():
        row(f"{name}, median", values)
    if "other" in medians:
        row("this / other", tuple(a / b for a, b in zip(medians["this"], medians["other"], strict=True)))


if __name__ == "__main__":
    main()
