"""Padding and step time without packing, packed as sequences come, and packed greedily (Magistral, M8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from experiments.collation.packing import CONSTANT, DISTRIBUTIONS, LONGEST, VARIABLE, mean_paddings, reduction
from experiments.collation.timing import LAYOUTS, step_seconds
from experiments.figures import COLOURS, lines, panels, svg, ticks
from experiments.lab import Lab
from experiments.section import Section, Verdict, markdown_table, spread

CAPACITIES = (LONGEST, 2 * LONGEST, 4 * LONGEST, 8 * LONGEST)
CAPACITY = 2 * LONGEST
COMPLETIONS = 64
WORKERS = {1: 200, 8: 40}
"""Workers -> minibatches per seed: fewer where each holds more completions."""
SEEDS = (0, 1, 2, 3, 4)
TIMED: dict[str, Any] = {"hidden_size": 128, "num_layers": 3, "repeats": 3, "seed": 0}
PUBLISHED_REDUCTION = 0.19
SMALL_IMBALANCE = 0.05
VERSION = 1
"""Of the functions that measure: raised when one of them changes what it returns."""

Paddings = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
Seconds = Mapping[str, Mapping[str, Sequence[float]]]


def measured_paddings(lab: Lab, *, capacity: int, workers: int) -> Paddings:
    found: Paddings = lab.measure(
        "collation padding",
        lambda version, **parameters: mean_paddings(**parameters),  # noqa: ARG005 - what it is kept by
        version=VERSION,
        capacity=capacity,
        workers=workers,
        completions_per_worker=COMPLETIONS,
        seeds=list(SEEDS),
        minibatches=WORKERS[workers],
    )
    return found


def measured_seconds(lab: Lab) -> Seconds:
    found: Seconds = lab.measure(
        "collation seconds",
        lambda version, **parameters: step_seconds(**parameters),  # noqa: ARG005
        version=VERSION,
        distributions=list(DISTRIBUTIONS),
        capacity=CAPACITY,
        completions=COMPLETIONS,
        **TIMED,
    )
    return found


def column(paddings: Paddings, distribution: str, way: str, value: str = "padding") -> list[float]:
    """One number per seed."""
    return [seed[value] for seed in paddings[distribution][way]]


def reductions(paddings: Paddings) -> dict[str, list[float]]:
    """By variable distribution and seed: the share of first-come's padding tokens that greedy collation saves."""
    return {
        name: [
            reduction(before, after)
            for before, after in zip(
                column(paddings, name, "first-come"), column(paddings, name, "greedy"), strict=True
            )
        ]
        for name in VARIABLE
    }


def verdicts(paddings: Mapping[int, Paddings], seconds: Seconds) -> list[Verdict]:
    """By the rules of the README; `paddings` by the number of workers."""
    saved = {workers: reductions(found) for workers, found in paddings.items()}
    every = [value for by_name in saved.values() for values in by_name.values() for value in values]
    means = [fmean(values) for by_name in saved.values() for values in by_name.values()]
    return [
        Verdict(
            "Greedy collation reduces padding.",
            "M, online training",
            all(value > 0 for value in every),
            f"on {len(VARIABLE)} distributions, {' and '.join(map(str, paddings))} workers: {percent(min(means))} to "
            f"{percent(max(means))} of the "
            "padding tokens of first-come packing",
        ),
        _published(means, [value for found in paddings.values() for value in points(found)]),
        _homogeneous(paddings[max(paddings)], workers=max(paddings)),
        _faster(seconds),
    ]


def points(paddings: Paddings) -> list[float]:
    """By variable distribution: how much smaller a share of the slots is padding with greedy than with first-come."""
    return [fmean(column(paddings, name, "first-come")) - fmean(column(paddings, name, "greedy")) for name in VARIABLE]


def _published(means: Sequence[float], in_points: Sequence[float]) -> Verdict:
    is_at_least = [mean >= PUBLISHED_REDUCTION for mean in means]
    holds = True if all(is_at_least) else None if any(is_at_least) else False
    return Verdict(
        f"Greedy collation reduces padding by {percent(PUBLISHED_REDUCTION)}.",
        "M, online training",
        holds,
        f"at least as much of the padding tokens in {sum(is_at_least)} of {len(means)} cases; of all slots it is "
        f"{percent(min(in_points))} to {percent(max(in_points))}. The source says neither which, nor the lengths",
    )


def _homogeneous(paddings: Paddings, *, workers: int) -> Verdict:

    def worst(way: str) -> float:
        return max(fmean(column(paddings, name, way, "imbalance")) for name in VARIABLE)

    return Verdict(
        "Greedy collation ensures a homogeneous workload across training workers.",
        "M, online training",
        worst("greedy") <= SMALL_IMBALANCE,
        f"{workers} workers with preset shares wait up to {percent(worst('greedy'))} of their slots for the slowest "
        f"(first-come {percent(worst('first-come'))}); with shares dealt by length up to "
        f"{percent(worst('greedy, balanced'))}",
    )


