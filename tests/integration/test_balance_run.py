"""The verdict on real runs: which side starves is known from how they were set up."""

from __future__ import annotations

import json
import threading

import pytest

import slipstream

SECONDS_A_SCORE = 0.05


def at_once(prompts, completions, **columns):
    """A reward that is ready when all else is: importing that of a task takes longer than these runs' first steps."""
    return [float(len(completion) % 3) for completion in completions]


def slowly(prompts, completions, **columns):
    """A reward that takes its time, and no core's."""
    threading.Event().wait(SECONDS_A_SCORE)
    return at_once(prompts, completions)


def balance_of(out, tiny, *, reward=at_once, **changes):
    overrides = tiny | {"steps": 12, "warm_start": {"steps": 0}, "loss": {"skip_no_signal": False}} | changes
    result = slipstream.run("quickstart", overrides=overrides, reward=reward, out=out, display=False)
    return json.loads((result.out / "summary.json").read_text())["balance"]


@pytest.mark.slow
def test_at_staleness_0_both_sides_take_turns(tiny, tmp_path):
    balance = balance_of(tmp_path / "run", tiny, max_staleness=0, weight_update="between_batches")
    assert (balance["starves"], balance["bottleneck"]) == ("both", "turns")
    assert (balance["dial"]["field"], balance["dial"]["suggested"]) == ("max_staleness", 1)
    assert balance["split"] is None


@pytest.mark.slow
def test_many_epochs_starve_generators(tiny, tmp_path):
    balance = balance_of(tmp_path / "run", tiny, trainer={"epochs": 12})
    assert (balance["starves"], balance["bottleneck"]) == ("generator", "training")
    assert balance["split"]["balanced"]["trainer"] > balance["split"]["now"]["trainer"]
    assert balance["dial"]["field"] == "completions_per_group"


@pytest.mark.slow
def test_a_slow_reward_starves_both(tiny, tmp_path):
    balance = balance_of(tmp_path / "run", tiny, reward=slowly)
    assert balance["bottleneck"] == "rewards"
    assert balance["idle"]["trainer"] > 0.5
    assert balance["dial"] is None, "a Python function has no workers"


@pytest.mark.slow
def test_deep_models_in_few_slots_starve_the_trainer(tiny, tmp_path):
    model = tiny["model"] | {"num_layers": 8}
    generator = {"num_slots": 8, "max_new_tokens": 40}
    balance = balance_of(tmp_path / "run", tiny, model=model, generator=generator, trainer={"minibatches": 1})
    assert (balance["starves"], balance["bottleneck"]) == ("trainer", "generation")
    assert balance["split"]["balanced"]["generator"] > balance["split"]["now"]["generator"]
