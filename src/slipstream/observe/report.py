"""`report.html`: one self-contained page about a run, finished or interrupted, from the files of its directory.

Nothing in it is fetched or executed: plots are inline SVG, there is no script, and every piece of text that came from
a model or a data set is escaped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.disk import replace_file
from slipstream.core.recipes import read_toml
from slipstream.core.sections import HARD_BOUND
from slipstream.observe.display import duration, printable
from slipstream.observe.evaluation import evaluation_rows
from slipstream.observe.hardware import Hardware
from slipstream.observe.health import ALARMS_FILE, AlarmSpan, read_alarms, spans
from slipstream.observe.metrics import Metrics, read_metrics
from slipstream.observe.recorder import RolloutLine, read_rollouts
from slipstream.observe.samples import Sample, read_samples
from slipstream.observe.states import in_words
from slipstream.observe.summary import Evaluation, Summary, read_summary, violations
from slipstream.observe.svg import Bar, Row, Series, gantt, histogram, line_chart, number, stacked_bars
from slipstream.observe.timeline import Instant, Slice, account_file, process_files, read_timeline

BLUE, GREEN, ORANGE, GREY = "#2f7ed8", "#2a9d6f", "#e8863a", "#8a929c"
WINDOW_STEPS = 4
MAX_SAMPLES = 12
PART_PREFIX = "reward_parts/"
MAX_TEXT = 600  # characters of a prompt or completion shown


@dataclass(frozen=True)
class Run:
    """What the files of a run directory say."""

    name: str
    config: dict[str, Any]
    metrics: list[Metrics]
    samples: list[Sample]
    summary: Summary | None
    accounting: Mapping[str, Mapping[str, float]]
    staleness: Mapping[int, float]
    alarms: list[AlarmSpan]


def write_report(run_dir: Path, hardware: Hardware | None = None) -> Path:
    """Write `run_dir/report.html` from whatever is there; missing files leave their part of the page empty."""
    run = _read(run_dir)
    path = run_dir / "report.html"
    replace_file(path, _page(run, _excerpt(run_dir), hardware).encode())
    return path


def _read(run_dir: Path) -> Run:
    config_path, summary_path = run_dir / "config.toml", run_dir / "summary.json"
    summary = read_summary(summary_path) if summary_path.exists() else None
    return Run(
        name=run_dir.resolve().name,
        config=read_toml(config_path) if config_path.exists() else {},
        metrics=read_metrics(run_dir / "metrics.jsonl"),
        samples=read_samples(run_dir / "samples.json") or list(_samples_of(read_rollouts(run_dir / "rollouts.jsonl"))),
        summary=summary,
        accounting=summary.accounting if summary else _accounting(run_dir),
        staleness=summary.staleness.histogram if summary else _staleness(read_rollouts(run_dir / "rollouts.jsonl")),
        alarms=spans(read_alarms(run_dir / ALARMS_FILE)),
    )


def _accounting(run_dir: Path) -> dict[str, dict[str, float]]:
    """Recomputed from the timeline files, over the time between the first and the last record of the run."""
    first_s, last_s = float("inf"), 0.0
    files = process_files(run_dir)
    for record in itertools.chain.from_iterable(map(read_timeline, files)):
        start_ns, end_ns = (record.start_ns, record.end_ns) if isinstance(record, Slice) else (record.time_ns,) * 2
        first_s, last_s = min(first_s, start_ns * 1e-9), max(last_s, end_ns * 1e-9)
    return {path.stem: account_file(path, first_s, max(first_s, last_s)) for path in files} if last_s else {}


def _staleness(rollouts: Iterable[RolloutLine]) -> dict[int, float]:
    """Consumed tokens by staleness in steps."""
    counts: dict[int, float] = {}
    for line in rollouts:
        if line.step is None:
            continue
        ends = [start for start, _ in line.versions[1:]] + [line.num_tokens]
        for (start, version), end in zip(line.versions, ends, strict=True):
            if version >= 0:
                counts[line.step - version] = counts.get(line.step - version, 0) + end - start
    return counts


def _samples_of(rollouts: Iterable[RolloutLine]) -> Iterator[Sample]:
    """Where no held-out samples were saved: completions of the first and of the last training steps."""
    first: list[RolloutLine] = []
    last: list[RolloutLine] = []
    for line in rollouts:
        if line.sample == 0 and line.step is not None:
            if len(first) < MAX_SAMPLES // 2:
                first.append(line)
            last = [*last[-(MAX_SAMPLES // 2 - 1) :], line]
    for line in first:
        yield Sample(line.prompt, line.answer, line.completion, None, before_reward=line.reward)
    for line in last:
        yield Sample(line.prompt, line.answer, None, line.completion, after_reward=line.reward)


@dataclass(frozen=True)
class Excerpt:
    """A window of the timeline, seconds."""

    start_s: float
    end_s: float
    title: str
    rows: list[Row]


def _excerpt(run_dir: Path) -> Excerpt | None:
    """WINDOW_STEPS training steps from the middle of the run; its last five seconds where nothing was trained."""
    files = process_files(run_dir)
    trained: list[tuple[int, float, float]] = []
    last_s = 0.0
    for record in itertools.chain.from_iterable(map(read_timeline, files)):
        if isinstance(record, Slice):
            last_s = max(last_s, record.end_ns * 1e-9)
            if "step" in record.args:
                trained.append((int(record.args["step"]), record.start_ns * 1e-9, record.end_ns * 1e-9))
    if not last_s:
        return None
    start_s, end_s, title = last_s - 5.0, last_s, "the last five seconds"
    if trained:
        steps = sorted({step for step, _, _ in trained})
        chosen = steps[max(0, len(steps) // 2 - WINDOW_STEPS // 2) :][:WINDOW_STEPS]
        inside = [(start, end) for step, start, end in trained if chosen[0] <= step <= chosen[-1]]
        start_s, end_s = min(start for start, _ in inside), max(end for _, end in inside)
        margin_s = 0.04 * (end_s - start_s)
        start_s, end_s = start_s - margin_s, end_s + margin_s
        title = f"steps {chosen[0]} to {chosen[-1]}"
    return Excerpt(start_s, end_s, title, [_row(path, start_s, end_s) for path in files])


def _row(path: Path, start_s: float, end_s: float) -> Row:
    bars, marks = [], []
    for record in read_timeline(path):
        match record:
            case Slice() if record.end_ns * 1e-9 > start_s and record.start_ns * 1e-9 < end_s:
                extra = "".join(f" {key} {value}" for key, value in record.args.items())
                length_ms = (record.end_ns - record.start_ns) * 1e-6
                label = f"{in_words(record.state)}{extra}: {length_ms:.1f} ms"
                bars.append(Bar(record.state, record.start_ns * 1e-9, record.end_ns * 1e-9, label))
            case Instant() if start_s <= record.time_ns * 1e-9 <= end_s:
                extra = "".join(f" {key} {value}" for key, value in record.args.items())
                marks.append((record.time_ns * 1e-9, record.name + extra))
    return Row(path.stem, bars, marks)


def _page(run: Run, excerpt: Excerpt | None, hardware: Hardware | None) -> str:
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    recipe = str(run.config.get("recipe", run.name))
    sections = [
        _warnings(run),
        _alarms(run),
        _tiles(run),
        '<div class="columns">',
        _section("Learning curve", "Is it learning?", _learning(run.metrics)),
        _section("Throughput", "Tokens per second on both sides.", _throughput(run.metrics)),
        _reward_terms(run.metrics),
        _reference_kl(run.metrics),
        _section("Staleness of trained tokens", _bound(run), _staleness_histogram(run)),
        _section("Staleness by step", "Mean and maximum of each batch, in steps.", _staleness_curve(run.metrics)),
        "</div>",
        _evaluation(run.summary),
        _section("Where the time went", "Every second of every process, by state.", stacked_bars(run.accounting)),
        _timeline(excerpt),
        _samples(run.samples),
        _table_section("Summary", _flat(msgspec.to_builtins(run.summary)) if run.summary else {}),
        _table_section("Configuration", _flat(run.config)),
        _table_section("Machine", hardware.lines() if hardware else {}),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{_text(recipe)} - Slipstream</title><style>{style}</style></head><body><main>"
        f"<h1>{_text(recipe)}</h1><p>{_subtitle(run)}</p>{''.join(sections)}</main></body></html>\n"
    )


def _subtitle(run: Run) -> str:
    if run.summary is None:
        return f"{_text(run.name)}: not finished, so this page is made from what was written so far"
    s = run.summary
    return _text(
        f"{run.name}: {s.status} after {s.steps} steps in {duration(s.wall_s)}, seed {s.seed}, "
        f"{s.model_params:,} parameters, Slipstream {s.versions.slipstream}, torch {s.versions.torch}"
    )


def _warnings(run: Run) -> str:
    found = violations(run.summary) if run.summary else []
    items = "".join(f"<li>{_text(text)}</li>" for text in found)
    return f'<section class="warning"><h2>This run contradicts itself</h2><ul>{items}</ul></section>' if found else ""


def _alarms(run: Run) -> str:
    """What looked wrong while it went on; nothing where nothing did."""
    rows = "".join(
        f"<tr><th>{_text(one.name)}</th><td>{_text(one.severity)}</td><td>{one.began}</td>"
        f"<td>{'the end' if one.ended is None else one.ended}</td><td>{number(one.value)}</td>"
        f"<td>{number(one.threshold)}</td><td>{_text(one.text)}</td></tr>"
        for one in run.alarms
    )
    if not rows:
        return ""
    columns = ("alarm", "", "from step", "to step", "value", "threshold", "what it means")
    head = "".join(f"<th>{name}</th>" for name in columns)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _section("Alarms", "What looked wrong in the numbers. Each is a suspicion, not a verdict.", table)


def _tiles(run: Run) -> str:
    tiles: list[tuple[str, str]] = []
    if run.summary is not None:
        s = run.summary
        tiles = [
            (f"{_accuracy(s.eval.before)} → {_accuracy(s.eval.after)}", "held-out accuracy, greedy"),
            (f"{s.throughput.generated_tokens_per_s:,.0f}", "generated tokens/s"),
            (f"{s.throughput.trained_tokens_per_s:,.0f}", "trained tokens/s"),
            (
                f"{s.staleness.mean:.2f} / {s.staleness.max}",
                f"staleness, mean / max (bound {_or_none(s.staleness.bound)})",
            ),
            (f"{s.weight_sync.count}", f"weight swaps, {_pause(s.weight_sync.pause_s_p50)}"),
        ]
    elif run.metrics:
        last = run.metrics[-1]
        tiles = [
            (number(float(last.get("step", 0)) + 1), "steps so far"),
            (str(last.get("reward")), "reward, last line"),
        ]
    cells = "".join(f'<div class="tile"><b>{_text(value)}</b><span>{_text(name)}</span></div>' for value, name in tiles)
    return f'<div class="tiles">{cells}</div>'


def _accuracy(evaluation: Evaluation | None) -> str:
    return "?" if evaluation is None or evaluation.accuracy is None else f"{evaluation.accuracy:.1%}"


def _pause(seconds: float | None) -> str:
    return "no pause measured" if seconds is None else f"median pause {seconds * 1e3:.2f} ms"


def _points(metrics: list[Metrics], x: str, y: str) -> list[tuple[float, float]]:
    return [(float(m[x]), float(m[y])) for m in metrics if m.get(x) is not None and m.get(y) is not None]


def _learning(metrics: list[Metrics]) -> str:
    return line_chart(
        [
            Series("reward of the batch", _points(metrics, "step", "reward"), BLUE),
            Series("held-out, greedy", _points(metrics, "version", "eval_accuracy"), GREEN, has_dots=True),
            Series("held-out, sampled", _points(metrics, "version", "eval_sampled_accuracy"), ORANGE, has_dots=True),
        ],
        x_label="step",
        y_min=0.0,
    )


def _reward_terms(metrics: list[Metrics]) -> str:
    """What each of several reward terms said: where one is only measured, over-optimisation of the others shows."""
    names = sorted({key for line in metrics for key in line if key.startswith(PART_PREFIX)})
    if len(names) < 2:
        return ""
    colours = itertools.cycle((BLUE, ORANGE, GREEN, GREY))
    series = [
        Series(name.removeprefix(PART_PREFIX), _points(metrics, "step", name), colour)
        for name, colour in zip(names, colours, strict=False)
    ]
    note = "Mean of each batch; terms of weight 0 are only measured."
    return _section("Reward by term", note, line_chart(series, x_label="step", y_min=0.0))


def _reference_kl(metrics: list[Metrics]) -> str:
    points = _points(metrics, "step", "kl_reference_sum")
    if not points:
        return ""
    chart = line_chart([Series("nats per completion", points, BLUE)], x_label="step", y_min=0.0)
    return _section("KL to the reference", "Of the policy that sampled each batch.", chart)


def _throughput(metrics: list[Metrics]) -> str:
    return line_chart(
        [
            Series("generated tokens/s", _points(metrics, "step", "generated_tokens_per_s"), BLUE),
            Series("trained tokens/s", _points(metrics, "step", "trained_tokens_per_s"), GREEN),
        ],
        x_label="step",
        y_min=0.0,
    )


def _staleness_curve(metrics: list[Metrics]) -> str:
    return line_chart(
        [
            Series("maximum", _points(metrics, "step", "staleness_max"), ORANGE),
            Series("mean", _points(metrics, "step", "staleness_mean"), BLUE),
        ],
        x_label="step",
        y_min=0.0,
    )


def _or_none(bound: int | None) -> str:
    return "none" if bound is None else str(bound)


def _bound(run: Run) -> str:
    policy = run.config.get("schedule", {}).get("policy", HARD_BOUND[0])
    promised = run.config.get("max_staleness") if policy in HARD_BOUND else None
    bound = run.summary.staleness.bound if run.summary else promised
    return "Share of tokens by age." if bound is None else f"Share of tokens by age; the bound is {bound}."


def _staleness_histogram(run: Run) -> str:
    return histogram(run.staleness, x_label="staleness in steps", fill=BLUE)


def _timeline(excerpt: Excerpt | None) -> str:
    if excerpt is None:
        return ""
    note = f"What each process did during {excerpt.title}. The whole of it: timeline.json, in ui.perfetto.dev."
    return _section("Timeline", note, gantt(excerpt.rows, start_s=excerpt.start_s, end_s=excerpt.end_s))


def _samples(samples: list[Sample]) -> str:
    if not samples:
        return ""
    rows = "".join(
        f'<tr><td class="model">{_model_text(s.prompt)}</td><td class="model">{_model_text(s.answer)}</td>'
        f'<td class="model{_verdict(s.before_reward)}">{_model_text(s.before)}</td>'
        f'<td class="model{_verdict(s.after_reward)}">{_model_text(s.after)}</td></tr>'
        for s in samples[:MAX_SAMPLES]
    )
    head = "".join(f"<th>{name}</th>" for name in ("prompt", "answer", "before", "after"))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _section("What the model says", "The same prompts before and after, where both were asked.", table)


def _evaluation(summary: Summary | None) -> str:
    if summary is None or summary.evaluation is None:
        return ""
    found = summary.evaluation
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(before)}</td><td>{_text(after)}</td></tr>"
        for name, before, after in evaluation_rows(found)
    )
    head = "<th></th><th>before</th><th>after</th>"
    note = f"{found['num_prompts']} held-out prompts at temperature {found['temperature']:g}, ± standard error."
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _section("Gold, judge and drift", note, table)


def _verdict(reward: float | None) -> str:
    if reward is None:
        return ""
    return " right" if reward >= 1 - 1e-6 else " wrong"


def _section(title: str, note: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2><p>{_text(note)}</p>{content}</section>"


def _table_section(title: str, values: Mapping[str, Any]) -> str:
    if not values:
        return ""
    rows = "".join(f"<tr><th>{_text(key)}</th><td>{_text(str(value))}</td></tr>" for key, value in values.items())
    return f"<section><details><summary>{_text(title)}</summary><table>{rows}</table></details></section>"


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, Mapping) or (prefix and not values):
        return {prefix.removesuffix("."): values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.")
    return flat


def _model_text(text: str | None) -> str:
    """Text of a model or data set: line breaks kept, other control characters spelled out, escaped."""
    return "" if text is None else "\n".join(_text(line) for line in text[:MAX_TEXT].split("\n"))


def _text(text: str) -> str:
    return escape(printable(text, limit=MAX_TEXT))
