"""A generator at a third of its speed or less: the run goes on as the bound allows, loses nothing, and says who waits.

Which is stopped and for how long depends on what the run does, never on how fast the machine is.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from audit import audit, lines
from processes import command_line, descendants

import slipstream

SLOW = 1  # the replica
STEPS = 120  # a stop lets fewer than ten pass; the alarm is of ten reports, of which there is one in each stop
LEAST_STOP_S, MOST_STOP_S = 1.5, 10.0  # the trainer reports once a second; after `lease_s` it would be replaced
WAITS_FOR_IT = 2  # times what went before


class Flight:
    """What is in flight, by `events.jsonl`: a group is written there before its generator hears of it."""

    def __init__(self, run: Path) -> None:
        self._events, self._alarms, self._read = run / "events.jsonl", run / "alarms.jsonl", 0
        self._replicas: dict[int, int] = {}  # ordinal -> replica, until it is scored
        self._unfinished: Counter[int] = Counter()
        self._is_training = False

    def look(self) -> None:
        """Read on, up to the last whole line."""
        if not self._events.exists():
            return
        with self._events.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        for line in map(json.loads, whole.splitlines()):
            self._take(line["event"], line["commands"])

    def _take(self, event: dict, commands: list[dict]) -> None:
        if event["type"] == "CompletionFinished":
            self._unfinished[event["ordinal"]] -= 1
        elif event["type"] == "GroupScored":
            self._replicas.pop(event["ordinal"], None)
        elif event["type"] == "StepDone":
            self._is_training = False
        for command in commands:
            if command["type"] == "StartGroup":
                self._replicas[command["ordinal"]], self._unfinished[command["ordinal"]] = command["replica"], 4
            elif command["type"] == "TrainStep":
                self._is_training = True

    @property
    def of_the_slow(self) -> set[int]:
        """Its groups of which it still samples."""
        return {o for o, replica in self._replicas.items() if replica == SLOW and self._unfinished[o] > 0}

    @property
    def all_wait(self) -> bool:
        """The trainer has nothing to train, and all that is in flight is at the slow replica."""
        return not self._is_training and set(self._replicas) == self.of_the_slow

    @property
    def has_alarm(self) -> bool:
        return self._alarms.exists() and b'"straggler"' in self._alarms.read_bytes()


def slow_down(run: Path, is_over: threading.Event, stops: list[tuple[float, float]]) -> None:
    """Until the alarm: stop the replica in the middle of a group, let it finish what it holds, stop it again.

    A stop lasts `WAITS_FOR_IT` times as long as the loop took from the last one until all wait for this replica.
    """
    flight = Flight(run)

    def await_that(holds) -> bool:
        while not is_over.is_set():
            flight.look()
            if holds():
                return True
            is_over.wait(0.005)
        return False

    await_that(lambda: flight.of_the_slow)
    begun_s = time.monotonic()
    while await_that(lambda: flight.of_the_slow) and not flight.has_alarm:
        (slow,) = (pid for pid in descendants(os.getpid()) if f"generator-{SLOW}" in " ".join(command_line(pid)))
        stopped_s = time.monotonic()
        os.kill(slow, signal.SIGSTOP)
        try:
            await_that(lambda: flight.all_wait)
            if held := flight.of_the_slow:  # else it has finished its group before the signal came
                took_s = time.monotonic() - begun_s
                is_over.wait(min(max(LEAST_STOP_S, WAITS_FOR_IT * took_s), MOST_STOP_S))
        finally:
            os.kill(slow, signal.SIGCONT)
            begun_s = time.monotonic()
            stops.append((stopped_s, begun_s))
        await_that(lambda held=held: not held & flight.of_the_slow)


@pytest.mark.slow
def test_the_run_goes_on_and_tells_of_the_straggler(tiny, tmp_path, stops):
    run, is_over = tmp_path / "run", threading.Event()
    thread = threading.Thread(target=slow_down, args=(run, is_over, stops.setdefault(f"generator-{SLOW}", [])))
    thread.start()
    overrides = tiny | {
        "steps": STEPS,
        "warm_start": {"steps": 0},
        "generator": {"num_slots": 16, "replicas": 2},
        "eval": tiny["eval"] | {"num_prompts": 8},
        "loss": {"skip_no_signal": False},
        "trainer": {"minibatches": 1},
    }
    try:
        result = slipstream.run("quickstart", overrides=overrides, out=run, display=False)
    finally:
        is_over.set()
        thread.join()
    assert result.status == "done"
    fates = audit(result.out)["fates"]
    assert (fates["admitted"], fates["trained"], fates["lost"], fates["repeated"]) == (4 * STEPS, 4 * STEPS, 0, 0)
    summary = json.loads((result.out / "summary.json").read_text())
    alarms = {alarm["name"]: alarm["began"] for alarm in summary["alarms"]}
    assert "straggler" in alarms
    started: Counter[int] = Counter()
    for line in lines(result.out / "events.jsonl"):
        if (line["event"]["type"], line["event"].get("step")) == ("StepDone", alarms["straggler"]):
            break  # it is as fast as the other from here on
        started.update(command["replica"] for command in line["commands"] if command["type"] == "StartGroup")
    assert 0 < started[SLOW] < 0.4 * started.total()  # the freest replica gets the next group
    waits = summary["accounting"]["trainer"]
    assert waits["wait_straggler"] > waits["forward_backward"]
    assert summary["staleness"]["max"] <= 2
