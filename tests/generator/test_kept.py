"""Kept sets that grow, are cut, joined and checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.errors import ShapeError
from slipstream.generator.kept import KeptRecorder, as_rows, check_kept, from_rows, joined, sliced
from slipstream.generator.requests import KeptSets

Sets = list[list[int]]
some_sets = st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=6).map(sorted), max_size=8)


def kept_of(sets: Sets) -> KeptSets:
    return from_rows([np.array(row, dtype=np.int32) for row in sets])


def sets_of(kept: KeptSets) -> Sets:
    assert kept.tokens.dtype == kept.counts.dtype == np.int32
    assert kept.counts.tolist() == [len(row) for row in as_rows(kept)]
    return [row.tolist() for row in as_rows(kept)]


@given(some_sets, some_sets)
def test_a_recorder_goes_on_after_a_resume(before: Sets, after: Sets) -> None:
    recorder = KeptRecorder(kept_of(before))
    step = np.full((2, 6), -1, dtype=np.int32)  # what a runner gives: it may use the same array again
    for row in after:
        step[1] = -1
        step[1, : len(row)] = row
        recorder.append(step[1])
    assert len(recorder) == len(before) + len(after)
    assert sets_of(recorder.taken()) == before + after
    assert sets_of(joined([kept_of(before), kept_of(after)])) == before + after


@given(some_sets, st.integers(0, 8), st.integers(0, 8))
def test_slices_are_those_of_the_list(sets: Sets, start: int, stop: int) -> None:
    start, stop = sorted((min(start, len(sets)), min(stop, len(sets))))
    assert sets_of(sliced(kept_of(sets), start, stop)) == sets[start:stop]


def test_sets_that_do_not_fit_their_tokens_are_refused() -> None:
    kept = kept_of([[3, 5], [1], [2, 7, 9]])
    check_kept(kept, np.array([5, 1, 2]))
    with pytest.raises(ShapeError, match="do not fit"):
        check_kept(kept, np.array([5, 1]))
    with pytest.raises(ShapeError, match="do not fit"):
        check_kept(KeptSets(kept.tokens[:-1], kept.counts), np.array([5, 1, 2]))
    with pytest.raises(ShapeError, match="token 2 at 1"):
        check_kept(kept, np.array([5, 2, 2]))
    with pytest.raises(ShapeError, match="token 9 at 2"):
        check_kept(kept_of([[3, 5], [1], [9, 9]]), np.array([5, 1, 9]))
