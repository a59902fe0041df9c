"""What scheduling and channels cost: the trainer's critical path, and the processor's time, of a run.

    python benchmarks/overhead.py [RECIPE] [--a.b value ...]        trains, then reads the run's accounting
    python benchmarks/overhead.py --run DIR                         reads that of a run that is there

The trainer's critical path is the time from the start of its first step to the end of its last. Of that time it works
(forward-backward, optimizer, publish, record), waits for data that does not exist yet (generation, rewards, a
straggler), or is held up by what joins the two: taking messages (`receive`), waiting for a command although its groups
are ready (`wait_nothing`), and the rest of its loop (`overhead`). Asynchronous RLHF (arXiv:2410.18252, section 5) lost
17 % of a step there.

The processor's share are the seconds in which some process takes, sends or decides (`receive`, `send`, `schedule`,
`overhead`), over all cores. ZeroMQ's own threads are no states of a timeline.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from slipstream.controller.placement import num_cores
from slipstream.observe.hardware import describe
from slipstream.observe.states import TRAINS
from slipstream.observe.timeline import Slice, account_file, process_files, read_timeline, timeline_path

WORK = (*TRAINS, "record", "checkpoint", "export", "warm_start")
DATA = ("wait_generation", "wait_rewards", "wait_straggler")
JOINING = ("receive", "send", "schedule", "overhead")


def read_run(run_dir: Path) -> None:
    """Print both shares of the run in `run_dir`."""
    trains = [
        record
        for record in read_timeline(timeline_path(run_dir, "trainer"))
        if isinstance(record, Slice) and "step" in record.args
    ]
    start_s, end_s = trains[0].start_ns / 1e9, trains[-1].end_ns / 1e9
    path_s = end_s - start_s
    states = account_file(timeline_path(run_dir, "trainer"), start_s, end_s)
    print(f"trainer's critical path: {path_s:.2f} s, {len(trains)} slices of training")
    parts = {
        "work": {state: seconds for state, seconds in states.items() if state in WORK},
        "waiting for data": {state: seconds for state, seconds in states.items() if state in DATA},
        "scheduling and channels": {state: seconds for state, seconds in states.items() if state not in (*WORK, *DATA)},
    }
    for name, part in parts.items():
        print(f"  {name:<24} {sum(part.values()):8.3f} s  {sum(part.values()) / path_s:6.2%}")
        for state, seconds in sorted(part.items(), key=lambda item: -item[1]):
            print(f"    {state:<22} {seconds:8.3f} s  {seconds / path_s:6.2%}")
    print(f"processor, {num_cores()} cores, over the same time:")
    total_s = 0.0
    for path in process_files(run_dir):
        own = account_file(path, start_s, end_s)
        joining = {state: own[state] for state in JOINING if state in own}
        total_s += sum(joining.values())
        print(f"  {path.stem:<24} " + "  ".join(f"{state} {seconds:.3f} s" for state, seconds in joining.items()))
    print(f"  {'together':<24} {total_s:8.3f} s  {total_s / path_s / num_cores():6.2%} of the cores")


def main() -> None:
    print(f"command: {' '.join(sys.argv)}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{describe()}, commit {commit.stdout.strip()}")
    arguments = sys.argv[1:]
    if arguments[:1] == ["--run"]:
        read_run(Path(arguments[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "slipstream.cli", "run", *(arguments or ["quickstart"]), "--out", str(run_dir)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        read_run(run_dir)


if __name__ == "__main__":
    main()
