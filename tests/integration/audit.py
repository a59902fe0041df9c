"""Recompute a run's claims from its files alone: standard library only, no word of the package.

    python tests/integration/audit.py RUN_DIR

prints the staleness histogram, the fate of every ordinal and how many completions span versions, and compares them with
`summary.json`. A disagreement raises AssertionError.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def audit(run_dir: Path) -> dict[str, Any]:
    """What the run's events and rollouts say, checked against its summary."""
    events, rollouts = lines(run_dir / "events.jsonl"), lines(run_dir / "rollouts.jsonl")
    summary = json.loads((run_dir / "summary.json").read_text())

    # Fates, from the scheduling decisions alone.
    admitted: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    dropped: Counter[int] = Counter()
    step_of: dict[int, int] = {}
    batch: dict[int, list[int]] = {}
    steps_done = num_targets = 0
    admitted_at: dict[int, int] = {}
    held: dict[int, int] = {}
    tokens: dict[int, dict[int, int]] = {}  # of finished completions, by ordinal and sample
    again = 0
    wasted: Counter[str] = Counter()
    for line in events:
        event = line["event"]
        if event["type"] == "CompletionFinished":
            tokens.setdefault(event["ordinal"], {})[event["sample"]] = event["num_tokens"]
            is_again = admitted[event["ordinal"]] > 1 and event.get("handed_over_by", -1) < 0
            again += is_again * (event["num_tokens"] - event["num_restored"])
        if event["type"] == "Swapped":
            held[event["replica"]] = event["version"]
        if event["type"] == "StepDone":
            assert event["step"] == steps_done, "steps are done in order"
            steps_done += 1
            num_targets += int(event["metrics"]["tokens_trained"])
            for ordinal in batch[event["step"]]:
                trained[ordinal] += 1
                step_of[ordinal] = event["step"]
        for command in line["commands"]:
            if command["type"] == "StartGroup":
                admitted[command["ordinal"]] += 1
                # Regenerated ones may come from either admission: what a lost replica had finished still counts.
                first = admitted_at.get(command["ordinal"], held[command["replica"]])
                admitted_at[command["ordinal"]] = min(first, held[command["replica"]])
            elif command["type"] == "TrainStep":
                batch[command["step"]] = command["ordinals"]
            elif command["type"] == "Skip":
                dropped.update(command["ordinals"])
                wasted[command["cause"]] += sum(sum(tokens.get(o, {}).values()) for o in command["ordinals"])
    known = set(trained) | set(dropped)
    fates = {
        "admitted": len(admitted),
        "trained": len(trained),
        "dropped": len(dropped),
        "pending": len(set(admitted) - known),
        "lost": len(set(range(max(admitted, default=-1) + 1)) - set(admitted)),
        "repeated": sum(count > 1 for count in trained.values()) + len(set(trained) & set(dropped)),
    }

    # Staleness, token by token, from what was trained.
    histogram: Counter[int] = Counter()
    spanning = 0
    seen: Counter[tuple[int, int]] = Counter()
    for rollout in rollouts:
        if rollout["step"] is None:
            continue
        ordinal = rollout["ordinal"]
        assert rollout["step"] == step_of[ordinal], "the rollouts and the events disagree on a step"
        seen[ordinal, rollout["sample"]] += 1
        runs = rollout["versions"]
        sampled = [version for _, version in runs if version >= 0]  # -1: an environment said it
        assert min(sampled, default=admitted_at[ordinal]) >= admitted_at[ordinal], "a token is older than its admission"
        ends = [start for start, _ in runs[1:]] + [rollout["num_tokens"]]
        for (start, version), end in zip(runs, ends, strict=True):
            if version >= 0:
                histogram[rollout["step"] - version] += end - start
        spanning += len(set(sampled)) > 1
    assert all(count == 1 for count in seen.values()), "a completion was trained twice"

    staleness, prompts = summary["staleness"], summary["prompts"]
    assert max(histogram) == staleness["max"]
    assert staleness["bound"] is None or staleness["max"] <= staleness["bound"]
    assert min(histogram) >= 0
    assert {str(lag): count for lag, count in histogram.items()} == staleness["histogram"]
    assert (fates["lost"], fates["repeated"]) == (prompts["lost"], prompts["repeated"]) == (0, 0)
    for name in ("admitted", "trained", "pending"):
        assert fates[name] == prompts[name], f"{name}: {fates[name]} in the events, {prompts[name]} in the summary"
    assert fates["dropped"] == prompts["skipped"] + prompts["failed"]
    told = summary["balance"]["wasted_tokens"]
    for cause in ("no_signal", "failed", "stale"):
        assert told[cause] == wasted[cause], f"{cause}: {wasted[cause]} tokens in the events, {told[cause]} told"
    assert told["not_selected"] == sum(histogram.values()) - num_targets, "sampled for a step, and not trained by it"
    assert told["regenerated"] == prompts["regenerated_tokens"]
    assert told["regenerated"] >= again  # after a resume ordinals count as admitted before, which no line here shows
    assert told["left"] >= sum(sum(tokens.get(o, {}).values()) for o in set(admitted) - known)
    for process, states in summary["accounting"].items():
        assert abs(sum(states.values()) - summary["wall_s"]) < 1e-3, f"the seconds of {process} do not add up"
    return {"histogram": dict(sorted(histogram.items())), "fates": fates, "spanning": spanning, "steps": steps_done}


def num_older(out: Path) -> int:
    """Completions that ended under a version when their replica had a newer one."""
    held, found = dict[int, int](), 0
    for line in (out / "events.jsonl").read_text().splitlines():
        event = json.loads(line)["event"]
        if event["type"] == "Swapped":
            held[event["replica"]] = event["version"]
        elif event["type"] == "CompletionFinished":
            found += event["max_version"] < held[event["replica"]]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(audit(Path(sys.argv[1])), indent=2) + "\n")
