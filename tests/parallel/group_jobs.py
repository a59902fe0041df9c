"""What ranks do to test `core.rank_group.RankGroup`, each of them from its own end."""

from __future__ import annotations

import torch
from rank_pool import Rank

from slipstream.core.rank_group import RankGroup


def of(rank: Rank) -> RankGroup:
    return RankGroup.over(rank.group)


def reduced(rank: Rank) -> tuple[list[float], list[float], list[float]]:
    """(sum, max, what was handed in, afterwards) of [rank, -rank]."""
    values = torch.tensor([float(rank.rank), -float(rank.rank)])
    group = of(rank)
    return group.sum(values).tolist(), group.max(values).tolist(), values.tolist()


def exchanged(rank: Rank, payloads: list[list[bytes]]) -> list[bytes]:
    """`payloads[r]` are those that rank r sends."""
    return of(rank).exchange(payloads[rank.rank])


def gathered(rank: Rank, payloads: list[bytes]) -> list[bytes]:
    return of(rank).gather(payloads[rank.rank])


def broadcast(rank: Rank, payloads: list[bytes], source: int) -> bytes:
    return of(rank).broadcast(payloads[rank.rank], source=source)


def split(rank: Rank, *sizes: int) -> tuple[tuple[int, int, list[bytes]], ...]:
    """(rank, size, who is in it) of the data-parallel group, and of those along the other axes."""
    sides = of(rank).split(*sizes, timeout_s=20.0)
    return tuple((side.rank, side.world, side.gather(str(rank.rank).encode())) for side in sides)
