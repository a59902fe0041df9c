"""The two ends of a WEIGHTS channel, and the weights that they read and replace, as nodes see them.

`weight_sync` provides the ends, `models` the weights; `core/executor.py` hands them to an executor in its `Context`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from slipstream.core.peer_messages import Holding
from slipstream.core.spans import Spans
from slipstream.core.types import Message

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class Swap:
    """A committed version: seconds of staging while decoding went on, seconds decoding stood still, probe error."""

    version: int
    transfer_s: float
    pause_s: float
    probe_error: float


class WeightsPublisher(Protocol):
    """The trainer's end of a WEIGHTS channel, one on each rank. All ranks call `open` and `publish` together.

    Rank 0 has the channel: it decides and tells the others. What it learns between two versions it passes on to the
    trainer's `relay` port; the other ranks hand such messages to `take`.
    """

    def open(
        self, flat: torch.Tensor | None, packer: WeightsPacker | None = None, holding: Holding | None = None
    ) -> None:
        """The live weights, from now on; they are only read inside `publish`.

        `packer` writes them at the generators' precision; None: a slot holds the bytes of `flat` [num_params].
        `holding` says what lies where in these, `packer.holding` in what it writes; None: generators take them whole.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes of one version, on all ranks together."""
        ...

    def withdraw(self) -> bool:
        """Say that the live weights are about to change; False where somebody still reads the last version in them.

        Only where versions are published in place: elsewhere they are copies. All ranks call it.
        """
        ...

    def publish(self, version: int, probe_tokens: np.ndarray, probe_logprobs: np.ndarray) -> bool:
        """Copy the weights to a staging slot and offer them; False when every slot is still being read.

        The same answer on every rank; the probe is rank 0's.
        """
        ...

    @property
    def has_moved(self) -> bool:
        """Whether the bytes of the last version were others than those of the one before; on rank 0."""
        ...

    def poll(self) -> bool:
        """Take releases; offer the newest skipped version when a slot came free. True when anything happened."""
        ...

    def take(self, message: Message) -> None:
        """Take a message that rank 0 has relayed (`WeightsLinked`, `WeightsWanted`)."""
        ...

    def add_reader(self, replica: int) -> None:
        """A replica that joined or came back: it takes part from the next version on."""
        ...

    def drop_reader(self, replica: int) -> None:
        """Forget a dead replica: its slots come free, its link is closed."""
        ...

    def close(self) -> None: ...


class WeightsSubscriber(Protocol):
    """A generator's end of a WEIGHTS channel."""

    def open(
        self,
        parameters: FlatWeights,
        probe: Callable[[np.ndarray], np.ndarray],
        tolerance: float,
        *,
        is_threaded: bool,
        probes_prepared: bool = False,
        spans: Spans | None = None,
    ) -> None:
        """Commits go to `parameters`; `probe` recomputes the probe text's logprobs with them, `tolerance` in nats.

        `probes_prepared`: with the weights prepared last, so that staging checks them; else with the live ones.
        `spans` hears of staging that `poll` does itself.
        """
        ...

    def poll(self) -> bool:
        """Take offers and start staging the newest. True when anything happened."""
        ...

    @property
    def is_staging(self) -> bool:
        """A version is on its way, and decoding goes on meanwhile where there is something to decode."""
        ...

    @property
    def pending_version(self) -> int | None:
        """A newer version that lies staged and verified, ready to commit."""
        ...

    def commit(self) -> Swap | None:
        """Switch to the pending version between two decode steps; None when none is pending.

        Raises NotReproducedError, leaving the old version in place, when the probe disagrees.
        """
        ...

    def wait_fds(self) -> list[int]: ...

    def close(self) -> None: ...


class WeightsPacker(Protocol):
    """Turns the trainer's live weights into the bytes that generators read (`models.quantized.Packer`)."""

    num_bytes: int
    holding: Holding | None
    """What lies where in the bytes."""

    def pack(self, out: torch.Tensor) -> Iterator[slice]:
        """Write the weights as they are now to `out` uint8 [num_bytes].

        Yields the ranges of bytes that are final, ascending and without gaps, for a checksum on the way.
        """
        ...

    def settle(self, out: torch.Tensor) -> None:
        """Have the live weights lie in `out` uint8 [num_bytes] from now on, as far as they can."""
        ...


class FlatWeights(Protocol):
    """Weights in one tensor that can be exchanged (`models.served.ServedWeights`, `generator.vllm.weights`)."""

    flat: torch.Tensor
    """The live version. A tensor like it, or itself (`reads_flat`), holds the next; the two change places."""

    @property
    def holding(self) -> Holding | None:
        """The layout of `flat`; None: a version is all of the trainer's bytes as they are."""
        ...

    @property
    def reads_flat(self) -> bool:
        """Whether the live version reads `flat`; else the next may arrive in the same tensor."""
        ...

    def prepare(self, flat: torch.Tensor) -> None:
        """`flat` holds a whole, verified version that `rebind` may be called with next.

        Whatever can be done before the exchange is done here, beside decoding: this may be another thread's call.
        """
        ...

    def rebind(self, flat: torch.Tensor) -> None:
        """Compute with the weights in `flat` from here on; with the previous tensor, that is undone."""
        ...


class SlotPlace(NamedTuple):
    """Where a rank's part of a version lies for other processes to read: in file `path`, from byte `start` on.

    As long as it does, `mark` stands at byte `mark_start`.
    """

    path: str
    mark_start: int
    mark: bytes
    start: int
    holding: Holding


@runtime_checkable
class PlacedWeights(FlatWeights, Protocol):
    """Weights that another process reads where they lie: in the trainer's slots, or where a link brings them.

    Where they lie in the trainer's, `flat` only stands for a version.
    """

    def place(self, flat: torch.Tensor, places: Sequence[SlotPlace]) -> None:
        """The version that `flat` holds or stands for lies verified in `places`, one of each rank of its source."""
        ...
