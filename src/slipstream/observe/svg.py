"""The drawing library of the report: inline SVG without scripts, fonts or network; colours and type come from its CSS.

Plots are fluid: across they are drawn in percent of whatever width the page gives them, down in pixels, so text has one
size on a phone and on a wide screen. Where there is something to read off, an invisible strip carries the numbers as a
native tooltip. All text is escaped here. This file has scales, lines and points; `svg_blocks.py` has blocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import TypeVar

import numpy as np

MAX_POINTS = 300  # of a line; a longer one becomes means of equal runs of neighbours, in a band of their extremes
FEW_DOTS = 8  # of a line; more are small, or there would be nothing but dots
MAX_STRIPS = 80  # of tooltips across a plot
BLUE, ORANGE, GREEN, PURPLE = 0, 1, 2, 3  # the first hues
NUM_HUES = 7  # hues are the colours .c0 to .c6 of the style sheet; from the eighth on they come again, dashed
ACROSS = 1000.0  # units of a plot's width within its lines
MIN_SPAN = 0.5  # of its largest value: what an axis that does not begin at 0 spans at least
MIN_RATIO = 4.0  # of the ends of a logarithmic axis

T = TypeVar("T")
Point = tuple[float, float]
_UNITS = ((1e9, 1e8, "G"), (1e6, 1e5, "M"), (1e3, 1e3, "k"))  # with the least gap between ticks told in them
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Axis:
    """An axis and the name of its quantity. `low` and `high` lie on it, whatever the data are."""

    label: str
    low: float | None = None
    high: float | None = None
    is_log: bool = False
    is_share: bool = False  # ticks in percent


@dataclass(frozen=True)
class Series:
    """A line through points ascending in x. `smooth` > 1 draws it faintly, and over it the mean of so many neighbours.

    `has_dots`: a dot on every point, for measurements with nothing between them.
    """

    name: str
    points: Sequence[Point]
    hue: int
    smooth: int = 1
    has_dots: bool = False
    is_dashed: bool = False

    @property
    def kind(self) -> str:
        """Classes of its colour and stroke."""
        return f"c{self.hue % NUM_HUES}{' dashed' if self.is_dashed or self.hue >= NUM_HUES else ''}"


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis in which something was wrong."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Spot:
    """A point of a scatter plot, with its standard errors; joined with the one before it of the same `hue`."""

    name: str
    x: float
    y: float
    hue: int
    x_error: float = 0.0
    y_error: float = 0.0
    is_hollow: bool = False


@dataclass(frozen=True)
class Scale:
    """Values as places from 0 to 1, and the round values between."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    is_share: bool = False

    def at(self, value: float) -> float:
        """The place of `value`; the nearer end for one beyond."""
        low, high, here = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, here = math.log(low), math.log(high), math.log(here)
        return (here - low) / (high - low)

    def name(self, tick: float) -> str:
        """`tick` in the unit of its neighbours, with as many digits as tell them apart: 0.25, 30%, 1,500, 20k, 3M."""
        gap = 0.0 if self.is_log else min((b - a for a, b in pairwise(self.ticks)), default=0.0)
        factor, sign = (100.0, "%") if self.is_share else (1.0, "")
        if not self.is_share:
            largest = max(map(abs, self.ticks), default=0.0)
            unit, sign = next(((u, name) for u, least, name in _UNITS if largest >= u and gap >= least), (1.0, ""))
            factor = 1.0 / unit
        return tick_name(tick * factor, gap * factor) + (sign if tick or self.is_share else "")


