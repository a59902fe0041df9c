"""A run whose verifier loops, eats memory, forks, floods and writes: it goes on, and nothing leaves the worker."""

from __future__ import annotations

import subprocess
from pathlib import Path

from audit import audit

import slipstream
from slipstream.observe.recorder import read_rollouts

HOSTILE = """
import os, pathlib, subprocess, sys, time

def reward(prompts, completions, completion_ids, **columns):
    kind = sum(map(ord, completions[0] + prompts[0])) % 40
    if kind == 0:
        while True:
            pass
    if kind == 1:
        hoard = [0] * (8 << 30)
    if kind == 2:
        for _ in range(200):
            if os.fork() == 0:
                os.setsid()
                time.sleep(7919)
    if kind == 3:
        sys.stdout.write("x" * (100 << 20))
    if kind == 4:
        pathlib.Path(MARKER).write_text("escaped")
        return [0.5]
    if kind == 5:
        subprocess.run(["touch", MARKER], check=True)
    if kind == 6:
        os._exit(0)
    return [float(len(completions[0]) % 3)]
"""


def test_a_hostile_verifier_costs_rollouts_and_nothing_else(tiny, tmp_path):
    marker = Path.home() / f".slipstream-escaped-{tmp_path.name}"
    source = tmp_path / "hostile.py"
    source.write_text(f"MARKER = {str(marker)!r}\n{HOSTILE}")
    overrides = tiny | {
        "steps": 3,
        "groups_per_step": 2,
        "rewards": {"terms": [{"function": f"{source}:reward"}], "timeout_s": 1.0},
        "eval": {"every": 0, "num_prompts": 8, "num_slots": 8},
        "loss": {"skip_no_signal": False},
    }
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert result.status == "done"
    assert audit(result.out)["fates"]["trained"] == 6
    failures = [rollout.failure for rollout in read_rollouts(result.out / "rollouts.jsonl") if rollout.failure]
    assert failures, "the adversary never struck; its seed wants another look"
    assert not marker.exists()
    survivors = subprocess.run(["pgrep", "-f", "slipstream.rewards.worker"], capture_output=True, text=True).stdout
    assert str(source) not in survivors
