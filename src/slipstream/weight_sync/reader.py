"""How a receiver gets a version that lies in segments it can map: it gathers its pieces from those of all sources."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from slipstream.core.errors import WeightSyncError, reason
from slipstream.core.peer_messages import Holding, WeightsOffered
from slipstream.core.weights import PlacedWeights
from slipstream.weight_sync.copies import Copies
from slipstream.weight_sync.copying import Checksums, checksum_of, verify
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.resharding import make_plan
from slipstream.weight_sync.slots import Commit, Slots, Transport, VersionGoneError


class Fetch(Protocol):
    """Brings an offered version to a receiver. One thread at a time."""

    def fetch(self, offer: WeightsOffered, shadow: torch.Tensor) -> None:
        """Fill `shadow` and verify it. Raises WeightSyncError, with `shadow` in any state, when that fails."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class Segments:
    """The segments of the publisher whose versions are offered, mapped by `transport`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._names: tuple[str, ...] = ()
        self._sources: list[Slots] = []

    def find(self, offer: WeightsOffered) -> tuple[list[Slots], list[Checksums]]:
        """Return those of `offer`, the same list as long as they are the same, and copies of its checksums there.

        Raises VersionGoneError unless its slot holds the version that is offered, WeightSyncError for a damaged one.
        """
        if offer.segments != self._names:
            self.close()  # a new publisher has new segments
            self._sources = [self._transport.attach(name) for name in offer.segments]
            self._names = offer.segments
        found = [source.checksums(offer.slot).copy() for source in self._sources]  # the slot may be written again
        self.check(offer)
        if tuple(map(checksum_of, found)) != offer.checksums:
            raise WeightSyncError(f"version {offer.version} is damaged: its checksums are not those offered")
        return self._sources, found

    def check(self, offer: WeightsOffered) -> None:
        """Raise VersionGoneError unless its slot holds the version that is offered."""
        found = [source.committed(offer.slot) for source in self._sources]
        if found != [Commit(offer.version, checksum) for checksum in offer.checksums]:
            raise VersionGoneError(f"slot {offer.slot} does not hold version {offer.version}", got=found)

    def close(self) -> None:
        for source in self._sources:
            source.close()
        self._names, self._sources = (), []


class SlotReader:
    """Implements `Fetch` for `weights` that are read where they lie: verifies a version, and says where that is.

    The slot is in use until another version is (`Subscriber`).
    """

    def __init__(self, transport: Transport, weights: PlacedWeights) -> None:
        self._segments, self._weights = Segments(transport), weights

    def fetch(self, offer: WeightsOffered, shadow: torch.Tensor) -> None:
        """Verify all of the version, which `shadow` stands for from now on."""
        sources, checksums = self._segments.find(offer)
        for source, known in zip(sources, checksums, strict=True):
            verify(source.data(offer.slot), known)
        self._weights.place(shadow, [source.place(offer.slot) for source in sources])

    def close(self) -> None:
        self._segments.close()


class OwnSlots:
    """Two slots of this process, the `buffers`, for versions that links bring: `weights` are read where they lie."""

    def __init__(self, transport: Transport, weights: PlacedWeights) -> None:
        assert weights.holding is not None, "a link needs to know"
        self._slots, self._weights = transport.create(weights.holding.num_bytes, 2, weights.holding), weights
        for slot in (0, 1):
            self._slots.invalidate(slot)
        self.buffers = [self._slots.data(slot) for slot in (0, 1)]

    def fetch(self, link: Fetch, offer: WeightsOffered, buffer: torch.Tensor) -> None:
        """Bring a version over `link` to one of the buffers, and say that it is there."""
        slot = [one.data_ptr() for one in self.buffers].index(buffer.data_ptr())
        self._slots.invalidate(slot)
        link.fetch(offer, buffer)
        self._slots.commit(slot, Commit(offer.version, 0))
        self._weights.place(buffer, [self._slots.place(slot)])

    def close(self) -> None:
        self._slots.close()


class SegmentReader:
    """Implements `Fetch` over a `Transport`. `rotation` sets receivers apart that find a box with several sources."""

    def __init__(self, transport: Transport, holding: Holding | None, *, rotation: int = 0) -> None:
        self._transport, self._holding, self._rotation = transport, holding, rotation
        self._memory = transport.memory
        self._segments = Segments(transport)
        self._sources: list[Slots] | None = None  # that the copies are planned for
        self._copies: list[tuple[int, Copies]] = []

    def fetch(self, offer: WeightsOffered, shadow: torch.Tensor) -> None:
        """Copy what this rank holds from the slots of all sources, block by block against their checksums."""
        target = self._memory.bytes_of(shadow)
        sources, checksums = self._segments.find(offer)
        if sources is not self._sources:
            self._copies, self._sources = self._planned(sources, len(target), offer.version), sources
        try:
            for source, copies in self._copies:
                self._memory.gather(copies, sources[source].data(offer.slot), target, checksums[source])
        except WeightSyncError:
            self._segments.check(offer)  # was it written again meanwhile?
            raise
        except torch.OutOfMemoryError as error:  # of this process: the trainer's memory can be read
            raise WeightSyncError("this rank's GPU has no room for a version on its way", got=reason(error)) from error
        except RuntimeError as error:  # CUDA's
            if not isinstance(self._transport, CudaIpc):
                raise
            self.close()
            raise self._transport.give_up(error) from error

    def close(self) -> None:
        self._segments.close()
        self._sources = None
        self._copies.clear()

    def _planned(self, sources: list[Slots], num_bytes: int, version: int) -> list[tuple[int, Copies]]:
        held = [source.holding for source in sources if source.holding is not None]
        if self._holding is None or len(held) < len(sources):
            if len(sources) != 1 or sources[0].num_bytes != num_bytes:
                raise WeightSyncError(
                    f"version {version} has the wrong size",
                    got=f"{[source.num_bytes for source in sources]} bytes in the segments",
                    allowed=f"{num_bytes} bytes in one",
                    hint="only ends that say what they hold (`Holding`) may hold different parts",
                )
            return [(0, _everything(num_bytes))]
        if self._holding.num_bytes != num_bytes:
            raise WeightSyncError("a buffer is not of its holding", got=num_bytes, allowed=self._holding.num_bytes)
        plan = make_plan(held, [self._holding], rotation=self._rotation)
        return [(rank, plan.copies[rank, 0].by_source()) for rank in plan.sources_of(0)]


def _everything(num_bytes: int) -> Copies:
    zero, one = np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64)
    return Copies(zero[0], zero[0], one, zero, zero, np.array([num_bytes]))