def axis_ends(low: float, high: float, *, is_amount: bool = False) -> tuple[float, float]:
    """Return where an axis of values from `low` to `high` begins and ends at least: the rule of every chart.

    An amount (a share, a count, a length, a time) begins at 0, and so does what comes down to MIN_SPAN of its largest
    value. What stays away from 0 is shown around its middle on an axis that spans MIN_SPAN of the largest value, so
    that a change of a percent looks like one.
    """
    if low < 0.0 < high or low == high == 0.0:
        return low, high
    if high <= 0.0:
        end, begin = axis_ends(-high, -low, is_amount=is_amount)
        return -begin, -end
    if is_amount or low < MIN_SPAN * high:
        return 0.0, high
    middle = (low + high) / 2
    return min(low, middle - MIN_SPAN * high / 2), max(high, middle + MIN_SPAN * high / 2)


def scale_of(values: Iterable[float], axis: Axis, *, most: int, is_fitted: bool = False) -> Scale:
    """The scale of `values` with about `most` ticks. `is_fitted`: it ends where the values do, else at ticks, by the
    rule of `axis_ends` (a logarithmic one spans at least a factor of MIN_RATIO); of whole values it has whole ticks."""
    found = [*values, *(end for end in (axis.low, axis.high) if end is not None)]
    if axis.is_log:
        found = [value for value in found if value > 0.0] or [1.0]
        low, high = min(found), max(found)
        margin = max(1.04, math.sqrt(MIN_RATIO / (high / low)), (high / low) ** 0.06)
        low, high = (low, high) if is_fitted and high > low else (low / margin, high * margin)
        marks = [tick for tick in log_ticks(low, high) if low <= tick <= high]
        return Scale(low, high, tuple(marks), is_log=True, is_share=axis.is_share)
    low, high = min(found), max(found)
    if is_fitted and high > low:
        slack = 1e-9 * (high - low)
        marks = [tick for tick in ticks(low, high, most) if low - slack <= tick <= high + slack]
        if all(value == round(value) for value in found):  # steps, ages, tokens: there is nothing between them
            marks = [tick for tick in marks if abs(tick - round(tick)) < 1e-9]
        return Scale(low, high, tuple(marks), is_share=axis.is_share)
    if not is_fitted:
        low, high = axis_ends(low, high, is_amount=axis.is_share)
    slack = 0.01 * (high - low)  # what is as little beyond a tick does not ask for another one
    marks = ticks(low + slack, high - slack, most)
    return Scale(marks[0], marks[-1], tuple(marks), is_share=axis.is_share)


# Charts of lines and points


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x: Axis,
    y: Axis,
    bands: Sequence[Band] = (),
    limits: Mapping[str, float] | None = None,
    height: int = 180,
    has_legend: bool = True,
) -> str:
    """Lines over a common x axis. `limits` are named values, as horizontal lines."""
    if y.is_log:  # a logarithm has no place for 0 and less
        series = [replace(one, points=[point for point in one.points if point[1] > 0.0]) for one in series]
    series = [one for one in series if one.points]
    if not series:
        return empty("Nothing was measured.")
    limits = limits or {}
    strokes = [_strokes(one) for one in series]
    across = scale_of((point[0] for one in series for point in one.points), x, most=5, is_fitted=True)
    up = scale_of([v for parts in strokes for part in parts for _, v in part] + [*limits.values()], y, most=5)
    place = _places(across, up, height)
    lines, dots = [], []
    for one, (line, faint, envelope) in zip(series, strokes, strict=True):
        shapes = {"envelope": envelope, "faint": faint, "line": line}
        lines += [curve(kind, one.kind, map(place, points)) for kind, points in shapes.items() if points]
        if one.has_dots or len(line) == 1:
            kind, radius = ("dot", 3.5) if len(line) <= FEW_DOTS else ("dot small", 2.2)
            dots += [_dot(f"{kind} {one.kind}", place(point), radius) for point in line]
    lines += _limit_lines(limits, up, height)
    shaded = [(across.at(band.start), across.at(band.end), band.text) for band in bands]
    parts = [
        *(
            element("rect", "band", tip, x=percent(start), width=percent(max(end - start, 0.004)), height=height)
            for start, end, tip in shaded
        ),
        *axes(across, up, x.label, height),
        inner(lines, height),
        *dots,
        *_line_strips(series, across, x.label, height),
    ]
    names = line_legend(series, limits) if has_legend and (len(series) > 1 or limits) else ""
    return names + plot(parts, title=title, about=_about(series, x), height=height, label=y.label)


