"""Plots made of blocks: heat maps, stacked areas, bars divided by states, Gantt charts. See `svg.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

from slipstream.observe import svg
from slipstream.observe.states import colour, in_words, kind, shares, totals_of

MAX_COLUMNS = svg.MAX_STRIPS
LETTER = 7.2  # pixels of a letter on a bar
NARROW = 325.0  # pixels of a bar on a phone: what is written on it must fit there
GANTT_WIDTH = 680.0  # pixels: the narrowest Gantt chart (`.gantt` in the style sheet scrolls)
MAX_NAME = 36  # letters over a bar
CELLS = 1600  # of a Gantt row: shorter stretches of time are drawn as whatever takes most of such a cell
SHADES = 20
LEGEND_SHARE = 0.01
HATCHED = 0.004  # of the width: narrower blocks have no room for stripes


@dataclass(frozen=True)
class Column:
    """Counts between `start` and `end` of the x axis, by row (heat map) or by state (stacked areas)."""

    start: float
    end: float
    counts: Mapping[str, float]


@dataclass(frozen=True)
class Bar:
    """A stretch of a Gantt row, in seconds. `detail` is told of it beside its state and length; `text` is written on
    the widest stretch that has it, where there is room."""

    state: str
    start_s: float
    end_s: float
    detail: str = ""
    text: str = ""

    @property
    def tip(self) -> str:
        told = f"{in_words(self.state)} {svg.number((self.end_s - self.start_s) * 1e3)} ms"
        return f"{told}, {self.detail}" if self.detail else told


@dataclass(frozen=True)
class GanttRow:
    """A process in the Gantt chart. `marks` are (seconds, text) of instants."""

    name: str
    bars: Sequence[Bar]
    marks: Sequence[tuple[float, str]]


def heat_map(
    columns: Sequence[Column],
    rows: Sequence[str],
    *,
    title: str,
    x: svg.Axis,
    label: str,
    left: int = 46,
    lines_above: Mapping[str, str] | None = None,
    missing: str = "Nothing was measured.",
) -> str:
    """How a whole is divided among `rows` (from the bottom up), column by column: the darker, the larger the share.

    On the right, each row's share of everything. `lines_above` draws a named line over a row.
    """
    columns = merged(columns, MAX_COLUMNS)
    totals = totals_of(column.counts for column in columns)
    everything = sum(totals.values())
    if everything <= 0.0:
        return svg.empty(missing)
    pitch = max(15.0, 195.0 / max(2, len(rows)))
    height = pitch * len(rows)
    across = svg.scale_of([columns[0].start, columns[-1].end], x, most=5, is_fitted=True)
    tops = {row: height - pitch * (i + 1) for i, row in enumerate(rows)}
    whole = {row: percent_name(totals.get(row, 0.0) / everything) for row in rows}
    parts = [svg.word("axis", "100%", -13, "all", dx=7)]
    for row, top in tops.items():
        middle = round(top + pitch / 2 + 4, 1)
        parts += [svg.word("tick end", "-7", middle, row), svg.word("tick", "100%", middle, whole[row], dx=7)]
        for shade, run in groupby(((_shade(column.counts, row), column) for column in columns), key=itemgetter(0)):
            own = [column for _, column in run]
            start, end = across.at(own[0].start), across.at(own[-1].end)
            where: dict[str, Any] = {"x": svg.percent(start), "y": top, "width": svg.percent(end - start)}
            if shade:
                parts.append(svg.element("rect", "heat", **where, height=pitch, fill_opacity=f"{shade / SHADES:g}"))
    for row, name in (lines_above or {}).items():
        parts.append(svg.element("line", "limit", x1=0, x2="100%", y1=tops[row], y2=tops[row]))
        parts.append(svg.word("tick end", "100%", round(tops[row] - 4, 1), name, dx=-4))
    parts += [*_column_strips(columns, rows, across, x.label, height, str)]
    parts += [svg.element("rect", "frame", width="100%", height=height), svg.x_axis(across, x.label, height)]
    about = "Of everything: " + ", ".join(f"{row} {share}" for row, share in whole.items())
    return shade_key() + svg.plot(parts, title=title, about=about, height=height, label=label, left=left, right=48)


def areas(
    columns: Sequence[Column],
    *,
    title: str,
    x: svg.Axis,
    order: Sequence[str],
    height: int = 150,
) -> str:
    """How a process's time is divided among states, column by column; `order` from the bottom up."""
    columns = [c for c in merged(columns, MAX_COLUMNS) if sum(c.counts.values()) > 0.0]
    totals = totals_of(column.counts for column in columns)
    states = [state for state in order if totals.get(state, 0.0) > 0.0]
    if not states:
        return svg.empty("Nothing was recorded.")
    across = svg.scale_of([columns[0].start, columns[-1].end], x, most=5, is_fitted=True)
    up = svg.scale_of([0.0, 1.0], svg.Axis("", is_share=True), most=4)
    tops = [0.0] * len(columns)
    shapes = []
    for state in states:
        bottoms = tops
        tops = [top + c.counts.get(state, 0.0) / sum(c.counts.values()) for top, c in zip(tops, columns, strict=True)]
        upper, lower = (
            [(across.at(at), height * (1 - y)) for c, y in zip(columns, edge, strict=True) for at in (c.start, c.end)]
            for edge in (tops, bottoms)
        )
        outline = svg.path(upper + lower[::-1])
        shapes.append(svg.element("polygon", _pale(state), points=outline, fill=colour(state)))
        if kind(state) == "wait":
            shapes.append(svg.element("polygon", "hatch", points=outline))
    parts = [svg.inner(shapes, height), *svg.axes(across, up, x.label, height)]
    parts += _column_strips(columns, states, across, x.label, height, in_words)
    everything = sum(totals.values())
    about = ", ".join(f"{in_words(state)} {percent_name(totals[state] / everything)}" for state in states)
    return svg.plot(parts, title=title, about=about, height=height, label="share of its time")


