"""The line charts of both pages: one table of them, and the cards that charts and their numbers come in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.core.observe_sections import AlarmName
from slipstream.observe.evaluation import MOMENTS
from slipstream.observe.report.data import CLOCKS, Clock, Compared, RunData
from slipstream.observe.report.html import card, cards, folded, folded_on_phones, part, table, text
from slipstream.observe.svg import Axis, Band, Series, Spot, line_chart, line_legend, number, scatter, smoothed, thin
from slipstream.observe.svg_blocks import Column, heat_map, merged, percent_name

TABLE_ROWS = 12
Part = Literal["learning", "off-policy", "time"]


class Chart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics over the steps, as a card of a part of a page; `charts.toml` says what its fields are.

    `is_of_changes`: drawn only where the value of its metric changes.
    """

    part: Part
    title: str
    axis: Axis
    lines: list[tuple[str, str, int]]
    note: str = ""
    compared: str = ""
    alarms: list[AlarmName] = []
    limits: dict[str, float] = {}
    is_smooth: bool = True
    is_of_changes: bool = False

    def drawn(self, run: RunData) -> str:
        """The card of a run's own page; nothing where none of it was measured."""
        history, window = run.history, run.history.window if self.is_smooth else 1
        lines = [Series(words, history.points(name), hue, smooth=window) for name, words, hue in self.lines]
        if not self.note or (self.is_of_changes and len(set(history.values(self.lines[0][0]))) < 2):
            return ""
        limit, cut = run.config.get("generator", {}).get("max_new_tokens"), history.values("truncated_frac")
        note = self.note.format(
            allowed=f"At most {limit} are allowed. " if limit else "",
            cut=f" Cut off at the limit in the last step: {cut[-1]:.1%}." if cut else "",
        )
        return chart_card(self.title, note, lines, self.axis, alarm_bands(run, self.alarms), limits=self.limits)


CHARTS = msgspec.toml.decode(Path(__file__).with_name("charts.toml").read_bytes(), type=dict[str, list[Chart]])["chart"]


def charts(run: RunData, part: Part) -> list[str]:
    """The cards of one part of a run's own page, those of metrics that it has."""
    return [chart.drawn(run) for chart in CHARTS if chart.part == part]


def overlays(runs: Sequence[Compared], part: Part) -> list[str]:
    """The cards of one part of a comparison; runs that lack a metric have no line."""
    chosen = [chart for chart in CHARTS if chart.part == part and chart.compared]
    return [chart_card(one.title, one.compared, overlaid(runs, one.lines[0][0], "step"), one.axis) for one in chosen]


def overlaid(runs: Sequence[Compared], metric: str, clock: Clock) -> list[Series]:
    """The lines of several runs: smooth, or with dots where it was measured now and then."""
    is_held_out = metric.startswith("eval_")
    found = [(one, one.run.history.points(metric, clock), one.run.history.window) for one in runs]
    return [
        Series(one.name, points if is_held_out else smoothed(points, window), one.hue, has_dots=is_held_out)
        for one, points, window in found
    ]


def chart_card(
    title: str,
    note: str,
    series: Sequence[Series],
    y: Axis,
    bands: Sequence[Band] = (),
    *,
    limits: Mapping[str, float] | None = None,
    x: Axis = Axis("step"),
    folds: bool = True,
) -> str:
    """A line chart in a card, with its numbers; nothing where there are no points."""
    series = [one for one in series if one.points]
    if not series:
        return ""
    chart = line_chart(series, title=title, x=x, y=y, bands=bands, limits=limits)
    return card(title, note, chart, details=numbers(series, x.label), folds=folds)


def three_clocks(
    title: str,
    note: str,
    runs: Sequence[RunData],
    series_of: Callable[[Clock], list[Series]],
    y: Axis,
    *,
    height: int = 180,
) -> str:
    """Draw the same lines against steps, tokens and time, beside each other, in a card; nothing without points."""
    pictures = []
    for clock in CLOCKS:
        longest = max((run.history.clocks[clock][-1] for run in runs if run.history.steps), default=0.0)
        axis, divisor = clock_axis(clock, longest)
        series = [replace(one, points=[(x / divisor, y) for x, y in one.points]) for one in series_of(clock)]
        if not any(one.points for one in series):
            return ""
        chart = line_chart(series, title=f"{title} by {axis.label}", x=axis, y=y, height=height, has_legend=False)
        pictures.append(f"<div>{chart}</div>")
    series = series_of("step")
    first, *others = pictures
    rest = folded_on_phones("The same by tokens and by time", "".join(others))
    content = f'{line_legend(series)}<div class="triple">{first}{rest}</div>'
    return card(title, note, content, size="wide", details=numbers(series, "step"))


