"""Several runs on one page: outcomes, overlays on three clocks, win rate against KL, where time went, what differed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import stdev
from typing import Literal, NamedTuple

from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError
from slipstream.core.plain import MAX_PATH_BYTES, plural
from slipstream.observe.display import duration, printable
from slipstream.observe.noise import ERRORS, LEAST_TREND, Estimate, mean_of
from slipstream.observe.report.charts import against_kl, chart_card, gained, overlaid, overlays, spots_of, three_clocks
from slipstream.observe.report.data import Compared, RunData, as_saved, meaning, read_run, shown
from slipstream.observe.report.html import card, cards, document, field, items, part, table, text
from slipstream.observe.report.overview import status_of
from slipstream.observe.summary import TrainedRows
from slipstream.observe.svg import Axis, Point, Series, empty, number, smoothed, without_middle
from slipstream.observe.svg_blocks import percent_name, state_bars

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
BOLD = "Bold is better than each of the others by more than noise: twice the standard error of their difference."


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
    folders = list(short_names(places).values())
    names, beside = labels(runs) or folders, folders
    if not any(is_name_by_time(place.name) for place in places):  # somebody has called them so
        names, beside = folders, names
    names, beside = ([printable(name, limit=MAX_PATH_BYTES) for name in some] for some in (names, beside))
    compared = [Compared(*one, i) for i, one in enumerate(zip(runs, names, beside, strict=True))]
    path = Path(COMPARISON_FILE) if out is None else out
    replace_file(path, comparison_page(compared).encode())
    return path


def is_name_by_time(name: str) -> bool:
    """Whether a folder has the name that it gets where nobody chooses one: RECIPE-20260101-120000."""
    *recipe, day, time = ["", "", *name.split("-")]
    return any(recipe) and (len(day), len(time)) == (8, 6) and (day + time).isdecimal()


def short_names(places: Sequence[Path]) -> dict[Path, str]:
    """Folder -> as little of the end of its path as tells it from the others; long ones without their middle."""
    depth = 1
    while len({place.parts[-depth:] for place in places}) < len(places):
        depth += 1
    names = {place: "/".join(place.parts[-depth:]) for place in places}
    cut = {place: without_middle(name, MAX_NAME) for place, name in names.items()}
    return cut if len(set(cut.values())) == len(places) else names


def labels(runs: Sequence[RunData]) -> list[str]:
    """Label each run by the fewest fields that tell all of them apart in their configurations; none if too many must.

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
                cut = [without_middle(name, MAX_NAME) for name in found]
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
        "In short": _overview(runs),
        "Learning": _learning(runs),
        "Evaluation": _evaluation(runs),
        "Off-policy": _off_policy(runs),
        "Time": _time(runs),
        "Setup": _setup(runs),
    }
    recipes = list(dict.fromkeys(one.run.recipe for one in runs))
    heading = f"<h1>{len(runs)} runs beside each other</h1><p>{text(' · '.join(recipes))}</p>"
    return document(title=" | ".join(one.name for one in runs), heading=heading, parts=parts)


# In short


def _overview(runs: Sequence[Compared]) -> str:
    told = faster({one.name: one.run for one in runs})
    if not are_alike([one.run for one in runs]):
        told.append("Prompts or rewards differ, so rewards and held-out scores need not mean the same.")
    elif not are_measured_alike([one.run for one in runs]):
        told.append("Held-out sets or their measures differ, so held-out scores need not mean the same.")
    if resumed := [one.name for one in runs if one.run.num_attempts > 1]:
        told.append(f"Resumed: {', '.join(resumed)}. Curves over time leave out what was abandoned.")
    for one in runs:
        if (status := status_of(one.run)) != "done":
            told.append(f"{one.name}: {status}, {plural(len(one.run.history.steps), 'step')} so far.")
    lead = "Every run has one colour on this page."
    summary = card("What happened", "", items(told, kind="plain"), size="wide") if told else ""
    outcomes = card("Outcomes", BOLD, outcome_table({one.name: one.run for one in runs}), size="wide")
    return part("overview", "In short", lead, [_names(runs), summary, outcomes])


