"""The examples, made small: an executor of one's own between rewards and trainer, and the Python API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run_example(name: str, out: Path, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `examples/<name>` as a script without a main guard would be; returns what it trained on."""
    script = out.with_suffix(".py")
    source = (EXAMPLES / name).read_text().partition('\nif __name__ == "__main__":')[0]
    script.write_text(f"{source}\nresult = main({str(out)!r}, {overrides!r})\nassert result.status == 'done'\n")
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    return [rollout for rollout in rollouts if rollout["step"] is not None]


@pytest.mark.slow
def test_a_judge_between_rewards_and_trainer(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Everything trained on went through the judge, in a process of its own, and a verdict took its time."""
    rollouts = run_example("custom_pipeline.py", tmp_path / "run", tiny | {"steps": 3})
    assert len(rollouts) == 3 * 4 * 4
    for rollout in rollouts:
        task, brevity = rollout["parts"]["task"], rollout["parts"].get("brevity", 0.0)
        assert rollout["reward"] == task + brevity
        assert (brevity > 0) == (task == 1)
        assert brevity < 0.5
    accounting = json.loads((tmp_path / "run" / "summary.json").read_text())["accounting"]
    assert accounting["judge"]["wait_rollouts"] > 0.2


def test_a_lambda_and_prompts_from_python(tmp_path: Path) -> None:
    model = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1}
    small = {"steps": 1, "groups_per_step": 4, "model": model, "eval": {"num_prompts": 8}}
    rollouts = run_example("python_api.py", tmp_path / "run", small)
    assert len(rollouts) == 4 * 8
    for rollout in rollouts:
        assert rollout["reward"] == sum(character in "aeiou" for character in rollout["completion"]) / 8
        assert rollout["prompt"].endswith("?")
