"""Runs that are rewarded by models: in a process of their own, alone or beside functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.batching import collate
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig
from slipstream.models.build import build_policy
from slipstream.models.scalar import ScalarModel, new_scalar_model, save_scalar_model
from slipstream.models.scoring import score


@pytest.fixture
def reward_model(tiny: dict[str, Any], tmp_path: Path) -> tuple[Path, ScalarModel]:
    """A random reward model with the quickstart's tokenizer."""
    config = resolve("quickstart", tiny)
    policy, tokenizer = build_policy(config.model, seed=5)
    model = new_scalar_model(policy, head_init="reward", seed=5)
    save_scalar_model(model, tmp_path / "reward_model", tokenizer)
    return tmp_path / "reward_model", model


def rollouts_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] is not None]


@pytest.mark.parametrize("host", [pytest.param("process", marks=pytest.mark.slow), "inline"])
def test_a_run_rewarded_by_a_model_alone(
    host: str, tiny: dict[str, Any], reward_model: tuple[Path, ScalarModel], tmp_path: Path
) -> None:
    """Its scores are the rewards, and no sandboxed worker runs."""
    path, model = reward_model
    steps = 2 if host == "process" else 1
    overrides = tiny | {
        "steps": steps,
        "host": host,
        "rewards": {"terms": [], "models": [{"path": str(path), "name": "rm", "weight": 2.0}]},
    }
    slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    rollouts = rollouts_of(tmp_path / "run")
    assert len(rollouts) == steps * 4 * 4
    _, tokenizer = build_policy(ModelConfig(), seed=0)
    samples = []
    for rollout in rollouts:
        ends = [tokenizer.eos_token_id] if rollout["finish_reason"] == "stop" else []
        prompt, text = (
            tokenizer(rollout[key], add_special_tokens=False)["input_ids"] for key in ("prompt", "completion")
        )
        samples.append((np.array(prompt, np.int32), np.array(text + ends, np.int32)))
    scores = score(model, samples, microbatch_tokens=1024, batching=collate)
    for rollout, expected in zip(rollouts, scores, strict=True):
        assert list(rollout["parts"]) == ["rm"]
        assert rollout["reward"] == 2.0 * rollout["parts"]["rm"]
        if len(rollout["completion"]) == rollout["num_tokens"] - (rollout["finish_reason"] == "stop"):
            assert rollout["parts"]["rm"] == pytest.approx(float(expected), abs=1e-4)
    accounting = json.loads((tmp_path / "run" / "summary.json").read_text())["accounting"]
    assert "reward_models" in accounting
    assert "rewards" not in accounting


@pytest.mark.slow
def test_a_function_measures_while_a_model_rewards(
    tiny: dict[str, Any], reward_model: tuple[Path, ScalarModel], tmp_path: Path
) -> None:
    """A term of weight 0 is recorded with every rollout and decides the accuracy; the model decides the reward."""
    path, _ = reward_model
    overrides = tiny | {
        "steps": 2,
        "rewards": {"terms": [{"function": "task", "weight": 0.0}], "models": [{"path": str(path)}]},
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    for rollout in rollouts_of(tmp_path / "run"):
        assert list(rollout["parts"]) == ["task", "reward_model"]
        assert rollout["reward"] == rollout["parts"]["reward_model"]
    assert 0.0 <= result.summary["eval"]["after"]["accuracy"] <= 1.0
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "reward_parts/task" in metrics
    assert "reward_parts/reward_model" in metrics


def test_what_is_refused(tiny: dict[str, Any], reward_model: tuple[Path, ScalarModel], tmp_path: Path) -> None:
    models = [{"path": str(tmp_path / "nowhere")}]
    with pytest.raises(ConfigError, match="there is no reward model"):
        slipstream.run("quickstart", overrides=tiny | {"rewards": {"models": models}}, out=tmp_path / "a")
    models = [{"path": str(reward_model[0])}]
    other = tiny | {"model": tiny["model"] | {"alphabet": "abcdefghijklmnopqrstuvwxyz>"}}
    with pytest.raises(ConfigError, match="different tokenizers"):
        slipstream.run("quickstart", overrides=other | {"rewards": {"models": models}}, out=tmp_path / "b")
