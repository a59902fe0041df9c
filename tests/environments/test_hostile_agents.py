"""Hostile agents in jailed workers: their network is their own, and they cost their episode or their worker."""

from __future__ import annotations

import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from barriers import needs
from drive import ends, repeat, rewards, until, wait_for
from hosted_agents import POST
from loopback import needs_loopback
from test_agents_in_pools import script

from slipstream.core.errors import ConfigError
from slipstream.environments import hosting
from slipstream.environments.answers import Asked, LastWord, Lost
from slipstream.environments.asks import Ask, Refused, plain
from slipstream.environments.sources import make_source
from slipstream.environments.workers import EnvironmentPool
from slipstream.jail.protocol import frame

MakePool = Callable[..., EnvironmentPool]
LIMIT_S = 7.0

AGENT = (
    POST
    + """
    import asyncio, socket

    async def talk(base_url, api_key, text):
        return await asyncio.to_thread(post, base_url, api_key, text)

    def reached(family, kind, address, data=b"x"):
        try:
            with socket.socket(family, kind) as one:
                one.settimeout(0.3)
                one.connect(address)
                one.send(data)
                if kind == socket.SOCK_DGRAM:
                    one.send(data)  # an error that came back is told now
                return "reached"
        except OSError as error:
            return type(error).__name__

    async def run(row, base_url, api_key):
        assert await talk(base_url, api_key, "hi") == "hi"
        if row["do"] == "talk":
            return row["reward"]
        if row["do"] == "connect":
            family, kind = getattr(socket, row["family"]), getattr(socket, row["kind"])
            address = row["address"]
            said = reached(family, kind, tuple(address) if isinstance(address, list) else address)
            assert said != "reached", "reached"
            return 1.0
        if row["do"] == "frames":
            for fd in range(3, 20):
                try:
                    os.write(fd, bytes.fromhex(row["bytes"]))
                except OSError:
                    pass
            return row["reward"]
        if row["do"] == "look":
            found = set()
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    with open(f"/proc/{pid}/environ", "rb") as file:
                        found.add(file.read())
                except OSError:
                    pass
            assert not any(row["secret"].encode() in one for one in found), "found"
            import gc
            held = [one for one in gc.get_objects() if isinstance(one, dict) and row["secret"] in one]
            assert not held, "found"
            return 1.0
        if row["do"] == "die":
            os._exit(7)
        if row["do"] == "show":
            await talk(base_url, api_key, api_key)
            return 0.0
        raise ValueError(row)
"""
)


@pytest.fixture
def make(make_agents_in_workers: MakePool) -> MakePool:
    needs_loopback()
    needs("network")
    return make_agents_in_workers


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> str:
    [_, path] = script(tmp_path_factory.mktemp("agent"), AGENT)
    return f"{path}:run"


@pytest.fixture
def of_agent(kept_pools: Any, agent: str) -> EnvironmentPool:
    """A pool of two workers for `AGENT`, which the tests of the file share."""
    needs_loopback()
    pool: EnvironmentPool = kept_pools.take([agent], [make_source("agent", agent)], "gateway", num_workers=2)
    return pool


def test_nothing_but_the_gateway_can_be_reached(of_agent: EnvironmentPool) -> None:
    needs("network", "syscalls")
    pool = of_agent
    assert pool.isolation >= {"network", "syscalls"}
    rows: list[dict[str, Any]] = []
    name = f"\0slipstream-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,  # names of sockets are short
        socket.create_server(("127.0.0.1", 0)) as here,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as of_a_file,
    ):
        datagrams.bind(("127.0.0.1", 0))
        abstract.bind(name)
        abstract.listen()
        file = Path(folder) / "socket"
        of_a_file.bind(str(file))
        file.chmod(0o777)
        of_a_file.listen()
        for address in (["127.0.0.1", here.getsockname()[1]], ["192.0.2.1", 80], ["10.0.0.1", 53], ["0.0.0.0", 1]):
            rows.append({"family": "AF_INET", "kind": "SOCK_STREAM", "address": address})
        for address in (list(datagrams.getsockname()), ["192.0.2.1", 53], ["255.255.255.255", 9]):
            rows.append({"family": "AF_INET", "kind": "SOCK_DGRAM", "address": address})
        for address in (["::1", here.getsockname()[1]], ["2001:db8::1", 80]):
            rows.append({"family": "AF_INET6", "kind": "SOCK_STREAM", "address": address})
        for address in (name, str(file)):
            rows.append({"family": "AF_UNIX", "kind": "SOCK_STREAM", "address": address})
            rows.append({"family": "AF_UNIX", "kind": "SOCK_DGRAM", "address": address})
        rows.append({"family": "AF_NETLINK", "kind": "SOCK_RAW", "address": [0, 0]})
        rows.append({"family": "AF_VSOCK", "kind": "SOCK_STREAM", "address": [2, 22]})
        rows.append({"family": "AF_PACKET", "kind": "SOCK_RAW", "address": ["lo", 0]})
        for key, row in enumerate(rows):
            pool.open(key, 0, {"do": "connect", **row})
        assert rewards(ends(pool, len(rows))) == dict.fromkeys(range(len(rows)), 1.0)
        for one in (here, abstract, of_a_file, datagrams):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.accept() if one is not datagrams else one.recv(10)


