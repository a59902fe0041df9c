"""Cores and memory by a container's limits."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from slipstream.controller.placement import thread_environment
from slipstream.core import machine

COUNTS = """
import ctypes, sys
from slipstream.core.machine import num_cores
def count():
    before = num_cores()
    if sys.argv[1:]:
        ctypes.CDLL(sys.argv[1])
    else:
        import torch
    print(before, num_cores())
"""
LIBRARIES = sorted(Path(sysconfig.get_path("purelib"), "torch", "lib").glob("libgomp*"))


@pytest.mark.parametrize(
    ("quota", "first", "cores"),
    [
        ("max 100000", None, 8),
        ("150000 100000", None, 2),
        ("5000 100000", None, 1),
        ("", None, 8),
        (None, ("150000", "100000"), 2),
        (None, ("5000", "100000"), 1),
        (None, ("-1", "100000"), 8),
    ],
)
def test_a_quota_is_a_number_of_cores(
    quota: str | None,
    first: tuple[str, str] | None,
    cores: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`first` are the files of the first version of cgroups."""
    files = [tmp_path / name for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
    for file, text in zip(files, (quota, *(first or (None, None))), strict=True):
        if text is not None:
            file.write_text(f"{text}\n")
    monkeypatch.setattr(machine, "CGROUP_QUOTA", files[0])
    monkeypatch.setattr(machine, "FIRST_CGROUP_QUOTA", tuple(files[1:]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert machine.num_cores() == cores


FIRST_CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
SITE = {"OMP_PROC_BIND": "true", "GOMP_CPU_AFFINITY": str(FIRST_CORE)}


def counted(where: str, *library: str) -> str:
    """Return the numbers of cores before and after torch, or just its `library`, was loaded in a process."""
    code, added = "count()", thread_environment(1) if where == "its children" else {}
    if where == "the command":
        code = "from slipstream import __main__, cli\ncli.script = count\n__main__.script()"
    done = subprocess.run(
        [sys.executable, "-c", COUNTS + code, *library],
        env=os.environ | SITE | added,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(machine.num_cores() < 2, reason="there is one core to be on")
@pytest.mark.parametrize("where", ["the command", "its children"])
def test_all_cores_are_used_where_a_site_binds_threads_to_them(where: str) -> None:
    """Where libgomp binds threads, torch's import leaves the thread that imports it on the first core."""
    before, after = counted(where).split()
    assert before == after == str(machine.num_cores())


@pytest.mark.skipif(machine.num_cores() < 2, reason="there is one core to be on")
@pytest.mark.skipif(not LIBRARIES, reason="torch brings no libgomp")
@pytest.mark.parametrize(("where", "left"), [("the command", None), ("its children", None), ("neither", "1")])
def test_the_library_that_binds_threads_leaves_all_cores(where: str, left: str | None) -> None:
    """As above, with the part of torch that does it: what torch is beside that takes seconds to import."""
    cores = str(machine.num_cores())
    assert counted(where, str(LIBRARIES[0])).split() == [cores, left or cores]


def test_the_lowest_limit_of_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = machine.memory_bytes()
    limits = [tmp_path / name for name in ("none", "max", "low", "high")]
    for path, text in zip(limits[1:], ("max", f"{total // 2}", f"{2 * total}"), strict=True):
        path.write_text(text)
    monkeypatch.setattr(machine, "CGROUP_LIMITS", limits)
    assert machine.memory_bytes() == total // 2
