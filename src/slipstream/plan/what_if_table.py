"""A what-if on the terminal: measured, simulated as it was, simulated as it might have been, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.plan.recorded import Outcome
from slipstream.plan.what_if import WhatIf

BAR = 20
"""Characters of the longest bar of a histogram."""
LEAST_STALENESS = 0.005
"""Steps: less is no difference."""

ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("step time", lambda outcome: f"{outcome.step_s:.3g} s"),
    ("trained", lambda outcome: f"{outcome.trained_tokens_per_s:,.0f} tokens/s"),
    ("generated", lambda outcome: f"{outcome.generated_tokens_per_s:,.0f} tokens/s"),
    ("trainer waits", lambda outcome: f"{outcome.idle['trainer']:.1%}"),
    ("generators wait", lambda outcome: f"{outcome.idle['generator']:.1%}"),
    ("staleness, mean", lambda outcome: f"{outcome.staleness_mean:.2f} steps"),
    ("staleness, most", lambda outcome: f"{outcome.staleness_max} steps"),
)


def show(found: WhatIf, console: Console) -> None:
    """The table, the histograms of staleness, and what to make of it."""
    columns = {"measured": found.measured, "simulated": found.as_it_was, "what if": found.changed}
    if not found.is_changed:
        del columns["what if"]
    console.print(f"{found.run}: {found.measured.steps} steps measured", highlight=False, soft_wrap=True)
    if found.is_changed:
        console.print(f"what if: {in_words(found)}", highlight=False, soft_wrap=True, markup=False)
    table = Table("", *columns, show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, text in ROWS:
        table.add_row(name, *(text(outcome) for outcome in columns.values()))
    for lag in sorted({lag for outcome in columns.values() for lag in outcome.staleness}):
        table.add_row(f"tokens {lag} stale", *(_share(outcome, lag) for outcome in columns.values()))
    console.print(table)
    console.print(verdict(found), highlight=False, soft_wrap=True, markup=False)


def in_words(found: WhatIf) -> str:
    """`max_staleness = 4, generator.replicas = 3`."""
    words = [f"{name} = {value}" for name, value in _flat(found.overrides).items()]
    return ", ".join(words + ([] if found.reward_s is None else [f"reward = {found.reward_s:g} s a completion"]))


def verdict(found: WhatIf) -> str:
    """One sentence on the change, and one on how far to believe it."""
    error = found.as_it_was.step_s / found.measured.step_s - 1
    side = "above" if error > 0 else "below"
    trust = f"The simulation of the run as it was is {abs(error):.0%} {side} its step time."
    if not found.is_changed:
        return trust
    was, now = found.as_it_was, found.changed
    # By tokens, as a step may have another number of them now.
    ratio = now.trained_tokens_per_s / max(was.trained_tokens_per_s, 1e-9)
    pace = f"{ratio - 1:.0%} more" if ratio >= 1 else f"{1 - ratio:.0%} fewer"
    stale = now.staleness_mean - was.staleness_mean
    if abs(stale) < LEAST_STALENESS:
        return f"{pace} tokens trained per second, as stale in the mean. {trust}"
    return f"{pace} tokens trained per second, {abs(stale):.2f} steps {'staler' if stale > 0 else 'fresher'}. {trust}"


def _share(outcome: Outcome, lag: int) -> str:
    total = sum(outcome.staleness.values())
    share = outcome.staleness.get(lag, 0) / total if total else 0.0
    return f"{'█' * round(BAR * share)} {share:4.0%}"


def _flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
