"""The addresses of ports: where they listen, and how other processes find that out.

On one machine (`LocalAddresses`) the path of a port's socket follows from the channels of the run. Across machines
(`StoreAddresses`) every process binds its ports to free addresses and announces these in the run's c10d store, under
the name and incarnation of its executor. The store holds addresses only, never keys.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from slipstream.core.background import run_interruptibly
from slipstream.core.channel_spec import ChannelSpec, executor_of
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout, ConfigError
from slipstream.core.keys import RunKeys

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MAX_IPC_PATH_BYTES = 103  # sun_path holds 104 on macOS and 108 on Linux, with the final NUL
LOOPBACK = "127.0.0.1"
_PREFIX = "slipstream/channels/"

T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """The address of a listening port, in ZeroMQ's form, and the incarnation of its executor (0: not known)."""

    at: str
    incarnation: int = 0


class _Announcement(msgspec.Struct, frozen=True):
    """The addresses of an executor's ports, as the store holds them."""

    machine: str
    ports: dict[str, list[str]]


class LocalAddresses:
    """Sockets in `transport_dir` (0700, short path), numbered as their ports occur in `specs`; nothing is waited for.

    Each incarnation has paths of its own, so messages on their way to a dead one never reach its successor.
    `incarnations` are those of executors that have been started again; of the others it is 1.
    """

    keys: RunKeys | None = None

    def __init__(
        self,
        specs: Sequence[ChannelSpec],
        transport_dir: Path | None,
        incarnations: Mapping[str, int] | None = None,
    ) -> None:
        self._transport_dir = transport_dir
        self._incarnations = {} if incarnations is None else incarnations
        self._numbers = _numbered(specs)

    def listen_at(self, port: str, incarnation: int) -> tuple[str, ...]:
        """Return the addresses to which port 'executor.port' of this process has to bind."""
        return (self.find(port, incarnation).at,)

    def announce(self, executor: str, incarnation: int, bound: Mapping[str, Sequence[str]]) -> None:
        """Do nothing: addresses are known from the channels."""

    def find(self, port: str, incarnation: int = 0) -> Address:
        """Return the address of `port`, for this incarnation of its executor (0: that of `incarnations`, else 1)."""
        if self._transport_dir is None:
            raise ChannelError(f"port '{port}' is in another process, but there is no transport_dir")
        incarnation = incarnation or self._incarnations.get(executor_of(port), 1)
        name = f"{self._numbers[port]}.sock" if incarnation == 1 else f"{self._numbers[port]}-{incarnation}.sock"
        return Address(ipc_address(self._transport_dir / name), incarnation)


