"""A replay as lines on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from slipstream.controller.audit import Replay


def show(found: Replay, wall_s: float, console: Console) -> None:
    """Print what was replayed within `wall_s` seconds, each fault in red, and the verdict."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style), soft_wrap=True)

    for name, value in _facts(found, wall_s).items():
        say(f"{name:<14} {value}")
    faults = [f"broken: {violation}" for violation in found.violations]
    if (first := found.divergence) is not None:
        faults += [f"line {first.line} differs: {first.event}", f"  recorded: {first.recorded}"]
        faults.append(f"  now: {first.replayed}")
    for fault in faults + [f"incomplete: {lost}" for lost in found.missing]:
        say(fault, "red")
    if found.is_sound and found.is_complete:
        say("the schedule decides as it did, and nothing is broken", "green")
    elif found.is_sound:
        checked, unchecked = f"{found.num_decisions:,}", f"{found.num_unchecked:,}"
        say(f"nothing differs in the {checked} decisions that could be checked; {unchecked} lines could not")


def _facts(found: Replay, wall_s: float) -> dict[str, str]:
    resumed = f", resumed {len(found.policies) - 1} times" if len(found.policies) > 1 else ""
    dropped = ", ".join(f"{count} {cause}" for cause, count in sorted(found.num_dropped.items())) or "none"
    facts = {
        "decisions": f"{found.num_decisions:,} in {wall_s:.2f} s ({found.num_decisions / wall_s:,.0f} a second)",
        "policy": found.policies[0] + resumed,
        "steps": f"{found.num_steps:,}",
        "groups": f"{found.num_admitted:,} admitted, {found.num_trained:,} trained, dropped: {dropped}",
        "staleness": f"{found.max_staleness} at most",
        "replicas lost": f"{found.num_lost}",
    }
    return facts if found.ended_with is None else facts | {"the run ended": found.ended_with}
