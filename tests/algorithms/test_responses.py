import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algorithms.responses import has_token, truncate_at_token

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


def test_the_token_must_come_late_enough():
    early, late = np.array([PERIOD, 5, 5]), np.array([5, 5, PERIOD])
    assert [has_token(response, PERIOD, after=2) for response in (early, late)] == [False, True]
    assert [has_token(response, PERIOD) for response in (early, late)] == [True, True]
    assert not has_token(np.array([], dtype=np.int32), PERIOD)
