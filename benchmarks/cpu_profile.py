"""Where the CPU time of a run's processes goes, by function: a sampling profile of all its executors at once.

    python benchmarks/cpu_profile.py [--top 12] [--every-s 0.002] [RECIPE] [--a.b value ...]

Each process looks at the stack of its main thread every so many seconds of its own CPU time (`profile_hook/`), so one
that sleeps is not disturbed, and one that has to wait for a core is not sampled more. Printed are for each process the
dearest functions of this package in microseconds per completion: *own* is the time in which the function was the
innermost one of the package (what it calls in libraries included), *inclusive* that in which it was on the stack. Long
products are one sample each, weighted by the CPU time since the last one. Threads beside the main one, workers in the
sandbox, and the last samples of a process (fewer than 100) are left out; the total of all processes has them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slipstream
from benchmarks.overhead import num_completions, train
from slipstream.observe.hardware import describe

HOOK = Path(__file__).parent / "profile_hook"
PROCESS = "slipstream.controller.process"
NEARLY_ALL = 0.9
"""A function with more of a process's time contains all the rest, and says nothing."""


def name_of(command: list[str]) -> str:
    """The executor that a command line starts, or the controller; any other by its module or program."""
    if PROCESS in command[:-1]:
        return Path(command[command.index(PROCESS) + 1]).stem
    if "slipstream.cli" in command:
        return "controller"
    return next((word for word in command[1:] if not word.startswith("-")), "python")


def print_profile(told: Mapping[str, Any], completions: int, top: int) -> None:
    """Print the dearest functions of a process by own and by inclusive time."""
    total_s = sum(told["own"].values())
    print(f"\n{name_of(told['command'])}: {total_s:.2f} s sampled of {told['thread_s']:.2f} s of the main thread")
    for kind in ("own", "inclusive"):
        found = [(function, seconds) for function, seconds in told[kind].items() if seconds < NEARLY_ALL * total_s]
        dearest = sorted(found, key=lambda one: -one[1])[:top]
        print(f"  {kind}, us per completion")
        for function, seconds in dearest:
            print(f"    {1e6 * seconds / completions:9.1f}  {seconds / total_s:6.1%}  {function}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("--every-s", type=float, default=0.002)
    options, arguments = parser.parse_known_args()
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "profiles"
        folder.mkdir()
        run = Path(scratch) / "run"
        told = {
            "PYTHONPATH": os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PROFILE_FOLDER": str(folder),
            "PROFILE_PACKAGE": str(Path(slipstream.__file__).parent),
            "PROFILE_EVERY_S": str(options.every_s),
        }
        total_s = train(run, arguments, **told)
        completions = num_completions(run)
        print(f"{completions:,} completions, {total_s:.1f} s of CPU in all processes")
        found = [json.loads(file.read_text()) for file in folder.glob("*.json")]
        for told in sorted(found, key=lambda one: -one["thread_s"]):
            if told["own"]:
                print_profile(told, completions, options.top)


if __name__ == "__main__":
    main()
