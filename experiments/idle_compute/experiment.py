"""What idle compute buys: updates on each batch, or completions to choose from (Asynchronous RLHF, Figs. 7 and 8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.comparison import LEAST_GAIN, is_as_great, is_greater
from experiments.figures import COLOURS, MARKERS, lines, panels, svg
from experiments.idle_compute.course import course
from experiments.lab import Lab, RunFailed, Spec, metrics, summary
from experiments.rlhf import LR, SEEDS, Ended, Pipeline, Run, ended, read_evaluation, reward_accuracy
from experiments.section import Section, Verdict, markdown_table, spread
from slipstream.core.config import RunConfig
from slipstream.core.jsonl import read_jsonl
from slipstream.core.recipes import merge

TIMED_SEEDS = (0, 1, 2)
PIPELINE = Pipeline()
PREAMBLE = "here is a post of letters: write down the marked ones in their order: "
"""In front of every post of the training-bound set-up: read once by the generator, three times over by the trainer."""
BOUND_POLICY = "L"
_LONG = {"model": {"max_positions": 112}}
BOUND = Pipeline(
    overrides=_LONG | {"prompts": {"template": PREAMBLE + "{question}>", "max_prompt_tokens": 96}},
    by_size={
        "M": {"sft": {"steps": 200, "optimizer": {"lr": 5e-4}}},
        BOUND_POLICY: {"sft": {"steps": 120, "optimizer": {"lr": 2.5e-4}}},
    },
    easier=Pipeline(overrides=_LONG, by_size={BOUND_POLICY: {"sft": {"steps": 400, "optimizer": {"lr": 5e-4}}}}),
)
"""Where training takes longer than generating: a policy of 2.6 M parameters, long prompts, short answers.

