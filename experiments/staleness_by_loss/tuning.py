"""Each loss at its own learning rate and penalty: as far off-policy at N = 16, and as much drift at N = 1, as others.

At a rate that suits N = 1 a policy hardly moves within 16 updates, and no loss has anything to bear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import fmean

from experiments.lab import Lab, metrics
from experiments.rlhf import USUAL, Pipeline, Tuned, ended, read_evaluation

SEED = 100
"""Apart from the seeds that are compared."""
ON_POLICY, FAR = 1, 16
RATES = (3.0, 6.0, 12.0, 24.0)
PENALTIES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Times the loss's own."""
ESS = 0.45
"""The effective sample size at N = 16 that rates are chosen for; 0.3 to 0.6 is what they are to be within."""
DRIFT = 1.5
"""Nats per completion from the SFT policy, at the end of N = 1."""
UNPENALISED = ("best_of_2",)


def tune(lab: Lab, pipeline: Pipeline, losses: Sequence[str], policy: str = USUAL) -> dict[str, Tuned]:
    """The rate first, by runs at FAR, then the penalty, by runs ON_POLICY at that rate; all with SEED.

    `policy` is the size of the policy.
    """
    rates = {loss: [Tuned(times) for times in RATES] for loss in losses}
    ess = _measured(lab, pipeline, rates, FAR, effective_share, policy)
    chosen = {loss: min(of_rates, key=lambda one: abs(of_rates[one] - ESS)) for loss, of_rates in ess.items()}
    penalties = {
        loss: [Tuned(one.lr_times, times) for times in PENALTIES]
        for loss, one in chosen.items()
        if loss not in UNPENALISED
    }
    kl = _measured(lab, pipeline, penalties, ON_POLICY, final_kl, policy)
    return chosen | {loss: nearest_drift(of_penalties) for loss, of_penalties in kl.items()}


def nearest_drift(kl: Mapping[Tuned, float]) -> Tuned:
    """The setting whose KL is nearest DRIFT as a ratio; a KL of nothing or less is as far as can be."""
    return min(kl, key=lambda one: abs(log(kl[one] / DRIFT)) if kl[one] > 0 else float("inf"))


def effective_share(run: Path) -> float:
    """Effective sample size of the ratios, a share: mean over a run's steps."""
    return fmean(line["ess"] for line in metrics(run) if "ess" in line)


def final_kl(run: Path) -> float:
    return ended(read_evaluation(run)).kl


def _measured(
    lab: Lab,
    pipeline: Pipeline,
    settings: Mapping[str, Sequence[Tuned]],
    num_minibatches: int,
    value: Callable[[Path], float],
    policy: str,
) -> dict[str, dict[Tuned, float]]:
    specs = {
        (loss, one): pipeline.rl(lab, loss, num_minibatches, SEED, policy=policy, tuned=one)
        for loss, several in settings.items()
        for one in several
    }
    runs = dict(zip(specs, pipeline.make(lab, [SEED], list(specs.values()), policies=[policy]), strict=True))
    return {loss: {one: value(runs[loss, one]) for one in several} for loss, several in settings.items()}
