"""A process ends with the process that started it, also where no Python code can run."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slipstream.core import lifeline
from slipstream.core.processes import open_pidfd

DEADLINE_S = 60.0
CHILDREN = {
    "amid an import": "import ctypes; report(); ctypes.PyDLL(None).sleep(100_000)  # as one that holds the lock does",
    "amid loading": "import time; report(); time.sleep(100_000)",
    "amid a step": "import time; lifeline.ends_with(0, grace_s=0.0); report(); time.sleep(100_000)",
}
PARENT = """
import subprocess, sys
from slipstream.core import lifeline
child = subprocess.Popen(lifeline.command("child"), stdin=subprocess.PIPE, start_new_session=True)
child.wait()
"""
IMPORTS = "import os, sys\nfrom slipstream.core import lifeline\ndef report(): print(os.getpid(), flush=True)\n"


def start(code: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a parent; return it and a descriptor that is readable when its child has ended."""
    (folder / "child.py").write_text(IMPORTS + code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    return parent, open_pidfd(int(parent.stdout.readline()))


@pytest.mark.parametrize("moment", ["amid an import", "amid loading", "amid a step"])
def test_a_killed_parent_takes_its_child_along(moment: str, tmp_path: Path) -> None:
    parent, child = start(CHILDREN[moment], tmp_path)
    assert not select.select([child], [], [], 0)[0]
    killed_s = time.monotonic()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert select.select([child], [], [], DEADLINE_S)[0], f"it lives {DEADLINE_S:g} s after its parent"
    sys.stdout.write(f"killed {moment}: its child ended after {time.monotonic() - killed_s:.3f} s\n")
    os.close(child)
    assert parent.stdout is not None
    parent.stdout.close()


def test_a_child_whose_parent_ended_first_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("raise AssertionError('it runs')")
    command = [sys.executable, "-m", "slipstream.core.lifeline", str(1 << 22), "child"]  # nobody has this number
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_module_runs_as_it_does_by_itself(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text("import sys\nprint(__name__, *sys.argv[1:])\nsys.exit(7)")
    code = "import subprocess, sys\nfrom slipstream.core import lifeline\n"
    code += "sys.exit(subprocess.run(lifeline.command('child', 'a', 'b c')).returncode)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.returncode, done.stdout) == (7, "__main__ a b c\n")


def test_files_of_the_working_folder_hide_no_library(tmp_path: Path) -> None:
    """And modules of the user's, which lie there, are found all the same."""
    modules, working = tmp_path / "modules", tmp_path / "working"
    modules.mkdir()
    working.mkdir()
    (modules / "child.py").write_text("import queue, slipstream.core.clock, beside\nprint(queue.Queue(), beside.NAME)")
    (working / "queue.py").write_text("raise AssertionError('it is not the library')")
    (working / "beside.py").write_text("NAME = 'found'")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(modules), *filter(None, sys.path)])}
    command = lifeline.command("child")
    done = subprocess.run(
        command, cwd=working, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("found\n")
