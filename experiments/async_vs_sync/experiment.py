"""Asynchronous equals synchronous in quality, and beats it in time: tables, figures, and a verdict for each claim."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from experiments.async_vs_sync.reading import (
    Curve,
    Times,
    mean_tokens,
    measure_quality,
    overlapped_s,
    read_curve,
    read_times,
    time_to,
)
from experiments.async_vs_sync.reward import JUDGE_S
from experiments.async_vs_sync.runs import (
    BY_SIZE,
    COLD_STEPS,
    COLOCATED,
    CONDITIONS,
    CONTINUOUS,
    EQUAL,
    JUDGE,
    JUDGE_WORKERS,
    LAST_STEPS,
    MAX_STALENESS,
    MODES,
    SEEDS,
    SPLIT,
    TAIL,
    TRAINING,
    WORDS,
    Condition,
    Key,
    make,
)
from experiments.async_vs_sync.task import LENGTHS, described
from experiments.comparison import keeps_gains
from experiments.figures import COLOURS, lines, panels, ranges, svg
from experiments.lab import Lab, metrics, summary
from experiments.section import Section, Verdict, markdown_table, spread

WINDOW = 8
"""Steps over which a point of a learning curve is the mean."""
LEAST_OF_IDEAL, LEAST_WITH_TAIL, LEAST_WITH_JUDGE, MOST_WAITING = 0.85, 1.3, 2.0, 0.05
"""The aims."""
TARGET = 0.9
"""Of the synchronous runs' last gold score: how soon the others are there."""
MARGIN = 0.02
"""Of the gold win rate: what counts as equal."""
AT_START = 0.5
"""The win rate of the first policy over itself."""
BASELINES = (SPLIT, COLOCATED)


@dataclass(frozen=True)
class Found:
    """Everything that was read: by run, and for the quality by mode and seed of the condition with the long tail.

    `tokens` is the mean length of a completion, all steps together.
    """

    conditions: Mapping[str, Condition]
    times: Mapping[Key, Times]
    staleness: Mapping[Key, float]
    tokens: Mapping[Key, float]
    curves: Mapping[tuple[str, int], Curve]
    quality: Mapping[tuple[str, int], Mapping[str, float]]

    def of(self, condition: str, mode: str, value: Callable[[Times], float]) -> list[float]:
        """One number for each seed."""
        return [value(self.times[condition, mode, seed]) for seed in SEEDS]

    def win_rates(self, mode: str) -> list[float]:
        """Of gold, at the end of the runs with the long tail, by seed."""
        return [self.quality[mode, seed]["win_rate"] for seed in SEEDS]

    def faster_baseline(self, condition: str) -> str:
        """The synchronous mode whose mean step is shorter."""
        return min(BASELINES, key=lambda mode: fmean(self.of(condition, mode, _step_s)))

    def speed_up(self, condition: str, mode: str, baseline: str | None = None) -> list[float]:
        """By seed: a step of `baseline`, the faster one if None, over a step of `mode`."""
        against = self.faster_baseline(condition) if baseline is None else baseline
        steps = zip(self.of(condition, against, _step_s), self.of(condition, mode, _step_s), strict=True)
        return [theirs / ours for theirs, ours in steps]

    def of_ideal(self, condition: str, mode: str) -> list[float]:
        """By seed: a step of ideal overlap over a step of `mode`."""
        ideals = self.of(condition, SPLIT, overlapped_s)
        return [ideal / step for ideal, step in zip(ideals, self.of(condition, mode, _step_s), strict=True)]


def _step_s(times: Times) -> float:
    return times.step_s


def section(lab: Lab, conditions: Mapping[str, Condition] = CONDITIONS) -> Section:
    """Make what is missing, read everything, and say what it comes to."""
    runs, starts = make(lab, conditions)
    return told(_read(lab, conditions, runs, starts))


def _read(lab: Lab, conditions: Mapping[str, Condition], runs: Mapping[Key, Path], starts: Mapping[str, Path]) -> Found:
    times, curves, quality = {}, {}, {}
    for key, folder in runs.items():
        asked = {"run": str(folder), "cold": COLD_STEPS, "last": LAST_STEPS}
        times[key] = Times(**lab.measure(f"times {folder.name}", read_times, **asked))
        condition, mode, seed = key
        if condition == TAIL:
            start = str(starts[conditions[condition].size])
            curves[mode, seed] = Curve(**read_curve(run=str(folder), metrics=metrics(folder), window=WINDOW))
            quality[mode, seed] = lab.measure(f"quality {folder.name}", measure_quality, run=str(folder), start=start)
    staleness = {key: float(summary(folder)["staleness"]["mean"]) for key, folder in runs.items()}
    tokens = {key: mean_tokens(metrics(folder)) for key, folder in runs.items()}
    return Found(conditions, times, staleness, tokens, curves, quality)


