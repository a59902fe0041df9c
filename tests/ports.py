"""Channels and spans in memory: what an executor needs when no host runs it."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ChannelClosed
from slipstream.core.executor import Context, Executor
from slipstream.core.spans import NoSpans, Spans
from slipstream.core.types import Message


class Port:
    """Both ends of a channel, to executor `target`; of `room` messages at most."""

    def __init__(self, target: str = "peer", room: int | None = None) -> None:
        self.messages: deque[Message] = deque()
        self.targets = frozenset({target})
        self.room = room
        self.is_closed = False

    def has_room_for(self, message: Message) -> bool:
        return self.is_closed or self.room is None or len(self.messages) < self.room

    def put(self, message: Message) -> None:
        assert self.has_room_for(message), "it would wait"
        if self.is_closed:
            raise ChannelClosed("it was disconnected")
        self.messages.append(message)

    def get_nowait(self) -> Message | None:
        return self.messages.popleft() if self.messages else None


def start(
    executor: Executor, run_dir: Path, *, name: str, spans: Spans | None = None, clock: Clock | None = None
) -> dict[str, Port]:
    """Initialise `executor`; its ports by their names."""
    inputs, outputs = (*executor.inputs, "commands"), (*executor.outputs, "events")
    ports = {port: Port() for port in {*inputs, *outputs}}
    executor.init(
        Context(
            name=name,
            run_dir=run_dir,
            inputs={port: ports[port] for port in inputs},
            outputs={port: ports[port] for port in outputs},
            spans=NoSpans() if spans is None else spans,
            clock=clock or WallClock(),
        )
    )
    return ports
