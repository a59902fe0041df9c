"""Programs a second through the reward `code`, and what one costs; beside it a new interpreter for each.

    python benchmarks/code_verifier.py [--programs 400] [--workers 1 2] [--rounds 3]

Prints medians over rounds, with the least and the most: programs a second of a pool that has them all at once, and
milliseconds of one program alone, from submission to result. `stdin`: one test of standard input and output. `asserts`:
three tests in Python. `interpreter`: the same program by `python -I -S` in a child, with no barrier at all.
"""

from __future__ import annotations

import argparse
import select
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions
from slipstream.rewards.functions import make_term
from slipstream.rewards.pool import ScoringPool
from slipstream.rewards.protocol import RewardJob, WorkerSetup

PROGRAM = "n = int(input())\nprint(sum(i * i for i in range(n)))"
FUNCTION = "def squares(n):\n    return sum(i * i for i in range(n))"
TESTS: dict[str, tuple[str, Any]] = {
    "stdin": (PROGRAM, {"inputs": ["100\n"], "outputs": ["328350\n"]}),
    "asserts": (FUNCTION, [f"assert squares({n}) == {sum(i * i for i in range(n))}" for n in (1, 10, 100)]),
}


def run(pool: ScoringPool, kind: str, count: int) -> None:
    source, tests = TESTS[kind]
    for i in range(count):
        pool.submit(RewardJob(i, "", f"```python\n{source}\n```", [], "", None, {"tests": tests}))
    num_done = 0
    while True:
        for scored in pool.poll():
            assert scored.parts == [1.0], scored
            num_done += 1
        if num_done == count:
            return
        select.select(pool.fds(), [], [], 1.0)


def interpreters(count: int) -> None:
    for _ in range(count):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROGRAM], input="100\n", capture_output=True, text=True
        )
        assert done.stdout == "328350\n"


def seconds(call: Callable[..., None], *arguments: Any) -> float:
    start_s = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start_s


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):8.{digits}f}  ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    hardware = describe()
    print("$", shlex.join([sys.executable.rpartition("/")[2], *sys.argv]))
    print(f"{versions().commit}  {hardware.cpu}, {hardware.num_cores} cores")
    setup = WorkerSetup([make_term("code", {})], {}, memory_bytes=1 << 29, timeout_s=10.0)
    for num_workers in arguments.workers:
        pool = ScoringPool(setup, num_workers=num_workers)
        pool.wait_ready()
        print(f"{num_workers} workers; around programs: {', '.join(sorted(pool.isolation))}")
        for kind in TESTS:
            run(pool, kind, 20)
            many = [arguments.programs / seconds(run, pool, kind, arguments.programs) for _ in range(arguments.rounds)]
            alone = [1e3 * seconds(run, pool, kind, 1) for _ in range(20 * arguments.rounds)]
            print(f"  {kind:12} {spread(many, 0)} programs/s   alone {spread(alone, 1)} ms")
        pool.close()
    alone = [1e3 * seconds(interpreters, 1) for _ in range(20 * arguments.rounds)]
    print(f"  {'interpreter':12} {'':38} alone {spread(alone, 1)} ms")


if __name__ == "__main__":
    main()