def scatter(
    spots: Sequence[Spot], *, title: str, x: Axis, y: Axis, limits: Mapping[str, float] | None = None, height: int = 260
) -> str:
    """Points with standard errors; those of one hue are joined in their order. At least one."""
    limits = limits or {}
    across = scale_of([v for s in spots for v in (s.x - s.x_error, s.x + s.x_error)], x, most=5)
    up = scale_of([v for s in spots for v in (s.y - s.y_error, s.y + s.y_error)] + list(limits.values()), y, most=5)
    place = _places(across, up, height)
    lines, dots = _limit_lines(limits, up, height), []
    for hue in dict.fromkeys(spot.hue for spot in spots):
        lines.append(curve("faint", f"c{hue % NUM_HUES}", (place((s.x, s.y)) for s in spots if s.hue == hue)))
    for s in spots:
        kind = f"c{s.hue % NUM_HUES}"
        sideways = [(s.x - s.x_error, s.y), (s.x + s.x_error, s.y)]
        upright = [(s.x, s.y - s.y_error), (s.x, s.y + s.y_error)]
        lines += [curve("error", kind, map(place, ends)) for ends in (sideways, upright)]
        tip = f"{s.name}\n{x.label} {number(s.x)} ± {number(s.x_error)}\n{y.label} {number(s.y)} ± {number(s.y_error)}"
        dots.append(_dot(f"{'hollow' if s.is_hollow else 'dot'} {kind}", place((s.x, s.y)), 5, tip))
    about = "; ".join(f"{s.name}: {x.label} {number(s.x)}, {y.label} {number(s.y)}" for s in spots)
    parts = [*axes(across, up, x.label, height), inner(lines, height), *dots]
    return plot(parts, title=title, about=about, height=height, label=y.label)


def _places(across: Scale, up: Scale, height: float) -> Callable[[Point], Point]:
    return lambda point: (across.at(point[0]), height * (1.0 - up.at(point[1])))


def _dot(kind: str, place: Point, radius: float, tip: str = "") -> str:
    return element("circle", kind, tip, cx=percent(place[0]), cy=place[1], r=radius)


def _limit_lines(limits: Mapping[str, float], up: Scale, height: float) -> list[str]:
    levels = [height * (1.0 - up.at(value)) for value in limits.values()]
    return [curve("limit", "", [(0.0, level), (1.0, level)]) for level in levels]


def _strokes(series: Series) -> tuple[list[Point], list[Point], list[Point]]:
    """Return the drawn line of a series, the points behind it and the band around it.

    That is every point where there are few, else means, and the band that they were taken from.
    """
    points, window = list(series.points), series.smooth | 1
    line = thin(smoothed(points, window) if window > 1 else points)
    if len(points) <= MAX_POINTS:
        return line, points if window > 1 else [], []
    parts = list(zip(runs(points, MAX_POINTS), (x for x, _ in line), strict=True))
    tops, bottoms = ([(x, end(y for _, y in part)) for part, x in parts] for end in (max, min))
    return line, [], tops + bottoms[::-1]


def _line_strips(series: Sequence[Series], across: Scale, label: str, height: float) -> Iterator[str]:
    """Tooltips with the mean of each series between two borders, which lie between points where these are few."""
    places = sorted({across.at(x) for one in series for x, _ in one.points})
    if len(places) > MAX_STRIPS:
        borders = [i / MAX_STRIPS for i in range(MAX_STRIPS + 1)]
    else:
        borders = [0.0, *((a + b) / 2 for a, b in pairwise(places)), 1.0]
    inside: dict[int, dict[int, list[Point]]] = {}  # border -> series -> points
    for index, one in enumerate(series):
        for x, y in one.points:
            border = min(bisect_left(borders, across.at(x), lo=1), len(borders) - 1)
            inside.setdefault(border, {}).setdefault(index, []).append((x, y))
    for border, lines in sorted(inside.items()):
        ends = [x for points in lines.values() for x, _ in points]
        low, high = min(ends), max(ends)
        where = number(low) if low == high else f"{number(low)} to {number(high)}"
        told = [f"{series[i].name}: {number(sum(y for _, y in own) / len(own))}" for i, own in sorted(lines.items())]
        yield strip(borders[border - 1], borders[border], height, "\n".join([f"{label}: {where}", *told]))


