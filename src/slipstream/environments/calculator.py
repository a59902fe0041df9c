"""A calculator in plain text: the smallest environment with a tool, without a format of calls or a chat template.

    the policy    12*34=
    environment   408
    the policy    408

A turn that ends in "=" asks the calculator. Any other turn is the answer, and ends the episode. A character-level
model of a few million parameters learns it.
"""

from __future__ import annotations

from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.plain import MAX_INT64
from slipstream.environments.protocol import ChatMessage, Environment, EnvironmentFault, Step

MAX_CHARS = 64
"""Most characters of an expression."""
MAX_DIGITS = 15
"""Most digits of a number in it."""


class Calculator(Environment):
    """Work out the expressions that the policy writes; reward its answer with 1 if it is the row's `answer`, else 0.

    An expression has integers, '+', '-' and '*', and spaces between them; one that is malformed or too large is
    answered with 'error'. The answer is compared without white space around it. The episode is done with the answer,
    or with the question after `max_questions` others, which is no answer.
    """

    def __init__(self, max_questions: int = 8) -> None:
        """ConfigError for a negative number."""
        if max_questions < 0:
            raise ConfigError("Calculator allows a number of questions", got=f"max_questions = {max_questions}")
        self._max_questions = max_questions
        self._answer, self._num_questions = "", 0

    def reset(self, **columns: Any) -> None:
        """Begin with the row's answer. EnvironmentFault for a row without one."""
        if columns.get("answer") is None:
            raise EnvironmentFault("Calculator needs the column 'answer'")
        self._answer, self._num_questions = str(columns["answer"]).strip(), 0

    def step(self, message: ChatMessage) -> Step:
        said = message["content"].strip()
        if not said.endswith("="):
            return Step(done=True, reward=float(said == self._answer))
        self._num_questions += 1
        if self._num_questions > self._max_questions:
            return Step(done=True, reward=0.0)
        try:
            return Step(str(calculate(said[:-1])), reward=0.0)
        except ValueError:
            return Step("error", reward=0.0)

    def state(self) -> int:
        return self._num_questions

    def restore(self, state: int, **columns: Any) -> None:
        self.reset(**columns)
        self._num_questions = state


def calculate(expression: str) -> int:
    """Return the value of integers joined by '+', '-' and '*', which binds closer; a number may have a '-' before it.

    ValueError for any other text, for more than `MAX_CHARS` characters, numbers of more than `MAX_DIGITS` digits, and
    values beyond 64 bits. The function is a tool as it is (`tools = ["slipstream.environments.calculator:calculate"]`).

    Args:
        expression: For example "12 * 34 - 5".
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression of {len(expression)} characters, at most {MAX_CHARS} are allowed")
    total, sign, product, position = 0, 1, 1, 0
    while True:
        number, position = _number(expression, position)
        product *= number
        if position == len(expression):
            total += sign * product
            if abs(total) > MAX_INT64:
                raise ValueError("a value beyond 64 bits")
            return total
        operator = expression[position]
        position += 1
        if operator in "+-":
            total, sign, product = total + sign * product, (1 if operator == "+" else -1), 1
        elif operator != "*":
            raise ValueError(f"{operator!r} is none of + - *")


def _number(text: str, start: int) -> tuple[int, int]:
    """Return the number at `start`, with spaces around it, and where these end. ValueError where there is none."""
    start = _after_spaces(text, start)
    end = first = start + text.startswith("-", start)
    while end < len(text) and "0" <= text[end] <= "9":
        end += 1
    if not 1 <= end - first <= MAX_DIGITS:
        raise ValueError(f"no number of at most {MAX_DIGITS} digits at character {first}")
    return int(text[start:end]), _after_spaces(text, end)


def _after_spaces(text: str, start: int) -> int:
    while text.startswith(" ", start):
        start += 1
    return start