def _column_strips(
    columns: Sequence[Column],
    rows: Sequence[str],
    across: svg.Scale,
    label: str,
    height: float,
    words: Callable[[str], str],
) -> Iterator[str]:
    """Tooltips with the shares of each column, from the top row down."""
    for column in columns:
        whole, counts = sum(column.counts.values()), column.counts
        if whole > 0.0:
            told = [f"{words(row)}: {percent_name(counts[row] / whole)}" for row in reversed(rows) if counts.get(row)]
            where = f"{label} {svg.number(column.start)} to {svg.number(column.end)}"
            yield svg.strip(across.at(column.start), across.at(column.end), height, "\n".join([where, *told]))


def state_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    is_scaled: bool = False,
    notes: Mapping[str, str] | None = None,
    missing: str = "Nothing was recorded.",
) -> str:
    """A bar per process, divided by its states in seconds: of full length, the largest first; or, `is_scaled`, as long
    as its seconds, which are then told, and all in one order. `notes` stand beside the names of processes. The legend
    leaves out what is less than LEGEND_SHARE of every bar."""
    pitch, bar = 50, 24
    rows = {name: seconds for name, seconds in rows.items() if shares(seconds)}
    if not rows:
        return svg.empty(missing)
    longest_s = max(sum(seconds.values()) for seconds in rows.values())
    order = work_first(rows.values())
    parts, told = [], []
    seen: dict[str, None] = {}
    for y, (name, seconds) in zip(range(0, pitch * len(rows), pitch), rows.items(), strict=True):
        total_s, found = sum(seconds.values()), shares(seconds)
        told_s = f" {svg.number(total_s)} s" if is_scaled else ""
        told.append(f"{name}{told_s}: " + ", ".join(f"{in_words(s)} {percent_name(share)}" for s, share in found[:4]))
        soft = told_s + (f"  {notes[name]}" if notes and name in notes else "")
        parts.append(_row_name(y, name, f'<tspan class="soft">{escape(soft)}</tspan>'))
        if is_scaled:
            found.sort(key=lambda item: order.index(item[0]))
        at, length = 0.0, total_s / longest_s if is_scaled else 1.0
        for state, share in found:
            if share >= LEGEND_SHARE:
                seen[state] = None
            width = share * length
            tip = f"{name}: {in_words(state)} {svg.number(seconds[state])} s, {percent_name(share)}"
            texts = (f"{in_words(state)} {share:.0%}", f"{share:.0%}")
            parts += [block(at, y + 19, width, bar, state, tip), *_on_bar(at, width, y + 19, bar, state, texts, NARROW)]
            at += width
    height = pitch * len(rows)
    drawn = svg.plot(parts, title=title, about="; ".join(told), height=height, left=0, right=0, has_axes=False)
    return state_legend(seen) + drawn


