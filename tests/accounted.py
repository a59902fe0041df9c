"""Every second of a run is accounted for: recomputed from its timelines, with the standard library only.

`conftest.py` has each run checked that a test leaves in its `tmp_path`; tests with other folders ask for it themselves.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_UNLABELLED = 0.01
SHORTEST_S = 0.1  # of a run that never began a percent is microseconds
NEVER_BEGAN_S = 0.005
"""Unlabelled in one that was over sooner: less than a wait for the disk, of which no process knows."""
MOST_OVERHEAD = 0.1
"""Else it has become a place for what nobody has named."""
START_OVERHEAD_S = 0.25
"""Of which the first turns of a loop take a part that does not depend on how long the run is."""
KEPT_OF_KILLED_S = 0.02
"""Others had the core of a process that was killed before it wrote: two of the system's slices."""
CLOCKS_APART_S = 0.02
"""CPU seconds are counted by the system in ticks of up to 10 ms, and read a moment before the time is."""
IS_KEPT_TOLD = Path("/proc/thread-self/schedstat").exists()
"""Without it the time that other processes had the core is unknown, and may be most of the time."""
Stops = Mapping[str, Sequence[tuple[float, float]]]
"""When a process was stopped by SIGSTOP, by its name: from and to, as `time.monotonic` has it."""


def is_waiting(state: str) -> bool:
    return state == "idle" or state.startswith("wait_")


def lines(path: Path) -> list[dict[str, Any]]:
    whole = [line for line in path.read_bytes().split(b"\n")[:-1] if line]
    return [json.loads(line) for line in whole]


def seconds(timeline: list[dict[str, Any]], start_ns: float, end_ns: float) -> Counter[str]:
    """By state within the window; a line that the window cuts counts in proportion."""
    found: Counter[str] = Counter()
    for line in timeline:
        if line["kind"] != "slice":
            continue
        length = line["end_ns"] - line["start_ns"]
        inside = min(line["end_ns"], end_ns) - max(line["start_ns"], start_ns)
        if inside <= 0:
            continue
        also = line.get("also", {})
        own = length - line.get("gap_ns", 0) - sum(also.values())
        for state, ns in (*also.items(), (line["state"], own)):
            found[state] += ns * inside / length * 1e-9
    return found


def busy_s(timeline: list[dict[str, Any]], start_ns: float, end_ns: float) -> float:
    return sum(value for state, value in seconds(timeline, start_ns, end_ns).items() if not is_waiting(state))


def kept_of(timeline: list[dict[str, Any]]) -> float:
    """For how many seconds the lives of one process could have run and had no core, as each has told last."""
    told: list[float] = []
    for line in timeline:
        if line["kind"] == "process":
            told.append(KEPT_OF_KILLED_S)
        elif line["kind"] in ("cpu", "end"):
            told[-1:] = [line.get("kept_ns", 0) * 1e-9]
    return sum(told)


