"""The rules of the Trace Event Format that viewers need, written from its description and not from our code.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: JSON object format, duration, counter,
instant, flow and metadata events.
"""

import bisect
import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

PHASES = {"X", "i", "C", "M", "s", "t", "f"}
METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}


def load_trace(path: Path) -> dict:
    """The trace at `path`, checked against the format: every violation is an assertion that names the event."""

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    trace = json.loads(path.read_text(), parse_constant=refuse)
    check_trace(trace)
    return trace


def check_trace(trace: dict) -> None:
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    for event in events:
        assert event["ph"] in PHASES, event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert isinstance(event["pid"], int), event
        if event["ph"] == "M":
            (key,) = event["args"]
            assert key == ("name" if event["name"].endswith("_name") else "sort_index"), event
            assert isinstance(event["args"][key], METADATA[event["name"]]), event
            continue
        assert isinstance(event["tid"], int), event
        assert isinstance(event["ts"], int | float), event
        assert 0 <= event["ts"] < math.inf, event
        if event["ph"] == "X":
            assert event["dur"] > 0, event
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t"), event
        if event["ph"] == "C":
            assert event["args"], event
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
        assert isinstance(event.get("args", {}), dict), event
    _check_order(events)
    _check_names(events)
    _check_slices(events)
    _check_flows(events)


def _check_order(events: list[dict]) -> None:
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times), "events are not in order of time"


def _check_names(events: list[dict]) -> None:
    """Every process and thread that has events has one name, and no two threads share one."""
    processes = [e["pid"] for e in events if e["name"] == "process_name"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert len(processes) == len(set(processes))
    assert len(threads) == len(set(threads.values())) == sum(e["name"] == "thread_name" for e in events)
    for event in events:
        assert event["pid"] in processes, event
        if event["ph"] != "M":
            assert (event["pid"], event["tid"]) in threads, event


def slices_by_thread(events: list[dict]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(start, end) in nanoseconds of every thread's slices, ascending: microseconds have three decimals."""
    slices = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start_ns = round(event["ts"] * 1e3)
            slices[event["pid"], event["tid"]].append((start_ns, start_ns + round(event["dur"] * 1e3)))
    return slices


def _check_slices(events: list[dict]) -> None:
    """Slices of a thread may be nested by the format; ours exclude each other, as a process is in one state."""
    for thread, slices in slices_by_thread(events).items():
        for (start, end), (next_start, _) in itertools.pairwise(slices):
            assert start < end <= next_start, f"slices of {thread} overlap at {next_start} ns"


def _check_flows(events: list[dict]) -> None:
    """s, then any t, then f, of one id, name and category, in order of time, each inside a slice of its thread."""
    slices = slices_by_thread(events)
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
            start, end = slices[event["pid"], event["tid"]][
                bisect.bisect_right(slices[event["pid"], event["tid"]], (round(event["ts"] * 1e3), math.inf)) - 1
            ]
            assert start <= round(event["ts"] * 1e3) < end, f"no slice encloses {event}"
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", *["t"] * (len(flow) - 2), "f"], flow
        assert len({(event["name"], event["cat"]) for event in flow}) == 1, flow
        assert flow[-1]["bp"] == "e", flow
