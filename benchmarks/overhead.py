"""What it costs to join generators and trainer, and to watch them: scheduling, channels, and the timeline.

    python benchmarks/overhead.py [RECIPE] [--a.b value ...]        trains, then reads the run's accounting
    python benchmarks/overhead.py --replicas 1,2,8 [RECIPE] ...     the same with so many replicas, run after run
    python benchmarks/overhead.py --run DIR                         reads that of a run that is there
    python benchmarks/overhead.py --timeline [--pairs 5] [RECIPE] [--a.b value ...]

First come the CPU seconds per completion, by process and by kind of work, over all threads of each process. A process
knows its own by state (`timeline_hook/`); what the run's other processes take (the one that imports, the workers of
rewards) is the rest of what the system counts. What is neither model, sampling nor scoring is what a completion costs
besides arithmetic; other processes are not in it, since scoring and messages cannot be told apart in them. Beside it is
how many completions a second the controller's own seconds, less start-up and sleep, would allow for.

The trainer's critical path is the time from the start of its first step to the end of its last. Of that time it works,
waits for data that does not exist yet (generation, rewards, a straggler), or is held up by what joins the two: taking
and handing on messages (`receive`, `send`), the loop around its work (`overhead`), waiting for a command although its
groups are ready (`wait_nothing`). Asynchronous RLHF (arXiv:2410.18252, section 5) lost 17 % of a step there.

The processor's share are the seconds in which some process takes, sends or decides, over all cores. ZeroMQ's own
threads are no states of a timeline. Last comes the size of the run's trace.

`--timeline` says what the timeline itself costs, in two ways. First by counting: so many spans and lines a second in
each process of a run, times what one of each costs in a loop that does nothing else. Then by leaving it out: runs in
pairs, one with the timeline and one without, in turns. Staleness is 0 there, so that both of a pair do the same work,
bit for bit. Printed are the CPU seconds of all processes and the median step; on a machine that does other things as
well, or with few pairs, noise is larger than what is looked for. `timeline_hook/` does both to an unchanged
installation. What the controller alone carries is in `fleet.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from slipstream.controller.placement import num_cores
from slipstream.core.clock import WallClock
from slipstream.core.held_out import GREEDY_PREFIX, SAMPLED_PREFIX, in_metrics
from slipstream.core.run_log import read_decisions, read_metrics
from slipstream.core.types import CompletionFinished
from slipstream.observe.chrome_trace import merge_timelines
from slipstream.observe.hardware import describe
from slipstream.observe.states import kind
from slipstream.observe.timeline import (
    Slice,
    Timeline,
    account_file,
    process_files,
    read_timeline,
    timeline_path,
)

DATA = ("wait_generation", "wait_rewards", "wait_straggler")
JOINING = ("receive", "send", "schedule", "overhead")
HOOK = Path(__file__).parent / "timeline_hook"
KINDS = {  # of CPU seconds -> the states; the first three are the work itself
    "model": ("model", "forward_backward", "optimizer", "reference", "proximal", "values", "warm_start", "train"),
    "sampling": ("sample",),
    "scoring": ("score",),
    "engine": ("decode", "prefill", "re_prefill", "evaluate", "drain"),
    "batch": ("collate",),
    "weights": ("publish", "stage", "swap"),
    "channel": ("send", "receive"),
    "schedule": ("schedule",),
    "log": ("record", "checkpoint", "export"),
    "loop": ("overhead",),
    "asleep": (),  # the other states: threads that work while the process waits, and what waking costs
    "start-up": ("start_up", "shut_down"),
}
EVALUATED = (GREEDY_PREFIX, SAMPLED_PREFIX)
ARITHMETIC = ("model", "sampling", "scoring")
SAME_WORK = ["--max-staleness", "0", "--weight-update", "between_batches"]


def loop_of(run_dir: Path) -> tuple[float, float, int]:
    """When the first step began and the last one ended, and how many there were."""
    steps = [
        record
        for record in read_timeline(timeline_path(run_dir, "trainer"))
        if isinstance(record, Slice) and "step" in record.args
    ]
    return steps[0].start_ns / 1e9, steps[-1].end_ns / 1e9, len({record.args["step"] for record in steps})


def read_run(run_dir: Path) -> None:
    """Print both shares of the run in `run_dir`."""
    start_s, end_s, num_steps = loop_of(run_dir)
    path_s = end_s - start_s
    states = account_file(timeline_path(run_dir, "trainer"), start_s, end_s)
    print(f"trainer's critical path: {path_s:.2f} s, {num_steps} steps")
    joining = {
        state: seconds
        for state, seconds in states.items()
        if state in JOINING or (kind(state) != "work" and state not in DATA)
    }
    parts = {
        "work": {state: seconds for state, seconds in states.items() if state not in (*DATA, *joining)},
        "waiting for data": {state: seconds for state, seconds in states.items() if state in DATA},
        "scheduling and channels": joining,
    }
    for name, part in parts.items():
        print(f"  {name:<24} {sum(part.values()):8.3f} s  {sum(part.values()) / path_s:6.2%}")
        for state, seconds in sorted(part.items(), key=lambda item: -item[1]):
            print(f"    {state:<22} {seconds:8.3f} s  {seconds / path_s:6.2%}")
    print(f"processor, {num_cores()} cores, over the same time:")
    total_s = 0.0
    for path in process_files(run_dir):
        own = account_file(path, start_s, end_s)
        spent = {state: own[state] for state in JOINING if state in own}
        total_s += sum(spent.values())
        print(f"  {path.stem:<24} " + "  ".join(f"{state} {seconds:.3f} s" for state, seconds in spent.items()))
    print(f"  {'together':<24} {total_s:8.3f} s  {total_s / path_s / num_cores():6.2%} of the cores")


def read_trace(run_dir: Path) -> None:
    """Print what merging the run's timelines costs, and how large the trace is."""
    started_s = time.process_time()
    path = merge_timelines(run_dir)
    spent_s = time.process_time() - started_s
    events = [event["ph"] for event in json.loads(path.read_bytes())["traceEvents"]]
    num_lines = sum(len(file.read_bytes().splitlines()) for file in process_files(run_dir))
    print(
        f"timeline.json: {path.stat().st_size / 1e6:.1f} MB from {num_lines} lines, {events.count('X')} slices, "
        f"{events.count('s')} arrows, merged in {spent_s:.2f} s of CPU time"
    )


