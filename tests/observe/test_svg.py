"""The drawing library: scales, ticks, smoothing against plain arithmetic; what is drawn, read back from the drawing."""

from __future__ import annotations

import itertools
import math
import re
import time
from xml.etree import ElementTree

import numpy as np
import pytest

from slipstream.observe import svg
from slipstream.observe.states import STATES, colour
from slipstream.observe.svg import Axis, Band, Scale, Series, Spot, line_chart, scale_of, scatter, smoothed, thin, ticks
from slipstream.observe.svg_blocks import (
    CELLS,
    Bar,
    Column,
    GanttRow,
    areas,
    cells,
    gantt,
    heat_map,
    merged,
    percent_name,
    ranked,
    state_bars,
)


def drawn(markup: str) -> ElementTree.Element:
    """The pieces of a plot under one root; ParseError where it is not well formed."""
    return ElementTree.fromstring(f"<root>{markup}</root>")


def places(element: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in element.attrib["points"].split())]


def tips(root: ElementTree.Element) -> list[str]:
    return [rect[0].text or "" for rect in root.iter("rect") if rect.get("class") == "strip"]


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.0, 0.0), (3.0, 3.0), (-2.0, 7.5), (0.0, 123456.0), (1e-9, 2e-9)]
)
def test_ticks_cover_the_range_with_a_few_round_numbers(low: float, high: float) -> None:
    values = ticks(low, high, 5)
    assert values[0] <= low + 1e-12
    assert values[-1] >= high - 1e-12
    assert 2 <= len(values) <= 12
    step = values[1] - values[0]
    assert step / 10 ** math.floor(math.log10(step) + 1e-9) == pytest.approx(
        round(step / 10 ** math.floor(math.log10(step) + 1e-9))
    )


@pytest.mark.parametrize(
    ("low", "high", "is_amount", "ends"),
    [
        (5.74, 5.83, True, (0.0, 5.83)),  # a mean length: an amount begins at 0
        (0.4, 0.9, False, (0.0, 0.9)),  # comes down to less than half of its largest
        (5.0, 6.0, False, (4.0, 7.0)),  # else half of the largest, around the middle
        (-6.0, -5.0, False, (-7.0, -4.0)),
        (2.0, 2.0, False, (1.5, 2.5)),
        (4.0, 8.0, False, (4.0, 8.0)),  # wide enough by itself
        (-0.1, 0.3, False, (-0.1, 0.3)),  # 0 lies on it
        (0.0, 0.0, True, (0.0, 0.0)),
        (-0.3, 0.0, False, (-0.3, 0.0)),
    ],
)
def test_an_axis_makes_no_cliff_of_a_little(
    low: float, high: float, is_amount: bool, ends: tuple[float, float]
) -> None:
    assert svg.axis_ends(low, high, is_amount=is_amount) == pytest.approx(ends)


def test_every_scale_of_values_follows_the_rule_and_steps_do_not() -> None:
    shown = scale_of([5.74, 5.83], Axis("tokens"), most=5)
    assert shown.high - shown.low >= 0.5 * 5.83
    assert scale_of([0.97, 0.99], Axis("share", high=1.0, is_share=True), most=5).low == 0.0
    logarithmic = scale_of([1.5, 1.6], Axis("norm", is_log=True), most=5)
    assert logarithmic.high / logarithmic.low >= 4.0
    assert len(logarithmic.ticks) >= 2
    steps = scale_of([100.0, 110.0], Axis("step"), most=5, is_fitted=True)
    assert (steps.low, steps.high) == (100.0, 110.0)


@pytest.mark.parametrize(
    ("low", "high"), [(1e-7, 0.1), (0.9, 2.3), (4.0, 4.2), (1.0, 1e12), (3e-5, 3e-5), (7.0, 700.0)]
)
def test_a_logarithmic_scale_has_round_ticks_inside_and_keeps_ratios(low: float, high: float) -> None:
    scale = scale_of([low, high], Axis("y", is_log=True), most=5)
    assert 2 <= len(scale.ticks) <= 14
    assert all(scale.low <= tick <= scale.high for tick in scale.ticks)
    assert scale.low <= low <= high <= scale.high
    middle = math.sqrt(scale.low * scale.high)
    assert scale.at(middle) == pytest.approx(0.5)
    assert scale.at(0.0) == 0.0  # has no place, and is put at the end