def clock_axis(clock: Clock, longest: float) -> tuple[Axis, float]:
    """The axis of a clock that goes up to `longest`, and what its values are divided by for it."""
    if clock != "time":
        return Axis("step" if clock == "step" else "tokens trained on"), 1.0
    units = (("seconds", 1.0, 180.0), ("minutes", 60.0, 180 * 60.0), ("hours", 3600.0, 96 * 3600.0))
    unit, divisor = next(((name, length) for name, length, most in units if longest <= most), ("days", 86400.0))
    return Axis(f"{unit} since RL began"), divisor


def alarm_bands(run: RunData, names: Iterable[AlarmName]) -> list[Band]:
    """The steps in which one of these alarms was on."""
    last = sum(run.history.clocks["step"][-1:])
    chosen = [alarm for alarm in run.alarms if alarm.name in names]
    return [Band(float(a.began), last if a.ended is None else float(a.ended), f"alarm {a.name}") for a in chosen]


def numbers(series: Sequence[Series], label: str) -> str:
    """The lines of a chart as a table, thinned to a few rows, for who would rather read, or cannot see."""
    rows: dict[float, dict[str, float]] = {}
    for one in series:
        for x, y in thin(one.points, TABLE_ROWS):
            rows.setdefault(x, {})[one.name] = y
    body = (
        [text(number(x)), *(number(rows[x][s.name]) if s.name in rows[x] else "" for s in series)] for x in sorted(rows)
    )
    return folded("Numbers", table([label, *(one.name for one in series)], body, kind="numbers"))


def heat_card(
    title: str,
    note: str,
    columns: Sequence[Column],
    rows: Sequence[str],
    *,
    label: str,
    left: int,
    lines_above: Mapping[str, str] | None = None,
    missing: str = "Nothing was measured.",
    folds: bool = True,
) -> str:
    """A heat map over the steps in a card, with its columns as a table of shares, added up to a few."""
    body = []
    for column in merged(columns, TABLE_ROWS):
        whole = sum(column.counts.values())
        if whole > 0.0:
            shares = (percent_name(column.counts.get(row, 0.0) / whole) for row in rows)
            body.append([f"{number(column.start)} – {number(column.end)}", *shares])
    chart = heat_map(
        columns, rows, title=title, x=Axis("step"), label=label, left=left, lines_above=lines_above, missing=missing
    )
    details = folded("Numbers", table(["step", *rows], body, kind="numbers"))
    return card(title, note, chart, details=details, folds=folds)


# Evaluations at the end: what was gained, at what price


EvaluatedRun = tuple[str, int, Mapping[str, Any]]
"""The name of a run, its colour and the findings of the stage `evaluate`."""


def gained(content: Sequence[str]) -> str:
    """The part of a page about evaluations."""
    lead = "Measured by the evaluation at the end, on held-out prompts, before and after training."
    return part("evaluation", "What was gained, at what price?", lead, [cards(*content)])


def against_kl(runs: Sequence[EvaluatedRun]) -> str:
    """Gold win rate against KL to the reference, before and after RL."""
    if not (spots := spots_of(runs)):
        return ""
    x = Axis("KL to the reference, nats per completion", low=0.0)
    y, level = Axis("gold win rate", low=0.0, is_share=True), {"as good as the references": 0.5}
    note = (
        "Hollow before training, full after it, with standard errors; dashed: as good as the references. Up is better. "
        "Far to the right and not up, the policy has learned what the reward likes and gold does not."
    )
    hues = {spot.hue for spot in spots}
    legend = line_legend([Series(name, [], hue, has_dots=True) for name, hue, _ in runs if name and hue in hues])
    title = "Gold win rate against KL"
    return card(title, note, legend + scatter(spots, title=title, x=x, y=y, limits=level))


def spots_of(runs: Sequence[EvaluatedRun]) -> list[Spot]:
    """The moments at which win rate and KL were both measured, as points."""
    spots = []
    for name, hue, found in runs:
        for moment in MOMENTS:
            rate, drift = found[moment]["gold"].get("win_rate"), found[moment]["drift"]["kl"]
            moved = drift and drift["per_sequence"]
            if rate is None or moved is None or rate["mean"] is None or moved["mean"] is None:
                continue
            errors = moved["standard_error"] or 0.0, rate["standard_error"] or 0.0
            called = f"{name}, {moment} RL" if name else f"{moment} RL"
            spots.append(Spot(called, moved["mean"], rate["mean"], hue, *errors, is_hollow=moment == MOMENTS[0]))
    return spots
