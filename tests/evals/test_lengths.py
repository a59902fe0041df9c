"""Lengths of completions, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from slipstream.core.errors import ConfigError
from slipstream.core.types import Completion, FinishReason, Prompt, Segment
from slipstream.evals.statistics import LengthStatistics, completion_lengths, length_statistics


def test_by_hand() -> None:
    result = length_statistics([1, 2, 3, 4, 100], ["stop", "stop", "deadline", "stop", "length"])
    # p95 lies at index 0.95 * 4 = 3.8, between 4 and 100
    assert result == LengthStatistics(
        mean=22.0, p50=3.0, p95=pytest.approx(80.8), longest=100, truncated_share=0.4, count=5
    )


def test_of_completions() -> None:
    def completion(lengths: list[int], reason: FinishReason) -> Completion:
        return Completion(
            ordinal=0,
            sample=0,
            prompt=Prompt(prompt_id="0", text="?", tokens=np.ones(1, dtype=np.int32), task=""),
            segments=tuple(Segment(tokens=np.ones(length, dtype=np.int32)) for length in lengths),
            text="",
            finish_reason=reason,
        )

    result = completion_lengths([completion([2, 3], "stop"), completion([7], "length"), completion([], "stop")])
    assert (result.mean, result.p50, result.longest, result.truncated_share) == (4.0, 5.0, 7, pytest.approx(1 / 3))


@pytest.mark.parametrize(("num_tokens", "reasons"), [([], []), ([1], ["stop", "stop"])])
def test_nothing_to_measure_is_refused(num_tokens: list[int], reasons: list[str]) -> None:
    with pytest.raises(ConfigError):
        length_statistics(num_tokens, reasons)