def _names(runs: Sequence[Compared]) -> str:
    """The runs with their colours and what sets each apart."""
    chips = "".join(
        f'<li><i class="key stroke {Series(one.name, [], one.hue).kind}"></i><b>{text(one.name)}</b> '
        f"<span>{field(one.beside if one.beside != one.name else '')}</span></li>"
        for one in runs
    )
    return f'<ul class="runs">{chips}</ul>'


# Overlays


def _learning(runs: Sequence[Compared]) -> str:
    pictures = [
        _clocks(runs, "Held-out accuracy", "eval_accuracy", "accuracy, greedy"),
        _clocks(runs, "Held-out reward", "eval_reward", "mean reward, greedy"),
        _clocks(runs, "Reward", "reward", "reward of the batch"),
        cards(*overlays(runs, "learning")),
    ]
    lead = "The first picture of a row tells what a step teaches, the last one what an hour does."
    return part("learning", "Who learns faster?", lead, pictures)


def _clocks(runs: Sequence[Compared], title: str, name: str, label: str) -> str:
    """One metric of all runs against steps, tokens and time."""
    note = "The same lines by steps, by tokens trained on and by time since RL began, warm start excluded."
    window = max(one.run.history.window for one in runs)
    if window > 1 and not name.startswith("eval_"):
        note += f" Means of up to {window} neighbouring steps."
    several = [one.run for one in runs]
    return three_clocks(title, note, several, partial(overlaid, runs, name), Axis(label, low=0.0), height=220)


def _evaluation(runs: Sequence[Compared]) -> str:
    """The part about evaluations; empty where no run has both a win rate and a KL."""
    evaluated = [(one.name, one.hue, one.run.evaluation) for one in runs if one.run.evaluation is not None]
    if not (spots := spots_of(evaluated)):
        return ""
    rows = [[text(s.name), f"{s.x:.2f} ± {s.x_error:.2f}", f"{s.y:.1%} ± {s.y_error:.1%}"] for s in spots]
    found = table(["", "KL", "gold win rate"], rows, kind="numbers")
    measured = card("The same in numbers", "Means ± standard errors.", found, folds=True)
    return gained([against_kl(evaluated), measured])


def _off_policy(runs: Sequence[Compared]) -> str:
    ages = []
    for one in runs:
        total = sum(one.run.staleness.values())
        points = [(float(lag), count / total) for lag, count in one.run.staleness.items()]
        ages.append(Series(one.name, points, one.hue, has_dots=True))
    title, share = "Age of the trained tokens", Axis("share of tokens", low=0.0, is_share=True)
    note = "How many training steps old a token was when it was trained on; a synchronous run has all at 0."
    first = chart_card(title, note, ages, share, x=Axis("age in steps", low=0.0), folds=False)
    lead = "What was sampled while others were trained comes from older versions of the policy."
    return part("off-policy", "Whose data was older?", lead, [cards(first, *overlays(runs, "off-policy"))])


def _time(runs: Sequence[Compared]) -> str:
    sides = dict.fromkeys(name for one in runs for name in one.run.times.loop if name != "controller")
    rows = {
        f"{process} · {one.name}": {
            state: value / max(1, len(one.run.times.spans)) for state, value in one.run.times.loop[process].items()
        }
        for process in sides
        for one in runs
        if process in one.run.times.loop
    }
    title, missing = "Seconds of a step by process, run and state", "There are no timelines of these runs."
    chart = state_bars(rows, title=title, is_scaled=True, missing=missing)
    told = [f"{one.name}: {one.run.times.verdict}" for one in runs if one.run.times.verdict]
    note = "The length of a bar is a step's time, the mean over all of them; work first, then, hatched, waiting."
    pictures = [
        card("What a step is spent on", note, chart, size="wide"),
        card("What holds each of them up", "", items(told, kind="plain"), size="wide", folds=True) if told else "",
        cards(*overlays(runs, "time")),
    ]
    return part("time", "Whose time went where?", "Means over the steps of each run's last attempt.", pictures)


