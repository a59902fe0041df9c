"""A whole run whose loss overflows: one error that says where, one attempt, the last checkpoint as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from audit import lines
from safetensors.torch import load_file

FLAGS = [
    *("--steps", "6", "--groups-per-step", "2", "--completions-per-group", "4", "--max-staleness", "0"),
    *("--weight-update", "between_batches", "--loss.no-skip-no-signal", "--warm-start.steps", "0"),
    *("--model.hidden-size", "32", "--model.intermediate-size", "64", "--model.num-layers", "1"),
    *("--prompts.num-train", "100", "--prompts.num-eval", "8", "--eval.num-prompts", "8", "--generator.num-slots", "8"),
    *(
        "--trainer.checkpoint-every",
        "1",
        "--max-restarts",
        "3",
        "--trainer.minibatches",
        "1",
        "--kl.place",
        "loss",
        "--kl.estimator",
        "k3",
    ),
]


def slipstream(*arguments):
    command = [sys.executable, "-m", "slipstream.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.slow
def test_an_overflowing_loss_ends_the_run_once_and_leaves_its_checkpoint(tmp_path):
    """At step 0 the policy is its reference up to rounding; after an update it is not, and the penalty overflows."""
    run = tmp_path / "run"
    done = slipstream("run", "quickstart", "--out", str(run), *FLAGS, "--kl.coef", "1e23")
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "is not finite; weights were not changed" in said
    (path,) = run.glob("refused_step_*.json")
    report = json.loads(path.read_text())
    step = report["step"]
    assert step >= 1
    assert f"step {step}, epoch 0, minibatch" in said
    assert path.name in said
    assert "Traceback" not in done.stdout
    assert not list(run.glob("attempt_*"))  # the same numbers would come again
    assert len(report["heads"]) == 8
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("failed", step)
    assert len([line for line in lines(run / "metrics.jsonl") if "loss" in line]) == step
    saved = sorted(run.glob("checkpoints/step_*/manifest.json"))
    assert saved[-1].parent.name == f"step_{step}"
    for file in saved[-1].parent.glob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(file).values() if tensor.is_floating_point())
    again = slipstream("run", "--resume", str(run))
    assert again.returncode == 1
    assert f"step {step}, epoch 0" in again.stdout + again.stderr
