"""What it costs the ranks of a replica to agree before each step: a round of `generator/lockstep.py`, or an all-reduce.

    python benchmarks/rounds.py [--ranks 2 4] [--rounds 2000]

gloo processes of one machine with nothing else to do, in turns of 100; prints medians and 95th percentiles over turns,
in microseconds each.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from slipstream.observe.summary import versions

TURN = 100


class NoEngine:
    """What `LockStep.agree` reads of an engine."""

    version = num_live = num_waiting = 0


class NoPort:
    def get_nowait(self) -> None: ...

    def put(self, message: Any) -> None: ...


class NoSpans:
    """A timeline that nobody reads."""


def child(rank: int, world: int, store: str, num_rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from slipstream.core.clock import WallClock
    from slipstream.core.executor import Context
    from slipstream.core.rank_group import RankGroup
    from slipstream.core.ranks import rank_name
    from slipstream.generator.lockstep import LockStep

    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    ports: Any = {"commands": NoPort(), "relay": NoPort(), "staged": NoPort()}
    engine, spans, group = NoEngine(), NoSpans(), RankGroup.over(dist.group.WORLD)
    name = rank_name("generator-0", rank)
    together = LockStep(Context(name, Path(), ports, ports, spans, WallClock(), group=group))  # type: ignore[arg-type]
    together.rest(has_worked=True)
    numbers = torch.zeros(12, dtype=torch.int64)

    def meet() -> None:
        assert together.agree(None, engine) is not None  # type: ignore[arg-type]
        together.rest(has_worked=True)

    def all_reduce() -> None:
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        numbers.tolist()

    times: dict[str, list[float]] = {"round": [], "all-reduce": []}
    for turn in range(2 * num_rounds // TURN + 2):
        what, call = ("round", meet) if turn % 2 else ("all-reduce", all_reduce)
        started = time.perf_counter()
        for _ in range(TURN):
            call()
        if turn >= 2:  # the first ones connect
            times[what].append((time.perf_counter() - started) / TURN * 1e6)
    if rank == 0:
        for what, seen in times.items():
            late = statistics.quantiles(seen, n=20)[-1]
            print(f"| {world} | {what} | {statistics.median(seen):.0f} | {late:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--child", nargs=3, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds < 2 * TURN:
        parser.error(f"--rounds {args.rounds}: a 95 % needs at least {2 * TURN}")
    if args.child:
        rank, world, store = args.child
        child(int(rank), int(world), store, args.rounds)
        return
    print(" ".join(sys.argv), versions(), platform.machine(), f"{len(os.sched_getaffinity(0))} cores", sep="\n")
    print("| ranks | | median | 95 % |\n|---|---|---|---|", flush=True)
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            common = [sys.executable, __file__, "--rounds", str(args.rounds), "--child"]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            ranks = [
                subprocess.Popen([*common, str(rank), str(world), store], env=environment) for rank in range(world)
            ]
            codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"a rank failed: {codes}")


if __name__ == "__main__":
    main()
