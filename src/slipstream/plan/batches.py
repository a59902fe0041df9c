"""A batch that has to be generated to its end: how many completions a replica still decodes as it runs dry.

With the bound closed until the trainer has all of a batch (staleness 0), nothing takes the place of what has finished.
The last completion decodes alone, at the price of a step for one token; the other replicas have finished long before.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter

import numpy as np

_SHUFFLES = 4


@functools.lru_cache(maxsize=4096)
def slowest_replica(
    completions: tuple[int, ...], rollouts: int, replicas: int, slots: int
) -> tuple[tuple[int, float], ...]:
    """(completions alive, decode steps) of the replica that takes the most steps, from full to the last token.

    `rollouts` lengths, evenly spaced quantiles of `completions` (ascending), are dealt to `replicas` in random order;
    each decodes them in that order, `slots` at once. Mean over a few orders, which are always the same.
    """
    places = ((np.arange(rollouts) + 0.5) / rollouts * len(completions)).astype(int)
    lengths = np.asarray(completions)[places]
    steps: Counter[int] = Counter()
    for seed in range(_SHUFFLES):
        dealt = np.random.default_rng(seed).permutation(lengths)
        busy = min(replicas, rollouts)  # the others have nothing to do
        slowest = max((_ends(dealt[replica::replicas].tolist(), slots) for replica in range(busy)), key=max)
        before = 0
        for index, end in enumerate(slowest):
            steps[min(slots, len(slowest) - index)] += end - before
            before = end
    return tuple((live, count / _SHUFFLES) for live, count in sorted(steps.items(), reverse=True) if count)


def _ends(lengths: list[int], slots: int) -> list[int]:
    """When each completion ends, ascending, in decode steps from the start: a slot takes the next as it comes free."""
    live: list[int] = []
    ends = []
    for length in lengths:
        start = heapq.heappop(live) if len(live) == slots else 0
        ends.append(start + length)
        heapq.heappush(live, start + length)
    return sorted(ends)
