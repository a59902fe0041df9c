"""A generator at a tenth of its speed: the run goes on as the bound allows, loses nothing, and says who waits."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter

import pytest
from audit import audit, lines
from processes import command_line, descendants

import slipstream


@pytest.mark.slow
def test_the_run_goes_on_and_tells_of_the_straggler(tiny, tmp_path):
    is_over = threading.Event()
    metrics = tmp_path / "run" / "metrics.jsonl"

    def slow_down():
        """0.2 s of life in every 2 s, as a machine that others use: SIGSTOP and SIGCONT."""
        slow = []
        while not slow and not is_over.wait(0.5):
            if metrics.exists() and metrics.stat().st_size:  # it is past its start
                slow = [pid for pid in descendants(os.getpid()) if "generator-1" in " ".join(command_line(pid))]
        while slow and not is_over.is_set():
            try:
                os.kill(slow[0], signal.SIGSTOP)
                is_over.wait(1.8)
                os.kill(slow[0], signal.SIGCONT)
            except ProcessLookupError:
                return
            is_over.wait(0.2)

    thread = threading.Thread(target=slow_down)
    thread.start()
    overrides = tiny | {
        "steps": 40,
        "warm_start": {"steps": 0},
        "generator": {"num_slots": 16, "replicas": 2},
        "eval": tiny["eval"] | {"num_prompts": 8},
        "loss": {"skip_no_signal": False},
        "trainer": {"minibatches": 1},
    }
    try:
        result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    finally:
        is_over.set()
        thread.join()
    assert result.status == "done"
    fates = audit(result.out)["fates"]
    assert (fates["admitted"], fates["trained"], fates["lost"], fates["repeated"]) == (160, 160, 0, 0)
    started = Counter(
        command["replica"]
        for line in lines(result.out / "events.jsonl")
        for command in line["commands"]
        if command["type"] == "StartGroup"
    )
    assert 0 < started[1] < 0.4 * started.total()  # the freest replica gets the next group
    summary = json.loads((result.out / "summary.json").read_text())
    waits = summary["accounting"]["trainer"]
    assert waits["wait_straggler"] > waits["forward_backward"]
    assert "straggler" in {alarm["name"] for alarm in summary["alarms"]}
    assert summary["staleness"]["max"] <= 2
