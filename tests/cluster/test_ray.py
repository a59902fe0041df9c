"""A run on a Ray cluster of two machines: a lost machine comes back, and a lost controller goes on elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import SLIPSTREAM, Job, Machine, are_possible, two_machines, wait_until

pytest.importorskip("ray", reason="make test-cluster installs it")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not are_possible(), reason="network namespaces need Linux, root and iproute2"),
    pytest.mark.timeout(900),
]

RAY = str(Path(sys.executable).with_name("ray"))
QUIET = ("--disable-usage-stats", "--num-gpus", "0", "--block")


@contextmanager
def ray_cluster(near: Machine, far: Machine) -> Iterator[Job]:
    """Ray on both machines; near has room for all groups but the second replica. Yields that of the far one."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # names of sockets are short
    try:
        head = [RAY, "start", "--head", "--port", "6379", "--node-ip-address", near.address, "--num-cpus", "19"]
        near.start([*head, "--temp-dir", folder, "--include-dashboard", "false", *QUIET], "head.log")
        yield join_ray(near, far)
    finally:
        for machine in (far, near):
            for pid in machine.processes():
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def join_ray(near: Machine, far: Machine) -> Job:
    address = f"{near.address}:6379"
    wait_until(lambda: is_open(near), "Ray listens", timeout_s=120)
    return far.start(
        [RAY, "start", "--address", address, "--node-ip-address", far.address, "--num-cpus", "8", *QUIET], "far.log"
    )


def is_open(near: Machine) -> bool:
    asked = ["ip", "netns", "exec", near.name, "bash", "-c", f"exec 3<>/dev/tcp/{near.address}/6379"]
    return subprocess.run(asked, capture_output=True).returncode == 0


def steps(run: Path) -> int:
    events = run / "events.jsonl"
    return events.read_text().count('"StepDone"') if events.exists() else 0


def lost(run: Path) -> int:
    return (run / "events.jsonl").read_text().count('"ReplicaLost"')


def commands(machine: Machine, group: str) -> list[int]:
    """Processes of `slipstream launch` for `group` on a machine."""
    found = []
    for pid in machine.processes():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") if Path(f"/proc/{pid}").exists() else []
        if group.encode() in words and b"launch" in words:
            found.append(pid)
    return found


def test_a_lost_machine_comes_back_and_a_lost_controller_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with two_machines(tmp_path) as (near, far, _), ray_cluster(near, far) as ray_there:
        options = ["--steps", "60", "--generator.replicas", "2", "--warm-start.steps", "20", "--eval.every", "0"]
        options += ["--eval.num-prompts", "20", "--prompts.num-eval", "20", "--trainer.checkpoint-every", "5"]
        asked = [*SLIPSTREAM, "launch", "quickstart", "--ray", f"{near.address}:6379", "--out", str(out), *options]
        driver = near.start(asked, "driver.log")

        def reaches(step: int) -> None:
            def is_so() -> bool:
                assert driver.process.poll() is None, driver.tail()
                return steps(out) >= step

            wait_until(is_so, f"step {step}", timeout_s=300)

        reaches(3)
        wait_until(lambda: len(commands(far, "generator-1")) == 1, "a replica is far", timeout_s=120)
        ray_there.kill()
        for pid in far.processes():
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: lost(out) == 1, "the controller hears of the loss", timeout_s=60)
        reaches(steps(out) + 3)  # without it
        join_ray(near, far)
        wait_until(lambda: len(commands(far, "generator-1")) == 1, "Ray starts the replica again", timeout_s=200)

        [controller] = commands(near, "controller")
        os.kill(controller, signal.SIGKILL)
        wait_until(lambda: commands(near, "controller") not in ([], [controller]), "a new controller", timeout_s=120)
        assert driver.wait(500) == 0
    summary = json.loads((out / "summary.json").read_text())
    prompts = summary["prompts"]
    assert (summary["status"], summary["steps"], prompts["lost"], prompts["repeated"]) == ("done", 60, 0, 0)
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
