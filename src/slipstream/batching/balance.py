"""Assignment of atoms to the data-parallel ranks that train on them."""

from __future__ import annotations

from collections.abc import Sequence


def preset_permutation(num_atoms: int, num_ranks: int) -> list[list[int]]:
    """Atoms of each rank, fixed before anything is known of their lengths: atom i goes to rank i mod `num_ranks`.

    Magistral: a finished sequence can be handed over at once. Counts differ by at most one.
    """
    return [list(range(rank, num_atoms, num_ranks)) for rank in range(num_ranks)]


def balanced_permutation(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Atoms of each rank, ascending, so that token counts are close and atom counts differ by at most one.

    Atoms sorted by descending length are dealt in rounds of `num_ranks`; in each round the longest goes to the rank
    with the fewest tokens so far. Token counts of two ranks differ by at most the longest atom.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    tokens = [0] * num_ranks
    order = sorted(range(len(lengths)), key=lambda atom: (-lengths[atom], atom))
    for start in range(0, len(order), num_ranks):
        lightest_first = sorted(range(num_ranks), key=lambda rank: (tokens[rank], rank))
        for atom, rank in zip(order[start : start + num_ranks], lightest_first, strict=False):
            ranks[rank].append(atom)
            tokens[rank] += lengths[atom]
    return [sorted(atoms) for atoms in ranks]
