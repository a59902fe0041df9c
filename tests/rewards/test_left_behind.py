"""Folders of reward workers in the temporary folder: the next pool removes those of the dead only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slipstream.core.processes import open_pidfd
from slipstream.rewards.pool import ScoringPool
from slipstream.rewards.protocol import Term, WorkerSetup

POOL = """
import sys
from slipstream.rewards.pool import ScoringPool
from slipstream.rewards.protocol import Term, WorkerSetup
setup = WorkerSetup(terms=[Term("exact_match")], timeout_s=5.0, memory_bytes=1 << 30, tasks={})
pool = ScoringPool(setup, num_workers=2)
print(*[slot.worker._keeper.pid for slot in pool._slots], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /tmp, also for processes that are started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def start() -> tuple[subprocess.Popen[str], list[int]]:
    """A process with a pool, and the keepers of its workers."""
    process = subprocess.Popen([sys.executable, "-c", POOL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def end(process: subprocess.Popen[str], keepers: list[int]) -> None:
    """All at once, so that nobody can clear up behind the others."""
    ends = [open_pidfd(pid) for pid in keepers]
    for pid in [process.pid, *keepers]:
        os.kill(pid, signal.SIGSTOP)
    for pid in [*keepers, process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    for descriptor in ends:
        os.close(descriptor)


def test_the_next_pool_removes_what_a_killed_one_left_and_nothing_of_one_that_lives(temporary: Path) -> None:
    killed, keepers = start()
    left = set(temporary.glob("slipstream-reward-*"))
    assert len(left) == 2, "two workers"
    living, others = start()
    theirs = set(temporary.glob("slipstream-reward-*")) - left
    end(killed, keepers)
    assert left < set(temporary.glob("slipstream-reward-*"))
    setup = WorkerSetup(terms=[Term("exact_match")], timeout_s=5.0, memory_bytes=1 << 30, tasks={})
    pool = ScoringPool(setup, num_workers=1)
    try:
        there = set(temporary.glob("slipstream-reward-*"))
        assert not left & there
        assert theirs < there, "its owner lives"
    finally:
        pool.close()
        end(living, others)
    assert set(temporary.glob("slipstream-reward-*")) == theirs
