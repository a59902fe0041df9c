"""Where did the time go? The verdict, every process's seconds by state, over time and in a window; wasted tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from slipstream.observe import svg_blocks as blocks
from slipstream.observe.report.charts import charts, clock_axis
from slipstream.observe.report.data import READ_AHEAD, RunData
from slipstream.observe.report.html import card, cards, folded, part, table, text
from slipstream.observe.states import WAITING, in_words, shares, side_of, waited_for
from slipstream.observe.svg import ORANGE, empty, number
from slipstream.observe.timeline import TRAINED, Instant, Slice, process_files, read_timeline, times_ns

WINDOW_STEPS = 4
LAST_S = 5.0  # where nothing was trained: the last seconds of the run
MAX_ROWS = 12


@dataclass(frozen=True)
class Window:
    """The rows of processes between two moments, seconds on the run's clock. `num_left_out` have no row."""

    start_s: float
    end_s: float
    title: str
    origin: str  # what the first moment is, where it is something
    rows: list[blocks.GanttRow]
    num_left_out: int


def timing(run: RunData, window: Window | None) -> str:
    verdict = f'<p class="verdict">{text(run.times.verdict)}</p>' if run.times.verdict else ""
    pictures = [verdict, _bars(run), _over_time(run), _gantt(run, window), cards(*charts(run, "time"), _waste(run))]
    return part("time", "Where did the time go?", f"Hatched{WAITING}", pictures)


def _bars(run: RunData) -> str:
    times = run.times
    note = "Each bar is one process from the first prompt handed out to the end of the last step: what it was doing."
    if not times.is_exact:
        note = "Each bar is one side of the loop while it trained, by what its processes reported: what it was doing."
    note += " Beside a name: how much of their time those who need its work waited for it; the largest limits the run."
    awaited = waited_for(times.loop)
    sides = {name: side_of(name.partition(" (")[0]) for name in times.loop}
    notes = {
        name: f"waited for {blocks.percent_name(awaited[side])}" for name, side in sides.items() if side in awaited
    }
    chart = blocks.state_bars(
        times.loop, title="Time in the loop by state", notes=notes, missing="Nothing was trained."
    )
    first = card("While it trained", note, chart, details=_seconds_table(times.loop))
    note = "The same from start to end, with loading, warm start, evaluation of the result and export."
    if times.whole:
        note += f" The model takes {blocks.percent_name(times.model_share)} of the time in which processes work"
        share = times.model_cpu_share
        note += "." if share is None else f", and {blocks.percent_name(share)} of their CPU time."
    missing = "The run has no timelines." if times.is_exact else "Known when the run has ended."
    chart = blocks.state_bars(times.whole, title="Time of the whole run by state", missing=missing)
    return cards(first, card("The whole run", note, chart, details=_seconds_table(times.whole), folds=True))


def _seconds_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    body = (
        [text(process), text(in_words(state)), f"{seconds[state]:.2f}", blocks.percent_name(share)]
        for process, seconds in rows.items()
        for state, share in shares(seconds)
    )
    return folded("Numbers", table(["process", "state", "seconds", "share"], body, kind="numbers"))


def _over_time(run: RunData) -> str:
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
        spans = [blocks.Column(s.start_s / divisor, s.end_s / divisor, s.seconds.get(process, {})) for s in times.spans]
        order = blocks.work_first([totals])
        seen |= dict.fromkeys(state for state in order if totals[state] >= blocks.LEGEND_SHARE * sum(totals.values()))
        chart = blocks.areas(spans, title=f"Time of {process}, step by step", x=axis, order=order)
        charts.append(f"<div><h4>{text(process)}</h4>{chart}</div>")
    note = "The same, step by step: work below, waiting on top."
    content = blocks.state_legend(seen) + f'<div class="triple">{"".join(charts)}</div>'
    return card("Over time", note, content, size="wide", folds=True)


def _gantt(run: RunData, window: Window | None) -> str:
    if window is None:
        return ""
    title, note = f"A closer look: {window.title}", "Who does what at the same time."
    if window.num_left_out:
        note += f" {window.num_left_out} more processes are not shown."
    if (run.path / "timeline.json").exists():
        note += " All of it: timeline.json, in ui.perfetto.dev."
    chart = blocks.gantt(window.rows, title=title, start_s=window.start_s, end_s=window.end_s, origin=window.origin)
    return card(title, note, chart, size="wide", folds=True)


