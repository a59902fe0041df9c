"""What a swap leaves in the cache, on small random models; outcomes and verdicts on files made up by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.lab import Lab
from experiments.section import render
from experiments.stale_kv_cache import experiment
from experiments.stale_kv_cache.cache import (
    KEEP,
    RECOMPUTE,
    WAYS,
    Swapped,
    over_a_swap,
    speed_by_swaps,
    swap_errors,
)
from experiments.stale_kv_cache.experiment import (
    LAGS,
    MARGIN,
    PLACES,
    SEEDS,
    STARTS,
    Errors,
    Outcome,
    behind_swaps,
    error_table,
    figure,
    outcome,
    run_table,
    section,
    speed_table,
    trained,
    verdicts,
    versions,
)
from slipstream.core.run_log import RolloutLine
from slipstream.core.sections import ModelConfig
from slipstream.generator.requests import Request
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer

VOCAB_SIZE = 32
SWAP_AT = 6


def random_model(seed: int, *, like: Transformer | None = None, by: float = 0.0) -> Transformer:
    """Weights large enough for distributions far from uniform; `like` moved `by` a random direction."""
    config = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, max_positions=64)
    model = new_model(config, VOCAB_SIZE, seed)
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), (like or model).parameters(), strict=True):
            scale = 6.0 if parameter.ndim > 1 else 1.0
            parameter.copy_(other + by * parameter if like is not None else scale * parameter)
    return model


def requests() -> list[Request]:
    rng = np.random.default_rng(0)
    return [Request(index, 0, rng.integers(2, VOCAB_SIZE, 3 + index % 4).astype(np.int32), 20) for index in range(10)]


@pytest.fixture(scope="module")
def models() -> tuple[Transformer, Transformer]:
    before = random_model(0)
    return before, random_model(1, like=before, by=0.5)


def test_a_new_cache_leaves_rounding_and_a_kept_one_more(models):
    before, after = models
    found = {way: swap_errors(over_a_swap(before, after, requests(), way=way, swap_at=SWAP_AT, seed=0)) for way in WAYS}
    assert found[RECOMPUTE]["largest"] < 1e-4
    assert found[KEEP]["error"] > 100 * found[RECOMPUTE]["error"]
    assert found[KEEP]["tokens"] == 10 * (20 - SWAP_AT)
    assert found[KEEP]["shift"] > 0.01


def test_a_swap_to_the_same_weights_leaves_nothing(models):
    swapped = over_a_swap(models[0], models[0], requests(), way=KEEP, swap_at=SWAP_AT, seed=0)
    found = swap_errors(swapped)
    assert found["largest"] < 1e-4
    assert found["shift"] == 0.0


def test_what_is_old_is_read_by_the_weights_before_the_swap(models):
    """A model without weights finds every token equally likely."""
    uniform = Transformer(models[0].config)
    with torch.no_grad():
        for parameter in uniform.parameters():
            parameter.zero_()
    for one in over_a_swap(uniform, models[1], requests(), way=RECOMPUTE, swap_at=SWAP_AT, seed=0):
        np.testing.assert_allclose(one.old, -np.log(VOCAB_SIZE), atol=1e-5)
        np.testing.assert_allclose(one.recorded, one.fresh, atol=1e-4)
        assert np.abs(one.fresh - one.old).max() > 0.1


def test_completions_that_end_before_the_swap_are_left_out(models):
    """Of which some do, some do not: requests end at their limit here."""
    batch = [replace(request, max_new_tokens=limit) for request, limit in zip(requests(), (4, 6, 7, 20), strict=False)]
    swapped = over_a_swap(*models, batch, way=KEEP, swap_at=SWAP_AT, seed=0)
    assert sorted(len(one.recorded) for one in swapped) == [1, 14]


def test_errors_by_hand():
    def column(*values: float) -> np.ndarray:
        return np.array(values)

    late = [0.0] * 16
    found = swap_errors(
        [
            Swapped(recorded=column(-1.0, -2.0), fresh=column(-1.5, -2.0), old=column(-1.0, -1.0)),
            Swapped(recorded=column(*late, -0.5), fresh=column(*late, 0.0), old=column(*late, 0.0)),
        ]
    )
    assert found["tokens"] == 19
    assert found["error"] == pytest.approx((0.5 + 0.5) / 19)
    assert found["early"] == pytest.approx(0.5 / 18)  # the second one's last token is no longer early
    assert found["largest"] == pytest.approx(0.5)
    assert found["shift"] == pytest.approx((0.5 + 1.0) / 19)
    ratios = [np.exp(-0.5), *[1.0] * 17, np.exp(0.5)]
    assert found["ratio_std"] == pytest.approx(np.std(ratios))


def test_reading_again_costs_what_swaps_ask_for():
    found = speed_by_swaps(
        model={"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        swap_every=[0, 4],
        rows=8,
        prompt_tokens=4,
        new_tokens=8,
        repeats=1,
    )
    assert [found[way]["0"][0]["re_prefilled"] for way in WAYS] == [0.0, 0.0]
    again = {way: found[way]["4"][0]["re_prefilled"] for way in WAYS}
    assert again[KEEP] <= 3 * 8 * 3 / (3 * 8 * 8)  # at most each prompt, all its tokens but the last
    assert again[RECOMPUTE] > 2 * again[KEEP]
    assert all(one["tokens_per_s"] > 0 for way in WAYS for every in ("0", "4") for one in found[way][every])


# What is read from runs


def line(num_tokens: int, *runs: tuple[int, int], step: int | None = 0) -> RolloutLine:
    """A rollout's line: its tokens were sampled under the versions of `runs`."""
    return RolloutLine(
        ordinal=0,
        sample=0,
        step=step,
        outcome="trained",
        prompt_id="",
        task="",
        prompt="",
        completion="",
        answer=None,
        reward=0.0,
        parts={},
        failure=None,
        finish_reason="stop",
        num_tokens=num_tokens,
        versions=list(runs),
        mean_behaviour_logprob=None,
        replica=0,
        started_s=0.0,
        finished_s=0.0,
        scored_s=0.0,
    )