def gantt(
    rows: Sequence[GanttRow],
    *,
    title: str,
    start_s: float,
    end_s: float,
    origin: str = "",
) -> str:
    """Draw the slices of processes between two moments, counted from `origin`; instants are triangles under a row."""
    rows = [row for row in rows if row.bars]
    if not rows or end_s <= start_s:
        return svg.empty("Nothing was recorded.")
    pitch, bar = 56, 22
    height, length_s = pitch * len(rows), end_s - start_s
    unit, divisor = ("milliseconds", 1e-3) if length_s < 1.0 else ("seconds", 1.0)
    across = svg.scale_of([0.0, length_s / divisor], svg.Axis(""), most=8, is_fitted=True)
    places = [svg.percent(across.at(tick)) for tick in across.ticks]
    parts = [svg.element("line", "grid", x1=place, x2=place, y1=0, y2=height) for place in places]
    seen: dict[str, None] = {}
    for y, row in zip(range(0, height, pitch), rows, strict=True):
        parts.append(_row_name(y, row.name))
        shown = cells(row.bars, start_s, end_s)
        widest = {one.text: one for one in sorted(shown, key=lambda one: one.end_s - one.start_s)}
        for one in shown:
            seen[one.state] = None
            at, width = (one.start_s - start_s) / length_s, (one.end_s - one.start_s) / length_s
            parts.append(block(at, y + 18, width, bar, one.state, one.tip))
            if one.text and one is widest[one.text]:
                texts = (one.text, one.text.split()[-1])
                parts += _on_bar(at, width, y + 18, bar, one.state, texts, GANTT_WIDTH)
        for seconds, text in row.marks:
            triangle, at = svg.element("path", "", text, d="M-4 8 h8 l-4 -7 z"), (seconds - start_s) / length_s
            parts.append(f'<svg class="mark" x="{svg.percent(at)}" y="{y + 41}">{triangle}</svg>')
    parts.append(svg.x_axis(across, f"{unit} since {origin}" if origin else unit, height))
    marker = [("an event, such as a swap of weights", "triangle", "")] if any(row.marks for row in rows) else []
    about = f"{len(rows)} processes over {svg.number(length_s)} seconds: " + ", ".join(row.name for row in rows)
    drawn = svg.plot(parts, title=title, about=about, height=height, left=14, right=14)
    box = f'<div class="gantt" role="region" aria-label="{escape(title)}" tabindex="0">{drawn}</div>'
    return state_legend(seen, marker) + box


# The pieces


def work_first(parts: Iterable[Mapping[str, float]]) -> list[str]:
    """All states of several processes or columns: work before waiting, the largest of each first."""
    totals = totals_of(parts)
    return sorted(totals, key=lambda state: (kind(state) != "work", -totals[state]))


def merged(columns: Sequence[Column], most: int) -> list[Column]:
    """At most `most` columns: the sums of equal runs of neighbours."""
    return [
        Column(run[0].start, run[-1].end, totals_of(column.counts for column in run)) for run in svg.runs(columns, most)
    ]


def cells(bars: Sequence[Bar], start_s: float, end_s: float) -> list[Bar]:
    """`bars` cut to the window, in order of time. Those shorter than a cell of it give way to whatever takes most of
    each such cell; neighbours that are the same are joined."""
    cell_s = (end_s - start_s) / CELLS
    found: list[Bar] = []
    small: dict[int, dict[str, float]] = {}
    for bar in bars:
        first, last = max(bar.start_s, start_s), min(bar.end_s, end_s)
        if last - first >= cell_s:
            found.append(replace(bar, start_s=first, end_s=last))
        elif last > first:
            states = small.setdefault(int((first - start_s) / cell_s), {})
            states[bar.state] = states.get(bar.state, 0.0) + last - first
    for index, states in small.items():
        state = max(states, key=lambda name: states[name])
        found.append(Bar(state, start_s + index * cell_s, start_s + (index + 1) * cell_s))
    joined: list[Bar] = []
    for bar in sorted(found, key=lambda bar: bar.start_s):
        before = joined[-1] if joined else None
        is_same = before is not None and (before.state, before.detail, before.text) == (bar.state, bar.detail, bar.text)
        if before is not None and is_same and bar.start_s - before.end_s < cell_s:
            joined[-1] = replace(before, end_s=max(before.end_s, bar.end_s))
        else:
            joined.append(bar)
    return joined


