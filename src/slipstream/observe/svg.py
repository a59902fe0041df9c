"""The few plots of the report as inline SVG: no scripts, no fonts, no network; colours of text and grid come from CSS.

Every function returns a `<svg>` whose `viewBox` is in pixels of a 1200 px page; values appear as native tooltips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from slipstream.observe.states import colour, in_words, shares

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 36
MAX_POINTS = 400


@dataclass(frozen=True)
class Series:
    """A line (or dots joined by a line) through (x, y); `colour` is `#rrggbb`."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    has_dots: bool = False


@dataclass(frozen=True)
class Bar:
    """A stretch of a Gantt row, in seconds."""

    state: str
    start_s: float
    end_s: float
    label: str


@dataclass(frozen=True)
class Row:
    """A process in the Gantt chart. `marks` are (seconds, text) of instants."""

    name: str
    bars: Sequence[Bar]
    marks: Sequence[tuple[float, str]]


def line_chart(
    series: Sequence[Series], *, x_label: str, y_min: float | None = None, width: int = 560, height: int = 250
) -> str:
    """Lines over a common x axis; long ones are averaged down to MAX_POINTS."""
    drawn = [Series(s.name, thin(s.points), s.colour, s.has_dots) for s in series if s.points]
    if not drawn:
        return _empty(width, height)
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    x_ticks, y_ticks = ticks(min(xs), max(xs), 8), ticks(min([*ys, *([] if y_min is None else [y_min])]), max(ys), 5)
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-9)
    y_low, y_high = min(y_ticks[0], min(ys)), max(y_ticks[-1], max(ys))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        return _LEFT + across * (width - _LEFT - _RIGHT), height - _BOTTOM - up * (height - _TOP - _BOTTOM)

    parts = [_grid_y(y_ticks, [place(x_low, y)[1] for y in y_ticks], width)]
    parts += [_text(place(x, y_low)[0], height - _BOTTOM + 16, number(x)) for x in x_ticks if x_low <= x <= x_high]
    parts.append(_text((width + _LEFT) / 2, height - 4, x_label, kind="axis"))
    for s in drawn:
        places = [place(x, y) for x, y in s.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{s.colour}" stroke-width="2"/>')
        if s.has_dots or len(places) == 1:
            parts += [
                f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4" fill="{s.colour}" class="dot">'
                f"<title>{escape(s.name)}: {number(y)} at {number(x)}</title></circle>"
                for (px, py), (x, y) in zip(places, s.points, strict=True)
            ]
    return legend([(s.name, s.colour) for s in drawn]) + _svg(width, height, parts)


def histogram(counts: Mapping[int, float], *, x_label: str, fill: str, width: int = 560, height: int = 250) -> str:
    """One bar per integer, labelled with its share."""
    total = sum(counts.values())
    if total <= 0:
        return _empty(width, height)
    keys = range(min(counts), max(counts) + 1)
    top = max(counts.values()) / total
    slot = (width - _LEFT - _RIGHT) / len(keys)
    inner = height - _TOP - _BOTTOM - 14
    parts = []
    for i, key in enumerate(keys):
        share = counts.get(key, 0.0) / total
        bar = inner * share / top
        x, y = _LEFT + i * slot, height - _BOTTOM - bar
        bar_width = min(slot * 0.7, 90)
        centre = x + slot / 2
        parts.append(
            f'<rect x="{centre - bar_width / 2:.1f}" y="{y:.1f}" width="{bar_width:.1f}" height="{bar:.1f}" rx="2" '
            f'fill="{fill}"><title>{number(counts.get(key, 0.0))} tokens</title></rect>'
        )
        parts.append(_text(centre, y - 5, f"{share:.1%}"))
        parts.append(_text(centre, height - _BOTTOM + 16, str(key)))
    parts.append(_text((width + _LEFT) / 2, height - 4, x_label, kind="axis"))
    return _svg(width, height, parts)


def stacked_bars(rows: Mapping[str, Mapping[str, float]], *, width: int = 1150) -> str:
    """One bar of full length per process, divided by its states; shares of 6% and more are written on it."""
    names_width, bar_height, gap = 130, 28, 10
    parts, seen = [], dict[str, None]()
    y = 4.0
    for name, seconds in rows.items():
        parts.append(_text(names_width - 10, y + bar_height / 2 + 4, name, anchor="end"))
        x = float(names_width)
        for state, share in shares(dict(seconds)):
            seen[state] = None
            part = share * (width - names_width)
            tip = f"{name} {in_words(state)}: {seconds[state]:.2f} s, {share:.1%}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.0f}" width="{part:.2f}" height="{bar_height}" fill="{colour(state)}">'
                f"<title>{escape(tip)}</title></rect>"
            )
            if share >= 0.06:
                parts.append(_text(x + part / 2, y + bar_height / 2 + 4, f"{share:.0%}", kind="on-bar"))
            x += part
        y += bar_height + gap
    if not seen:
        return _empty(width, 60)
    return legend([(in_words(state), colour(state)) for state in seen]) + _svg(width, round(y), parts)