def test_tokens_behind_a_swap_are_counted():
    rollouts = [line(10, (0, 3)), line(10, (0, 3), (4, 4), (8, 7))]
    stale_share, lag = behind_swaps(rollouts)
    assert stale_share == 6 / 20
    assert lag == (4 * 1 + 2 * 4) / 20
    assert behind_swaps([]) == (0.0, 0.0)


def test_an_outcome_is_read_from_the_files_of_a_run():
    told = {
        "throughput": {"generated_tokens_per_s": 900.0},
        "eval": {"before": {"sampled_accuracy": 0.1}, "after": {"sampled_accuracy": 0.4}},
    }
    steps: list[dict[str, Any]] = [{"reward_mean": step / 100} for step in range(30)] + [{"eval": 1}]

    def rollouts() -> Iterator[RolloutLine]:
        yield line(10, (0, 3), (5, 4))
        yield line(99, (0, 3), (1, 9), step=None)  # never trained on

    found = outcome(told, steps, rollouts())
    assert (found.tokens_per_s, found.before, found.after) == (900.0, 0.1, 0.4)
    assert found.reward == pytest.approx(0.245)  # of the last ten steps
    assert (found.stale_share, found.lag) == (0.5, 0.5)
    assert len(found.rewards) == 30


def test_runs_differ_in_the_cache_alone():
    keep, recompute = (trained(Path("/data"), Path("/policy"), way, 1).config().model_dump() for way in WAYS)
    assert (keep["generator"].pop("kv_on_update"), recompute["generator"].pop("kv_on_update")) == (KEEP, RECOMPUTE)
    assert keep == recompute
    assert keep["weight_update"] == "in_flight"
    assert keep["generator"]["num_slots"] == 3 * keep["groups_per_step"] * keep["completions_per_group"]


def test_every_version_that_is_needed_is_kept():
    config = versions(Path("/data"), Path("/policy")).config()
    needed = {start + lag for start in STARTS for lag in (0, *LAGS)}
    assert config.trainer.checkpoint_every == 1
    assert config.steps == max(needed)
    assert config.trainer.keep_checkpoints >= config.steps - min(needed) + 1


# What is said

LEARNED = Outcome(1000.0, 0.8, 0.1, 0.7, 0.6, 1.5, tuple([0.2] * 20 + [0.8] * 10))


