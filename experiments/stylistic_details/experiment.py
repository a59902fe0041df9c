"""What each detail of the original RLHF code is good for: `stylistic_mini` without it (N)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from experiments.comparison import is_greater
from experiments.figures import lines, panels, svg
from experiments.lab import Lab, metrics, summary
from experiments.section import Section, Verdict, markdown_table, spread
from experiments.stylistic_details.runs import (
    ALL,
    ENDS,
    EVALUATED,
    HORIZON,
    LARGE,
    LARGE_FIXED,
    LONGER,
    NO_REJECTION,
    SEEDS,
    SMALL,
    SMALL_FIXED,
    STEPS,
    TARGET,
    WITHOUT,
    run,
)

LEAST_WITHOUT_END = 0.2
"""Of the first step's responses, in the runs about the rejection score: with fewer there is little to reject."""
FIRST = 20
"""Steps at the beginning over which scores are averaged, and at the end whose metrics are."""


@dataclass(frozen=True)
class Outcome:
    """One run: what the stage `evaluate` found of the last policy, and means over the first and the last steps.

    `kl` is in nats per completion, of the sampling distribution at the sampling temperature, whatever training took.
    `scores` are the reward model's, by step; `early_score` is their mean over the first steps. `began_without_end` is
    the share of the first step's responses.
    """

    before: float
    gold: float
    gold_score: float
    kl: float
    reward_model: float
    early_score: float
    began_without_end: float
    without_end: float
    explained_variance: float
    kl_coef: float
    scores: tuple[float, ...]
    trained_kl: tuple[float, ...]

    @property
    def off_target(self) -> float:
        """Nats between the last policy's KL and TARGET."""
        return abs(self.kl - TARGET)