class StoreAddresses:
    """Ports at `host`, the address or name by which others reach this machine, and in `transport_dir` where given.

    Processes of one machine that were given the same `transport_dir` connect there, all others over TCP.
    Every process of the run makes one over the same store. `keys` secure the sockets; without them only loopback
    addresses are allowed. `deadline_s` bounds the wait for an executor that has not announced itself, and `patience_s`
    that for those which may take longer, by name.
    """

    def __init__(
        self,
        specs: Sequence[ChannelSpec],
        store: Store,
        keys: RunKeys | None,
        *,
        host: str = LOOPBACK,
        transport_dir: Path | None = None,
        deadline_s: float = 120.0,
        patience_s: Mapping[str, float] | None = None,
    ) -> None:
        self._host = numeric_address(host)
        if keys is None and not self._host.is_loopback:
            what = "without keys, sockets may listen on loopback only"
            hint = "give all processes of the run one key: a file of mode 0600 or SLIPSTREAM_RUN_KEY"
            raise ConfigError(what, got=f"{host} ({self._host})", allowed=LOOPBACK, hint=hint)
        if self._host.is_unspecified or self._host.is_multicast:
            raise ConfigError("not an address that others can reach", got=host, allowed="an address of this machine")
        self.keys = keys
        self._store = store
        self._transport_dir = transport_dir
        self._numbers = _numbered(specs)
        self._machine = "" if transport_dir is None else f"{socket.gethostname()}:{transport_dir.resolve()}"
        self._deadline_s, self._patience_s = deadline_s, patience_s or {}

    def listen_at(self, port: str, incarnation: int) -> tuple[str, ...]:
        """Return the addresses to which port 'executor.port' of this process has to bind."""
        host = f"[{self._host}]" if self._host.version == 6 else str(self._host)
        remote = f"tcp://{host}:*"
        if self._transport_dir is None:
            return (remote,)
        # One path per incarnation: a replaced process that ends late removes its own socket, not its successor's.
        return (ipc_address(self._transport_dir / f"{self._numbers[port]}-{incarnation}.sock"), remote)

    def announce(self, executor: str, incarnation: int, bound: Mapping[str, Sequence[str]]) -> None:
        """Publish that all ports of `executor` listen, at `bound`. ChannelClosed when a later incarnation did so."""
        key = f"{_PREFIX}{executor}"
        newest = _decoded(self._store.get(key), int) if self._store.check([key]) else 0
        if newest > incarnation:
            raise ChannelClosed(f"incarnation {incarnation} of '{executor}' was replaced by {newest}")
        ports = {port: list(at) for port, at in bound.items()}
        content = msgspec.json.encode(_Announcement(machine=self._machine, ports=ports)).decode()
        self._store.set(f"{key}/{incarnation}", content)
        self._store.set(key, str(incarnation))

    def find(self, port: str, incarnation: int = 0) -> Address:
        """Return the address of `port`, for this incarnation of its executor or the newest (0), once it is announced.

        ChannelTimeout names an executor that did not come in time.
        """
        executor = executor_of(port)
        if not incarnation:
            incarnation = _decoded(self._get(f"{_PREFIX}{executor}", executor, "has announced itself"), int)
        told = self._get(f"{_PREFIX}{executor}/{incarnation}", executor, f"has announced incarnation {incarnation}")
        content = _decoded(told, _Announcement)
        bound = content.ports.get(port)
        if not bound:
            hint = "all processes of a run need the same channels"
            raise ChannelError(f"'{executor}' does not listen at '{port}'", got=", ".join(content.ports), hint=hint)
        is_here = bool(self._machine) and content.machine == self._machine
        at = next((address for address in bound if address.startswith("ipc:" if is_here else "tcp:")), None)
        if at is None:
            raise ChannelError(f"'{executor}' announced no address of '{port}' that is of use here", got=bound)
        return Address(at, incarnation)

    def meet(self, group: str, incarnation: int, num_ranks: int, *, timeout_s: float) -> None:
        """Wait until all ranks of this incarnation of `group` are here. ChannelTimeout after `timeout_s`.

        Some may have waited for peers that others need not wait for: collectives have shorter deadlines.
        """
        key = f"{_PREFIX}{group}/{incarnation}/met"
        if self._store.add(f"{key}/ranks", 1) == num_ranks:
            self._store.set(key, "")
        self._read(key, group, f"not all ranks of '{group}' have found their peers", timeout_s)

    def _get(self, key: str, executor: str, what: str) -> bytes:
        what = f"'{executor}' did not come: nobody of that name {what}"
        return self._read(key, executor, what, self._patience_s.get(executor, self._deadline_s))

    def _read(self, key: str, executor: str, what: str, deadline_s: float) -> bytes:
        try:
            if not self._store.check([key]):
                run_interruptibly(lambda: self._store.wait([key], timedelta(seconds=deadline_s)), name="store")
            return self._store.get(key)
        except RuntimeError as error:  # c10d has DistStoreError for a wait in vain, and for a store that is gone
            raise ChannelTimeout(
                f"{what} within {deadline_s:g} s",
                got=str(error).splitlines()[0],
                hint=f"see the log of '{executor}', and whether its machine reaches the run's store; on several"
                " machines --join-timeout waits longer",
            ) from error


AddressBook = LocalAddresses | StoreAddresses
"""An address book: it tells where a process's own ports have to listen, and where those of other processes do."""


def _numbered(specs: Sequence[ChannelSpec]) -> dict[str, int]:
    """Return the number of each input port, which names its socket: a path must be short."""
    return {port: number for number, port in enumerate(dict.fromkeys(spec.target for spec in specs))}


def _decoded(content: bytes, kind: type[T]) -> T:
    """Decode an executor's entry in the store, which anyone who reaches the store could have written. ChannelError."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
        raise ChannelError("the run's store has a malformed announcement of an executor", got=error) from None


def grant_incarnation(store: Store, executor: str) -> int:
    """Return the next incarnation of `executor`, from 1. Called once for each start of its group, by rank 0."""
    return store.add(f"{_PREFIX}{executor}/incarnations", 1)


def numeric_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of `host`, a name or an address. ConfigError when there is none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError) as error:
        raise ConfigError(
            "no such host", got=host, allowed="a name or address of this machine", hint=str(error)
        ) from error


def check_reachable(host: str) -> None:
    """Raise ConfigError for a `host` that is no address, and for a name by which this machine means itself alone."""
    address = numeric_address(host)
    is_name = any(letter.isalpha() for letter in host) and ":" not in host
    if address.is_loopback and is_name and "localhost" not in host:
        what = f"'{host}' means {address} on this machine, which others do not reach"
        raise ConfigError(what, got=host, allowed="an address of this machine in the network of the others")


def ipc_address(path: Path) -> str:
    """Return `path` as an address. ChannelError when other users can reach it, or it is too long for a socket."""
    mode = path.parent.stat().st_mode & 0o777
    if mode & 0o077:
        raise ChannelError(f"'{path.parent}' is open to other users", got=oct(mode), allowed="0o700")
    if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
        raise ChannelError(
            "the path of a socket is too long",
            got=f"{len(os.fsencode(path))} bytes: {path}",
            allowed=f"at most {MAX_IPC_PATH_BYTES} bytes",
            hint="set TMPDIR to a folder with a shorter path",
        )
    return f"ipc://{path}"