def gantt(rows: Sequence[Row], *, start_s: float, end_s: float, width: int = 1150) -> str:
    """What each process did between two moments; instants are triangles above its row."""
    names_width, bar_height, pitch = 130, 26, 46
    height = pitch * len(rows) + 40
    scale = (width - names_width - 10) / max(end_s - start_s, 1e-9)
    parts, seen, has_marks = [], dict[str, None](), False

    def at(seconds: float) -> float:
        return names_width + (min(max(seconds, start_s), end_s) - start_s) * scale

    for tick in ticks(0.0, end_s - start_s, 8):
        if tick <= end_s - start_s:
            x = at(start_s + tick)
            parts.append(f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{height - 32}" class="grid"/>')
            parts.append(_text(x, height - 18, f"{number(tick)} s"))
    for i, row in enumerate(rows):
        y = i * pitch + 14
        parts.append(_text(names_width - 10, y + bar_height / 2 + 4, row.name, anchor="end"))
        for bar in row.bars:
            seen[bar.state] = None
            x = at(bar.start_s)
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(at(bar.end_s) - x, 0.4):.2f}" height="{bar_height}" '
                f'fill="{colour(bar.state)}"><title>{escape(bar.label)}</title></rect>'
            )
        for seconds, text in row.marks:
            has_marks = True
            x = at(seconds)
            parts.append(
                f'<path d="M{x - 5:.1f} {y - 10} h10 l-5 8 z" class="mark"><title>{escape(text)}</title></path>'
                f'<line x1="{x:.1f}" y1="{y - 2}" x2="{x:.1f}" y2="{y + bar_height}" class="mark-line"/>'
            )
    if not seen:
        return _empty(width, 60)
    keys = [(in_words(state), colour(state)) for state in seen]
    return legend(keys, marker="weights swapped or published" if has_marks else None) + _svg(width, height, parts)


def legend(entries: Sequence[tuple[str, str]], marker: str | None = None) -> str:
    """Names with their colours, as HTML in front of a plot; names of one colour share an entry."""
    names: dict[str, list[str]] = {}
    for name, shade in entries:
        names.setdefault(shade, []).append(name)
    items = [
        f'<span><i style="background:{shade}"></i>{escape(" / ".join(own))}</span>' for shade, own in names.items()
    ]
    if marker is not None:
        items.append(f"<span><b>&#9660;</b>{escape(marker)}</span>")
    return f'<div class="legend">{"".join(items)}</div>'


def thin(points: Sequence[tuple[float, float]], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: means over equal runs of neighbours."""
    size = math.ceil(len(points) / most)
    if size <= 1:
        return list(points)
    runs = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from at most `low` to at least `high`, about `most` of them."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    raw = (high - low) / most
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def number(value: float) -> str:
    """`value` with the digits a reader needs: 1,234 and 0.912 and 3."""
    if value == round(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", kind: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'


def _grid_y(values: Sequence[float], places: Sequence[float], width: int) -> str:
    return "".join(
        f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{width - _RIGHT}" y2="{y:.1f}" class="grid"/>'
        + _text(_LEFT - 8, y + 4, number(value), anchor="end")
        for value, y in zip(values, places, strict=True)
    )


def _empty(width: int, height: int) -> str:
    return _svg(width, height, [_text(width / 2, height / 2, "nothing recorded", kind="axis")])
