"""Measured curves as a file; and the two panels of LlamaRL's Figure 5, as one SVG file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

import msgspec

from slipstream.core.disk import replace_file
from slipstream.plan.measured import EtaCurve, MeasuredCurves, Point, Side

_WIDTH, _HEIGHT = 1120, 470
_LEFT, _TOP, _PANEL_WIDTH, _PANEL_HEIGHT, _GAP = 74, 46, 440, 300, 130
_COLOURS = ("#3b6fb6", "#c2541b", "#2f8f5b", "#8b4fa8", "#a88400", "#4a4a4a")
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.title{font-size:15px;font-weight:600}"
    ".note{fill:#666;font-size:12px}.grid{stroke:#ddd}.frame{fill:none;stroke:#999}"
)
_TITLES: dict[Side, str] = {
    "trainer": "Trainer: ms per sample against microbatch (samples)",
    "generator": "Engine: ms per completion against concurrency",
}


@dataclass(frozen=True)
class _Axis:
    """A logarithmic axis from `low` to `high`, in values, over pixels `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.stop - self.start)


def write_measured(measured: MeasuredCurves, path: Path) -> None:
    """Write the file, as a whole or not at all."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(measured), indent=1) + b"\n")


def rises(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return neighbours at which eta does not fall (assumption 7.1 of LlamaRL says it does, everywhere).

    Only rises beyond the spread of the turns count: the later point's lowest turn is above the earlier one's highest.
    """
    return [(before, after) for before, after in pairwise(points) if after.low > before.high]


def eta_figure(measured: MeasuredCurves) -> str:
    """eta_t(b) on the left and eta_g(b) on the right, both axes logarithmic; bars span the turns. A whole SVG file."""
    names = [(model.name, curve.devices) for model in measured.models for curve in model.curves]
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(dict.fromkeys(names))}
    unit = "core" if measured.device == "cpu" else "GPU"
    parts: list[str] = []
    sides: tuple[Side, ...] = ("trainer", "generator")
    for place, side in enumerate(sides):
        lines = [
            (curve, colours[model.name, curve.devices])
            for model in measured.models
            for curve in model.curves
            if curve.side == side
        ]
        if lines:
            parts.append(_panel(_LEFT + place * (_PANEL_WIDTH + _GAP), _TITLES[side], lines))
    for index, ((name, devices), colour) in enumerate(colours.items()):
        x, y = _LEFT + index * 250, _TOP + _PANEL_HEIGHT + 62
        label = f"{name}, {devices} {unit}{'s' * (devices > 1)}"
        parts.append(f'<rect x="{x}" y="{y - 10}" width="14" height="10" fill="{colour}"/>' + _text(x + 20, y, label))
    hardware = ", ".join(
        value
        for value in (measured.hardware.get("CPU"), measured.hardware.get("GPUs"))
        if value is not None and value != "none"
    )
    samples = "; ".join(
        f"{model.name} {model.num_params / 1e6:,.3g} M parameters, {model.prompt_tokens} + {model.completion_tokens} "
        "tokens a sample"
        for model in measured.models
    )
    for index, note in enumerate((f"{hardware}, {measured.num_devices} {unit}s. Bars: range of the turns.", samples)):
        parts.append(_text(_LEFT, _TOP + _PANEL_HEIGHT + 92 + 18 * index, note, kind="note"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        f"<title>Measured eta curves</title><style>{_STYLE}</style>"
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _panel(left: float, title: str, lines: Sequence[tuple[EtaCurve, str]]) -> str:
    points = [point for curve, _ in lines for point in curve.points]
    batches = sorted({point.batch for point in points})
    across = _Axis(batches[0], max(batches[-1], 2 * batches[0]), left, left + _PANEL_WIDTH)
    low, high = 1e3 * min(point.low for point in points), 1e3 * max(point.high for point in points)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    up = _Axis(10.0 ** decades[0], 10.0 ** max(decades[-1], decades[0] + 1), _TOP + _PANEL_HEIGHT, _TOP)
    parts = [_text(left, _TOP - 16, title, kind="title")]
    for decade in decades:
        y = up.at(10.0**decade)
        parts.append(_line(left, y, left + _PANEL_WIDTH, y, "grid"))
        parts.append(_text(left - 8, y + 4, f"{10.0**decade:g}", anchor="end"))
    for batch in batches:
        parts.append(_line(across.at(batch), _TOP, across.at(batch), _TOP + _PANEL_HEIGHT, "grid"))
        parts.append(_text(across.at(batch), _TOP + _PANEL_HEIGHT + 20, str(batch), anchor="middle"))
    parts.append(f'<rect x="{left}" y="{_TOP}" width="{_PANEL_WIDTH}" height="{_PANEL_HEIGHT}" class="frame"/>')
    for curve, colour in lines:
        parts += _drawn(curve.points, across, up, colour)
    return "".join(parts)


def _drawn(points: Iterable[Point], across: _Axis, up: _Axis, colour: str) -> list[str]:
    places = [(across.at(p.batch), up.at(1e3 * p.seconds), up.at(1e3 * p.low), up.at(1e3 * p.high), p) for p in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for x, y, low, high, point in places:
        parts.append(f'<line x1="{x:.1f}" y1="{low:.1f}" x2="{x:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">'
            f"<title>{point.batch}: {1e3 * point.seconds:.3g} ms</title></circle>"
        )
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "tick") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
