"""Figures of experiments: matplotlib, as SVG that is the same for the same numbers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

COLOURS = ("#3b6fb6", "#c2541b", "#2f8f5b", "#8b4fa8", "#a88400", "#4a4a4a", "#c03a6b", "#1f8a99")
MARKERS = "osD^vPX*"
PANEL_INCHES = (4.6, 3.3)
STYLE: dict[str, Any] = {
    "svg.hashsalt": "slipstream",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "axes.prop_cycle": matplotlib.cycler(color=COLOURS),
}


def panels(titles: Sequence[str], *, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with one panel for each title. Draw into them, then `svg(figure)`."""
    columns = -(-len(titles) // rows)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=(PANEL_INCHES[0] * columns, PANEL_INCHES[1] * rows), squeeze=False
        )
    for axis, title in zip(axes.flat, titles, strict=False):
        axis.set_title(title, fontsize=10, loc="left")
    for axis in list(axes.flat)[len(titles) :]:
        axis.remove()
    return figure, list(axes.flat)[: len(titles)]


def lines(axis: Axes, series: Mapping[str, tuple[Sequence[float], Sequence[Sequence[float]]]]) -> None:
    """Name -> (x [N], y [N, repeats]): the means as a line, bars over the range of the repeats."""
    for index, (name, (x, y)) in enumerate(series.items()):
        means = [sum(values) / len(values) for values in y]
        axis.errorbar(
            x,
            means,
            yerr=ranges(y),
            label=name,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=1.4,
            elinewidth=0.8,
            capsize=2,
        )


def ticks(axis: Axis, values: Sequence[float]) -> None:
    """Ticks there and nowhere else, as plain numbers: for logarithmic axes over a decade or two."""
    axis.set_ticks(list(values), labels=[f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)


def ranges(y: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """How far the repeats [N, repeats] reach below and above their means, [N] each; rounding of a mean is none."""
    means = [sum(values) / len(values) for values in y]
    below = [max(0.0, mean - min(values)) for mean, values in zip(means, y, strict=True)]
    return below, [max(0.0, max(values) - mean) for mean, values in zip(means, y, strict=True)]


def svg(figure: Figure) -> str:
    """The figure as a file, on white; closed afterwards."""
    with plt.rc_context(STYLE):
        figure.tight_layout()
        out = io.StringIO()
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return out.getvalue()
