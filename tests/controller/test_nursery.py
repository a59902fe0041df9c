"""Processes are forked from one that has imported what they need: whose children they are, and what is theirs."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from covering import with_slow

from slipstream.controller import nursery as module
from slipstream.controller.nursery import Nursery
from slipstream.controller.pipeline import Node
from slipstream.controller.process import Child
from slipstream.core.errors import SlipstreamError
from slipstream.core.recipes import resolve

GET_CHILD_SUBREAPER = 37


@pytest.fixture
def nursery(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nursery]:
    """One that imports nothing ahead; whole runs show what it imports."""
    command = module.lifeline.command
    monkeypatch.setattr(module.lifeline, "command", lambda _, *arguments: command("bare_nursery", *arguments))
    found = Nursery()
    yield found
    found.close()


def started(nursery: Nursery, folder: Path, spec: str = "no such file.json") -> int:
    """A child that cannot read its spec, says so in the log, and ends with 1."""
    stdin, line = os.pipe()
    try:
        with (folder / "log").open("ab") as log:
            return nursery.start(
                [str(folder / spec)], environment=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=stdin, log=log.fileno()
            )
    finally:
        os.close(stdin)
        os.close(line)


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def is_adopting() -> bool:
    found = ctypes.c_int(-1)
    ctypes.CDLL(None).prctl(GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)


def test_a_child_is_ours_and_says_how_it_ended(nursery: Nursery, tmp_path: Path) -> None:
    first = started(nursery, tmp_path)
    assert os.getsid(first) == first, "a Ctrl-C at the terminal is not for it"
    assert status(first) == 1
    log = (tmp_path / "log").read_text()
    assert "FileNotFoundError" in log
    assert "no such file.json" in log
    assert status(started(nursery, tmp_path)) == 1
    assert not is_adopting(), "other orphans are not for us"


def test_a_child_knows_nothing_of_the_torchrun_that_its_run_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, str] = {}

    def start(arguments: Sequence[str], *, environment: Mapping[str, str], **_: object) -> int:
        found.update(environment)
        return os.getpid()

    monkeypatch.setattr(module.NURSERY, "start", start)
    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SAID_BY_THE_USER", "1")
    node = Node("rewards", os.path.join)
    child = Child.start(
        node, 0, (), run_dir=tmp_path, transport_dir=tmp_path, run_id="a", incarnation=1, incarnations={}, deadline_s=1
    )
    child.let_go()
    os.close(child.pidfd)
    assert not found.keys() & told.keys()
    assert found["SAID_BY_THE_USER"] == "1"


def test_a_nursery_that_was_killed_is_replaced(nursery: Nursery, tmp_path: Path) -> None:
    status(started(nursery, tmp_path))
    assert nursery._process is not None
    killed = nursery._process.pid
    os.kill(killed, signal.SIGKILL)
    assert status(started(nursery, tmp_path)) == 1
    assert nursery._process.pid != killed


@pytest.mark.parametrize("num_threads", with_slow([4], [8]))
def test_it_is_asked_from_several_threads(nursery: Nursery, tmp_path: Path, num_threads: int) -> None:
    pids: list[int] = []
    nurseries: set[int] = set()

    def start() -> None:
        pids.append(started(nursery, tmp_path))
        assert nursery._process is not None
        nurseries.add(nursery._process.pid)

    threads = [threading.Thread(target=start) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pids)) == num_threads
    assert len(nurseries) == 1, "it outlives the thread that started it"
    assert [status(pid) for pid in pids] == [1] * num_threads


def test_one_that_cannot_start_is_an_error(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.lifeline, "command", lambda *_: [sys.executable, "-c", ""])
    with pytest.raises(SlipstreamError, match="the process that starts the others does not answer"):
        started(nursery, tmp_path)


def test_its_end_is_not_that_of_its_children(nursery: Nursery, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec")
    pid = started(nursery, tmp_path, "spec")  # it waits for what nobody writes
    end_s = time.monotonic() + 60
    while "slipstream.controller.process" not in (told := Path(f"/proc/{pid}/cmdline").read_text()):
        assert time.monotonic() < end_s, f"ps shows it as {told}"
        time.sleep(0.01)
    assert str(tmp_path / "spec") in told
    nursery.close()
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    os.kill(pid, signal.SIGKILL)
    assert status(pid) == -signal.SIGKILL


@pytest.mark.parametrize("was_there", [True, False])
def test_one_that_was_there_outlasts_a_run(was_there: bool, nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NURSERY", nursery)
    if was_there:
        nursery.begin()
    process, told = nursery._process, list[str]()
    with module.nursery_for(resolve("quickstart"), tell=told.append):
        assert nursery.is_there
        assert (nursery._process is process) is was_there
    assert nursery.is_there is was_there
    assert bool(told) is not was_there


@pytest.mark.parametrize(("stages", "is_needed"), [(["sft"], False), (["sft", "rl"], True)])
def test_only_rl_has_executors_to_fork(
    stages: list[str], is_needed: bool, nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of other stages would hold its imports beside each of them, for nothing."""
    monkeypatch.setattr(module, "NURSERY", nursery)
    told = list[str]()
    with module.nursery_for(resolve("quickstart", {"stages": stages}), tell=told.append):
        assert nursery.is_there is is_needed
    assert bool(told) is is_needed
