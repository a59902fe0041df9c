"""Where the ranks of a group talk."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.controller import groups
from slipstream.controller.build import nodes
from slipstream.controller.groups import interface_of, join_on_one_machine, join_under_torchrun
from slipstream.controller.pipeline import Node
from slipstream.core.rank_group import RankGroup
from slipstream.core.recipes import resolve

TWO = Node("trainer", os.path.join, host="torchrun", ranks=2)


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None, "of another machine"
    assert interface_of("::1") is None, "not known"


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
def test_ranks_talk_where_their_machine_is_reached_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[tuple[int, str]] = []

    def join(node: Node, rank: int, *, timeout_s: float) -> RankGroup:
        joined.append((rank, os.environ["GLOO_SOCKET_IFNAME"]))
        return RankGroup.alone()

    monkeypatch.setattr(groups, "_join", join)
    for name, value in {"RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for given in ("before", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(given, "eth7")  # undone in the end, also what is set in between
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False) if given == "before" else None
        join_under_torchrun(TWO, "127.0.0.1", timeout_s=1.0)
    assert joined == [(1, "lo"), (1, "eth7")]


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
@pytest.mark.parametrize(("local_world", "wanted"), [("2", "127.0.0.1"), ("1", "192.0.2.1")])
def test_ranks_of_one_machine_talk_where_no_other_machine_can_join_in(
    monkeypatch: pytest.MonkeyPatch, local_world: str, wanted: str
) -> None:
    asked: list[str] = []

    def interface(address: str) -> None:
        asked.append(address)

    monkeypatch.setattr(groups, "interface_of", interface)
    monkeypatch.setattr(groups, "_join", lambda *_, **__: RankGroup.alone())
    for name, value in {"RANK": "1", "LOCAL_WORLD_SIZE": local_world, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    join_under_torchrun(TWO, "192.0.2.1", timeout_s=1.0)
    assert asked == [wanted]


def test_one_rank_needs_no_group_and_nothing_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join_under_torchrun(Node("trainer", os.path.join, host="torchrun"), "127.0.0.1", timeout_s=1.0).world == 1


@pytest.mark.parametrize("local", [None, "0", "1", "2", "3"])
def test_a_process_of_a_group_touches_no_gpu_but_the_one_that_its_executor_computes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, local: str | None
) -> None:
    """Each of them has a context of half a gigabyte wherever it was, even if for a moment only."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False) if local is None else monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "set")  # undone in the end, as what joining makes of it
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    world = SimpleNamespace(WORLD=object())
    monkeypatch.setattr(groups, "dist", SimpleNamespace(group=world, init_process_group=lambda *_, **__: None))
    monkeypatch.setattr(groups.RankGroup, "over", lambda _: RankGroup.alone())
    divided = {"device": "cuda", "ranks": 2}
    config = resolve(
        "quickstart",
        {
            "trainer": {"device": "cuda", "ranks": 3},
            "generator": {"device": "cuda", "replicas": 2, "tensor_parallel": 2},
            "critic": divided | {"executor": "own"},
            "kl": divided | {"executor": "own", "sharded": True, "coef": 0.1},
            "loss": {"name": "ppo", "advantages": "gae"},
        },
    )

    def joined(node: Node, rank: int) -> torch.device:
        current.clear()
        join_on_one_machine(node, rank, tmp_path, timeout_s=1.0)
        (found,) = current
        return found

    for node in nodes(config):
        for rank in range(node.ranks if node.needs_group else 0):
            place = rank if local is None else int(local)
            wanted = {
                "trainer": place,
                "critic": 3 - place,
                "reference": 3 - place,
                "generator-0": rank,
                "generator-1": 2 + rank,
            }
            assert joined(node, rank).index == wanted[node.name], (node.name, rank)
