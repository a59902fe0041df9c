"""A number to guess: the smallest environment whose answer takes several turns.

    the policy    8
    environment   higher
    the policy    12
    environment   lower
    the policy    11
    environment   correct

Halving finds one of n numbers in at most ceil(log2(n + 1)) guesses; guessing without the answers does not. A
character-level model of a few million parameters learns it.
"""

from __future__ import annotations

import zlib
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.plain import parse_int, shortened, shown
from slipstream.environments.protocol import ChatMessage, Environment, EnvironmentFault, Step


class Guess(Environment):
    """Answer each guess of the row's `answer`, in 1..n, with 'higher', 'lower' or 'correct'.

    With `draws` the number is drawn by a hash of the row's prompt: any prompts will do that differ.
    A turn is a number in ASCII digits and nothing else but white space; any other is answered with the range, '1-16',
    and counts as a guess. The reward is 1 for the turn that finds the number, 0 for every other. The episode is done
    when it is found, or after `max_guesses`.
    """

    def __init__(self, n: int = 16, max_guesses: int = 8, *, draws: bool = False) -> None:
        """ConfigError unless both are positive."""
        if n < 1 or max_guesses < 1:
            raise ConfigError("Guess needs a number to guess and a guess", got=f"n = {n}, max_guesses = {max_guesses}")
        self._n, self._max_guesses, self._draws = n, max_guesses, draws
        self._target = self._num_guesses = 0

    def reset(self, **columns: Any) -> None:
        """Begin with the number in the column `answer`. EnvironmentFault where it holds none of 1..n."""
        if self._draws:
            target: int | None = 1 + zlib.crc32(str(columns.get("prompt")).encode()) % self._n
        else:
            target = _int(columns.get("answer"))
        if target is None or not 1 <= target <= self._n:
            given = shortened(shown(columns.get("answer")), 40)
            raise EnvironmentFault(f"Guess needs a number in 1..{self._n} in the column 'answer', not {given}")
        self._target, self._num_guesses = target, 0

    def step(self, message: ChatMessage) -> Step:
        self._num_guesses += 1
        guess = _int(message["content"])
        is_found = guess == self._target
        if guess is None:
            said = f"1-{self._n}"
        else:
            said = "correct" if is_found else "higher" if guess < self._target else "lower"
        return Step(said, done=is_found or self._num_guesses >= self._max_guesses, reward=float(is_found))

    def state(self) -> int:
        return self._num_guesses

    def restore(self, state: int, **columns: Any) -> None:
        self.reset(**columns)
        self._num_guesses = state


def _int(value: Any) -> int | None:
    try:
        return parse_int(str(value).strip())
    except ValueError:
        return None
