"""How much slower one side is while the other computes: on the same cores, the same memory, the same GPU (A9)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from slipstream.observe.balance import Interference
from slipstream.observe.states import DECODES, GENERATES, TRAINS, side_of
from slipstream.observe.timeline import Slice

MIN_S = 0.25
"""Of each kind, alone and overlapped: with less there is too little to tell."""
MAX_ERROR = 0.15
"""Standard error of a ratio beyond which it is not told."""
BINS_PER_DOUBLING = 4
"""Pieces of work are compared with those of about the same size."""


def measure_interference(slices: Mapping[str, Sequence[Slice]], start_ns: int, end_ns: int) -> Interference:
    """Seconds per decode step while the trainer computes over the same while it does not, at equal numbers of rows; and
    per microbatch while generators compute over the same while they do not, at equal numbers of tokens.

    The pieces of a slice are split by the time the other side computed during it. In each bin of sizes the rates r_a
    alone and r_o overlapped are those that explain the slices' counts best, with weight 1 / length:

        count_i = r_a * alone_i + r_o * overlapped_i

    and the ratio is sum over bins of n / r_o over sum of n / r_a, with n the overlapped pieces of the bin.
    """
    sides: dict[str, list[Sequence[Slice]]] = defaultdict(list)
    for process, one in slices.items():
        sides[side_of(process)].append([s for s in one if s.end_ns > start_ns and s.start_ns < end_ns])
    generators, trainers = sides["generator"], sides["trainer"]
    if not generators or not trainers:
        return Interference()
    return Interference(
        decode=_ratio(generators, DECODES, Activity(trainers[:1], TRAINS)),
        train=_ratio(trainers, {"forward_backward"}, Activity(generators, GENERATES)),
    )


class Activity:
    """Which part of any span of time processes have spent in `states`, on average."""

    def __init__(self, processes: Iterable[Sequence[Slice]], states: Collection[str]) -> None:
        self._curves = [_cumulative(slices, states) for slices in processes]

    def share(self, start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """float64 [N] in 0..1, of N spans of time that last longer than nothing."""
        done = [np.interp(end_ns, *curve) - np.interp(start_ns, *curve) for curve in self._curves]
        shares: np.ndarray = np.mean(done, axis=0) / (end_ns - start_ns)
        return shares


def _cumulative(slices: Sequence[Slice], states: Collection[str]) -> tuple[np.ndarray, np.ndarray]:
    """Nanoseconds in `states` up to each of these times, a polygon: within a slice they are spread evenly."""
    times, done = [0.0], [0.0]
    for one in sorted(slices, key=lambda piece: piece.start_ns):
        inside = sum(ns for state, ns in one.also.items() if state in states)
        if one.state in states:
            inside += one.state_ns
        if inside:
            times += [float(one.start_ns), float(one.end_ns)]
            done += [done[-1], done[-1] + inside]
    return np.array(times), np.array(done)


def _ratio(processes: Sequence[Sequence[Slice]], states: Collection[str], other: Activity) -> float | None:
    worked = [one for slices in processes for one in slices if one.state in states and one.count]
    if not worked:
        return None
    table = np.array([(s.start_ns, s.end_ns, s.state_ns * 1e-9, s.count, s.units) for s in worked], dtype=np.float64)
    overlapped_s = other.share(table[:, 0], table[:, 1]) * table[:, 2]
    alone_s = table[:, 2] - overlapped_s
    sizes = np.floor(BINS_PER_DOUBLING * np.log2(np.maximum(table[:, 4] / table[:, 3], 1.0)))
    seconds = np.zeros(2)  # of the overlapped pieces: as they were, and as they would have been
    variance = 0.0
    spent = np.zeros(2)
    for size in np.unique(sizes):
        chosen = sizes == size
        rates = _rates(alone_s[chosen], overlapped_s[chosen], table[chosen, 3])
        if rates is None:
            continue
        (alone, overlapped), relative_variance = rates
        was_s = float(overlapped_s[chosen].sum())
        seconds += [was_s, was_s * overlapped / alone]
        variance += was_s**2 * relative_variance
        spent += [float(alone_s[chosen].sum()), was_s]
    if min(spent) < MIN_S or math.sqrt(variance) > MAX_ERROR * seconds[0]:
        return None
    return float(seconds[0] / seconds[1])


def _rates(
    alone_s: np.ndarray, overlapped_s: np.ndarray, count: np.ndarray
) -> tuple[tuple[float, float], float] | None:
    """Pieces per second alone and overlapped, and the variance of the logarithm of their ratio; None without both."""
    if len(count) < 3:
        return None
    design = np.stack([alone_s, overlapped_s], axis=1)
    weights = 1.0 / (alone_s + overlapped_s)
    normal = design.T @ (design * weights[:, None])
    if np.linalg.cond(normal) > 1e6:
        return None
    inverse = np.linalg.inv(normal)
    rates = inverse @ (design.T @ (count * weights))
    if rates.min() <= 0:
        return None
    residuals = count - design @ rates
    noise = float((weights * residuals**2).sum()) / (len(count) - 2)
    gradient = np.array([1.0, -1.0]) / rates
    return (float(rates[0]), float(rates[1])), float(noise * gradient @ inverse @ gradient)
