"""`slipstream launch`: what the user says, turned into a cluster, and into the arguments of a torchrun agent."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from listeners import listeners
from torch.distributed import TCPStore

from slipstream.controller import meeting
from slipstream.controller.meeting import Listen, Meeting, RunSpec
from slipstream.controller.pipeline import Node
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.keys import RUN_KEY_VARIABLE, RunKeys
from slipstream.launch import Job, cluster_of, join, meet, torchrun

NODES = (Node("trainer", os.path.join, host="torchrun", ranks=4), Node("rewards", os.path.join))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Of a run that was announced."""
    keys, file = RunKeys.new(), tmp_path / "key"
    keys.save(file)
    place = Meeting(Listen(), timeout_s=10)
    spec = RunSpec(
        "run-1",
        "start-1",
        tmp_path,
        NODES,
        (),
        60.0,
        5.0,
        delta=False,
        relays=True,
        wall_minus_clock_s=0.0,
        started_s=0.0,
    )
    place.announce(spec, keys)
    yield Job("trainer", f"127.0.0.1:{place.port}", key_file=file)
    del place  # and with it the store


def value_of(option: str, command: list[str]) -> str:
    return command[command.index(option) + 1]


def test_the_key_is_made_once_and_private(tmp_path: Path) -> None:
    file = tmp_path / "key"
    first = cluster_of("127.0.0.1:0", file, None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert cluster_of("127.0.0.1:0", file, None).keys == first.keys
    assert first.remote == {"trainer", "generator"}
    assert cluster_of("127.0.0.1:0", file, None, ["reference"]).remote == {"trainer", "generator", "reference"}


def test_without_a_file_the_key_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = RunKeys.new()
    monkeypatch.setenv(RUN_KEY_VARIABLE, keys.as_environment()[RUN_KEY_VARIABLE])
    assert cluster_of("127.0.0.1:0", None, None).keys == keys
    assert RUN_KEY_VARIABLE not in os.environ, "what is started does not get it"
    with pytest.raises(ConfigError, match="needs a key"):
        cluster_of("127.0.0.1:0", None, None)


@pytest.mark.parametrize(
    ("given", "listen"),
    [
        ("127.0.0.1:29400", Listen("127.0.0.1", 29400)),
        ("[::1]:0", Listen("::1", 0)),
        ("::1:7", Listen("::1", 7)),
    ],
)
def test_addresses_to_listen_at(tmp_path: Path, given: str, listen: Listen) -> None:
    assert cluster_of(given, tmp_path / "key", None).listen == listen
    file = tmp_path / "address"
    assert cluster_of(given, tmp_path / "key", file).listen == replace(listen, address_file=file)


@pytest.mark.parametrize(
    "given", ["127.0.0.1", ":7", "127.0.0.1:x", "127.0.0.1:65536", "0.0.0.0:0", "[::]:0", "no.such.host.invalid:0"]
)
def test_what_is_no_such_address_is_bad_input(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError):
        cluster_of(given, tmp_path / "key", None)
    assert not (tmp_path / "key").exists()


def test_a_name_that_means_loopback_on_its_own_machine_is_refused(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's /etc/hosts has it for a machine's own name."""
    own = socket.getaddrinfo("127.0.1.1", None, type=socket.SOCK_STREAM)
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: own if host == "node-a" else found(host, *a, **k))
    for attempt in (
        lambda: cluster_of("node-a:0", tmp_path / "key", None),
        lambda: torchrun(replace(job, address="node-a")),
    ):
        with pytest.raises(ConfigError, match=r"'node-a' means 127\.0\.1\.1 on this machine"):
            attempt()
    assert cluster_of("localhost:0", tmp_path / "key", None).listen == Listen("localhost", 0)


def test_a_group_of_a_run_that_is_done_ends_well(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its controller is gone, and nobody else would tell it."""
    monkeypatch.setattr(meeting, "read_summary", lambda _: SimpleNamespace(status="done", steps=7))
    away = replace(job, controller="127.0.0.1:1", join_timeout=60.0, out=tmp_path)
    join(replace(away, steps=7))
    with pytest.raises(SlipstreamError, match=r"no controller answered for 0\.1 s"):
        join(replace(away, steps=8, join_timeout=0.1))


def test_how_long_others_are_waited_for_is_said_to_all(job: Job, tmp_path: Path) -> None:
    assert cluster_of("127.0.0.1:0", tmp_path / "key", None, join_timeout=9.0).join_timeout_s == 9.0
    command = torchrun(replace(job, join_timeout=9.0, out=tmp_path, steps=7)).command
    assert [value_of(option, command) for option in ("--join-timeout", "--out", "--steps")] == [
        "9.0",
        str(tmp_path),
        "7",
    ]
    assert value_of("--join-timeout", torchrun(job).command) == "600.0"


def test_a_group_on_one_machine(job: Job) -> None:
    command, environment, *_ = torchrun(replace(job, threads=3, max_restarts=5))
    given = {"--nproc-per-node": "4", "--max-restarts": "5", "--nnodes": "1", "--node-rank": "0"}
    given |= {"--rdzv-backend": "slipstream", "--rdzv-id": "run-1-trainer", "--local-addr": "127.0.0.1"}
    assert {option: value_of(option, command) for option in given} == given
    member = command[command.index("slipstream.controller.process") :]
    assert value_of("--controller", member) == job.controller
    assert value_of("--group", member) == "trainer"
    assert value_of("--address", member) == "127.0.0.1"
    assert value_of("--threads", member) == "3"
    assert value_of("--key-file", member) == str(job.key_file)
    assert RUN_KEY_VARIABLE not in environment
    assert environment["OMP_NUM_THREADS"] == "3"


def test_the_key_goes_on_as_it_came(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.key_file is not None
    keys = RunKeys.load(job.key_file)
    monkeypatch.setenv(RUN_KEY_VARIABLE, keys.as_environment()[RUN_KEY_VARIABLE])
    command, environment, *_ = torchrun(replace(job, key_file=None))
    assert "--key-file" not in command
    assert environment.items() >= keys.as_environment().items()
    assert keys.as_environment()[RUN_KEY_VARIABLE] not in " ".join(command), "arguments are seen by everybody"


def test_a_group_on_two_machines_meets_by_the_address_that_the_others_reach(job: Job) -> None:
    two = replace(job, nnodes=2, node_rank=1, rendezvous="10.0.0.1:29500", address="127.0.0.1")
    command, *_ = torchrun(two)
    given = {"--nproc-per-node": "2", "--nnodes": "2", "--node-rank": "1", "--rdzv-backend": "slipstream"}
    given |= {"--rdzv-id": "run-1-trainer", "--local-addr": "127.0.0.1"}
    assert {option: value_of(option, command) for option in given} == given


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("127.0.0.2", "127.0.0.1"),  # what a machine may call itself
        ("no.such.host.invalid", "127.0.0.1"),  # its own name may mean nothing to it yet
    ],
)
def test_machine_0_listens_where_the_others_look_for_it_and_nowhere_else(job: Job, name: str, host: str) -> None:
    two = replace(job, nnodes=2, rendezvous=f"{name}:0", address="127.0.0.1")
    store = meet(two)
    assert isinstance(store, TCPStore)
    assert listeners(os.getpid(), store.port) == {host}


def test_machine_0_says_so_where_it_cannot_listen(job: Job) -> None:
    taken = job.controller.rpartition(":")[2]
    with pytest.raises(ConfigError, match="cannot listen there"):
        meet(replace(job, nnodes=2, rendezvous=f"127.0.0.1:{taken}", address="127.0.0.1"))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"nnodes": 3, "rendezvous": "10.0.0.1:1"}, "do not divide"),
        ({"nnodes": 2, "node_rank": 2, "rendezvous": "10.0.0.1:1"}, "counted from 0"),
        ({"nnodes": 2}, "rendezvous"),
        ({"rendezvous": "10.0.0.1:1"}, "rendezvous"),
        ({"nnodes": 2, "rendezvous": "10.0.0.1"}, "not an address to meet at"),
        ({"group": "rewards"}, "no such group"),
        ({"group": "generator-7"}, "no such group"),
        ({"address": "no.such.host.invalid"}, "no such host"),
        *[({"join_timeout": wrong}, "no time to wait") for wrong in (0.0, -1.0, float("nan"), float("inf"))],
    ],
)
def test_what_cannot_be_is_said_before_anything_is_started(job: Job, wrong: dict, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        torchrun(replace(job, **wrong))


def test_a_group_with_another_key_is_refused_before_it_starts(job: Job, tmp_path: Path) -> None:
    RunKeys.new().save(tmp_path / "other")
    with pytest.raises(ConfigError, match="not sealed with the key of the run"):
        torchrun(replace(job, key_file=tmp_path / "other"))
