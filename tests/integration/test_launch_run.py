"""A run of torchrun jobs that meet over loopback: with keys, and with a generator that is killed in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from audit import audit

from slipstream.core.recipes import config_toml, resolve

LAUNCH = (sys.executable, "-m", "slipstream.cli", "launch")


def start(log: Path, *options: str) -> subprocess.Popen:
    with log.open("wb") as file:
        return subprocess.Popen(
            [*LAUNCH, *options], stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def wait_until(is_so, what: str, logs: Path, *, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, what + "".join(f"\n{p}\n{p.read_text()}" for p in logs.glob("*.log"))
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_killed_generator_is_started_again_by_its_agent_and_joins_at_the_newest_version(tiny, tmp_path):
    recipe = tmp_path / "tiny.toml"
    own_reference = {"coef": 0.05, "executor": "own"}
    overrides = tiny | {"steps": 9, "rewards": {"num_workers": 1}, "kl": own_reference, "warm_start": {"steps": 5}}
    recipe.write_text(config_toml(resolve("quickstart", overrides)))
    key, address, out = tmp_path / "key", tmp_path / "address", tmp_path / "run"
    events = out / "events.jsonl"

    def count(kind: str) -> int:
        return events.read_text().count(f'"type":"{kind}"') if events.exists() else 0

    common = ("--controller", str(address), "--key-file", str(key), "--threads", "1")
    jobs = [
        start(
            tmp_path / "controller.log",
            *(str(recipe), "--group", "controller", "--key-file", str(key)),
            *("--address-file", str(address), "--out", str(out), "--remote", "reference"),
        )
    ]
    try:
        wait_until(address.exists, "the controller does not listen", tmp_path)
        jobs.append(start(tmp_path / "trainer.log", "--group", "trainer", *common))
        jobs.append(start(tmp_path / "reference.log", "--group", "reference", *common))
        jobs.append(start(tmp_path / "generator-0.log", "--group", "generator-0", *common))
        wait_until(lambda: count("StepDone") >= 2, "no steps", tmp_path)
        [worker] = children_of(jobs[-1].pid)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: count("ReplicaLost") == 1, "the loss was not noticed", tmp_path)
        for job in jobs:
            assert job.wait(120) == 0, "".join(path.read_text() for path in tmp_path.glob("*.log"))
    finally:
        for job in jobs:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    audit(out)
    summary = json.loads((out / "summary.json").read_text())
    prompts = summary["prompts"]
    assert summary["status"] == "done"
    assert summary["accounting"]["reference"]["reference"] > 0
    assert prompts["trained"] == 9 * 4
    assert prompts["lost"] == prompts["repeated"] == 0
    assert key.stat().st_mode & 0o077 == 0
    secret = key.read_text().strip()
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path != key]
    assert not [path for path in written if secret in path.read_text(errors="replace")], "the key has leaked"
    kinds = [json.loads(line)["event"] for line in events.read_text().splitlines()]
    lost = next(i for i, event in enumerate(kinds) if event["type"] == "ReplicaLost")
    healed = next(event for event in kinds[lost:] if event["type"] == "Swapped")
    assert healed["version"] >= sum(event["type"] == "StepDone" for event in kinds[: kinds.index(healed)]) - 1
