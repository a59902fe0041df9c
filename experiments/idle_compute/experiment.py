"""What idle compute buys: updates on each batch, or completions to choose from (Asynchronous RLHF, Figs. 7 and 8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from experiments.comparison import is_as_great, is_greater
from experiments.figures import COLOURS, lines, panels, svg
from experiments.lab import Lab, Spec, metrics, summary
from experiments.rlhf import LR, Ended, Pipeline, ended, read_evaluation
from experiments.section import Section, Verdict, markdown_table, spread
from slipstream.core.recipes import merge
from slipstream.observe.jsonl import read_jsonl

SEEDS = (0, 1, 2, 3, 4)
TIMED_SEEDS = (0, 1, 2)
PIPELINE = Pipeline()
TIMED_STEPS = 40
COLD_STEPS = 10
"""Left out of step times."""
WINDOW = 12
"""Steps over which win rates and drifts along a run are averaged: 768 completions, of 4 samples each 1536."""
SHARE_OF_GAIN = 0.9
"""Equal win rates: so much of the smallest best gain among the runs compared, per seed."""
MARGIN = 0.03
"""Win rates that differ by less are equal to a user."""

FIGURE_7, FIGURE_8 = "Asynchronous RLHF, Fig. 7", "Asynchronous RLHF, Fig. 8"
SYNC, T1, T2, T3, K4 = "K = 2, synchronous", "K = 2", "K = 2, T = 2", "K = 2, T = 3", "best and worst of 4"
ALL, EXTREMES = "RLOO, all of 4", "RLOO, best and worst of 4"

ASYNCHRONOUS: dict[str, Any] = {"max_staleness": 1, "weight_update": "in_flight"}
# Nearly nothing, and so drift is measured on all completions of a group, not on those alone that are trained on.
MEASURED: dict[str, Any] = {"kl": {"coef": 1e-6}}
HALVED: dict[str, Any] = {"steps": PIPELINE.updates // 2, "trainer": {"optimizer": {"lr": LR / 2}}}
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    SYNC: ("online_dpo", MEASURED),
    T1: ("online_dpo", ASYNCHRONOUS | MEASURED),
    T2: ("online_dpo", ASYNCHRONOUS | MEASURED | {"trainer": {"epochs": 2}}),
    T3: ("online_dpo", ASYNCHRONOUS | MEASURED | {"trainer": {"epochs": 3}}),
    K4: ("online_dpo", ASYNCHRONOUS | MEASURED | HALVED | {"completions_per_group": 4}),
    ALL: ("rloo", ASYNCHRONOUS | {"completions_per_group": 4}),
    EXTREMES: ("rloo", ASYNCHRONOUS | {"completions_per_group": 4, "loss": {"select": "best_and_worst"}}),
}
"""The loss, and what is changed in its run: one update for every 32 pairs, on-policy."""
TIMED = (SYNC, T1, K4)

WIN, DRIFT = "experiments.idle_compute.gold:win", "kl_reference_sum"
MEASURING = {"rewards": {"terms": [{"function": WIN, "weight": 0}]}}


def quality(lab: Lab, name: str, seed: int) -> Spec:
    """One run for what it learns, on one core."""
    loss, changed = CELLS[name]
    base = PIPELINE.rl(lab, loss, 1, seed)
    return replace(
        base, name=f"idle_compute {name} seed {seed}", overrides=merge(merge(base.overrides, MEASURING), changed)
    )


def timed(lab: Lab, name: str, seed: int) -> Spec:
    """A short one for its time: processes of their own, on the whole machine, and nothing measured besides."""
    alone = {
        "steps": TIMED_STEPS,
        "stages": ["rl"],
        "host": "process",
        "kl": {"coef": 0.0},
        "rewards": {"terms": []},
        "eval": {"num_prompts": 8},
    }
    one = quality(lab, name, seed)
    return replace(one, name=f"{one.name} timed", overrides=merge(one.overrides, alone), cores=None)


# What runs came to


@dataclass(frozen=True)
class Outcome:
    """One run: gold win rate against the references and drift from the start, along it and on held-out prompts.

    `wins` and `drifts` [steps] are of each step's batch, as its completions were sampled: nats per completion.
    `margin` is the mean reward of the best less that of the worst of a group, in the first WINDOW steps.
    """

    wins: tuple[float, ...]
    drifts: tuple[float, ...]
    margin: float
    before: Ended
    after: Ended

    @property
    def best(self) -> float:
        return max(smoothed(self.wins))

    def steps_to(self, level: float) -> float | None:
        """How many steps it takes until the averaged win rate is `level`, between two of them by a straight line."""
        place = crossing(smoothed(self.wins), level)
        return None if place is None else place + WINDOW

    def drift_at(self, level: float) -> float | None:
        """The averaged drift there."""
        place = crossing(smoothed(self.wins), level)
        if place is None:
            return None
        drifts, index = smoothed(self.drifts), int(place)
        ahead = place - index
        return drifts[index] if not ahead else (1 - ahead) * drifts[index] + ahead * drifts[index + 1]


def crossing(values: Sequence[float], level: float) -> float | None:
    """The place, from 0, where the line through `values` first is at `level` or above."""
    index = next((index for index, value in enumerate(values) if value >= level), None)
    if not index:  # None, or already at the first
        return index
    return index - 1 + (level - values[index - 1]) / (values[index] - values[index - 1])


def outcome(
    steps: Sequence[Mapping[str, Any]], rollouts: Iterable[Mapping[str, Any]], evaluation: Mapping[str, Any]
) -> Outcome:
    """From `metrics.jsonl`, `rollouts.jsonl` and `evaluation.json`."""
    trained = [line for line in steps if DRIFT in line]
    return Outcome(
        wins=tuple(line[f"reward_parts/{WIN}"] for line in trained),
        drifts=tuple(line[DRIFT] for line in trained),
        margin=group_margin(rollouts, WINDOW * PIPELINE.prompts_per_update),
        before=ended(evaluation, "before"),
        after=ended(evaluation),
    )


def smoothed(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Means over `window` values in a row."""
    return [fmean(values[end - window : end]) for end in range(window, len(values) + 1)]


