"""What several runs came to, number by number, and which of them was faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from slipstream.observe.display import duration
from slipstream.observe.report.html import table, text
from slipstream.observe.report.run import Clock, Run
from slipstream.observe.svg import Point, number, smoothed
from slipstream.observe.svg_blocks import percent_name


@dataclass(frozen=True)
class Outcome:
    """A line of the table. `value` is None where a run does not have it; `best` picks the better of several values."""

    name: str
    value: Callable[[Run], float | None]
    words: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


def outcome_table(runs: Mapping[str, Run]) -> str:
    target = common_reward(list(runs.values()))
    lines = [
        Outcome("held-out accuracy before, greedy", lambda run: run.held_out[0].accuracy, "{:.1%}".format),
        Outcome("held-out accuracy after, greedy", lambda run: run.held_out[1].accuracy, "{:.1%}".format, max),
        Outcome("held-out mean reward before, greedy", lambda run: run.held_out[0].reward, number),
        Outcome("held-out mean reward after, greedy", lambda run: run.held_out[1].reward, number),
        Outcome("steps", lambda run: float(len(run.history.steps)), number),
        Outcome("whole run", lambda run: run.times.wall_s or None, span),
        Outcome("a step, mean", lambda run: run.times.step_s, "{:.3f} s".format, min),
        Outcome(f"RL until reward {number(target or 0.0)}", lambda run: time_to(run, target), span, min),
        Outcome("sampled tokens/s", lambda run: _rate(run, "generated"), number),
        Outcome("trained tokens/s", lambda run: _rate(run, "trained"), number, max),
        Outcome("age of a trained token, mean", lambda run: run.mean_staleness, "{:.2f} steps".format),
        Outcome("age of a trained token, most", lambda run: run.max_staleness, "{:.0f} steps".format),
        Outcome("effective sample size, mean", _mean_ess, percent_name),
        Outcome("trainer waits", lambda run: run.idle("trainer"), percent_name, min),
        Outcome("generators wait", lambda run: run.idle("generator"), percent_name, min),
        Outcome("wasted tokens, of those trained on", lambda run: run.wasted_share, percent_name, min),
        Outcome("alarms", lambda run: float(len(run.alarms)), number, min),
    ]
    rows = (row for line in lines if (row := _row(line, list(runs.values()))))
    return table(["", *runs], rows, kind="outcomes")


def faster(runs: Mapping[str, Run]) -> list[str]:
    """Which run was first at a reward that all reached, in a sentence; none where that cannot be told."""
    target = common_reward(list(runs.values()))
    if target is None:
        return []
    times = {name: time_to(run, target) for name, run in runs.items()}
    found = sorted((seconds, name) for name, seconds in times.items() if seconds is not None)
    first_s, first = found[0]
    others = "".join(f", {name} {span(s)} ({s / max(first_s, 1e-9):.2f} times as long)" for s, name in found[1:])
    return [f"RL until a smoothed reward of {target:.3f}, which all reached: {first} {span(first_s)}{others}."]


def _reward(run: Run, clock: Clock) -> list[Point]:
    return smoothed(run.history.points("reward", clock), run.history.window())


def common_reward(runs: Sequence[Run]) -> float | None:
    """The highest smoothed reward that every one of them reached; None where their rewards are not the same thing."""
    if any(run.recipe != runs[0].recipe or run.config.get("rewards") != runs[0].config.get("rewards") for run in runs):
        return None
    reached = [max((value for _, value in _reward(run, "step")), default=None) for run in runs]
    return None if any(value is None for value in reached) else min(value for value in reached if value is not None)


def time_to(run: Run, reward: float | None) -> float | None:
    """Seconds since RL began at which the smoothed reward first was `reward`; None for one it never was."""
    if reward is None:
        return None
    return next((seconds for seconds, value in _reward(run, "time") if value >= reward), None)


def span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else duration(seconds)


def _row(line: Outcome, runs: Sequence[Run]) -> list[str]:
    values = [line.value(run) for run in runs]
    known = [value for value in values if value is not None]
    if not known:
        return []
    best = line.best(known) if line.best is not None and min(known) != max(known) else None
    words = ["-" if value is None else text(line.words(value)) for value in values]
    is_best = [best is not None and value == best for value in values]
    return [text(line.name), *(f"<b>{word}</b>" if good else word for word, good in zip(words, is_best, strict=True))]


def _rate(run: Run, which: Literal["generated", "trained"]) -> float | None:
    if run.summary is None:
        return None
    speed = run.summary.throughput
    return speed.generated_tokens_per_s if which == "generated" else speed.trained_tokens_per_s


def _mean_ess(run: Run) -> float | None:
    values = [value for _, value in run.history.points("ess")]
    return fmean(values) if values else None
