"""The outcomes of several runs, number by number, and which of them was faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from slipstream.observe.display import duration
from slipstream.observe.noise import ERRORS, LEAST_TREND, Estimate, mean_of
from slipstream.observe.report.data import RunData
from slipstream.observe.report.html import table, text
from slipstream.observe.svg import Point, number, smoothed
from slipstream.observe.svg_blocks import percent_name

BOLD = "Bold is better than each of the others by more than noise: twice the standard error of their difference."


@dataclass(frozen=True)
class OutcomeRow:
    """A line of the table. `measure` is None where a run does not have it.

    `best` picks the better of several values; None where none is better, or where they are not of the same thing.
    """

    name: str
    measure: Callable[[RunData], Estimate | float | None]
    words: Callable[[float], str]
    best: Callable[[Sequence[float]], float] | None = None


def outcome_table(runs: Mapping[str, RunData]) -> str:
    several = list(runs.values())
    has_one_batch = (
        len({(run.config.get("groups_per_step"), run.config.get("completions_per_group")) for run in several}) == 1
    )
    lines = [
        OutcomeRow("held-out accuracy before, greedy", lambda run: run.held_out[0].accuracy, "{:.1%}".format),
        OutcomeRow(
            "held-out accuracy after, greedy",
            lambda run: run.held_out_score,
            "{:.1%}".format,
            max if are_alike(several) else None,
        ),
        OutcomeRow("held-out mean reward before, greedy", lambda run: run.held_out[0].reward, number),
        OutcomeRow("held-out mean reward after, greedy", lambda run: run.held_out[1].reward, number),
        OutcomeRow("held-out prompts", _num_held_out, number),
        OutcomeRow("steps", lambda run: float(len(run.history.steps)), number),
        OutcomeRow("whole run", lambda run: run.wall_s, span),
        OutcomeRow("a step, mean", lambda run: run.times.step_s, "{:.3f} s".format, min if has_one_batch else None),
        OutcomeRow("sampled tokens/s", lambda run: _rate(run, "generated"), number),
        OutcomeRow("trained tokens/s", lambda run: _rate(run, "trained"), number, max),
        OutcomeRow("age of a trained token, mean", lambda run: run.mean_staleness, "{:.2f} steps".format),
        OutcomeRow("age of a trained token, most", lambda run: run.max_staleness, "{:.0f} steps".format),
        OutcomeRow("effective sample size, mean", _mean_ess, percent_name),
        OutcomeRow("trainer waits", lambda run: run.idle("trainer"), percent_name),
        OutcomeRow("generators wait", lambda run: run.idle("generator"), percent_name),
        OutcomeRow("wasted tokens, of those trained on", lambda run: run.wasted_share, percent_name),
        OutcomeRow("alarms", lambda run: float(len(run.alarms)), number),
    ]
    rows = (row for line in lines if (row := _row(line, several)))
    return table(["", *runs], rows, kind="outcomes")


def are_alike(runs: Sequence[RunData]) -> bool:
    """Whether their rewards and held-out scores mean the same."""
    return all(run.rewarded == runs[0].rewarded for run in runs)


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
        """When it first was there; infinite for a reward that it never had."""
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
    """None for a run whose times, or whose noise, are not known."""
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
    words = ["-" if one is None else text(line.words(one.value)) for one in measured]
    best = _best(line, [one for one in measured if one is not None])
    return [
        text(line.name),
        *(
            f"<b>{word}</b>" if one is not None and one is best else word
            for word, one in zip(words, measured, strict=True)
        ),
    ]


def _best(line: OutcomeRow, known: Sequence[Estimate]) -> Estimate | None:
    """The one that is better than each of the others by more than noise."""
    if line.best is None or len(known) < 2:
        return None
    value = line.best([one.value for one in known])
    best = next(one for one in known if one.value == value)
    return best if all(one is best or best.differs(one) for one in known) else None


def _num_held_out(run: RunData) -> float | None:
    return None if run.evaluations.after is None else float(run.num_held_out)


def _rate(run: RunData, which: Literal["generated", "trained"]) -> Estimate | None:
    """Its error is that of the mean of the steps' rates."""
    if run.summary is None or not run.history.steps:
        return None
    speed = run.summary.throughput
    value = speed.generated_tokens_per_s if which == "generated" else speed.trained_tokens_per_s
    by_step = mean_of(run.history.values(f"{which}_tokens_per_s"))
    return None if value is None else Estimate(value, None if by_step is None else by_step.error)


def _mean_ess(run: RunData) -> float | None:
    values = run.history.values("ess")
    return fmean(values) if values else None
