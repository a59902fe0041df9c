"""The shipped environments, played by policies that know the rules and by some that do not."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from drawn import drawn
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.environments.calculator import MAX_CHARS, MAX_DIGITS, Calculator, calculate
from slipstream.environments.guess import Guess
from slipstream.environments.protocol import EnvironmentFault, Played, as_step, play


def episode(environment: Any, policy: Any, answer: Any) -> Played:
    return asyncio.run(play(environment, policy, "?", {"answer": answer, "level": 1}))


def said(message: str) -> dict[str, Any]:
    return {"role": "assistant", "content": message}


class Halving:
    """Guesses the middle of what the answers have left."""

    def __init__(self, n: int) -> None:
        self.low, self.high, self.guess = 1, n, 0

    def __call__(self, messages: list[dict[str, Any]]) -> str:
        if messages[-1]["content"] == "higher":
            self.low = self.guess + 1
        elif messages[-1]["content"] == "lower":
            self.high = self.guess - 1
        self.guess = (self.low + self.high) // 2
        return str(self.guess)


@drawn(30, 100, n=st.integers(1, 200), data=st.data())
def test_halving_finds_every_number(n: int, data: st.DataObject) -> None:
    target = data.draw(st.integers(1, n))
    played = episode(Guess(n, 16), Halving(n), str(target))
    assert (played.reward, played.is_done) == (1.0, True)
    assert played.num_turns <= math.ceil(math.log2(n + 1))
    assert played.messages[-2:] == [said(str(target)), {"role": "user", "content": "correct"}]
    assert {m["content"] for m in played.messages[2:-1:2]} <= {"higher", "lower"}


def test_guessing_the_same_finds_nothing() -> None:
    played = episode(Guess(16, 3), lambda messages: "8", 9)
    assert [m["content"] for m in played.messages if m["role"] == "user"] == ["?", "higher", "higher", "higher"]
    assert (played.reward, played.num_turns, played.is_done) == (0.0, 3, True)


@pytest.mark.parametrize("turn", ["", "eight", "8 9", "8.0", "1_0", "\u0668", "9" * 30, "<think>8"])
def test_what_is_no_number_is_answered_with_the_range(turn: str) -> None:
    guess = Guess(16)
    guess.reset(answer="8")
    step = as_step(guess.step(said(turn)))
    assert step.messages == [{"role": "user", "content": "1-16"}]
    assert (step.done, step.reward) == (False, 0.0)
    assert as_step(guess.step(said(" 8\n"))).reward == 1.0


@pytest.mark.parametrize("answer", [None, "", "0", "17", "eight", 17])
def test_rows_without_a_number_to_guess(answer: Any) -> None:
    with pytest.raises(EnvironmentFault, match=r"a number in 1\.\.16 in the column 'answer'"):
        Guess(16).reset(answer=answer)
    with pytest.raises(EnvironmentFault, match="the column 'answer', not None"):
        Guess(16).reset()


def test_absurd_parameters() -> None:
    for fields in ({"n": 0}, {"max_guesses": 0}):
        with pytest.raises(ConfigError):
            Guess(**fields)
    with pytest.raises(ConfigError):
        Calculator(-1)


def asks_and_copies(messages: list[dict[str, Any]]) -> str:
    last = messages[-1]["content"]
    return "12*34=" if last == "?" else last


def test_the_calculator_is_asked_and_its_answer_copied() -> None:
    played = episode(Calculator(), asks_and_copies, "408")
    assert [m["content"] for m in played.messages] == ["?", "12*34=", "408", "408"]
    assert (played.reward, played.num_turns, played.is_done) == (1.0, 2, True)
    assert episode(Calculator(), asks_and_copies, 409).reward == 0.0


def test_an_answer_without_a_question() -> None:
    assert episode(Calculator(), lambda messages: " 7\n", "7").reward == 1.0
    assert episode(Calculator(), lambda messages: "", "7").reward == 0.0


def test_questions_without_end_are_ended() -> None:
    played = episode(Calculator(2), lambda messages: "1+1=", "2")
    assert [m["content"] for m in played.messages if m["role"] == "user"] == ["?", "2", "2"]
    assert (played.reward, played.num_turns, played.is_done) == (0.0, 3, True)
    assert episode(Calculator(0), asks_and_copies, "408").num_turns == 1


def test_a_question_that_is_no_expression() -> None:
    calculator = Calculator()
    calculator.reset(answer="1")
    assert as_step(calculator.step(said("1+="))).messages == [{"role": "user", "content": "error"}]
    with pytest.raises(EnvironmentFault, match="the column 'answer'"):
        calculator.reset()


NUMBERS = st.integers(-999, 999).map(str)


@drawn(
    40,
    100,
    rest=st.lists(st.tuples(st.sampled_from("+-*"), NUMBERS, st.sampled_from(["", " "])), max_size=6),
    first=NUMBERS,
)
def test_expressions_have_pythons_value(rest: list[tuple[str, str, str]], first: str) -> None:
    expression = first + "".join(f"{space}{operator}{space}{number}" for operator, number, space in rest)
    assert calculate(expression) == eval(expression)


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", "+", "1+", "*1", "+1", "1 2", "1**2", "--1", "- 1", "(1)", "1/2", "1.5", "0x1", "1_0", "1e3", "a"),
        *("\u0661+1", "1\n+1", "9" * (MAX_DIGITS + 1), "1+" * MAX_CHARS + "1", "*".join(["999999999999999"] * 4)),
    ],
)
def test_what_is_no_expression(expression: str) -> None:
    with pytest.raises(ValueError, match=r"number|characters|none of|64 bits"):
        calculate(expression)


@drawn(50, 100, expression=st.text(max_size=80) | st.text("0123456789+-* ", max_size=80))
def test_no_text_raises_anything_else(expression: str) -> None:
    try:
        value = calculate(expression)
    except ValueError:
        return
    assert value == eval(" ".join(_without_zeros(expression)))


def _without_zeros(expression: str) -> list[str]:
    """Python takes no 007."""
    spaced = "".join(f" {c} " if c in "+-*" else c for c in expression).split()
    return [token.lstrip("0") or "0" if token.isdigit() else token for token in spaced]


def test_numbers_are_drawn_from_prompts_evenly_and_always_the_same() -> None:
    def found(prompt: str) -> int:
        guess = Guess(4, 4, draws=True)
        guess.reset(prompt=prompt, answer="not a number")
        return next(n for n in range(1, 5) if as_step(guess.step(said(str(n)))).done)

    numbers = [found(f"{index}:") for index in range(400)]
    assert numbers == [found(f"{index}:") for index in range(400)]
    assert all(70 < numbers.count(n) < 130 for n in range(1, 5))
