"""A batch that the data-parallel ranks of a frozen model read together: each every i-th microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.core import wire
from slipstream.core.packed import Batching, PackedMicrobatch, TrainSequence, empty_microbatch
from slipstream.core.peer_messages import Readings
from slipstream.core.rank_group import RankGroup

Arrays = tuple[np.ndarray, ...]


@torch.no_grad()
def read_in_turns(
    model: nn.Module,
    microbatches: Sequence[PackedMicrobatch],
    read: Callable[[PackedMicrobatch], tuple[Tensor, ...]],
    ranks: RankGroup = RankGroup.alone(),
) -> list[Arrays]:
    """Return what `read` gives for each of `microbatches`, on every rank.

    The data-parallel `ranks` of `model` call it together, with the same microbatches. Rank r reads the r-th and every
    n-th behind it, and an empty one where others have one more: layers are gathered for all at once. Afterwards each
    rank holds its part of the model only.
    Identity: equals `read` of each of them on one rank.
    """
    mine = list(microbatches[ranks.rank :: ranks.world])
    missing = math.ceil(len(microbatches) / ranks.world) - len(mine)
    found = [read(one) for one in [*mine, *(empty_microbatch() for _ in range(missing))]]
    arrays = [tuple(part.cpu().numpy() for part in parts) for parts in found[: len(mine)]]  # a GPU is done by then
    if ranks.world == 1:
        return arrays
    _give_up_gathered(model)
    by_rank = [wire.decode_one(payload, Readings).arrays for payload in ranks.gather(_packed(arrays))]
    counts = [len(microbatches[rank :: ranks.world]) for rank in range(ranks.world)]
    each = [len(parts) // count if count else 0 for parts, count in zip(by_rank, counts, strict=True)]
    turns = [divmod(index, ranks.world) for index in range(len(microbatches))]
    return [by_rank[rank][turn * each[rank] : (turn + 1) * each[rank]] for turn, rank in turns]


def _packed(arrays: Sequence[Arrays]) -> bytes:
    return wire.encode(Readings(arrays=tuple(one for parts in arrays for one in parts)))


def collated(batching: Batching, sequences: Sequence[TrainSequence], capacity_tokens: int) -> list[PackedMicrobatch]:
    """Return the microbatches of `sequences`, those with kept sets apart from others: greedy baselines have none."""
    kinds = [[one for one in sequences if (one.kept_tokens is None) == is_bare] for is_bare in (False, True)]
    return [packed for kind in kinds if kind for packed in batching.collate(kind, capacity_tokens)]


def _give_up_gathered(model: nn.Module) -> None:
    """Reshard embedding and head, which FSDP2's root keeps until a backward pass: there is none."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
