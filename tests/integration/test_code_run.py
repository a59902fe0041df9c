"""A run rewarded by running what the model writes: a program is rewarded if and only if it prints what it should."""

from __future__ import annotations

import json
import subprocess
import sys

import slipstream
from slipstream.core.run_log import read_rollouts


def prints(program: str) -> str | None:
    """What the program prints, by an interpreter of its own: the tiny model's texts are a dozen characters long."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else None


def test_programs_are_rewarded_for_what_they_print(tiny, tmp_path):
    rows = [
        {"prompt": f"{n}>", "answer": f"print({n % 2})", "out": {"inputs": [""], "outputs": [f"{n % 2}"]}}
        for n in range(100)
    ]
    dataset = tmp_path / "programs.jsonl"
    dataset.write_text("\n".join(map(json.dumps, rows)))
    overrides = tiny | {
        "steps": 2,
        "host": "inline",
        "groups_per_step": 2,
        "prompts": {
            "tasks": [],
            "dataset": str(dataset),
            "template": "{question}",
            "num_eval": 4,
            "max_prompt_tokens": 8,
        },
        "rewards": {
            "terms": [{"function": "code", "params": {"tests": "out", "fenced": False, "test_timeout_s": 30.0}}],
            "timeout_s": 120.0,
        },
        "eval": {"every": 0, "num_prompts": 4, "num_slots": 4},
        "loss": {"skip_no_signal": False},
        "warm_start": {
            "steps": 90,
            "batch_size": 32,
            "num_demonstrations": 90,
            "demonstrations": [{"template": "{answer}"}],
            "optimizer": {"lr": 5e-3},
        },
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert result.status == "done"
    rollouts = list(read_rollouts(result.out / "rollouts.jsonl"))
    assert all(rollout.failure is None for rollout in rollouts)
    expected = [float(prints(rollout.completion) == str(int(rollout.prompt.rstrip(">")) % 2)) for rollout in rollouts]
    assert [rollout.reward for rollout in rollouts] == expected
    assert sum(expected) > 0, "the model never wrote a right program; it wants a longer warm start"
