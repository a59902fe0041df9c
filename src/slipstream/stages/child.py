"""A stage in a process of its own, so that its threads are placed before torch is loaded and its memory is given back.

`python -m slipstream.stages.child RUN_DIR STAGE ERRORS [--display]` is that process; it writes the reason of a failure
to the descriptor ERRORS. It ends with its stage, when its standard input closes (the run holds the other end of that
pipe), or when the run's folder is gone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console

from slipstream.controller.nursery import search_path
from slipstream.controller.placement import thread_environment
from slipstream.core import lifeline
from slipstream.core.disk import HeldFolder
from slipstream.core.errors import ConfigError, DiskError, SlipstreamError
from slipstream.core.interrupts import leave_to_the_run
from slipstream.core.machine import num_cores
from slipstream.core.recipes import resolve
from slipstream.core.run_lock import inherited
from slipstream.observe.outlet import CONSOLE_LOG, is_terminal, lasting_output
from slipstream.stages.progress import told_of

MAX_ERROR_BYTES = 1 << 15  # a pipe has room for it
CHECK_FOLDER_EVERY_S = 1.0
LET_GO_DEADLINE_S = 5.0


class StageError(msgspec.Struct, frozen=True):
    """Why a stage failed: `is_input` where the user's input is to blame."""

    text: str
    is_input: bool


def run_in_child(stage: str, run_dir: Path, *, display: bool) -> None:
    """Run `stage` of the run in `run_dir`; returns when its output is there.

    Waits for: the process. Unblocked by: its end, or a line for the terminal. Raises ConfigError or SlipstreamError
    with what the stage said. Whatever is raised here, KeyboardInterrupt too, the process has ended by then: by itself
    when its standard input closes, or killed LET_GO_DEADLINE_S later.
    """
    reading, writing = os.pipe()  # a file would not be to be relied on: the disk may be full
    os.set_blocking(reading, False)
    command = lifeline.command("slipstream.stages.child", str(run_dir.resolve()), stage, str(writing))
    shows_itself = is_terminal()
    process = subprocess.Popen(
        [*command, *(["--display"] if display else [])],
        stdin=subprocess.PIPE,
        stdout=None if shows_itself else subprocess.PIPE,  # a notebook shows what this process writes
        text=True,
        env=os.environ | thread_environment(num_cores()) | {"PYTHONPATH": search_path()},
        pass_fds=[writing, *inherited(run_dir)],
    )
    os.close(writing)
    said = b""
    try:
        for line in process.stdout or ():
            sys.stdout.write(line)
        code = process.wait()
        with suppress(BlockingIOError):
            said = os.read(reading, MAX_ERROR_BYTES)
    finally:
        os.close(reading)
        assert process.stdin is not None
        process.stdin.close()
        if process.stdout is not None:
            process.stdout.close()
        _end(process)
        if shows_itself and display:
            Console().show_cursor()  # it may have ended within a live picture
    if code == 0:
        return
    if said:
        error = msgspec.json.decode(said, type=StageError)
        raise (ConfigError if error.is_input else SlipstreamError)(error.text)
    how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    raise SlipstreamError(f"the process of stage '{stage}' ended", got=how, hint="is there enough memory for it?")


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a process that was let go; kill what does not end in time, a stopped one for example."""
    try:
        process.wait(LET_GO_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(run_dir: Path, stage: str, errors: int, *, display: bool) -> int:
    """Run one stage here; what went wrong is written to `errors` for the run to raise."""
    os.set_inheritable(errors, False)
    leave_to_the_run()  # it closes the lifeline
    threading.Thread(target=_end_with_the_run, args=[run_dir], daemon=True).start()
    with lasting_output(run_dir / "logs" / CONSOLE_LOG):
        with told_of(f"{stage}: importing torch", display=display):
            from slipstream.stages.one_process import run_stage  # once the lifeline is watched

        try:
            run_stage(stage, resolve(run_dir / "config.toml"), run_dir, display=display)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run must hear of it
            if not isinstance(error, SlipstreamError):
                traceback.print_exc()
            text = str(error)[: MAX_ERROR_BYTES // 8] or type(error).__name__
            os.write(errors, msgspec.json.encode(StageError(text, is_input=isinstance(error, ConfigError))))
            return 1
        return 0


def _end_with_the_run(run_dir: Path) -> None:
    """Ends when standard input closes, or the run's folder is gone; and this process with it."""
    with suppress(DiskError), HeldFolder(run_dir) as folder:
        while not select.select([0], [], [], CHECK_FOLDER_EVERY_S)[0]:
            folder.check()
    os._exit(1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), display="--display" in sys.argv[4:])
    sys.stdout.flush()
    os._exit(code)  # the watching thread reads until the pipe closes
