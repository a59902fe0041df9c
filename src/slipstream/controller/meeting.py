"""The store where the groups of a run on several machines meet: c10d's, beside the controller, with the run's facts.

    run                        the run's specification: nodes, channels, folder (JSON), sealed with the run's key
    slipstream/pool/...        whose each replica is that may join later (`controller/pool.py`)
    slipstream/channels/...    where ports listen, and how often groups were started (`core/addresses.py`)

Anybody who reaches the store can read and write it. So the specification, which names the code that groups run, counts
only with its seal, and an address leads nowhere without the keys. A specification of an earlier start, put back with
its seal, leads nowhere either: each start has keys of its own (`RunKeys.of_start`). Nothing secret is in the store.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]

from slipstream.controller import pool
from slipstream.controller.pipeline import Node, Pipeline, decode_channel, decode_node, encode_node
from slipstream.core.addresses import AddressBook, StoreAddresses, numeric_address
from slipstream.core.channel_spec import ChannelSpec
from slipstream.core.clock import wall_minus_clock_s
from slipstream.core.errors import ConfigError, RunIsOver, SlipstreamError
from slipstream.core.keys import RunKeys
from slipstream.observe.summary import read_summary

SPEC_KEY = "run"
JOIN_TIMEOUT_S = 600.0
"""Seconds that controller and groups wait for one another, unless told otherwise (--join-timeout)."""
WAITS_LONGER = "--join-timeout SECONDS waits longer"
WAIT_FOR_FILE_S = 0.2
READ_AGAIN_S = 5.0  # a file with an address may be of an earlier start of the controller


@dataclass(frozen=True)
class Listen:
    """The address at which the controller of a run on several machines listens. Port 0: any free one.

    The address is written to `address_file`, for jobs that are started elsewhere.
    """

    host: str = "127.0.0.1"
    port: int = 0
    address_file: Path | None = None


ALWAYS_REMOTE = frozenset({"trainer", "generator"})


@dataclass(frozen=True)
class Cluster:
    """A run on several machines: where its controller listens, the run's keys, and which groups join it.

    `remote` are names of groups, 'generator' for all replicas; the others are the controller's children. Each of
    them may take `join_timeout_s` seconds to come.
    """

    listen: Listen
    keys: RunKeys
    remote: frozenset[str] = ALWAYS_REMOTE
    join_timeout_s: float = JOIN_TIMEOUT_S


@dataclass(frozen=True)
class RunSpec:
    """The facts that a group must know of its run."""

    run_id: str
    start: str  # names this start of the controller
    run_dir: Path
    nodes: tuple[Node, ...]
    channels: tuple[ChannelSpec, ...]
    deadline_s: float
    lease_s: float
    delta: bool
    relays: bool
    wall_minus_clock_s: float  # of the controller: `time.time` less its clock, so that timelines share an axis
    started_s: float  # on the controller's clock

    def node(self, group: str) -> Node:
        found = next((node for node in self.nodes if node.name == group and node.host == "torchrun"), None)
        if found is None:
            raise ConfigError(
                "this run has no such group to join",
                got=group,
                allowed=", ".join(node.name for node in self.nodes if node.host == "torchrun"),
                hint="with --join the controller gives a generator its number" if group == "generator" else None,
            )
        return found

    def encode(self) -> str:
        tables = {
            "run_dir": str(self.run_dir),
            "nodes": [encode_node(node) for node in self.nodes],
            "channels": [asdict(channel) for channel in self.channels],
        }
        return json.dumps(vars(self) | tables)

    @classmethod
    def decode(cls, data: str) -> RunSpec:
        """Return what was encoded. Imports the factories of all nodes: not for what anybody may have written."""
        tables: dict[str, Any] = json.loads(data)
        return cls(
            **tables
            | {
                "run_dir": Path(tables["run_dir"]),
                "nodes": tuple(decode_node(node) for node in tables["nodes"]),
                "channels": tuple(decode_channel(channel) for channel in tables["channels"]),
            }
        )


class Meeting:
    """The controller's side: host the store, at `address`, 'HOST:PORT'."""

    def __init__(self, listen: Listen, *, timeout_s: float) -> None:
        self.store = host_store(listen, timeout=timedelta(seconds=timeout_s))
        self.host, self.port = listen.host, self.store.port
        self.address = f"{self.host}:{self.port}"
        if listen.address_file is not None:
            partial = listen.address_file.with_name(f".{listen.address_file.name}.partial")
            partial.write_text(f"{self.address}\n")
            partial.rename(listen.address_file)

    def announce(self, spec: RunSpec, keys: RunKeys) -> None:
        """Let groups join the run of `spec` from here on."""
        self.store.set(SPEC_KEY, keys.seal(spec.encode(), SPEC_KEY))


