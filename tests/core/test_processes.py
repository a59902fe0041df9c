"""Processes of this package's on machines unlike ours: an older Python, packages in other folders."""

from __future__ import annotations

import errno
import os
import select
import site
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from slipstream.controller.placement import why_no_processes
from slipstream.core.processes import module_folders, open_pidfd
from slipstream.jail.protocol import WorkerReady
from slipstream.jail.sandbox import JailedWorker, Permissions, WorkerKind

DEADLINE_S = 60.0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has them")
def test_the_end_of_a_process_is_seen_by_a_python_that_was_built_for_older_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert not why_no_processes()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    descriptor = open_pidfd(process.pid)
    assert not os.get_inheritable(descriptor)
    assert not select.select([descriptor], [], [], 0)[0]
    process.communicate()
    assert select.select([descriptor], [], [], DEADLINE_S)[0]
    os.close(descriptor)
    with pytest.raises(ProcessLookupError) as failed:
        open_pidfd(process.pid)
    assert failed.value.errno == errno.ESRCH


def test_a_jailed_worker_finds_what_lies_on_its_caller_s_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_on_the_path.py").write_text(
        "import socket, sys\nfrom slipstream.jail.protocol import WorkerReady, frame\n"
        "socket.socket(fileno=int(sys.argv[1])).send(frame(WorkerReady(['found'])))\n"
    )
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", tmp_path.name]))
    kind = WorkerKind("only_on_the_path", "on-path", msgspec.msgpack.Decoder(WorkerReady), 1024)
    worker = JailedWorker(kind, WorkerReady([]), Permissions())
    try:
        assert select.select([worker], [], [], DEADLINE_S)[0]
        assert worker.receive() == [WorkerReady(["found"])], worker.failure
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("is_used", "told"), [(True, {"PYTHONUSERBASE": "/home/a/.local"}), (False, {"PYTHONNOUSERSITE": "1"})]
)
def test_packages_of_the_user_are_found_where_the_caller_finds_them(
    is_used: bool, told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "ENABLE_USER_SITE", is_used)
    monkeypatch.setattr(site, "USER_BASE", "/home/a/.local")
    found = module_folders()
    assert {name: value for name, value in found.items() if name != "PYTHONPATH"} == told
