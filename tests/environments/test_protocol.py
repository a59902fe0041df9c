"""What an environment may return, read strictly; and an episode that is played with a function as the policy."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.environments.protocol import (
    MAX_MESSAGES,
    ROLES,
    Environment,
    EnvironmentFault,
    Step,
    as_messages,
    as_reward,
    as_step,
    cut,
    episode_reward,
    extends_prompt,
    play,
    tool_schemas,
    with_opening,
)

USER = {"role": "user", "content": "hello"}


def test_messages_in_every_allowed_form() -> None:
    assert as_messages(None) == []
    assert as_messages(()) == []
    assert as_messages("") == [{"role": "user", "content": ""}]
    assert as_messages("hello") == [USER]
    given = [
        {"role": "system", "content": "be brief"},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call_0"},
    ]
    assert as_messages(given) == given
    assert as_messages(tuple(given)) == given


def test_messages_are_copies() -> None:
    given = [dict(USER)]
    read = as_messages(given)
    given[0]["content"] = "later"
    assert read == [USER]


@pytest.mark.parametrize(
    ("value", "lesson"),
    [
        (3, r"a list, a string or None, not 3 \(int\)"),
        (b"hello", "not b'hello'"),
        ({"role": "user", "content": "hello"}, "a list, a string or None"),
        (["hello"], "a message is a dict"),
        ([{"content": "hello"}], "the role .* not None"),
        ([{"role": "assistant", "content": "hello"}], "user or tool or system, not 'assistant'"),
        ([{"role": ["user"], "content": "hello"}], "the role"),
        ([{"role": "user"}], "the content of a message is a string, not None"),
        ([{"role": "user", "content": [{"type": "text", "text": "hello"}]}], "the content"),
        ([{"role": "user", "content": "hello", "reward": 1.0}], "no 'reward'"),
        ([{"role": "user", "content": "hello", "tool_calls": []}], "no 'tool_calls'"),
        ([{"role": "tool", "content": "3", "name": 3}], "'name' of a message is a string"),
        ([{"role": "tool", "content": "3", "tool_call_id": "i" * 300}], "at most 256 characters"),
        ([USER] * (MAX_MESSAGES + 1), "65 messages at once, at most 64"),
    ],
)
def test_messages_that_are_refused(value: Any, lesson: str) -> None:
    with pytest.raises(EnvironmentFault, match=lesson):
        as_messages(value)


class _Nasty:
    def __repr__(self) -> str:
        raise ZeroDivisionError

    def __float__(self) -> float:
        raise ZeroDivisionError


@pytest.mark.parametrize("read", [as_messages, as_step, as_reward])
def test_an_object_that_cannot_be_shown_is_a_fault_and_no_other_error(read: Any) -> None:
    with pytest.raises(EnvironmentFault, match="_Nasty"):
        read(_Nasty())


def test_long_texts_are_cut_with_a_mark() -> None:
    assert as_messages("abcdef", max_chars=6) == [{"role": "user", "content": "abcdef"}]
    assert as_messages("abcdefg", max_chars=6) == [{"role": "user", "content": "abcdef ... [cut: 7 characters]"}]
    step = as_step(Step([{"role": "tool", "content": "x" * 1000}]), max_chars=2)
    assert step.messages == [{"role": "tool", "content": "xx ... [cut: 1,000 characters]"}]


@given(st.text(st.characters(exclude_categories=()), max_size=30))
def test_every_text_becomes_one_that_can_be_written(text: str) -> None:
    written = cut(text, 1000)
    assert msgspec.json.decode(msgspec.json.encode(written)) == written
    if not any(0xD800 <= ord(character) < 0xE000 for character in text):
        assert written == text


def test_surrogates_are_joined_or_replaced() -> None:
    assert cut("\ud83d\ude00", 10) == "\U0001f600"
    assert cut("a\udcffb", 10) == "a\ufffdb"


def test_steps_in_every_allowed_form() -> None:
    assert as_step(Step()) == Step([], False, None)
    assert as_step(Step("hello", done=True, reward=1)) == Step([USER], True, 1.0)
    assert as_step({"messages": "hello", "done": np.True_, "reward": np.float32(0.5)}) == Step([USER], True, 0.5)
    assert as_step({}) == Step([], False, None)
    assert type(as_step(Step(reward=1)).reward) is float
    assert type(as_step({"done": np.True_}).done) is bool


@pytest.mark.parametrize(
    ("value", "lesson"),
    [
        (None, "step returns a Step"),
        ("hello", "step returns a Step"),
        (("hello", 1.0, True), "step returns a Step"),
        ({"observation": "hello"}, "no 'observation'"),
        ({"done": 1}, "'done' of a step is True or False, not 1"),
        (Step(done="no"), "'done'"),  # type: ignore[arg-type]
        (Step(reward="1"), "a reward is a number"),  # type: ignore[arg-type]
        (Step(messages=4), "a list, a string or None"),  # type: ignore[arg-type]
    ],
)
def test_steps_that_are_refused(value: Any, lesson: str) -> None:
    with pytest.raises(EnvironmentFault, match=lesson):
        as_step(value)


@pytest.mark.parametrize("value", [1, 1.0, np.int64(1), np.float32(1), torch.tensor(1.0), Fraction(1)])
def test_rewards_of_every_kind_of_number(value: Any) -> None:
    assert as_reward(value) == 1.0
    assert type(as_reward(value)) is float


@pytest.mark.parametrize("value", [True, np.False_, "1", b"1", [1], math.nan, -math.inf, 10**400, torch.ones(2)])
def test_rewards_that_are_refused(value: Any) -> None:
    with pytest.raises(EnvironmentFault, match="a reward is"):
        as_reward(value)


def test_the_reward_of_an_episode() -> None:
    assert episode_reward([]) is None
    assert episode_reward([None, None], None) is None
    assert episode_reward([None, 0.0]) == 0.0
    assert episode_reward([0.25, None, 0.5], 1.0) == 1.75
    assert episode_reward([], 2.0) == 2.0
    with pytest.raises(EnvironmentFault, match="not finite"):
        episode_reward([1e308, 1e308])


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=8))
def test_the_reward_of_an_episode_is_the_sum_in_any_order(rewards: list[float | None]) -> None:
    present = [Fraction(reward) for reward in rewards if reward is not None]
    assert episode_reward(rewards) == (float(sum(present)) if present else None)
    assert episode_reward(rewards[::-1]) == episode_reward(rewards)


def test_what_reset_says_extends_the_prompt_or_follows_it() -> None:
    prompt, opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}], as_messages(" o")
    assert with_opening(prompt, opening) == [*prompt, {"role": "user", "content": " o"}]
    assert with_opening(prompt, opening, extends_prompt=True) == [prompt[0], {"role": "user", "content": "p o"}]
    assert with_opening([], opening, extends_prompt=True) == opening
    assert with_opening(prompt, [], extends_prompt=True) == prompt
    assert prompt[1] == {"role": "user", "content": "p"}


class Echo:
    """Duck typed: says the turn again, twice, and rewards its length."""

    def __init__(self) -> None:
        self.is_closed = False

    def reset(self, greeting: str, **columns: Any) -> str:
        return greeting

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"messages": message["content"] * 2, "reward": len(message["content"])}

    def close(self) -> None:
        self.is_closed = True


def test_an_episode_is_played_until_the_limit() -> None:
    environment = Echo()
    seen = []

    def policy(messages: list[dict[str, Any]]) -> str:
        seen.append([message["content"] for message in messages])
        return "ab"

    played = asyncio.run(play(environment, policy, "start", {"greeting": "hi", "other": 1}, max_turns=2))
    assert seen == [["start", "hi"], ["start", "hi", "ab", "abab"]]
    assert [message["role"] for message in played.messages] == ["user", "user", *["assistant", "user"] * 2]
    assert (played.reward, played.num_turns, played.is_done) == (4.0, 2, False)
    assert environment.is_closed


class Ends(Environment):
    async def reset(self, **columns: Any) -> None:
        self.log = ["reset"]

    def step(self, message: dict[str, Any]) -> Step:
        self.log.append(message["content"])
        return Step(done=True)

    async def final_reward(self) -> float:
        self.log.append("reward")
        return 0.5

    async def close(self) -> None:
        self.log.append("close")


def test_an_episode_ends_with_the_environment_which_is_asked_once_and_closed() -> None:
    async def policy(messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {"role": "assistant", "content": "x"}

    environment = Ends()
    played = asyncio.run(play(environment, policy))
    assert environment.log == ["reset", "x", "reward", "close"]
    assert (played.reward, played.num_turns, played.is_done) == (0.5, 1, True)


def test_an_environment_is_closed_after_an_error() -> None:
    environment = Echo()
    with pytest.raises(EnvironmentFault, match="a list, a string or None"):
        asyncio.run(play(environment, lambda messages: "x", (), {"greeting": 3}))
    assert environment.is_closed


def test_what_the_base_class_answers_for_others() -> None:
    assert tool_schemas(Echo()) == tool_schemas(Environment()) == []
    assert not extends_prompt(Echo())
    assert ROLES == ("user", "tool", "system")


def test_play_resets_with_the_columns_that_reset_takes() -> None:
    class Narrow:
        def reset(self, answer: str) -> None:
            self.answer = answer

        def step(self, message: dict[str, Any]) -> Step:
            return Step(done=True, reward=float(message["content"] == self.answer))

    played = asyncio.run(play(Narrow(), lambda _: "7", "q", {"answer": "7", "prompt": "q"}))
    assert played.reward == 1.0
