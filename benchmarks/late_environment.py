"""Environments that answer late, for `turns.py`: ours and, in TRL's form, one for both sides. Quick to import.

An answer takes MEAN seconds on average with a heavy tail: log-normal with a standard deviation of the logarithm of 1,
so that half of the answers take less than 0.61 of the mean and one of a hundred more than 6.2 times the mean; none
takes more than 20 times.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

SIGMA, MOST = 1.0, 20.0
NUM_GIVEN_CHARS = 8
MEAN_VARIABLE = "LATE_MEAN_S"
"""Where `Caller` finds its mean, which TRL makes without arguments."""


def answer_s(mean_s: float, draw: random.Random) -> float:
    """Return the seconds of one answer, at most `MOST` times the mean."""
    return min(mean_s * draw.lognormvariate(-(SIGMA**2) / 2, SIGMA), MOST * mean_s)


class Late:
    """Say a few characters after each of `turns` turns but the last; the reward is the share of vowels in a turn.

    Waiting is `async`, so that any number of episodes wait side by side in one process.
    """

    def __init__(self, mean_s: float = 0.0, turns: int = 4) -> None:
        self._mean_s, self._turns = mean_s, turns
        self._num_answers = 0

    def reset(self, answer: str, **columns: Any) -> None:
        """Begin; the episodes of a prompt draw different times."""
        self._draw = random.Random(f"{answer} {os.urandom(4).hex()}")

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        self._num_answers += 1
        await asyncio.sleep(answer_s(self._mean_s, self._draw))
        text = message["content"]
        vowels = sum(character in "aeiou" for character in text) / max(1, len(text))
        said = "?" * (NUM_GIVEN_CHARS - 1) + "="
        return {"messages": said, "done": self._num_answers >= self._turns, "reward": vowels}


class Caller:
    """TRL's form of a late environment: one tool, `look`; the reward differs among episodes."""

    def __init__(self) -> None:
        self._mean_s = float(os.environ.get(MEAN_VARIABLE, "0"))

    def reset(self, **columns: Any) -> None:
        self._num_calls = 0
        self._draw = random.Random()

    async def look(self) -> str:
        """Look once more.

        Returns:
            What there is to see.
        """
        self._num_calls += 1
        await asyncio.sleep(answer_s(self._mean_s, self._draw))
        return f"{self._num_calls} of many"

    def get_reward(self) -> float:
        return self._num_calls + self._draw.random() / 10
