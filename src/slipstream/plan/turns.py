"""Episodes of several turns, for the simulator and the planner: turns that were recorded, or made up.

A completion of n sampled tokens becomes an episode of T turns with n / T of them each; after each turn its environment
works for a while, and all but the last are followed by given tokens. Seconds of an answer are log-normal: half of them
take less than 0.61 of the mean, one in a hundred more than 6.2 times the mean, none more than `MOST`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.fields import MAX_WAIT_S
from slipstream.core.run_log import RolloutLine
from slipstream.plan.simulated_run import GroupWork, SimulatedTurn, SimulatedWorkload

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
