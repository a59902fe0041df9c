"""Agents that are programs: what they may take, what they leave behind, and what their ends cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from barriers import needs
from drive import ends, repeat, rewards, until, wait_for
from loopback import needs_loopback
from processes import not_gone
from test_agents_in_pools import script
from test_workers import trees

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.environments.answers import LastWord, Lost
from slipstream.environments.hosting import HostSetup
from slipstream.environments.sources import EnvironmentSource, make_source
from slipstream.environments.workers import EnvironmentPool

MakePool = Callable[..., EnvironmentPool]
Kept = tuple[EnvironmentPool, VirtualClock, Path]
LIMIT_S = 7.0

PROGRAM = """
    import json, os, sys, time
    from http.client import HTTPConnection  # imported in a fraction of the time of a client of its own
    row = json.loads(sys.stdin.readline())
    place, _, path = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")
    key = os.environ["OPENAI_API_KEY"]
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]})
    http = HTTPConnection(place)
    http.request("POST", f"/{path}/chat/completions", body, {"authorization": f"Bearer {key}"})
    http.getresponse().read()
    http.close()
    do = row["do"]
    while do == "bomb":
        try:
            os.fork()
        except OSError:
            time.sleep(600)
    if do == "memory":
        bytearray(8 << 30)
    if do == "output":
        while True:
            os.write(1, b"x" * 65536)
    if do == "errors":
        os.write(2, b"y" * 1_000_000)
    if do == "sleep":
        time.sleep(600)
    if do == "exit":
        sys.exit("no more")
    if do == "write":
        for path in row["paths"]:
            try:
                open(path, "w").write("was here")
                print(json.dumps("written"))
                sys.exit(1)
            except OSError:
                pass
    if do == "children":
        for hides in range(4):
            if os.fork() == 0:
                if hides % 2:
                    os.setsid()
                time.sleep(600)
    print(json.dumps({"reward": row["reward"]}))
"""


MANY = """
    import os, time
    children = []
    try:
        while True:
            child = os.fork()
            if child == 0:
                os.setsid()
                time.sleep(600)
            children.append(child)
    except OSError:
        while any(os.getsid(child) == os.getsid(0) for child in children):
            time.sleep(0.01)
        print(0.5)
"""


WRITES = "import os; os.write(1, b'z\\n' * 1_000_000); print(0.5)"


@pytest.fixture
def make(make_agents_in_workers: MakePool) -> MakePool:
    needs_loopback()
    needs("network")
    return make_agents_in_workers


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """A pool that plays `PROGRAM` and `WRITES`, for tests at whose ends no episode is open and its worker lives; its
    clock, and the folder of the programs."""
    needs_loopback()
    needs("network")
    clock = VirtualClock()
    folder = tmp_path_factory.mktemp("program")
    sources = [make_source("program", command=script(folder, text)) for text in (PROGRAM, WRITES)]
    setup = HostSetup(sources, memory_bytes=512 << 20, step_limit_s=LIMIT_S, network="gateway")
    pool = EnvironmentPool(setup, num_workers=1, num_spares=0, clock=clock)
    try:
        pool.wait_ready()
        yield pool, clock, folder
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        pytest.param("bomb", "timed out", marks=pytest.mark.slow),  # as many as there may be: `MANY`
        ("output", "timed out"),
        pytest.param("sleep", "timed out", marks=pytest.mark.slow),
        ("memory", "exit code 1: MemoryError"),
        ("exit", "exit code 1: no more"),
    ],
)
def test_a_program_that_fails_costs_its_own_episode(kept: Kept, do: str, reason: str) -> None:
    needs("user", "processes")
    pool, clock, _ = kept
    for key, deed in (("bad", do), ("good", "none")):
        pool.open(key, 0, {"do": deed, "reward": 1.5})
    asked = {one.key: one for one in wait_for(pool, 2)}
    pool.give("bad", asked["bad"].request, repeat(asked["bad"]))  # type: ignore[arg-type,union-attr]
    if reason == "timed out":
        pool.poll()
        clock.advance(LIMIT_S)
    told = ends(pool, 1)
    assert isinstance(told["bad"], Lost)
    assert reason in told["bad"].reason
    pool.give("good", asked["good"].request, repeat(asked["good"]))  # type: ignore[arg-type,union-attr]
    assert rewards(ends(pool, 1)) == {"good": 1.5}
    pool.open("next", 0, {"do": "none", "reward": 2.5})
    assert rewards(ends(pool, 1)) == {"next": 2.5}
    assert pool.num_restarts == 0


def test_what_a_program_leaves_behind_ends_with_it_or_with_the_worker(make: MakePool, tmp_path: Path) -> None:
    """It holds the program's pipes, which must not keep the episode open."""
    needs("processes")
    pool = make(("program", script(tmp_path, PROGRAM)))
    pool.open("a", 0, {"do": "children", "reward": 1.0})
    assert rewards(ends(pool, 1)) == {"a": 1.0}
    left = trees(pool)
    pool.close()
    assert not not_gone(left)