def test_a_scale_ends_at_ticks_or_with_the_data() -> None:
    assert (scale_of([0.3, 7.1], Axis("y"), most=5).low, scale_of([0.3, 7.1], Axis("y"), most=5).high) == (0.0, 8.0)
    fitted = scale_of([0.3, 7.1], Axis("x"), most=5, is_fitted=True)
    assert (fitted.low, fitted.high) == (0.3, 7.1)
    assert fitted.ticks == (2.0, 4.0, 6.0)
    assert scale_of([5.0], Axis("y", low=0.0, high=1.0), most=5).at(5.0) == 1.0
    ages = scale_of([0.0, 1.0, 2.0], Axis("age"), most=5, is_fitted=True)
    assert [ages.name(tick) for tick in ages.ticks] == ["0", "1", "2"]
    assert len(scale_of([0.0, 0.5, 2.0], Axis("s"), most=5, is_fitted=True).ticks) == 5
    # Minus a thousandth of the range does not cost a tick below zero.
    assert scale_of([-0.001, 1.0], Axis("y"), most=5).low == 0.0


@pytest.mark.parametrize(
    ("scale", "names"),
    [
        (Scale(0, 1, (0.0, 0.5, 1.0)), ["0.0", "0.5", "1.0"]),
        (Scale(0, 1, (0.0, 0.25, 0.5)), ["0.00", "0.25", "0.50"]),
        (Scale(0, 1, (0.0, 0.5, 1.0), is_share=True), ["0%", "50%", "100%"]),
        (Scale(0, 1, (0.95, 0.975), is_share=True), ["95.0%", "97.5%"]),
        (Scale(0, 1, (0.0, 5000.0, 10000.0)), ["0", "5k", "10k"]),
        (Scale(0, 1, (0.0, 200_000.0, 1_000_000.0)), ["0.0", "0.2M", "1.0M"]),
        (Scale(0, 1, (1e-7, 1e-5, 0.001, 0.1), is_log=True), ["10⁻⁷", "10⁻⁵", "0.001", "0.1"]),
        (Scale(0, 1, (0.0, 0.00002)), ["0", "2e-05"]),
        (Scale(0, 1, (0.0, 2000.0, 4000.0)), ["0", "2k", "4k"]),
        (Scale(0, 1, (0.0, 500.0, 1000.0)), ["0", "500", "1,000"]),
        (Scale(0, 1, (1e3, 1e6, 1e9), is_log=True), ["1,000", "10⁶", "10⁹"]),
    ],
)
def test_ticks_have_the_digits_that_tell_them_apart(scale: Scale, names: list[str]) -> None:
    assert [scale.name(tick) for tick in scale.ticks] == names


@pytest.mark.parametrize("window", [1, 3, 7, 37, 75])
def test_smoothing_is_the_mean_of_the_neighbours_that_there_are(window: int) -> None:
    values, half = np.random.default_rng(0).normal(size=37), window // 2
    found = smoothed(list(enumerate(values.tolist())), window)
    assert [x for x, _ in found] == list(range(37))
    for i, (_, y) in enumerate(found):
        assert y == pytest.approx(values[max(0, i - half) : i + half + 1].mean())
    assert smoothed([], window) == []
    spike = [0.02] * 20 + [3e14] + [0.02] * 20  # what comes behind it is as it was
    assert [y for _, y in smoothed(list(enumerate(spike)), 3)][22:] == pytest.approx([0.02] * 19)
    assert [y for _, y in smoothed([(0, 1.0), (1, 3.0)], 9)] == [2.0, 2.0]


def test_smoothing_over_many_neighbours_costs_as_much_as_over_few() -> None:
    points = [(float(i), 1.0) for i in range(300_000)]
    times_s = []
    for window in (3, 20_001):
        started_s = time.process_time()
        assert smoothed(points, window)[-1] == (299_999.0, 1.0)
        times_s.append(time.process_time() - started_s)
    assert times_s[1] < 5 * times_s[0]  # as a convolution 10 times and more


def test_long_series_are_averaged_within_a_band_of_their_extremes() -> None:
    points = [(float(i), float(i % 2)) for i in range(10_000)]
    thinned = thin(points)
    assert len(thinned) == 295  # means of 34
    assert thinned[0] == (16.5, pytest.approx(0.5))
    root = drawn(line_chart([Series("a", points, 0)], title="t", x=Axis("x"), y=Axis("y")))
    (envelope,) = root.iter("polygon")
    across, heights = zip(*places(envelope), strict=True)
    assert list(across[:295]) == sorted(across[:295])  # along its upper edge
    assert list(across[295:]) == list(across[:295])[::-1]  # and back along the lower one
    assert (min(heights), max(heights)) == (0.0, 180.0)  # no spike is lost
    assert len(ElementTree.tostring(root)) < 40_000


