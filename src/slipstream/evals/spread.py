"""A mean, and how far to trust it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.core.errors import ConfigError


@dataclass(frozen=True)
class Spread:
    """The mean of `count` independent values, their standard deviation (Bessel's) and the standard error of the mean.

    With one value nothing is known of its spread: both are NaN.
    """

    mean: float
    std: float
    standard_error: float
    count: int


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    """mean, std = sqrt(sum (x - mean)^2 / (n - 1)), standard error = std / sqrt(n), in float64.

    ConfigError without values. An infinite value gives an infinite mean and no spread.
    """
    array = np.asarray(values, dtype=np.float64)
    count = len(array)
    if not count:
        raise ConfigError("there is nothing to average", got="no values", allowed="at least one")
    mean = float(array.mean())
    if count == 1 or not math.isfinite(mean):
        return Spread(mean, math.nan, math.nan, count)
    std = float(array.std(ddof=1))
    return Spread(mean, std, std / math.sqrt(count), count)
