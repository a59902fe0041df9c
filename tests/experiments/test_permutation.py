"""Permutation tests against brute force over orders, and against p values worked out by hand."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from experiments.comparison import is_as_great, is_greater, p_greater


def by_all_orders(ours: list[float], theirs: list[float]) -> float:
    pooled, n = np.array([*ours, *theirs]), len(ours)
    seen = np.mean(ours) - np.mean(theirs)
    differences = [
        pooled[list(order[:n])].mean() - pooled[list(order[n:])].mean() for order in permutations(range(len(pooled)))
    ]
    return float(np.mean([difference >= seen - 1e-9 for difference in differences]))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (3, 3), (2, 4), (4, 3)])
def test_p_is_the_share_of_dealings_at_least_as_far_apart(sizes):
    rng = np.random.default_rng(sum(sizes))
    for _ in range(3):
        ours, theirs = (rng.integers(0, 6, size).astype(float).tolist() for size in sizes)  # with ties
        assert p_greater(ours, theirs) == pytest.approx(by_all_orders(ours, theirs))


def test_paired_p_is_the_share_of_signs_at_least_as_far_from_zero():
    """Against differences with every combination of signs."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        ours, theirs = rng.integers(0, 6, (2, 6)).astype(float)
        differences = ours - theirs
        signs = 1 - 2 * ((np.arange(64)[:, None] >> np.arange(6)) & 1)
        expected = np.mean(signs @ differences >= differences.sum() - 1e-9)
        assert p_greater(ours.tolist(), theirs.tolist(), paired=True) == pytest.approx(expected)


def test_seeds_that_differ_more_than_what_is_compared():
    ours, theirs = [0.31, 0.52, 0.73, 0.94, 0.15], [0.30, 0.50, 0.70, 0.90, 0.10]
    assert p_greater(ours, theirs, paired=True) == 1 / 32
    assert is_greater(ours, theirs, paired=True) is True
    assert is_greater(theirs, ours, paired=True) is False
    assert is_greater(ours, theirs) is None
    assert is_as_great(theirs, ours, 0.01, paired=True) is False
    assert is_as_great(theirs, ours, 0.05, paired=True) is True


def test_p_of_values_that_do_not_overlap():
    assert p_greater([4, 5, 6], [1, 2, 3]) == pytest.approx(1 / 20)
    assert p_greater([1, 2, 3], [4, 5, 6]) == 1.0
    assert p_greater([0.1] * 3, [0.1] * 3) == 1.0
    assert p_greater([3, 4, 5, 6, 7], [0, 1, 2, 2.5, 2.9]) == pytest.approx(1 / 252)


def test_a_difference_counts_beyond_the_noise_of_seeds():
    assert is_greater([4, 5, 6], [1, 2, 3]) is True
    assert is_greater([1, 2, 3], [4, 5, 6]) is False
    assert is_greater([4, 5, 6], [1, 2, 4.5]) is None  # two of three seeds alone say nothing
    assert is_greater([5, 6], [1, 2]) is None  # neither do two seeds, however far apart


def test_as_great_is_within_the_margin_or_not_clearly_below():
    assert is_as_great([0.60, 0.62, 0.64], [0.65, 0.66, 0.67], 0.05) is True
    assert is_as_great([0.50, 0.51, 0.52], [0.65, 0.66, 0.67], 0.05) is False
    assert is_as_great([0.20, 0.55, 0.68], [0.65, 0.66, 0.67], 0.05) is None
    assert is_as_great([0.9, 0.9, 0.9], [0.65, 0.66, 0.67], 0.05) is True


def test_nothing_is_compared_with_nothing():
    with pytest.raises(ValueError, match="0 against 3"):
        p_greater([], [1, 2, 3])
    with pytest.raises(ValueError, match="30 against 30"):
        p_greater([0.0] * 30, [0.0] * 30)
    with pytest.raises(ValueError, match="2 against 3"):
        p_greater([1, 2], [1, 2, 3], paired=True)
