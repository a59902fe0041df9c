"""Each arm changes exactly what it says; outcomes and verdicts on files and numbers made up by hand."""

from __future__ import annotations

from dataclasses import replace
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
from experiments.stylistic_details.runs import (
    ALL,
    ARMS,
    ENDLESS,
    ENDS,
    LARGE,
    LARGE_FIXED,
    NO_REJECTION,
    PIPELINES,
    SMALL,
    SMALL_FIXED,
    TARGET,
    USUAL,
    WITHOUT,
    spec,
    specs,
)
from slipstream.core.config import RunConfig

pytestmark = pytest.mark.usefixtures("resolved_once")

CHANGES: dict[str, tuple[str, set[tuple[str, Any]]]] = {
    WITHOUT["temperature scaling"]: (ALL, {("trainer.logprob_temperature", 1.0)}),
    WITHOUT["whitening"]: (ALL, {("critic.whiten_rewards", False), ("loss.whiten_advantages", "no")}),
    WITHOUT["value head init"]: (ALL, {("critic.head_init", "reward")}),
    SMALL: (ALL, {("kl.coef", 0.015), ("kl.target", TARGET), ("kl.horizon", 500), ("steps", 100)}),
    SMALL_FIXED: (SMALL, {("kl.target", None)}),
    LARGE: (SMALL, {("kl.coef", 1.5)}),
    LARGE_FIXED: (LARGE, {("kl.target", None)}),
    NO_REJECTION: (ENDS, {("loss.truncated", "keep")}),
}
"""Arm -> the arm it is compared with, and what it changes in that."""


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


def config_of(arm: str, tmp_path, seed: int = 1) -> RunConfig:
    return spec(arm, seed, tmp_path / ARMS[arm].pipeline).config()


def test_an_arm_changes_what_it_says_and_nothing_else(tmp_path):
    assert {ALL, ENDS, *CHANGES} == set(ARMS)
    for arm, (base, changes) in CHANGES.items():
        whole, changed = flat(config_of(base, tmp_path)), flat(config_of(arm, tmp_path))
        assert {(field, value) for field, value in changed.items() if value != whole[field]} == changes, arm


def test_every_detail_is_switched_on_in_the_run_with_all(tmp_path):
    config = config_of(ALL, tmp_path, seed=0)
    assert not config.rereads_behaviour
    assert (config.generator.temperature, config.kl.target, config.kl.coef) == (0.7, 6.0, 0.15)
    assert (config.critic.whiten_rewards, config.loss.whiten_advantages) == (True, "minibatch")
    assert (config.critic.model, config.critic.head_init) == ("head", "zero")
    assert (config.loss.truncated, config.loss.truncation_reward) == ("penalty", -1.0)


def test_runs_share_the_models_of_their_pipeline(tmp_path):
    lab = Lab(tmp_path)
    places = {name: lab.place(pipeline) for name, pipeline in PIPELINES.items()}
    chosen = specs(lab)
    assert len({one.name for one in chosen.values()}) == len(chosen) == 10 * len(ARMS)
    for (arm, seed), each in chosen.items():
        config, pipeline = each.config(), places[ENDLESS if arm in (ENDS, NO_REJECTION) else USUAL]
        assert config.seed == seed, arm
        assert config.model.path == config.kl.reference == str(pipeline / "sft" / "model")
        assert [term.path for term in config.rewards.models] == [str(pipeline / "reward_model" / "model")]
        assert config.stages == ["rl", "evaluate"]
    usual, endless = (flat(PIPELINES[name].config()) for name in (USUAL, ENDLESS))
    assert usual["stages"] == ["sft", "preferences", "reward_model"]
    assert {field for field in usual if usual[field] != endless[field]} == {"sft.demonstrations"}
    shown = {one["template"]: one["weight"] for one in endless["sft.demonstrations"]}
    assert shown == {"{answer}.": 13, "{answer}": 7}


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
            "explained_variance": 0.25 if step < 20 else 9.0,
            "kl_coef": 0.15 - 0.001 * step,
            "kl_reference_sum": 2.0 * step,
        }
        for step in range(25)
    ]
    found = outcome(told, [*steps, {"eval": 0.5}])
    assert (found.before, found.gold, found.gold_score, found.kl, found.reward_model) == (0.25, 0.75, 0.375, 1.5, 15.0)
    assert (found.began_without_end, found.without_end) == (1.0, 0.5)  # the first step, the last 20
    assert (found.early_score, found.explained_variance) == (9.5, 0.25)  # the first 20
    assert replace(found, kl=TARGET - 0.5).off_target == replace(found, kl=TARGET + 0.5).off_target == 0.5
    assert found.kl_coef == pytest.approx(0.126)
    assert found.scores == tuple(float(step) for step in range(25))
    assert found.trained_kl[:3] == (0.0, 2.0, 4.0)


