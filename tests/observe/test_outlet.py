"""A run goes on, and ends with its code, whatever becomes of standard output and error."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.observe import outlet

DEADLINE_S = 120.0
PENDING_BYTES = 1 << 17
RUN = (
    f"PENDING_BYTES = {PENDING_BYTES}"
    + """
import os, sys, types
from pathlib import Path
from slipstream import cli
from slipstream.core.clock import VirtualClock
from slipstream.core.errors import DiskError
from slipstream.observe import outlet
from slipstream.observe.display import Display
from slipstream.observe.outlet import lasting_output

outlet.DRAIN_S = 1.0
outlet.MAX_PENDING_BYTES = PENDING_BYTES

def train(config, *, out, resume):
    '''Stands for a run: it says much, and has its own end.'''
    with lasting_output(Path(sys.argv[1]) / "logs" / "console.log"):
        clock = VirtualClock()
        display = Display({"name": "headline"}, steps=3, max_staleness=1, clock=clock)
        for line in range(int(sys.argv[2])):
            display.note(f"line {line} \\u2192 " + "x" * 80)
        print("said by a reward", flush=True)
        sys.stderr.write("said by a library\\n")
        for step in range(3):
            clock.advance(10.0)
            display.step({"step": step, "reward": 0.5})
            if sys.stdin is not None:
                sys.stdin.readline()
        display.note("the end")
        display.close()
    Path(sys.argv[1], "done").touch()
    if sys.argv[3] == "fails":
        raise DiskError("the run failed by itself")
    return types.SimpleNamespace(summary={"status": sys.argv[3]})

sys.modules['slipstream.api'] = types.SimpleNamespace(run=train)  # the own one imports torch
cli._run_config = lambda options: None
cli.main.__defaults__ = (["run", "quickstart"],)
cli.script()
"""
)
CODES = {"done": 0, "fails": 1}


def start(folder: Path, *, lines: int = 3, ending: str = "done", prefix: str = "", **more) -> subprocess.Popen[bytes]:
    """`prefix` is shell in front of the command, such as a redirection of its descriptors."""
    script = folder / "run.py"
    script.write_text(RUN)
    command = f'{prefix} exec "$@"' if prefix else 'exec "$@"'
    arguments = [sys.executable, str(script), str(folder), str(lines), ending]
    return subprocess.Popen(["bash", "-c", command, "bash", *arguments], **more)


def log_of(folder: Path) -> str:
    return (folder / "logs" / "console.log").read_text()


def finish(process: subprocess.Popen[bytes], folder: Path, code: int = 0) -> None:
    assert process.wait(DEADLINE_S) == code
    assert (folder / "done").exists(), "it went on to its end"


@pytest.mark.parametrize("ending", [pytest.param("done", marks=pytest.mark.slow), "fails"])
def test_a_reader_that_leaves_changes_no_exit_code(tmp_path: Path, ending: str) -> None:
    process = start(tmp_path, ending=ending, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"name headline\n"
    process.stdout.close()
    process.stdin.close()
    errors = process.stderr.read()
    process.stderr.close()
    finish(process, tmp_path, CODES[ending])
    assert b"Traceback" not in errors
    assert (b"the run failed by itself" in errors) == (ending == "fails")
    assert "standard output is gone (Broken pipe)" in log_of(tmp_path)
    assert "step 3/3" in log_of(tmp_path)


@pytest.mark.parametrize(
    ("redirection", "why"),
    [
        (">/dev/full", "standard output is refused (No space left on device)"),
        pytest.param(">/dev/full 2>&1", "standard error is refused (No space left on device)", marks=pytest.mark.slow),
        pytest.param(">&-", "standard output is gone (it is closed)", marks=pytest.mark.slow),
        ("<&- >&- 2>&-", "standard error is gone (it is closed)"),
    ],
)
def test_a_stream_that_is_full_or_closed_from_the_start_is_told_in_the_log(
    tmp_path: Path, redirection: str, why: str
) -> None:
    process = start(tmp_path, ending="fails", prefix=f"exec {redirection};", stdin=subprocess.DEVNULL)
    finish(process, tmp_path, CODES["fails"])
    log = log_of(tmp_path)
    assert why in log
    assert "line 2" in log
    assert "said by a reward" in log
    assert ("the run failed by itself" in log) == ("2>" in redirection), "an error that nobody is shown is in the log"


@pytest.mark.slow
def test_a_reader_that_never_reads_holds_nothing_up(tmp_path: Path) -> None:
    """More than the pipe and the queue take, on standard output and error alike; the reader lives to the end."""
    reading, writing = os.pipe()
    lines = 3 * PENDING_BYTES // 100
    process = start(tmp_path, lines=lines, ending="fails", stdin=subprocess.DEVNULL, stdout=writing, stderr=writing)
    os.close(writing)
    finish(process, tmp_path, CODES["fails"])
    log = log_of(tmp_path)
    assert "standard output stands still" in log
    assert f"line {lines - 1} " in log
    assert "standard output is gone (it took nothing for 1 s)" in log
    with os.fdopen(reading, "rb") as pipe:
        taken = pipe.read().decode()
    assert taken.startswith("name headline\n")
    assert "the run failed by itself" in log + taken, "a full pipe may still have room for a short line"


@pytest.mark.slow
def test_a_slow_reader_gets_everything(tmp_path: Path) -> None:
    process = start(tmp_path, lines=4000, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    told, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert told.count(b"xxxx\n") == 4000
    assert b"said by a reward" in told
    assert not (tmp_path / "logs").exists(), "nothing is missing there, and no log is made"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[outlet._Log]:
    made = outlet._Log()
    made.path = tmp_path / "logs" / "console.log"
    yield made
    made.close()


PIPE_BYTES = 1 << 16
"""What a pipe holds."""


def test_a_pipe_that_nobody_reads_is_given_up(
    tmp_path: Path, log: outlet._Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `test_a_reader_that_never_reads_holds_nothing_up`, within this process.

    What no longer fits the queue is in the log before the stream is given up.
    """
    monkeypatch.setattr(outlet, "MAX_PENDING_BYTES", 1 << 14)
    monkeypatch.setattr(outlet, "DRAIN_S", 0.2)
    lines = [f"line {number} " + 80 * "x" + "\n" for number in range(400)]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"before\n" * 10_000)  # the last one fills it to the byte
    os.set_blocking(writing, True)
    with os.fdopen(reading) as pipe, os.fdopen(writing, "w") as stream:
        filled = outlet.Outlet(stream, "standard output", log)
        for line in lines:
            assert filled.write(line) == len(line)
        assert "standard output stands still" in log_of(tmp_path)
        assert log_of(tmp_path).endswith(lines[-1])
        filled.end()
        assert "standard output is gone (it took nothing for 0.2 s)" in log_of(tmp_path)
        stream.close()
        taken = pipe.read()
    assert taken.startswith("before\n")
    assert {line for line in lines if line not in log_of(tmp_path)} <= set(taken.splitlines(keepends=True))


