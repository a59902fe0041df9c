"""Is it learning? Rewards, and accuracy where there is a measure, by three clocks, and what usually explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from slipstream.core.observe_sections import AlarmName
from slipstream.observe.report.html import card, cards, folded, folded_on_phones, part, table, text
from slipstream.observe.report.run import CLOCKS, Clock, Run, clock_axis, rescaled
from slipstream.observe.svg import MAX_POINTS, Axis, Band, Series, empty, line_chart, line_legend, number, thin
from slipstream.observe.svg_blocks import Column, merged, percent_name

PARTS = "reward_parts/"
BLUE, GREEN, ORANGE, PURPLE = 0, 2, 1, 3
TABLE_ROWS = 12


def learning(run: Run) -> str:
    history = run.history
    window = history.window()
    smooth = f" The thick line is the mean of {window} neighbouring steps." if window > 1 else ""
    if len(history.steps) > MAX_POINTS:
        smooth += " The band around a line is the range of single steps."
    pictures = [
        _clocks(run, smooth),
        cards(_terms(run), _signal(run), _lengths(run), _entropy(run), _gradient(run), *_critic(run)),
    ]
    return part("learning", "Is it learning?", "Up and to the left is good; held-out lines are the proof.", pictures)


def reward_series(run: Run, clock: Clock) -> list[Series]:
    history = run.history
    names = {"eval_reward": "held-out mean reward, greedy", "eval_sampled_reward": "held-out mean reward, sampled"}
    if has_accuracy(run):
        of_accuracy = {
            "eval_accuracy": "held-out accuracy, greedy",
            "eval_sampled_accuracy": "held-out accuracy, sampled",
        }
        names = of_accuracy | {"eval_reward": names["eval_reward"]}
    found = [
        Series("reward of each batch", history.points("reward", clock), BLUE, smooth=history.window()),
        *(
            Series(label, history.evaluated(name, clock), hue, has_dots=True)
            for hue, (name, label) in zip((ORANGE, GREEN, PURPLE), names.items(), strict=False)
        ),
    ]
    return [series for series in found if series.points]


def has_accuracy(run: Run) -> bool:
    """Whether a term of the reward was named as the measure of what is right."""
    return bool(run.history.evaluated("eval_accuracy"))


def _clocks(run: Run, smooth: str) -> str:
    if not run.history.steps and not run.history.evaluations:
        return card("Reward", "", empty("No step is done yet."), size="wide")
    note = (
        "The same lines by steps, by tokens trained on, and by time since the first prompt was handed out: "
        f"data and hours are what a step costs.{smooth}"
    )
    what = "reward and accuracy" if has_accuracy(run) else "reward"
    return three_clocks(what.capitalize(), note, [run], lambda clock: reward_series(run, clock), Axis(what, low=0.0))


def three_clocks(
    title: str,
    note: str,
    runs: Sequence[Run],
    series_of: Callable[[Clock], list[Series]],
    y: Axis,
    *,
    height: int = 180,
) -> str:
    """The same lines against steps, tokens and time, beside each other, as a card; nothing without any points."""
    charts = []
    for clock in CLOCKS:
        longest = max((run.history.clocks[clock][-1] for run in runs if run.history.steps), default=0.0)
        axis, divisor = clock_axis(clock, longest)
        series = rescaled(series_of(clock), divisor)
        if not any(one.points for one in series):
            return ""
        chart = line_chart(series, title=f"{title} by {axis.label}", x=axis, y=y, height=height, has_legend=False)
        charts.append(f"<div>{chart}</div>")
    series = series_of("step")
    first, *others = charts
    rest = folded_on_phones("The same by tokens and by time", "".join(others))
    content = f'{line_legend(series)}<div class="triple">{first}{rest}</div>'
    return card(title, note, content, size="wide", details=numbers(series, "step"))


def _terms(run: Run) -> str:
    """What each of several reward terms said: where one is only measured, over-optimisation of the others shows."""
    names = run.history.names(PARTS)
    if len(names) < 2:
        return ""
    series = []
    for hue, name in zip(count(), names, strict=False):
        term, held_out = name.removeprefix(PARTS), run.history.evaluated(f"eval_{name}")
        series.append(Series(term, run.history.points(name), hue, smooth=run.history.window()))
        if held_out:
            series.append(Series(f"{term}, held out", held_out, hue, has_dots=True, is_dashed=True))
    note = "Terms of weight 0 are only measured: one that falls while the reward rises says what the reward cannot see."
    return chart_card("Reward by term", note, series, Axis("mean over answers"))


def _signal(run: Run) -> str:
    points = [(x, 1.0 - share) for x, share in run.history.points("no_signal_frac")]
    series = [Series("groups with signal", points, BLUE, smooth=run.history.window())]
    note = "Groups whose answers all have the same reward teach nothing."
    axis = Axis("share of groups", low=0.0, high=1.0, is_share=True)
    return chart_card("Groups that can teach", note, series, axis, alarm_bands(run, ("no_signal",)))


def _lengths(run: Run) -> str:
    series = [Series("mean length", run.history.points("completion_tokens_mean"), BLUE, smooth=run.history.window())]
    limit = run.config.get("generator", {}).get("max_new_tokens")
    bands = alarm_bands(run, ("length_hacking", "truncation_growing"))
    cut = run.history.last("truncated_frac")
    note = "If it climbs with the reward, read what is written."
    if limit:
        note = f"At most {limit} are allowed. " + note
    if cut is not None:
        note += f" Cut off at the limit in the last step: {cut:.1%}."
    return chart_card("Length of completions", note, series, Axis("tokens", low=0.0), bands)


def _entropy(run: Run) -> str:
    series = [Series("entropy", run.history.points("entropy"), PURPLE, smooth=run.history.window())]
    note = "How undecided the policy is about the next token. At 0 it tries nothing new any more."
    return chart_card("Entropy", note, series, Axis("nats per token", low=0.0), alarm_bands(run, ("entropy_collapse",)))


def _gradient(run: Run) -> str:
    series = [Series("gradient norm", run.history.points("grad_norm"), BLUE, smooth=run.history.window())]
    note = "Before clipping. Single spikes happen."
    axis = Axis("norm, logarithmic", is_log=True)
    return chart_card("Size of the gradient", note, series, axis, alarm_bands(run, ("grad_norm_spikes",)))


def _critic(run: Run) -> Iterable[str]:
    if not run.history.has("explained_variance"):
        return
    window = run.history.window()
    series = [Series("explained variance", run.history.points("explained_variance"), GREEN, smooth=window)]
    note = "1 is a critic that foresees every return, 0 one that knows no more than their mean, below 0 it misleads."
    axis = Axis("share of the returns' variance", high=1.0)
    yield chart_card("What the critic foresees", note, series, axis, limits={"as good as the mean": 0.0})


def chart_card(
    title: str,
    note: str,
    series: Sequence[Series],
    y: Axis,
    bands: Sequence[Band] = (),
    *,
    limits: dict[str, float] | None = None,
    x: str = "step",
) -> str:
    """A line chart over steps in a card; nothing where there are no points."""
    series = [one for one in series if one.points]
    if not series:
        return ""
    chart = line_chart(series, title=title, x=Axis(x), y=y, bands=bands, limits=limits)
    return card(title, note, chart, details=numbers(series, x), folds=True)


def alarm_bands(run: Run, names: Iterable[AlarmName]) -> list[Band]:
    """The steps in which one of these alarms was on."""
    last = run.history.clocks["step"][-1] if run.history.steps else 0.0
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


def column_numbers(columns: Sequence[Column], rows: Sequence[str], label: str) -> str:
    """The columns of a heat map as a table of shares, added up to a few."""
    body = []
    for column in merged(columns, TABLE_ROWS):
        whole = sum(column.counts.values())
        if whole > 0.0:
            shares = (percent_name(column.counts.get(row, 0.0) / whole) for row in rows)
            body.append([f"{number(column.start)} – {number(column.end)}", *shares])
    return folded("Numbers", table([label, *rows], body, kind="numbers"))
