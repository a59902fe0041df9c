"""Reward models and reference policy in groups of their own, of several ranks: the run is that of one rank each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from audit import lines

import slipstream
from slipstream.core.recipes import resolve
from slipstream.models.build import build_policy
from slipstream.models.scalar import new_scalar_model, save_scalar_model

SYNC = {
    "steps": 2,
    "max_staleness": 0,
    "weight_update": "between_batches",
    "warm_start": {"steps": 20, "batch_size": 32, "num_demonstrations": 300},
    "trainer": {"optimizer": {"lr": 3e-3}, "checkpoint_every": 1},
}


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [line for line in lines(run / "metrics.jsonl") if "grad_norm" in line]


def leaves(table: dict[str, Any], within: str = "") -> dict[str, Any]:
    """What a nested table holds, by path. A model scores as one batch what has arrived, and that order rounds its sums:
    equal scores differ by 1e-8."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        path = f"{within}/{name}"
        found |= leaves(value, path) if isinstance(value, dict) else {path: value}
    return found


def assert_same_steps(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for metric in ("kl_reference", "kl_reference_sum", "loss", "grad_norm", "tokens_trained"):
            assert mine[metric] == pytest.approx(other[metric], abs=1e-5, rel=1e-5), metric


@pytest.mark.slow
def test_models_and_reference_on_two_ranks_each(tiny: dict[str, Any], tmp_path: Path) -> None:
    """At staleness 0, after a warm start: the same rewards, KL, losses and gradients as with one process of models and
    the reference beside the trainer; every held-out answer is counted once."""
    policy, tokenizer = build_policy(resolve("quickstart", tiny).model, seed=5)
    save_scalar_model(new_scalar_model(policy, head_init="reward", seed=5), tmp_path / "rm", tokenizer)
    kl = {"coef": 0.5, "place": "loss", "estimator": "k3"}
    models = {"terms": [], "models": [{"path": str(tmp_path / "rm"), "name": "rm"}]}
    one_rank = {"rewards": models, "kl": kl, "host": "inline"}
    two_ranks = {"rewards": models | {"model_ranks": 2}, "kl": kl | {"executor": "own", "ranks": 2}}
    summaries = {}
    for name, groups in (("one", one_rank), ("two", two_ranks)):
        overrides = tiny | SYNC | groups | {"eval": tiny["eval"] | {"num_prompts": 24}}
        result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / name, display=False)
        summaries[name] = result.summary
    one, two = (
        {
            (line["step"], line["ordinal"], line["sample"]): line["reward"]
            for line in lines(tmp_path / name / "rollouts.jsonl")
        }
        for name in summaries
    )
    assert len(two) == 2 * 16
    assert two == pytest.approx(one, abs=1e-5)
    steps = {name: steps_of(tmp_path / name) for name in summaries}
    assert_same_steps(steps["two"], steps["one"])
    assert steps["two"][-1]["kl_reference_sum"] > 1e-3, "the policy has left its reference"
    assert leaves(summaries["two"]["eval"]) == pytest.approx(leaves(summaries["one"]["eval"]), abs=1e-6)
    assert summaries["two"]["eval"]["after"]["num_prompts"] == 24, "held-out answers are counted once"
    states = summaries["two"]["accounting"]
    for rank in ("", "@1"):
        assert states[f"reward_models{rank}"]["score"] > 0
        assert states[f"reference{rank}"]["reference"] > 0
        assert states[f"reference{rank}"]["wait_rollouts"] > 0
    assert not any(name.startswith("reference") for name in summaries["one"]["accounting"])


@pytest.mark.slow
def test_models_and_reference_that_ranks_hold_together(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The same with a reference whose layers two ranks share, and reward models that FSDP2 cuts over two ranks."""
    policy, tokenizer = build_policy(resolve("quickstart", tiny).model, seed=5)
    save_scalar_model(new_scalar_model(policy, head_init="reward", seed=5), tmp_path / "rm", tokenizer)
    kl = {"coef": 0.5, "place": "loss", "estimator": "k3"}
    models = {"terms": [], "models": [{"path": str(tmp_path / "rm"), "name": "rm"}]}
    whole = {"rewards": models, "kl": kl, "host": "inline"}
    divided = {
        "rewards": models | {"model_ranks": 2, "models_sharded": True},
        "kl": kl | {"executor": "own", "ranks": 2, "tensor_parallel": 2},
    }
    rewards, steps, summaries = [], [], []
    for name, groups in (("whole", whole), ("divided", divided)):
        run = slipstream.run("quickstart", overrides=tiny | SYNC | groups, out=tmp_path / name, display=False)
        found = lines(run.out / "rollouts.jsonl")
        rewards.append({(line["step"], line["ordinal"], line["sample"]): line["reward"] for line in found})
        steps.append(steps_of(run.out))
        summaries.append(run.summary)
    assert len(rewards[1]) == 2 * 16
    assert rewards[1] == pytest.approx(rewards[0], abs=1e-5)
    assert_same_steps(steps[1], steps[0])
    assert steps[1][-1]["kl_reference_sum"] > 1e-3, "the policy has left its reference"
    after = [summary["eval"]["after"] for summary in summaries]
    assert after[1]["num_prompts"] == after[0]["num_prompts"], "held-out answers are counted once"
    assert after[1]["reward"] == pytest.approx(after[0]["reward"], abs=1e-5)
    states = summaries[1]["accounting"]
    for member, state in (("reference", "reference"), ("reward_models", "score")):
        assert states[member][state] > 0
        assert states[f"{member}@1"][state] > 0, "both ranks read"
        assert "send" not in states[f"{member}@1"], "the first one emits"


@pytest.mark.slow
def test_a_resumed_run_has_the_same_reference(tiny: dict[str, Any], tmp_path: Path) -> None:
    """That of the first attempt's warm start, which lies in the run's folder."""
    overrides = tiny | SYNC | {"host": "inline", "kl": {"coef": 0.5, "executor": "own"}}
    whole = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "whole", display=False)
    cut = tmp_path / "cut"
    shutil.copytree(whole.out, cut)
    shutil.rmtree(cut / "checkpoints" / "step_2")
    shutil.rmtree(cut / "model")
    resumed = slipstream.run("quickstart", resume=cut, display=False)
    assert_same_steps(steps_of(resumed.out), steps_of(whole.out))
    assert steps_of(whole.out)[-1]["kl_reference_sum"] > 1e-3
