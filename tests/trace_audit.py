"""A run's `timeline.json` against its other files: standard library only, no word of the package."""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from trace_format import load_trace

SAMPLES = ("decode", "prefill", "re_prefill", "drain")


def audit_trace(run_dir: Path, *, is_whole: bool = True) -> dict[str, int]:
    """How many groups and versions have arrows. Every trained group has one, from its admission over the replica that
    sampled it to a slice of its step, and every swap one from the publish of its version; slices carry versions.

    Where processes were killed the trace is not whole: what they did in their last second is not known.
    """
    trace = load_trace(run_dir / "timeline.json")
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    slices: dict[str, list[dict[str, Any]]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            slices[names[event["tid"]]].append(event)
        if event["ph"] in "stf":
            flows[event["id"]].append(event)

    num_sampled = 0
    for thread, own in slices.items():
        held = None
        for one in own:
            if thread.startswith("generator") and one["name"] == "swap":
                held = one["args"]["version"]
            elif thread.startswith("generator") and one["name"] in SAMPLES:
                version = one.get("args", {}).get("version", held)  # what goes on while it sleeps does not say so
                assert version == held, f"{thread} holds version {held}: {one}"
                num_sampled += "version" in one.get("args", {})
            elif one["name"] in ("forward_backward", "optimizer"):
                assert isinstance(one["args"]["step"], int), one

    # A generator that was killed within its first second has written none.
    assert num_sampled or not is_whole, "no slice says with which version it sampled"

    starts = {thread: [one["ts"] for one in own] for thread, own in slices.items()}

    def at(event: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        thread = names[event["tid"]]
        return thread, slices[thread][bisect.bisect_right(starts[thread], event["ts"]) - 1]

    joined = defaultdict(list)
    for events in flows.values():
        joined[events[0]["name"]].append([at(event) for event in events])

    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    trained = {(rollout["ordinal"], rollout["step"], rollout["replica"]) for rollout in rollouts}
    known = {  # steps with a slice: a trainer that was killed within a second of them has left none
        one["args"]["step"]
        for thread, own in slices.items()
        if thread.startswith("trainer")
        for one in own
        if "step" in one.get("args", {})
    }
    num_groups = 0
    for ordinal, step, replica in trained:
        name = f"group {ordinal}, dropped" if step is None else f"group {ordinal}, step {step}"
        ends = [thread for thread, _ in joined[name][-1]]
        assert ends[0] == "controller", name
        assert f"generator-{replica}" in ends[1:-1] or not is_whole, name
        thread, last = joined[name][-1][-1]
        if step is None:
            assert thread == "controller", f"{name} ends in {last}"
        elif is_whole or step in known:
            assert last["args"]["step"] == step, f"{name} ends in {last}"
        num_groups += 1

    num_swaps = 0
    for thread, own in slices.items():
        for one in own:
            if one["name"] == "swap":
                num_swaps += 1
                version = one["args"]["version"]
                arrows = [ends for ends in joined[f"version {version}"] if ends[-1] == (thread, one)]
                if not (arrows or is_whole):
                    continue  # the trainer was killed within a second of publishing it
                (found,) = arrows
                assert found[0][0] == "trainer", found
                assert found[0][1]["args"]["version"] == version, found
    return {"groups": num_groups, "swaps": num_swaps, "attempts": trace["otherData"]["attempts"]}