def test_a_pipe_that_is_read_late_gets_everything(tmp_path: Path, log: outlet._Log) -> None:
    lines = [f"line {number} " + 80 * "x" + "\n" for number in range(3 * PIPE_BYTES // 80)]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as pipe, os.fdopen(writing, "w") as stream:
        late = outlet.Outlet(stream, "standard output", log)
        for line in lines:
            late.write(line)
        assert late.is_behind
        expected, taken = "".join(lines).encode(), b""
        while len(taken) < len(expected) and select.select([pipe], [], [], DEADLINE_S)[0]:
            taken += pipe.read(PIPE_BYTES)
        late.end()
    assert taken == expected
    assert not (tmp_path / "logs").exists()


def test_a_stream_of_another_encoding_gets_escapes(tmp_path: Path, log: outlet._Log) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        with os.fdopen(writing, "w", encoding="ascii") as stream:
            plain = outlet.Outlet(stream, "standard output", log)
            plain.write("line 2 \u2192 xxx\n")
            plain.end()
        assert pipe.read() == "line 2 \\u2192 xxx\n"


def test_whoever_has_kept_an_outlet_writes_to_the_stream_after_the_end() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe, os.fdopen(writing, "w") as stream:
        kept = outlet.Outlet(stream, "standard output", outlet._Log())
        kept.write("within\n")
        kept.end()
        kept.write("after\n")
        assert (pipe.readline(), pipe.readline()) == ("within\n", "after\n")


def test_a_terminal_that_vanishes_ends_the_picture_and_not_the_run(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    process = start(
        tmp_path, prefix="trap '' HUP;", stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = b""
    while b"headline" not in seen:
        seen += os.read(ours, 4096)
    with contextlib.suppress(OSError):
        while b"said by a library" not in seen:
            seen += os.read(ours, 4096)
    os.close(ours)
    assert process.stdin is not None
    process.stdin.close()
    finish(process, tmp_path)
    log = log_of(tmp_path)
    assert "standard output is gone (Input/output error)" in log
    assert "the end\n" in log, "with what was being drawn when the loss was noticed"
    assert "\x1b" not in log


@pytest.mark.slow
def test_an_encoding_without_the_characters_shows_their_escapes(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    process = start(
        tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    )
    told, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert b"line 2 \\u2192 xxx" in told


def test_other_commands_end_with_their_reader() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as output:
        done = subprocess.run(
            [sys.executable, "-m", "slipstream.cli", "recipes"],
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=DEADLINE_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == b""
