"""What the adversary does follows from its seed alone; what it hits goes on afterwards."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

from adversary import KINDS, VICTIMS, Adversary, Fault, Growth, Lines, plan
from chaos_run import recovery_times
from processes import state


def first(seed: int, run: int, count: int = 200) -> list[Fault]:
    return list(itertools.islice(plan(seed, run)[0], count))


def test_a_plan_is_a_function_of_its_seed_and_run():
    assert first(0, 0) == first(0, 0)
    assert plan(3, 1)[1] == plan(3, 1)[1]
    assert len({tuple(first(seed, run, 5)) for seed in range(3) for run in range(3)}) == 9


def test_a_plan_has_every_kind_and_every_victim():
    faults = first(0, 0)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.victim for fault in faults} == set(VICTIMS)


def test_growth_counts_what_is_appended_also_after_a_cut(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text("a\nb\n")
    growth = Growth(path)
    assert growth.look() == 0
    path.write_text("a\nb\nc\n")
    assert growth.look() == 1
    path.write_text("a\n")
    assert growth.look() == 1
    path.write_text("a\nd\ne\n")
    assert growth.look() == 3


def parent(role: str) -> subprocess.Popen[bytes]:
    """A process with an executor below it."""
    code = (
        "import subprocess, sys\n"
        f"words = [sys.executable, '-c', 'input()', 'slipstream.controller.process', '/{role}.json']\n"
        "child = subprocess.Popen(words, stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "print(child.wait(), flush=True)\n"
        "input()"
    )
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_who_is_stopped_goes_on_when_it_is_over_and_who_is_killed_is_dead(tmp_path):
    faults = [Fault("stop", "generator", Lines(1), 60.0), Fault("kill", "generator", Lines(1))]
    events = tmp_path / "events.jsonl"
    events.write_text("")
    with parent("generator-1") as run:
        child = int(run.stdout.readline())
        adversary = Adversary(tmp_path, iter(faults), None, lambda: run.pid, lambda: False)
        adversary.begin()
        _until(lambda: adversary.strikes or grow(events))
        _until(lambda: state(child) == "T")
        _until(lambda: len(adversary.strikes) == 2 or grow(events))
        assert int(run.stdout.readline()) == -9
        adversary.end()
        assert [(strike.role, strike.pid) for strike in adversary.strikes] == [("generator-1", child)] * 2
        run.stdin.close()


def test_the_last_fault_lasts_as_long_as_it_was_to(tmp_path):
    events = tmp_path / "events.jsonl"
    events.write_text("")
    with parent("trainer") as run:
        child = int(run.stdout.readline())
        adversary = Adversary(tmp_path, iter([Fault("stop", "trainer", Lines(1), 0.5)]), None, lambda: run.pid, bool)
        adversary.begin()
        _until(lambda: adversary.strikes or grow(events))
        _until(lambda: state(child) == "T")
        _until(lambda: state(child) != "T")
        assert time.monotonic() - adversary.strikes[0].time_s >= 0.5
        adversary.end()
        run.kill()


def test_ending_lets_everybody_go_on(tmp_path):
    events = tmp_path / "events.jsonl"
    events.write_text("")
    with parent("trainer") as run:
        child = int(run.stdout.readline())
        adversary = Adversary(tmp_path, iter([Fault("stop", "trainer", Lines(1), 60.0)]), None, lambda: run.pid, bool)
        adversary.begin()
        _until(lambda: adversary.strikes or grow(events))
        adversary.end()
        _until(lambda: state(child) in ("R", "S"))
        run.kill()


def grow(path) -> None:
    with path.open("a") as file:
        file.write("line\n")


def _until(is_so) -> None:
    deadline_s = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_recovery_is_until_a_step_on_a_group_that_was_scored_after_the_fault(tmp_path):
    """A step that was under way, or whose groups all lay ready, proves nothing."""
    told = [
        (1.0, {"type": "GroupScored", "ordinal": 0}, []),
        (2.0, {"type": "GroupScored", "ordinal": 1}, [{"type": "TrainStep", "step": 0, "ordinals": [0]}]),
        (4.0, {"type": "StepDone", "step": 0}, [{"type": "TrainStep", "step": 1, "ordinals": [1]}]),
        (6.0, {"type": "StepDone", "step": 1}, []),
        (7.0, {"type": "GroupScored", "ordinal": 2}, [{"type": "TrainStep", "step": 2, "ordinals": [2]}]),
        (9.0, {"type": "StepDone", "step": 2}, []),
    ]
    lines = (
        f'{{"seq": {n}, "time_s": {at}, "event": {event}, "commands": {commands}}}'.replace("'", '"')
        for n, (at, event, commands) in enumerate(told)
    )
    (tmp_path / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert recovery_times(tmp_path, [3.0, 0.5, 8.0], 20.0) == [6.0, 3.5, 12.0]