# What it comes to


def told(found: Found) -> Section:
    """The section: from numbers to words, without a file."""
    return Section(
        title="Asynchronous equals synchronous in quality, and beats it in time",
        question=(
            "Do runs in which generation and training overlap learn what synchronous ones learn, how much sooner, and "
            "how near do they come to the overlap that is possible?"
        ),
        setup=(
            "A policy that repeats a word and spells it round and round while counting down, in answers of 36 to 484 "
            f"tokens with a heavy tail; 64 completions a step; {len(SEEDS)} seeds. Two synchronous baselines: "
            "*split*, in which each side has the cores that it has in asynchronous runs and idles in the other's turn, "
            "and *co-located*, in which each has all cores in its turn. `bounded` and `continuous` have max_staleness "
            f"{MAX_STALENESS}. One run at a time. Step times leave out the first {COLD_STEPS} and the "
            f"last {LAST_STEPS} steps; speed-ups are against the faster baseline, seed by seed."
        ),
        tables={
            "Tokens of an answer": _lengths_table(),
            "Time": _time_table(found),
            "Ideal overlap: stage times of *sync, split*, and the step of `continuous`": _ideal_table(found),
            f"Quality with the long tail, after {found.conditions[TAIL].steps} steps": _quality_table(found),
        },
        figures={
            "Reward and gold score with the long tail, by steps and by seconds, for five modes": _curves_figure(found),
            "Seconds per step by condition and mode, with the ideal overlap as a line": _times_figure(found),
        },
        verdicts=verdicts(found),
        cost=f"{len(found.times)} runs, one at a time",
        notes=_notes(found),
    )


def verdicts(found: Found) -> list[Verdict]:
    """Each claim by its rule in the README, in the order of the README."""
    asynchronous = [mode for mode in found.conditions[TAIL].modes if not MODES[mode].is_synchronous]
    return [
        _both_verdict(found),
        *(_quality_verdict(found, mode) for mode in asynchronous),
        _least_verdict(
            "Overlapping beats taking turns on the same split",
            "A, Fig. 1: 1.25 to 1.69 times as fast",
            found.speed_up(TAIL, CONTINUOUS, SPLIT),
            1.0,
        ),
        _ideal_verdict(found),
        _least_verdict(
            f"At least {LEAST_WITH_TAIL} times as fast as the faster baseline with the long tail",
            "aim",
            found.speed_up(TAIL, CONTINUOUS),
            LEAST_WITH_TAIL,
        ),
        _least_verdict(
            f"At least {LEAST_WITH_JUDGE:g} times as fast with a judge of {JUDGE_S} s",
            "aim",
            found.speed_up(JUDGE, CONTINUOUS),
            LEAST_WITH_JUDGE,
        ),
        _waiting_verdict(found),
        _size_verdict(found),
    ]


def reaches(values: Sequence[float], least: float) -> bool | None:
    """Whether every seed does; False where none does, None where they disagree."""
    above = [value >= least for value in values]
    return True if all(above) else None if any(above) else False


def _least_verdict(claim: str, source: str, speed_ups: Sequence[float], least: float) -> Verdict:
    return Verdict(claim, source, reaches(speed_ups, least), f"{spread(speed_ups, 2)} times as fast")


def _quality_verdict(found: Found, mode: str) -> Verdict:
    ours, theirs = found.win_rates(mode), found.win_rates(COLOCATED)
    return Verdict(
        f"`{mode}` is as good as synchronous training at the end",
        "A, Fig. 1; L, Fig. 6; L12",
        keeps_gains(ours, theirs, [AT_START] * len(theirs), MARGIN),
        f"gold win rate {spread(ours)} against {spread(theirs)}",
    )


def _both_verdict(found: Found) -> Verdict:
    """No where one part does not hold, yes where both do."""
    quality, speed_ups = _quality_verdict(found, CONTINUOUS), found.speed_up(TAIL, CONTINUOUS)
    parts = (quality.holds, reaches(speed_ups, 1.0))
    return Verdict(
        "Asynchronous training reaches the quality of synchronous training, sooner than the faster baseline",
        "A, Fig. 1; L, Figs. 6, 7",
        False if False in parts else None if None in parts else True,
        f"{quality.found}; {spread(speed_ups, 2)} times as fast",
    )


