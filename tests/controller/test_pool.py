"""Which command has which of the replicas that may join a run, in a real store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from slipstream.controller.checks import check
from slipstream.controller.meeting import Listen, Meeting, RunSpec, attend
from slipstream.controller.pipeline import Node
from slipstream.controller.pool import free, hold, hold_any
from slipstream.core.errors import ConfigError
from slipstream.core.keys import RunKeys
from slipstream.core.recipes import resolve
from slipstream.launch import Job, torchrun

LATER = [f"generator-{number}" for number in range(1, 9)]


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


def test_commands_that_ask_at_once_get_different_numbers(store: TCPStore) -> None:
    def ask(claim: str) -> str | None:
        return hold_any(TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=10)), LATER, claim)

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(ask, map(str, range(12))))
    assert sorted(filter(None, got)) == LATER
    assert got.count(None) == 4


def test_a_number_is_free_again_when_its_command_has_ended_or_its_process_is_lost(store: TCPStore) -> None:
    assert hold(store, "generator-1", "a")
    assert hold(store, "generator-1", "a", 1), "the process that it has started"
    assert not hold(store, "generator-1", "b")
    free(store, "generator-1", claim="b")
    assert not hold(store, "generator-1", "b"), "another's"
    assert hold(store, "generator-1", "a", 2), "started again by its agent"
    free(store, "generator-1", up_to=1)
    assert not hold(store, "generator-1", "b"), "the loss of an earlier process"
    free(store, "generator-1", up_to=2)
    assert hold(store, "generator-1", "b")
    assert not hold(store, "generator-1", "a", 3), "another has it meanwhile"
    free(store, "generator-1", claim="b")
    free(store, "generator-2", up_to=1)
    assert hold_any(store, LATER, "c") == "generator-1"


def test_what_anybody_may_have_written_takes_a_number_at_most(store: TCPStore) -> None:
    store.set("slipstream/pool/generator-1", b"\xff:\xff")
    free(store, "generator-1", up_to=1)
    assert hold_any(store, LATER, "a") == "generator-2"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Of a run with one generator, which one may join."""
    keys, file, meeting = RunKeys.new(), tmp_path / "key", Meeting(Listen(), timeout_s=10)
    keys.save(file)
    nodes = tuple(Node(f"generator-{n}", os.path.join, host="torchrun", joins_later=n > 0) for n in range(2))
    told = {"delta": False, "relays": True, "wall_minus_clock_s": 0.0, "started_s": 0.0}
    meeting.announce(RunSpec("run-1", "start-1", tmp_path, nodes, (), 60.0, 5.0, **told), keys)
    yield Job("generator", f"127.0.0.1:{meeting.port}", key_file=file, join=True)
    del meeting


def test_a_command_with_join_gets_the_free_number_and_gives_it_back(job: Job) -> None:
    agent = torchrun(job)
    assert agent.group == "generator-1"
    member = agent.command[agent.command.index("slipstream.controller.process") :]
    assert member[member.index("--group") + 1] == "generator-1"
    with pytest.raises(ConfigError, match="no further generator may join") as caught:
        torchrun(job)
    assert caught.value.allowed == "generator.max_replicas = 2"
    with pytest.raises(ConfigError, match="belongs to another command"):
        torchrun(replace(job, group="generator-1", join=False))
    claim = member[member.index("--claim") + 1]
    assert hold(attend(job.controller, timeout_s=10), "generator-1", claim, 1), "its process says the same"
    agent.leave()
    named = replace(job, group="generator-1", join=False)
    assert [torchrun(named).group for _ in range(2)] == ["generator-1"] * 2, "started again before the loss is seen"
    with pytest.raises(ConfigError, match="no further generator may join"):
        torchrun(job)


@pytest.mark.parametrize(
    "wrong", [{"group": "trainer"}, {"group": "generator-1"}, {"nnodes": 2, "rendezvous": "10.0.0.1:1"}]
)
def test_only_a_generator_on_one_machine_gets_a_number(job: Job, wrong: dict) -> None:
    with pytest.raises(ConfigError, match="a free number is for a generator"):
        torchrun(replace(job, **wrong))


def test_without_join_a_generator_is_named(job: Job) -> None:
    with pytest.raises(ConfigError, match="no such group") as caught:
        torchrun(replace(job, join=False))
    assert "--join" in str(caught.value.hint)


def test_a_pool_takes_a_run_of_several_commands_and_no_fewer_than_it_starts_with() -> None:
    with pytest.raises(ConfigError, match="starts with more generators"):
        resolve("quickstart", {"generator": {"replicas": 3, "max_replicas": 2}})
    config = resolve("quickstart", {"generator": {"max_replicas": 2}})
    with pytest.raises(ConfigError, match="commands of their own"):
        check(config)
    check(config, remote={"trainer", "generator"})