def _setup(runs: Sequence[Compared]) -> str:
    rows = [
        [f"<code>{field(name)}</code>", *(field(shown(value)) for value in values), text(meaning(name))]
        for name, values in differing_fields([one.run for one in runs]).items()
    ]
    head = ["field", *(one.name for one in runs), "what it is"]
    note = "Fields of the configuration in which the runs differ; all others are equal."
    content = table(head, rows, kind="config", stacks=True) or empty("None: the runs have one configuration.")
    lead = "Whatever differs in the pictures comes from here, or from chance."
    return part("setup", "What was different?", lead, [card("Configuration", note, content, size="wide", folds=True)])


def differing_fields(runs: Sequence[RunData], *, apart_from: Collection[str] = NOT_COMPARED) -> dict[str, list[object]]:
    """Field -> its value in each run, where these differ; None where a run does not use it."""
    tables = [run.fields for run in runs]
    names = dict.fromkeys(name for fields in tables for name in fields if name not in apart_from)
    found = {name: [as_saved(fields.get(name)) for fields in tables] for name in names}
    return {name: values for name, values in found.items() if any(value != values[0] for value in values)}


# Outcomes, number by number


class OutcomeRow(NamedTuple):
    """A line of the table: `measure` is None where a run lacks it, `best` picks the better value where one is."""

    name: str
    measure: Callable[[RunData], Estimate | float | None]
    words: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


def outcome_table(runs: Mapping[str, RunData]) -> str:
    several, line, percent = list(runs.values()), OutcomeRow, "{:.1%}".format
    batches = {(run.config.get("groups_per_step"), run.config.get("completions_per_group")) for run in several}
    best_score, best_step = max if are_measured_alike(several) else None, min if len(batches) == 1 else None
    lines = [
        line("held-out accuracy before, greedy", lambda run: run.held_out[0].accuracy, percent),
        line("held-out accuracy after, greedy", lambda run: run.held_out_score, percent, best_score),
        line("held-out mean reward before, greedy", lambda run: run.held_out[0].reward, number),
        line("held-out mean reward after, greedy", lambda run: run.held_out[1].reward, number),
        line("held-out prompts", lambda run: run.num_held_out if run.evaluations.after else None, number),
        line("steps", lambda run: float(len(run.history.steps)), number),
        line("whole run", lambda run: run.wall_s, span),
        line("a step, mean", lambda run: run.times.step_s, "{:.3f} s".format, best_step),
        line("sampled tokens/s", lambda run: _rate(run, "generated"), number),
        line("trained tokens/s", lambda run: _rate(run, "trained"), number, max),
        line("age of a trained token, mean", lambda run: run.mean_staleness, "{:.2f} steps".format),
        line("age of a trained token, most", lambda run: run.max_staleness, lambda age: plural(round(age), "step")),
        line("effective sample size, mean", lambda run: mean_of(run.history.values("ess")), percent_name),
        line("trainer waits", lambda run: run.idle("trainer"), percent_name),
        line("generators wait", lambda run: run.idle("generator"), percent_name),
        line("wasted tokens, of those trained on", lambda run: run.wasted_share, percent_name),
        line("rows saved where contexts begin alike", _saved, percent_name),
        line("alarms", lambda run: float(len(run.alarms)), number),
    ]
    return table(["", *runs], (cells for one in lines if (cells := _row(one, several))), kind="outcomes")


def _saved(run: RunData) -> float | None:
    rows = TrainedRows.of(run.history.steps)
    return None if rows is None else rows.saved_frac


def are_alike(runs: Sequence[RunData]) -> bool:
    """Whether their rewards mean the same."""
    terms = {run.terms for run in runs if run.terms}  # none of a run that ended before a step
    return len(terms) < 2 and all(run.rewarded == runs[0].rewarded for run in runs)