def _ideal_verdict(found: Found) -> Verdict:
    shares = {name: found.of_ideal(name, CONTINUOUS) for name in found.conditions}
    worst = min(shares, key=lambda name: fmean(shares[name]))
    return Verdict(
        f"`continuous` reaches {LEAST_OF_IDEAL:.0%} of the ideal overlap in every condition",
        "aim; A reached 83 to 86% (12.9 s of 15.1 s; 17% overhead)",
        reaches(shares[worst], LEAST_OF_IDEAL),
        f"least with {WORDS[worst]}: {spread(shares[worst], 2)} of the ideal",
    )


def _waiting_verdict(found: Found) -> Verdict:
    """Only where training limits the run, which means that generators wait more than the trainer does."""
    trainer = found.of(TRAINING, CONTINUOUS, lambda times: times.trainer_idle)
    generator = found.of(TRAINING, CONTINUOUS, lambda times: times.generator_idle)
    is_bottleneck = all(theirs > ours for ours, theirs in zip(trainer, generator, strict=True))
    waits_little = reaches([-share for share in trainer], -MOST_WAITING)
    return Verdict(
        f"Where the trainer is the bottleneck it waits at most {MOST_WAITING:.0%} of the time",
        "aim",
        waits_little if is_bottleneck else None,
        f"with {WORDS[TRAINING]} it waits {spread(trainer)}, generators {spread(generator)}",
    )


def _size_verdict(found: Found) -> Verdict:
    """Never said here: both sides share the same cores, whatever the size."""
    speed_ups = [found.speed_up(name, CONTINUOUS) for name in BY_SIZE]
    told = "; ".join(f"{WORDS[name]}: {spread(one, 2)}" for name, one in zip(BY_SIZE, speed_ups, strict=True))
    return Verdict(
        "The speed-up grows with the size of the policy",
        "A, Fig. 1; L, Fig. 7",
        None,
        f"{told}. Cores that both sides share cannot answer it; a device for each side would",
    )


# Tables


def _lengths_table() -> str:
    rows = []
    for name in LENGTHS:
        one = described(name)
        tokens = [f"{one[key]:.0f}" for key in ("mean", "median", "p90", "p99", "longest")]
        rows.append((name, *tokens, f"{one['in_longest_tenth']:.0%}"))
    return markdown_table(
        ["lengths", "mean", "median", "90%", "99%", "longest", "of all tokens, in the longest tenth"], rows
    )


def _time_table(found: Found) -> str:
    rows = []
    for condition, setting in found.conditions.items():
        for mode in setting.modes:
            staleness = [found.staleness[condition, mode, seed] for seed in SEEDS]
            rows.append(
                (
                    WORDS[condition],
                    mode,
                    spread(found.of(condition, mode, _step_s)),
                    spread(found.speed_up(condition, mode), 2),
                    spread(found.speed_up(condition, mode, SPLIT), 2),
                    f"{fmean(found.of(condition, mode, lambda times: times.trainer_idle)):.0%}",
                    f"{fmean(found.of(condition, mode, lambda times: times.generator_idle)):.0%}",
                    f"{fmean(staleness):.2f}",
                    f"{fmean(found.tokens[condition, mode, seed] for seed in SEEDS):.0f}",
                )
            )
    head = [
        "condition",
        "mode",
        "step, s",
        "speed-up",
        "against split",
        "trainer waits",
        "generator waits",
        "staleness",
        "tokens",
    ]
    return markdown_table(head, rows)


def _ideal_table(found: Found) -> str:
    rows = []
    for condition in found.conditions:
        rows.append(
            (
                WORDS[condition],
                spread(found.of(condition, SPLIT, lambda times: times.generating_s)),
                spread(found.of(condition, SPLIT, lambda times: times.training_s)),
                spread(found.of(condition, SPLIT, overlapped_s)),
                spread(found.of(condition, CONTINUOUS, _step_s)),
                spread(found.of_ideal(condition, CONTINUOUS), 2),
                _interference(found, condition, lambda times: times.decode_interference),
                _interference(found, condition, lambda times: times.train_interference),
            )
        )
    head = ["condition", "generating, s", "training, s", "ideal step, s", "`continuous`, s", "of the ideal"]
    return markdown_table([*head, "decoding slower by", "training slower by"], rows)


def _interference(found: Found, condition: str, value: Callable[[Times], float | None]) -> str:
    """By what each side is slower beside the other, of the seeds in which that could be told."""
    seen = [value(found.times[condition, CONTINUOUS, seed]) for seed in SEEDS]
    known = [one for one in seen if one is not None]
    return f"{fmean(known) - 1:+.0%}" if known else ""


