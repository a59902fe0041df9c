"""What a channel is: kind, ends, capacity, deadline, routing; and the counters of a port."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields

from slipstream.core.errors import ChannelError
from slipstream.core.ranks import data_parallel_rank
from slipstream.core.types import Admit, Completion, Message, Rollout

Route = Callable[[Message, int], int | None]
"""Which of so many targets gets a message; None: all of them."""

MAX_MESSAGE_BYTES = 256 * 2**20


class Kind(enum.StrEnum):
    """How messages of one output port reach its input ports."""

    BROADCAST = "broadcast"  # every target gets every message
    SCATTER = "scatter"  # `route` names the target
    GATHER = "gather"  # one target, which several sources share
    WEIGHTS = "weights"  # a broadcast of offers; the weights themselves lie in segments


@dataclass(frozen=True)
class ChannelSpec:
    """A channel from port `source` to port `target`, each written 'executor.port'.

    `capacity` messages may wait untaken; a `put` beyond it waits at most `deadline_s` seconds. `route` is a key of
    ROUTES and only for SCATTER; target i of an output port is its i-th spec. `accepts` names the message types that may
    pass (none: all of `core/types.py`). Between processes no message may have more than `max_bytes` in its wire form.
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

    def __post_init__(self) -> None:
        for port in (self.source, self.target):
            if len(port.split(".")) != 2 or not all(port.split(".")):
                raise ChannelError(f"channel '{self.name}' has a bad port", got=port, allowed="'executor.port'")
        if not self.name or len(self.name.encode()) > 255:
            raise ChannelError("a channel needs a name", got=self.name, allowed="1..255 bytes")
        if self.capacity < 1 or self.deadline_s < 0 or self.max_bytes < 1:
            raise ChannelError(
                f"channel '{self.name}' cannot work",
                got=f"capacity {self.capacity}, deadline_s {self.deadline_s}, max_bytes {self.max_bytes}",
                allowed="capacity >= 1, deadline_s >= 0, max_bytes >= 1",
            )


def route_by_replica(message: Message, num_targets: int) -> int | None:  # noqa: ARG001 - replicas count for themselves
    """`Admit` to the replica it names, everything else to all."""
    return message.replica if isinstance(message, Admit) else None


def route_by_sample(message: Message, num_targets: int) -> int | None:
    """Each `Completion` or `Rollout` to the rank that scores or trains it, everything else to all.

    So (`data_parallel_rank`) one of every group goes to each rank, evaluation's like all others.
    """
    if not isinstance(message, Completion | Rollout):
        return None
    return data_parallel_rank(message.ordinal, message.sample, num_targets, by="samples")


def route_by_group(message: Message, num_targets: int) -> int | None:
    """The `Completion`s or `Rollout`s of a group to one rank, everything else to all."""
    if not isinstance(message, Completion | Rollout):
        return None
    return data_parallel_rank(message.ordinal, message.sample, num_targets, by="groups")


ROUTES: dict[str, Route] = {
    "replica": route_by_replica,
    "rollouts/samples": route_by_sample,
    "rollouts/groups": route_by_group,
}


@dataclass
class ChannelStats:
    """Cumulative counters of one port.

    `refused` counts frames: malformed, oversized, of no channel of the port, of a replaced incarnation. `refused_peers`
    counts connections whose handshake failed: another key, none, another protocol. `disconnects` counts connections
    that ended, also by being cut off because a frame was larger than any channel allows, or was no frame at all.
    `wait_s` is the time `put` spent blocked, in seconds.
    """

    sent: int = 0
    received: int = 0
    duplicates: int = 0
    refused: int = 0
    refused_peers: int = 0
    disconnects: int = 0
    wait_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}
