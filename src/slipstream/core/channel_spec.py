"""What a channel is: kind, ends, capacity, deadline, routing; and the counters of a port."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields

from slipstream.core.errors import ChannelError
from slipstream.core.types import Admit, Message

Route = Callable[[Message], int | None]


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
    pass (none: all of `core/types.py`).
    """

    name: str
    kind: Kind
    source: str
    target: str
    capacity: int = 1024
    deadline_s: float = 120.0
    route: str = "replica"
    accepts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for port in (self.source, self.target):
            if len(port.split(".")) != 2 or not all(port.split(".")):
                raise ChannelError(f"channel '{self.name}' has a bad port", got=port, allowed="'executor.port'")
        if not self.name or len(self.name.encode()) > 255:
            raise ChannelError("a channel needs a name", got=self.name, allowed="1..255 bytes")
        if self.capacity < 1 or self.deadline_s < 0:
            raise ChannelError(
                f"channel '{self.name}' cannot work",
                got=f"capacity {self.capacity}, deadline_s {self.deadline_s}",
                allowed="capacity >= 1, deadline_s >= 0",
            )


def route_by_replica(message: Message) -> int | None:
    """`Admit` to the replica it names, everything else to all."""
    return message.replica if isinstance(message, Admit) else None


ROUTES: dict[str, Route] = {"replica": route_by_replica}


@dataclass
class ChannelStats:
    """Cumulative counters of one port; `wait_s` is the time `put` spent blocked, in seconds."""

    sent: int = 0
    received: int = 0
    duplicates: int = 0
    refused: int = 0
    wait_s: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return {f.name: float(getattr(self, f.name)) for f in fields(self)}
