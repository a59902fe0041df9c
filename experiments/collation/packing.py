"""Sequences of random lengths, three ways to lay them out in microbatches, and the padding of each. Pure numbers.

A microbatch has room for `capacity` tokens. It takes as long as its *slots*, filled or not: rows x longest in a padded
rectangle, the whole capacity where microbatches have a fixed size (Magistral's do).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.batching.balance import balanced_permutation
from slipstream.batching.collate import Atom, first_fit

LONGEST = 512
SHORTEST = 16


def _cut(lengths: np.ndarray) -> np.ndarray:
    cut: np.ndarray = np.clip(np.rint(lengths), SHORTEST, LONGEST).astype(np.int64)
    return cut


def _two_kinds(rng: np.random.Generator, count: int) -> np.ndarray:
    is_long = rng.random(count) < 0.25
    return np.where(is_long, LONGEST, rng.normal(64.0, 16.0, count))


DISTRIBUTIONS: Mapping[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "constant, 128": lambda _, count: np.full(count, 128.0),
    "uniform, 16 to 512": lambda rng, count: rng.uniform(SHORTEST, LONGEST, count),
    "geometric, mean 128": lambda rng, count: rng.geometric(1 / 128, count).astype(np.float64),
    "lognormal, median 128, sigma 0.6": lambda rng, count: rng.lognormal(np.log(128), 0.6, count),
    "long tail: lognormal, median 64, sigma 1.2": lambda rng, count: rng.lognormal(np.log(64), 1.2, count),
    "two kinds: 3/4 near 64, 1/4 at 512": _two_kinds,
}
"""Tokens of prompt and completion together; all are rounded and cut to SHORTEST..LONGEST."""

CONSTANT = "constant, 128"
VARIABLE = tuple(name for name in DISTRIBUTIONS if name != CONSTANT)


def draw(distribution: str, count: int, rng: np.random.Generator) -> list[int]:
    lengths: list[int] = _cut(DISTRIBUTIONS[distribution](rng, count)).tolist()
    return lengths


@dataclass(frozen=True)
class Microbatch:
    """Indices of sequences, and the token slots that it takes."""

    members: tuple[int, ...]
    slots: int


def no_packing(lengths: Sequence[int], capacity: int) -> list[Microbatch]:
    """Rectangles: as many rows as surely fit, in order of arrival, each padded to the longest of them."""
    rows = max(1, capacity // LONGEST)
    parts = [range(start, min(start + rows, len(lengths))) for start in range(0, len(lengths), rows)]
    return [Microbatch(tuple(part), len(part) * max(lengths[index] for index in part)) for part in parts]


def first_come(lengths: Sequence[int], capacity: int) -> list[Microbatch]:
    """Packed end to end in order of arrival; what does not fit opens the next microbatch, and none is gone back to."""
    bins: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room or not bins:
            bins.append([])
            room = capacity
        bins[-1].append(index)
        room -= length
    return [Microbatch(tuple(members), capacity) for members in bins]


def greedy(lengths: Sequence[int], capacity: int) -> list[Microbatch]:
    """Magistral's (M8), by `slipstream.batching.collate.first_fit`: longest first, each where it first fits."""
    atoms = [Atom((index, 0), ((index, length),)) for index, length in enumerate(lengths)]
    return [Microbatch(tuple(members), capacity) for members in first_fit(atoms, capacity)]


Collation = Callable[[Sequence[int], int], list[Microbatch]]
"""Lengths of sequences, and the capacity of a microbatch -> microbatches."""

COLLATIONS: Mapping[str, Collation] = {
    "no packing": no_packing,
    "first-come": first_come,
    "greedy": greedy,
}

DEALS: Mapping[str, Callable[[Sequence[int], int], list[list[int]]]] = {
    "preset": lambda lengths, workers: [list(range(worker, len(lengths), workers)) for worker in range(workers)],
    "balanced": balanced_permutation,
}
"""Which worker trains on which sequence: by a permutation fixed in advance (M3), or by length (ours)."""


@dataclass(frozen=True)
class Padding:
    """Of one minibatch over `workers`, each of which waits for the one with most slots.

    `padding` is the share of all slots until then that hold no token; `imbalance` the share lost to waiting alone.
    """

    padding: float
    imbalance: float


def padding_of(lengths: Sequence[int], capacity: int, *, collation: str, workers: int, deal: str = "preset") -> Padding:
    parts = [[lengths[index] for index in part] for part in DEALS[deal](lengths, workers)]
    slots = [sum(one.slots for one in COLLATIONS[collation](part, capacity)) for part in parts]
    most = max(slots)
    return Padding(1 - sum(lengths) / (workers * most), 1 - sum(slots) / (workers * most))


def mean_paddings(
    *, capacity: int, workers: int, completions_per_worker: int, seeds: Sequence[int], minibatches: int
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Distribution -> collation -> one dict per seed: mean padding and imbalance of `minibatches` minibatches.

    "greedy, balanced" is greedy collation behind balanced dealing. Each seed's minibatches are the same for all.
    """
    ways = {name: (name, "preset") for name in COLLATIONS} | {"greedy, balanced": ("greedy", "balanced")}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for distribution in DISTRIBUTIONS:
        found[distribution] = {way: [] for way in ways}
        for seed in seeds:
            rng = np.random.default_rng(seed)
            drawn = [draw(distribution, workers * completions_per_worker, rng) for _ in range(minibatches)]
            for way, (collation, deal) in ways.items():
                each = [
                    padding_of(lengths, capacity, collation=collation, workers=workers, deal=deal) for lengths in drawn
                ]
                found[distribution][way].append(
                    {
                        "padding": float(np.mean([one.padding for one in each])),
                        "imbalance": float(np.mean([one.imbalance for one in each])),
                    }
                )
    return found


def reduction(before: float, after: float) -> float:
    """The share of `before`'s padding tokens that `after` saves; both are shares of slots, of the same tokens.

        padding tokens = tokens * p / (1 - p)

    Since fewer slots also mean a smaller whole, this is more than 1 - after / before.
    """
    tokens_before, tokens_after = before / (1 - before), after / (1 - after)
    return 1 - tokens_after / tokens_before if tokens_before else 0.0
