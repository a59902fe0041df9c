"""Lengths of completions and turns of episodes: those of a run's files, or made up.

Made-up lengths have a mean and a tail; here are also the decode steps of a batch of them that has to be generated to
its end (staleness 0). A completion of n sampled tokens becomes an episode of T turns with n / T of them each; after
each turn its environment works for a while, and all but the last are followed by given tokens. Seconds of an answer are
log-normal: half of them take less than 0.61 of the mean, one in a hundred more than 6.2 times the mean, none more than
`MOST`.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np

from slipstream.batching.balance import balanced_permutation
from slipstream.core.errors import ConfigError
from slipstream.core.fields import MAX_WAIT_S
from slipstream.core.run_log import RolloutLine, read_rollouts
from slipstream.plan.simulated_run import GroupWork, SimulatedTurn, SimulatedWorkload

P99_DEVIATIONS = NormalDist().inv_cdf(0.99)  # the deviation of the normal distribution that one in a hundred exceeds
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
        got = f"mean {mean:g}, p99 {p99:g}, longest {longest}"
        raise ConfigError("lengths are out of order", got=got, allowed="mean <= p99 <= longest")
    if p99 > MOST_TAIL * mean:
        raise ConfigError(
            "the tail of the lengths is too heavy for the lognormal distribution that stands for them",
            got=f"p99 {p99:g} with a mean of {mean:g} tokens",
            allowed=f"p99 at most {MOST_TAIL:g} means",
            hint="--lengths RUN takes the lengths of a finished run as they are",
        )
    # As the deviation rises from 0, the quantiles below p99 fall, and with them the mean.
    normal = np.array([NormalDist().inv_cdf((point + 0.5) / points) for point in range(points)])

    def quantiles(sigma: float) -> np.ndarray:
        return np.clip(p99 * np.exp(sigma * (normal - P99_DEVIATIONS)), 1, longest)

    low, high = 0.0, P99_DEVIATIONS
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.mean(quantiles(middle)) > mean else (low, middle)
    completions = tuple(np.rint(quantiles(high)).astype(int).tolist())
    return LengthSample(prompt_mean, completions, f"lognormal, mean {mean:g}, p99 {p99:g}", longest)


def lengths_of_run(run_dir: Path) -> tuple[LengthSample, Turns]:
    """Return the lengths in a run's `rollouts.jsonl`, dropped groups included: all that was sampled; and its turns.

    Prompt lengths are not recorded in tokens; they are taken to be as long per character as completions are.
    """
    path = run_dir / "rollouts.jsonl"
    if not path.is_file():
        raise ConfigError(f"'{run_dir}' has no rollouts.jsonl", allowed="the folder of a run that trained a step")
    found = [
        (line.num_tokens, num_sampled(line), recorded_turns(line), len(line.prompt), len(line.completion))
        for line in read_rollouts(path)
    ]
    tokens, sampled, episodes, prompt_chars, completion_chars = zip(*found, strict=True) if found else ((),) * 5
    positive = sorted(count for count, total in zip(sampled, tokens, strict=True) if total > 0)
    if not positive:
        raise ConfigError(f"'{path}' has no completions", allowed="the folder of a run that trained a step")
    tokens_per_char = sum(tokens) / max(sum(completion_chars), 1)
    prompt_mean = max(1.0, sum(prompt_chars) / len(found) * min(tokens_per_char, 1.0))
    lengths = LengthSample(prompt_mean, tuple(positive), f"{len(positive)} completions of {path.parent}")
    return lengths, mean_turns([turns for turns in episodes if turns])


@lru_cache(maxsize=4096)
def imbalance(completions: tuple[int, ...], rollouts: int, ranks: int, given: float) -> float:
    """Return how much more tokens than the mean the rank with the most has, of rollouts that are dealt by length.

    Their lengths are evenly spaced quantiles of `completions`; `given` tokens come to each.
    """
    lengths = np.quantile(completions, (np.arange(rollouts) + 0.5) / rollouts) + given
    tokens = [lengths[share].sum() for share in balanced_permutation(lengths.tolist(), ranks)]
    return float(max(tokens) / np.mean(tokens)) - 1.0


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
    steps: dict[int, float] = defaultdict(float)
    for seed in range(_SHUFFLES):
        dealt = np.random.default_rng(seed).permutation(lengths)
        busy = min(replicas, rollouts)  # the others have nothing to do
        shares = (dealt[replica::replicas].tolist() for replica in range(busy))
        slowest = max((sorted(queued([0] * len(share), share, slots)) for share in shares), key=max)
        before = 0.0
        for index, end in enumerate(slowest):
            steps[min(slots, len(slowest) - index)] += end - before
            before = end
    return tuple((live, count / _SHUFFLES) for live, count in sorted(steps.items(), reverse=True) if count)


def queued(arrived: Sequence[float], lasts: Sequence[float], servers: int) -> list[float]:
    """Return when each of those who arrive in this order is done, by the first server that is free."""
    free = [0.0] * servers
    done = []
    for at, seconds in zip(arrived, lasts, strict=True):
        done.append(max(at, heapq.heappop(free)) + seconds)
        heapq.heappush(free, done[-1])
    return done


# Turns


SIGMA = 1.0
"""Standard deviation of the logarithm of an answer's seconds."""
MOST = 20.0
"""Longest answer, over the mean."""
MAX_TURNS, MAX_GIVEN = 1000, 2**20
MOST_DRAWN = 1024
"""Episodes that are drawn to find the slowest of a step."""
_STREAM = 1 << 41  # of random numbers that nothing else draws


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Turns of an episode, in the mean; tokens given behind a turn; seconds of an answer, in the mean.

    None: as it was recorded; a workload without episodes has one turn, nothing given, and no waiting.
    """

    turns: float | None = None
    given_tokens: int | None = None
    environment_s: float | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers out of range."""
        for what, value, least, most in (
            ("an episode's turns", self.turns, 1.0, MAX_TURNS),
            ("the tokens given behind a turn", self.given_tokens, 0, MAX_GIVEN),
            ("the seconds of an environment's answer", self.environment_s, 0.0, MAX_WAIT_S),
        ):
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{what} are out of range", got=value, allowed=f"{least:g}..{most:g}")

    @property
    def is_set(self) -> bool:
        return (self.turns, self.given_tokens, self.environment_s) != (None, None, None)

    @property
    def given_mean(self) -> float:
        """Return the mean given tokens of an episode."""
        return ((self.turns or 1.0) - 1.0) * (self.given_tokens or 0)

    def slowest_s(self, count: int) -> float:
        """Return about how long the environment of the slowest of `count` episodes works; a function of both."""
        return _slowest_s(self, min(count, MOST_DRAWN)) if self.environment_s else 0.0

    def episode(self, recorded: Sequence[SimulatedTurn], rng: np.random.Generator) -> tuple[SimulatedTurn, ...]:
        """Return an episode with as many sampled tokens as `recorded`; equal numbers in each turn, but for one."""
        found = list(recorded)
        if self.turns is not None:
            length, waited_s = sum(turn.sampled for turn in found), sum(turn.environment_s for turn in found)
            count = min(length, math.floor(self.turns + rng.random()))
            sizes = [len(part) for part in np.array_split(np.empty(length, dtype=bool), count)]
            found = [SimulatedTurn(size, 0, waited_s / count) for size in sizes]
        if self.given_tokens is not None:
            last = len(found) - 1
            found = [turn._replace(given=self.given_tokens if i < last else 0) for i, turn in enumerate(found)]
        if self.environment_s is not None:
            drawn = np.minimum(rng.lognormal(-(SIGMA**2) / 2, SIGMA, len(found)), MOST) * self.environment_s
            found = [turn._replace(environment_s=float(s)) for turn, s in zip(found, drawn, strict=True)]
        return tuple(found)


