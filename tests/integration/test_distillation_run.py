"""A student learns from a teacher that the stage before has made, beside the trainer or in its own executor."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import slipstream

SMALL: dict[str, Any] = {
    "host": "inline",
    "steps": 4,
    "groups_per_step": 16,
    "max_staleness": 0,
    "weight_update": "between_batches",
    "model": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2},
    "prompts": {"num_train": 100, "num_eval": 8},
    "generator": {"num_slots": 16},
    "sft": {"steps": 30, "batch_size": 32, "num_demonstrations": 100, "optimizer": {"lr": 5e-3}},
    "warm_start": {"steps": 15, "batch_size": 32, "num_demonstrations": 100},
    "trainer": {"optimizer": {"lr": 5e-3}, "checkpoint_every": 2},
    "eval": {"every": 0, "num_prompts": 8, "num_slots": 8},
}
FAKE = Path(__file__).parents[1] / "generator" / "fake_vllm.py"
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2}


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


def distilled(out: Path, *, rewards: dict[str, Any] | None = None, **teacher: Any) -> Path:
    overrides = SMALL | {"sft": SMALL["sft"] | {"shape": SHAPE}, "teacher": teacher}
    overrides |= {} if rewards is None else {"rewards": rewards}
    result = slipstream.run("distill_mini", overrides=overrides, out=out, display=False)
    assert result.status == "done"
    return result.out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distilled(tmp_path_factory.mktemp("distilled") / "run", top_k=8)


def test_the_student_comes_nearer_to_a_bigger_teacher(run: Path) -> None:
    teacher, student = (load_file(run / folder / "model.safetensors") for folder in ("sft/model", "model"))
    assert teacher["model.embed_tokens.weight"].shape[1] == 2 * student["model.embed_tokens.weight"].shape[1]
    steps = steps_of(run)
    assert len(steps) == SMALL["steps"]
    assert steps[-1]["teacher_kl"] < 0.8 * steps[0]["teacher_kl"]
    assert 0 < steps[-1]["teacher_top_k_mass"] <= 1
    assert 0 <= steps[-1]["teacher_agreement"] <= 1
    told = (run / "report.html").read_text()
    assert "The KL to the teacher" in told
    assert "Distance to the teacher" in told


def test_every_group_was_trained_on(run: Path) -> None:
    """With one completion each, no group has a baseline: a reward would teach nothing."""
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16 * SMALL["steps"]
    assert {line["step"] for line in rollouts} == set(range(SMALL["steps"]))


@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_teacher_in_an_executor_of_its_own_teaches_the_same_without_any_reward(
    engine: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of vLLM there is the worker, over a make-believe vLLM of our own model, which dies once."""
    python, once = tmp_path / "python", tmp_path / "once"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exec {sys.executable} {FAKE} "$2"\n')
    python.chmod(0o755)
    monkeypatch.setenv("FAKE", json.dumps({"samples": True, "fails_at": 40, "fault": "dies", "once": str(once)}))
    served = {"engine": engine, "vllm": {"python": str(python)}}
    own = distilled(tmp_path / "own", top_k=8, executor="own", rewards={"terms": []}, **served)
    assert once.exists() == (engine == "vllm")
    for mine, other in zip(steps_of(own), steps_of(run), strict=True):
        for metric in ("loss", "grad_norm", "teacher_kl", "teacher_agreement", "tokens_trained"):
            assert mine[metric] == pytest.approx(other[metric], rel=1e-3, abs=1e-5), metric
    accounting = json.loads((own / "summary.json").read_text())["accounting"]
    assert accounting["teacher"]["teacher"] > 0
    assert "teacher" not in accounting["trainer"]


@pytest.mark.slow
def test_a_resumed_run_has_the_same_teacher(run: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(run, cut)
    shutil.rmtree(cut / "checkpoints" / "step_4")
    shutil.rmtree(cut / "model")
    resumed = slipstream.run("distill_mini", resume=cut, display=False)
    for mine, other in zip(steps_of(resumed.out), steps_of(run), strict=True):
        assert mine["teacher_kl"] == pytest.approx(other["teacher_kl"], rel=1e-5)
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
