"""The meeting of the processes of a group of ranks: a c10d process group of their own, and no other.

The ranks of a torchrun job are started by agents, which meet first: torch's dynamic rendezvous, over a state that only
this run can write. torch keeps that state as a pickle in a TCP store, and unpickles what it reads there: anybody who
reaches the store could run code on every machine of the group. Here the state is sealed with the run's key, for this
group of this run, and nothing is decoded that does not bear the seal. A state that was sealed earlier and is put back
is one of ours: agents then disagree about who is there, and the group does not form, or ends.

Both stores of a group, this one and that of its processes, listen at one address: torch's own listen on all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from base64 import b64decode, b64encode
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, FileStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)

from slipstream.controller.meeting import Listen, host_store
from slipstream.controller.pipeline import Node
from slipstream.controller.weights import gpu_of
from slipstream.core.addresses import LOOPBACK, numeric_address
from slipstream.core.errors import ConfigError
from slipstream.core.keys import RunKeys
from slipstream.core.rank_group import RankGroup

LOOPBACK_DEVICE = "lo"
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
GET_ADDRESSES = 0x8912  # SIOCGIFCONF of Linux: all that are IPv4, in so many structs ifreq
IFREQ_BYTES, MAX_ADDRESSES = 40, 1024
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def join_on_one_machine(
    node: Node, rank: int, transport_dir: Path, *, timeout_s: float, incarnation: int = 1
) -> RankGroup:
    """The group of `node`'s ranks, which meet through a file of the run.

    Waits for the others, at most `timeout_s`, as every collective of the group does. Each incarnation has its own file.
    """
    if LOOPBACK_DEVICE in {name for _, name in socket.if_nameindex()}:
        os.environ[INTERFACE_VARIABLE] = LOOPBACK_DEVICE  # whatever the machine calls itself
    store = FileStore(str(transport_dir / f"{node.name}-{incarnation}.store"), node.ranks)
    return _join(node, rank, local=(rank, node.ranks), timeout_s=timeout_s, store=store)


def join_under_torchrun(node: Node, address: str, *, timeout_s: float) -> RankGroup:
    """The group of a torchrun job's ranks, from the environment that torchrun sets.

    On one machine they talk over loopback, on several over the interface that has `address`, whatever the machine calls
    itself; GLOO_SOCKET_IFNAME overrules it.
    """
    if not node.needs_group:
        return RankGroup.alone()
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    interface = interface_of(LOOPBACK if local_world == node.ranks else address)
    if interface is not None:
        os.environ.setdefault(INTERFACE_VARIABLE, interface)
    return _join(node, int(os.environ["RANK"]), local=(local_rank, local_world), timeout_s=timeout_s)


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has `address`, or a name of one; None where that is not known."""
    return _interfaces().get(numeric_address(address).packed) if sys.platform == "linux" else None


