"""Several runs on one page: overlays on three clocks, win rate against KL, where their time went, what differed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError
from slipstream.observe.report.gains import Evaluated, gains_of_several
from slipstream.observe.report.html import card, cards, document, field, items, part, table, text
from slipstream.observe.report.learning import numbers, three_clocks
from slipstream.observe.report.outcomes import BOLD, are_alike, faster, outcome_table
from slipstream.observe.report.overview import status_of
from slipstream.observe.report.run import Clock, Run, read_run
from slipstream.observe.report.setup import as_saved, flat, meaning, shown
from slipstream.observe.svg import Axis, Series, empty, line_chart, shortened, smoothed
from slipstream.observe.svg_blocks import state_bars

MAX_RUNS = 14  # as many as lines can be told apart: seven colours, each whole and dashed
MAX_NAME = 22  # letters: what has room over a bar on a phone, beside the process and the seconds
COMPARISON_FILE = "comparison.html"
NOT_COMPARED = ("recipe",)  # fields that say nothing about how a run went
SAYS_MOST = ("recipe", "loss.name", "model.path", "max_staleness")
SAYS_LEAST = ("steps", "seed")
MAX_FIELDS = 3  # of a label
MAX_TRIED = 40  # fields
MAX_VALUE = 40  # letters of a field's value, in one
MIN_FIELD = 4  # letters of a field that says what it is of: "lr" does not
MENU = {
    "overview": "In short",
    "learning": "Learning",
    "off-policy": "Off-policy",
    "time": "Time",
    "evaluation": "Evaluation",
    "setup": "Setup",
}


@dataclass(frozen=True)
class Compared:
    """A run among others: what it is called here, its folder as far as it differs, and its colour."""

    run: Run
    name: str
    folder: str
    hue: int


def write_comparison(run_dirs: Sequence[Path], *, out: Path | None = None) -> Path:
    """Write one page about several runs to `out`, by default comparison.html in the working directory.

    ConfigError for fewer than two, more than MAX_RUNS, or the same run twice.
    """
    places = [run_dir.resolve() for run_dir in run_dirs]
    if len(set(places)) < len(places):
        raise ConfigError("a run is compared with itself", got=", ".join(map(str, run_dirs)), allowed="different runs")
    if not 2 <= len(places) <= MAX_RUNS:
        raise ConfigError("runs to compare", got=f"{len(places)} of them", allowed=f"2 to {MAX_RUNS}")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    folders = [short_names(places)[place] for place in places]
    names = labels(runs) or folders
    compared = [Compared(*one, i) for i, one in enumerate(zip(runs, names, folders, strict=True))]
    path = Path(COMPARISON_FILE) if out is None else out
    replace_file(path, comparison_page(compared).encode())
    return path


def short_names(places: Sequence[Path]) -> dict[Path, str]:
    """Folder -> as little of the end of its path as tells it from the others; long ones without their middle."""
    depth = 1
    while len({place.parts[-depth:] for place in places}) < len(places):
        depth += 1
    names = {place: "/".join(place.parts[-depth:]) for place in places}
    cut = {place: shortened(name, MAX_NAME) for place, name in names.items()}
    return cut if len(set(cut.values())) == len(places) else names


def labels(runs: Sequence[Run]) -> list[str]:
    """What sets each run apart in its configuration, in as few fields as tell all of them apart; none if too many must.

    A field that says most by itself comes first (SAYS_MOST), one that says least last. Text stands for itself.
    """
    fields = {
        name: [_label(name, value) for value in values]
        for name, values in differing_fields(runs, apart_from=()).items()
        if all(value not in (None, {}, [], "") and len(shown(value)) <= MAX_VALUE for value in values)
    }
    first = [name for name in SAYS_MOST if name in fields]
    last = [name for name in SAYS_LEAST if name in fields]
    order = [*first, *(name for name in fields if name not in (*first, *last))][:MAX_TRIED] + last
    for count in range(1, MAX_FIELDS + 1):
        for chosen in combinations(order, count):
            found = [", ".join(words) for words in zip(*(fields[name] for name in chosen), strict=True)]
            if len(set(found)) == len(runs):
                cut = [shortened(name, MAX_NAME) for name in found]
                return cut if len(set(cut)) == len(runs) else found
    return []


def _label(name: str, value: object) -> str:
    """A field's value in a label: the end of a path, other text by itself, with the field's name what is no text."""
    if isinstance(value, str):
        return value.rstrip("/").rpartition("/")[2] or value
    section, _, field_name = name.rpartition(".")
    return f"{field_name if len(field_name) > MIN_FIELD else f'{section} {field_name}'} {shown(value)}".strip()


def comparison_page(runs: Sequence[Compared]) -> str:
    parts = {
        "overview": _overview(runs),
        "learning": _learning(runs),
        "evaluation": _evaluation(runs),
        "off-policy": _off_policy(runs),
        "time": _time(runs),
        "setup": _setup(runs),
    }
    menu = {anchor: MENU[anchor] for anchor, content in parts.items() if content}
    recipes = list(dict.fromkeys(one.run.recipe for one in runs))
    heading = f"<h1>{len(runs)} runs beside each other</h1><p>{text(' · '.join(recipes))}</p>"
    return document(title=" | ".join(one.name for one in runs), heading=heading, menu=menu, body=parts.values())


# In short


def _overview(runs: Sequence[Compared]) -> str:
    told = faster({one.name: one.run for one in runs})
    if not are_alike([one.run for one in runs]):
        told.append("Prompts or rewards differ, so rewards and held-out scores need not mean the same.")
    if resumed := [one.name for one in runs if one.run.num_attempts > 1]:
        told.append(f"Resumed: {', '.join(resumed)}. Curves over time leave out what was abandoned.")
    for one in runs:
        if (status := status_of(one.run)) != "done":
            told.append(f"{one.name}: {status}, {len(one.run.history.steps)} steps so far.")
    lead = "Every run has one colour on this page."
    summary = card("What happened", "", items(told, kind="plain"), size="wide") if told else ""
    outcomes = card("Outcomes", BOLD, outcome_table({one.name: one.run for one in runs}), size="wide")
    return part("overview", "In short", lead, [_names(runs), summary, outcomes])


def _names(runs: Sequence[Compared]) -> str:
    """The runs with their colours and what sets each apart."""
    chips = "".join(
        f'<li><i class="key stroke {Series(one.name, [], one.hue).kind}"></i><b>{text(one.name)}</b> '
        f"<span>{field(one.folder if one.folder != one.name else '')}</span></li>"
        for one in runs
    )
    return f'<ul class="runs">{chips}</ul>'


# Overlays


def _learning(runs: Sequence[Compared]) -> str:
    pictures = [
        _clocks(runs, "Held-out accuracy", "eval_accuracy", "accuracy, greedy"),
        _clocks(runs, "Held-out reward", "eval_reward", "mean reward, greedy"),
        _clocks(runs, "Reward", "reward", "reward of the batch"),
        cards(
            _overlay(
                runs,
                "Length of completions",
                "completion_tokens_mean",
                Axis("tokens", low=0.0),
                "Means of the batches.",
            ),
            _overlay(
                runs,
                "Entropy",
                "entropy",
                Axis("nats per token", low=0.0),
                "How undecided the policy is about the next token.",
            ),
            _overlay(
                runs,
                "KL to the reference",
                "kl_reference_sum",
                Axis("nats per completion", low=0.0),
                "How far training has moved from the frozen reference.",
            ),
        ),
    ]
    lead = "The first picture of a row tells what a step teaches, the last one what an hour does."
    return part("learning", "Who learns faster?", lead, pictures)


def _clocks(runs: Sequence[Compared], title: str, name: str, label: str) -> str:
    """One metric of all runs against steps, tokens and time."""
    note = "The same lines by steps, by tokens trained on and by time since RL began, warm start excluded."
    window = max(one.run.history.window() for one in runs)
    if window > 1 and not name.startswith("eval_"):
        note += f" Means of up to {window} neighbouring steps."

    def series_of(clock: Clock) -> list[Series]:
        return [_series(one, name, clock) for one in runs]

    return three_clocks(title, note, [one.run for one in runs], series_of, Axis(label, low=0.0), height=220)


def _series(one: Compared, name: str, clock: Clock) -> Series:
    history = one.run.history
    if name.startswith("eval_"):
        return Series(one.name, history.evaluated(name, clock), one.hue, has_dots=True)
    return Series(one.name, smoothed(history.points(name, clock), history.window()), one.hue)


def _overlay(runs: Sequence[Compared], title: str, name: str, y: Axis, note: str) -> str:
    series = [_series(one, name, "step") for one in runs if one.run.history.has(name)]
    if not series:
        return ""
    chart = line_chart(series, title=title, x=Axis("step"), y=y, missing="None of the runs measured it.")
    return card(title, note, chart, details=numbers(series, "step"), folds=True)


def _off_policy(runs: Sequence[Compared]) -> str:
    ages = [
        Series(
            one.name,
            [(float(lag), count / sum(one.run.staleness.values())) for lag, count in one.run.staleness.items()],
            one.hue,
            has_dots=True,
        )
        for one in runs
        if one.run.staleness
    ]
    chart = line_chart(
        ages,
        title="Age of trained tokens",
        x=Axis("age in steps", low=0.0),
        y=Axis("share of tokens", low=0.0, is_share=True),
    )
    note = "How many training steps old a token was when it was trained on; a synchronous run has all at 0."
    pictures = cards(
        card("Age of the trained tokens", note, chart, details=numbers(ages, "age")) if ages else "",
        _overlay(
            runs,
            "Age, step by step",
            "staleness_mean",
            Axis("steps, mean of the batch", low=0.0),
            "Flat is a pipeline in balance.",
        ),
        _overlay(
            runs,
            "Drift within a batch",
            "kl_k3",
            Axis("KL(sampler ‖ trained), nats per token", low=0.0),
            "How far the trained policy is from the one that sampled.",
        ),
        _overlay(
            runs,
            "Effective sample size",
            "ess",
            Axis("share of the batch", high=1.0, is_share=True),
            "How much of a batch still counts after the correction.",
        ),
    )
    return part(
        "off-policy",
        "Whose data was older?",
        "What was sampled while others were trained comes from older versions of the policy.",
        [pictures],
    )


def _time(runs: Sequence[Compared]) -> str:
    rows: dict[str, Mapping[str, float]] = {}
    sides = list(dict.fromkeys(name for one in runs for name in one.run.times.loop if name != "controller"))
    for process in sides:
        for one in runs:
            seconds = one.run.times.loop.get(process)
            if seconds is not None:
                count = max(1, len(one.run.times.spans))
                rows[f"{process} · {one.name}"] = {state: value / count for state, value in seconds.items()}
    chart = state_bars(
        rows,
        title="Seconds of a step by process, run and state",
        is_scaled=True,
        missing="There are no timelines of these runs.",
    )
    told = [f"{one.name}: {one.run.times.verdict}" for one in runs if one.run.times.verdict]
    note = "The length of a bar is a step's time, the mean over all of them; work first, then, hatched, waiting."
    pictures = [
        card("What a step is spent on", note, chart, size="wide"),
        card("What holds each of them up", "", items(told, kind="plain"), size="wide", folds=True) if told else "",
        cards(
            _overlay(
                runs,
                "Time of a step",
                "step_s",
                Axis("seconds", low=0.0),
                "From the end of one step to the end of the next.",
            ),
            _overlay(runs, "Trained on", "trained_tokens_per_s", Axis("tokens per second", low=0.0), "By the trainer."),
        ),
    ]
    return part("time", "Whose time went where?", "Means over the steps of each run's last attempt.", pictures)


def _evaluation(runs: Sequence[Compared]) -> str:
    return gains_of_several([Evaluated(o.name, o.hue, o.run.evaluation) for o in runs if o.run.evaluation is not None])


def _setup(runs: Sequence[Compared]) -> str:
    rows = [
        [f"<code>{field(name)}</code>", *(text(shown(value)) for value in values), text(meaning(name))]
        for name, values in differing_fields([one.run for one in runs]).items()
    ]
    head = ["field", *(one.name for one in runs), "what it is"]
    note = "Fields of the configuration in which the runs differ; all others are equal."
    content = table(head, rows, kind="config", stacks=True) or empty("None: the runs have one configuration.")
    return part(
        "setup",
        "What was different?",
        "Whatever differs in the pictures comes from here, or from chance.",
        [card("Configuration", note, content, size="wide", folds=True)],
    )


def differing_fields(runs: Sequence[Run], *, apart_from: Collection[str] = NOT_COMPARED) -> dict[str, list[object]]:
    """Field -> its value in each run, where these differ."""
    tables = [flat(run.config) for run in runs]
    names = dict.fromkeys(name for fields in tables for name in fields if name not in apart_from)
    found = {name: [as_saved(fields.get(name)) for fields in tables] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}