def _quality_table(found: Found) -> str:
    modes = found.conditions[TAIL].modes
    target = TARGET * fmean(found.curves[COLOCATED, seed].gold[-1] for seed in SEEDS)
    rows = []
    for mode in modes:
        curves = [found.curves[mode, seed] for seed in SEEDS]
        times = [time_to(curve, target) for curve in curves]
        arrived = [seconds for seconds in times if seconds is not None]
        rows.append(
            (
                mode,
                spread([curve.reward[-1] for curve in curves]),
                spread([curve.gold[-1] for curve in curves]),
                spread([found.quality[mode, seed]["sampled_accuracy"] for seed in SEEDS]),
                spread([found.quality[mode, seed]["win_rate"] for seed in SEEDS]),
                spread([curve.seconds[-1] for curve in curves], 0),
                spread(arrived, 0) if len(arrived) == len(times) else f"{len(arrived)} of {len(times)} arrive",
            )
        )
    head = ["mode", "reward", "gold score", "held-out accuracy, sampled", "gold win rate over the start", "s in all"]
    return markdown_table([*head, f"s to a gold score of {target:.2f}"], rows)


def _notes(found: Found) -> list[str]:
    """What asynchrony gains where lengths are equal: the part of the gain that is not the tail's."""
    even, tailed = found.speed_up(EQUAL, CONTINUOUS), found.speed_up(TAIL, CONTINUOUS)
    threads = found.speed_up(EQUAL, COLOCATED, SPLIT)
    on_split, colocated = (
        ", ".join(spread(found.speed_up(name, mode, SPLIT), 2) for name in BY_SIZE) for mode in (CONTINUOUS, COLOCATED)
    )
    return [
        f"With equal lengths of the same mean `continuous` is {spread(even, 2)} times as fast as the faster baseline; "
        f"with the long tail {spread(tailed, 2)} times. Without a tail the gain comes from threads: turns that "
        f"have all cores are {spread(threads, 2)} times as fast as turns in which each side has its share, with equal "
        "lengths; overlap keeps all cores busy with fewer threads on each side.",
        f"By size (0.16, 0.64, 2.6 M): against turns on the same split `continuous` is {on_split} times as fast, and "
        f"co-located turns are {colocated} times.",
        "More than 100% of the ideal is possible: in turns the generator decodes the longest completions with few "
        "rows; with overlap the next batch fills the other rows.",
        f"The judge is a function that sleeps, in {JUDGE_WORKERS} workers; a step has 64 completions.",
    ]


# Figures


def start_score(found: Found) -> float:
    """Mean gold score g0 of the policies that all began with, held out. Gold is 0 or 1 and a tie is half a win, so

    win rate = P(1 beats 0) + P(tie) / 2 = (1 + g - g0) / 2
    """
    return fmean(1 + one["sampled_accuracy"] - 2 * one["win_rate"] for one in found.quality.values())


def _curves_figure(found: Found) -> str:
    start = start_score(found)
    figure, axes = panels(
        ["Reward by steps", "Gold score by steps", "Reward by seconds", "Gold score by seconds"], rows=2
    )
    for index, axis in enumerate(axes):
        series = {}
        for mode in found.conditions[TAIL].modes:
            curves = [found.curves[mode, seed] for seed in SEEDS]
            x = [curve.steps if index < 2 else curve.seconds for curve in curves]
            y = [curve.reward if index % 2 == 0 else curve.gold for curve in curves]
            points = range(min(map(len, y)))
            series[mode] = ([fmean(one[at] for one in x) for at in points], [[one[at] for one in y] for at in points])
        lines(axis, series)
        axis.set_xlabel("steps" if index < 2 else "seconds")
        axis.set_ylim(0, 1.02)
        if index % 2:
            wins = axis.secondary_yaxis("right", functions=(lambda g: (1 + g - start) / 2, lambda w: 2 * w - 1 + start))
            wins.set_ylabel("gold win rate over the start", fontsize=8)
    axes[0].legend(fontsize=7, frameon=False)
    return svg(figure)


def _times_figure(found: Found) -> str:
    figure, axes = panels([WORDS[condition] for condition in found.conditions], rows=2)
    for axis, (condition, setting) in zip(axes, found.conditions.items(), strict=True):
        steps = [found.of(condition, mode, _step_s) for mode in setting.modes]
        colours = [COLOURS[list(MODES).index(mode)] for mode in setting.modes]
        means = [fmean(one) for one in steps]
        axis.bar(list(setting.modes), means, yerr=ranges(steps), color=colours, capsize=3, width=0.65)
        axis.axhline(fmean(found.of(condition, SPLIT, overlapped_s)), color="#222222", linewidth=1, linestyle="--")
        axis.tick_params(axis="x", labelsize=7)
        axis.set_ylabel("seconds per step")
    return svg(figure)