def _interfaces() -> dict[bytes, str]:
    """The interfaces of this machine by each of their addresses, which are packed."""
    found: dict[bytes, str] = {}
    with contextlib.suppress(OSError), IPV6_ADDRESSES.open() as lines:  # there is none without IPv6
        for line in lines:
            address, *_, name = line.split()
            found[bytes.fromhex(address)] = name
    room = ctypes.create_string_buffer(MAX_ADDRESSES * IFREQ_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iP", len(room), ctypes.addressof(room))
        (size,) = struct.unpack_from("i", fcntl.ioctl(any_socket, GET_ADDRESSES, asked))
    for at in range(0, size, IFREQ_BYTES):  # 16 bytes of name, then a sockaddr_in; a further address may be 'eth0:1'
        name = room.raw[at : at + 16].partition(b"\0")[0].decode()
        found[room.raw[at + 20 : at + 24]] = name.partition(":")[0]
    return found


def check_interface(address: str) -> None:
    """Raise ConfigError where no interface has `address`, by which the ranks of a group on several machines meet."""
    if sys.platform == "linux" and INTERFACE_VARIABLE not in os.environ and interface_of(address) is None:
        raise ConfigError(
            "no network interface of this machine has the address by which others are to reach it",
            got=address,
            allowed=f"one of this machine (--address), or {INTERFACE_VARIABLE} with the interface's name",
        )


def _join(node: Node, rank: int, *, local: tuple[int, int], timeout_s: float, store: Store | None = None) -> RankGroup:
    """Join as `rank`; `local` are its rank among those of this machine, and their number."""
    backend, (local_rank, local_world) = "gloo", local
    if node.device.startswith("cuda"):
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(gpu_of(node, rank, local_rank))  # before anything makes a context on another
    dist.init_process_group(
        backend,
        store=store,
        rank=rank if store is not None else -1,
        world_size=node.ranks if store is not None else -1,
        timeout=timedelta(seconds=timeout_s),
    )
    assert dist.group.WORLD is not None
    return RankGroup.over(dist.group.WORLD, local_rank=local_rank, local_world=local_world)


# The agents of a torchrun job

BACKEND = "slipstream"
"""The name of the rendezvous for torchrun: --rdzv-backend."""


class SealedState(RendezvousBackend):
    """The state of a rendezvous at one key of a store, sealed; an empty text is none."""

    def __init__(self, store: Store, name: str, keys: RunKeys) -> None:
        self._store, self._key, self._keys = store, f"rendezvous/{name}", keys

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state, and the token that `set_state` needs to replace it; None where there is none yet.

        RendezvousStateError, with nothing decoded, for a state without this run's seal.
        """
        found = self._swapped("", "")
        return (self._opened(found), found) if found else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` came with (None: where there is none); the state there is then, its token,
        and whether it is `state`. Errors as `get_state`'s."""
        sealed = self._keys.seal(b64encode(state).decode(), self._key)
        found = self._swapped("" if token is None else token.decode(), sealed)
        return self._opened(found), found, found == sealed.encode()

    def _swapped(self, expected: str, wanted: str) -> bytes:
        """Put `wanted` in the place of `expected`, if that is there; return what the store has then. Does not wait."""
        try:
            found: bytes = self._store.compare_set(self._key, expected, wanted)
        except DistError as error:
            raise RendezvousConnectionError("the store of the rendezvous is gone") from error
        return found

    def _opened(self, found: bytes) -> bytes:
        try:
            return b64decode(self._keys.unseal(found.decode(errors="replace"), self._key))
        except ConfigError as error:
            raise RendezvousStateError(
                "somebody without this run's key has written to the store of the rendezvous"
            ) from error


class Rendezvous(DynamicRendezvousHandler):
    """torch's, but the store that it makes for the group's processes listens at this machine's address only, and each
    start of the group has its own: in one that is kept, as torch does, a rank finds where another was before."""

    def next_rendezvous(self) -> Any:
        self._shared_tcp_store_server = self._bootstrap_store_info = None
        return super().next_rendezvous()

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return host_store(Listen(master_addr, master_port), timeout=timedelta(minutes=5))


def use_rendezvous(store: Store, keys: RunKeys, *, join_timeout_s: float) -> None:
    """Have `--rdzv-backend slipstream` mean a rendezvous over `store`, sealed with `keys`, in this process.

    Agents wait `join_timeout_s` for one another.
    """
    timeout = RendezvousTimeout(join=timedelta(seconds=join_timeout_s))
    rendezvous_handler_registry.register(BACKEND, partial(_handler, store, keys, timeout))


def _handler(
    store: Store, keys: RunKeys, timeout: RendezvousTimeout, parameters: RendezvousParameters
) -> RendezvousHandler:
    state = SealedState(store, parameters.run_id, keys)
    handler: RendezvousHandler = Rendezvous.from_backend(
        parameters.run_id, store, state, parameters.min_nodes, parameters.max_nodes, parameters.local_addr, timeout
    )
    return handler