def _waste(run: RunData) -> str:
    note = "Tokens that were sampled, or read again, and that nobody was trained on; in percent of those trained on."
    if not run.wasted:
        why = "Not known: there are no decisions of this run."
        if run.times.balance is not None and (run.path / "events.jsonl").exists():
            why = "None: every sampled token was trained on."
            if not run.history.steps:
                return ""
        return card("Wasted tokens", note, empty(why), folds=True)
    trained = max(1.0, run.tokens_trained)
    rows = [
        (
            run.wasted_by(cause),
            tokens,
            f"{number(tokens)} ({blocks.percent_name(tokens / trained)})",
        )
        for cause, tokens in sorted(run.wasted.items(), key=lambda item: -item[1])
    ]
    return card("Wasted tokens", note, blocks.ranked(rows, hue=ORANGE), folds=True)


# A few training steps out of a run's timelines, however long these are


def read_window(run_dir: Path) -> Window | None:
    """WINDOW_STEPS steps from the middle of the run; its last seconds where few were trained, None without files."""
    files = process_files(run_dir)
    if not files:
        return None
    found = next((steps for path in files if path.stem == "trainer" and (steps := _steps_inside(path))), None)
    if found is None:
        ends_ns = (times_ns(record)[1] for path in files for record in read_timeline(path, offset=-READ_AHEAD))
        end_s = max(ends_ns, default=0) * 1e-9
        start_s, title, origin = end_s - LAST_S, f"the last {LAST_S:g} seconds", ""
    else:
        (before, start_s), (last, end_s) = found
        title = f"steps {before + 1} to {last}" if last > before + 1 else f"step {last}"
        origin = f"the end of step {before}"
    shown = [path for path in files if path.stem != "controller"] if len(files) > MAX_ROWS else files
    rows = [read_row(path, start_s, end_s) for path in shown[:MAX_ROWS]]
    return Window(start_s, end_s, title, origin, rows, len(files) - len(rows))


def _steps_inside(path: Path) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """(step, its end) before and at the end of WINDOW_STEPS steps near the middle of the trainer's file; of fewer, or
    from its start, where there are no more."""
    for offset in (path.stat().st_size // 2, 0):
        ends = (r for r in read_timeline(path, offset=offset) if isinstance(r, Instant) and r.name == TRAINED)
        found = [(int(end.args["step"]), end.time_ns * 1e-9) for end in islice(ends, WINDOW_STEPS + 1)]
        if len(found) > WINDOW_STEPS or (len(found) > 1 and not offset):
            return found[0], found[-1]
    return None


def read_row(path: Path, start_s: float, end_s: float) -> blocks.GanttRow:
    """Read the slices of one process between two moments, seconds on the run's clock."""
    bars, marks = [], []
    for record in read_timeline(path, offset=_offset_of(path, round(start_s * 1e9))):
        if times_ns(record)[0] > end_s * 1e9 + 1e9:
            break
        match record:
            case Slice() if record.end_ns * 1e-9 > start_s and record.start_ns * 1e-9 < end_s:
                bars.append(_bar(record))
            case Instant() if start_s <= record.time_ns * 1e-9 <= end_s:
                marks.append((record.time_ns * 1e-9, ", ".join([record.name, *_args(record)])))
    return blocks.GanttRow(path.stem, bars, marks)


def _bar(record: Slice) -> blocks.Bar:
    """Return the bar of a slice, in the state that took most of it; its detail names the shorter ones."""
    states = {record.state: record.state_ns} | record.also
    most = max(states, key=lambda state: states[state])
    others = [f"{in_words(state)} {ns * 1e-6:.1f} ms of it" for state, ns in states.items() if state != most]
    words = f"step {record.args['step']}" if "step" in record.args else ""
    return blocks.Bar(most, record.start_ns * 1e-9, record.end_ns * 1e-9, ", ".join([*_args(record), *others]), words)


def _args(record: Slice | Instant) -> Iterator[str]:
    return (f"{key} {value}" for key, value in record.args.items())


def _offset_of(path: Path, time_ns: int) -> int:
    """A byte from which on every record lies that ends after `time_ns`: slices of a process are in order of time."""
    low, high = 0, path.stat().st_size
    while high - low > READ_AHEAD:
        middle = (low + high) // 2
        found = next((one for one in read_timeline(path, offset=middle) if isinstance(one, Slice)), None)
        if found is None or found.end_ns >= time_ns:
            high = middle
        else:
            low = middle
    return max(0, low - READ_AHEAD)
