"""Segments between real processes: another process reads them, a killed publisher's are cleaned up."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.scratch import cleanup, scratch_directories
from slipstream.weight_sync.copying import HOST
from slipstream.weight_sync.segment import SegmentSlots, SharedMemory
from slipstream.weight_sync.slots import Commit

OTHERS = """
# a reader, an owner that ends at once, and one that hangs: torch is loaded once
import os, sys, numpy as np
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.copying import HOST
child = os.fork()
if not child:
    slots = SharedMemory(sys.argv[1]).attach(sys.argv[2])
    copy, checksums = HOST.empty(slots.num_bytes), np.zeros_like(slots.checksums(1))
    commit = slots.committed(1)
    print(commit.version, commit.checksum == HOST.copy(copy, slots.data(1), checksums), int(copy.sum()))
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
child = os.fork()
slots = SharedMemory(sys.argv[3]).create(10_000, 2)
if child:
    assert os.waitpid(child, 0)[1] == 0
print(slots.name, flush=True)
if child:
    sys.stdin.read()
"""


@pytest.fixture
def run_id() -> str:
    return f"test-{os.getpid()}"


@dataclass
class Others:
    """What the other processes have said: a reader of `slots`, and two owners, of which one still runs."""

    slots: SegmentSlots
    source: np.ndarray
    owners_run: str
    owner: subprocess.Popen[str]
    read: list[str]
    ended: Path
    path: Path


@pytest.fixture(scope="module")
def others() -> Iterator[Others]:
    run_id, owners_run = f"test-{os.getpid()}-read", f"test-{os.getpid()}-owned"
    slots = SharedMemory(run_id).create(10_000, 2)
    source = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)
    slots.commit(1, Commit(7, HOST.copy(slots.data(1), torch.from_numpy(source), slots.checksums(1))))
    command = [sys.executable, "-c", OTHERS, run_id, slots.name, owners_run]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        read, ended, path = (owner.stdout.readline().strip() for _ in range(3))
        yield Others(slots, source, owners_run, owner, read.split(), Path(ended), Path(path))
        owner.kill()
    cleanup(owners_run)
    slots.close()


def test_another_process_reads_a_slot_and_leaves_the_segment_alone(others: Others) -> None:
    slots, source = others.slots, others.source
    assert others.read == ["7", "True", str(int(source.sum(dtype=np.int64)))]
    run_id = f"test-{os.getpid()}-read"
    again = SharedMemory(run_id).attach(slots.name)  # Python 3.11's SharedMemory would have unlinked it
    assert np.array_equal(again.data(1), source)
    assert slots.committed(0) is None
    assert Path(slots.name).stat().st_mode & 0o777 == 0o600
    slots.close()
    assert not Path(slots.name).exists()


def test_the_owner_unlinks_on_exit_and_cleanup_does_after_a_kill(others: Others) -> None:
    run_id, path = others.owners_run, others.path
    assert others.ended != path
    assert not others.ended.exists()
    assert path.exists()
    others.owner.send_signal(signal.SIGKILL)
    others.owner.wait(10)
    assert path.exists()
    assert cleanup(run_id + "x") == []
    assert cleanup(run_id) == [path]
    assert not path.exists()


def test_files_that_are_no_segments_are_refused(tmp_path: Path, run_id: str) -> None:
    transport = SharedMemory(run_id, (tmp_path,))
    slots = transport.create(100, 2)
    for name in (str(tmp_path / "other"), str(tmp_path / f"slipstream.{run_id}.none")):
        with pytest.raises(WeightSyncError):
            transport.attach(name)
    bad = tmp_path / f"slipstream.{run_id}.bad"
    bad.write_bytes(b"x" * 8192)
    with pytest.raises(WeightSyncError, match="not a weight segment"):
        transport.attach(str(bad))
    with pytest.raises(WeightSyncError, match="no such slot"):
        slots.committed(2)
    slots.close()


def test_a_full_directory_is_passed_by(tmp_path: Path, run_id: str) -> None:
    missing = tmp_path / "missing"
    slots = SharedMemory(run_id, (missing, tmp_path)).create(100, 1)
    assert Path(slots.name).parent == tmp_path
    slots.close()
    with pytest.raises(WeightSyncError, match="no room"):
        SharedMemory(run_id, (missing,)).create(100, 1)
    assert scratch_directories()


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the system reserves no space")
def test_the_space_of_the_last_slot_is_reserved_before_it_is_written(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing into a page for which there is no room would end the process."""
    num_bytes = 1 << 22

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    slots = SharedMemory(run_id).create(num_bytes, 2)
    before = os.stat(slots.name).st_blocks
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        slots.invalidate(0)
        with pytest.raises(WeightSyncError, match="no room for a further version"):
            slots.invalidate(1)
    slots.invalidate(1)
    assert (os.stat(slots.name).st_blocks - before) * 512 >= num_bytes
    slots.close()


@pytest.mark.parametrize("bad", ["", "a/b", "a.b", "*"])
def test_a_run_id_that_could_name_other_files_is_refused(bad: str) -> None:
    with pytest.raises(WeightSyncError):
        cleanup(bad)
