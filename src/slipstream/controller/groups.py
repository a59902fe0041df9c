"""How the processes of an executor group find each other: a c10d process group of their own, and no other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]

from slipstream.controller.pipeline import Node
from slipstream.core.addresses import LOOPBACK, numeric_address
from slipstream.core.rank_group import RankGroup

LOOPBACK_DEVICE = "lo"
GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def join_on_one_machine(
    node: Node, rank: int, transport_dir: Path, *, timeout_s: float, incarnation: int = 1
) -> RankGroup:
    """The group of `node`'s ranks, which meet through a file of the run; alone where nobody else is needed.

    Waits for the others, at most `timeout_s`, as every collective of the group does. Each incarnation has its own file.
    """
    if not node.needs_group:
        return RankGroup.alone()
    if LOOPBACK_DEVICE in {name for _, name in socket.if_nameindex()}:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK_DEVICE  # whatever the machine calls itself
    store = FileStore(str(transport_dir / f"{node.name}-{incarnation}.store"), node.ranks)
    return _join(node, rank, timeout_s=timeout_s, store=store)


def join_under_torchrun(node: Node, address: str, *, timeout_s: float) -> RankGroup:
    """The group of a torchrun job's ranks, from the environment that torchrun sets.

    On one machine they talk over loopback, on several over the interface that has `address`, whatever the machine calls
    itself; GLOO_SOCKET_IFNAME overrules it.
    """
    if not node.needs_group:
        return RankGroup.alone()
    is_on_one_machine = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    interface = interface_of(LOOPBACK if is_on_one_machine else address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return _join(node, int(os.environ["RANK"]), timeout_s=timeout_s)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has `address`, IPv4 or a name of one; None where that is not known."""
    wanted = numeric_address(address).packed
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = fcntl.ioctl(any_socket, GET_INTERFACE_ADDRESS, struct.pack("256s", name.encode()))
                if found[20:24] == wanted:  # struct ifreq: 16 bytes of name, then a sockaddr_in
                    return name
    return None


def _join(node: Node, rank: int, *, timeout_s: float, store: Store | None = None) -> RankGroup:
    backend = "gloo"
    if node.device.startswith("cuda"):
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    dist.init_process_group(
        backend,
        store=store,
        rank=rank if store is not None else -1,
        world_size=node.ranks if store is not None else -1,
        timeout=timedelta(seconds=timeout_s),
    )
    assert dist.group.WORLD is not None
    return RankGroup.over(dist.group.WORLD)