def outcome(told: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Outcome:
    """From `summary.json` and the lines of `metrics.jsonl`."""
    before, after = (told["evaluation"][moment] for moment in ("before", "after"))
    trained = [line for line in steps if "score_mean" in line]
    last = trained[-FIRST:]
    return Outcome(
        before=before["gold"]["win_rate"]["mean"],
        gold=after["gold"]["win_rate"]["mean"],
        gold_score=after["gold"]["mean_score"],
        kl=after["drift"]["kl"]["per_sequence"]["mean"],
        reward_model=after["reward_models"]["reward_model"],
        early_score=fmean(line["score_mean"] for line in trained[:FIRST]),
        began_without_end=trained[0]["truncated_frac"],
        without_end=fmean(line["truncated_frac"] for line in last),
        explained_variance=fmean(line["explained_variance"] for line in trained[:FIRST]),
        kl_coef=last[-1]["kl_coef"],
        scores=tuple(line["score_mean"] for line in trained),
        trained_kl=tuple(line["kl_reference_sum"] for line in trained),
    )


Runs = Mapping[str, Sequence[Outcome]]
"""Arm -> one outcome per seed."""


def column(runs: Runs, name: str, value: str) -> list[float]:
    return [getattr(one, value) for one in runs[name]]


SOURCES = {
    "temperature scaling": "N, policy 1 (informal)",
    "whitening": "N, policy 9 (listed)",
    "value head init": "N, policy 2 (listed)",
}
"""Where a claim is the source's own; what is "listed" it counts among what had to be right, without a number."""
ADAPTIVE, REJECTION = "N, policy 11 (listed)", "N, policy 5 (listed)"
WORDS = {
    "gold": "gold win rate",
    "kl": "nats per completion",
    "early_score": f"score of the first {FIRST} steps",
    "without_end": "share without an end",
    "off_target": f"nats off {TARGET:g}",
}


def verdicts(runs: Runs) -> list[Verdict]:
    """By the rules of the README: differences between the values of the same seeds, beyond their noise or not."""
    claim, source = "Without temperature scaling KL rises faster.", SOURCES["temperature scaling"]
    found = [_more(runs, "kl", WITHOUT["temperature scaling"], ALL, claim, source)]
    for detail, arm in WITHOUT.items():
        article = "the " if detail.endswith("init") else ""
        claim = f"Without {article}{detail} the first {FIRST} steps score less."
        found.append(_more(runs, "early_score", ALL, arm, claim, SOURCES[detail]))
        found.append(_more(runs, "gold", ALL, arm, f"Without {article}{detail} gold falls.", SOURCES[detail]))
    for small, (adaptive, fixed) in {True: (SMALL, SMALL_FIXED), False: (LARGE, LARGE_FIXED)}.items():
        size = "small" if small else "large"
        claim = f"Of a coefficient ten times too {size}, adapting it brings KL nearer to the target."
        found.append(_more(runs, "off_target", fixed, adaptive, claim, ADAPTIVE))
        claim = f"Of a coefficient ten times too {size}, adapting it raises gold."
        found.append(_more(runs, "gold", adaptive, fixed, claim, ADAPTIVE))
    claim = "Without the rejection score fewer responses have an end."
    of_rejection = [
        _more(runs, "without_end", NO_REJECTION, ENDS, claim, REJECTION),
        _more(runs, "gold", ENDS, NO_REJECTION, "Without the rejection score gold falls.", REJECTION),
    ]
    if fmean(column(runs, ENDS, "began_without_end")) < LEAST_WITHOUT_END:
        of_rejection = [replace(one, holds=None) for one in of_rejection]
    return found + of_rejection


def _more(runs: Runs, value: str, larger: str, smaller: str, claim: str, source: str) -> Verdict:
    """That `value` is larger in the runs of one arm than in those of another."""
    ours, theirs = column(runs, larger, value), column(runs, smaller, value)
    found = f"{WORDS[value]} {spread(ours)} {larger}, {spread(theirs)} {smaller}"
    return Verdict(claim, source, is_greater(ours, theirs, paired=True), found)


def section(lab: Lab) -> Section:
    folders = run(lab)
    arms = dict.fromkeys(arm for arm, _ in folders)
    runs = {arm: [outcome(summary(folders[arm, seed]), metrics(folders[arm, seed])) for seed in SEEDS] for arm in arms}
    began = column(runs, ENDS, "began_without_end")
    return Section(
        title="The original pipeline, one detail left out at a time",
        question="Which of the details that the first RLHF code needed can be left out at this size?",
        setup=f"`stylistic_mini` (64 completions a step, 4 epochs; {STEPS} steps, with another coefficient {LONGER}): "
        "one policy and one reward model for all, then RL with everything or without one detail, seeds "
        f"{SEEDS[0]} to {SEEDS[-1]}; gold win rate and KL of the last policy on {EVALUATED} held-out prompts. RL "
        f"begins at a win rate of {spread(column(runs, ALL, 'before'))}. The rejection score has a policy of its own, "
        f"of whose responses {spread(began)} have no end when RL begins, and its reward model. A coefficient that is "
        f"ten times off has a target of {TARGET:g} nats and a horizon of {HORIZON} completions.",
        tables={f"The last policy, and the first and last {FIRST} steps": outcome_table(runs)},
        figures={"The reward model's score, and the KL of coefficients that are ten times off": figure(runs)},
        verdicts=verdicts(runs),
        notes=[
            "Without temperature scaling, training measures KL at temperature 1. In the table, KL is that of the "
            "sampling distribution, at temperature 0.7, for all runs.",
            "A score in the first steps is the reward model's of what was sampled, at temperature 0.7 in all runs.",
            "Gold, the F1 of a response's characters and those of the post's key, asks for no end, and a response "
            "without one has the most room: what the rejection score rejects is what gold likes here. A judge who "
            "wants whole sentences would say otherwise.",
        ],
        cost="seventy minutes on two cores",
    )


def outcome_table(runs: Runs) -> str:
    head = {
        "gold": "gold win rate",
        "gold_score": "gold score",
        "kl": "KL, nats",
        "reward_model": "reward model",
        "early_score": "score, first steps",
        "explained_variance": "explained variance, first steps",
        "without_end": "without an end, last steps",
        "kl_coef": "KL coefficient",
    }
    rows = [[arm, *(spread(column(runs, arm, value)) for value in head)] for arm in runs]
    return markdown_table(["", *head.values()], rows)


def figure(runs: Runs) -> str:
    shown = {"scores": (ALL, *WITHOUT.values()), "trained_kl": (SMALL, SMALL_FIXED, LARGE, LARGE_FIXED)}
    drawn, axes = panels(["Score by the reward model", "KL to the reference"])
    for axis, (value, arms) in zip(axes, shown.items(), strict=True):
        series = {}
        for arm in arms:
            curves = [smoothed(curve) for curve in column_of_curves(runs, arm, value)]
            steps = range(len(curves[0]))
            series[arm] = (
                [FIRST // 2 * (index + 1) for index in steps],
                [[curve[index] for curve in curves] for index in steps],
            )
        lines(axis, series)
        axis.set_xlabel("step")
        axis.legend(frameon=False, fontsize=7)
    axes[1].axhline(TARGET, color="#888888", linewidth=0.8, linestyle="--")
    axes[0].set_ylabel("standard deviations")
    axes[1].set_ylabel("nats per completion")
    return svg(drawn)


def column_of_curves(runs: Runs, name: str, value: str) -> list[tuple[float, ...]]:
    return [getattr(one, value) for one in runs[name]]


def smoothed(curve: Sequence[float]) -> list[float]:
    """Means over half of FIRST in a row, each step in one of them; what is left at the end is dropped."""
    width = FIRST // 2
    return [fmean(curve[start : start + width]) for start in range(0, len(curve) - width + 1, width)]