class MeetingPlace(Meeting):
    """The meeting of a run on several machines, for its controller: the store, reached with the keys of this start."""

    def __init__(self, cluster: Cluster, pipeline: Pipeline, *, lease_s: float, deadline_s: float) -> None:
        super().__init__(cluster.listen, timeout_s=deadline_s)
        self._pipeline, self._keys, self._start = pipeline, cluster.keys, secrets.token_hex(16)
        self._channel_keys = self._keys.of_start(self._start)
        self._deadline_s, self._lease_s = deadline_s, lease_s
        join_timeout_s = max(cluster.join_timeout_s, deadline_s)
        groups = [node for node in pipeline.nodes if node.host == "torchrun"]
        self.patience_s = {member: join_timeout_s for node in groups for member in node.members}
        """Seconds that each process of a group on another machine is waited for."""

    def addresses(self, transport_dir: Path) -> AddressBook:
        """Return where ports listen; children of this controller meet in `transport_dir`."""
        return StoreAddresses(
            self._pipeline.all_channels,
            self.store,
            self._channel_keys,
            host=self.host,
            transport_dir=transport_dir,
            deadline_s=self._deadline_s,
            patience_s=self.patience_s,
        )

    def child_environment(self) -> dict[str, str]:
        """Return the variables with which a child of the controller speaks with the groups."""
        return self._channel_keys.as_environment()

    def free(self, group: str, incarnation: int) -> None:
        """Let another command have replica `group`, of which this incarnation was lost."""
        pool.free(self.store, group, up_to=incarnation)

    def open(self, run_dir: Path, run_id: str, *, delta: bool, relays: bool, started_s: float) -> None:
        """Let groups join from here on.

        `delta`: versions travel as what they have changed; `relays`: through replicas that hand them on.
        """
        self.announce(
            RunSpec(
                run_id=run_id,
                start=self._start,
                run_dir=run_dir.resolve(),
                nodes=self._pipeline.nodes,
                channels=self._pipeline.all_channels,
                deadline_s=self._deadline_s,
                lease_s=self._lease_s,
                delta=delta,
                relays=relays,
                wall_minus_clock_s=wall_minus_clock_s(),
                started_s=started_s,
            ),
            self._keys,
        )


def host_store(listen: Listen, *, timeout: timedelta) -> TCPStore:
    """A store that listens there and, unlike one that binds by itself, on no other interface. ConfigError if not."""
    server = _bound(listen)
    server.listen(4096)
    return TCPStore(
        listen.host,
        int(server.getsockname()[1]),
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )


def check_listening(listen: Listen) -> None:
    """Raise ConfigError where the controller could not listen, or not write its address."""
    server = _bound(listen)
    try:
        server.listen(1)  # two may be bound to a port, one may listen
    except OSError as error:
        raise _not_there(listen, error) from error
    finally:
        server.close()
    file = listen.address_file
    if file is not None and (file.is_dir() or not os.access(file.absolute().parent, os.W_OK)):
        what = "the controller's address cannot be written there"
        raise ConfigError(what, got=str(file), allowed="a file in an existing folder", hint="see --address-file")


def _bound(listen: Listen) -> socket.socket:
    address = numeric_address(listen.host)
    server = socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((str(address), listen.port))
    except OSError as error:
        server.close()
        raise _not_there(listen, error) from error
    return server


