"""Runs of episodes whose processes are killed in the middle of them: all go on, each group is trained once."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest
from processes import children, command_line, descendants
from test_endings import await_steps, executors_of, run_with, start
from test_restarts_run import check_whole

import slipstream
from slipstream.core.processes import open_pidfd
from slipstream.core.run_log import RolloutLine, read_rollouts
from slipstream.core.types import StepDone

SOURCE = Path(__file__).with_name("turn_environments.py")
STEPS = 10


@pytest.fixture
def episodes(tiny: dict[str, Any]) -> dict[str, Any]:
    """Episodes of up to four turns; every environment takes a while to answer, so that some always wait for one."""
    return tiny | {
        "environment": {"class_path": f"{SOURCE}:Unpunctual", "max_turns": 4, "max_episode_tokens": 40},
        "rewards": {"terms": []},
        "warm_start": {"steps": 0},
        "loss": {"skip_no_signal": False},
        "weight_update": "in_flight",
        "max_staleness": 2,
        "generator": {"num_slots": 8, "max_new_tokens": 8},
    }


def worker() -> int:
    """The process that runs the environments of a run in this process: the last one below its executor."""
    below = descendants(executors_of(os.getpid())["environments"])
    return next(pid for pid in below if "slipstream.environments.worker" in command_line(pid) and not children(pid))


def rollouts(out: Path) -> list[RolloutLine]:
    """Those of a finished run: every episode whole, and as its environment has it."""
    found = list(read_rollouts(out / "rollouts.jsonl"))
    assert all(line.failure is None and line.episode is not None for line in found)
    for line in found:
        assert line.episode.turns == len(line.episode.turn_rewards) >= 1
        assert [version for _, version in line.versions if version >= 0] == sorted(
            version for _, version in line.versions if version >= 0
        ), "versions ascend"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "environments", "generator-1"])
def test_one_is_killed_and_the_run_goes_on(victim, episodes, tmp_path, monkeypatch):
    def killing(event: Any) -> None:
        if isinstance(event, StepDone) and event.step == 0:
            os.kill(worker() if victim == "worker" else executors_of(os.getpid())[victim], signal.SIGKILL)

    out = tmp_path / "run"
    tables = episodes | {"steps": 6, "generator": episodes["generator"] | {"replicas": 2}}
    summary = run_with(killing, monkeypatch, tables, out)
    check_whole(summary, out, steps=6)
    assert summary["restarts"] == ({} if victim == "worker" else {victim: 1})
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert len(rollouts(out)) == 6 * 16


@pytest.mark.slow
def test_the_controller_is_killed_and_a_resume_goes_on(episodes, tmp_path):
    """Episodes that were open begin again: they belong to no step."""
    out = tmp_path / "run"
    process = start(episodes, out, steps=STEPS, trainer={"minibatches": 2, "checkpoint_every": 2})
    await_steps(out, 3, process)
    below = descendants(process.pid)
    process.kill()
    process.communicate()
    for pid in below:  # they end by themselves: nobody is left to hold the folder
        wait_for_end(pid)
    result = slipstream.run("quickstart", resume=out, display=False)
    assert (result.status, result.summary["steps"]) == ("done", STEPS)
    prompts = result.summary["prompts"]
    assert (prompts["lost"], prompts["repeated"], prompts["pending"]) == (0, 0, 0)
    seen = [(line.ordinal, line.sample) for line in rollouts(out)]
    assert len(set(seen)) == len(seen) == STEPS * 16


def wait_for_end(pid: int, within_s: float = 30.0) -> None:
    """Wait until a process that is no child of this one has ended."""
    try:
        fd = open_pidfd(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], within_s)[0], f"process {pid} outlived its controller"
    finally:
        os.close(fd)