def _about(series: Sequence[Series], x: Axis) -> str:
    """Describe a chart in words: where each line begins and ends."""

    def told(one: Series) -> str:
        ends = (f"{number(y)} at {x.label} {number(at)}" for at, y in (one.points[0], one.points[-1]))
        return f"{one.name}: {', '.join(ends)}"

    return ". ".join(map(told, series))


# The pieces that plots are made of


def plot(
    parts: Iterable[str],
    *,
    title: str,
    about: str,
    height: float,
    label: str = "",
    left: int = 46,
    right: int = 16,
    has_axes: bool = True,
) -> str:
    """The drawing area. It is as wide as the page leaves it less `left` and `right` pixels, where labels stick out."""
    name = word("axis", f"-{left}", -13, label) if label else ""
    kind = "plot" if has_axes else "plot bare"
    return (
        f'<svg class="{kind}" role="img" height="{height:g}" style="--left:{left}px;--right:{right}px">'
        f"<title>{escape(title)}</title><desc>{escape(about)}</desc>{name}{''.join(parts)}</svg>"
    )


def element(name: str, kind: str = "", tip: str = "", **attributes: float | str) -> str:
    """A shape of class `kind`, with a native tooltip where there is a `tip`; lengths in pixels have one decimal."""
    given = ({"class": kind} if kind else {}) | attributes
    told = "".join(
        f' {key.replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else escape(str(value))}"'
        for key, value in given.items()
    )
    return f"<{name}{told}><title>{escape(tip)}</title></{name}>" if tip else f"<{name}{told}/>"


def word(kind: str, x: str, y: float, text: str, *, dx: int = 0) -> str:
    """Text at a place."""
    shift = f' dx="{dx}"' if dx else ""
    return f'<text class="{kind}" x="{x}"{shift} y="{y:g}">{escape(text)}</text>'


def curve(kind: str, colour: str, places: Iterable[Point]) -> str:
    """A line of `inner` through `places`; an envelope is filled."""
    name = "polygon" if kind == "envelope" else "polyline"
    return element(name, f"{kind} {colour}".strip(), points=path(places))


def inner(lines: Sequence[str], height: float) -> str:
    """Lines and areas in units of (ACROSS, pixels), stretched over the drawing area; strokes keep their width."""
    return (
        f'<svg class="lines" viewBox="0 0 {ACROSS:g} {height:g}" width="100%" height="{height:g}" '
        f'preserveAspectRatio="none">{"".join(lines)}</svg>'
    )


def axes(across: Scale, up: Scale, label: str, height: float) -> list[str]:
    """Both axes, with grid lines at the values of the upright one, which stand on its left."""
    rows = [(up.name(tick), height * (1.0 - up.at(tick))) for tick in up.ticks]
    grid = [element("line", "grid", x1=0, x2="100%", y1=y, y2=y) + word("tick end", "-7", y + 4, n) for n, y in rows]
    return [*grid, x_axis(across, label, height)]


def x_axis(across: Scale, label: str, height: float) -> str:
    marks = [(across.name(tick), percent(across.at(tick))) for tick in across.ticks]
    ticks_ = (
        element("line", "grid", x1=x, x2=x, y1=height, y2=height + 4) + word("tick mid", x, height + 17, name)
        for name, x in marks
    )
    return "".join(ticks_) + word("axis end", "100%", height + 33, label)