Fine-tuning is on posts alone before the preamble stands in front of them.
"""
LEAST_ACCURACY = 0.7
"""Accuracy on held-out pairs that each reward model must reach: RL against one near chance shows nothing."""
TIMED_STEPS = 40
COLD_STEPS = 10
"""Left out of step times."""
NUM_POINTS = 6
"""Checkpoints at which win rate and drift along a run are measured, evenly spaced, the end included."""
FIRST_STEPS = 12
"""Whose groups tell how far apart the best and the worst are."""
SHARE_OF_GAIN = 0.9
"""Equal win rates: so much of the smallest best gain among the runs compared, per seed."""
MARGIN = 0.03
"""Win rates that differ by less are equal to a user."""

NO_GAIN = f"a run gains less than {LEAST_GAIN}"
FIGURE_7, FIGURE_8 = "Asynchronous RLHF, Fig. 7", "Asynchronous RLHF, Fig. 8"
SYNC, T1, T2, T3, K4 = "K = 2, synchronous", "K = 2", "K = 2, T = 2", "K = 2, T = 3", "best and worst of 4"
ALL, EXTREMES = "RLOO, all of 4", "RLOO, best and worst of 4"

ASYNCHRONOUS: dict[str, Any] = {"max_staleness": 1, "weight_update": "in_flight"}
HALVED: dict[str, Any] = {"steps": PIPELINE.updates // 2, "trainer": {"optimizer": {"lr": LR / 2}}}
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    SYNC: ("online_dpo", {}),
    T1: ("online_dpo", ASYNCHRONOUS),
    T2: ("online_dpo", ASYNCHRONOUS | {"trainer": {"epochs": 2}}),
    T3: ("online_dpo", ASYNCHRONOUS | {"trainer": {"epochs": 3}}),
    K4: ("online_dpo", ASYNCHRONOUS | HALVED | {"completions_per_group": 4}),
    ALL: ("rloo", ASYNCHRONOUS | {"completions_per_group": 4}),
    EXTREMES: ("rloo", ASYNCHRONOUS | {"completions_per_group": 4, "loss": {"select": "best_and_worst"}}),
}
"""The loss, and what is changed in its run: one update for every 32 pairs, on-policy."""
USUAL_CELLS = (T1, T2, T3, ALL, EXTREMES)
TIMED = (SYNC, T1, K4)
"""Those of the training-bound set-up."""


def quality(lab: Lab, name: str, seed: int, *, bound: bool = False) -> Spec:
    """One run for what it learns, on one core."""
    loss, changed = CELLS[name]
    base = BOUND.rl(lab, Run(loss, 1, seed, BOUND_POLICY)) if bound else PIPELINE.rl(lab, Run(loss, 1, seed))
    told = merge(base.overrides, changed)
    told = merge(told, {"trainer": {"checkpoint_every": told["steps"] // NUM_POINTS, "keep_checkpoints": NUM_POINTS}})
    return replace(base, name=f"idle_compute {'bound ' * bound}{name} seed {seed}", overrides=told)


def timed(lab: Lab, name: str, seed: int) -> Spec:
    """A short one for its time: processes of their own, on the whole machine, and nothing measured besides."""
    alone = {
        "steps": TIMED_STEPS,
        "stages": ["rl"],
        "host": "process",
        "trainer": {"checkpoint_every": 0},
        "rewards": {"terms": []},
        "eval": {"num_prompts": 8},
    }
    one = quality(lab, name, seed, bound=True)
    return replace(one, name=f"{one.name} timed", overrides=merge(one.overrides, alone), cores=None)


# What runs came to


@dataclass(frozen=True)
class Point:
    """After `step` steps: gold win rate against the references, and KL from the start in nats per completion."""

    step: float
    win_rate: float
    kl: float


@dataclass(frozen=True)
class Outcome:
    """One run: where it went, from its start to its end, and the evaluation of both.

    `margin` is the mean reward of the best less that of the worst of a group, in the first FIRST_STEPS steps.
    """

    course: tuple[Point, ...]
    margin: float
    before: Ended
    after: Ended

    @property
    def wins(self) -> list[float]:
        return [point.win_rate for point in self.course]

    @property
    def mean_win(self) -> float:
        """The mean win rate over training: the area under the course, divided by its length."""
        pairs = list(pairwise(self.course))
        area = sum((after.step - before.step) * (before.win_rate + after.win_rate) / 2 for before, after in pairs)
        return area / (self.course[-1].step - self.course[0].step)

    def at(self, level: float) -> Point | None:
        """Where the win rate is first at `level`, between two points by a straight line; None if it never is."""
        if self.course[0].win_rate >= level:
            return self.course[0]
        for before, after in pairwise(self.course):
            if after.win_rate >= level:
                share = (level - before.win_rate) / (after.win_rate - before.win_rate)
                return Point(
                    step=before.step + share * (after.step - before.step),
                    win_rate=level,
                    kl=before.kl + share * (after.kl - before.kl),
                )
        return None


def group_margin(rollouts: Iterable[Mapping[str, Any]], num_groups: int) -> float:
    """Mean difference between the best and the worst reward of the first `num_groups` groups of `rollouts.jsonl`."""
    groups: dict[int, list[float]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout["ordinal"], []).append(rollout["reward"])
    first = [groups[ordinal] for ordinal in sorted(groups)[:num_groups]]
    return fmean(max(rewards) - min(rewards) for rewards in first)


def step_seconds(steps: Sequence[Mapping[str, Any]]) -> float:
    """Median time of a step once the loop runs."""
    return float(median([line["step_s"] for line in steps if "step_s" in line][COLD_STEPS:]))


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


def equal_levels(runs: Runs, *names: str) -> list[float] | None:
    """Per seed, the win rate at which the runs called `names` are compared: all of them reach it.

    None where one of them never gains LEAST_GAIN: what it costs to get so far says nothing.
    """
    levels = []
    for of_seed in zip(*(runs[name] for name in names), strict=True):
        begin = of_seed[0].wins[0]  # of all, as they begin with the same policy
        gain = min(max(one.wins) for one in of_seed) - begin
        if gain < LEAST_GAIN:
            return None
        levels.append(begin + SHARE_OF_GAIN * gain)
    return levels


def places_at(runs: Runs, name: str, levels: Sequence[float]) -> list[Point]:
    """Per seed, where the runs called `name` are at that level."""
    found = [one.at(level) for one, level in zip(runs[name], levels, strict=True)]
    assert None not in found, "every run reaches the level"
    return [place for place in found if place is not None]


def seconds_to(runs: Runs, timings: Timings, name: str, levels: Sequence[float]) -> list[float]:
    """Per seed, the time until the win rate is there: steps of the run, times the mean step of the timed ones."""
    step_s = fmean(one.step_s for one in timings[name])
    return [place.step * step_s for place in places_at(runs, name, levels)]


def verdicts(runs: Runs, bound: Runs, timings: Timings) -> list[Verdict]:
    """Each claim by the rule in the README; those about K are of the training-bound runs."""
    return [
        *_more_updates(runs),
        _as_good_in_half_the_steps(bound),
        _margin_doubles(bound),
        *_faster(bound, timings),
        _more_drift(bound, K4, "Best and worst of 4 reach the same win rate at a higher KL.", FIGURE_8),
        _extremes_hurt_rloo(runs),
    ]


def _more_updates(runs: Runs) -> list[Verdict]:
    means = {name: [one.mean_win for one in runs[name]] for name in (T1, T2, T3)}
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
    if levels is None:
        return Verdict(claim, source, None, NO_GAIN)
    ours, theirs = ([place.kl for place in places_at(runs, one, levels)] for one in (name, T1))
    return Verdict(
        claim,
        source,
        is_greater(ours, theirs, paired=True),
        f"{spread(ours, 2)} nats at a win rate of {spread(levels, 2)}, "
        f"with one update on two completions: {spread(theirs, 2)}",
    )


def _as_good_in_half_the_steps(runs: Runs) -> Verdict:
    ours, theirs = ([one.after.win_rate for one in runs[name]] for name in (K4, T1))
    return Verdict(
        "Best and worst of 4, at half the learning rate, reach the same win rate in half the steps.",
        FIGURE_8,
        is_as_great(ours, theirs, MARGIN, paired=True) if _learns(runs[T1]) else None,
        f"{spread(ours)}, K = 2: {spread(theirs)}",
    )


def _learns(group: Sequence[Outcome]) -> bool:
    """Whether each run gains something on the way: to be as good as one that does not says nothing."""
    return all(max(one.wins) - one.wins[0] >= LEAST_GAIN for one in group)


def _margin_doubles(runs: Runs) -> Verdict:
    ratios = [ours.margin / theirs.margin for ours, theirs in zip(runs[K4], runs[T1], strict=True)]
    return Verdict(
        "The best and the worst of 4 differ about twice as much in reward as two completions.",
        FIGURE_8,
        1.5 <= fmean(ratios) <= 2.5,
        f"{spread(ratios, 2)} times",
    )


def _faster(runs: Runs, timings: Timings) -> list[Verdict]:
    claims = (
        "Asynchronous, with best and worst of 4, the same win rate takes 1/2.5 of the synchronous time.",
        "Best and worst of 4 takes just over half the time of K = 2.",
    )
    levels = equal_levels(runs, SYNC, T1, K4)
    if levels is None:
        return [Verdict(claim, FIGURE_8, None, NO_GAIN) for claim in claims]
    seconds = {name: seconds_to(runs, timings, name, levels) for name in TIMED}
    over_sync = [theirs / ours for ours, theirs in zip(seconds[K4], seconds[SYNC], strict=True)]
    over_two = [ours / theirs for ours, theirs in zip(seconds[K4], seconds[T1], strict=True)]
    idle, trainer = (fmean(getattr(one, f"{who}_idle") for one in timings[T1]) for who in ("generator", "trainer"))
    told = f"at K = 2 generators idle {idle:.0%} of the time, the trainer {trainer:.0%}"
    is_bound = idle > trainer
    return [
        Verdict(
            claim,
            FIGURE_8,
            holds if is_bound else None,
            f"{spread(values, 2)} {unit}; {told}",
        )
        for claim, holds, values, unit in (
            (claims[0], fmean(over_sync) >= 2.5, over_sync, "times as fast"),
            (claims[1], fmean(over_two) <= 0.6, over_two, "of it"),
        )
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
    make_models(lab)
    usual = [(name, seed) for seed in SEEDS for name in USUAL_CELLS]
    runs = dict(zip(usual, PIPELINE.make(lab, SEEDS, [quality(lab, *cell) for cell in usual]), strict=True))
    of_k = [(name, seed) for seed in SEEDS for name in TIMED]
    specs = [quality(lab, *cell, bound=True) for cell in of_k]
    bound = dict(zip(of_k, BOUND.make(lab, SEEDS, specs, policies=[BOUND_POLICY]), strict=True))
    timed_cells = [(name, seed) for seed in TIMED_SEEDS for name in TIMED]  # interleaved: a slow hour slows all of them
    timed_places = lab.run_all([timed(lab, *cell) for cell in timed_cells])
    timings: dict[str, list[Timing]] = {}
    for (name, _), place in zip(timed_cells, timed_places, strict=True):
        timings.setdefault(name, []).append(timing(metrics(place), summary(place)))
    return told(
        {name: [read(lab, name, seed, runs[name, seed]) for seed in SEEDS] for name in USUAL_CELLS},
        {name: [read(lab, name, seed, bound[name, seed], bound=True) for seed in SEEDS] for name in TIMED},
        timings,
        quality(lab, T1, 0).config(),
    )


def make_models(lab: Lab) -> None:
    """What all runs begin with. RunFailed where a reward model has not learned: the hours after it would be lost."""
    for pipeline, policies in ((PIPELINE, ()), (BOUND, (BOUND_POLICY,))):
        pipeline.make(lab, SEEDS, [], policies=policies)
        for seed in SEEDS:
            spec = pipeline.judge(lab, seed)
            accuracy = reward_accuracy(lab.place(spec))
            if accuracy < LEAST_ACCURACY:
                raise RunFailed(f"{spec.name}: accuracy {accuracy:.2f} on held-out pairs, below {LEAST_ACCURACY}")


def read(lab: Lab, name: str, seed: int, place: Path, *, bound: bool = False) -> Outcome:
    """What the run of a cell in the folder `place` came to."""
    spec = quality(lab, name, seed, bound=bound)
    length = spec.config().steps
    steps = [index * (length // NUM_POINTS) for index in range(NUM_POINTS + 1)]
    went = lab.measure(f"{spec.name} course", course, run=str(place), steps=steps)
    rollouts = read_jsonl(place / "rollouts.jsonl", dict[str, Any])
    margin = group_margin(rollouts, FIRST_STEPS * PIPELINE.prompts_per_update)
    evaluation = read_evaluation(place)
    return Outcome(tuple(Point(**point) for point in went), margin, ended(evaluation, "before"), ended(evaluation))


def told(runs: Runs, bound: Runs, timings: Timings, config: RunConfig) -> Section:
    """The section: from numbers to words. `config` is that of a run at K = 2."""
    return Section(
        title="Spending idle compute",
        question="If the trainer is idle, what is gained by T = 2 or 3 updates per batch? If the generators are idle, "
        "what is gained by choosing the best and the worst of 4 completions? What does either cost in drift?",
        setup=f"`tldr_mini` with Online DPO, {config.steps} steps of {config.groups_per_step} pairs, each trained on "
        "once, at most one step stale; with 4 completions, half the steps at half the learning rate. "
        f"{len(SEEDS)} seeds, a reward model for each. What idle generators buy is asked where training takes longer "
        f"than generating: a policy of 2.6 M parameters behind prompts of {len(PREAMBLE)} more tokens; this set-up is "
        "the third (its README has what was wrong with the others). Win rate is gold's against the references, drift "
        "the KL from "
        f"the SFT policy in nats per completion, both on {config.evaluation.num_prompts} held-out prompts x "
        f"{config.evaluation.num_samples} completions, at {NUM_POINTS} checkpoints. Equal win rate: "
        f"{SHARE_OF_GAIN:.0%} of the smallest best gain of the runs compared.",
        tables={
            "Held-out prompts at the end": quality_table(runs),
            "The same of the training-bound runs": quality_table(bound),
            "Time of a training-bound step on the whole machine, and idle time": timing_table(timings),
        },
        figures={"Win rate by completions and by time, and against drift": figure(runs, bound, timings)},
        verdicts=verdicts(runs, bound, timings),
        cost=f"{len(SEEDS) * (len(runs) + len(bound))} runs for quality on one core each, "
        f"{len(TIMED_SEEDS) * len(timings)} for time on all",
    )


def quality_table(runs: Runs) -> str:
    """One row per cell."""
    return markdown_table(
        ["run", "steps", "win rate before", "after", "KL, nats", "perplexity", "win rate over training"],
        [
            (
                name,
                f"{group[0].course[-1].step:.0f}",
                spread([one.before.win_rate for one in group]),
                spread([one.after.win_rate for one in group]),
                spread([one.after.kl for one in group], 2),
                spread([one.after.perplexity for one in group], 2),
                spread([one.mean_win for one in group]),
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


def figure(runs: Runs, bound: Runs, timings: Timings) -> str:
    """Their Figures 7 and 8: win rate along training, and against drift."""
    titles = ["T updates per batch", "T updates per batch", "best and worst of K", "best and worst of K"]
    image, (by_step, by_drift, by_time, by_drift_of_k) = panels(titles, rows=2)
    lines(by_step, {name: _by_step(runs[name], 1.0) for name in (T1, T2, T3)})
    by_step.set_xlabel("steps")
    lines(by_time, {name: _by_step(bound[name], fmean(one.step_s for one in timings[name])) for name in TIMED})
    by_time.set_xlabel("seconds of training")
    for axis, of_axis, names in ((by_drift, runs, (T1, T2, T3)), (by_drift_of_k, bound, TIMED)):
        for colour, marker, name in zip(COLOURS, MARKERS, names, strict=False):
            points = list(zip(*(one.course for one in of_axis[name]), strict=True))
            drifts = [fmean(point.kl for point in of_step) for of_step in points]
            wins = [fmean(point.win_rate for point in of_step) for of_step in points]
            axis.plot(drifts, wins, color=colour, marker=marker, markersize=4, label=name)
        axis.set_xlabel("drift, nats per completion")
    for axis in (by_step, by_drift, by_time, by_drift_of_k):
        axis.set_ylabel("gold win rate")
        axis.legend(fontsize=7)
    return svg(image)


def _by_step(group: Sequence[Outcome], step_s: float) -> tuple[list[float], list[list[float]]]:
    """The points of a course in `step_s` a step, and the win rates of all runs there."""
    points = list(zip(*(one.course for one in group), strict=True))
    return [of_step[0].step * step_s for of_step in points], [[point.win_rate for point in one] for one in points]