def ranked(rows: Sequence[tuple[str, float, str]], *, hue: int) -> str:
    """(name, value, value in words), each with a bar as long as its value."""
    most = max((value for _, value, _ in rows), default=0.0)
    items = "".join(
        f'<li><span>{escape(name)}</span><b>{escape(words)}</b><svg class="bar" height="8" aria-hidden="true">'
        f"{svg.element('rect', f'fill c{hue}', width=svg.percent(value / most), height=8)}</svg></li>"
        for name, value, words in rows
        if most > 0.0
    )
    return f'<ul class="ranked">{items}</ul>'


def block(place: float, y: float, width: float, height: float, state: str, tip: str) -> str:
    """A stretch of time in `state`. Waiting is hatched as well as coloured: not everybody sees the colours."""
    where = {"x": svg.percent(place), "y": f"{y:g}", "width": svg.percent(width), "height": f"{height:g}"}
    is_hatched = kind(state) == "wait" and width > HATCHED
    hatch = svg.element("rect", "hatch", **where) if is_hatched else ""
    return svg.element("rect", _pale(state), tip, fill=colour(state), **where) + hatch


def _row_name(y: int, name: str, more: str = "") -> str:
    return f'<text class="name" x="0" y="{y + 13}">{escape(svg.without_middle(name, MAX_NAME))}{more}</text>'


def _on_bar(
    place: float, width: float, y: float, height: float, state: str, texts: Iterable[str], pixels: float
) -> list[str]:
    """The first of `texts` for which a bar has room, where whole bars are `pixels` wide; none where it has for none."""
    kind = "on-pale" if _pale(state) else "on-dark" if _luminance(colour(state)) < 0.21 else "on-light"
    fitting = (text for text in texts if len(text) * LETTER + 6.0 <= width * pixels)
    return [svg.word(kind, svg.percent(place + width / 2), y + height / 2 + 4, text) for text in islice(fitting, 1)]


def _pale(state: str) -> str:
    """The class of a state whose colour would glare on a dark page; empty for others."""
    return "pale" if _luminance(colour(state)) > 0.6 else ""


def state_legend(states: Iterable[str], more: Sequence[tuple[str, str, str]] = ()) -> str:
    """States with their colours; those that look the same share an entry."""
    names: dict[tuple[str, str], list[str]] = {}
    for state in states:
        look = _pale(state) or ("hatched" if kind(state) == "wait" else "")
        names.setdefault((colour(state), look), []).append(in_words(state))
    return svg.legend([*((" / ".join(own), f"block {look}", shade) for (shade, look), own in names.items()), *more])


def shade_key() -> str:
    """The legend of the shades of a heat map."""
    steps = "".join(
        f'<i class="shade" style="opacity:{_alpha(share):.2f}"></i>{share:.0%}' for share in (0.01, 0.1, 0.3, 1.0)
    )
    return f'<div class="legend"><span class="shades">share of a column: {steps}</span></div>'


def percent_name(share: float) -> str:
    """A share as people say it: 34%, 0.6%, 99.8%, under 0.1%."""
    if 0.0 < share < 0.001:
        return "<0.1%"
    return f"{share:.0%}" if share == 0.0 or 0.0995 <= share <= 0.99 or share == 1.0 else f"{share:.1%}"


def _alpha(share: float) -> float:
    """The opacity of a share: small ones are to be seen, too."""
    return 0.07 + 0.93 * math.sqrt(share)


def _shade(counts: Mapping[str, float], row: str) -> int:
    whole = sum(counts.values())
    share = counts.get(row, 0.0) / whole if whole > 0.0 else 0.0
    return round(SHADES * _alpha(share)) if share > 0.0 else 0


def _luminance(shade: str) -> float:
    """Relative luminance (WCAG 2) of `#rrggbb`."""
    channels: list[float] = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else math.pow((c + 0.055) / 1.055, 2.4) for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
