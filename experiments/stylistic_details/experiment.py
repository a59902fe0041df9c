"""What each detail of the original RLHF code is good for: `stylistic_mini` without it (N)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.comparison import is_greater
from experiments.figures import lines, panels, svg
from experiments.lab import Lab, metrics, summary
from experiments.section import Section, Verdict, markdown_table, spread
from experiments.stylistic_details.runs import ALL, EVALUATED, SEEDS, WITHOUT, run

LAST_STEPS = 20
"""Steps at the end whose metrics are averaged."""


@dataclass(frozen=True)
class Outcome:
    """One run: what the stage `evaluate` found of the last policy, and means over the last steps.

    `kl` is in nats per completion, of the sampling distribution at the sampling temperature, whatever training took.
    `scores` are the reward model's, by step.
    """

    before: float
    gold: float
    gold_score: float
    kl: float
    reward_model: float
    without_end: float
    explained_variance: float
    clipped: float
    kl_coef: float
    scores: tuple[float, ...]
    trained_kl: tuple[float, ...]


def outcome(told: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Outcome:
    """From `summary.json` and the lines of `metrics.jsonl`."""
    before, after = (told["evaluation"][moment] for moment in ("before", "after"))
    trained = [line for line in steps if "score_mean" in line]
    last = trained[-LAST_STEPS:]
    return Outcome(
        before=before["gold"]["win_rate"]["mean"],
        gold=after["gold"]["win_rate"]["mean"],
        gold_score=after["gold"]["mean_score"],
        kl=after["drift"]["kl"]["per_sequence"]["mean"],
        reward_model=after["reward_models"]["reward_model"],
        without_end=fmean(line["truncated_frac"] for line in last),
        explained_variance=fmean(line["explained_variance"] for line in last),
        clipped=fmean(line["clipped_frac"] for line in last),
        kl_coef=last[-1]["kl_coef"],
        scores=tuple(line["score_mean"] for line in trained),
        trained_kl=tuple(line["kl_reference_sum"] for line in trained),
    )


Runs = Mapping[str, Sequence[Outcome]]
"""What is left out (ALL: nothing) -> one outcome per seed."""


def column(runs: Runs, name: str, value: str) -> list[float]:
    return [getattr(one, value) for one in runs[name]]


def verdicts(runs: Runs) -> list[Verdict]:
    """By the rules of the README: differences between the seeds' values, beyond their noise or not."""
    return [
        _more(runs, "temperature scaling", "kl", "Without temperature scaling KL rises faster."),
        _less(runs, "temperature scaling", "gold", "Without temperature scaling performance deteriorates."),
        *(
            _less(runs, name, "gold", f"Without {'the ' if name.endswith(('init', 'score')) else ''}{name} gold falls.")
            for name in WITHOUT
            if name != "temperature scaling"
        ),
        _more(runs, "rejection score", "without_end", "Without the rejection score fewer responses have an end."),
    ]


PUBLISHED = {"temperature scaling": "N, policy 1 (informal)"}
"""Where a claim is the source's own; the others it lists among what had to be right, without a number."""
LISTED = {
    "whitening": "N, policy 9 (listed)",
    "value head init": "N, policy 2 (listed)",
    "adaptive KL": "N, policy 11 (listed)",
    "rejection score": "N, policy 5 (listed)",
}
SOURCES = PUBLISHED | LISTED
WORDS = {"gold": "gold win rate", "kl": "nats per completion", "without_end": "share without an end"}


def _more(runs: Runs, name: str, value: str, claim: str) -> Verdict:
    without, with_all = column(runs, name, value), column(runs, ALL, value)
    return Verdict(claim, SOURCES[name], is_greater(without, with_all), _found(without, with_all, value))


def _less(runs: Runs, name: str, value: str, claim: str) -> Verdict:
    without, with_all = column(runs, name, value), column(runs, ALL, value)
    return Verdict(claim, SOURCES[name], is_greater(with_all, without), _found(without, with_all, value))


def _found(without: Sequence[float], with_all: Sequence[float], value: str) -> str:
    return f"{WORDS[value]} {spread(without)} without, {spread(with_all)} with"


def section(lab: Lab) -> Section:
    folders = run(lab)
    runs = {
        name: [outcome(summary(folders[name, seed]), metrics(folders[name, seed])) for seed in SEEDS]
        for name in (ALL, *WITHOUT)
    }
    start = column(runs, ALL, "before")
    coefficient = column(runs, ALL, "kl_coef")
    return Section(
        title="The original pipeline, one detail left out at a time",
        question="Which of the details that the first RLHF code needed can be left out at this size?",
        setup="`stylistic_mini` (64 completions a step, 100 steps, 4 epochs): one policy and one reward model for all, "
        f"then RL with everything or without one detail, seeds {', '.join(map(str, SEEDS))}; gold win rate and KL of "
        f"the last policy on {EVALUATED} held-out prompts. RL begins at a win rate of {spread(start)}.",
        tables={"The last policy, and the last 20 steps": outcome_table(runs)},
        figures={"The reward model's score and the KL that training saw, by step": figure(runs)},
        verdicts=verdicts(runs),
        notes=[
            "Without temperature scaling, training measures KL at temperature 1. In the table, KL is that of the "
            "sampling distribution, at temperature 0.7, for all runs.",
            f"The KL coefficient follows a target of 6 nats over 10,000 completions: in these 6,400 it goes from 0.15 "
            f"to {spread(coefficient)}, so a fixed coefficient can make little difference.",
        ],
        cost="twenty-five minutes on two cores",
    )


def outcome_table(runs: Runs) -> str:
    head = {
        "gold": "gold win rate",
        "gold_score": "gold score",
        "kl": "KL, nats",
        "reward_model": "reward model",
        "without_end": "without an end",
        "explained_variance": "explained variance",
        "clipped": "clipped",
        "kl_coef": "KL coefficient",
    }
    rows = [
        [name if name == ALL else f"without {name}", *(spread(column(runs, name, value)) for value in head)]
        for name in runs
    ]
    return markdown_table(["", *head.values()], rows)


def figure(runs: Runs) -> str:
    drawn, axes = panels(["Score by the reward model", "KL to the reference, as trained on"])
    for axis, value in zip(axes, ("scores", "trained_kl"), strict=True):
        series = {}
        for name in runs:
            curves = [smoothed(curve) for curve in column_of_curves(runs, name, value)]
            steps = range(len(curves[0]))
            series[name if name == ALL else f"without {name}"] = (
                [LAST_STEPS // 2 * (index + 1) for index in steps],
                [[curve[index] for curve in curves] for index in steps],
            )
        lines(axis, series)
        axis.set_xlabel("step")
    axes[0].set_ylabel("standard deviations")
    axes[1].set_ylabel("nats per completion")
    axes[0].legend(frameon=False, fontsize=7)
    return svg(drawn)


def column_of_curves(runs: Runs, name: str, value: str) -> list[tuple[float, ...]]:
    return [getattr(one, value) for one in runs[name]]


def smoothed(curve: Sequence[float]) -> list[float]:
    """Means over half of LAST_STEPS in a row, each step in one of them; what is left at the end is dropped."""
    width = LAST_STEPS // 2
    return [fmean(curve[start : start + width]) for start in range(0, len(curve) - width + 1, width)]
