"""kill -9 of the controller in any phase: soon nobody below it is left, however busy. Orphans are adopted here."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import command_line, descendants, is_alive

from slipstream.core.processes import open_pidfd

END_DEADLINE_S = 60.0
START_DEADLINE_S = 400.0
PR_SET_CHILD_SUBREAPER = 36
STUCK = """
from dataclasses import replace
from stuck_executors import Stuck
from slipstream.controller.build import default_pipeline
def pipeline(config):
    default = default_pipeline(config)
    stuck = lambda node: replace(node, factory=Stuck, kwargs={"where": where, "mark": mark})
    return replace(default, nodes=tuple(stuck(node) if node.name == "rewards" else node for node in default.nodes))
"""


@pytest.fixture(autouse=True)
def others() -> Iterator[frozenset[int]]:
    """The processes below this one before the test; orphans come to it from here on."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield frozenset(descendants(os.getpid()))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(others: frozenset[int]) -> Iterator[Start]:
    """Starts runs. One that still runs at the end, because its test has failed, is killed with all that it has started:
    the next test finds none of it."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(call: str, prelude: str = "") -> subprocess.Popen[bytes]:
        search_path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        script = f"import slipstream\n{prelude}\nslipstream.run('quickstart', {call}, display=False)"
        command = [sys.executable, "-c", script]
        started.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": search_path}))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(END_DEADLINE_S)
            deadline_s = time.monotonic() + END_DEADLINE_S
            while left := set(descendants(os.getpid())) - others:
                assert time.monotonic() < deadline_s, f"killed, and still there: {left}"
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    with suppress(ChildProcessError):  # one that its parent, which lives, waits for
                        os.waitpid(pid, os.WNOHANG)
                time.sleep(0.01)


def await_that(holds: Callable[[], bool], what: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_DEADLINE_S
    while not holds():
        assert process.poll() is None, f"it ended before {what}"
        assert time.monotonic() < deadline_s, f"no {what} within {START_DEADLINE_S:g} s"
        time.sleep(0.02)


def kill_and_see_all_end(process: subprocess.Popen[bytes], phase: str, others: frozenset[int]) -> None:
    known = [pid for pid in descendants(os.getpid()) if pid not in others]
    process.kill()
    killed_s = time.monotonic()
    process.wait()
    known += [pid for pid in descendants(os.getpid()) if pid not in {*known, *others}]  # those started meanwhile
    for pid in known:
        try:
            descriptor = open_pidfd(pid)
        except ProcessLookupError:
            continue
        left_s = END_DEADLINE_S - (time.monotonic() - killed_s)
        has_ended = bool(select.select([descriptor], [], [], max(0.0, left_s))[0])
        os.close(descriptor)
        assert has_ended, f"{command_line(pid)} lives {END_DEADLINE_S:g} s after its controller, killed amid {phase}"
    took_s = time.monotonic() - killed_s
    sys.stdout.write(f"killed amid {phase}: the last of {len(known)} processes ended after {took_s:.2f} s\n")
    for pid in {*known, *descendants(os.getpid())} - others:  # also those that came and went between two looks
        with suppress(ChildProcessError):  # one that was never adopted
            os.waitpid(pid, os.WNOHANG)
    assert not [pid for pid in descendants(os.getpid()) if pid not in others and is_alive(pid)]


def hosts() -> int:
    return sum(
        "slipstream.controller.process" in command_line(pid) for pid in descendants(os.getpid()) if is_alive(pid)
    )


def steps_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count('"reward_mean"') if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["init", "step"])
def test_a_child_that_looks_at_nothing_ends_with_the_controller(
    where: str, tiny: dict[str, Any], tmp_path: Path, start: Start, others: frozenset[int]
) -> None:
    """However long it would take: amid `init` at once, amid a step after a grace period."""
    mark = tmp_path / "stuck"
    soon = {"warm_start": {"steps": 0}, "eval": tiny["eval"] | {"num_prompts": 4}}
    tables = json.dumps(tiny | soon | {"lease_s": 600.0, "deadline_s": 600.0})
    prelude = f"import json\nwhere, mark = {where!r}, {str(mark)!r}\n{STUCK}"
    call = f"overrides=json.loads({tables!r}), out={str(tmp_path / 'run')!r}, pipeline=pipeline"
    process = start(call, prelude)
    await_that(mark.exists, f"rewards in {where}", process)
    kill_and_see_all_end(process, where, others)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_phase_of_a_run_leaves_orphans(
    tiny: dict[str, Any], tmp_path: Path, start: Start, others: frozenset[int]
) -> None:
    out = tmp_path / "run"
    tables = json.dumps(tiny | {"steps": 100_000, "trainer": {"checkpoint_every": 2}})
    fresh, resume = f"overrides=json.loads({tables!r}), out={str(out)!r}", f"resume={str(out)!r}"

    process = start(fresh, "import json")
    await_that(lambda: hosts() >= 1, "a child", process)
    kill_and_see_all_end(process, "the start", others)

    process = start(resume)
    await_that(lambda: hosts() == 3, "all children", process)
    kill_and_see_all_end(process, "a resume without a checkpoint", others)

    process = start(resume)
    await_that(lambda: steps_of(out) >= 5, "the fifth step", process)
    kill_and_see_all_end(process, "training", others)

    for num_hosts in (1, 3):
        process = start(resume)
        await_that(lambda: hosts() >= num_hosts, f"{num_hosts} children", process)  # noqa: B023
        kill_and_see_all_end(process, f"a resume with {num_hosts} children", others)


def test_one_that_has_ended_is_no_error_for_who_looks() -> None:
    """Processes end between two looks, those in the middle of the nursery's two forks for example."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (descendants(process.pid), command_line(process.pid), is_alive(process.pid)) == ([], [], False)
