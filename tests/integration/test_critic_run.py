"""A run whose critic has an executor of its own is the run with the critic inside, also when the critic is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_endings import await_steps, executors_of, start
from test_ranks_run import metrics, stored
from test_restarts_run import finished

import slipstream

STEPS = 5
MEASURED = ("loss", "grad_norm", "critic_grad_norm", "value_loss", "value", "explained_variance", "reward_mean")


def ppo(tiny: dict[str, Any], **critic: Any) -> dict[str, Any]:
    """Without staleness a run is the same each time; each side has half of two cores, whatever the other does."""
    return tiny | {
        "steps": STEPS,
        "max_staleness": 0,
        "weight_update": "between_batches",
        "sync_placement": "split",
        "warm_start": tiny["warm_start"] | {"steps": 5},
        "loss": {"name": "ppo", "advantages": "gae"},
        "trainer": {"minibatches": 2, "epochs": 2, "checkpoint_every": 1},
        "critic": {"head_init": "reward", "optimizer": {"lr": 1e-3}, **critic},
    }


def assert_equal(run: Path, other: Path, *, atol: float = 0.0) -> None:
    """The last policies and critics, with their moments; and all metrics of losses and values."""
    for model in ("policy", "critic", "critic.exp_avg_sq"):
        mine, theirs = (stored(one / "checkpoints" / f"step_{STEPS}", model) for one in (run, other))
        assert mine.keys() == theirs.keys() != set()
        for name, tensor in mine.items():
            np.testing.assert_allclose(tensor, theirs[name], atol=atol, rtol=0, err_msg=f"{model}/{name}")
    for mine, theirs in zip(metrics(run), metrics(other), strict=True):
        for name in MEASURED:
            assert mine[name] == pytest.approx(theirs[name], rel=100 * atol, abs=atol), name


def test_a_run_whose_critic_is_killed_ends_as_the_one_with_the_critic_inside(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """The attempt ends as with the trainer's death, and the next one goes on from the last checkpoint, to the bit."""
    inside = slipstream.run("quickstart", overrides=ppo(tiny) | {"host": "inline"}, out=tmp_path / "in", display=False)
    run = tmp_path / "own"
    process = start(ppo(tiny, executor="own"), run)
    await_steps(run, 2, process)
    victim = executors_of(process.pid)["critic"]
    os.kill(victim, signal.SIGKILL)
    summary = finished(process, run, steps=STEPS)
    assert summary["restarts"] == {"critic": 1}
    assert_equal(run, inside.out)
    assert summary["accounting"]["critic"]["forward_backward"] > 0
    assert {"values", "optimizer"} <= summary["accounting"]["critic"].keys()
    assert "values" not in summary["accounting"]["trainer"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step_{STEPS - 1}", f"step_{STEPS}"]
    trace = json.loads((run / "timeline.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert "critic" in {one["args"]["name"] for one in events if one.get("name") == "thread_name"}
