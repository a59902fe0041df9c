"""A stage in a process of its own, so that its threads are placed before torch is loaded and its memory is given back.

`python -m slipstream.stages.child RUN_DIR STAGE [--display]` is that process. It ends with its stage, or when its
standard input closes: the other end of that pipe is the run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import msgspec
from rich.console import Console

from slipstream.controller.placement import num_cores, thread_environment
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.interrupts import leave_to_the_run
from slipstream.core.recipes import resolve, stage_dir
from slipstream.core.run_lock import inherited

ERROR = "error.json"
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
    error_path = stage_dir(run_dir, stage) / ERROR
    error_path.unlink(missing_ok=True)
    search_path = os.pathsep.join(path or os.getcwd() for path in sys.path if not path.endswith(".zip"))
    command = [sys.executable, "-m", "slipstream.stages.child", str(run_dir.resolve()), stage]
    is_terminal = sys.stdout.isatty()
    process = subprocess.Popen(
        [*command, *(["--display"] if display else [])],
        stdin=subprocess.PIPE,
        stdout=None if is_terminal else subprocess.PIPE,  # a notebook shows what this process writes
        text=True,
        env=os.environ | thread_environment(num_cores()) | {"PYTHONPATH": search_path},
        pass_fds=inherited(run_dir),
    )
    try:
        for line in process.stdout or ():
            sys.stdout.write(line)
        code = process.wait()
    finally:
        assert process.stdin is not None
        process.stdin.close()
        if process.stdout is not None:
            process.stdout.close()
        _end(process)
        if is_terminal and display:
            Console().show_cursor()  # it may have ended within a live picture
    if code == 0:
        return
    if error_path.is_file():
        error = msgspec.json.decode(error_path.read_bytes(), type=StageError)
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


def main(run_dir: Path, stage: str, *, display: bool) -> int:
    """Run one stage here; what went wrong is left in its folder for the run to raise."""
    leave_to_the_run()  # it closes the lifeline
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    from slipstream.stages.chain import run_stage  # torch, once the lifeline is watched

    try:
        run_stage(stage, resolve(run_dir / "config.toml"), run_dir, display=display)
    except Exception as error:  # noqa: BLE001 - whatever it is, the run must hear of it
        if not isinstance(error, SlipstreamError):
            traceback.print_exc()
        said = StageError(f"{error}" or type(error).__name__, is_input=isinstance(error, ConfigError))
        folder = stage_dir(run_dir, stage)
        folder.mkdir(exist_ok=True)
        (folder / ERROR).write_bytes(msgspec.json.encode(said))
        return 1
    return 0


def _end_with_the_run() -> None:
    """Ends when standard input closes, and this process with it."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), sys.argv[2], display="--display" in sys.argv[3:])
    sys.stdout.flush()
    os._exit(code)  # the watching thread reads until the pipe closes
