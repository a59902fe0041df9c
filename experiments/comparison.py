"""When a difference between a few seeds counts: exact permutation tests, and a margin for "as good as"."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import comb, isfinite
from statistics import fmean

LEVEL = 0.05
"""A difference counts at or below this p: five seeds with others of the same number when all five point one way, three
against three others when they do not overlap."""

LEAST_GAIN = 0.05
"""A run that gains less has learned too little for something to be as good as it."""

_ROUNDING = 1e-12
_MOST_DEALINGS = 1_000_000
MOST_SEEDS = 11
"""On each side of a test that is not paired: 22 values can be dealt in 705,432 ways, 24 in 2.7 million."""


def p_greater(ours: Sequence[float], theirs: Sequence[float], *, paired: bool = False) -> float:
    """One-sided exact permutation test of a difference of means.

        p = share of all ways to deal the pooled values into len(ours) and len(theirs) of them
            whose mean(ours) - mean(theirs) is at least what was seen

    Fisher's; assumes nothing of the values but that they could have come the other way round if there is no difference.
    `paired`: values at the same place are of the same seed, and are dealt between themselves only.
    Identity: 1 / C(n + m, n) where every one of ours is above every one of theirs, paired 2^-n where each is above its
    own. ValueError for an empty side, pairs that do not match, more than a million dealings, or a value that is not
    finite.
    """
    num_dealings = 2 ** len(ours) if paired else comb(len(ours) + len(theirs), len(ours))
    if not all(map(isfinite, [*ours, *theirs])):
        raise ValueError(f"a permutation test of {[*ours, *theirs]}")
    if not ours or not theirs or num_dealings > _MOST_DEALINGS or (paired and len(ours) != len(theirs)):
        raise ValueError(f"a permutation test of {len(ours)} against {len(theirs)} values")
    # The sum of all values is the same for every dealing, so the sum of ours decides.
    if paired:
        sums = [sum(dealt) for dealt in product(*zip(ours, theirs, strict=True))]
    else:
        sums = [sum(dealt) for dealt in combinations([*ours, *theirs], len(ours))]
    return fmean(dealt >= sum(ours) - _ROUNDING for dealt in sums)


def is_greater(ours: Sequence[float], theirs: Sequence[float], *, paired: bool = False) -> bool | None:
    """True where ours are greater, False where they are less, None where it is within the noise of the seeds."""
    if p_greater(ours, theirs, paired=paired) <= LEVEL:
        return True
    return False if p_greater(theirs, ours, paired=paired) <= LEVEL else None


def is_as_great(ours: Sequence[float], theirs: Sequence[float], margin: float, *, paired: bool = False) -> bool | None:
    """True where the mean of ours is at most `margin` below theirs; False where it is below that by more than noise."""
    if fmean(ours) >= fmean(theirs) - margin:
        return True
    return None if is_greater(theirs, ours, paired=paired) is None else False


def keeps_gains(
    ours: Sequence[float], theirs: Sequence[float], before: Sequence[float], margin: float, *, paired: bool = False
) -> bool | None:
    """`is_as_great`, but None unless each of `theirs` is LEAST_GAIN above its own `before`, where it began."""
    if min(after - began for after, began in zip(theirs, before, strict=True)) < LEAST_GAIN:
        return None
    return is_as_great(ours, theirs, margin, paired=paired)