def check_accounting(
    run_dir: Path, *, stops: Stops | None = None, stopped_s: float = 0.0, most_overhead: float = MOST_OVERHEAD
) -> None:
    """AssertionError where a process has more than 1 % of its time unlabelled, where its states are not those of its
    timeline, or where it was less busy than its threads have computed.

    Shares are of what a process did: by how long others had its core (`kept_ns`), a state may be longer, and by its
    share of the `stops`. `stopped_s`: for so long processes were kept from running, nobody knows which and in what
    state. `most_overhead`: of the controller's time, where it is not `MOST_OVERHEAD` as for all others.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    timelines = {path.stem: lines(path) for path in (run_dir / "timeline").glob("*.jsonl")}
    assert set(timelines) == set(summary["accounting"])
    controller = timelines["controller"]
    start_ns = min(line["start_ns"] for line in controller if line["kind"] == "slice")
    end_ns = start_ns + summary["wall_s"] * 1e9
    for name, states in summary["accounting"].items():
        where = f"{name} of {run_dir}"
        told = seconds(timelines[name], start_ns, end_ns)
        there_s = summary["wall_s"] - states.get("absent", 0.0) - states.get("lost", 0.0)
        unlabelled_s = MOST_UNLABELLED * there_s if there_s >= SHORTEST_S else NEVER_BEGAN_S
        there_s = max(there_s, SHORTEST_S)
        kept_s = kept_of(timelines[name])
        stops_of = (stops or {}).get(name, ())
        excused = sum((seconds(timelines[name], a * 1e9, b * 1e9) for a, b in stops_of), Counter[str]())
        overhead_s = (most_overhead if name == "controller" else MOST_OVERHEAD) * there_s + START_OVERHEAD_S
        for state, most_s in (("unlabelled", unlabelled_s), ("overhead", overhead_s)) if IS_KEPT_TOLD else ():
            told_s = states.get(state, 0.0)
            assert told_s <= most_s + kept_s + stopped_s + excused[state], (
                f"{where}: {state} {told_s} s of {there_s} s, {kept_s} s without a core, stopped {excused[state]} s"
            )
        for state in (set(states) | set(told)) - {"unlabelled", "absent", "lost"}:
            assert abs(states.get(state, 0.0) - told[state]) < 1e-3, f"{where}: {state} {states}, but {told}"
    starts = {name: [line for line in timeline if line["kind"] == "process"] for name, timeline in timelines.items()}
    for name, timeline in timelines.items():
        if not starts[name]:  # it was killed before it wrote
            assert summary["accounting"][name].keys() <= {"absent", "unlabelled"}
            continue
        begin = starts[name][-1]
        ends = [line for line in timeline if line["kind"] == "end" and line["time_ns"] >= begin["time_ns"]]
        if not ends or begin.get("within"):
            continue
        here = [name, *(other for other, lives in starts.items() if lives and lives[-1].get("within") == name)]
        busy = sum(busy_s(timelines[one], begin["time_ns"], ends[-1]["time_ns"]) for one in here)
        cpu, main, background = (ends[-1].get(f"{which}_ns", 0) * 1e-9 for which in ("cpu", "main", "background"))
        threads = max(begin.get("threads", 1), begin.get("threads_alone", 1))
        what = f"{name} of {run_dir}: busy {busy} s, CPU {cpu} s on {threads} threads, of which main {main} s"
        assert 0 < main <= busy + CLOCKS_APART_S, what
        assert (cpu - background) / threads <= busy + CLOCKS_APART_S, what


def check_stage(path: Path) -> None:
    """AssertionError where the seconds of a stage, by its record, do not add up, or nobody knows of more than 1 %."""
    record = json.loads(path.read_text())
    states, whole, kept_s = record["accounting"], record["seconds"], record["kept_s"]
    assert abs(sum(states.values()) - whole) < 1e-6, f"{path}: {states} in {whole} s"
    assert states["unlabelled"] <= MOST_UNLABELLED * whole + kept_s + CLOCKS_APART_S, f"{path}: {states} in {whole} s"


def check_runs(
    folder: Path, *, stops: Stops | None = None, stopped_s: float = 0.0, most_overhead: float = MOST_OVERHEAD
) -> None:
    """The same for every run and stage in `folder`, also for runs that failed; and nothing kept a report from being."""
    found: dict[str, list[Path]] = {name: [] for name in ("summary.json", "stage.json", "evaluation.json")}
    for root, _, files in os.walk(folder):
        is_earlier = Path(root).name.startswith("attempt_")  # what is set aside has no page of its own
        for name in () if is_earlier else found.keys() & {*files}:
            found[name].append(Path(root, name))
    for summary in found["summary.json"]:
        if (summary.parent / "timeline").is_dir():
            check_accounting(summary.parent, stops=stops, stopped_s=stopped_s, most_overhead=most_overhead)
            assert (summary.parent / "report.html").is_file(), summary.parent
    for record in (*found["stage.json"], *found["evaluation.json"]):
        if "accounting" in record.read_text():
            check_stage(record)