def _not_there(listen: Listen, error: OSError) -> ConfigError:
    return ConfigError(
        "a store cannot listen there",
        got=f"{listen.host}:{listen.port}: {error.strerror}",
        allowed="an address of this machine with a free port",
        hint="see --listen of the controller, --rendezvous of a group on several machines; port 0 takes any free one",
    )


def attend(
    controller: str,
    *,
    timeout_s: float,
    whom: str = "controller",
    is_over: Callable[[], bool] = lambda: False,
) -> Store:
    """A group's side: the store of the controller at 'HOST:PORT', or named in a file with that; `whom` in its place may
    host it. SlipstreamError if nobody answers in time, RunIsOver once nobody will."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        if is_over():
            raise RunIsOver("the run is done: there is nothing to join", got=controller)
        host, port = read_address(controller, timeout_s=deadline_s - time.monotonic())
        remaining_s = max(0.1, deadline_s - time.monotonic())
        try:
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=min(remaining_s, READ_AGAIN_S)))
        except DistError as error:
            if time.monotonic() < deadline_s:
                continue
            hint = f"is its `slipstream launch ... --group ...` running, and does it listen there? {WAITS_LONGER}"
            raise SlipstreamError(f"no {whom} answered for {timeout_s:g} s", got=f"{host}:{port}", hint=hint) from error
        store.set_timeout(timedelta(seconds=timeout_s))
        return store


def parse_address(text: str) -> tuple[str, int] | None:
    """(host, port) of 'HOST:PORT', where the host may be an IPv6 address, in brackets or not; None: it is none."""
    host, _, port = text.strip().rpartition(":")
    is_address = bool(host) and port.isascii() and port.isdigit() and int(port) < 2**16
    return (host.strip("[]"), int(port)) if is_address else None


def is_done(run_dir: Path | None, steps: int | None) -> bool:
    """Return whether the run in `run_dir` has done `steps` steps: no controller comes for them."""
    if run_dir is None or steps is None:
        return False
    try:
        summary = read_summary(run_dir / "summary.json")
    except SlipstreamError:
        return False
    return summary.status == "done" and summary.steps >= steps


def read_address(controller: str, *, timeout_s: float) -> tuple[str, int]:
    """(host, port) of 'HOST:PORT', or of a file with that, which is waited for."""
    found = parse_address(controller)
    if found is not None and not Path(controller).exists():
        return found
    deadline_s = time.monotonic() + timeout_s
    while not (content := _content(Path(controller))):  # on a network file system nothing tells that there is one
        if time.monotonic() > deadline_s:
            allowed = "HOST:PORT, or the file that the controller writes (--address-file)"
            what = f"no address of a controller for {timeout_s:g} s"
            raise SlipstreamError(what, got=controller, allowed=allowed, hint=WAITS_LONGER)
        time.sleep(WAIT_FOR_FILE_S)
    found = parse_address(content)
    if found is None:
        raise ConfigError("not the address of a controller", got=controller, allowed="a file with HOST:PORT")
    return found


def _content(path: Path) -> str:
    """Return what the file holds; empty where there is none, which may become so at any time.

    ConfigError where it cannot be read: to wait would not help.
    """
    try:
        return path.read_text().strip()
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE:
            return ""
        allowed = "HOST:PORT, or the file that the controller writes (--address-file)"
        raise ConfigError(f"'{path}' cannot be read", got=error.strerror, allowed=allowed) from error


def read_spec(store: Store, keys: RunKeys, *, timeout_s: float) -> RunSpec:
    """The specification of the run, which is waited for. ConfigError when it was not sealed with `keys`."""
    try:
        store.wait([SPEC_KEY], timedelta(seconds=timeout_s))
    except DistError as error:
        raise SlipstreamError(f"the controller announced no run for {timeout_s:g} s", hint=WAITS_LONGER) from error
    return RunSpec.decode(keys.unseal(store.get(SPEC_KEY).decode(errors="replace"), SPEC_KEY))
