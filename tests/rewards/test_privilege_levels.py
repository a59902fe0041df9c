"""What holds with fewer rights: each level's barriers, and that whatever a barrier is said to stop is stopped."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from hostile_programs import ATTACKS
from reward_jobs import HERE

EVERYWHERE = {"limits", "privileges", "syscalls", "network"}
NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --inh-caps=-all --ambient-caps=-all"
AS_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]

PYTHONPATH = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]))

# How to get there, and the barriers that have to hold there.
LEVELS: dict[str, tuple[list[str], set[str]]] = {
    "user with namespaces": (AS_USER, EVERYWHERE | {"files", "processes", "user"}),
    "user with namespaces, without capabilities": (
        [*AS_USER, "env", f"PYTHONPATH={HERE.parent / 'without_capabilities'}:{PYTHONPATH}"],
        EVERYWHERE | {"user"},
    ),
    "user without namespaces": ([*AS_USER, "--keep-caps", "sh", "-c", NO_NAMESPACES + ' "$@"', "sh"], EVERYWHERE),
    "root of a container with one user": (
        ["unshare", "--user", "--map-root-user"],
        EVERYWHERE | {"files", "processes"},
    ),
    "root without CAP_SYS_ADMIN": (["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"], EVERYWHERE),
}


def is_possible(prefix: list[str]) -> bool:
    try:
        return subprocess.run([*prefix, "true"], capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


@pytest.mark.parametrize(
    "level", [*list(LEVELS)[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in list(LEVELS)[2:])]
)
def test_what_is_said_to_hold_holds(level: str, tmp_path: Path) -> None:
    prefix, expected = LEVELS[level]
    if platform.machine() not in ("x86_64", "aarch64") or not is_possible(prefix):
        pytest.skip("this machine lets nobody have these rights")
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [*prefix, sys.executable, str(HERE / "attacks_at_a_level.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    isolation = set(told["isolation"])
    if "root" in level:  # more where the interpreter's folders are open to all: another user can be become then
        isolation -= {"user"} - expected
    assert isolation == expected
    assert {name: one for name, one in told["outcomes"].items() if ATTACKS[name][0] & isolation and one != "held"} == {}
    assert ("code" in told["refusal"]) == ("user" not in told["isolation"] or "processes" not in isolation)
    if level == "user without namespaces":  # these attacks are real
        breached = {name for name, one in told["outcomes"].items() if one == "breached"}
        assert {"keys and run folders", "processes", "writes"} <= breached
