"""The parts of a model that ranks hold, and the rank that gives each part when it is needed once."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from slipstream.core.errors import ShapeError
from slipstream.core.rank_group import RankGroup
from slipstream.models.safetensors_file import DTYPE_NAMES, DTYPES
from slipstream.models.shards import Box, Shard


@dataclass(frozen=True)
class Held:
    """A box that a rank holds, in its precision."""

    box: Box
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.box.extent) * self.dtype.itemsize


def holdings(shards: Iterable[Shard]) -> list[Held]:
    """Return the boxes of one rank's shards, without empty ones."""
    held = (Held(shard.box, shard.view.dtype) for shard in shards)
    return [one for one in held if one.nbytes]


def gather_holdings(mine: Sequence[Held], group: RankGroup) -> list[list[Held]]:
    """Return what every rank holds, by rank, on every rank; all call it."""
    told = [[h.box.name, h.box.shape, h.box.start, h.box.stop, DTYPE_NAMES[h.dtype]] for h in mine]
    return [
        [
            Held(Box(name, tuple(shape), tuple(start), tuple(stop)), DTYPES[dtype])
            for name, shape, start, stop, dtype in one
        ]
        for one in map(json.loads, group.gather(json.dumps(told).encode()))
    ]


def givers(by_rank: Sequence[Sequence[Held]]) -> dict[Held, int]:
    """For each different box, the rank that gives it: one of those that hold it, so that all give about as much.

    A pure function, so ranks with the same `by_rank` agree. Raises ShapeError unless the boxes of every tensor fill it
    without overlapping.
    """
    holders: dict[Held, list[int]] = defaultdict(list)
    for rank, held in enumerate(by_rank):
        for one in dict.fromkeys(held):
            holders[one].append(rank)
    _check_tiling(holders)
    given = [0] * len(by_rank)
    chosen: dict[Held, int] = {}
    for one in sorted(holders, key=lambda h: (len(holders[h]), -h.nbytes, h.box.name, h.box.start)):
        rank = min(holders[one], key=lambda r: (given[r], r))
        given[rank] += one.nbytes
        chosen[one] = rank
    return chosen


def _check_tiling(held: Iterable[Held]) -> None:
    tensors: dict[str, list[Held]] = defaultdict(list)
    for one in held:
        tensors[one.box.name].append(one)
    for name, parts in tensors.items():
        if len({(part.box.shape, part.dtype) for part in parts}) != 1:
            raise ShapeError(f"ranks disagree about the shape or precision of {name}", got=parts[:4])
        boxes = sorted((part.box for part in parts), key=lambda box: box.start)
        covered = sum(math.prod(box.extent) for box in boxes)
        if covered != math.prod(boxes[0].shape) or any(_overlaps(boxes)):
            raise ShapeError(
                f"the shards of all ranks do not make up {name} exactly once",
                got=", ".join(f"{box.start}-{box.stop}" for box in boxes[:8]),
                allowed=f"boxes that fill {boxes[0].shape}; equal ones may be held by several ranks",
            )


def _overlaps(boxes: Sequence[Box]) -> Iterable[bool]:
    """Yield whether each two boxes, in the order of their starts, have something in common."""
    for number, box in enumerate(boxes):
        for other in boxes[number + 1 :]:
            if box.stop and other.start[0] >= box.stop[0]:
                break
            yield all(
                max(a, c) < min(b, d) for a, b, c, d in zip(box.start, box.stop, other.start, other.stop, strict=True)
            )