def are_measured_alike(runs: Sequence[RunData]) -> bool:
    """Whether their held-out scores mean the same."""
    return are_alike(runs) and all(run.measured == runs[0].measured for run in runs)


# The race


@dataclass(frozen=True)
class Racer:
    """A run's smoothed reward over the time since RL began, in seconds, and the standard error of one of its points."""

    points: Sequence[Point]
    error: float

    @property
    def most(self) -> float:
        return max(value for _, value in self.points)

    def time_to(self, reward: float) -> float:
        """Return the seconds until `reward` was first reached; infinite where it never was."""
        return next((seconds for seconds, value in self.points if value >= reward), math.inf)


def faster(runs: Mapping[str, RunData]) -> list[str]:
    """Which run was first at a reward that all reached, in a sentence; none where that cannot be told.

    The reward is two standard errors below the best that the weakest of them had. A run is there between the times at
    which it was two errors below it and two above, and was first where it was there before any other could be.
    Nothing is said where rewards or prompts are not the same thing; of fewer than `LEAST_TREND` steps; of resumed runs,
    in whose clock a second start-up lies and abandoned steps do not; and where a run had that reward from its
    beginning, so that it did not have to learn it.
    """
    racers = {name: racer for name, run in runs.items() if (racer := _racer(run)) is not None}
    if len(racers) < len(runs) or not are_alike(list(runs.values())):
        return []
    target = min(racer.most - ERRORS * racer.error for racer in racers.values())
    if any(racer.points[0][1] + ERRORS * racer.error >= target for racer in racers.values()):
        return []
    found = sorted((racer.time_to(target), name) for name, racer in racers.items())
    first_s, first = found[0]
    latest_s = racers[first].time_to(target + ERRORS * racers[first].error)
    if any(racers[name].time_to(target - ERRORS * racers[name].error) <= latest_s for _, name in found[1:]):
        return []
    others = "".join(f", {name} {span(s)} ({s / first_s:.2f} times as long)" for s, name in found[1:])
    return [f"RL until a smoothed reward of {target:.3f}, which all reached: {first} {span(first_s)}{others}."]


def _racer(run: RunData) -> Racer | None:
    """Return the racer of a run; None where its times, or its noise, are not known."""
    raw, window = run.history.points("reward", "time"), run.history.window
    if len(raw) < LEAST_TREND or run.num_attempts > 1:
        return None
    points = smoothed(raw, window)
    residuals = [value - mean for (_, value), (_, mean) in zip(raw, points, strict=True)]
    return Racer(points, stdev(residuals) / math.sqrt(window - 1))  # a mean lies near the one it is taken from


def span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _row(line: OutcomeRow, runs: Sequence[RunData]) -> list[str]:
    found = [line.measure(run) for run in runs]
    measured = [one if isinstance(one, Estimate) or one is None else Estimate(one) for one in found]
    if not any(measured):
        return []
    best = _best(line, [one for one in measured if one is not None])
    words = ["-" if one is None else text(line.words(one.value)) for one in measured]
    bold = (f"<b>{word}</b>" if best and one is best else word for word, one in zip(words, measured, strict=True))
    return [text(line.name), *bold]


def _best(line: OutcomeRow, known: Sequence[Estimate]) -> Estimate | None:
    """The one that is better than each of the others by more than noise."""
    if line.best is None or len(known) < 2:
        return None
    value = line.best([one.value for one in known])
    best = next(one for one in known if one.value == value)
    return best if all(one is best or best.differs(one) for one in known) else None


def _rate(run: RunData, which: Literal["generated", "trained"]) -> Estimate | None:
    """Return tokens a second; the error is that of the mean of the steps' rates."""
    if run.summary is None or not run.history.steps:
        return None
    speed = run.summary.throughput
    value = speed.generated_tokens_per_s if which == "generated" else speed.trained_tokens_per_s
    by_step = mean_of(run.history.values(f"{which}_tokens_per_s"))
    return None if value is None else Estimate(value, None if by_step is None else by_step.error)
