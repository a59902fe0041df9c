"""pass@k against counting all subsets, and against values worked out by hand."""

from __future__ import annotations

from itertools import combinations

import pytest

from slipstream.core.errors import ConfigError
from slipstream.evals.statistics import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (10, 3, 1, 0.3),
        (10, 3, 5, 11 / 12),  # 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252
        (4, 2, 2, 5 / 6),
        (5, 1, 5, 1.0),
        (8, 0, 4, 0.0),
        (200, 1, 100, 0.5),
    ],
)
def test_golden_values(num_samples: int, num_correct: int, k: int, expected: float) -> None:
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 7])
def test_equals_the_share_of_subsets_with_a_correct_sample(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        for k in range(1, num_samples + 1):
            subsets = list(combinations(range(num_samples), k))
            hits = sum(min(subset) < num_correct for subset in subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(hits / len(subsets), abs=1e-12)


def test_mean_over_prompts() -> None:
    assert mean_pass_at_k([0, 2, 4], 4) == pytest.approx({1: 0.5, 2: (0 + 5 / 6 + 1) / 3, 4: 2 / 3})
    assert list(mean_pass_at_k([1], 6)) == [1, 2, 4, 6]
    assert mean_pass_at_k([1, 0], 1) == {1: 0.5}


@pytest.mark.parametrize(("num_samples", "num_correct", "k"), [(4, 5, 1), (4, 1, 5), (4, 1, 0), (4, -1, 1)])
def test_impossible_counts_are_refused(num_samples: int, num_correct: int, k: int) -> None:
    with pytest.raises(ConfigError):
        pass_at_k(num_samples, num_correct, k)