def group_margin(rollouts: Iterable[Mapping[str, Any]], num_groups: int) -> float:
    """Mean difference between the best and the worst reward of the first `num_groups` groups of `rollouts.jsonl`."""
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout["ordinal"], []).append(rollout["reward"])
    first = [groups[ordinal] for ordinal in sorted(groups)[:num_groups]]
    return fmean(max(rewards) - min(rewards) for rewards in first)


def step_seconds(steps: Sequence[Mapping[str, Any]]) -> float:
    """Median time of a step once the loop runs."""
    return median([line["step_s"] for line in steps if "step_s" in line][COLD_STEPS:])


@dataclass(frozen=True)
class Timing:
    """`step_s` and who waited, of one timed run."""

    step_s: float
    trainer_idle: float
    generator_idle: float


def timing(steps: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> Timing:
    idle = told["balance"]["idle"]
    return Timing(step_seconds(steps), idle["trainer"], idle["generator-0"])


Runs = Mapping[str, Sequence[Outcome]]
"""Cell -> one outcome per seed, in the order of SEEDS."""
Timings = Mapping[str, Sequence[Timing]]


def equal_levels(runs: Runs, *names: str) -> list[float]:
    """Per seed, the win rate at which the runs called `names` are compared: all of them reach it."""
    levels = []
    for of_seed in zip(*(runs[name] for name in names), strict=True):
        begin = fmean(one.before.win_rate for one in of_seed)
        levels.append(begin + SHARE_OF_GAIN * max(0.0, min(one.best for one in of_seed) - begin))
    return levels


def drifts_at(runs: Runs, name: str, levels: Sequence[float]) -> list[float]:
    found = [one.drift_at(level) for one, level in zip(runs[name], levels, strict=True)]
    assert None not in found, "every run reaches the level"
    return [drift for drift in found if drift is not None]


def seconds_to(runs: Runs, timings: Timings, name: str, levels: Sequence[float]) -> list[float]:
    """Per seed, the time until the win rate is there: steps of the run, times the mean step of the timed ones."""
    step_s = fmean(one.step_s for one in timings[name])
    steps = [one.steps_to(level) for one, level in zip(runs[name], levels, strict=True)]
    assert None not in steps, "every run reaches the level"
    return [step * step_s for step in steps if step is not None]


def verdicts(runs: Runs, timings: Timings) -> list[Verdict]:
    """Each claim by the rule in the README."""
    return [
        *_more_updates(runs),
        _as_good_in_half_the_steps(runs),
        _margin_doubles(runs),
        *_faster(runs, timings),
        _more_drift(runs, K4, "Best and worst of 4 reach the same win rate at a higher KL.", FIGURE_8),
        _extremes_hurt_rloo(runs),
    ]


def _more_updates(runs: Runs) -> list[Verdict]:
    means = {name: [fmean(one.wins) for one in runs[name]] for name in (T1, T2, T3)}
    better = {name: is_greater(means[name], means[T1], paired=True) for name in (T2, T3)}
    found = ", ".join(f"T = {count}: {spread(values)}" for count, values in enumerate(means.values(), 1))
    return [
        Verdict(
            "More updates per batch raise the win rate for the same number of samples.",
            FIGURE_7,
            _all_of(better.values()),
            f"mean over training: {found}",
        ),
        _more_drift(runs, T2, "T = 2 reaches the same win rate at a higher KL.", FIGURE_7),
        _more_drift(runs, T3, "T = 3 reaches the same win rate at a higher KL.", FIGURE_7),
    ]


def _more_drift(runs: Runs, name: str, claim: str, source: str) -> Verdict:
    levels = equal_levels(runs, T1, name)
    ours, theirs = drifts_at(runs, name, levels), drifts_at(runs, T1, levels)
    return Verdict(
        claim,
        source,
        is_greater(ours, theirs, paired=True),
        f"{spread(ours, 2)} nats at a win rate of {spread(levels, 2)}, once on two: {spread(theirs, 2)}",
    )


def _as_good_in_half_the_steps(runs: Runs) -> Verdict:
    ours, theirs = ([one.after.win_rate for one in runs[name]] for name in (K4, T1))
    return Verdict(
        "Best and worst of 4, at half the learning rate, reach the same win rate in half the steps.",
        FIGURE_8,
        is_as_great(ours, theirs, MARGIN, paired=True),
        f"{spread(ours)}, K = 2: {spread(theirs)}",
    )


def _margin_doubles(runs: Runs) -> Verdict:
    ratios = [ours.margin / theirs.margin for ours, theirs in zip(runs[K4], runs[T1], strict=True)]
    return Verdict(
        "The best and the worst of 4 differ about twice as much in reward as two completions.",
        FIGURE_8,
        1.5 <= fmean(ratios) <= 2.5,
        f"{spread(ratios, 2)} times",
    )


def _faster(runs: Runs, timings: Timings) -> list[Verdict]:
    levels = equal_levels(runs, SYNC, T1, K4)
    seconds = {name: seconds_to(runs, timings, name, levels) for name in TIMED}
    over_sync = [theirs / ours for ours, theirs in zip(seconds[K4], seconds[SYNC], strict=True)]
    over_two = [ours / theirs for ours, theirs in zip(seconds[K4], seconds[T1], strict=True)]
    idle = fmean(one.generator_idle for one in timings[T1])
    bound = f"generators idle {idle:.0%} of the time at K = 2"
    return [
        Verdict(
            "Asynchronous, with best and worst of 4, the same win rate takes 1/2.5 of the synchronous time.",
            FIGURE_8,
            fmean(over_sync) >= 2.5,
            f"{spread(over_sync, 2)} times as fast; {bound}",
        ),
        Verdict(
            "It takes just over half the time of K = 2.",
            FIGURE_8,
            fmean(over_two) <= 0.6,
            f"{spread(over_two, 2)} of it; {bound}",
        ),
    ]


def _extremes_hurt_rloo(runs: Runs) -> Verdict:
    ours, theirs = ([one.after.win_rate for one in runs[name]] for name in (ALL, EXTREMES))
    return Verdict(
        "RLOO on the best and the worst of 4 is worse than on all of them.",
        "Asynchronous RLHF, appendix A.3",
        is_greater(ours, theirs, paired=True),
        f"win rate {spread(theirs)}, on all {spread(ours)}",
    )


def _all_of(answers: Iterable[bool | None]) -> bool | None:
    """Yes if each is, no if one is not."""
    answers = list(answers)
    return False if False in answers else None if None in answers else True


# What is said


def section(lab: Lab) -> Section:
    cells = [(name, seed) for seed in SEEDS for name in CELLS]
    places = PIPELINE.make(lab, SEEDS, [], [quality(lab, name, seed) for name, seed in cells])
    timed_cells = [(name, seed) for seed in TIMED_SEEDS for name in TIMED]  # interleaved: a slow hour slows all of them
    timed_places = lab.run_all([timed(lab, name, seed) for name, seed in timed_cells])
    runs: dict[str, list[Outcome]] = {}
    for (name, _), place in zip(cells, places, strict=True):
        rollouts = read_jsonl(place / "rollouts.jsonl", dict[str, Any])
        runs.setdefault(name, []).append(outcome(metrics(place), rollouts, read_evaluation(place)))
    timings: dict[str, list[Timing]] = {}
    for (name, _), place in zip(timed_cells, timed_places, strict=True):
        timings.setdefault(name, []).append(timing(metrics(place), summary(place)))
    config = quality(lab, T1, 0).config()
    return Section(
        title="Spending idle compute",
        question="Where the trainer idles, what do T = 2 or 3 updates per batch buy; where the generators idle, what "
        "does choosing the best and the worst of 4 completions? And what does either cost in drift?",
        setup=f"`tldr_mini` with Online DPO, {config.steps} steps of {config.groups_per_step} pairs, each trained on "
        f"once, at most one step stale; of 4 completions half the steps at half the learning rate. {len(SEEDS)} seeds, "
        "a policy and a reward model for each. Win rate is gold's against the references, drift the KL from the SFT "
        f"policy in nats per completion, both averaged over {WINDOW} steps of training batches. Equal win rate: "
        f"{SHARE_OF_GAIN:.0%} of the smallest best gain of the runs compared.",
        tables={
            "Held-out prompts at the end": quality_table(runs),
            "Time of a step on the whole machine, and idle time": timing_table(timings),
        },
        figures={"Win rate by completions and by time, and against drift": figure(runs, timings)},
        verdicts=verdicts(runs, timings),
        cost=f"{len(places)} runs for quality on one core each, {len(timed_places)} for time on all.",
    )


def quality_table(runs: Runs) -> str:
    """One row per cell."""
    return markdown_table(
        ["run", "steps", "win rate before", "after", "KL, nats", "perplexity", "win rate over training"],
        [
            (
                name,
                len(group[0].wins),
                spread([one.before.win_rate for one in group]),
                spread([one.after.win_rate for one in group]),
                spread([one.after.kl for one in group], 2),
                spread([one.after.perplexity for one in group], 2),
                spread([fmean(one.wins) for one in group]),
            )
            for name, group in runs.items()
        ],
    )


def timing_table(timings: Timings) -> str:
    """One row per timed cell."""
    return markdown_table(
        ["run", "step, ms", "trainer idle", "generator idle"],
        [
            (
                name,
                spread([1000 * one.step_s for one in group], 0),
                f"{fmean(one.trainer_idle for one in group):.0%}",
                f"{fmean(one.generator_idle for one in group):.0%}",
            )
            for name, group in timings.items()
        ],
    )


def figure(runs: Runs, timings: Timings) -> str:
    """Their Figures 7 and 8: win rate along training, and against drift."""
    titles = ["T updates per batch", "T updates per batch", "best and worst of K", "best and worst of K"]
    image, (by_step, by_drift, by_time, by_drift_of_k) = panels(titles, rows=2)
    lines(by_step, {name: _course(runs[name], 1.0) for name in (T1, T2, T3)})
    by_step.set_xlabel("steps")
    lines(by_time, {name: _course(runs[name], fmean(one.step_s for one in timings[name])) for name in TIMED})
    by_time.set_xlabel("seconds of training")
    for axis, names in ((by_drift, (T1, T2, T3)), (by_drift_of_k, TIMED)):
        for colour, name in zip(COLOURS, names, strict=False):
            drifts, wins = (
                [fmean(values) for values in zip(*(smoothed(series) for series in of), strict=True)]
                for of in ([one.drifts for one in runs[name]], [one.wins for one in runs[name]])
            )
            axis.plot(drifts[::WINDOW], wins[::WINDOW], color=colour, marker=".", label=name)
        axis.set_xlabel("drift, nats per completion")
    for axis in (by_step, by_drift, by_time, by_drift_of_k):
        axis.set_ylabel("gold win rate")
        axis.legend(fontsize=7)
    return svg(image)


def _course(group: Sequence[Outcome], step_s: float) -> tuple[list[float], list[list[float]]]:
    """Where each window ends, in `step_s` a step, and the win rates of all runs in it."""
    curves = [smoothed(one.wins)[::WINDOW] for one in group]
    return [(index * WINDOW + WINDOW) * step_s for index in range(len(curves[0]))], [
        list(values) for values in zip(*curves, strict=True)
    ]
