"""What a run has come to: rates are of the RL phase, whatever came before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.controller.tally import Tally
from slipstream.core.recipes import resolve
from slipstream.core.types import Counters, StepDone
from slipstream.observe.metrics import LEAST_S


def test_sampled_tokens_a_second_are_those_since_rl_began_or_of_the_last_reports() -> None:
    tally = Tally(resolve("quickstart"), started_s=0.0)

    def report(now_s: float, tokens: float) -> None:
        tally.counted(Counters(executor="generator-0", values={"generated_tokens": tokens}), now_s)

    for now_s in range(60):  # the warm start: it samples nothing
        report(float(now_s), 0.0)
    tally.started(60.0)
    assert tally.generated_tokens_per_s is None, "one report says nothing of a rate"
    report(62.0, 1000.0)
    assert tally.generated_tokens_per_s == pytest.approx(500.0)
    tally.started(63.0)  # it has begun
    for step in range(1, 20):
        report(62.0 + step, 1000.0 + 300.0 * step)
    assert tally.generated_tokens_per_s == pytest.approx(300.0)  # of the last reports alone


STEP = {
    "tokens_trained": 640.0,
    "tokens_read": 700.0,
    "padding_frac": 0.0,
    "staleness_updates_max": 0.0,
    "staleness_tokens/lag_0": 640.0,
    "reward_mean": 0.5,
}


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_ended_before_its_first_step_has_no_rates(tmp_path: Path, *, begun: bool) -> None:
    """However many tokens were sampled meanwhile: there is no time to divide them by."""
    tally = Tally(resolve("quickstart"), started_s=0.0)
    if begun:
        tally.started(60.0)
    tally.counted(Counters(executor="generator-0", values={"generated_tokens": 61336.0}), 60.0)
    tally.ended_s = 61.0
    rates = tally.summary(tmp_path).throughput
    assert (rates.generated_tokens_per_s, rates.trained_tokens_per_s, rates.completions_per_s) == (None, None, None)


@pytest.mark.parametrize(("step_s", "is_told"), [(0.0, False), (LEAST_S / 2, False), (2.0, True)])
def test_a_step_too_short_to_be_timed_has_no_rate(tmp_path: Path, step_s: float, *, is_told: bool) -> None:
    tally = Tally(resolve("quickstart"), started_s=0.0)
    tally.started(60.0)
    tally.counted(Counters(executor="generator-0", values={"generated_tokens": 61336.0}), 60.0 + step_s)
    metrics = tally.stepped(StepDone(step=0, version=1, metrics=STEP), 60.0 + step_s)
    tally.ended_s = 63.0
    rates = tally.summary(tmp_path).throughput
    assert metrics.get("trained_tokens_per_s") == (320.0 if is_told else None)
    assert metrics.get("generated_tokens_per_s") == (30668.0 if is_told else None)
    assert rates.trained_tokens_per_s == (320.0 if is_told else None)


def test_an_actor_critics_rates_are_left_out_alike() -> None:
    tally = Tally(resolve("stylistic_mini"), started_s=0.0)
    assert tally.config.has_critic
    tally.started(60.0)
    assert not {"elapsed/fps", "ppo/eps"} & set(tally.stepped(StepDone(step=0, version=1, metrics=STEP), 60.0))
    assert {"elapsed/fps", "ppo/eps"} <= set(tally.stepped(StepDone(step=1, version=2, metrics=STEP), 61.0))
