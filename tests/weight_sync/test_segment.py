"""Segments between real processes: another process reads them, a killed publisher's are cleaned up."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.scratch import cleanup, scratch_directories
from slipstream.weight_sync.copying import HOST
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Commit

READER = """
import sys, numpy as np
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.copying import HOST
slots = SharedMemory(sys.argv[1]).attach(sys.argv[2])
copy, checksums = HOST.empty(slots.num_bytes), np.zeros_like(slots.checksums(1))
commit = slots.committed(1)
print(commit.version, commit.checksum == HOST.copy(copy, slots.data(1), checksums), int(copy.sum()))
"""

OWNER = """
import os, sys
from slipstream.weight_sync.segment import SharedMemory
child = os.fork()  # it ends at once, and its parent hangs: both own a segment, and torch is loaded once
slots = SharedMemory(sys.argv[1]).create(10_000, 2)
if child:
    assert os.waitpid(child, 0)[1] == 0
print(slots.name, flush=True)
if child:
    sys.stdin.read()
"""


@pytest.fixture
def run_id() -> str:
    return f"test-{os.getpid()}"


def test_another_process_reads_a_slot_and_leaves_the_segment_alone(run_id: str) -> None:
    slots = SharedMemory(run_id).create(10_000, 2)
    source = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8)
    slots.commit(1, Commit(7, HOST.copy(slots.data(1), torch.from_numpy(source), slots.checksums(1))))
    out = subprocess.run(
        [sys.executable, "-c", READER, run_id, slots.name], capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == ["7", "True", str(int(source.sum(dtype=np.int64)))]
    again = SharedMemory(run_id).attach(slots.name)  # Python 3.11's SharedMemory would have unlinked it
    assert np.array_equal(again.data(1), source)
    assert slots.committed(0) is None
    assert Path(slots.name).stat().st_mode & 0o777 == 0o600
    slots.close()
    assert not Path(slots.name).exists()


def test_the_owner_unlinks_on_exit_and_cleanup_does_after_a_kill(run_id: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, run_id], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        ended, path = (Path(owner.stdout.readline().strip()) for _ in range(2))
        assert ended != path
        assert not ended.exists()
        assert path.exists()
        owner.send_signal(signal.SIGKILL)
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


def test_a_directory_with_room_for_the_last_slot_comes_first(
    tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a publish of hours later would be the first to find no room in it."""
    num_bytes, usage = 1 << 20, shutil.disk_usage
    free = {tmp_path / "memory": 7 * num_bytes // 2, tmp_path / "disk": 9 * num_bytes // 2}
    for directory in free:
        directory.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=free[path]))
    transport = SharedMemory(run_id, tuple(free))
    chosen = {}
    for num_slots in (3, 4, 5):
        slots = transport.create(num_bytes, num_slots)
        chosen[num_slots] = Path(slots.name).parent.name
        slots.close()
    assert chosen == {3: "memory", 4: "disk", 5: "memory"}, "where none has room, the first that takes the others"


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