AS_RECORDED = Turns()


@lru_cache(maxsize=64)
def _slowest_s(turns: Turns, count: int) -> float:
    rng, sample = np.random.default_rng(_STREAM), [SimulatedTurn(MAX_TURNS)]
    return max(sum(turn.environment_s for turn in turns.episode(sample, rng)) for _ in range(count))


@dataclass(frozen=True)
class WithTurns:
    """A workload with other turns: a function of (seed, ordinal). Evaluations stay as they are, of one turn."""

    workload: SimulatedWorkload
    turns: Turns
    seed: int = 0

    def group(self, ordinal: int, step: int) -> GroupWork:
        work, rng = self.workload.group(ordinal, step), np.random.default_rng((self.seed, _STREAM, ordinal))
        recorded = work.turns or tuple((SimulatedTurn(length),) for length in work.lengths)
        return work._replace(turns=tuple(self.turns.episode(each, rng) for each in recorded))

    def held_out(self, version: int) -> Sequence[GroupWork]:
        return self.workload.held_out(version)


def recorded_turns(line: RolloutLine) -> tuple[SimulatedTurn, ...]:
    """Return the turns of a recorded episode; () for a completion of one turn without an environment.

    `environment_s` of the line is that of the whole episode, and is dealt equally. Turns between which nothing was
    given are one.
    """
    if line.episode is None:
        return ()
    edges = [*(first for first, _ in line.versions), line.num_tokens]
    turns: list[list[int]] = []  # sampled, given
    for (first, version), end in zip(line.versions, edges[1:], strict=True):
        if version >= 0 and (not turns or turns[-1][1]):
            turns.append([0, 0])
        if turns:
            turns[-1][version < 0] += end - first
    if not turns:  # the environment failed
        turns = [[1, 0]]
    each_s = line.episode.environment_s / len(turns)
    return tuple(SimulatedTurn(sampled, given, each_s) for sampled, given in turns)


def num_sampled(line: RolloutLine) -> int:
    """Return the sampled tokens of a recorded completion, in an episode those of its turns."""
    turns = recorded_turns(line)
    return sum(turn.sampled for turn in turns) if turns else line.num_tokens


def mean_turns(episodes: Sequence[Sequence[SimulatedTurn]]) -> Turns:
    """Return the means of recorded episodes; nothing is set where there are none."""
    if not episodes:
        return AS_RECORDED
    num_turns = sum(map(len, episodes))
    given = sum(turn.given for turns in episodes for turn in turns[:-1])
    return Turns(
        turns=num_turns / len(episodes),
        given_tokens=round(given / max(num_turns - len(episodes), 1)),
        environment_s=sum(turn.environment_s for turns in episodes for turn in turns) / num_turns,
    )