def seeds(**changed: float) -> list[Outcome]:
    return [
        replace(LEARNED, **{name: value + 0.001 * index for name, value in changed.items()})
        for index in range(len(SEEDS))
    ]


def made_up_errors(error: float = 0.01, shift: float = 0.1, early_place: float = 0.01) -> Errors:
    """Behind the first place the cache changes `early_place`, behind the others `error`."""

    def one(value: float) -> dict[str, float]:
        return {"error": value, "early": value, "largest": value, "shift": shift, "ratio_std": value, "tokens": 9.0}

    def by_way(kept: float):
        return {way: {str(lag): [one(kept if way == KEEP else 1e-6)] * len(STARTS) for lag in LAGS} for way in WAYS}

    return {place: by_way(early_place if place == PLACES[0] else error) for place in PLACES}


@pytest.mark.parametrize(
    ("keep", "errors", "words"),
    [
        ({}, {}, [True, True, True]),
        ({"reward": 0.8 - MARGIN / 2}, {}, [True, True, True]),
        ({"reward": 0.6}, {}, [False, True, True]),
        ({"stale_share": 0.1}, {}, [None, True, True]),
        ({"tokens_per_s": 400.0}, {}, [True, True, False]),
        ({"tokens_per_s": 500.0}, {}, [True, True, None]),
        ({}, {"error": 0.07}, [True, None, True]),
        ({}, {"error": 0.0, "shift": 0.0}, [True, None, True]),  # versions that are all the same
        ({}, {"error": 0.2}, [True, False, True]),
        ({}, {"early_place": 0.2}, [True, False, True]),
    ],
)
def test_verdicts_follow_the_rules_of_the_readme(keep, errors, words):
    kept = {"reward": 0.8, "tokens_per_s": 1000.0, "stale_share": 0.6} | keep
    runs = {KEEP: seeds(**kept), RECOMPUTE: seeds(reward=0.8, tokens_per_s=500.0)}
    assert [verdict.holds for verdict in verdicts(runs, made_up_errors(**errors))] == words


def test_runs_that_did_not_learn_say_nothing_of_quality():
    flat = [replace(one, rewards=(0.8,) * 30) for one in seeds(reward=0.8)]
    assert verdicts({KEEP: flat, RECOMPUTE: seeds(reward=0.8)}, made_up_errors())[0].holds is None


def test_tables_and_figure():
    runs = {KEEP: seeds(reward=0.8), RECOMPUTE: seeds(reward=0.7)}
    speeds = {way: {str(every): [{"tokens_per_s": 100.0, "re_prefilled": 0.5}] for every in (0, 8)} for way in WAYS}
    table = error_table(made_up_errors(error=0.00004))
    assert table.count("\n") == 1 + len(PLACES) * len(LAGS)
    assert "| 24 | 8 | 4.0e-05 (0.0e+00) |" in table
    assert "| made anew | 0.701 (0.001) |" in run_table(runs)
    assert "| none | 100 | 100 | 1.00 | 0.50 | 0.50 |" in speed_table(speeds)
    assert figure(made_up_errors(), runs, speeds).count("<svg") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_experiment_at_toy_size(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment, "SEEDS", (0,))
    monkeypatch.setattr(experiment, "STARTS", (1,))
    monkeypatch.setattr(experiment, "LAGS", (1, 2))
    monkeypatch.setattr(experiment, "SWAPS", {"max_new_tokens": 24, "num_prompts": 8})
    monkeypatch.setattr(experiment, "PLACES", (1, 8))
    monkeypatch.setattr(experiment, "SPEED", experiment.SPEED | {"rows": 8, "new_tokens": 8, "repeats": 1})
    monkeypatch.setattr(experiment, "LAST_STEPS", 2)
    lessons = {
        "steps": 3,
        "max_staleness": 2,
        "groups_per_step": 2,
        "completions_per_group": 2,
        "generator": {"num_slots": 8},
        "eval": {"num_prompts": 4},
    }
    monkeypatch.setattr(experiment, "LESSONS", lessons)
    original = experiment.start
    monkeypatch.setattr(experiment, "start", lambda *key: original(*key).with_overrides(sft={"steps": 20}))
    text = render("stale_kv_cache", section(Lab(tmp_path)))
    assert text.count("Recomputing the cache is not necessary.") == 1
