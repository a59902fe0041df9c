"""How much slower one side is while the other computes: on the same cores, the same memory, the same GPU."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

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
PIECES = {"generator": DECODES, "trainer": frozenset({"forward_backward"})}
"""By side: the states whose pieces are timed, decode steps and microbatches."""
ACTIVE = {"generator": GENERATES, "trainer": TRAINS}
"""By side: the states in which it is in the other's way."""


class SideWork:
    """The work of two sides in a window of time, from the slices of their processes, in little memory."""

    def __init__(self, start_ns: int, end_ns: int) -> None:
        self._window = start_ns, end_ns
        self._pieces: dict[str, list[np.ndarray]] = defaultdict(list)
        self._activity: dict[str, list[tuple[np.ndarray, np.ndarray]]] = defaultdict(list)

    def add(self, process: str, slices: Iterable[Slice]) -> None:
        """Add the slices of one process. Of a trainer's ranks, which do the same together, the first is enough."""
        side = side_of(process)
        if side not in ACTIVE or (side == "trainer" and self._activity[side]):
            return
        start_ns, end_ns = self._window
        inside = [one for one in slices if one.end_ns > start_ns and one.start_ns < end_ns]
        self._activity[side].append(work_curve(inside, ACTIVE[side].__contains__))
        pieces = [
            (one.start_ns, one.end_ns, one.state_ns * 1e-9, one.count, one.units)
            for one in inside
            if one.state in PIECES[side] and one.count
        ]
        self._pieces[side].append(np.array(pieces, dtype=np.float64).reshape(-1, 5))

    def interference(self) -> Interference:
        """How much slower each side is while the other computes."""
        return Interference(decode=self._ratio("generator", "trainer"), train=self._ratio("trainer", "generator"))

    def _ratio(self, side: str, other: str) -> float | None:
        if not self._pieces[side] or not self._activity[other]:
            return None
        pieces = np.concatenate(self._pieces[side])
        return _ratio(pieces, _share(self._activity[other], pieces[:, 0], pieces[:, 1])) if len(pieces) else None


def _ratio(pieces: np.ndarray, overlap: np.ndarray) -> float | None:
    """Seconds per piece of work overlapped over the same alone, at equal sizes; None where there is too little to tell.

    `pieces` [N, 5]: start, end (ns), seconds, count, units of N slices; `overlap` [N]: the share of each that the other
    side computed.

    The pieces of a slice are split by the time the other side computed during it. In each bin of sizes the rates r_a
    alone and r_o overlapped are those that explain the slices' counts best, with weight 1 / length:

        count_i = r_a * alone_i + r_o * overlapped_i

    and the ratio is the sum over bins of overlapped seconds over that of overlapped seconds * r_o / r_a.
    """
    overlapped_s = overlap * pieces[:, 2]
    alone_s = pieces[:, 2] - overlapped_s
    sizes = np.floor(BINS_PER_DOUBLING * np.log2(np.maximum(pieces[:, 4] / pieces[:, 3], 1.0)))
    seconds = np.zeros(2)  # of the overlapped pieces: as they were, and as they would have been
    spent = np.zeros(2)  # alone, overlapped
    variance = 0.0
    for size in np.unique(sizes):
        chosen = sizes == size
        rates = _rates(alone_s[chosen], overlapped_s[chosen], pieces[chosen, 3])
        if rates is None:
            continue
        (alone, overlapped), relative_variance = rates
        was_s = float(overlapped_s[chosen].sum())
        seconds += [was_s, was_s * overlapped / alone]
        spent += [float(alone_s[chosen].sum()), was_s]
        variance += was_s**2 * relative_variance
    if min(spent) < MIN_S or math.sqrt(variance) > MAX_ERROR * seconds[0]:
        return None
    return float(seconds[0] / seconds[1])


def _share(curves: Sequence[tuple[np.ndarray, np.ndarray]], start_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """float64 [N] in 0..1: which part of each span of time the processes of these curves computed, on average."""
    done = [np.interp(end_ns, *curve) - np.interp(start_ns, *curve) for curve in curves]
    shares: np.ndarray = np.mean(done, axis=0) / (end_ns - start_ns)
    return shares


def work_curve(slices: Iterable[Slice], is_work: Callable[[str], bool]) -> tuple[np.ndarray, np.ndarray]:
    """Nanoseconds in the states of work up to each of these times, a polygon: within a slice they are spread evenly."""
    times, done = [0.0], [0.0]
    for one in sorted(slices, key=lambda piece: piece.start_ns):
        inside = sum(ns for state, ns in one.also.items() if is_work(state)) + one.state_ns * is_work(one.state)
        if inside:
            times += [float(one.start_ns), float(one.end_ns)]
            done += [done[-1], done[-1] + inside]
    return np.array(times), np.array(done)


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
