"""Whether a difference is more than noise: numbers with their standard errors, and trends. Too little says nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

ERRORS = 2.0
"""Standard errors of a difference that it has to exceed: noise alone does so once in twenty times."""
TREND_ERRORS = 3.0
"""Those of a slope, which is looked at in run after run: once in seven hundred times."""
LEAST_VALUES = 10
"""With fewer the spread of values is not known well enough for an error of their mean."""
LEAST_TREND = 20
"""Steps with which a trend is told."""
MOST_CORRELATION = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number and its standard error; None where that is not known, and then it differs from nothing.

    `num_trials`: it is the share of so many independent ones that succeeded.
    """

    value: float
    error: float | None = None
    num_trials: int = 0

    def differs(self, other: Estimate) -> bool:
        """Whether the two differ by more than `ERRORS` standard errors of their difference.

        Of two means that is the root of the sum of their squared errors. Of two shares p1 of n1 and p2 of n2 it is
        that under which they are one, as in the test of two proportions:

            error^2 = p (1 - p) (1 / n1 + 1 / n2),  p = (n1 p1 + n2 p2) / (n1 + n2)
        """
        if self.error is None or other.error is None:
            return False
        error = math.hypot(self.error, other.error)
        if self.num_trials and other.num_trials:
            trials = self.num_trials + other.num_trials
            p = (self.num_trials * self.value + other.num_trials * other.value) / trials
            error = math.sqrt(p * (1 - p) * (1 / self.num_trials + 1 / other.num_trials))
        return abs(self.value - other.value) > ERRORS * error


def share(value: float, num_trials: int) -> Estimate:
    """`value`, the share of `num_trials` independent ones that succeeded. Without an error where it is no share.

    A mean of values between 0 and 1 has this error at most.
    """
    if num_trials < 1 or not 0.0 <= value <= 1.0:
        return Estimate(value)
    return Estimate(value, math.sqrt(value * (1 - value) / num_trials), num_trials)


def mean_of(values: Sequence[float]) -> Estimate | None:
    """The mean of `values` in the order in which they were measured; None for none of them.

    The error is the deviation over the root of their number, widened as neighbours are alike (`_widened`).
    """
    if not values:
        return None
    middle = fmean(values)
    if len(values) < LEAST_VALUES:
        return Estimate(middle)
    residuals = [value - middle for value in values]
    variance = sum(one * one for one in residuals) / (len(values) - 1)
    return Estimate(middle, math.sqrt(variance / len(values)) * _widened(residuals))


def rises(values: Sequence[float]) -> bool:
    """Whether `values` still rise: the slope of their last quarter, at least `LEAST_TREND` of them, is above 0 by
    `TREND_ERRORS` of its standard errors, and so is not what noise makes.

        slope = sum (i - mean i) v_i / sum (i - mean i)^2,   error^2 = residuals' variance / sum (i - mean i)^2

    The error is widened as neighbouring residuals are alike (`_widened`). False where it cannot be told.
    """
    recent = list(values[-max(LEAST_TREND, len(values) // 4) :])
    if len(recent) < LEAST_TREND:
        return False
    centre, middle = (len(recent) - 1) / 2, fmean(recent)
    spread = sum((i - centre) ** 2 for i in range(len(recent)))
    slope = sum((i - centre) * value for i, value in enumerate(recent)) / spread
    residuals = [value - middle - slope * (i - centre) for i, value in enumerate(recent)]
    variance = sum(one * one for one in residuals) / (len(recent) - 2)
    return slope > TREND_ERRORS * math.sqrt(variance / spread) * _widened(residuals) + 1e-12


def _widened(residuals: Sequence[float]) -> float:
    """The factor by which the error of a mean grows where neighbours are alike: sqrt((1 + r) / (1 - r)).

    r is the correlation of residuals with the ones behind them, 0 where that is negative. Around a fitted line of n
    values it comes out as r - (2 + 4 r) / n (Kendall 1954), which is undone.
    """
    whole, count = sum(one * one for one in residuals), len(residuals)
    if whole <= 0.0:
        return 1.0
    r = (count * sum(a * b for a, b in pairwise(residuals)) / whole + 2) / (count - 4)
    r = min(max(r, 0.0), MOST_CORRELATION)
    return math.sqrt((1 + r) / (1 - r))
