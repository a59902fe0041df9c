"""A node of the loop: named typed ports, and `init`, `step`, `save_checkpoint`, `close`.

An executor does not depend on where its peers run. A *host* (`controller/host.py`) gives it its ports, calls `step`
while it makes progress and sleeps on its ports when it does not: inline, in a process of its own, or under torchrun.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from slipstream.core.clock import Clock
from slipstream.core.rank_group import RankGroup
from slipstream.core.service_messages import Checkpoint
from slipstream.core.spans import Spans
from slipstream.core.types import Message, Stop
from slipstream.core.weights import WeightsPublisher, WeightsSubscriber


class Sender(Protocol):
    """The writing end of a channel."""

    def put(self, message: Message) -> None:
        """Hand `message` over; blocks while the channel is full, at most until its deadline (ChannelTimeout)."""

    def has_room_for(self, message: Message) -> bool:
        """Whether `put` would not block. After a no, the host calls `step` again when there is room."""

    @property
    def targets(self) -> frozenset[str]: ...  # the executors it leads to


class Receiver(Protocol):
    """The reading end of a channel."""

    def get_nowait(self) -> Message | None:
        """Return the oldest waiting message, or None. From here on the caller owns it: it is not sent again."""


@dataclass
class Context:
    """The arguments of `Executor.init`, made by the host."""

    name: str
    run_dir: Path
    inputs: Mapping[str, Receiver]
    outputs: Mapping[str, Sender]
    spans: Spans
    clock: Clock
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    """Messages put inside leave together, at its end: it is not for long work, nor for a wait for a peer."""
    num_threads: int = 1
    num_threads_alone: int = 1  # while no other executor has work: warm start, evaluation at the ends
    publisher: WeightsPublisher | None = None
    subscriber: WeightsSubscriber | None = None
    group: RankGroup = field(default_factory=RankGroup.alone)
    is_remote: bool = False  # in a process that joined the run, which sees its own job's GPUs alone
    scratch_prefix: str = "slipstream."  # of names in /dev/shm and /tmp: what begins so is removed when the run ends


def takes_stop(context: Context) -> bool:
    """Return whether `Stop`, the only command that is taken, has come since the last call; rank 0 passes it on."""
    commands = iter(context.inputs["commands"].get_nowait, None)
    stops = [command for command in commands if isinstance(command, Stop)]
    if context.group.is_leader and context.group.world > 1:
        for stop in stops:
            context.outputs["relay"].put(stop)
    return bool(stops)


class Executor(abc.ABC):
    """A node of the loop. Subclasses are final: one level deep. Construction is cheap and touches no device.

    Beside the ports that it names, each has the input `commands` and the output `events`, which lead to the controller.
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    outputs: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def init(self, context: Context) -> None:
        """Build models and buffers. Ends by putting `Ready` on `events`."""

    @abc.abstractmethod
    def step(self) -> bool:
        """Do one bounded piece of work without waiting; False when there was nothing to do."""

    @property
    @abc.abstractmethod
    def is_finished(self) -> bool:
        """True after `Stop` was carried out; the host then closes the executor."""

    def wait_fds(self) -> list[int]:
        """File descriptors besides the ports whose readability means that `step` has work."""
        return []

    def wait_s(self) -> float | None:
        """Longest time `step` may be left uncalled although nothing arrives (deadlines); None for no limit."""
        return None

    def held_inputs(self) -> tuple[str, ...]:
        """Inputs of which `step` takes nothing now: what waits there does not wake the host."""
        return ()

    def rejoined(self, executor: str) -> None:  # noqa: B027 - most nodes have nothing to send again
        """`executor` was lost, with every message that had reached it, and a successor is there."""

    def leave(self) -> None:  # noqa: B027 - what the run cannot do without stays as long as it may
        """Hand over what others can go on with, and finish: the machine is taken away soon."""

    def save_checkpoint(self, command: Checkpoint) -> None:  # noqa: B027 - most executors have no state worth saving
        """Write everything a resumed run needs of this executor beside, or in, `command.path`."""

    def close(self) -> None:  # noqa: B027
        """Release the processes and files that `init` opened. Called exactly once, also when `init` failed half-way."""