def hooked(mode: str, counts: Path | None = None) -> dict[str, str]:
    """The environment in which each process of a run has the hook of `timeline_hook/`."""
    path = os.pathsep.join([str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "TIMELINE_HOOK": mode} | ({} if counts is None else {"TIMELINE_COUNTS": str(counts)})


def train(run_dir: Path, arguments: list[str], **environment: str) -> float:
    """Run a recipe; the CPU seconds of all its processes."""
    command = [sys.executable, "-m", "slipstream.cli", "run", *(arguments or ["quickstart"]), "--out", str(run_dir)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# CPU seconds per completion


def num_completions(run_dir: Path) -> int:
    """Completions that generators finished, for training and for evaluations."""
    finished = sum(isinstance(line.event, CompletionFinished) for line in read_decisions(run_dir / "events.jsonl"))
    prompts = tomllib.loads((run_dir / "config.toml").read_text())["eval"]["num_prompts"]
    measured = [in_metrics(line, p) for line in read_metrics(run_dir / "metrics.jsonl") for p in EVALUATED]
    return finished + prompts * sum(found is not None for found in measured)


def cost_table(of_process: Mapping[str, Mapping[str, float]], total_s: float, completions: int) -> None:
    """Print CPU milliseconds per completion of each process by kind; `of_process` has seconds by state."""
    kind_of = {state: kind for kind, states in KINDS.items() for state in states}
    rows = {
        name: Counter({k: sum(s for state, s in states.items() if kind_of.get(state, "asleep") == k) for k in KINDS})
        for name, states in of_process.items()
    }
    rest_s = total_s - sum(sum(row.values()) for row in rows.values())
    print(f"CPU ms per completion ({completions:,} completions, {total_s:.1f} s of CPU):")
    print(f"  {'':<14}" + "".join(f"{kind:>9}" for kind in KINDS) + f"{'all':>9}")
    together = sum(rows.values(), Counter())
    for name, row in [*rows.items(), ("together", together)]:
        cells = "".join(f"{row[kind] / completions * 1e3:9.3f}" for kind in KINDS)
        print(f"  {name:<14}{cells}{sum(row.values()) / completions * 1e3:9.3f}")
    print(f"  {'other processes':<{14 + 9 * len(KINDS)}}{rest_s / completions * 1e3:9.3f}")
    besides = sum(seconds for kind, seconds in together.items() if kind not in (*ARITHMETIC, "start-up"))
    share = sum(together[kind] for kind in ARITHMETIC) / total_s
    controller_s = sum(s for kind, s in rows["controller"].items() if kind not in ("start-up", "asleep"))
    print(f"  the controller's own work allows for {completions / controller_s:,.0f} completions/s")
    print(f"  besides arithmetic and start-up: {besides / completions * 1e3:.3f} ms; arithmetic is {share:.1%} of all")


# The timeline


def costs_s() -> tuple[float, float]:
    """CPU seconds of a span that joins the line before it, and of one that writes a line of its own; medians of 5."""

    def per_span(version_of: int, num_spans: int = 50_000) -> float:
        with tempfile.TemporaryDirectory() as folder:
            timeline = Timeline("generator-0", Path(folder) / "t.jsonl", WallClock())
            started_s = time.thread_time()
            for i in range(num_spans):
                with timeline.span("decode", version=i // version_of):
                    timeline.did(8)
            timeline.flush()
            spent_s = time.thread_time() - started_s
            timeline.close()
        return spent_s / num_spans

    return statistics.median(per_span(100_000) for _ in range(5)), statistics.median(per_span(1) for _ in range(5))


def count(folder: Path, arguments: list[str]) -> None:
    """Print what each process of a run spends on its timeline, by the number of its spans and lines."""
    span_s, line_s = costs_s()
    print(f"a span costs {span_s * 1e6:.2f} us of CPU time, one that writes a line of its own {line_s * 1e6:.2f} us")
    counts, run_dir = folder / "counts", folder / "counted"
    counts.mkdir()
    train(run_dir, arguments, **hooked("count", counts))
    start_s, end_s, num_steps = loop_of(run_dir)
    print(f"{num_steps} steps of {(end_s - start_s) / num_steps:.3f} s:")
    total = 0.0
    for file in process_files(run_dir):
        rows = [tuple(map(float, line.split())) for line in (counts / file.stem).read_text().splitlines()]
        inside = [row for row in rows if start_s <= row[0] <= end_s]
        if len(inside) < 2:
            print(f"  {file.stem:<16} counted {len(inside)} times between the first step and the last: take more steps")
            continue
        window_s, num_spans = inside[-1][0] - inside[0][0], inside[-1][1] - inside[0][1]
        num_lines = sum(row[2] for row in inside[1:])
        share = ((num_spans - num_lines) * span_s + num_lines * line_s) / window_s
        total += share
        print(
            f"  {file.stem:<16} {num_spans / window_s:8.0f} spans/s {num_lines / window_s:7.0f} lines/s  {share:7.3%}"
        )
    print(f"  together {total / num_cores():.3%} of the {num_cores()} cores")


def compare(folder: Path, arguments: list[str], num_pairs: int) -> None:
    """Print how runs with a timeline compare to those without, pair by pair."""
    ratios: dict[str, list[float]] = {"CPU seconds": [], "median step": []}
    for pair in range(num_pairs):
        found: dict[str, tuple[float, float]] = {}
        for mode in ("on", "off") if pair % 2 == 0 else ("off", "on"):
            run_dir = folder / f"{mode}{pair}"
            cpu_s = train(run_dir, arguments, **(hooked("off") if mode == "off" else {}))
            steps = [line["step_s"] for line in read_metrics(run_dir / "metrics.jsonl") if "step_s" in line]
            found[mode] = cpu_s, statistics.median(steps[2:])
        weights = [(folder / f"{mode}{pair}" / "model" / "model.safetensors").read_bytes() for mode in ("on", "off")]
        assert weights[0] == weights[1], "the runs of a pair did not do the same work"
        for i, name in enumerate(ratios):
            ratios[name].append(found["on"][i] / found["off"][i] - 1)
        print(
            f"  pair {pair + 1}: on {found['on'][0]:.2f} s of CPU, step {found['on'][1] * 1e3:.1f} ms; "
            f"off {found['off'][0]:.2f} s, {found['off'][1] * 1e3:.1f} ms"
        )
    for name, values in ratios.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
        print(
            f"  {name}: {statistics.mean(values):+.2%} +- {error:.2%} with the timeline (mean and its standard error)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a finished run to read")
    parser.add_argument("--replicas", default="", help="numbers of generators, such as 1,2,8; else the recipe's own")
    parser.add_argument("--timeline", action="store_true", help="what the timeline costs")
    parser.add_argument("--pairs", type=int, default=5, help="runs with and without it")
    options, arguments = parser.parse_known_args()
    print(f"command: {' '.join(sys.argv)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{describe()}, commit {commit.stdout.strip()}")
    if options.run is not None:
        read_run(options.run)
        read_trace(options.run)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.timeline:
            count(folder, arguments)
            compare(folder, [*(arguments or ["quickstart"]), *SAME_WORK], options.pairs)
            return
        for replicas in options.replicas.split(","):
            run_dir, counts = folder / f"run{replicas}", folder / f"counts{replicas}"
            counts.mkdir()
            own = ["--generator.replicas", replicas] if replicas else []
            total_s = train(run_dir, [*(arguments or ["quickstart"]), *own], **hooked("cpu", counts))
            of_process = {file.stem: json.loads((counts / file.stem).read_text()) for file in process_files(run_dir)}
            cost_table(of_process, total_s, num_completions(run_dir))
            read_run(run_dir)
            read_trace(run_dir)


if __name__ == "__main__":
    main()
