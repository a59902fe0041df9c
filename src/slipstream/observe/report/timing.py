"""Where did the time go? The verdict, every process's seconds by state, over time and in a window; wasted tokens."""

from __future__ import annotations

from collections.abc import Mapping

from slipstream.observe.report.html import card, cards, folded, part, table, text
from slipstream.observe.report.learning import BLUE, GREEN, ORANGE, alarm_bands, chart_card
from slipstream.observe.report.run import Run, clock_axis
from slipstream.observe.report.window import Window
from slipstream.observe.states import WAITING, in_words, shares, side_of, waited_for
from slipstream.observe.svg import Axis, Series, empty, number
from slipstream.observe.svg_blocks import (
    LEGEND_SHARE,
    Column,
    areas,
    gantt,
    percent_name,
    ranked,
    state_bars,
    state_legend,
    work_first,
)
from slipstream.observe.waste import WASTE


def timing(run: Run, window: Window | None) -> str:
    pictures = [
        _verdict(run),
        _bars(run),
        _over_time(run),
        _gantt(run, window),
        cards(_speed(run), _step_time(run), _waste(run)),
    ]
    return part("time", "Where did the time go?", f"Hatched{WAITING}", pictures)


def _verdict(run: Run) -> str:
    return f'<p class="verdict">{text(run.times.verdict)}</p>' if run.times.verdict else ""


def _bars(run: Run) -> str:
    times = run.times
    note = "Each bar is one process from the first prompt handed out to the end of the last step: what it was doing."
    if not times.is_exact:
        note = "Each bar is one side of the loop while it trained, by what its processes reported: what it was doing."
    note += " Beside a name: how much of their time those who need its work waited for it; the largest limits the run."
    awaited = waited_for(times.loop)
    sides = {name: side_of(name.partition(" (")[0]) for name in times.loop}
    notes = {name: f"waited for {percent_name(awaited[side])}" for name, side in sides.items() if side in awaited}
    chart = state_bars(times.loop, title="Time in the loop by state", notes=notes, missing="Nothing was trained.")
    first = card("While it trained", note, chart, details=seconds_table(times.loop))
    note = "The same from start to end, with loading, warm start, evaluation of the result and export."
    missing = "The run has no timelines." if times.is_exact else "Known when the run has ended."
    chart = state_bars(times.whole, title="Time of the whole run by state", missing=missing)
    return cards(first, card("The whole run", note, chart, details=seconds_table(times.whole), folds=True))


def _gantt(run: Run, window: Window | None) -> str:
    title = "A closer look" if window is None else f"A closer look: {window.title}"
    note = "Who does what at the same time."
    if window is None:
        return ""
    if window.num_left_out:
        note += f" {window.num_left_out} more processes are not shown."
    chart = gantt(window.rows, title=title, start_s=window.start_s, end_s=window.end_s, origin=window.origin)
    if (run.path / "timeline.json").exists():
        note += " All of it: timeline.json, in ui.perfetto.dev."
    return card(title, note, chart, size="wide", folds=True)


def _over_time(run: Run) -> str:
    """One stack of areas for every process but the controller, over the time since RL began."""
    times = run.times
    if not times.spans:
        return ""
    axis, divisor = clock_axis("time", times.spans[-1].end_s)
    charts = []
    seen: dict[str, None] = {}
    for process, totals in times.loop.items():
        if process == "controller":
            continue
        spans = [Column(s.start_s / divisor, s.end_s / divisor, s.seconds.get(process, {})) for s in times.spans]
        order = work_first([totals])
        seen |= dict.fromkeys(state for state in order if totals[state] >= LEGEND_SHARE * sum(totals.values()))
        chart = areas(spans, title=f"Time of {process}, step by step", x=axis, order=order)
        charts.append(f"<div><h4>{text(process)}</h4>{chart}</div>")
    note = "The same, step by step: work below, waiting on top."
    content = state_legend(seen) + f'<div class="triple">{"".join(charts)}</div>'
    return card("Over time", note, content, size="wide", folds=True)


def _speed(run: Run) -> str:
    window = run.history.window()
    series = [
        Series("sampled", run.history.points("generated_tokens_per_s"), BLUE, smooth=window),
        Series("trained on", run.history.points("trained_tokens_per_s"), GREEN, smooth=window),
    ]
    note = "Sampled, a mean of the last reports, lags a little."
    return chart_card("Speed", note, series, Axis("tokens per second", low=0.0))


def _step_time(run: Run) -> str:
    series = [Series("seconds", run.history.points("step_s"), BLUE, smooth=run.history.window())]
    note = "From the end of one step to the end of the next, evaluations in between included."
    bands = alarm_bands(run, ("starving_trainer", "starving_generator", "slow_rewards", "straggler"))
    return chart_card("Time of a step", note, series, Axis("seconds", low=0.0), bands)


def _waste(run: Run) -> str:
    waste = run.wasted
    note = "Tokens that were sampled, or read again, and that nobody was trained on; in percent of those trained on."
    if not waste:
        is_known = run.times.balance is not None and (run.path / "events.jsonl").exists()
        if is_known and not run.history.steps:
            return ""
        why = (
            "None: every sampled token was trained on."
            if is_known
            else "Not known: there are no decisions of this run."
        )
        return card("Wasted tokens", note, empty(why), folds=True)
    trained = max([1.0, *run.history.clocks["tokens"][-1:]])
    rows = [
        (
            WASTE.get(cause, cause.replace("_", " ")),
            float(tokens),
            f"{number(tokens)} ({percent_name(tokens / trained)})",
        )
        for cause, tokens in sorted(waste.items(), key=lambda item: -item[1])
    ]
    return card("Wasted tokens", note, ranked(rows, hue=ORANGE), folds=True)


def seconds_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Seconds by process and state, folded away."""
    body = (
        [text(process), text(in_words(state)), f"{seconds[state]:.2f}", percent_name(share)]
        for process, seconds in rows.items()
        for state, share in shares(seconds)
    )
    return folded("Numbers", table(["process", "state", "seconds", "share"], body, kind="numbers"))