def test_one_worker_knows_no_keys_of_another(of_agent: EnvironmentPool) -> None:
    """Those of its own it may: all of its episodes share a process."""
    needs("processes")
    pool = of_agent
    until(pool, lambda: all(site.is_ready for site in pool._sites))
    pool.open("shows", 0, {"do": "show"})
    [first] = wait_for(pool, 1)
    assert isinstance(first, Asked)
    pool.give("shows", first.request, repeat(first))
    [shown] = wait_for(pool, 1)
    assert isinstance(shown, Asked)
    assert shown.ask.messages is not None
    secret = shown.ask.messages[0]["content"]
    assert len(secret) >= 20
    pool.open("looks", 0, {"do": "look", "secret": secret})
    pool.poll()
    first_site, second_site = (pool._site_of[pool._by_key[key].number] for key in ("shows", "looks"))
    assert first_site is not second_site
    assert rewards(ends(pool, 1)) == {"looks": 1.0}


def forged(message: msgspec.Struct) -> str:
    return frame(message).hex()


ASK = Ask(messages=[{"role": "user", "content": "x"}])
DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
BYTES = {"name": "f", "arguments": {"a": b"x"}}
NESTED = Ask(messages=ASK.messages, tools=[{"function": {"x": DEEP}}])
LIES: dict[str, Callable[[int], str]] = {
    "no message": lambda _: "0500000093019101c0",
    "a length of 4 GB": lambda _: struct.pack("<I", (1 << 32) - 1).hex(),
    "the same request twice": lambda number: 2 * forged(hosting.AskedTurn(number, 77, ASK)),
    "a nested tool": lambda number: forged(hosting.AskedTurn(number, 77, NESTED)),
    "a reward that is none": lambda number: forged(hosting.Closed(number, float("nan"))),
    "a turn of an environment": lambda number: forged(hosting.Spoke(number, 0, [], False, 1.0, 0.0, 0, 0)),
    "stuck without being late": lambda number: forged(hosting.Stuck(number)),
    "the end of no episode": lambda _: forged(hosting.Closed(1_000, 1.0)),
}
"""By the number that the pool gives the episode."""


SOME = ("the same request twice", "a reward that is none")


