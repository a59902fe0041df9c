import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.responses import has_token, penalise_missing_token, truncate_at_token
from slipstream.core.errors import ConfigError, ShapeError

PERIOD = 13


def test_sentiment_golden():
    """N: cut at the first period from index 16 on, of 24 tokens; an earlier one does not count."""
    response = np.full(24, 7, dtype=np.int32)
    response[[3, 18, 20]] = PERIOD
    assert has_token(response, PERIOD, after=16)
    assert len(truncate_at_token(response, PERIOD, after=16)) == 19
    assert len(truncate_at_token(response, PERIOD)) == 4
    response[[18, 20]] = 7
    assert not has_token(response, PERIOD, after=16)
    assert truncate_at_token(response, PERIOD, after=16) is response
    response[16] = PERIOD
    assert len(truncate_at_token(response, PERIOD, after=16)) == 17


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 13))
def test_truncation_is_the_cumulative_mask_of_the_sources(tokens, after):
    """They pad where cumsum(is_token) - is_token > 0, with is_token False before `after`."""
    response = np.array(tokens, dtype=np.int32)
    is_token = (response == 2) & (np.arange(len(response)) >= after)
    expected = response[(np.cumsum(is_token) - is_token) == 0]
    truncated = truncate_at_token(response, 2, after=after)
    np.testing.assert_array_equal(truncated, expected)
    np.testing.assert_array_equal(truncate_at_token(truncated, 2, after=after), truncated)
    assert has_token(response, 2, after=after) == bool(is_token.any())


def test_truncation_equals_trls_once_padded():
    trl = json.loads((Path(__file__).parents[1] / "data" / "trl_gae.json").read_text())
    for response, expected in zip(trl["responses"], trl["truncated_responses"], strict=True):
        kept = truncate_at_token(np.array(response), trl["stop_token"]).tolist()
        assert kept + [trl["pad_token"]] * (len(response) - len(kept)) == expected


def test_missing_tokens_cost_a_fixed_score_or_a_part_of_it():
    responses = [np.array([5, 0]), np.array([5, 5, 5]), np.array([], dtype=np.int32)]
    scores = np.array([0.5, 2.0, -3.0], dtype=np.float32)
    replaced = penalise_missing_token(scores, responses, 0)
    np.testing.assert_array_equal(replaced, np.array([0.5, -1.0, -1.0], dtype=np.float32))
    assert replaced.dtype == np.float32
    subtracted = penalise_missing_token(scores, responses, 0, penalty=10.0, mode="subtract")
    np.testing.assert_array_equal(subtracted, np.array([0.5, -8.0, -13.0], dtype=np.float32))
    assert subtracted.dtype == np.float32
    np.testing.assert_array_equal(scores, np.array([0.5, 2.0, -3.0], dtype=np.float32))


def test_the_token_must_come_late_enough():
    responses = [np.array([PERIOD, 5, 5]), np.array([5, 5, PERIOD])]
    penalised = penalise_missing_token(np.ones(2), responses, PERIOD, after=2)
    np.testing.assert_array_equal(penalised, [-1.0, 1.0])


def test_a_penalty_is_not_negative_and_scores_fit():
    with pytest.raises(ConfigError, match=r"write 1\.0 for a score of -1\.0"):
        penalise_missing_token(np.ones(1), [np.array([1])], 0, penalty=-1.0)
    with pytest.raises(ShapeError):
        penalise_missing_token(np.ones(2), [np.array([1])], 0)