def test_a_line_lies_where_its_points_are() -> None:
    points = [(10.0, 0.0), (20.0, 0.25), (30.0, 1.0)]
    root = drawn(
        line_chart([Series("a<b", points, 9, has_dots=True)], title="T<", x=Axis("x"), y=Axis("y"), height=100)
    )
    (line,) = (one for one in root.iter("polyline") if one.get("class") == "line c2 dashed")
    assert places(line) == [(0.0, 100.0), (500.0, 75.0), (1000.0, 0.0)]
    assert [(c.get("cx"), c.get("cy")) for c in root.iter("circle")] == [
        ("0%", "100.0"),
        ("50%", "75.0"),
        ("100%", "0.0"),
    ]
    assert root.find("svg/title").text == "T<"
    assert root.find("svg/desc").text == "a<b: 0 at x 10, 1 at x 30"
    assert tips(root) == ["x: 10\na<b: 0", "x: 20\na<b: 0.25", "x: 30\na<b: 1"]


def test_tooltips_of_several_lines_tell_of_those_that_have_a_point_there() -> None:
    lines = [Series("a", [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], 0), Series("b", [(1.0, 5.0)], 1)]
    root = drawn(line_chart(lines, title="t", x=Axis("step"), y=Axis("y")))
    assert tips(root) == ["step: 0\na: 1", "step: 1\na: 2\nb: 5", "step: 2\na: 3"]
    assert [span[0].tail or span[0].text for span in root.find("div")] == ["a", "b"]


def test_what_cannot_be_drawn_is_left_out_and_said() -> None:
    assert "Nothing was measured." in line_chart([], title="t", x=Axis("x"), y=Axis("y"))
    log = Axis("y", is_log=True)
    assert "Nothing was measured." in line_chart([Series("a", [(0.0, 0.0)], 0)], title="t", x=Axis("x"), y=log)
    root = drawn(line_chart([Series("a", [(0.0, 0.0), (1.0, 3.0)], 0)], title="t", x=Axis("x"), y=log))
    assert tips(root) == ["x: 1\na: 3"]
    assert "none" in heat_map([], ["a"], title="t", x=Axis("x"), label="y", missing="none")
    assert "none" in heat_map([Column(0, 1, {"a": 0.0})], ["a"], title="t", x=Axis("x"), label="y", missing="none")
    assert "Nothing was recorded." in areas([Column(0, 1, {})], title="t", x=Axis("x"), order=["a"])
    assert "none" in state_bars({"p": {}}, title="t", missing="none")
    assert "Nothing was recorded." in gantt([GanttRow("p", [], [])], title="t", start_s=0, end_s=1)
    for constant in (0.0, -3.0, 1e12):
        drawn(line_chart([Series("a", [(0.0, constant), (1.0, constant)], 0)], title="t", x=Axis("x"), y=Axis("y")))


def test_bands_and_limits_lie_at_their_values() -> None:
    line = Series("a", [(0.0, 0.0), (100.0, 4.0)], 0)
    chart = line_chart(
        [line], title="t", x=Axis("x"), y=Axis("y"), bands=[Band(25.0, 50.0, "why")], limits={"cap": 2.0}, height=100
    )
    root = drawn(chart)
    (band,) = (rect for rect in root.iter("rect") if rect.get("class") == "band")
    assert (band.get("x"), band.get("width"), band[0].text) == ("25%", "25%", "why")
    (limit,) = (one for one in root.iter("polyline") if one.get("class") == "limit")
    assert places(limit) == [(0.0, 50.0), (1000.0, 50.0)]
    assert "cap" in chart


def test_a_scatter_plot_has_its_points_and_errors() -> None:
    spots = [Spot("a before", 0.0, 0.2, 0, is_hollow=True), Spot("a after", 10.0, 0.6, 0, x_error=1.0, y_error=0.05)]
    root = drawn(scatter(spots, title="t", x=Axis("KL", low=0.0), y=Axis("rate", low=0.0, high=1.0), height=100))
    before, after = root.iter("circle")
    assert (before.get("class"), before.get("cx"), before.get("cy")) == ("hollow c0", "0%", "80.0")
    scale = max(
        float(x) for x, _ in (p for e in root.iter("polyline") if "error" in e.get("class", "") for p in places(e))
    )
    assert float(after.get("cx").rstrip("%")) == pytest.approx(scale / 10 * 10 / 11, rel=1e-3)  # its error ends at 11
    assert after[0].text == "a after\nKL 10 ± 1\nrate 0.6 ± 0.05"


