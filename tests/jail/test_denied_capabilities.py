"""A system that grants the namespaces of a user and denies all capabilities in them, as Ubuntu 24.04 does."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.jail import isolation

DENIED = Path(__file__).parents[1] / "without_capabilities"
AS_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"] if os.geteuid() == 0 else []

# The keeper's child (first process), its child (server), and a grandchild whose parent ends at once (orphan).
WORKER = """
import json, os, select, signal, socket, sys
from slipstream.jail import isolation

def reaches(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0

port, scratch = int(sys.argv[1]), sys.argv[2]
told = {"reached before": reaches(port)}
namespaces = isolation.enter_namespaces(network="gateway")
told |= {"separate": namespaces.is_separate, "loopback": namespaces.has_loopback}
if os.fork() == 0:
    told["confined"] = isolation.confine_files(scratch, [], private=[], is_other_user=False)
    if (server := os.fork()) == 0:
        held = isolation.drop_privileges(namespaces.worker_uid, is_user_namespace=namespaces.is_user_namespace)
        reading, writing = os.pipe()
        if os.fork() == 0:
            if os.fork() == 0:
                signal.pause()
            os._exit(0)
        os.wait()
        os.close(reading)
        own = os.fork()
        if own == 0:
            signal.pause()
        isolation.kill_orphans()
        ends = select.poll()
        ends.register(writing, 0)  # an error, once the orphan has ended, which alone could read
        told["orphan has ended"] = bool(ends.poll(60_000))
        told["own child lives"] = os.waitpid(own, os.WNOHANG) == (0, 0)
        os.kill(own, signal.SIGKILL)
        with open(scratch + "/note", "w") as file:
            file.write("its files are the user's")
        told |= {"held": held, "pid": os.getpid(), "parent": os.getppid(), "reached": reaches(port)}
        print(json.dumps(told), flush=True)
        os._exit(0)
    while os.wait()[0] != server:
        pass
    os._exit(0)
os.wait()
"""


@pytest.fixture
def told(tmp_path: Path) -> dict[str, Any]:
    folders = [str(DENIED), os.environ.get("PYTHONPATH")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    try:
        is_possible = subprocess.run([*AS_USER, "unshare", "--user", "true"], capture_output=True).returncode == 0
    except OSError:
        is_possible = False
    if not is_possible:
        pytest.skip("this machine gives users no namespaces")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [*AS_USER, sys.executable, "-c", WORKER, str(listener.getsockname()[1]), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "note").exists(), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_what_is_said_to_hold_holds_without_capabilities(told: dict[str, Any]) -> None:
    assert told["reached before"]
    assert (told["separate"], told["loopback"], told["confined"]) == (True, False, False)
    assert (told["parent"], told["reached"]) == (1, False), "processes and network of its own"
    assert told["held"] == ["user", "privileges"]


def test_orphans_are_found_where_proc_is_that_of_another_namespace(told: dict[str, Any]) -> None:
    assert told["orphan has ended"]
    assert told["own child lives"]


def test_a_keeper_goes_on_where_it_may_not_be_killed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "write_text", refused)
    isolation.be_killed_first()