def _faster(seconds: Seconds) -> Verdict:
    """Greedy against both others in microbatches of a fixed size: in every repeat of every distribution, or not."""
    pairs = [
        (mine, other)
        for name in VARIABLE
        for way in ("no packing", "first-come, filled")
        for mine, other in zip(seconds[name]["greedy, filled"], seconds[name][way], strict=True)
    ]
    faster = sum(mine < other for mine, other in pairs)
    ratios = {
        way: fmean(fmean(seconds[name][way]) / fmean(seconds[name]["greedy, filled"]) for name in VARIABLE)
        for way in ("no packing", "first-come, filled")
    }
    return Verdict(
        "Less padding takes less time.",
        "M8",
        True if faster == len(pairs) else False if faster <= len(pairs) // 2 else None,
        f"greedy was the faster one in {faster} of {len(pairs)} pairs; no packing takes {ratios['no packing']:.2f} "
        f"times as long, first-come {ratios['first-come, filled']:.2f} times",
    )


def percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def section(lab: Lab) -> Section:
    by_workers = {workers: measured_paddings(lab, capacity=CAPACITY, workers=workers) for workers in WORKERS}
    by_capacity = {capacity: measured_paddings(lab, capacity=capacity, workers=1) for capacity in CAPACITIES}
    seconds = measured_seconds(lab)
    tables = {
        f"Share of slots that are padding, {_of(workers)}": padding_table(found, balanced=workers > 1)
        for workers, found in by_workers.items()
    }
    tables["Seconds of forward, backward and update, one worker"] = seconds_table(seconds)
    return Section(
        title="Greedy collation",
        question="How much padding and time does greedy collation save, for which lengths?",
        setup=f"{COMPLETIONS} completions per worker and minibatch, {len(DISTRIBUTIONS)} distributions of 16 to "
        f"{LONGEST} tokens, microbatches of {CAPACITY} tokens; means over {len(SEEDS)} seeds. *No packing*: "
        f"{CAPACITY // LONGEST} rows padded to the longer one; *first-come*: packed in order of arrival; *greedy*: "
        "longest first, where it first fits. Packed microbatches count as full. Workers wait for the one with the "
        "most slots. Times: a 0.6M-parameter model; *filled* computes the padding of microbatches of a fixed size, "
        "Slipstream's own have none.",
        tables=tables,
        figures={"Padding by distribution, and by the size of a microbatch": figure(by_workers, by_capacity)},
        verdicts=verdicts(by_workers, seconds),
        notes=[
            "Reductions are of padding tokens, padding / (1 - padding) per real token: fewer slots also make the "
            "whole smaller.",
            f"With equal lengths ({CONSTANT} tokens) only the padding of the last microbatch can be saved.",
        ],
        cost="five minutes on two cores",
    )


def _of(workers: int) -> str:
    return "one worker" if workers == 1 else f"{workers} workers with preset shares"


def padding_table(paddings: Paddings, *, balanced: bool) -> str:
    head = ["lengths", "no packing", "first-come", "greedy", "padding tokens saved"]
    rows = []
    for name in DISTRIBUTIONS:
        saved = spread(reductions(paddings)[name], 2) if name in VARIABLE else ""
        row = [name, *(spread(column(paddings, name, way)) for way in ("no packing", "first-come", "greedy")), saved]
        rows.append([*row, spread(column(paddings, name, "greedy, balanced"))] if balanced else row)
    return markdown_table([*head, "greedy, shares by length"] if balanced else head, rows)


def seconds_table(seconds: Seconds) -> str:
    return markdown_table(
        ["lengths", *LAYOUTS],
        [[name, *(spread(seconds[name][layout], 2) for layout in LAYOUTS)] for name in DISTRIBUTIONS],
    )


def figure(by_workers: Mapping[int, Paddings], by_capacity: Mapping[int, Paddings]) -> str:
    drawn, axes = panels([f"Padding, {_of(workers)}" for workers in by_workers] + ["Greedy, one worker"])
    ways = ("no packing", "first-come", "greedy")
    for axis, paddings in zip(axes, by_workers.values(), strict=False):
        places = np.arange(len(DISTRIBUTIONS))
        for index, way in enumerate(ways):
            heights = [fmean(column(paddings, name, way)) for name in DISTRIBUTIONS]
            axis.bar(places + 0.27 * (index - 1), heights, 0.25, label=way, color=COLOURS[index])
        axis.set_xticks(places, [_short(name) for name in DISTRIBUTIONS], fontsize=7)
        axis.set_ylabel("share of slots")
        axis.legend(frameon=False, fontsize=8)
    last = axes[-1]
    capacities = sorted(by_capacity)
    lines(
        last,
        {
            _short(name): (
                [capacity / LONGEST for capacity in capacities],
                [column(by_capacity[capacity], name, "greedy") for capacity in capacities],
            )
            for name in VARIABLE
        },
    )
    last.set_xscale("log", base=2)
    ticks(last.xaxis, [capacity / LONGEST for capacity in capacities])
    last.set_xlabel("microbatch / longest sequence")
    last.set_ylabel("padding, share of slots")
    last.legend(frameon=False, fontsize=8)
    return svg(drawn)


def _short(name: str) -> str:
    return name.split(",")[0].split(":")[0]
