"""What a run has come to: rates are of the RL phase, whatever came before it."""

from __future__ import annotations

import pytest

from slipstream.controller.tally import Tally
from slipstream.core.recipes import resolve
from slipstream.core.types import Counters


def test_sampled_tokens_a_second_are_those_since_rl_began_or_of_the_last_reports() -> None:
    tally = Tally(resolve("quickstart"), started_s=0.0)

    def report(now_s: float, tokens: float) -> None:
        tally.counted(Counters(executor="generator-0", values={"generated_tokens": tokens}), now_s)

    for now_s in range(60):  # the warm start: it samples nothing
        report(float(now_s), 0.0)
    tally.started(60.0)
    assert tally.generated_tokens_per_s == 0.0
    report(62.0, 1000.0)
    assert tally.generated_tokens_per_s == pytest.approx(500.0)
    tally.started(63.0)  # it has begun
    for step in range(1, 20):
        report(62.0 + step, 1000.0 + 300.0 * step)
    assert tally.generated_tokens_per_s == pytest.approx(300.0)  # of the last reports alone
