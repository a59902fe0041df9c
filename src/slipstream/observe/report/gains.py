"""What was gained, at what price? What the stage `evaluate` found: win rates, drift, and one against the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.observe.evaluation import MOMENTS, evaluation_rows
from slipstream.observe.report.html import card, cards, part, table, text
from slipstream.observe.svg import Axis, Series, Spot, line_legend, scatter

LEAD = "Measured by the evaluation at the end, on held-out prompts, before and after RL."


@dataclass(frozen=True)
class Evaluated:
    """What was found of a run, and its colour."""

    name: str
    hue: int
    found: Mapping[str, Any]


def gains(found: Mapping[str, Any] | None) -> str:
    """The part of a run's own page; nothing where it was not evaluated."""
    if found is None:
        return ""
    rows = ([text(name), text(before), text(after)] for name, before, after in evaluation_rows(found))
    note = f"{found['num_prompts']} held-out prompts at temperature {found['temperature']:g}, ± standard error."
    measured = card("Gold, judge and drift", note, table(["", "before", "after"], rows, kind="numbers"), folds=True)
    return part(
        "evaluation", "What was gained, at what price?", LEAD, [cards(against_kl([Evaluated("", 0, found)]), measured)]
    )


def gains_of_several(runs: Sequence[Evaluated]) -> str:
    """The part of a comparison; nothing where none of them has both a win rate and a KL."""
    picture = against_kl(runs)
    if not picture:
        return ""
    rows = [[text(s.name), f"{s.x:.2f} ± {s.x_error:.2f}", f"{s.y:.1%} ± {s.y_error:.1%}"] for s in spots_of(runs)]
    numbers = table(["", "KL", "gold win rate"], rows, kind="numbers")
    measured = card("The same in numbers", "Means ± standard errors.", numbers, folds=True)
    return part("evaluation", "What was gained, at what price?", LEAD, [cards(picture, measured)])


def against_kl(runs: Sequence[Evaluated]) -> str:
    """Gold win rate against KL to the reference, before and after RL."""
    spots = spots_of(runs)
    if not spots:
        return ""
    chart = scatter(
        spots,
        title="Gold win rate against KL",
        x=Axis("KL to the reference, nats per completion", low=0.0),
        y=Axis("gold win rate", low=0.0, is_share=True),
        limits={"as good as the references": 0.5},
    )
    note = (
        "Hollow before RL, full after it, with standard errors; dashed: as good as the references. Up is better. Far "
        "to the right and not up, the policy has learned what the reward likes and gold does not."
    )
    shown = [one for one in runs if any(spot.hue == one.hue for spot in spots)]
    legend = line_legend([Series(one.name, [], one.hue, has_dots=True) for one in shown if one.name])
    return card("Gold win rate against KL", note, legend + chart)


def spots_of(runs: Sequence[Evaluated]) -> list[Spot]:
    """The moments at which both were measured."""
    spots = []
    for one in runs:
        for moment in MOMENTS:
            gold, drift = one.found[moment]["gold"], one.found[moment]["drift"]
            if drift["kl"] is None or "win_rate" not in gold:
                continue
            rate, moved = gold["win_rate"], drift["kl"]["per_sequence"]
            if rate["mean"] is None or moved["mean"] is None:
                continue
            spots.append(
                Spot(
                    f"{one.name}, {moment} RL" if one.name else f"{moment} RL",
                    moved["mean"],
                    rate["mean"],
                    one.hue,
                    moved["standard_error"] or 0.0,
                    rate["standard_error"] or 0.0,
                    is_hollow=moment == MOMENTS[0],
                )
            )
    return spots
