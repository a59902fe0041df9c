"""Rewards that are broken are refused before a run; those that abstain or find everything bad are not."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.core.errors import ConfigError
from slipstream.core.sections import RewardsConfig, RewardTerm
from slipstream.core.types import Prompt
from slipstream.rewards.dry_call import dry_call
from slipstream.rewards.user_functions import columns_needed

HERE = Path(__file__).parent


def prompts(*, chat: bool = False, answers: tuple[str | None, ...] = ("0", "1")) -> list[Prompt]:
    return [
        Prompt(
            prompt_id=str(i), text=f"{i}?", tokens=np.arange(5, dtype=np.int32), task="dataset", answer=answers[i],
            messages=[{"role": "user", "content": f"{i}?"}] if chat else None,
            columns={"level": 3, "answer": answers[i]},  # as `prompts/dataset.py` makes them
        )
        for i in range(len(answers))
    ]  # fmt: skip


def called(function: Callable[..., Any], *, per: Any = "completion", group_size: int = 1, **fields: Any) -> str | None:
    """The dry call of a Python function."""
    config = RewardsConfig(terms=[RewardTerm(function="python:mine", per=per)], **fields)
    return dry_call(config, {}, prompts(), functions={"mine": function}, group_size=group_size)


def test_columns_that_functions_need_are_known_before_they_are_called(tmp_path: Path) -> None:
    def complement(prompts, completions, completion_ids, nines, log_extra, answer, level=1, *, kind, **columns):
        return [0.0] * len(prompts)

    file = tmp_path / "r.py"
    file.write_text("def r(prompts, completions, completion_ids, tens, **columns):\n    return [0.0]\n")
    config = RewardsConfig(terms=[RewardTerm(function="python:mine"), RewardTerm(function=f"{file}:r")])
    needed = columns_needed(config, {"mine": complement})
    assert needed.keys() == {"nines", "kind", "tens"}
    assert "r.py, line 1" in needed["tens"]


def with_file(tmp_path: Path, text: str, name: str = "mine") -> str | None:
    """The dry call of the function in a file, in a worker."""
    (tmp_path / "rewards.py").write_text(text)
    config = RewardsConfig(terms=[RewardTerm(function=f"{tmp_path / 'rewards.py'}:{name}")])
    return dry_call(config, {}, prompts(), private=[])


def wrong_length(completions: list[str], **_: Any) -> list[float]:
    return [0.0, 1.0]


def nothing(completions: list[str], **_: Any) -> None:
    sum(map(len, completions))


def scalar(completions: list[str], **_: Any) -> float:
    return 0.5


def nan(completions: list[str], **_: Any) -> list[float]:
    return [float("nan")]


def infinite(completions: list[str], **_: Any) -> list[float]:
    return [-float("inf")]


def strings(completions: list[str], **_: Any) -> list[str]:
    return ["0.5" for _ in completions]


def text(completions: list[str], **_: Any) -> str:
    return "1"


def by_text(completions: list[str], **_: Any) -> dict[str, float]:
    return dict.fromkeys(completions, 1.0)


def nested(completions: list[str], **_: Any) -> list[list[float]]:
    return [[0.5] for _ in completions]


def no_such_column(prompts: Any, completions: Any, completion_ids: Any, solution: Any, **_: Any) -> list[float]:
    return [0.0]


def a_column_too_many(prompts: Any, completions: Any, completion_ids: Any, answer: Any) -> list[float]:
    return [0.0]


def reads_a_column(completions: list[str], **columns: Any) -> list[float]:
    return [float(columns["solution"][0] == completions[0])]


def lazily(completions: list[str], **_: Any) -> list[float]:
    import no_such_module  # noqa: F401

    return [0.0]


def leaves(completions: list[str], **_: Any) -> list[float]:
    raise SystemExit(3)


async def awaits_nothing(completions: list[str], **_: Any) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (wrong_length, "returned 2 rewards for 1 completion"),
        (nothing, "returned None"),
        (scalar, "returned 0.5 (float), not a list"),
        (nan, "returned nan as a reward"),
        (infinite, "returned -inf as a reward"),
        (strings, "returned '0.5' (str) as a reward, not a number"),
        (text, "returned '1' (str), not a list"),
        (by_text, "(dict), not a list"),
        (nested, "returned [0.5] (list) as a reward"),
        (no_such_column, "'solution'"),
        (a_column_too_many, "'level'"),
        (reads_a_column, "KeyError: 'solution'"),
        (lazily, "No module named 'no_such_module'"),
        (leaves, "SystemExit: 3"),
        (awaits_nothing, "returned 0.5 (float), not a list"),
        (lambda completions, **_: np.float64(0.5), "not a list"),
    ],
)
def test_a_broken_function_is_refused(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        called(function)
    told = str(caught.value)
    assert words in told
    assert told.startswith("a reward fails in a dry call, before the run\n  got:     mine: ")
    for part in ("the prompt was '0?'", "finite number or None", "columns answer, level", "rewards.dry_call = false"):
        assert part in told


@pytest.mark.parametrize("function", [wrong_length, nothing, scalar, nan, infinite, strings, awaits_nothing])
def test_what_a_function_returned_wrongly_names_its_file_and_line(function: Callable[..., Any]) -> None:
    place = f"(test_dry_call.py, line {function.__code__.co_firstlineno})"
    for given in (function, functools.partial(function)):
        with pytest.raises(ConfigError) as caught:
            called(given)
        assert place in str(caught.value)


@pytest.mark.parametrize("returned", ["0.5", "[float('nan')]", "[0.0, 1.0]", "None"])
def test_what_a_file_returned_wrongly_names_its_line(tmp_path: Path, returned: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, f"import math\n\n\ndef mine(completions, **_):\n    return {returned}\n")
    assert "(rewards.py, line 4)" in str(caught.value)


class Scores:
    def __call__(self, prompts: Any, completions: Any, completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        return [0.0] * len(completions)


def wants_an_answer(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def may_want_one(completions: list[str], answer: Any = None, **_: Any) -> list[float]:
    return [0.0] * len(completions)


def by_keyword(completions: list[str], *, answer: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize("function", [wants_an_answer, by_keyword, Scores(), functools.partial(wants_an_answer)])
def test_a_function_that_takes_answers_is_refused_where_no_row_has_one(function: Callable[..., Any]) -> None:
    config = RewardsConfig(terms=[RewardTerm(function="python:mine")])
    with pytest.raises(ConfigError, match="takes answer") as caught:
        dry_call(config, {}, prompts(answers=(None, None, None)), functions={"mine": function})
    told = str(caught.value)
    for part in ("no row has one", "3 prompts with level", "prompts.answer_column", "answer=None", "test_dry_call.py"):
        assert part in told
    assert dry_call(config, {}, prompts(answers=("0", None, None)), functions={"mine": function}) is None
    off = config.model_copy(update={"dry_call": False})
    assert dry_call(off, {}, prompts(answers=(None,)), functions={"mine": function}) is None


def test_a_function_that_needs_no_answer_is_called_without() -> None:
    config = RewardsConfig(terms=[RewardTerm(function="python:mine")])
    for function in (may_want_one, scalar_list, lambda completions, **_: [0.0 for _ in completions]):
        assert dry_call(config, {}, prompts(answers=(None, None)), functions={"mine": function}) is None


def scalar_list(completions: list[str], **_: Any) -> list[float]:
    return [0.5 for _ in completions]


@pytest.mark.parametrize("signature", ["completions, answer, **_", "completions, *, answer, **_"])
def test_a_file_that_takes_answers_is_refused_where_no_row_has_one(tmp_path: Path, signature: str) -> None:
    (tmp_path / "rewards.py").write_text(f"\ndef mine({signature}):\n    return [0.0]\n")
    config = RewardsConfig(terms=[RewardTerm(function=f"{tmp_path / 'rewards.py'}:mine")])
    with pytest.raises(ConfigError, match=r"takes answer \(rewards.py, line 2\), and no row has one"):
        dry_call(config, {}, prompts(answers=(None, None)))


def test_columns_of_an_error_have_an_answer_only_where_there_is_one() -> None:
    config = RewardsConfig(terms=[RewardTerm(function="python:mine")])
    with pytest.raises(ConfigError) as caught:
        dry_call(config, {}, prompts(answers=(None, None)), functions={"mine": scalar})
    assert "the columns level;" in str(caught.value)


def test_an_error_names_its_line() -> None:
    def divides(completions: list[str], **_: Any) -> list[float]:
        return [1 / (len(text) - len(text)) for text in completions]

    with pytest.raises(ConfigError, match="ZeroDivisionError") as caught:
        called(divides)
    assert f"(test_dry_call.py, line {divides.__code__.co_firstlineno + 1})" in str(caught.value)


def test_an_error_in_a_library_names_the_line_that_called_it() -> None:
    def shapes(completions: list[str], **_: Any) -> list[float]:
        return list(np.linalg.inv(np.zeros((2, 2)))[0])

    with pytest.raises(ConfigError, match="LinAlgError") as caught:
        called(shapes)
    assert f"(test_dry_call.py, line {shapes.__code__.co_firstlineno + 1})" in str(caught.value)


def test_a_file_is_called_in_a_worker_and_its_error_has_file_and_line(tmp_path: Path) -> None:
    source = "def mine(completions, **columns):\n    level = columns['level']\n    return [1 / 0 for _ in level]\n"
    with pytest.raises(ConfigError) as caught:
        with_file(tmp_path, source)
    assert "mine: ZeroDivisionError: division by zero (rewards.py, line 3)" in str(caught.value)


def test_a_file_that_cannot_be_imported_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No module named 'no_such_module'") as caught:
        with_file(tmp_path, "import os\nimport no_such_module\n\ndef mine(completions, **_):\n    return [0.0]\n")
    assert "(rewards.py, line 2)" in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda completions, **_: [None for _ in completions],
        lambda completions, answer, **_: [None if text == right else 0.0 for text, right in zip(completions, answer)],  # noqa: B905
        lambda completions, **_: [-1.0 for _ in completions],
        lambda completions, **_: [True for _ in completions],
        lambda completions, **_: np.zeros(len(completions), dtype=np.float32),
        lambda completions, **_: (0.0 for _ in completions),
    ],
    ids=["abstains", "abstains once", "finds all bad", "bool", "array", "generator"],
)
def test_what_is_sound_is_not_refused(function: Callable[..., Any]) -> None:
    called(function)


def test_a_line_says_where_every_reward_abstains_and_nothing_is_refused() -> None:
    told = called(lambda completions, **_: [None for _ in completions])
    assert told is not None
    assert "mine (test_dry_call.py, line " in told
    assert "returned None for every completion, of 2: None means that a reward does not apply" in told
    assert called(lambda completions, **_: [0.0 for _ in completions]) is None
    terms = [RewardTerm(function="python:mine"), RewardTerm(function="regex", params={"pattern": "a"})]
    functions = {"mine": lambda completions, **_: [None for _ in completions]}
    assert dry_call(RewardsConfig(terms=terms), {}, prompts(), functions=functions) is None  # another one scores


def test_calls_look_like_those_of_the_run() -> None:
    seen: list[dict[str, Any]] = []

    def looks(**columns: Any) -> list[float]:
        seen.append(columns)
        return [0.0] * len(columns["completions"])

    config = RewardsConfig(terms=[RewardTerm(function="python:mine")])
    dry_call(config, {}, prompts(chat=True), functions={"mine": looks})
    first, second = seen
    assert first.keys() == {"prompts", "completions", "completion_ids", "answer", "level"}
    assert first["prompts"] == [[{"role": "user", "content": "0?"}]]
    assert first["completions"] == [[{"role": "assistant", "content": "0"}]]  # the reference
    assert second["completions"][0][0]["content"] != "1"
    assert first["answer"], first["level"] == (["0"], [3])
    assert all(isinstance(token, int) for token in first["completion_ids"][0])


def test_a_group_is_called_at_once() -> None:
    seen: list[list[str]] = []

    def ranks(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        assert len(answer) == len(completions)
        seen.append(completions)
        return [float(sorted(completions).index(text)) for text in completions]

    assert called(ranks, per="group", group_size=4) is None
    assert [len(set(completions)) for completions in seen] == [4, 4]
    with pytest.raises(ConfigError, match="returned 1 rewards for 4 completions"):
        called(lambda completions, **_: [1.0], per="group", group_size=4)


def test_each_function_is_called_twice_whatever_stands_beside_it() -> None:
    calls: list[tuple[str, int]] = []

    def counting(name: str) -> Callable[..., list[float]]:
        def function(completions: list[str], **_: Any) -> list[float]:
            calls.append((name, len(completions)))
            return [0.0] * len(completions)

        return function

    terms = [RewardTerm(function="python:one"), RewardTerm(function="python:all", per="group")]
    functions = {name: counting(name) for name in ("one", "all")}
    dry_call(RewardsConfig(terms=terms), {}, prompts(), functions=functions, group_size=5)
    assert sorted(calls) == [("all", 5), ("all", 5), ("one", 1), ("one", 1)]


def test_one_that_hangs_is_refused_at_its_deadline() -> None:
    may_end = threading.Event()

    def hangs(completions: list[str], **_: Any) -> list[float]:
        may_end.wait()
        return [0.0]

    started_s = time.monotonic()
    with pytest.raises(ConfigError, match=r"mine: timed out after 0\.2 s") as caught:
        called(hangs, timeout_s=0.2)
    may_end.set()
    assert "raise rewards.timeout_s" in str(caught.value)
    assert time.monotonic() - started_s < 60.0


def test_it_can_be_switched_off() -> None:
    def never(completions: list[str], **_: Any) -> list[float]:
        raise AssertionError("it was called")

    assert called(never, dry_call=False) is None
    with pytest.raises(ConfigError, match="it was called"):
        called(never)


@pytest.mark.parametrize(
    "term",
    [RewardTerm(function="overlap", params={"column": "answers"}), RewardTerm(function="code", params={})],
    ids=["overlap", "code"],
)
def test_a_built_in_whose_column_is_missing_is_refused(term: RewardTerm) -> None:
    with pytest.raises(ConfigError, match=f"reward '{term.function}' abstains: the column") as caught:
        dry_call(RewardsConfig(terms=[term], trust_verifier=True), {}, prompts())
    assert "prompts with the columns answer, level" in str(caught.value)


def test_a_built_in_whose_column_is_there_is_not() -> None:
    assert dry_call(RewardsConfig(terms=[RewardTerm(function="overlap")]), {}, prompts()) is None