def test_a_heat_map_shows_each_columns_shares_and_those_of_everything() -> None:
    columns = [Column(0, 1, {"old": 3.0, "new": 1.0}), Column(1, 2, {"new": 6.0}), Column(2, 3, {})]
    root = drawn(
        heat_map(columns, ["new", "old"], title="t", x=Axis("step"), label="age", lines_above={"new": "bound"})
    )
    assert tips(root) == ["step 0 to 1\nold: 75%\nnew: 25%", "step 1 to 2\nnew: 100%"]
    texts = [text.text for text in root.iter("text")]
    assert texts[texts.index("new") + 1] == "70%"  # 7 of 10
    assert texts[texts.index("old") + 1] == "30%"
    cells_ = [rect for rect in root.iter("rect") if rect.get("class") == "heat"]
    assert len(cells_) == 3
    opacity = {(cell.get("x"), cell.get("y")): float(cell.get("fill-opacity")) for cell in cells_}
    assert opacity[("0%", "97.5")] < opacity[("0%", "0.0")] < opacity[("33.33%", "97.5")] == 1.0
    assert root.find("svg/desc").text == "Of everything: new 70%, old 30%"
    assert "bound" in texts


def test_many_columns_are_added_up() -> None:
    columns = [Column(i, i + 1, {"a": 1.0, "b": float(i)}) for i in range(1000)]
    found = merged(columns, 80)
    assert len(found) <= 80
    assert (found[0].start, found[-1].end) == (0, 1000)
    assert sum(column.counts["b"] for column in found) == sum(range(1000))
    assert all(a.end == b.start for a, b in itertools.pairwise(found))


def test_areas_stack_to_the_whole_in_the_order_asked_for() -> None:
    columns = [Column(0, 2, {"decode": 3.0, "wait_trainer": 1.0}), Column(2, 3, {"decode": 1.0, "other": 1.0})]
    root = drawn(areas(columns, title="t", x=Axis("s"), order=["decode", "other", "wait_trainer"], height=100))
    shapes = {shape.get("fill"): places(shape) for shape in root.iter("polygon")}
    assert shapes[colour("decode")][:4] == [(0.0, 25.0), (666.7, 25.0), (666.7, 50.0), (1000.0, 50.0)]
    assert shapes[colour("wait_trainer")][:4] == [(0.0, 0.0), (666.7, 0.0), (666.7, 0.0), (1000.0, 0.0)]
    assert tips(root)[0] == "s 0 to 2\nwaits for the trainer: 25%\ndecode: 75%"


def test_bars_are_divided_by_seconds_and_as_long_as_these_where_asked() -> None:
    rows = {"a": {"decode": 3.0, "wait_trainer": 1.0}, "b": {"decode": 2.0}}
    root = drawn(state_bars(rows, title="t"))
    widths = [rect.get("width") for rect in root.iter("rect") if rect.get("class") != "hatch"]
    assert widths == ["75%", "25%", "100%"]
    hatched = [rect.get("x") for rect in root.iter("rect") if rect.get("class") == "hatch"]
    assert hatched == ["75%"]  # waiting, and nothing else
    scaled = drawn(state_bars(rows, title="t", is_scaled=True))
    widths = [rect.get("width") for rect in scaled.iter("rect") if rect.get("class") != "hatch"]
    assert widths == ["75%", "25%", "50%"]
    assert "".join(scaled.find("svg/text").itertext()) == "a 4 s"
    rows = {"a": {"wait_trainer": 3.0, "decode": 1.0}, "b": {"swap": 1.0, "decode": 1.5}}
    told = [rect[0].text for rect in drawn(state_bars(rows, title="t", is_scaled=True)).iter("rect") if len(rect)]
    assert [tip.split(" s, ")[0] for tip in told if tip] == [
        "a: decode 1", "a: waits for the trainer 3", "b: decode 1.5", "b: swap 1"
    ]  # fmt: skip


