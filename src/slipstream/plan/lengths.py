"""Lengths of completions: those of a run's files, or a distribution with a mean and a tail; and what a batch of them
costs that has to be generated to its end.

With the bound closed until the trainer has all of a batch (staleness 0), nothing takes the place of what has finished:
the last completion decodes alone, long after the other replicas have finished.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.run_log import read_rollouts

P99_DEVIATIONS = 2.3263478740408408  # the deviation of the normal distribution that one in a hundred exceeds
MOST_TAIL = 14.0
"""p99 over mean, at most: a lognormal distribution reaches exp(P99_DEVIATIONS ** 2 / 2) = 14.97 before it is cut."""

_SHUFFLES = 4


@dataclass(frozen=True)
class LengthSample:
    """Tokens of prompts (their mean) and of completions: a sample to draw from, ascending, cut at `limit` if at all."""

    prompt_mean: float
    completions: tuple[int, ...]
    source: str
    limit: int | None = None

    @cached_property
    def mean(self) -> float:
        return sum(self.completions) / len(self.completions)

    @cached_property
    def mean_square(self) -> float:
        return sum(length * length for length in self.completions) / len(self.completions)

    @cached_property
    def p99(self) -> float:
        return float(np.percentile(self.completions, 99))

    @property
    def longest(self) -> int:
        """The length that there must be room for."""
        return self.completions[-1] if self.limit is None else self.limit

    def longest_of(self, count: int) -> float:
        """Return the length that one in `count` completions exceeds."""
        return float(np.quantile(self.completions, 1 - 1 / count)) if count > 1 else self.mean

    def drawn(self, seed: int, num_groups: int, count: int) -> list[tuple[int, ...]]:
        """Draw the lengths of groups 0, 1 ...; those of a group do not depend on `num_groups`."""
        picks = np.random.default_rng(seed).integers(0, len(self.completions), (num_groups, count))
        return [tuple(group) for group in np.asarray(self.completions)[picks].tolist()]


def lengths_with_tail(prompt_mean: float, mean: float, p99: float, longest: int, *, points: int = 1000) -> LengthSample:
    """Return `points` quantiles of lognormal lengths with this mean and 99th percentile, once cut at `longest`.

    ConfigError for a tail that no lognormal distribution has.
    """
    if not (prompt_mean >= 1 and mean >= 1):
        raise ConfigError("lengths are positive", got=f"prompts of {prompt_mean:g}, completions of {mean:g} tokens")
    if not mean <= p99 <= longest:
        raise ConfigError(
            "lengths are out of order",
            got=f"mean {mean:g}, p99 {p99:g}, longest {longest}",
            allowed="mean <= p99 <= longest",
        )
    if p99 > MOST_TAIL * mean:
        raise ConfigError(
            "the tail of the lengths is too heavy for the lognormal distribution that stands for them",
            got=f"p99 {p99:g} with a mean of {mean:g} tokens",
            allowed=f"p99 at most {MOST_TAIL:g} means",
            hint="--lengths RUN takes the lengths of a finished run as they are",
        )
    # As the deviation rises from 0, the quantiles below p99 fall, and with them the mean.
    low, high = 0.0, P99_DEVIATIONS
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.mean(_quantiles(p99, middle, longest, points)) > mean else (low, middle)
    drawn = np.rint(_quantiles(p99, high, longest, points)).astype(int)
    return LengthSample(prompt_mean, tuple(drawn.tolist()), f"lognormal, mean {mean:g}, p99 {p99:g}", longest)


def _quantiles(p99: float, sigma: float, longest: int, points: int) -> np.ndarray:
    """Return, ascending, the middles of `points` equal shares of the distribution whose 99th percentile is `p99`."""
    return np.clip(p99 * np.exp(sigma * (_normal_quantiles(points) - P99_DEVIATIONS)), 1, longest)


@cache
def _normal_quantiles(points: int) -> np.ndarray:
    standard = NormalDist()
    return np.array([standard.inv_cdf((point + 0.5) / points) for point in range(points)])


def lengths_of_run(run_dir: Path) -> LengthSample:
    """Return the lengths in a run's `rollouts.jsonl`, dropped groups included: all that was generated.

    Prompt lengths are not recorded in tokens; they are taken to be as long per character as completions are.
    """
    path = run_dir / "rollouts.jsonl"
    if not path.is_file():
        raise ConfigError(f"'{run_dir}' has no rollouts.jsonl", allowed="the folder of a run that trained a step")
    completions: list[int] = []
    prompt_chars, completion_chars = 0, 0
    for line in read_rollouts(path):
        completions.append(line.num_tokens)
        prompt_chars += len(line.prompt)
        completion_chars += len(line.completion)
    positive = sorted(count for count in completions if count > 0)
    if not positive:
        raise ConfigError(f"'{path}' has no completions", allowed="the folder of a run that trained a step")
    tokens_per_char = sum(positive) / max(completion_chars, 1)
    prompt_mean = max(1.0, prompt_chars / len(completions) * min(tokens_per_char, 1.0))
    return LengthSample(prompt_mean, tuple(positive), f"{len(positive)} completions of {path.parent}")


@lru_cache(maxsize=4096)
def slowest_replica(
    completions: tuple[int, ...], rollouts: int, replicas: int, slots: int
) -> tuple[tuple[int, float], ...]:
    """Return (completions alive, decode steps) of the replica that takes the most steps, from full to the last token.

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
    """Return when each completion ends, ascending, in decode steps; a slot takes the next as it comes free."""
    live: list[int] = []
    ends = []
    for length in lengths:
        start = heapq.heappop(live) if len(live) == slots else 0
        ends.append(start + length)
        heapq.heappush(live, start + length)
    return sorted(ends)