@pytest.mark.parametrize(
    "lies",
    [SOME, pytest.param([lie for lie in LIES if lie not in SOME], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_a_lie_to_the_pool_costs_its_worker(of_agent: EnvironmentPool, lies: Sequence[str]) -> None:
    pool = of_agent
    for count, lie in enumerate(lies, start=1):
        number = next(pool._numbers) + 1
        pool.open(lie, 0, {"do": "frames", "bytes": LIES[lie](number), "reward": 9.0})
        [one] = ends(pool, 1).values()
        assert isinstance(one, Lost), one
        assert "bad output" in one.reason
        assert one.is_guilty is True
        assert pool.num_restarts == count
    pool.open("next", 0, {"do": "talk", "reward": 2.0})
    assert rewards(ends(pool, 1)) == {"next": 2.0}


def test_requests_of_unknown_episodes_are_passed_over(of_agent: EnvironmentPool) -> None:
    """An episode that has ended may have sent one a moment ago."""
    pool = of_agent
    pool.open("a", 0, {"do": "frames", "bytes": forged(hosting.AskedTurn(99, 0, ASK)), "reward": 9.0})
    assert rewards(ends(pool, 1)) == {"a": 9.0}
    assert pool.num_restarts == 0


CALL = {"function": {"name": "f", "arguments": {}}}
JUNK: list[Ask] = [
    Ask(),
    Ask(messages=[], text=None),
    Ask(messages=[{"role": "user", "content": "x"}], text="y"),
    Ask(messages=[{"role": "king", "content": "x"}]),
    Ask(messages=[{"role": "user", "content": [1]}]),
    Ask(messages=[{"role": "user"}]),
    Ask(messages=[{"role": "user", "content": "x", "name": {"a": 1}}]),
    Ask(messages=[{"role": "assistant", "content": "x", "tool_calls": [3]}]),
    Ask(messages=[{"role": "assistant", "content": "x", "tool_calls": 5}]),
    Ask(messages=[{"role": "assistant", "content": "x", "tool_calls": [CALL] * 129}]),
    Ask(messages=[{"role": "assistant", "content": "x", "tool_calls": [{"function": BYTES}]}]),
    Ask(messages=[{"role": "user", "content": "x"}], tools=[{"function": BYTES}]),
    Ask(messages=[{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": 3, "arguments": {}}}]}]),
    Ask(messages=[{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]),
    Ask(messages=[{"role": "user", "content": "x"}], tools=[{"function": {"name": None}}]),
    Ask(messages=[{"role": "user", "content": "x"}], tools=[{"function": {"name": "f"}}] * 129),
]


@pytest.mark.parametrize("number", range(len(JUNK)))
def test_asks_that_no_gateway_sends_are_refused(number: int) -> None:
    with pytest.raises(Refused):
        plain(JUNK[number])


def test_an_asks_fields_beyond_the_known_ones_are_dropped() -> None:
    message = {"role": "user", "content": "x", "tool_calls": [{"a": DEEP}], "prefix": True, "name": "n"}
    assert plain(Ask(messages=[message])).messages == [{"role": "user", "content": "x", "name": "n"}]


def test_without_a_network_of_its_own_a_worker_starts_no_agents(
    make_agents_in_workers: MakePool, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"agents ask for their turns at 127\.0\.0\.1, and there is no network"):
        make_agents_in_workers("run", network="none")


AS_USER = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps", "sh", "-c"]
NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces; exec setpriv --inh-caps=-all --ambient-caps=-all"


def test_where_namespaces_are_not_permitted_agents_get_no_network_of_the_machine(tmp_path: Path) -> None:
    [_, path] = script(tmp_path, AGENT)
    code = f"""
from slipstream.environments.hosting import HostSetup
from slipstream.environments.sources import make_source
from slipstream.environments.workers import EnvironmentPool
source = make_source("agent", {path + ":run"!r})
setup = HostSetup([source], memory_bytes=512 << 20, step_limit_s=100.0, network="gateway")
pool = EnvironmentPool(setup, num_workers=1, num_spares=0)
try:
    pool.wait_ready()
finally:
    pool.close()
"""
    prefix = [*AS_USER, NO_NAMESPACES + ' "$@"', "sh"]
    if platform.machine() not in ("x86_64", "aarch64") or not is_possible(prefix):
        pytest.skip("this machine lets nobody have these rights")
    done = subprocess.run([*prefix, sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ConfigError: agents ask for their turns at 127.0.0.1, and there is no network for that" in done.stderr


def is_possible(prefix: list[str]) -> bool:
    try:
        return subprocess.run([*prefix, "true"], capture_output=True, timeout=20).returncode == 0
    except OSError:
        return False


def test_the_machines_network_will_do(make_agents_in_workers: MakePool) -> None:
    pool = make_agents_in_workers("run_light", network="host")
    pool.open("a", 0, {"do": "talk", "text": "abc", "turns": 1})
    assert rewards(ends(pool, 1)) == {"a": 3.0}


def test_a_worker_that_dies_leaves_its_episodes_as_suspects(make: MakePool) -> None:
    """Each has a call, so any may have been it; those of the other worker go on."""
    pool = make("run_light", num_workers=2)
    until(pool, lambda: all(site.is_ready for site in pool._sites))
    rows = {"dies": {"do": "die", "turns": 1}, "other": {"do": "talk", "text": "abc", "turns": 1}}
    first: list[Any] = []
    for key in ("dies", "other", "beside"):  # the one with the fewest: the first and the third share a worker
        pool.open(key, 0, rows.get(key, rows["other"]))
        first += pool.poll()
    asked = {one.key: one for one in [*first, *wait_for(pool, 3 - len(first))]}
    pool.give("dies", asked["dies"].request, repeat(asked["dies"]))  # type: ignore[arg-type,union-attr]
    told = {one.key: one for one in wait_for(pool, 2)}
    assert {key: one.is_guilty for key, one in told.items() if isinstance(one, Lost)} == {"dies": None, "beside": None}
    pool.give("other", asked["other"].request, repeat(asked["other"]))  # type: ignore[arg-type,union-attr]
    [one] = ends(pool, 1).values()
    assert isinstance(one, LastWord)
    assert one.reward == 3.0


@pytest.mark.slow  # with two workers, `test_a_lie_to_the_pool_costs_its_worker`
def test_many_workers_go_on_after_any_number_of_deaths(of_agent: EnvironmentPool) -> None:
    pool = of_agent
    for number in range(3):
        pool.open(number, 0, {"do": "die"})
        assert isinstance(ends(pool, 1)[number], Lost)
    for key in range(10):
        pool.open(key, 0, {"do": "talk", "reward": key})
    assert rewards(ends(pool, 10)) == {key: float(key) for key in range(10)}
    assert pool.num_restarts == 3
