"""A run of torchrun jobs that meet over loopback: with keys, and with a generator that is killed in between."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time

import pytest
from audit import audit
from launching import Launched
from listeners import listening
from processes import is_alive

from slipstream.core.recipes import config_toml, resolve


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_generator_is_started_again_by_its_agent_and_joins_at_the_newest_version(tiny, tmp_path):
    recipe = tmp_path / "tiny.toml"
    own_reference = {"coef": 0.05, "executor": "own"}
    overrides = tiny | {"steps": 9, "rewards": {"num_workers": 1}, "kl": own_reference, "warm_start": {"steps": 5}}
    recipe.write_text(config_toml(resolve("quickstart", overrides)))
    out = tmp_path / "run"
    events = out / "events.jsonl"

    def count(kind: str) -> int:
        return events.read_text().count(f'"type":"{kind}"') if events.exists() else 0

    with Launched(tmp_path) as run:
        run.control(str(recipe), "--out", str(out), "--remote", "reference")
        for group in ("trainer", "reference", "generator-0"):
            run.join(group)
        run.wait_until(lambda: count("StepDone") >= 2, "no steps")
        [worker] = run.workers("generator-0")
        os.kill(worker, signal.SIGKILL)
        run.wait_until(lambda: count("ReplicaLost") == 1, "the loss was not noticed")
        for job in run.jobs:
            assert run.end(job) == 0, run.logs()
    audit(out)
    summary = json.loads((out / "summary.json").read_text())
    prompts = summary["prompts"]
    assert summary["status"] == "done"
    assert summary["accounting"]["reference"]["reference"] > 0
    assert prompts["trained"] == 9 * 4
    assert prompts["lost"] == prompts["repeated"] == 0
    assert run.key.stat().st_mode & 0o077 == 0
    secret = run.key.read_text().strip()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != run.key]
    assert not [path for path in written if secret in path.read_text(errors="replace")], "the key has leaked"
    kinds = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    lost = next(i for i, event in enumerate(kinds) if event["type"] == "ReplicaLost")
    healed = next(event for event in kinds[lost:] if event["type"] == "Swapped")
    assert healed["version"] >= sum(event["type"] == "StepDone" for event in kinds[: kinds.index(healed)]) - 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_told_to_end_with_all_its_groups_a_run_saves_its_last_step(tiny, tmp_path):
    """What `kubectl delete jobs` and a preempted partition do: each command gets SIGTERM, nobody gets it first."""
    recipe = tmp_path / "tiny.toml"
    patient = {"shutdown_grace_s": 100.0, "deadline_s": 300.0, "lease_s": 300.0}
    overrides = tiny | patient | {"steps": 100_000, "rewards": {"num_workers": 1}, "warm_start": {"steps": 0}}
    recipe.write_text(config_toml(resolve("quickstart", overrides)))
    out = tmp_path / "run"
    metrics = out / "metrics.jsonl"

    with Launched(tmp_path) as run:
        run.control(str(recipe), "--out", str(out))
        for group in ("trainer", "generator-0"):
            run.join(group, "--shutdown-grace-s", "100")
        run.wait_until(lambda: has_trained(metrics, 2), "no steps", timeout_s=300)
        workers = [pid for group in ("trainer", "generator-0") for pid in run.workers(group)]
        for job in run.jobs.values():
            job.send_signal(signal.SIGTERM)
        assert {name: run.end(name) for name in run.jobs} == dict.fromkeys(run.jobs, 143), run.logs()
        assert not [pid for pid in workers if is_alive(pid)]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert (out / "checkpoints" / f"step_{summary['steps']}" / "manifest.json").is_file(), run.logs()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_replica_of_two_ranks_joins_the_controller_that_is_started_again(tiny, tmp_path):
    """One of its ranks comes to where they meet much sooner than the other: it is not to look where that was before."""
    recipe = tmp_path / "tiny.toml"
    two = {"generator": {"num_slots": 16, "tensor_parallel": 2}, "trainer": {"minibatches": 2, "checkpoint_every": 1}}
    overrides = tiny | two | {"steps": 6, "lease_s": 5.0, "rewards": {"num_workers": 1}, "warm_start": {"steps": 0}}
    recipe.write_text(config_toml(resolve("quickstart", overrides)))
    out = tmp_path / "run"

    with Launched(tmp_path) as run:
        run.control(str(recipe), "--out", str(out))
        for group in ("trainer", "generator-0"):
            run.join(group)
        run.wait_until(lambda: has_trained(out / "metrics.jsonl", 3), "no steps")
        before = set(run.workers("generator-0"))
        run.kill("controller")
        run.wait_until(lambda: len(set(run.workers("generator-0")) - before) == 2, "its agent does not start it again")
        late, early = run.workers("generator-0")  # rank 0 is started first, and the others connect to it
        os.kill(late, signal.SIGSTOP)
        try:
            run.control("--resume", str(out))
            run.wait_until(lambda: listening(early), "the first rank does not come")
            time.sleep(3.0)  # it would try three times in vain, and end
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(late, signal.SIGCONT)
        for job in run.jobs:
            assert run.end(job) == 0, run.logs()
    audit(out)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 6)
    assert summary["prompts"]["lost"] == summary["prompts"]["repeated"] == 0
    assert (tmp_path / "generator-0.log").read_text().count("failed (exitcode") == 1, "when the controller was killed"


def has_trained(metrics, steps):
    return metrics.exists() and metrics.read_text().count('"reward_mean"') >= steps


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_generator_that_leaves_with_notice_hands_over_and_another_takes_its_place(tiny, tmp_path):
    """A machine that is taken away: SIGTERM, then up to 30 s. Its command is started again elsewhere, later."""
    recipe = tmp_path / "tiny.toml"
    long = {"num_slots": 16, "replicas": 2, "max_new_tokens": 48}  # an untrained model seldom ends by itself
    overrides = tiny | {"steps": 100_000, "generator": long, "rewards": {"num_workers": 1}, "warm_start": {"steps": 0}}
    recipe.write_text(config_toml(resolve("quickstart", overrides | {"loss": {"skip_no_signal": False}})))
    out = tmp_path / "run"
    events = out / "events.jsonl"

    def count(kind: str) -> int:
        return events.read_text().count(f'"type":"{kind}"') if events.exists() else 0

    with Launched(tmp_path) as run:
        run.control(str(recipe), "--out", str(out))
        for group in ("trainer", "generator-0", "generator-1"):
            run.join(group)
        run.wait_until(lambda: count("StepDone") >= 2, "no steps")
        run.jobs["generator-1"].send_signal(signal.SIGTERM)
        assert run.end("generator-1", timeout_s=30.0) == 143, run.logs()
        run.wait_until(lambda: count("ReplicaLost") == 1, "nobody was told that it left")
        steps = count("StepDone")
        run.wait_until(lambda: count("StepDone") > steps, "the run does not go on")
        run.join("generator-1")
        run.wait_until(lambda: is_back(events), "it does not sample again")
        run.jobs["controller"].send_signal(signal.SIGINT)
        assert run.end("controller") == 130, run.logs()
        assert run.end("trainer") == 0, run.logs()
    audit(out)
    summary = json.loads((out / "summary.json").read_text())
    prompts = summary["prompts"]
    assert prompts["trained"] == summary["steps"] * 4
    assert prompts["lost"] == prompts["repeated"] == 0
    told = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    left = next(i for i, event in enumerate(told) if event["type"] == "ReplicaLost")
    restored = [event.get("num_restored", 0) for event in told[left:] if event["type"] == "CompletionFinished"]
    assert sum(restored) > 0, "all that it had begun was sampled again"
    assert "generator-1 has left" in (tmp_path / "controller.log").read_text()


def is_back(events):
    """Whether a replica that was lost has finished completions since."""
    told = [json.loads(line)["event"] for line in events.read_text().splitlines(keepends=True) if line.endswith("\n")]
    left = next(i for i, event in enumerate(told) if event["type"] == "ReplicaLost")
    return any(e["type"] == "CompletionFinished" and e["replica"] == told[left]["replica"] for e in told[left:])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_generator_joins_a_running_run_samples_leaves_and_its_number_is_free_again(tiny, tmp_path):
    recipe = tmp_path / "tiny.toml"
    pool = {"num_slots": 16, "replicas": 1, "max_replicas": 2, "max_new_tokens": 48}
    overrides = tiny | {"steps": 100_000, "generator": pool, "rewards": {"num_workers": 1}, "warm_start": {"steps": 0}}
    recipe.write_text(config_toml(resolve("quickstart", overrides | {"loss": {"skip_no_signal": False}})))
    out = tmp_path / "run"
    events = out / "events.jsonl"

    def finished_by_1() -> int:
        return sum(e["type"] == "CompletionFinished" and e["replica"] == 1 for e in told(events))

    with Launched(tmp_path) as run:
        run.control(str(recipe), "--out", str(out))
        for group in ("trainer", "generator-0"):
            run.join(group)
        run.wait_until(lambda: has_trained(out / "metrics.jsonl", 2), "it waits for who may join later")
        run.join("generator", "--join", name="second")
        run.wait_until(lambda: finished_by_1() > 0, "it does not sample")
        run.join("generator", "--join", name="third")
        assert run.end("third") == 2, run.logs()
        run.jobs["second"].send_signal(signal.SIGTERM)
        assert run.end("second", timeout_s=30.0) == 143, run.logs()
        run.wait_until(lambda: any(e["type"] == "ReplicaLost" for e in told(events)), "nobody was told that it left")
        before = finished_by_1()
        run.join("generator", "--join", name="fourth")
        run.wait_until(lambda: finished_by_1() > before, "its number is not free, or it does not sample")
        run.jobs["controller"].send_signal(signal.SIGINT)
        assert run.end("controller") == 130, run.logs()
        assert [run.end(name) for name in ("trainer", "generator-0", "fourth")] == [0, 0, 0], run.logs()
    audit(out)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["prompts"]["trained"] == summary["steps"] * 4
    assert summary["prompts"]["lost"] == summary["prompts"]["repeated"] == 0
    assert "joining as generator-1" in (tmp_path / "fourth.log").read_text()
    assert "max_replicas = 2" in (tmp_path / "third.log").read_text()
    loop = summary["accounting"]["generator-1"]
    assert loop["absent"] > 0
    assert loop["decode"] > 0


def told(events):
    """The events so far; of a line that is being written the end is missing."""
    lines = events.read_text().splitlines(keepends=True) if events.exists() else []
    return [json.loads(line)["event"] for line in lines if line.endswith("\n")]
