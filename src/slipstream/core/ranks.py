"""The names of a rank group's ranks, and the rank that gets each rollout.

A rank group is several processes that run one executor together. Rank 0 has the group's channels and passes
its commands on; the others are named after it.
"""

from __future__ import annotations

from typing import Literal

RANK_MARK = "@"

Dealt = Literal["samples", "groups"]
"""How rollouts are dealt to data-parallel ranks: each rollout by itself, or whole groups."""


def rank_name(executor: str, rank: int) -> str:
    """Return 'trainer' for rank 0 of the trainer, 'trainer@1' for rank 1: the names of processes, ports and logs."""
    return f"{executor}{RANK_MARK}{rank}" if rank else executor


def split_rank_name(name: str) -> tuple[str, int]:
    """Return the executor and rank of a `rank_name`."""
    executor, _, rank = name.partition(RANK_MARK)
    return executor, int(rank or 0)


def data_parallel_rank(ordinal: int, sample: int, num_ranks: int, *, by: Dealt) -> int:
    """Return which of `num_ranks` trains rollout `sample` of group `ordinal`: the pre-set permutation.

        samples:  (ordinal + sample) mod n      all ranks get the same number of a group's rollouts, up to one
        groups:   ordinal mod n                 for losses over pairs, which are chosen when all of a group is scored

    It depends only on numbers known at admission, so a rollout can go to its rank when it is scored.
    """
    return (ordinal + sample if by == "samples" else ordinal) % num_ranks
