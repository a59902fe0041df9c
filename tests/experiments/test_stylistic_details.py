"""Each run leaves out exactly what it says; outcomes and verdicts on files and numbers made up by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.lab import Lab
from experiments.section import render
from experiments.stylistic_details import experiment, runs
from experiments.stylistic_details.experiment import (
    Outcome,
    figure,
    outcome,
    outcome_table,
    section,
    smoothed,
    verdicts,
)
from experiments.stylistic_details.runs import ALL, PIPELINE, WITHOUT, spec, specs
from slipstream.core.config import RunConfig

LEAVES_OUT: dict[str, set[tuple[str, Any]]] = {
    "temperature scaling": {("trainer.logprob_temperature", 1.0)},
    "whitening": {("critic.whiten_rewards", False), ("loss.whiten_advantages", "no")},
    "value head init": {("critic.head_init", "reward")},
    "adaptive KL": {("kl.target", None)},
    "rejection score": {("loss.truncated", "keep")},
}


def flat(config: RunConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def walk(tables: dict[str, Any], prefix: str) -> None:
        for name, value in tables.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{name}.")
            else:
                found[prefix + name] = value

    walk(config.model_dump(), "")
    return found


def test_a_run_leaves_out_its_detail_and_nothing_else():
    pipeline = Path("/runs/pipeline")
    whole = flat(spec(pipeline, ALL, 1).config())
    assert set(WITHOUT) == set(LEAVES_OUT)
    for name, changes in LEAVES_OUT.items():
        changed = flat(spec(pipeline, name, 1).config())
        assert {(field, value) for field, value in changed.items() if value != whole[field]} == changes, name


def test_every_detail_is_switched_on_in_the_run_with_all():
    config = spec(Path("/runs/pipeline"), ALL, 0).config()
    assert not config.rereads_behaviour
    assert (config.generator.temperature, config.kl.target, config.kl.coef) == (0.7, 6.0, 0.15)
    assert (config.critic.whiten_rewards, config.loss.whiten_advantages) == (True, "minibatch")
    assert (config.critic.model, config.critic.head_init) == ("head", "zero")
    assert (config.loss.truncated, config.loss.truncation_reward) == ("penalty", -1.0)


def test_runs_share_the_models_of_one_pipeline():
    pipeline = Path("/runs/pipeline")
    for (name, seed), each in specs(pipeline).items():
        config = each.config()
        assert config.seed == seed, name
        assert config.model.path == config.kl.reference == "/runs/pipeline/sft/model"
        assert [term.path for term in config.rewards.models] == ["/runs/pipeline/reward_model/model"]
        assert config.stages == ["rl", "evaluate"]
    assert PIPELINE.config().stages == ["sft", "preferences", "reward_model"]


def test_an_outcome_is_read_from_the_files_of_a_run():
    def moment(win_rate: float, kl: float) -> dict[str, Any]:
        return {
            "gold": {"win_rate": {"mean": win_rate}, "mean_score": win_rate / 2},
            "drift": {"kl": {"per_sequence": {"mean": kl}}},
            "reward_models": {"reward_model": 10 * kl},
        }

    told = {"evaluation": {"before": moment(0.25, 0.0), "after": moment(0.75, 1.5)}}
    steps: list[dict[str, Any]] = [
        {
            "score_mean": float(step),
            "truncated_frac": 1.0 if step < 5 else 0.5,
            "explained_variance": 0.25,
            "clipped_frac": 0.125,
            "kl_coef": 0.15 - 0.001 * step,
            "kl_reference_sum": 2.0 * step,
        }
        for step in range(25)
    ]
    found = outcome(told, [*steps, {"eval": 0.5}])
    assert (found.before, found.gold, found.gold_score, found.kl, found.reward_model) == (0.25, 0.75, 0.375, 1.5, 15.0)
    assert found.without_end == 0.5  # of the last 20 steps
    assert (found.explained_variance, found.clipped) == (0.25, 0.125)
    assert found.kl_coef == pytest.approx(0.126)
    assert found.scores == tuple(float(step) for step in range(25))
    assert found.trained_kl[:3] == (0.0, 2.0, 4.0)


PLAIN = Outcome(0.5, 0.7, 0.8, 1.5, 1.0, 0.1, 0.2, 0.05, 0.13, tuple(range(100)), tuple(range(100)))


def seeds(**changed: float) -> list[Outcome]:
    """Three outcomes close together around PLAIN, moved."""
    return [
        replace(PLAIN, **{name: value + 0.001 * seed for name, value in changed.items()}) if changed else PLAIN
        for seed in range(3)
    ]


def base() -> dict[str, list[Outcome]]:
    return {name: seeds(gold=0.7, kl=1.5, without_end=0.1) for name in (ALL, *WITHOUT)}


def test_a_detail_that_nothing_hangs_on_gets_no_verdict():
    assert {verdict.holds for verdict in verdicts(base())} == {None}


@pytest.mark.parametrize(
    ("name", "changed", "index", "holds"),
    [
        ("temperature scaling", {"kl": 3.0}, 0, True),
        ("temperature scaling", {"kl": 1.0}, 0, False),
        ("temperature scaling", {"gold": 0.6}, 1, True),
        ("temperature scaling", {"gold": 0.8}, 1, False),
        ("whitening", {"gold": 0.6}, 2, True),
        ("value head init", {"gold": 0.6}, 3, True),
        ("adaptive KL", {"gold": 0.8}, 4, False),
        ("rejection score", {"gold": 0.6}, 5, True),
        ("rejection score", {"without_end": 0.4}, 6, True),
        ("rejection score", {"without_end": 0.05}, 6, False),
    ],
)
def test_verdicts_follow_the_rules_of_the_readme(name, changed, index, holds):
    values = {"gold": 0.7, "kl": 1.5, "without_end": 0.1} | changed
    found = verdicts(base() | {name: seeds(**values)})
    assert found[index].holds is holds
    assert name.split()[0].lower() in found[index].claim.lower() or index == 1
    untouched = [verdict.holds for place, verdict in enumerate(found) if place != index]
    assert set(untouched) == {None}


def test_curves_are_averaged_without_overlap():
    assert smoothed([0.0] * 10 + [1.0] * 10 + [5.0]) == [0.0, 1.0]


def test_table_and_figure_name_what_is_left_out():
    table = outcome_table(base())
    assert table.count("\n") == 1 + 1 + len(WITHOUT)
    assert "| without whitening | 0.701 (0.001) |" in table
    assert figure(base()).count("<svg") == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_experiment_at_toy_size(tmp_path, monkeypatch):
    small: dict[str, Any] = {
        "steps": 20,
        "groups_per_step": 8,
        "model": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
        "prompts": {"num_train": 200, "num_eval": 30},
        "sft": {"steps": 50, "num_demonstrations": 200},
        "preferences": {"num_prompts": 40, "held_out": 0.3},
        "reward_model": {"epochs": 1, "normalise_samples": 32},
        "eval": {"num_prompts": 10},
        "evaluation": {"num_prompts": 20},
    }
    original = runs.spec
    monkeypatch.setattr(runs, "PIPELINE", PIPELINE.with_overrides(**small))
    monkeypatch.setattr(
        runs, "spec", lambda *key: original(*key).with_overrides(**{k: v for k, v in small.items() if k != "model"})
    )
    for module in (runs, experiment):
        monkeypatch.setattr(module, "SEEDS", (0, 1))
        monkeypatch.setattr(module, "WITHOUT", {name: WITHOUT[name] for name in ("temperature scaling", "whitening")})
    monkeypatch.setattr(experiment, "verdicts", lambda _: [])
    text = render("stylistic_details", section(Lab(tmp_path)))
    assert "| without temperature scaling |" in text
