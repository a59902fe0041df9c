"""How runs end: on Ctrl-C with a checkpoint, on a death with a name, and on from there with --resume."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit import audit
from processes import children, command_line, is_alive
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trace_audit import audit_trace

import slipstream
from slipstream.controller.build import default_pipeline
from slipstream.controller.controller import Controller
from slipstream.core.errors import ConfigError, ExecutorDied
from slipstream.core.executor import Executor
from slipstream.core.run_lock import LOCK_FILE
from slipstream.core.run_log import read_metrics
from slipstream.core.types import GroupScored, StepDone

START_DEADLINE_S = 400.0
ENDS_WITHIN_S = 90.0


def start(tiny: dict, out: Path, **more) -> subprocess.Popen:
    """A run in a process of its own, as a user's script would start it."""
    tables = json.dumps(tiny | more)
    call = f"slipstream.run('quickstart', overrides=json.loads({tables!r}), out={str(out)!r})"
    script = f"import json, slipstream; {call}"
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def await_steps(out: Path, steps: int, process: subprocess.Popen) -> None:
    """Until `steps` steps are in the metrics; the run's own files are the event."""
    deadline = time.monotonic() + START_DEADLINE_S
    path = out / "metrics.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().count('"reward_mean"') >= steps:
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no {steps} steps within {START_DEADLINE_S} s")


def executors_of(pid: int) -> dict[str, int]:
    """Executor name -> pid of the processes a run started."""
    found = {}
    for child in children(pid):
        command = command_line(child)
        if "slipstream.controller.process" in command:
            found[Path(command[-1]).stem] = child
    return found


def run_with(
    strike: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    tables: dict[str, Any],
    out: Path,
    *,
    within_s: float = ENDS_WITHIN_S,
    **more: Any,
) -> dict[str, Any]:
    """The summary of a run whose controller, in this process, calls `strike` with each event before it handles it.

    AssertionError once `within_s` have passed since its first step.
    """
    handle, began_s = Controller._handle, list[float]()

    def check_time() -> None:
        assert not began_s or time.monotonic() - began_s[0] < within_s, f"no end within {within_s} s of the first step"

    def striking(self: Controller, event: Any) -> None:
        if isinstance(event, StepDone) and not began_s:
            began_s.append(time.monotonic())
        check_time()
        strike(event)
        handle(self, event)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "_handle", striking)
        try:
            slipstream.run("quickstart", overrides=tables, out=out, **{"display": False, **more})
        finally:
            check_time()
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@pytest.mark.slow
def test_interrupt_then_resume_trains_the_same_groups_as_an_undisturbed_run(tiny, tmp_path):
    sync = tiny | {"max_staleness": 0, "weight_update": "between_batches", "steps": 30}
    process = start(sync, tmp_path / "run")
    await_steps(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 3 <= summary["steps"] < 30
    result = slipstream.run("quickstart", resume=tmp_path / "run", display=False)
    assert result.status == "done"
    assert result.summary["steps"] == 30

    whole = slipstream.run("quickstart", overrides=sync | {"host": "inline"}, out=tmp_path / "whole", display=False)
    ours, theirs = ((run / "model" / "model.safetensors").read_bytes() for run in (result.out, whole.out))
    assert ours == theirs, "at staleness 0 a resumed run equals an uninterrupted one bit for bit"
    assert audit(result.out)["fates"] == audit(whole.out)["fates"]


@pytest.mark.slow
def test_what_is_decided_between_the_last_step_and_a_checkpoint_stays_decided(tiny, tmp_path, monkeypatch):
    """Interrupted just after a group without signal was replaced: files and checkpoint agree that it was."""
    sync = tiny | {"max_staleness": 0, "weight_update": "between_batches", "steps": 8, "host": "inline"}
    tracked = sync | {"trackers": {"names": ["tensorboard"]}}
    decide = Controller._decide

    def interrupting(self, *events):
        decide(self, *events)
        is_skip = isinstance(events[0], GroupScored) and not events[0].has_signal
        if is_skip and self.schedule.steps_done >= 2 and not self.schedule.training:
            self.interrupts.number = signal.SIGINT

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "_decide", interrupting)
        interrupted = slipstream.run("quickstart", overrides=tracked, out=tmp_path / "run", display=False)
    assert interrupted.status == "interrupted"
    assert slipstream.run("quickstart", resume=tmp_path / "run", display=False).status == "done"
    whole = slipstream.run("quickstart", overrides=sync, out=tmp_path / "whole", display=False)
    assert audit(tmp_path / "run")["fates"] == audit(whole.out)["fates"]
    assert audit_trace(tmp_path / "run")["attempts"] == 2
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    rewards = [(event.step, np.float32(event.value)) for event in found.Scalars("run/reward")]
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "reward" in line]
    assert rewards == [(line["step"], np.float32(line["reward"])) for line in steps], (
        "a tracker takes back what a resume does"
    )