def test_processes_that_are_left_behind_leave_room_for_the_next_program(make: MakePool, tmp_path: Path) -> None:
    needs("user", "processes")
    pool = make(("program", script(tmp_path, MANY)), ("program", script(tmp_path, "print(3)")))
    pool.open("many", 0, {})
    assert rewards(ends(pool, 1)) == {"many": 0.5}
    for key in range(4):  # one may have the places of the program that has ended
        pool.open(key, 1, {})
    assert rewards(ends(pool, 4)) == dict.fromkeys(range(4), 3.0)
    assert pool.num_restarts == 0


def test_a_program_writes_nothing_outside_its_folder(kept: Kept) -> None:
    needs("files", "user")
    pool, _, seen = kept
    paths = [str(seen / "marker"), "/marker", "/etc/marker", "/dev/shm/marker", "/proc/1/comm"]
    pool.open("a", 0, {"do": "write", "paths": paths, "reward": 1.0})
    assert rewards(ends(pool, 1)) == {"a": 1.0}
    assert not any(Path(path).exists() for path in paths[:4])


def test_much_on_standard_error_and_a_row_that_is_not_read_hold_nothing_up(kept: Kept) -> None:
    pool, *_ = kept
    pool.open("errors", 0, {"do": "errors", "reward": 1.0})
    pool.open("unread", 1, {"much": "x" * 1_000_000})
    assert rewards(ends(pool, 2)) == {"errors": 1.0, "unread": 0.5}


LIAR = """
    import json, os, sys, time
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        if "cancel" in told:
            continue
        do, number = told["row"]["do"], told["episode"]
        if do == "forge":  # of the episode before, which it plays as well
            print(json.dumps({"episode": number - 1, "reward": 7.0}), flush=True)
        if do == "noise":
            for one in ("word", [], {"episode": "0"}, {"episode": True, "reward": 9}, {"episode": 10**30}):
                print(json.dumps(one))
            print("[" * 100_000)
        if do == "exit":
            sys.exit("no more")
        if do == "long":
            print("x" * (2 << 20), flush=True)
            time.sleep(600)
        if do == "errors":
            sys.stderr.write("y" * 3_000_000 + "\\n")
        if do == "deaf":
            time.sleep(600)
        if do != "wait":
            print(json.dumps({"episode": number, "reward": told["row"].get("reward")}), flush=True)
"""


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentSource:
    return make_source("lines", command=script(tmp_path_factory.mktemp("liar"), LIAR))


@pytest.fixture
def of_liar(kept_pools: Any, liar: EnvironmentSource) -> EnvironmentPool:
    """A pool that plays `LIAR`, which the tests of the file share."""
    needs_loopback()
    needs("network")
    pool: EnvironmentPool = kept_pools.take(["liar"], [liar], "gateway")
    return pool


def test_answers_of_a_program_for_all_are_its_own_word(of_liar: EnvironmentPool) -> None:
    """Nobody else knows which of its episodes has which reward; what is no answer is passed over."""
    pool = of_liar
    pool.open("waits", 0, {"do": "wait"})
    pool.open("forges", 0, {"do": "forge", "reward": 1.0})
    pool.open("noisy", 0, {"do": "noise", "reward": 2.0})
    pool.open("errors", 0, {"do": "errors", "reward": 3.0})
    assert rewards(ends(pool, 4)) == {"waits": 7.0, "forges": 1.0, "noisy": 2.0, "errors": 3.0}
    for reward in (True, "1", [1], float("nan"), 1e999):
        pool.open("bad", 0, {"do": "none", "reward": reward})
        [one] = ends(pool, 1).values()
        assert isinstance(one, Lost)
        assert one.is_guilty is True
    assert pool.num_restarts == 0


