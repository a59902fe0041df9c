"""Each loss at its own learning rate and penalty: as far off-policy at N = 16, and as much drift at N = 1, as others.

At a rate that suits N = 1 a policy hardly moves within 16 updates, and no loss has anything to bear. Both dials move
both measures, so they are set in turn, round by round; README.md beside this file has the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, log, sqrt
from pathlib import Path

from experiments.comparison import LEAST_GAIN
from experiments.lab import Lab
from experiments.rlhf import Outcome, Pipeline, Run, Tuned

SEED = 100
"""Apart from the seeds that are compared."""
ON_POLICY, FAR = 1, 16
ROUNDS = 6
"""At most."""
FIRST_RATE = 8.0
"""Times the loss's own, as all rates and penalties here."""
FIRST_PENALTIES = (1.0, 2.0, 4.0, 8.0)
LATER_PENALTIES = (0.5, 1.0, 2.0)
"""Times that of the round before."""
ESS, WINDOW = 0.45, (0.3, 0.6)
"""The effective sample size at N = 16 that rates are corrected towards, and what it is to be within."""
DRIFT = 1.5
"""Nats per completion from the SFT policy, at the end of N = 1."""
LEAST_CORRECTION, MOST_CORRECTION = 0.5, 2.0
"""Of the rate, from one round to the next."""

Subject = tuple[str, str]
"""What is tuned: a loss, and the size of its policy."""


@dataclass(frozen=True)
class Ran:
    """What a run came to: the gain in win rate, the KL at its end in nats per completion, the effective sample size."""

    gain: float
    kl: float
    ess: float


@dataclass(frozen=True)
class Trial:
    """A setting, and what the runs with it came to ON_POLICY and at FAR."""

    tuned: Tuned
    on_policy: Ran
    far: Ran

    @property
    def is_sound(self) -> bool:
        """Whether neither run has collapsed: one learns, the other ends not below where it began."""
        return learns(self.on_policy) and self.far.gain >= 0

    @property
    def is_within(self) -> bool:
        least, most = WINDOW
        return self.is_sound and least <= self.far.ess <= most


def tune(
    lab: Lab, pipeline: Pipeline, subjects: Sequence[Subject], *, rounds: int = ROUNDS, kept: Path | None = None
) -> dict[Subject, Trial]:
    """What was found for each of `subjects`, by runs with SEED; those of all subjects side by side.

    `kept`: the file of what runs have come to.
    """
    trials: dict[Subject, list[Trial]] = {subject: [] for subject in subjects}
    for _ in range(rounds):
        unsettled = [subject for subject, own in trials.items() if not (own and own[-1].is_within)]
        if not unsettled:
            break
        near = _runs(lab, pipeline, {one: candidates(trials[one]) for one in unsettled}, ON_POLICY, kept)
        chosen = {subject: nearest_drift(of_subject) for subject, of_subject in near.items()}
        far = _runs(lab, pipeline, {subject: [tuned] for subject, tuned in chosen.items()}, FAR, kept)
        for subject, tuned in chosen.items():
            trials[subject].append(Trial(tuned, near[subject][tuned], far[subject][tuned]))
    return {subject: best(own) for subject, own in trials.items()}


def candidates(before: Sequence[Trial]) -> list[Tuned]:
    """The settings of the next round's runs ON_POLICY: one rate, with several penalties."""
    rate = next_rate(before) if before else FIRST_RATE
    penalties = [before[-1].tuned.penalty_times * times for times in LATER_PENALTIES] if before else FIRST_PENALTIES
    return [Tuned(rate, penalty) for penalty in penalties]


def next_rate(before: Sequence[Trial]) -> float:
    """The rate after rounds that were not within, to two digits: half the last one where a run of it has collapsed.

    Between a rate that was sound and one that was not it is their geometric mean, instead of either again.
    """
    last = before[-1]
    rate = last.tuned.lr_times
    if last.is_sound:
        wanted = rate * correction(last.far.ess)
        beyond = [one.tuned.lr_times for one in before if not one.is_sound and rate < one.tuned.lr_times <= wanted]
        wanted = sqrt(rate * min(beyond)) if beyond else wanted
    else:
        below = [one.tuned.lr_times for one in before if one.is_sound and one.tuned.lr_times < rate]
        wanted = sqrt(rate * max(below)) if below else rate * LEAST_CORRECTION
    return float(f"{wanted:.2g}")


def correction(ess: float) -> float:
    """The factor on the rate that brings an effective sample size to ESS, if -ln of it goes with the rate's square.

    From LEAST_CORRECTION to MOST_CORRECTION: the latter where all ratios are 1, the former where there is no size.
    """
    if isnan(ess) or ess <= 0:
        return LEAST_CORRECTION
    if ess >= 1:
        return MOST_CORRECTION
    return min(MOST_CORRECTION, max(LEAST_CORRECTION, sqrt(log(ESS) / log(ess))))


def nearest_drift(runs: Mapping[Tuned, Ran]) -> Tuned:
    """The setting whose KL is nearest DRIFT as a ratio, among those that learn, or among all if none does."""

    def distance(tuned: Tuned) -> float:
        kl = runs[tuned].kl
        return abs(log(kl / DRIFT)) if kl > 0 else float("inf")

    return min([tuned for tuned, ran in runs.items() if learns(ran)] or runs, key=distance)


def learns(ran: Ran) -> bool:
    return ran.gain >= LEAST_GAIN


def best(trials: Sequence[Trial]) -> Trial:
    """The one that is within; else of those that are sound the nearest to ESS; else that of the smallest rate."""
    for trial in trials:
        if trial.is_within:
            return trial
    if sound := [trial for trial in trials if trial.is_sound]:
        return min(sound, key=lambda one: float("inf") if isnan(one.far.ess) else abs(one.far.ess - ESS))
    return min(trials, key=lambda one: one.tuned.lr_times)


def ran(outcome: Outcome) -> Ran:
    return Ran(outcome.gain, outcome.ended.kl, outcome.ess)


def _runs(
    lab: Lab,
    pipeline: Pipeline,
    settings: Mapping[Subject, Sequence[Tuned]],
    num_minibatches: int,
    kept: Path | None,
) -> dict[Subject, dict[Tuned, Ran]]:
    runs = {
        (subject, one): Run(subject[0], num_minibatches, SEED, policy=subject[1], tuned=one)
        for subject, several in settings.items()
        for one in several
    }
    found = pipeline.outcomes(lab, list(runs.values()), kept)
    return {subject: {one: ran(found[runs[subject, one]]) for one in several} for subject, several in settings.items()}
