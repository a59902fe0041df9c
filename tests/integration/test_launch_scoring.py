"""Reward models and reference that join a run as trainer and generators do: torchrun jobs that meet over loopback."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from audit import audit, lines
from launching import Launched
from listeners import held_port
from processes import is_alive
from trace_audit import audit_trace

import slipstream
from slipstream.core.recipes import config_toml, resolve
from slipstream.models.build import build_policy
from slipstream.models.scalar import new_scalar_model, save_scalar_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


@pytest.fixture
def scored(tiny: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """A tiny run that a reward model scores and a reference of its own measures."""
    policy, tokenizer = build_policy(resolve("quickstart", tiny).model, seed=5)
    save_scalar_model(new_scalar_model(policy, head_init="reward", seed=5), tmp_path / "rm", tokenizer)
    return tiny | {
        "warm_start": {"steps": 20, "batch_size": 32, "num_demonstrations": 300},
        "rewards": {"terms": [], "models": [{"path": str(tmp_path / "rm"), "name": "rm"}]},
        "kl": {"coef": 0.5, "place": "loss", "estimator": "k3", "executor": "own"},
    }


def written(tmp_path: Path, overrides: dict[str, Any]) -> str:
    (tmp_path / "scored.toml").write_text(config_toml(resolve("quickstart", overrides)))
    return str(tmp_path / "scored.toml")


def test_groups_of_their_own_score_as_one_process_does(scored: dict[str, Any], tmp_path: Path) -> None:
    """At staleness 0: rewards, KL, losses and gradients are those of one process with everything in it.

    Reward models are on two machines of one rank each, which meet at a rendezvous, as the job files start them.
    """
    sync = scored | {"steps": 2, "max_staleness": 0, "weight_update": "between_batches"}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # one thread, as each of the groups has
    try:
        slipstream.run("quickstart", overrides=sync | {"host": "inline"}, out=tmp_path / "one", display=False)
    finally:
        os.sched_setaffinity(0, cores)
    recipe = written(tmp_path, sync | {"rewards": scored["rewards"] | {"model_ranks": 2}})
    with held_port() as port, Launched(tmp_path) as run:
        run.control(recipe, "--out", str(tmp_path / "many"), "--remote", "reward_models", "reference")
        for group in ("trainer", "generator-0", "reference"):
            run.join(group)
        for machine in ("0", "1"):
            meeting = ("--nnodes", "2", "--node-rank", machine, "--rendezvous", f"127.0.0.1:{port}")
            run.join("reward_models", *meeting, name=f"reward_models-{machine}")
        for job in run.jobs:
            assert run.end(job) == 0, run.logs()
    audit(tmp_path / "many")
    assert audit_trace(tmp_path / "many")["groups"] >= 2 * 4
    one, many = (
        {(line["step"], line["ordinal"], line["sample"]): line["reward"] for line in lines(out / "rollouts.jsonl")}
        for out in (tmp_path / "one", tmp_path / "many")
    )
    assert len(many) == 2 * 16
    assert many == pytest.approx(one, abs=1e-5)
    steps = [
        [line for line in lines(tmp_path / name / "metrics.jsonl") if "grad_norm" in line] for name in ("one", "many")
    ]
    for theirs, ours in zip(*steps, strict=True):
        for metric in ("kl_reference", "kl_reference_sum", "loss", "grad_norm", "tokens_trained"):
            assert ours[metric] == pytest.approx(theirs[metric], abs=1e-5, rel=1e-5), metric
    assert steps[1][-1]["kl_reference_sum"] > 1e-4, "the policy has left its reference"
    summary = json.loads((tmp_path / "many" / "summary.json").read_text())
    for process in ("reward_models", "reward_models@1"):
        assert summary["accounting"][process]["score"] > 0
    assert summary["accounting"]["reference"]["reference"] > 0


MANY_STEPS = {"steps": 40, "lease_s": 3.0, "trainer": {"minibatches": 2, "checkpoint_every": 1}}


def test_a_run_that_loses_its_reward_models_goes_on_by_itself(scored: dict[str, Any], tmp_path: Path) -> None:
    """The controller's next attempt listens where the first did, and the groups' agents bring them to it."""
    out = tmp_path / "run"
    with Launched(tmp_path) as run:
        run.control(written(tmp_path, scored | MANY_STEPS), "--out", str(out), "--remote", "reward_models", "reference")
        for group in ("trainer", "generator-0", "reference", "reward_models"):
            run.join(group, "--max-restarts", "6")
        run.wait_until(lambda: len(list(out.glob("checkpoints/step_*/manifest.json"))) >= 2, "no checkpoints")
        [worker] = run.workers("reward_models")
        os.kill(worker, signal.SIGKILL)
        for job in run.jobs:
            assert run.end(job, timeout_s=300) == 0, run.logs()
    audit(out)
    assert (out / "attempt_1").is_dir()
    prompts = json.loads((out / "summary.json").read_text())["prompts"]
    assert (prompts["trained"], prompts["lost"], prompts["repeated"]) == (40 * 4, 0, 0)


def test_a_run_that_loses_its_reward_models_says_so_and_goes_on_when_resumed(
    scored: dict[str, Any], tmp_path: Path
) -> None:
    """Twice: their process dies, and its agent starts it again; then the agent is killed, and a new one started.

    The other groups' agents stay all the time and join each of the three controllers.
    """
    many_steps = MANY_STEPS | {"max_restarts": 0}
    out, remote = tmp_path / "run", ("--remote", "reward_models", "reference")

    def newest() -> int:
        return max((int(path.parent.name[5:]) for path in out.glob("checkpoints/step_*/manifest.json")), default=0)

    with Launched(tmp_path) as run:
        log = tmp_path / "controller.log"
        run.control(written(tmp_path, scored | many_steps), "--out", str(out), *remote)
        for group in ("trainer", "generator-0", "reference", "reward_models"):
            run.join(group, "--max-restarts", "6")
        for loss in ("process", "agent"):
            before = newest()
            run.wait_until(lambda before=before: newest() >= before + 2, "no checkpoints")  # type: ignore[misc]
            [worker] = run.workers("reward_models")
            os.kill(worker if loss == "process" else run.jobs["reward_models"].pid, signal.SIGKILL)
            assert run.end("controller", timeout_s=60) == 1, run.logs()
            assert "'reward_models' was lost" in log.read_text()
            assert json.loads((out / "summary.json").read_text())["status"] == "failed"
            log.unlink()
            reached = newest()
            assert reached < 40
            run.wait_until(lambda worker=worker: not is_alive(worker), "it outlives its agent")  # type: ignore[misc]
            run.control("--resume", str(out), *remote)
            if loss == "agent":
                run.join("reward_models", "--max-restarts", "6")
        for job in run.jobs:
            assert run.end(job, timeout_s=300) == 0, run.logs()
    audit(out)
    prompts = json.loads((out / "summary.json").read_text())["prompts"]
    assert (prompts["trained"], prompts["lost"], prompts["repeated"]) == (40 * 4, 0, 0)
