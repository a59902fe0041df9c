"""The description of a channel (kind, ends, capacity, deadline, route), and the counters of a port."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from slipstream.core.errors import ChannelError
from slipstream.core.peer_messages import Peers
from slipstream.core.ranks import Dealt, data_parallel_rank
from slipstream.core.service_messages import Admit
from slipstream.core.turn_messages import Observation
from slipstream.core.types import Completion, Message, Rollout

Route = Callable[[Message, int], int | None]
"""Return which of so many targets gets a message; None: all of them."""

MAX_MESSAGE_BYTES = 256 * 2**20


class Kind(enum.StrEnum):
    """The way in which messages of one output port reach input ports."""

    BROADCAST = "broadcast"  # every target gets every message
    SCATTER = "scatter"  # `route` names the target
    GATHER = "gather"  # one target, which several sources share
    WEIGHTS = "weights"  # a broadcast of offers; the weights themselves lie in segments


@dataclass(frozen=True)
class ChannelSpec:
    """A channel from port `source` to port `target`, each written 'executor.port'.

    `capacity` messages may wait untaken; a `put` beyond it waits at most `deadline_s` seconds. `route` is a key of
    ROUTES and only for SCATTER; target i of an output port is its i-th spec. `accepts` names the message types that may
    pass (none: all of `core/types.py`). Between processes no message may have more than `max_bytes` in its wire form. A
    target that is not `is_awaited` is away when the source starts, until `Outbox.reconnect`.
    """

    name: str
    kind: Kind
    source: str
    target: str
    capacity: int = 1024
    deadline_s: float = 120.0
    route: str = "replica"
    accepts: tuple[str, ...] = ()
    max_bytes: int = MAX_MESSAGE_BYTES
    is_awaited: bool = True

    def __post_init__(self) -> None:
        for port in (self.source, self.target):
            if len(port.split(".")) != 2 or not all(port.split(".")):
                raise ChannelError(f"channel '{self.name}' has a bad port", got=port, allowed="'executor.port'")
        if not self.name or len(self.name.encode()) > 255:
            raise ChannelError("a channel needs a name", got=self.name, allowed="1..255 bytes")
        if self.capacity < 1 or self.deadline_s < 0 or self.max_bytes < 1:
            got = f"capacity {self.capacity}, deadline_s {self.deadline_s}, max_bytes {self.max_bytes}"
            allowed = "capacity >= 1, deadline_s >= 0, max_bytes >= 1"
            raise ChannelError(f"channel '{self.name}' cannot work", got=got, allowed=allowed)


def executor_of(port: str) -> str:
    """Return the executor of 'executor.port'."""
    return port.partition(".")[0]


def _route_by_replica(message: Message, num_targets: int) -> int | None:  # noqa: ARG001 - replicas count for themselves
    """Send `Admit` and `Observation` to the replica they name, everything else to all."""
    return message.replica if isinstance(message, Admit | Observation) else None


def _route_rollouts(message: Message, num_targets: int, *, by: Dealt) -> int | None:
    """Send each `Completion` or `Rollout` to the rank that scores or trains it, everything else to all."""
    if not isinstance(message, Completion | Rollout):
        return None
    return data_parallel_rank(message.ordinal, message.sample, num_targets, by=by)


def _route_news(message: Message, num_targets: int) -> int | None:  # noqa: ARG001 - members are numbered from 0
    """Return the member that `Peers` are for alone, None for all."""
    return message.member if isinstance(message, Peers) and message.member >= 0 else None


ROUTES: dict[str, Route] = {
    "membership": _route_news,
    "replica": _route_by_replica,
    "rollouts/samples": partial(_route_rollouts, by="samples"),
    "rollouts/groups": partial(_route_rollouts, by="groups"),
}


@dataclass
class ChannelStats:
    """Cumulative counters of one port.

    `refused` counts frames: malformed, oversized, of no channel of the port, of a replaced incarnation. `refused_peers`
    counts connections whose handshake failed: a different key, none, a different protocol. `disconnects` counts
    connections that ended; one also ends when a frame is larger than any channel allows, or is no frame at all.
    `wait_s` is the time `put` spent blocked, in seconds.
    """

    sent: int = 0
    received: int = 0
    duplicates: int = 0
    refused: int = 0
    refused_peers: int = 0
    disconnects: int = 0
    wait_s: float = 0.0
