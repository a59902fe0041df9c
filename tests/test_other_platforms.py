"""Systems that lack what Linux has, and containers that lack rights: what works, and what is said of the rest."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slipstream.controller.placement import check_processes, why_no_processes
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.jail.confinement import WorkerLayout

SMALL = (
    *("--steps", "2", "--warm-start.steps", "2", "--eval.num-prompts", "20"),
    *("--model.hidden-size", "32", "--model.intermediate-size", "64", "--out"),
)

# What only Linux has is taken away once the libraries are there, which decide by the system when they are imported. The
# selector stays: that of macOS has a descriptor, too.
AS_ON_MACOS = """
import os, resource, selectors, sys
import psutil, torch, transformers.models.llama.modeling_llama
for module, names in {
    os: "pidfd_open O_PATH O_TMPFILE sched_getaffinity sched_setaffinity posix_fallocate unshare setns memfd_create",
    resource: "prlimit",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
selectors.KqueueSelector = selectors.EpollSelector
sys.platform = "darwin"
from slipstream.cli import main
sys.exit(main(sys.argv[1:]))
"""

# A worker as on macOS, whose system knows the limit of the address space by name only, and has no /proc.
WORKER_ON_MACOS = """
import pathlib, resource, sys
from slipstream.jail import confinement, isolation

setrlimit, read_text = resource.setrlimit, pathlib.Path.read_text

def limited(which, limits):
    if which == resource.RLIMIT_AS:
        raise ValueError("current limit exceeds maximum limit")
    setrlimit(which, limits)

def read(path, *arguments):
    if path.is_relative_to("/proc"):
        raise FileNotFoundError(path)
    return read_text(path, *arguments)

sys.platform, resource.setrlimit, pathlib.Path.read_text = "darwin", limited, read

def serve(connection, held, _helper):
    isolation.limit_resources(1 << 30, is_own_user=False, open_files=100)
    connection.send(str(resource.getrlimit(resource.RLIMIT_NOFILE)).encode())
    connection.recv(1)

sys.exit(confinement.keep(sys.argv[1:], serve))
"""

# A user without capabilities, who can make no namespace, with a container's 64 MiB of shared memory.
IN_A_CONTAINER = """
mount -t tmpfs -o size=64m tmpfs /dev/shm
echo 0 > /proc/sys/user/max_user_namespaces
exec setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all --no-new-privs "$@"
"""
NAMESPACES = ["unshare", "--user", "--mount", "--map-user=1000", "--map-group=1000", "--keep-caps"]


def test_without_pidfd_no_executor_has_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("quickstart")
    check_processes(config, (), has_workers=True)

    def refused(_pid: int) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert "pidfd_open is refused (Operation not permitted)" in why_no_processes()
    with pytest.raises(ConfigError, match="host = 'inline'"):
        check_processes(config, (), has_workers=True)
    check_processes(resolve("quickstart", {"host": "inline"}), (), has_workers=True)


def test_a_worker_on_macos_is_limited_and_ends_with_its_pool(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    layout = msgspec.json.encode(WorkerLayout(scratch=str(tmp_path), sys_path=sys.path, private=[])).decode()
    with ours, theirs:
        command = [sys.executable, "-c", WORKER_ON_MACOS, str(theirs.fileno()), layout]
        keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], start_new_session=True, text=True
        )
        theirs.close()
        ours.settimeout(60)
        try:
            assert ours.recv(100) == b"(100, 100)"
            assert keeper.stdin is not None
            keeper.stdin.close()
            assert ours.recv(100) == b"", "its server has ended"
            assert keeper.wait(60) == 0
        finally:
            keeper.kill()
            keeper.wait()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_macos_is_told_what_is_missing_and_runs_inline(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", AS_ON_MACOS, *arguments], capture_output=True, text=True, timeout=600
        )

    refused = command("run", "quickstart", *SMALL, str(out))
    assert refused.returncode == 2
    assert "this is darwin" in refused.stderr
    assert "host = 'inline'" in refused.stderr
    assert not out.exists()
    told = {each["name"]: each for each in json.loads(command("doctor", "--json").stdout)["features"]}
    assert not told["executors in processes of their own"]["works"]
    done = command("run", "quickstart", *SMALL, str(out), "--host", "inline")
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["steps"] == 2
    assert command("eval", str(out), "--num-prompts", "20").returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_quickstart_runs_in_a_plain_container(tmp_path: Path) -> None:
    prefix = [*NAMESPACES, "sh", "-ec", IN_A_CONTAINER, "sh"]
    try:
        is_possible = subprocess.run([*prefix, "true"], capture_output=True, timeout=20).returncode == 0
    except OSError:
        is_possible = False
    if not is_possible:
        pytest.skip("this machine lets nobody have these rights")
    out = tmp_path / "run"
    run = subprocess.run(
        [*prefix, sys.executable, "-m", "slipstream", "run", "quickstart", *SMALL, str(out)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "done"
    assert summary["steps"] == 2
