"""Where the ranks of a group talk."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.controller import groups
from slipstream.controller.build import nodes
from slipstream.controller.groups import check_interface, interface_of, join_on_one_machine, join_under_torchrun
from slipstream.controller.pipeline import Node
from slipstream.core.errors import ConfigError
from slipstream.core.rank_group import RankGroup
from slipstream.core.recipes import resolve

TWO = Node("trainer", os.path.join, host="torchrun", ranks=2)


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
def test_the_interface_of_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None, "of another machine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(ConfigError, match=r"no network interface[\s\S]*192\.0\.2\.1[\s\S]*GLOO_SOCKET_IFNAME"):
        check_interface("192.0.2.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    check_interface("192.0.2.1")

    def tell(_socket: object, request: int, asked: bytes) -> bytes:
        """As Linux does: an interface with two addresses of which the second has a label of its own."""
        assert request == 0x8912
        size, at = struct.unpack("iP", asked)
        told = b"".join(
            name.ljust(16, b"\0") + b"\2\0\0\0" + socket.inet_aton(address) + bytes(16)
            for name, address in ((b"lo", "127.0.0.1"), (b"eth0", "192.0.2.1"), (b"eth0:1", "192.0.2.2"))
        )
        assert size >= len(told)
        ctypes.memmove(at, told, len(told))
        return struct.pack("iP", len(told), at)

    monkeypatch.setattr(groups.fcntl, "ioctl", tell)
    monkeypatch.setattr(groups, "IPV6_ADDRESSES", tmp_path / "if_inet6")
    assert interface_of("2001:db8::7") is None, "without IPv6"
    (tmp_path / "if_inet6").write_text("20010db8000000000000000000000007 02 40 00 80     eth1\n")
    found = [interface_of(address) for address in ("192.0.2.1", "192.0.2.2", "2001:db8::7", "2001:db8::8")]
    assert found == ["eth0", "eth0", "eth1", None]


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
def test_ranks_talk_where_their_machine_is_reached_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[tuple[int, tuple[int, int], str]] = []

    def join(node: Node, rank: int, *, local: tuple[int, int], timeout_s: float) -> RankGroup:
        joined.append((rank, local, os.environ["GLOO_SOCKET_IFNAME"]))
        return RankGroup.alone()

    monkeypatch.setattr(groups, "_join", join)
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for given in ("before", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(given, "eth7")  # undone in the end, also what is set in between
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False) if given == "before" else None
        join_under_torchrun(TWO, "127.0.0.1", timeout_s=1.0)
    assert joined == [(1, (0, 1), "lo"), (1, (0, 1), "eth7")]


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
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": local_world}.items():
        monkeypatch.setenv(name, value)
    join_under_torchrun(TWO, "192.0.2.1", timeout_s=1.0)
    assert asked == [wanted]


def test_one_rank_needs_no_group_and_nothing_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert join_under_torchrun(Node("trainer", os.path.join, host="torchrun"), "127.0.0.1", timeout_s=1.0).world == 1


@pytest.mark.parametrize("local", [None, 0, 1, 2, 3])
def test_a_process_of_a_group_touches_no_gpu_but_the_one_that_its_executor_computes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, local: int | None
) -> None:
    """Each of them has a context of half a gigabyte wherever it was, even if for a moment only.

    `local` is its rank on this machine under `slipstream launch`; the controller's children do not ask for that of a
    torchrun in which the run itself was started.
    """
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "0" if local is None else str(local))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "set")  # undone in the end, as what joining makes of it
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    world = SimpleNamespace(WORLD=object())
    monkeypatch.setattr(groups, "dist", SimpleNamespace(group=world, init_process_group=lambda *_, **__: None))
    monkeypatch.setattr(groups.RankGroup, "over", lambda _, **local: SimpleNamespace(**local))
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
        if local is None:
            group = join_on_one_machine(node, rank, tmp_path, timeout_s=1.0)
        else:
            monkeypatch.setenv("RANK", str(rank))
            group = join_under_torchrun(node, "127.0.0.1", timeout_s=1.0)
        assert (group.local_rank, group.local_world) == ((rank, node.ranks) if local is None else (local, 1))
        (found,) = current
        return found

    for node in nodes(config):
        for rank in range(node.ranks if node.needs_group else 0):
            place = rank if local is None else local
            wanted = {
                "trainer": place,
                "critic": 3 - place,
                "reference": 3 - place,
                "generator-0": rank,
                "generator-1": 2 + rank,
            }
            assert joined(node, rank).index == wanted[node.name], (node.name, rank)
