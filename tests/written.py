"""Lines of a run's files from the fields that a test is about, the others made up; and the loop after some of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from slipstream.core.run_log import Decision, LoopState

CONFIG = {
    "groups_per_step": 1,
    "completions_per_group": 2,
    "max_staleness": 1,
    "reorder_window": 1,
    "steps": 9,
    "capacity": 8,
}
SNAPSHOT = {"next_ordinal": 0, "steps_done": 0, "dropped": [], "dropped_in_a_row": 0, "num_failed": 0, "readmit": []}
EVENTS: dict[str, dict[str, Any]] = {
    "ScheduleBegan": {"policy": "oldest_first", "config": CONFIG, "snapshot": None},
    "Swapped": {"replica": 0, "version": 0, "transfer_s": 0.0, "pause_s": 0.0, "probe_error": 0.0},
    "CompletionFinished": {"sample": 0, "replica": 0, "num_tokens": 1, "min_version": 0, "max_version": 0},
    "GroupScored": {"has_signal": True, "mean_reward": 0.5, "num_failed": 0, "min_version": 0, "max_version": 0},
    "StepDone": {"metrics": {}},
}


def event(kind: str, **fields: Any) -> dict[str, Any]:
    """An event of the schedule, as JSON."""
    return {"type": kind, **EVENTS.get(kind, {}), **fields}


def began(**snapshot: Any) -> dict[str, Any]:
    """The first event of an attempt, which goes on from `snapshot` where there is any."""
    return event("ScheduleBegan", snapshot={**SNAPSHOT, **snapshot} if snapshot else None)


def loop_at(decisions: Iterable[tuple[Decision, float]], time_s: float) -> LoopState:
    """The state at `time_s`, from all decisions with their times, in order."""
    loop = LoopState()
    for decision, at_s in decisions:
        if at_s > time_s:
            break
        loop.take(decision, at_s)
    return loop
