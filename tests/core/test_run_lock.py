"""The lock of a run's folder: its holder, the text and effect of a refusal, and its state after a SIGKILL."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from slipstream.core import run_lock
from slipstream.core.errors import ConfigError, DiskError, SlipstreamError
from slipstream.core.run_lock import LOCK_FILE, check_free, holding, is_held

HOLD = """
import subprocess, sys
from pathlib import Path
from slipstream.core.run_lock import holding, inherited
folder = Path(sys.argv[1])
sys.stdin.read(1)  # all at once
with holding(folder):
    if "child" in sys.argv:  # which ends with our standard input, that it inherits
        subprocess.Popen(["cat"], pass_fds=inherited(folder))
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder without a lock."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    return tmp_path / "run"


def holder(folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write(".")
    process.stdin.flush()


@contextmanager
def held(folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the folder inside this context."""
    with holder(folder, *more) as process:
        begin(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            if process.stdin is not None:
                process.stdin.close()


def names_and_times(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = [folder, *folder.iterdir()]
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in paths}


def take(folder: Path) -> None:
    with holding(folder):
        pass


@pytest.mark.parametrize("ask", [take, check_free])
def test_a_second_run_is_told_at_once_who_has_the_folder_and_leaves_it_as_it_is(ask, folder: Path) -> None:
    with held(folder) as process:
        before = names_and_times(folder)
        with pytest.raises(ConfigError, match="another run is going on") as refused:
            ask(folder)
        told = str(refused.value)
        assert f"process {process.pid} on {os.uname().nodename}, since 20" in told
        assert str(folder) in told
        assert "-c" in told, "the command"
        assert names_and_times(folder) == before
        assert is_held(folder)
    ask(folder)
    assert not is_held(folder)
    with holding(folder):
        assert not is_held(folder), "by this process, whose report it is"


def test_of_many_runs_that_start_together_one_gets_the_folder(folder: Path) -> None:
    processes = [holder(folder) for _ in range(5)]
    for process in processes:
        begin(process)
    for process in processes:
        assert process.stdin is not None
    lines = [process.stdout.readline() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate(timeout=60)
    assert sorted(lines) == ["", "", "", "", "held\n"]
    assert sorted(process.returncode for process in processes) == [0, 1, 1, 1, 1]


def test_a_killed_run_holds_nothing(folder: Path) -> None:
    with held(folder) as process:
        process.kill()
        process.wait(60)
        assert (folder / LOCK_FILE).read_bytes(), "what it said is still there"
        check_free(folder)
        take(folder)
    assert (folder / LOCK_FILE).read_bytes() == b""


def test_a_killed_run_whose_processes_still_write_is_waited_for(folder: Path, monkeypatch, caplog) -> None:
    with held(folder, "child") as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        check_free(folder)  # it is over; what it left behind is waited for
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
            else:
                os.sched_yield()

        monkeypatch.setattr(run_lock.time, "sleep", sleep)
        take(folder)
    assert slept, "the child had the lock"
    assert f"process {process.pid} was killed" in caplog.text


def test_processes_of_a_killed_run_are_waited_for_until_a_deadline(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.0)
    with held(folder, "child") as process:
        process.kill()
        process.wait(60)
        with pytest.raises(SlipstreamError, match="still write") as refused:
            take(folder)
    assert not isinstance(refused.value, ConfigError), "a scheduler may try again"


def test_a_run_on_another_machine_may_be_dead_and_known_to_be_later(folder: Path) -> None:
    with holding(folder):
        lock = folder / LOCK_FILE
        said = msgspec.json.decode(lock.read_bytes()) | {"place": "elsewhere", "host": "node-7"}
        lock.write_bytes(msgspec.json.encode(said))
        with pytest.raises(SlipstreamError, match="node-7") as refused:
            take(folder)
    assert not isinstance(refused.value, ConfigError)


def test_a_process_number_that_was_assigned_again_is_recognised(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "WAIT_S", 0.0)
    with holding(folder):
        lock = folder / LOCK_FILE
        lock.write_bytes(msgspec.json.encode(msgspec.json.decode(lock.read_bytes()) | {"started": "1"}))
        with pytest.raises(SlipstreamError, match="left behind by process"):
            take(folder)


@pytest.mark.parametrize("error", [ConfigError("wrong input"), KeyboardInterrupt()])
@pytest.mark.parametrize("is_run", [True, False])
def test_nothing_is_left_where_no_run_has_begun(error: BaseException, is_run: bool, folder: Path) -> None:
    if not is_run:
        (folder / "config.toml").unlink()
    for _ in range(2):
        before = names_and_times(folder)
        with pytest.raises(type(error)), holding(folder):
            raise error
        if is_run and isinstance(error, KeyboardInterrupt):
            assert (folder / LOCK_FILE).exists()
        else:
            assert names_and_times(folder) == before
        (folder / LOCK_FILE).touch()  # of an earlier run


def test_a_lock_file_that_was_removed_meanwhile_does_not_count(folder: Path, monkeypatch) -> None:
    """Its holder removed the file between our opening and locking it; the next run may have a new file already."""
    lock_it, removed = run_lock._try, []

    def slow(descriptor: int, path: Path) -> bool:
        if not removed:
            path.unlink()
            removed.append(path)
        return lock_it(descriptor, path)

    monkeypatch.setattr(run_lock, "_try", slow)
    with holding(folder), pytest.raises(ConfigError, match="another run is going on"):
        take(folder)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_a_run_goes_on_with_a_warning(number: int, folder: Path, monkeypatch, caplog) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    check_free(folder)
    with holding(folder):
        assert "has no locks" in caplog.text


@pytest.mark.parametrize("what", ["a fifo", "a link", "a folder", "nobody's"])
def test_a_foreign_file_in_place_of_the_lock_is_not_waited_for(what: str, folder: Path) -> None:
    lock = folder / LOCK_FILE
    if what == "a fifo":
        os.mkfifo(lock)
    elif what == "a link":
        lock.symlink_to("/dev/zero")
    elif what == "a folder":
        lock.mkdir()
    else:
        lock.write_bytes(b"\xff" * 100_000)
        take(folder)
        return
    with pytest.raises((ConfigError, DiskError)):
        take(folder)