def test_a_program_in_a_home_folder_is_run_from_a_copy_and_sees_none_of_it(
    make: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("files")
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    (home / "secret").write_text("secret")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    looks = LIAR.replace('told["row"].get("reward")', f"float(os.path.exists({str(home / 'secret')!r}))")
    pool = make(("lines", script(home, looks)))
    pool.open("looks", 0, {"do": "none"})
    assert rewards(ends(pool, 1)) == {"looks": 0.0}


@pytest.mark.parametrize(("do", "reason"), [("exit", "(exit code 1): no more"), ("long", "a line that is too long")])
def test_a_program_for_all_that_ends_costs_those_it_plays_and_is_started_again(
    of_liar: EnvironmentPool, do: str, reason: str
) -> None:
    pool = of_liar
    pool.open("waits", 0, {"do": "wait"})
    pool.open("ends", 0, {"do": do})
    told = ends(pool, 2)
    for one in told.values():
        assert isinstance(one, Lost)
        assert one.is_guilty is None, "either may have ended it"
        assert reason in one.reason
    pool.open("alone", 0, {"do": do})
    [alone] = ends(pool, 1).values()
    assert isinstance(alone, Lost)
    assert alone.is_guilty is True
    pool.open("next", 0, {"do": "none", "reward": 1.0})
    assert rewards(ends(pool, 1)) == {"next": 1.0}
    assert pool.num_restarts == 0


def test_a_program_for_all_that_reads_nothing_is_killed_before_too_much_waits_for_it(of_liar: EnvironmentPool) -> None:
    pool = of_liar
    for key in range(24):
        pool.open(key, 0, {"do": "deaf", "much": "x" * (1 << 20)})
    told = until(pool, lambda: pool.num_open < 24)
    assert all(isinstance(one, Lost) and "did not read" in one.reason for one in told), told


def test_a_program_for_all_that_cannot_start_again_is_tried_no_more_often_than_episodes_fail(
    make: MakePool, tmp_path: Path
) -> None:
    once = """
    import os, sys
    path = os.path.join(os.environ["HOME"], "starts")
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) == 1:
        print('{"ready": true}', flush=True)
        sys.stdin.readline()
    sys.exit(f"start {os.path.getsize(path)}")
    """
    pool = make(("lines", script(tmp_path, once)))
    pool.open("first", 0, {})
    assert "start 1" in ends(pool, 1)["first"].reason  # type: ignore[union-attr]
    for key in range(50):
        pool.open(key, 0, {})
    told = ends(pool, 50)
    assert all(isinstance(one, Lost) and "was not ready" in one.reason for one in told.values())
    starts = {one.reason for one in told.values() if isinstance(one, Lost)}
    assert len(starts) < 10, "those that wait for a start share it"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys; sys.exit('no luck')", "it ended: no luck"),
        ("print('hello', flush=True); input()", "and not b'hello"),
        ("""print('{"error": "no such task"}', flush=True)""", "no such task"),
        pytest.param("print('x' * (2 << 20), flush=True)", "too long", marks=pytest.mark.slow),
    ],
)
def test_a_program_for_all_that_is_not_ready_is_an_error_before_anything_starts(
    make: MakePool, tmp_path: Path, text: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match="an agent cannot be started") as caught:
        make(("lines", script(tmp_path, text)))
    assert reason in str(caught.value)


def test_a_script_that_a_worker_cannot_see_is_run_from_a_copy(make: MakePool, tmp_path: Path) -> None:
    needs("files", "user")
    words = script(tmp_path, "print(0.5)")
    tmp_path.chmod(0o700)
    pool = make(("program", words))
    pool.open("a", 0, {})
    [told] = ends(pool, 1).values()
    assert isinstance(told, LastWord)
    assert told.reward == 0.5


def test_a_program_that_a_worker_cannot_see_is_an_error_before_anything_starts(make: MakePool, tmp_path: Path) -> None:
    needs("files", "user")
    program = tmp_path / "agent"
    program.write_text("#!/bin/sh\necho 1\n")
    program.chmod(0o755)
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="cannot be run here"):
        make(("program", [str(program)]))