@pytest.mark.parametrize(
    "victim", ["trainer", *(pytest.param(victim, marks=pytest.mark.slow) for victim in ("generator-0", "rewards"))]
)
def test_without_restarts_the_death_of_any_process_ends_the_run_within_seconds_and_names_it(
    victim, tiny, tmp_path, monkeypatch
):
    executors = {}

    def killing(event):
        if isinstance(event, StepDone) and not executors:
            executors.update(executors_of(os.getpid()))
            os.kill(executors[victim], signal.SIGKILL)

    endless = tiny | {"steps": 10_000, "max_restarts": 0}
    with pytest.raises(ExecutorDied, match=f"the process of '{victim}' ended") as told:
        run_with(killing, monkeypatch, endless, tmp_path / "run", within_s=30)
    told.match("SIGKILL")
    assert len(executors) == 3
    assert not any(is_alive(pid) for pid in executors.values())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_without_restarts_the_death_of_a_process_ends_the_program_too(tiny, tmp_path):
    process = start(tiny, tmp_path / "run", steps=10_000, max_restarts=0)
    await_steps(tmp_path / "run", 1, process)
    executors = executors_of(process.pid)
    os.kill(executors["trainer"], signal.SIGKILL)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the process of 'trainer' ended" in output
    assert "SIGKILL" in output
    assert not any(is_alive(pid) for pid in executors.values())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_no_child_outlives_a_killed_controller(tiny, tmp_path):
    soon = {"warm_start": {"steps": 0}, "loss": {"skip_no_signal": False}, "eval": tiny["eval"] | {"num_prompts": 4}}
    process = start(tiny, tmp_path / "run", steps=10_000, **soon)
    await_steps(tmp_path / "run", 1, process)
    executors = executors_of(process.pid)
    os.kill(executors["trainer"], signal.SIGSTOP)
    process.kill()
    process.communicate(timeout=10)
    assert is_locked(tmp_path / "run"), "no other run begins while a process of this one may write"
    os.kill(executors["trainer"], signal.SIGCONT)
    deadline = time.monotonic() + 15
    while any(is_alive(pid) for pid in executors.values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in executors.values())
    while is_locked(tmp_path / "run") and time.monotonic() < deadline:
        time.sleep(0.05)  # the system closes a process's files after its last thread
    assert not is_locked(tmp_path / "run")


def is_locked(out: Path) -> bool:
    with (out / LOCK_FILE).open("rb") as lock:
        found = fcntl.fcntl(lock, fcntl.F_OFD_GETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return struct.unpack("hhqqi0q", found)[0] != fcntl.F_UNLCK


def test_an_executor_that_raises_is_named_with_its_error(tiny, tmp_path):
    bad = tiny | {"rewards": {"terms": [{"function": "no_such_module_anywhere:reward"}]}}
    with pytest.raises((ConfigError, ExecutorDied), match="no_such_module_anywhere"):
        slipstream.run("quickstart", overrides=bad, out=tmp_path / "run", display=False)


def test_resuming_nothing_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="is no run"):
        slipstream.run("quickstart", resume=tmp_path)


def test_a_start_that_fails_inline_says_why_and_closes_what_it_opened(tiny, tmp_path):
    """The reward's own error, not one of the executors that never came up."""
    closed = []

    class Refusing(Executor):
        inputs, outputs = ("completions",), ("rollouts",)
        is_finished = False

        def init(self, context):
            raise ConfigError("this reward cannot start", got="nothing")

        def step(self):
            return False

        def close(self):
            closed.append("rewards")

    def pipeline(config):
        default = default_pipeline(config)
        nodes = [
            replace(node, factory=Refusing, kwargs={}) if node.name == "rewards" else node for node in default.nodes
        ]
        return replace(default, nodes=tuple(nodes))

    with pytest.raises(ConfigError, match="this reward cannot start"):
        slipstream.run(
            "quickstart", overrides=tiny | {"host": "inline"}, out=tmp_path / "run", pipeline=pipeline, display=False
        )
    assert closed == ["rewards"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
