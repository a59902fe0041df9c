"""Files of killed runs are removed, and files of living runs are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import slipstream
from slipstream.cli import doctor_command
from slipstream.core import scratch
from slipstream.core.addresses import ipc_address
from slipstream.core.channel import make_transport_dir
from slipstream.core.errors import ConfigError
from slipstream.core.scratch import claim, cleanup, file_prefix, hold, make_claimed, sweep

OWNER = """
import sys
from pathlib import Path
from slipstream.core.scratch import claim, hold
folder, segment = map(Path, sys.argv[1:])
descriptors = claim(folder), hold(segment)
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Replace the temporary folder and /dev/shm."""
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(scratch, "scratch_directories", lambda: (shared, temporary))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(scratch, "_MOST_FOR_SOCKETS", 1000)
    return temporary, shared


def make_old(path: Path) -> Path:
    path.touch()
    os.utime(path, (0, 0))
    return path


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, None])
def test_files_are_removed_once_their_owner_ended(places: tuple[Path, Path], ending: signal.Signals | None) -> None:
    temporary, shared = places
    folder = make_transport_dir()
    assert folder.parent == temporary
    segment = make_old(shared / f"{file_prefix(folder.name)}abc")
    checkpoint = shared / f"{file_prefix(folder.name)}vllm"
    checkpoint.mkdir()
    (checkpoint / "weights").touch()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder), str(segment)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert owner.stdout.readline() == b"claimed\n"
    os.kill(owner.pid, signal.SIGSTOP)  # one that is stopped lives
    assert sweep() == []
    assert folder.exists()
    assert segment.exists()
    os.kill(owner.pid, signal.SIGCONT)
    if ending is None:
        owner.stdin.close()
    else:
        owner.send_signal(ending)
    owner.wait(10)
    owner.stdout.close()
    owner.stdin.close()
    assert set(sweep()) == {folder, segment, checkpoint}
    assert list(temporary.iterdir()) == list(shared.iterdir()) == []
    assert sweep() == []


def test_a_users_own_files_are_left_alone(places: tuple[Path, Path]) -> None:
    """Whatever they are called: only names that a run gives are a run's."""
    temporary, shared = places
    own = [
        make_old(place / name) for place in places for name in ("slipstream.toml", "slipstream.log", "slipstream.sif")
    ]
    segment = make_old(shared / f"{file_prefix('slipstream-gone1234')}abc")
    assert sweep() == [segment]
    assert all(path.exists() for path in own)
    assert temporary.exists()


def test_where_the_temporary_folders_path_is_long_sockets_lie_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = make_transport_dir()
    assert folder.parent == Path("/tmp")
    assert ipc_address(folder / ("s" * 60)).startswith("ipc:///tmp/")
    owner = claim(folder)
    assert folder not in sweep()
    os.close(owner)
    assert folder in sweep() or not folder.exists(), "the next run of this machine removes it"


def test_unclaimed_folders_are_left_alone(places: tuple[Path, Path]) -> None:
    temporary, shared = places
    make_transport_dir()  # it may be about to be claimed
    (temporary / "slipstream-notes.txt").touch()
    (shared / "slipstream.slipstream-run.1.fresh").touch()  # it may be about to be held
    make_old(shared / "other")
    before = sorted([*temporary.iterdir(), *shared.iterdir()])
    assert sweep() == []
    assert sorted([*temporary.iterdir(), *shared.iterdir()]) == before


def test_a_segment_that_no_process_holds_is_removed_without_a_folder(places: tuple[Path, Path]) -> None:
    """A trainer on a machine without a controller leaves such segments."""
    _, shared = places
    held, left = (make_old(shared / f"slipstream.slipstream-run.{name}") for name in ("held", "left"))
    descriptor = hold(held)
    weights = shared / "slipstream.slipstream-run.vllm-x"  # a folder of weights for vLLM
    weights.mkdir()
    claimed = claim(weights)
    make_old(weights / "owner")
    assert sweep() == [left]
    os.close(descriptor)
    os.close(claimed)
    assert set(sweep()) == {held, weights}


def test_a_foreign_file_in_place_of_the_owner_is_not_followed(places: tuple[Path, Path]) -> None:
    """Hostile programs may write to a worker's folder: opening a pipe would block, a link would lead elsewhere."""
    temporary, shared = places
    precious = make_old(temporary / "precious")
    folder, descriptor = make_claimed("reward")
    os.close(descriptor)
    (folder / "owner").unlink()
    os.mkfifo(folder / "owner")
    linked, descriptor = make_claimed("reward")
    os.close(descriptor)
    (linked / "owner").unlink()
    (linked / "owner").symlink_to(precious)
    kept, descriptor = make_claimed("elsewhere")
    os.close(descriptor)
    kept = kept.rename(temporary / "kept")
    (temporary / "slipstream-link").symlink_to(kept)
    (shared / "slipstream.slipstream-run.link").symlink_to(precious)
    assert sweep() == []
    assert precious.exists()
    assert (kept / "owner").exists()


def test_files_of_other_users_are_left_alone(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_transport_dir()
    os.close(claim(folder))
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert sweep() == []
    monkeypatch.undo()
    assert folder.exists()


def test_a_run_removes_only_its_own_files(places: tuple[Path, Path]) -> None:
    _, shared = places
    ours, theirs = shared / "slipstream.a.x", shared / "slipstream.a-b.x"
    ours.touch()
    theirs.touch()
    assert cleanup("a") == [ours]
    assert theirs.exists()


def test_what_another_machine_has_claimed_is_left_to_it(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file system that machines share may be known to its own machine alone: here it is as if released."""
    temporary, shared = places
    monkeypatch.setattr(scratch, "_MEMORY", shared)
    monkeypatch.setattr(scratch, "_this_machine", lambda: ["other-machine", "start-1"])
    folder = make_transport_dir()
    segment = make_old(temporary / f"{file_prefix(folder.name)}abc")
    weights = temporary / "slipstream.slipstream-run.vllm-x"  # of a machine without a controller
    in_memory = shared / "slipstream.slipstream-run.vllm-y"
    for each in (folder, weights, in_memory):
        each.mkdir(exist_ok=True)
        os.close(claim(each))
        make_old(each / "owner")
    monkeypatch.setattr(scratch, "_this_machine", lambda: ["this-machine", "start-2"])
    assert sweep() == [in_memory], "/dev/shm is of this machine alone, whatever its name was"
    assert folder.exists()
    assert segment.exists()
    assert weights.exists()
    monkeypatch.setattr(scratch, "_this_machine", lambda: ["a-new-container", "start-1"])
    assert set(sweep()) == {folder, segment, weights}


def test_folders_of_earlier_versions_name_no_machine_and_are_removed(places: tuple[Path, Path]) -> None:
    folder = make_transport_dir()
    os.close(claim(folder))
    (folder / "owner").write_bytes(b"")
    assert sweep() == [folder]


def test_without_a_temporary_folder_it_is_said_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc", "/nowhere"])  # as on a read-only disk
    commands = (lambda: slipstream.run("quickstart"), lambda: doctor_command([]))
    for use in (scratch.scratch_directories, sweep, lambda: make_claimed("reward"), make_transport_dir, *commands):
        with pytest.raises(ConfigError, match="set TMPDIR"):
            use()


def test_a_run_in_a_folder_whose_path_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"a\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match="the working folder cannot be a path"):
        slipstream.run("quickstart")
    folder.rmdir()
    with pytest.raises(ConfigError, match="the working folder is gone"):
        slipstream.run("quickstart")
