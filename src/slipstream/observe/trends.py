"""The statistics of a run's recent metrics that alarms (`observe/health.py`) are made of.

Each is a function of a `History`, and of what `alarms.toml` gives it, to one number, or to None while there are too few
steps. Pure, in bounded memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np

from slipstream.observe.noise import rises

MAX_HISTORY = 64  # values of a metric that are kept
BASELINE = 10  # values at the beginning of a run that later ones are compared with


class History:
    """The last values of every metric that is watched, oldest first; steps without a value leave no gap."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}
        self._when: dict[str, deque[int]] = {}  # the lines that had them, by number
        self._first: dict[str, list[float]] = {}
        self._num_lines = 0

    def add(self, metrics: Mapping[str, Any]) -> None:
        self._num_lines += 1
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._recent.setdefault(name, deque(maxlen=MAX_HISTORY)).append(float(value))
                self._when.setdefault(name, deque(maxlen=MAX_HISTORY)).append(self._num_lines)
                first = self._first.setdefault(name, [])
                if len(first) < BASELINE:
                    first.append(float(value))

    def last(self, name: str, count: int) -> list[float] | None:
        """The last `count` values of `name`; None while there are fewer."""
        values = self._recent.get(name, ())
        return list(values)[-count:] if len(values) >= count else None

    def line_of(self, name: str, count: int) -> int:
        """The number of the line that had the first of the last `count` values of `name`, which has so many."""
        return self._when[name][-count]

    def baseline(self, name: str) -> float | None:
        """The median of the first values of `name`; None while there are as few."""
        first = self._first.get(name, [])
        return median(first) if len(first) == BASELINE else None

    def names(self, prefix: str, suffix: str) -> list[str]:
        return [name for name in self._recent if name.startswith(prefix) and name.endswith(suffix)]


def _of_last(reduce: Callable[[list[float]], float], history: History, name: str, count: int) -> float | None:
    values = history.last(name, count)
    return None if values is None else reduce(values)


level = partial(_of_last, median)
"""The median of the last `count` values: half of them must be high for it to be."""
mean = partial(_of_last, fmean)
"""The mean of the last `count` values, for shares of few things, whose median is often 0."""
lowest = partial(_of_last, min)
"""The smallest of the last `count` values: high only if all of them are."""


def total(history: History, name: str, count: int) -> float | None:
    """The sum of up to `count` last values, from the first one on."""
    held = next((values for n in range(count, 0, -1) if (values := history.last(name, n)) is not None), None)
    return None if held is None else sum(held)


def times_baseline(history: History, name: str, count: int, floor: float) -> float | None:
    """The median of the last `count` values over that of the run's first ones, or over `floor` if that is larger."""
    values, first = history.last(name, count), history.baseline(name)
    return None if values is None or first is None else median(values) / max(first, floor)


def above_baseline(history: History, name: str, count: int) -> float | None:
    """The median of the last `count` values less that of the run's first ones."""
    values, first = history.last(name, count), history.baseline(name)
    return None if values is None or first is None else median(values) - first


def clipped_tokens(history: History, count: int) -> float | None:
    """The median share of tokens that are clipped, of losses whose ratios are those of tokens."""
    return None if history.last("sequence_ratio", 1) is not None else level(history, "clipped_frac", count)


def without_signal(history: History, count: int) -> float | None:
    """The median share of groups whose rewards are all equal; 0 while most completions fail, and so are equal."""
    failed = history.last("scored_failed_frac", count)
    return 0.0 if failed is not None and median(failed) >= 0.5 else level(history, "no_signal_frac", count)


def waiting(history: History, process: str, state: str, count: int) -> float | None:
    """The mean share of time that the processes whose names begin with `process` were in `state`, of `count` reports.

    Of several, the mean over them: one that is idle among busy ones is no bottleneck elsewhere. One that is silent
    while another makes `count` reports has left.
    """
    names = history.names(f"wait_frac/{process}", f"/{state}")
    found = {name: fmean(values) for name in names if (values := history.last(name, count)) is not None}
    since = max((history.line_of(name, count) for name in found), default=0)
    means = [waited for name, waited in found.items() if history.line_of(name, 1) >= since]
    return fmean(means) if means else None


def spikes(history: History, name: str, count: int, factor: float) -> float | None:
    """How many of the last `count` values stick out of the `count` before each: beyond `factor` times their median, and
    beyond what their spread explains."""
    values = history.last(name, 2 * count)
    if values is None:
        return None
    return float(sum(sticks_out(values[i], values[i - count : i], factor) for i in range(count, 2 * count)))


def sticks_out(value: float, before: Sequence[float], factor: float) -> bool:
    """Whether `value` is beyond `factor` medians of `before`, and 10 of its deviations above the median.

    The deviation is 1.4826 times the median distance from the median: that of a normal distribution, and blind to
    single outliers.
    """
    middle = median(before)
    if middle <= 0.0 or value <= factor * middle:  # after steps without a gradient any is large
        return False
    return value > middle + 10.0 * 1.4826 * median(abs(one - middle) for one in before)


def entropy_left(history: History, count: int) -> float | None:
    """Entropy over that of the run's first steps, while rewards still differ and do not rise; else 1.

    They rise where their last values lie above the ones before, or where their trend does (`noise.rises`).
    """
    now, first = history.last("entropy", count), history.baseline("entropy")
    rewards, spreads = history.last("reward", 2 * count), history.last("reward_std", count)
    first_spread = history.baseline("reward_std")
    if now is None or first is None or rewards is None or spreads is None or first_spread is None or first <= 0.0:
        return None
    has_risen = median(rewards[count:]) > median(rewards[:count]) + 0.05 * first_spread
    is_solved = median(spreads) <= 0.2 * first_spread  # or gave no signal from the beginning
    return 1.0 if has_risen or is_solved or rises(rewards) else median(now) / first


def longer_with_reward(history: History, count: int) -> float | None:
    """How much longer completions got over the last `count` steps, if the reward rose and went with their length."""
    lengths, rewards = history.last("completion_tokens_mean", count), history.last("reward", count)
    if lengths is None or rewards is None:
        return None
    quarter = count // 4
    before, after = median(lengths[:quarter]), median(lengths[-quarter:])
    has_risen = median(rewards[-quarter:]) > median(rewards[:quarter])
    if not has_risen or before <= 0.0 or rank_correlation(lengths, rewards) < 0.7:
        return 1.0
    return after / before


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's, with ties in the order of their places; 0 where one of them is constant."""
    if len(set(left)) == 1 or len(set(right)) == 1:
        return 0.0
    first, second = (np.argsort(np.argsort(np.asarray(side), kind="stable"), kind="stable") for side in (left, right))
    return float(np.corrcoef(first, second)[0, 1])
