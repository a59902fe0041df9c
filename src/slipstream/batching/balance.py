"""Assignment of atoms to the data-parallel ranks that train on them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_permutation(lengths: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Atoms of each rank, ascending, so that token counts are close.

    By descending length, each atom goes to the rank with the fewest tokens so far, of those to the one with the fewest
    atoms. Token counts of two ranks differ by at most the longest atom, and the most is at most 4/3 - 1/(3 n) times the
    least that any assignment to n ranks has (Graham, Bounds on Multiprocessing Timing Anomalies, 1969, theorem 2).
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    lightest_first = [(0.0, 0, rank) for rank in range(num_ranks)]
    for atom in sorted(range(len(lengths)), key=lambda atom: (-lengths[atom], atom)):
        tokens, count, rank = lightest_first[0]
        ranks[rank].append(atom)
        heapq.heapreplace(lightest_first, (tokens + lengths[atom], count + 1, rank))
    return [sorted(atoms) for atoms in ranks]
