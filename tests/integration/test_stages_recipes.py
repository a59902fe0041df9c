"""The recipes of the whole pipeline themselves, scaled down, and one as it is shipped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from audit import lines
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import slipstream
from slipstream.core.recipes import resolve
from slipstream.observe.evaluation import MOMENTS

pytestmark = pytest.mark.slow

RECIPES = ("tldr_mini", "stylistic_mini")
SCALED_DOWN: dict[str, Any] = {
    "host": "inline",
    "steps": 2,
    "groups_per_step": 8,
    "model": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
    "prompts": {"num_train": 200, "num_eval": 30},
    "generator": {"num_slots": 16},
    "sft": {"steps": 80, "batch_size": 32, "num_demonstrations": 200, "optimizer": {"lr": 5e-3}},
    "preferences": {"num_prompts": 40, "held_out": 0.3},
    "reward_model": {"epochs": 1, "normalise_samples": 32},
    "eval": {"num_prompts": 20, "num_slots": 8},
    "evaluation": {"num_prompts": 30},
}


def table(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module", params=RECIPES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param) / "run"
    assert slipstream.run(request.param, overrides=SCALED_DOWN, out=out, display=False).status == "done"
    return out


def test_it_is_the_recipe(run: Path) -> None:
    """Scaled down, nothing else: what decides the method is what the file says."""
    ours, shipped = resolve(run / "config.toml").model_dump(), resolve(run.parent.name[:-1]).model_dump()
    for name in ("stages", "loss", "kl", "critic", "trainer", "rewards", "gold", "judge", "max_staleness"):
        assert ours[name] == shipped[name]


def test_every_stage_leaves_its_artefacts(run: Path) -> None:
    config = resolve(run / "config.toml")
    AutoModelForCausalLM.from_pretrained(run / "sft" / "model")
    AutoModelForCausalLM.from_pretrained(run / "model")
    AutoModelForSequenceClassification.from_pretrained(run / "reward_model" / "model")

    sft = table(run / "sft" / "stage.json")
    assert (sft["num_demonstrations"], sft["num_held_out"]) == (190, 10)
    assert sft["last_loss"] < sft["first_loss"]
    assert sft["held_out"]["after"]["loss"] < 0.8 * sft["held_out"]["before"]["loss"]
    assert len(lines(run / "sft" / "metrics.jsonl")) == sft["steps"] == 80

    preferences = lines(run / "preferences" / "preferences.jsonl")
    record = table(run / "preferences" / "stage.json")
    assert record["num_preferences"] == len(preferences) > 20
    assert {len(line["candidates"]) for line in preferences} == {config.reward_model.candidates}

    reward_model = table(run / "reward_model" / "stage.json")
    assert reward_model["num_held_out"] == record["num_held_out"] > 0
    assert 0.0 <= reward_model["held_out_accuracy"] <= 1.0
    assert len(lines(run / "reward_model" / "metrics.jsonl")) == reward_model["steps"]
    assert reward_model["sample_score_mean"] == pytest.approx(0.0, abs=1e-4)  # normalised before and after
    assert reward_model["sample_score_std"] == pytest.approx(1.0, abs=1e-4)

    rollouts = [line for line in lines(run / "rollouts.jsonl") if line["step"] is not None]
    assert len(rollouts) == 2 * config.completions_per_step
    assert all("reward_model" in rollout["parts"] for rollout in rollouts)
    summary = table(run / "summary.json")
    assert (summary["status"], summary["policy_version"]) == ("done", 2)


def test_the_evaluation_is_whole_and_sane(run: Path) -> None:
    found = table(run / "evaluation.json")
    assert table(run / "summary.json")["evaluation"] == found
    report = (run / "report.html").read_text()
    for words in ("gold win rate against references", "perplexity per response token", "KL per completion"):
        assert words in report
    assert found["num_prompts"] == 30
    for moment in MOMENTS:
        gold, drift = found[moment]["gold"], found[moment]["drift"]
        assert (gold["num_failed"], gold["win_rate"]["count"]) == (0, 30)
        assert gold["win_rate"]["mean"] == pytest.approx(gold["strict_win_rate"] + gold["tie_rate"] / 2)
        assert 0.0 <= gold["win_rate"]["mean"] < 0.5  # two steps are no training
        assert 0.0 < gold["mean_score"] < gold["mean_reference_score"] < 1.0  # careless people
        difference = gold["mean_score"] - gold["mean_reference_score"]
        assert gold["difference"]["mean"] == pytest.approx(difference)
        for name in ("per_response_token", "per_text_token"):
            assert 1.0 < drift["perplexity"][name]["mean"] < math.inf
        assert drift["num_with_policy"] == 30
        # In standard deviations of the policy's samples: what is scored here ends at the same token as there.
        assert abs(found[moment]["reward_models"]["reward_model"]) < 1.0
        assert found[moment]["lengths"]["count"] == 30
    at_first = found["before"]["drift"]["kl"]["per_sequence"]["mean"]
    assert at_first == pytest.approx(0.0, abs=1e-4)  # the reference is where RL begins
    assert abs(found["after"]["drift"]["kl"]["per_sequence"]["mean"]) > 10 * abs(at_first)


@pytest.mark.timeout(1800)
def test_tldr_mini_as_shipped_wins_by_gold(tmp_path: Path) -> None:
    """docs/stages.md: from 0.38 to 0.55 or 0.56, rewarded by a model that has seen some 1500 of gold's labels."""
    found = slipstream.run("tldr_mini", out=tmp_path / "run", display=False).summary["evaluation"]
    before, after = (found[moment]["gold"]["win_rate"] for moment in MOMENTS)
    assert 0.3 < before["mean"] < 0.5
    margin = after["mean"] - before["mean"]
    assert margin > 0.1
    assert margin > 3.0 * math.hypot(before["standard_error"], after["standard_error"])
    assert found["after"]["reward_models"]["reward_model"] > found["before"]["reward_models"]["reward_model"]
    kl = found["after"]["drift"]["kl"]["per_sequence"]["mean"]
    assert 0.2 < kl < 5.0
