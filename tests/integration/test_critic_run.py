"""A run whose critic has an executor of its own is the run with the critic inside, also when the critic is killed."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_endings import run_with
from test_ranks_run import metrics, stored
from test_restarts_run import check_whole, send

import slipstream
from slipstream.core.service_messages import CheckpointSaved
from slipstream.core.types import StepDone

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
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt ends as with the trainer's death, and the next one goes on from the last checkpoint, to the bit."""
    inside = slipstream.run("quickstart", overrides=ppo(tiny) | {"host": "inline"}, out=tmp_path / "in", display=False)
    run, steps, killed = tmp_path / "own", list[int](), list[int]()

    def killing(event: Any) -> None:
        if isinstance(event, StepDone):
            steps.append(event.step)
        if isinstance(event, CheckpointSaved) and event.step == 1 and not killed:
            assert (run / "checkpoints" / "step_1").exists()
            killed.append(send("critic", signal.SIGKILL))

    summary = run_with(killing, monkeypatch, ppo(tiny, executor="own"), run)
    check_whole(summary, run, steps=STEPS)
    assert summary["restarts"] == {"critic": 1}
    assert steps.count(0) == 1, "it went on from its checkpoint"
    assert_equal(run, inside.out)
    assert summary["accounting"]["critic"]["forward_backward"] > 0
    assert {"values", "optimizer"} <= summary["accounting"]["critic"].keys()
    assert "values" not in summary["accounting"]["trainer"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step_{STEPS - 1}", f"step_{STEPS}"]
    trace = json.loads((run / "timeline.json").read_text())
    events = trace["traceEvents"] if isinstance(trace, dict) else trace
    assert "critic" in {one["args"]["name"] for one in events if one.get("name") == "thread_name"}
