"""Kept sets as rows, and their check."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.errors import ShapeError
from slipstream.core.packed import check_kept_sets
from slipstream.generator.requests import KeptSets

Sets = list[list[int]]
some_sets = st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=6).map(sorted), max_size=8)


def kept_of(sets: Sets) -> KeptSets:
    return KeptSets.of_rows([np.array(row, dtype=np.int32) for row in sets])


@given(some_sets)
def test_rows_come_back_as_they_were_joined(sets: Sets) -> None:
    kept = kept_of(sets)
    assert kept.tokens.dtype == kept.counts.dtype == np.int32
    assert kept.counts.tolist() == [len(row) for row in sets]
    assert [row.tolist() for row in kept.rows()] == sets


def test_sets_that_do_not_fit_their_tokens_are_refused() -> None:
    kept = kept_of([[3, 5], [1], [2, 7, 9]])
    check_kept_sets(np.array([5, 1, 2]), kept.tokens, kept.counts)
    with pytest.raises(ShapeError, match="do not fit"):
        check_kept_sets(np.array([5, 1]), kept.tokens, kept.counts)
    with pytest.raises(ShapeError, match="do not fit"):
        check_kept_sets(np.array([5, 1, 2]), kept.tokens[:-1], kept.counts)
    with pytest.raises(ShapeError, match="token 2 at 1"):
        check_kept_sets(np.array([5, 2, 2]), kept.tokens, kept.counts)
    twice = kept_of([[3, 5], [1], [9, 9]])
    with pytest.raises(ShapeError, match="token 9 at 2"):
        check_kept_sets(np.array([5, 1, 9]), twice.tokens, twice.counts)