PLAIN = Outcome(0.5, 0.7, 0.8, 1.5, 1.0, 0.3, 0.3, 0.1, 0.2, 0.13, tuple(range(100)), tuple(range(100)))
VALUES = {"gold": 0.7, "kl": 1.5, "early_score": 0.3, "without_end": 0.1}


def seeds(**changed: float) -> list[Outcome]:
    """Five outcomes close together around PLAIN, moved."""
    values = VALUES | changed
    return [replace(PLAIN, **{name: value + 0.001 * seed for name, value in values.items()}) for seed in range(5)]


def base() -> dict[str, list[Outcome]]:
    return {arm: seeds() for arm in ARMS}


def test_a_detail_that_nothing_hangs_on_gets_no_verdict():
    assert {verdict.holds for verdict in verdicts(base())} == {None}


SCALING, WHITENING, HEAD = WITHOUT.values()


@pytest.mark.parametrize(
    ("arm", "changed", "index", "holds"),
    [
        (SCALING, {"kl": 3.0}, 0, True),
        (SCALING, {"kl": 1.0}, 0, False),
        (SCALING, {"early_score": 0.1}, 1, True),
        (SCALING, {"gold": 0.6}, 2, True),
        (SCALING, {"gold": 0.8}, 2, False),
        (WHITENING, {"early_score": 0.4}, 3, False),
        (WHITENING, {"gold": 0.6}, 4, True),
        (HEAD, {"early_score": 0.2}, 5, True),
        (HEAD, {"gold": 0.6}, 6, True),
        (SMALL_FIXED, {"kl": 4.0}, 7, True),
        (SMALL, {"kl": 4.0}, 7, False),
        (SMALL_FIXED, {"gold": 0.6}, 8, True),
        (LARGE_FIXED, {"kl": 0.1}, 9, True),  # as far off below the target
        (LARGE, {"gold": 0.6}, 10, False),
        (NO_REJECTION, {"without_end": 0.4}, 11, True),
        (NO_REJECTION, {"without_end": 0.05}, 11, False),
        (NO_REJECTION, {"gold": 0.6}, 12, True),
    ],
)
def test_verdicts_follow_the_rules_of_the_readme(arm, changed, index, holds):
    found = verdicts(base() | {arm: seeds(**changed)})
    assert found[index].holds is holds
    assert arm in found[index].found
    assert {verdict.holds for place, verdict in enumerate(found) if place != index} == {None}
    assert found[index].source.startswith("N, policy")


def test_nothing_is_said_of_rejection_where_nearly_all_end():
    found = base() | {NO_REJECTION: seeds(without_end=0.4, gold=0.6)}
    assert [verdict.holds for verdict in verdicts(found)[11:]] == [True, True]
    found[ENDS] = [replace(one, began_without_end=0.19) for one in found[ENDS]]
    assert [verdict.holds for verdict in verdicts(found)[11:]] == [None, None]


def test_curves_are_averaged_without_overlap():
    assert smoothed([0.0] * 10 + [1.0] * 10 + [5.0]) == [0.0, 1.0]


def test_table_and_figure_name_every_arm():
    table = outcome_table(base())
    assert table.count("\n") == 1 + len(ARMS)
    assert "| without whitening | 0.702 (0.002) |" in table
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
    of_rl = {name: table for name, table in small.items() if name != "model"}
    pipelines = {name: one.with_overrides(**small) for name, one in PIPELINES.items()}
    monkeypatch.setattr(runs, "PIPELINES", pipelines)
    monkeypatch.setattr(runs, "spec", lambda *key: original(*key).with_overrides(**of_rl))
    for module in (runs, experiment):
        monkeypatch.setattr(module, "SEEDS", (0, 1))
    text = render("stylistic_details", section(Lab(tmp_path)))
    assert "| without temperature scaling |" in text
    assert "| 30 % without an end, without rejection score |" in text