def path(places: Iterable[Point]) -> str:
    """Places (0 to 1, pixels) as the points of a line within `inner`."""
    return " ".join(f"{ACROSS * across:.4g},{down:.4g}" for across, down in places)


def percent(place: float) -> str:
    return f"{100 * place:.4g}%"


def strip(start: float, end: float, height: float, tip: str) -> str:
    """An invisible stretch of a plot, places 0 to 1, that says `tip` when it is pointed at."""
    return element("rect", "strip", tip, x=percent(start), width=percent(end - start), height=height)


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """(name, class, colour or "") of what is drawn, as HTML in front of a plot."""
    items = ""
    for name, kind, colour in entries:
        style = f' style="background-color:{colour}"' if colour else ""
        items += f'<span><i class="key {kind}"{style}></i>{escape(name)}</span>'
    return f'<div class="legend">{items}</div>' if items else ""


def line_legend(series: Sequence[Series], limits: Iterable[str] = ()) -> str:
    """The legend of a line chart."""
    entries = [(one.name, f"{'spot' if one.has_dots else 'stroke'} {one.kind}", "") for one in series]
    return legend([*entries, *((name, "stroke limit", "") for name in limits)])


def empty(reason: str) -> str:
    """Return the paragraph in place of a plot without data."""
    return f'<p class="empty">{escape(reason)}</p>'


# Numbers


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most `most` points: means over equal runs of neighbours."""
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs(points, most)]


def runs(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """`items` in at most `most` runs of neighbours of equal length, the last one perhaps shorter."""
    size = max(1, math.ceil(len(items) / most))
    return [items[i : i + size] for i in range(0, len(items), size)]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Each y as the mean of the `window` (odd) ones around it, at the ends of those that there are.

    Numbers are added within blocks of `window`: one around a point is the end of a block and the start of the next.
    """
    if not points:
        return []
    num, half = len(points), window // 2
    blocks = np.zeros((-(-(num + 2 * half) // window), window))
    blocks.flat[half : half + num] = [y for _, y in points]
    to_end = blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel()[:num]
    from_start = blocks.cumsum(axis=1).ravel()[window - 1 :][:num]
    places = np.arange(num)
    sums = to_end + np.where(places % window, from_start, 0.0)
    counts = np.minimum(places + half, num - 1) - np.maximum(places - half, 0) + 1
    return [(x, float(total / count)) for (x, _), total, count in zip(points, sums, counts, strict=True)]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `most` of them."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, or of a hundred and so on, around `low` to `high` where these are far apart; else 1, 2 and 5 times
    powers of ten, or finer ones, so that at least two lie between."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 3:
        pitch = math.ceil((last - first) / 6)
        return [10.0**power for power in range(first, last + 1) if power % pitch == 0]
    for steps in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        marks = [m * 10.0**power for power in range(first, last + 1) for m in steps]
        if sum(low <= mark <= high for mark in marks) > 1:
            return marks
    return ticks(low, high, 4)


def tick_name(tick: float, gap: float) -> str:
    """A tick `gap` from the next one; of no gap, on a logarithmic axis, as a power of ten where it is far from 1."""
    if gap < 1e-4:
        power = round(math.log10(abs(tick)), 9) if tick else 0.0
        if power == round(power) and not -4 < power < 4:
            return "10" + f"{power:.0f}".translate(_RAISED)
        return number(tick)
    decimals = next((d for d in range(4) if abs(gap * 10**d - round(gap * 10**d)) < 1e-6), 4)
    return f"{tick if tick else 0.0:,.{decimals}f}"


def number(value: float) -> str:
    """`value` with the digits a reader needs: 1,234 and 0.912 and 3."""
    if value == round(value) or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def without_middle(name: str, most: int) -> str:
    """`name` without its middle where it has more than `most` letters."""
    return name if len(name) <= most else f"{name[: most - most // 2 - 1]}…{name[len(name) - most // 2 :]}"
