"""`report.html`: one page about one run, part by part. Its sentences are in `overview.py`, its times in `timing.py`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import msgspec

import slipstream.observe.report.data as data
from slipstream.core.disk import replace_file
from slipstream.core.files import load_json
from slipstream.core.held_out import set_prefix
from slipstream.core.recipes import defaults, stage_dir
from slipstream.core.run_log import num_missing, read_metrics
from slipstream.observe.evaluation import MOMENTS, evaluation_rows
from slipstream.observe.hardware import Hardware
from slipstream.observe.report.charts import against_kl, chart_card, charts, gained, heat_card, three_clocks
from slipstream.observe.report.html import (
    MAX_TEXT,
    card,
    cards,
    document,
    facts,
    field,
    folded,
    model_text,
    part,
    table,
    text,
)
from slipstream.observe.report.overview import heading, overview
from slipstream.observe.report.timing import Window, read_window, timing
from slipstream.observe.samples import Sample
from slipstream.observe.svg import BLUE, GREEN, MAX_POINTS, ORANGE, PURPLE, Axis, Series, empty, number
from slipstream.observe.svg_blocks import Column, percent_name
from slipstream.observe.transcript import TranscriptPart, beginning

REPORT_FILE = "report.html"
TERMS = "reward_parts/"
RATIOS = "ratio_share/"
MAX_BINS = 12
MAX_PARTS = 24  # of an episode's transcript
FILES = {
    "summary.json": "what it came to; a stable interface for scripts",
    "metrics.jsonl": "one line per step: every curve of this page",
    "rollouts.jsonl": "what the model said, for which reward, sampled by which versions",
    "timeline.json": "who waited for whom; opens in ui.perfetto.dev and chrome://tracing",
    "alarms.jsonl": "what looked wrong, step by step",
    "events.jsonl": "every scheduling decision; slipstream replay goes through them again",
    "config.toml": "the whole configuration",
    "model": "the policy in Hugging Face format",
}


def write_report(run_dir: Path, hardware: Hardware | None = None, *, out: Path | None = None) -> Path:
    """Write `run_dir/report.html`, or `out`, from whatever is there; what is missing is left out of the page."""
    path = run_dir / REPORT_FILE if out is None else out
    replace_file(path, page(data.read_run(run_dir), read_window(run_dir), hardware).encode())
    return path


def page(run: data.RunData, window: Window | None, hardware: Hardware | None) -> str:
    parts = {
        "In short": overview(run),
        "Before RL" if run.has_rl else "Stages": _stages(run),
        "Learning": _learning(run),
        "Evaluation": _gains(run.evaluation),
        "Off-policy": _off_policy(run),
        "Time": timing(run, window),
        "Text": _words(run),
        "Setup": _setup(run, hardware),
    }
    if not run.has_rl:
        parts = {name: parts[name] for name in ("In short", "Stages", "Evaluation", "Setup")}
    return document(title=run.recipe, heading=heading(run), parts=parts)


# What came before RL, or without it: the stages `sft`, `dpo` and `reward_model` of a run that has them


def _stages(run: data.RunData) -> str:
    title, lead = "What came before RL?", "RL starts from what these stages made, and is paid by it."
    if not run.has_rl:
        title, lead = "What did the stages learn?", "Each starts from what the ones before have made."
    sft, dpo, reward_model = (stage_dir(run.path, stage) for stage in ("sft", "dpo", "reward_model"))
    pictures = [_sft(sft), *_dpo(dpo), *_reward_model(reward_model)]
    return part("before", title, lead, [cards(*pictures)])


def _sft(folder: Path) -> str:
    if (found := _record(folder)) is None:
        return ""
    note = "The loss on demonstrations."
    if found["num_held_out"]:
        before, after = (found["held_out"][moment] for moment in MOMENTS)
        note += (
            f" On {number(found['num_held_out'])} held-out ones it went from {before['loss']:.2f} to "
            f"{after['loss']:.2f}, and the share of tokens foretold from {before['accuracy']:.0%} to "
            f"{after['accuracy']:.0%}."
        )
    return _curve(folder, "loss", "Supervised fine-tuning", note, Axis("nats per token", low=0.0), BLUE)


def _dpo(folder: Path) -> Iterator[str]:
    if (found := _record(folder)) is None:
        return
    note = "How often the policy prefers what the labels prefer, next to its reference."
    learned = f"On those it learns from: {found['first_loss']:.3f} at first, {found['last_loss']:.3f} in the last ten."
    if found["held_out"] is not None:
        before, after = (found["held_out"][moment] for moment in MOMENTS)
        learned += f" Held out: {before['loss']:.3f}, then {after['loss']:.3f}."
        if (right := after["accuracy"]) is not None:
            note += f" Of {number(found['num_held_out'])} held-out preferences it gets {right:.0%} right."
            note += f" Their mean margin is {after['margin']:.3f}."
    share = Axis("share of preferences", low=0.0, high=1.0, is_share=True)
    yield _curve(folder, "loss", "Preferences: loss", learned, Axis("loss", low=0.0), BLUE, folds=True)
    yield _curve(folder, "accuracy", "Preferences: accuracy", note, share, GREEN)


def _reward_model(folder: Path) -> Iterator[str]:
    if (found := _record(folder)) is None:
        return
    note = "How often it prefers what its labels prefer."
    if (right := found["held_out_accuracy"]) is not None:
        note += f" Of {number(found['num_held_out'])} held-out preferences it gets {right:.0%} right."
    nats, share = Axis("nats per preference", low=0.0), Axis("share of preferences", low=0.0, high=1.0, is_share=True)
    yield _curve(folder, "loss", "Reward model: loss", "On the preferences it learns from.", nats, BLUE, folds=True)
    yield _curve(folder, "accuracy", "Reward model: accuracy", note, share, GREEN)


def _record(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "stage.json"
    return load_json(path, dict[str, Any]) if path.exists() else None


def _curve(folder: Path, name: str, title: str, note: str, y: Axis, hue: int, *, folds: bool = False) -> str:
    """A metric of a stage over its updates."""
    lines = read_metrics(folder / "metrics.jsonl")
    points = [(float(i), float(line[name])) for i, line in enumerate(lines) if data.is_number(line.get(name))]
    series = [Series(name, points, hue, smooth=max(1, len(points) // 15 | 1))]
    return chart_card(title, note, series, y, x=Axis("update"), folds=folds)


# Is it learning? Rewards, and accuracy where there is a measure, by three clocks, and what usually explains them


def _learning(run: data.RunData) -> str:
    lead = "Up and to the left is good; held-out lines are the proof."
    return part(
        "learning",
        "Is it learning?",
        lead,
        [_rewards(run), cards(_sets(run), _terms(run), _judges(run), *charts(run, "learning"))],
    )


def _rewards(run: data.RunData) -> str:
    history, window = run.history, run.history.window
    if not history.steps and not history.evaluations:
        return card("Reward", "", empty("No step is done yet."), size="wide")
    note = (
        "The same lines by steps, by tokens trained on, and by time since the first prompt was handed out: "
        "data and hours are what a step costs."
    )
    if window > 1:
        note += f" The thick line is the mean of {window} neighbouring steps."
    if len(history.steps) > MAX_POINTS:
        note += " The band around a line is the range of single steps."
    names = {"eval_reward": "held-out mean reward, greedy", "eval_sampled_reward": "held-out mean reward, sampled"}
    title = "Reward"
    if history.points("eval_accuracy"):  # a term of the reward was named as the measure of what is right
        measured = {"eval_accuracy": "held-out accuracy, greedy", "eval_sampled_accuracy": "held-out accuracy, sampled"}
        title, names = "Reward and accuracy", measured | {"eval_reward": names["eval_reward"]}

    def series_of(clock: data.Clock) -> list[Series]:
        found = [Series("reward of each batch", history.points("reward", clock), BLUE, smooth=window)]
        for hue, (name, label) in zip((ORANGE, GREEN, PURPLE), names.items(), strict=False):
            found.append(Series(label, history.points(name, clock), hue, has_dots=True))
        return [series for series in found if series.points]

    return three_clocks(title, note, [run], series_of, Axis(title.lower(), low=0.0))


def _sets(run: data.RunData) -> str:
    """Draw each named set of held-out prompts, by its accuracy where it has one."""
    series, told = [], []
    found = run.evaluations
    named = {found.primary: found, **found.sets} if found.primary else {}
    for hue, (name, both) in zip(count(), named.items(), strict=False):
        points = run.history.points(f"{set_prefix(name)}accuracy") or run.history.points(f"{set_prefix(name)}reward")
        values = [one.greedy.headline[1] for one in (both.before, both.after) if one is not None]
        ends = " to ".join("-" if value is None else f"{value:.3f}" for value in values)
        series.append(Series(name, points, hue, has_dots=True))
        told.append(f"{name}: {ends}" + ("" if both.after is None else f" ({both.after.num_prompts} prompts)"))
    note = f"Accuracy, or the mean reward without a measure. {'; '.join(told)}."
    return chart_card("Held-out sets", note, series, Axis("mean over answers", low=0.0)) if series else ""


def _terms(run: data.RunData) -> str:
    """Draw each of several reward terms: where one is only measured, over-optimisation of the others shows."""
    names = run.history.names(TERMS)
    if len(names) < 2:
        return ""
    series = []
    for hue, name in zip(count(), names, strict=False):
        term, held_out = name.removeprefix(TERMS), run.history.points(f"eval_{name}")
        series.append(Series(term, run.history.points(name), hue, smooth=run.history.window))
        if held_out:
            series.append(Series(f"{term}, held out", held_out, hue, has_dots=True, is_dashed=True))
    note = "Terms of weight 0 are only measured: one that falls while the reward rises says what the reward cannot see."
    return chart_card("Reward by term", note, series, Axis("mean over answers"))


def _judges(run: data.RunData) -> str:
    judges = {} if run.summary is None else run.summary.judges
    if not judges:
        return ""
    head = ["", "scored", "cached", "failed", "requests", "retries", "s per request", "tokens in, out", "cost"]
    rows = [
        [
            *map(text, (name, number(one.scored), number(one.cached), number(one.failures))),
            *map(text, (number(one.requests), number(one.retries))),
            text("" if one.request_s is None else f"{one.request_s:.2f}"),
            text(f"{number(one.input_tokens)}, {number(one.output_tokens)}"),
            text(f"{one.cost:.4g}" if one.cost else ""),
        ]
        for name, one in judges.items()
    ]
    note = "Completions that models behind endpoints have scored, for training and evaluations."
    return card("Judges", note, table(head, rows, kind="numbers"), folds=True)


# What was gained, at what price? What the stage `evaluate` found


def _gains(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    rows = ([text(name), text(before), text(after)] for name, before, after in evaluation_rows(found))
    note = f"{found['num_prompts']} held-out prompts at temperature {found['temperature']:g}, ± standard error."
    measured = card("Gold, judge and drift", note, table(["", "before", "after"], rows, kind="numbers"), folds=True)
    return gained([against_kl([("", 0, found)]), measured])


# How old was the data, and did it matter? Staleness, importance ratios, the gap between the two policies, drift


def _off_policy(run: data.RunData) -> str:
    lead = "Where the next batches are sampled while one is trained, tokens come from older versions of the policy."
    pictures = [cards(_staleness(run), _ratios(run)), cards(*charts(run, "off-policy"))]
    return part("off-policy", "How old was the data, and did it matter?", lead, pictures)


def _step_columns(run: data.RunData, counts: Callable[[Mapping[str, Any]], Mapping[str, float]]) -> list[Column]:
    """A column from each step to the next, with what is counted in its line."""
    steps = run.history.clocks["step"]
    ends = [*steps[1:], *(step + 1.0 for step in steps[-1:])]
    return [Column(a, b, counts(line)) for a, b, line in zip(steps, ends, run.history.steps, strict=True)]


def _staleness(run: data.RunData) -> str:
    rows = [str(lag) for lag in range(max(run.staleness, default=0) + 1)]
    note = "How many training steps old a token was when it was trained on; 0 is fresh."
    if run.bound is None:
        note += " This schedule promises no bound."
    elif run.max_staleness is not None and run.max_staleness <= run.bound:
        note += " The bound holds for every token."
    if run.staleness:
        note += f" Fresh: {percent_name(run.staleness.get(0, 0.0) / max(sum(run.staleness.values()), 1.0))}."
    return heat_card(
        "Age of the trained tokens",
        note,
        _step_columns(run, lambda line: {lag: float(line.get(f"{data.STALENESS}{lag}") or 0.0) for lag in rows}),
        rows,
        label="age in steps",
        left=30,
        lines_above={str(run.bound): f"bound {run.bound}"} if str(run.bound) in rows else {},
        missing="No token was trained yet.",
        folds=False,
    )


def _ratios(run: data.RunData) -> str:
    edges = sorted((float(name.removeprefix(RATIOS)), name) for name in run.history.names(RATIOS))
    names = {_ratio_row(low, high): name for (low, name), (high, _) in pairwise([*edges, (math.inf, "")])}

    def counts(line: Mapping[str, Any]) -> dict[str, float]:
        tokens = float(line.get("tokens_trained") or 0.0)
        return {row: float(line.get(name) or 0.0) * tokens for row, name in names.items()}

    note = (
        "How much likelier the trained policy finds a token than the policy that sampled it. 1 is no difference; "
        "what is far from it is clipped or weighs too much."
    )
    missing = "This run recorded no ratios: its version of Slipstream did not, or its loss has none."
    columns = _step_columns(run, counts)
    return heat_card("Importance ratios", note, columns, list(names), label="ratio", left=76, missing=missing)


def _ratio_row(low: float, high: float) -> str:
    if low <= 0.0:
        return f"< {high:g}"
    return f"≥ {low:g}" if high == math.inf else f"{low:g} – {high:g}"


# What does it say? Completions before and after, and how long they are


def _words(run: data.RunData) -> str:
    lead = "Numbers can be fooled; read a few answers."
    return part("text", "What does it say?", lead, [_samples(run.samples), cards(*_lengths(run.lengths))])


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    rows = [
        [
            f'<span class="model">{model_text(s.prompt)}</span>',
            f'<span class="model">{model_text(s.answer)}</span>',
            _answer(s.before, s.before_reward, s.before_is_right, s.before_turns),
            _answer(s.after, s.after_reward, s.after_is_right, s.after_turns),
        ]
        for s in samples
    ]
    note = "Completions from the first steps (before) and the last ones (after); no held-out answers were kept."
    if any(s.before is not None and s.after is not None for s in samples):
        note = "The same held-out prompts, answered greedily before and after training."
    head = ["prompt", "expected", "before", "after"]
    return card("Before and after", note, table(head, rows, kind="samples", row_heads=False), size="wide")


def _answer(
    answer: str | None, reward: float | None, is_right: bool | None, turns: Sequence[TranscriptPart] | None
) -> str:
    """The answer, or the episode, with a mark where it is known whether it is right, else with its reward."""
    if answer is None:
        return ""
    shown = f'<span class="model">{model_text(answer)}</span>' if turns is None else _episode(turns)
    if reward is None:
        return shown
    if is_right is None:
        return f'<span title="reward {reward:g}"><b>{number(reward)}</b> {shown}</span>'
    mark, kind = ("✓", "right") if is_right else ("✗", "wrong")
    return f'<span class="{kind}" title="reward {reward:g}">{mark} {shown}</span>'


def _episode(turns: Sequence[TranscriptPart]) -> str:
    """Return a transcript, a line for each part of it, with the rewards of turns."""
    lines = []
    for one in beginning(turns, max_parts=MAX_PARTS, max_chars=MAX_PARTS * MAX_TEXT):
        reward = "" if one.reward is None else f" <b>{number(one.reward)}</b>"
        said = f'<span class="model">{model_text(one.text)}</span>'
        lines.append(f'<span class="said"><i>{text(one.role)}</i>{reward} {said}</span>')
    return "".join(lines)


def _lengths(lengths: Sequence[data.Length]) -> Iterator[str]:
    """Draw the lengths trained on beside those sampled, and the former over time."""
    trained = [one for one in lengths if one.step is not None]
    if not trained:
        return
    width, num_bins = _bins(max(one.num_tokens for one in lengths))
    series = [
        Series("sampled", _shares(lengths, width, num_bins), ORANGE),
        Series("trained on", _shares(trained, width, num_bins), BLUE, is_dashed=True),
    ]
    axis, share = Axis("tokens" if width == 1 else f"tokens, in bins of {width}"), Axis("share", low=0.0, is_share=True)
    note = "Where the dashed line lies left of the other, long answers were trained on less often than sampled."
    yield chart_card("Lengths: sampled and trained on", note, series, share, x=axis)
    names = [str(i) if width == 1 else f"{i * width} – {(i + 1) * width - 1}" for i in range(num_bins)]
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for one in trained:
        counts[one.step or 0][names[one.num_tokens // width]] += 1
    columns = [Column(step, step + 1.0, counts[step]) for step in range(min(counts), max(counts) + 1)]
    used = [i for i, name in enumerate(names) if any(name in column for column in counts.values())]
    rows, left = names[used[0] : used[-1] + 1], 46 if width == 1 else 76
    yield heat_card(
        "Lengths over time", "What the batch of a step was made of.", columns, rows, label="tokens", left=left
    )


def _bins(longest: int) -> tuple[int, int]:
    """The width of a bin, a round number, and how many it takes from length 0 on."""
    width = max(1, math.ceil((longest + 1) / MAX_BINS))
    magnitude = 10 ** math.floor(math.log10(width))
    width = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= width)
    return width, longest // width + 1


def _shares(lengths: Sequence[data.Length], width: int, num_bins: int) -> list[tuple[float, float]]:
    counts = Counter(one.num_tokens // width for one in lengths)
    return [(float(i * width), counts[i] / len(lengths)) for i in range(num_bins)]


# What was run: the configuration, what differs from the defaults first; the files and their questions; the machine


def _setup(run: data.RunData, hardware: Hardware | None) -> str:
    changed = differing(run.fields)
    rows = (
        [f"<code>{field(name)}</code>", field(data.shown(value)), field(data.shown(default)), text(data.meaning(name))]
        for name, (value, default) in changed.items()
    )
    head = ["field", "this run", "default", "what it is"]
    note = f"{len(changed)} fields differ from the defaults; the others are below."
    whole = folded(
        "The whole configuration", facts({name: data.shown(value) for name, value in data.flat(run.config).items()})
    )
    outcome = {} if run.summary is None else data.flat(msgspec.to_builtins(run.summary))
    files = {name: what + lost(run, name) for name, what in FILES.items() if (run.path / name).exists()}
    configured = card(
        "Configuration", note, table(head, rows, kind="config", stacks=True) + whole, size="wide", folds=True
    )
    pictures = [
        configured if run.config else "",
        card("Files of this run", "Everything on this page comes from these.", facts(files), size="wide", folds=True),
        folded("Everything in summary.json", facts({name: data.shown(value) for name, value in outcome.items()})),
        folded("The machine", facts(hardware.lines())) if hardware else "",
    ]
    lead = "What the run was started with. Functions given from Python are not in its files."
    return part("setup", "What was run?", lead, pictures)


def lost(run: data.RunData, name: str) -> str:
    """Say how many lines of a file are missing, cut off or deleted before the run went on; empty where none are."""
    num_lost, what = 0, "steps"
    if name == "metrics.jsonl" and run.history.steps:
        steps = {int(line["step"]) for line in run.history.steps}
        num_lost = max(steps) + 1 - len(steps)
    elif name == "events.jsonl" and run.times.is_exact:  # of longer runs all decisions would be decoded for it
        num_lost, what = num_missing(run.path / name), "events"
    return f". Incomplete: {num_lost:,} {what} are missing" if num_lost else ""


def differing(fields: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field -> (value, default) where these differ. A field that the saved file leaves out has its default, None."""
    standard = data.flat(defaults())
    return {
        name: (value, standard.get(name))
        for name, value in fields.items()
        if data.as_saved(value) != data.as_saved(standard.get(name))
    }
