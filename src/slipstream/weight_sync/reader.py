"""How a receiver gets a version that lies in segments it can map: it gathers its pieces from those of all sources."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import Holding, WeightsOffered
from slipstream.weight_sync.copies import Copies
from slipstream.weight_sync.copying import checksum_of
from slipstream.weight_sync.resharding import make_plan
from slipstream.weight_sync.slots import Slots, Transport


class Fetch(Protocol):
    """Brings an offered version to a receiver. One thread at a time."""

    def fetch(self, offer: WeightsOffered, shadow: torch.Tensor) -> None:
        """Fill `shadow` and verify it. Raises WeightSyncError, with `shadow` in any state, when that fails."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


class SegmentReader:
    """Implements `Fetch` over a `Transport`. `rotation` sets receivers apart that find a box with several sources."""

    def __init__(self, transport: Transport, holding: Holding | None, *, rotation: int = 0) -> None:
        self._transport, self._holding, self._rotation = transport, holding, rotation
        self._attached: dict[tuple[str, ...], list[Slots]] = {}
        self._copies: list[tuple[Slots, Copies]] = []

    def fetch(self, offer: WeightsOffered, shadow: torch.Tensor) -> None:
        """Copy what this rank holds from the slots of all sources, block by block against their checksums."""
        memory = self._transport.memory
        target = memory.bytes_of(shadow)
        sources = self._attach(offer, len(target))
        for source, checksum in zip(sources, offer.checksums, strict=True):
            commit = source.committed(offer.slot)
            if commit is None or commit.version != offer.version:
                raise WeightSyncError(f"slot {offer.slot} does not hold version {offer.version}", got=commit)
            if commit.checksum != checksum or checksum_of(source.checksums(offer.slot)) != checksum:
                raise WeightSyncError(f"version {offer.version} is damaged: its checksums are not those offered")
        for source, copies in self._copies:
            memory.gather(copies, source.data(offer.slot), target, source.checksums(offer.slot))

    def close(self) -> None:
        for sources in self._attached.values():
            for slots in sources:
                slots.close()
        self._attached.clear()
        self._copies.clear()

    def _attach(self, offer: WeightsOffered, num_bytes: int) -> list[Slots]:
        names = tuple(offer.segments)
        if names not in self._attached:
            self.close()  # a new publisher has new segments
            self._attached[names] = [self._transport.attach(name) for name in names]
            self._copies = self._planned(self._attached[names], num_bytes, offer.version)
        return self._attached[names]

    def _planned(self, sources: list[Slots], num_bytes: int, version: int) -> list[tuple[Slots, Copies]]:
        held = [source.holding for source in sources if source.holding is not None]
        if self._holding is None or len(held) < len(sources):
            if len(sources) != 1 or sources[0].num_bytes != num_bytes:
                raise WeightSyncError(
                    f"version {version} has the wrong size",
                    got=f"{[source.num_bytes for source in sources]} bytes in the segments",
                    allowed=f"{num_bytes} bytes in one",
                    hint="only ends that say what they hold (`Holding`) may hold different parts",
                )
            return [(sources[0], _everything(num_bytes))]
        if self._holding.num_bytes != num_bytes:
            raise WeightSyncError("a buffer is not of its holding", got=num_bytes, allowed=self._holding.num_bytes)
        plan = make_plan(held, [self._holding], rotation=self._rotation)
        return [(sources[rank], plan.copies[rank, 0].by_source()) for rank in plan.sources_of(0)]


def _everything(num_bytes: int) -> Copies:
    zero, one = np.zeros((1, 1), np.int64), np.ones((1, 1), np.int64)
    return Copies(zero[0], zero[0], one, zero, zero, np.array([num_bytes]))