def test_a_gantt_chart_is_bounded_and_says_what_took_most_of_a_cell() -> None:
    small = [Bar("decode" if i % 4 else "send", i * 5e-5, (i + 1) * 5e-5, "x") for i in range(20_000)]
    (found,) = cells(small, 0.0, 1.0)  # one after the other, they look the same
    assert (found.state, found.start_s, found.end_s) == ("decode", 0.0, pytest.approx(1.0))
    turns = [Bar(("decode", "send")[i // 20 % 2], i * 5e-5, (i + 1) * 5e-5) for i in range(20_000)]
    found = cells(turns, 0.0, 1.0)
    assert 900 < len(found) <= CELLS + 1
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(found))
    large = Bar("score", -1.0, 0.25, "long", "words")
    assert cells([large], 0.0, 1.0) == [Bar("score", 0.0, 0.25, "long", "words")]
    parts = [Bar("score", 0.0, 0.1, "a", "w"), Bar("score", 0.1, 0.3, "a", "w"), Bar("score", 0.5, 0.6, "a", "w")]
    assert cells(parts, 0.0, 1.0) == [Bar("score", 0.0, 0.3, "a", "w"), Bar("score", 0.5, 0.6, "a", "w")]
    texts = [
        text.text for text in drawn(gantt([GanttRow("p", parts, [])], title="t", start_s=0.0, end_s=1.0)).iter("text")
    ]
    assert texts.count("w") == 1  # on the widest alone
    assert Bar("decode", 0.0, 0.5, "step 3").tip == "decode 500 ms, step 3"
    chart = gantt(
        [GanttRow("p", [large], [(0.5, "swapped <1>")])], title="t", start_s=0.0, end_s=1.0, origin="the start"
    )
    root = drawn(chart)
    (mark,) = (one for one in root.iter("svg") if one.get("class") == "mark")
    assert (mark.get("x"), mark[0][0].text) == ("50%", "swapped <1>")
    assert "seconds since the start" in chart


@pytest.mark.parametrize(
    ("share", "name"),
    [
        (0.0, "0%"),
        (0.0004, "<0.1%"),
        (0.006, "0.6%"),
        (0.34, "34%"),
        (0.998, "99.8%"),
        (0.99999, "100.0%"),
        (1.0, "100%"),
    ],
)
def test_shares_in_words(share: float, name: str) -> None:
    assert percent_name(share) == name


@pytest.mark.parametrize(
    ("value", "name"),
    [(0.9123, "0.912"), (3.0, "3"), (999.4, "999"), (999.7, "1,000"), (-999.7, "-1,000"), (1234.5, "1,234")],
)
def test_numbers_have_the_digits_that_a_reader_needs(value: float, name: str) -> None:
    assert svg.number(value) == name


def test_text_is_escaped_wherever_it_comes_in() -> None:
    bad = "<script>&\"'"
    pieces = [
        line_chart([Series(bad, [(0.0, 1.0)], 0)], title=bad, x=Axis(bad), y=Axis(bad), limits={bad: 1.0}),
        scatter([Spot(bad, 1.0, 1.0, 0)], title=bad, x=Axis(bad), y=Axis(bad)),
        heat_map([Column(0, 1, {bad: 1.0})], [bad], title=bad, x=Axis(bad), label=bad, lines_above={bad: bad}),
        areas([Column(0, 1, {bad: 1.0})], title=bad, x=Axis(bad), order=[bad]),
        state_bars({bad: {bad: 1.0}}, title=bad),
        gantt([GanttRow(bad, [Bar(bad, 0, 1, bad, bad)], [(0.5, bad)])], title=bad, start_s=0, end_s=1, origin=bad),
        ranked([(bad, 1.0, bad)], hue=0),
        svg.empty(bad),
    ]
    for piece in pieces:
        assert "<script>" not in piece
        assert (
            bad in "".join(drawn(piece).itertext())
            or bad in ElementTree.tostring(drawn(piece), encoding="unicode")
            or (bad in "".join(text for element in drawn(piece).iter() for text in (element.text or "",)))
        )


def test_words_on_bars_can_be_read() -> None:
    """WCAG's contrast of text of this weight, 3 at least, for every state whose words could be on a bar."""

    def luminance(shade: str) -> float:
        parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    inks = {"on-dark": "#ffffff", "on-light": "#1a1e24", "on-pale": "#1a1e24"}
    for state in STATES:
        (kind,) = re.findall(r'class="(on-\w+)"', state_bars({"p": {state: 1.0}}, title="t"))
        light, dark = sorted((luminance(inks[kind]), luminance(colour(state))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3.0, state
