"""An episode as text: who said what, which calls, for which rewards; of any messages whatever, and of bounded size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from slipstream.observe.transcript import CALL, LEFT_OUT, MAX_ROLE_CHARS, TranscriptPart, beginning, transcript


def call(name: Any, arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "call_0", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def test_turns_have_their_numbers_and_rewards_and_calls_their_arguments() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "I add.", "tool_calls": [call("add", {"a": 1, "b": "x"}), call("now", {})]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "3"},
    ]
    assert transcript(messages, [0.5, None]) == [
        TranscriptPart("system", "Be brief."),
        TranscriptPart("assistant", "I add.", 1, 0.5),
        TranscriptPart(CALL, 'add(a=1, b="x")'),
        TranscriptPart(CALL, "now()"),
        TranscriptPart("tool add", "2"),
        TranscriptPart("assistant", "", 2),
        TranscriptPart("user", "And?"),
        TranscriptPart("assistant", "3", 3),
    ]


@pytest.mark.parametrize(
    ("given_call", "shown"),
    [
        (call("add", {}, error="a call is a JSON object"), "add: a call is a JSON object"),
        (call("add", '{"a": 1'), 'add({"a": 1)'),
        (call(None, {"a": None}), "(a=null)"),
        (["add", 1], '["add", 1]'),
        (7, "7"),
    ],
)
def test_a_call_of_any_form_is_shown(given_call: Any, shown: str) -> None:
    [_, part] = transcript([{"role": "assistant", "content": "", "tool_calls": [given_call]}])
    assert part == TranscriptPart(CALL, shown)


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def test_forks_follow_the_trunk_and_what_was_given_in_them_is_no_turn() -> None:
    trunk = [said("assistant", "one"), said("user", "go on"), said("assistant", "two")]
    compacted = [said("user", "so far: one, two"), said("assistant", "three")]
    aside = [said("user", "count"), said("assistant", "one"), said("user", "no"), said("assistant", "1")]
    found = transcript(trunk, [], [compacted, aside], [1, 3])
    assert found == [
        TranscriptPart("assistant", "one", 1),
        TranscriptPart("user", "go on"),
        TranscriptPart("assistant", "two", 2),
        TranscriptPart("fork 1 of 2", "a context of its own, of 1 message", fork=1),
        TranscriptPart("user", "so far: one, two"),
        TranscriptPart("assistant", "three", 3),
        TranscriptPart("fork 2 of 2", "a context of its own, of 3 messages", fork=2),
        TranscriptPart("user", "count"),
        TranscriptPart("assistant", "one"),
        TranscriptPart("user", "no"),
        TranscriptPart("assistant", "1", 4),
    ]
    assert beginning(found, max_parts=100, max_chars=1000) == found


def test_each_branch_has_its_share_and_a_fork_shows_what_was_sampled() -> None:
    trunk = [said("assistant", f"turn {i}") for i in range(50)]
    fork = [*(said("user", f"context {i}") for i in range(50)), *(said("assistant", f"forked {i}") for i in range(50))]
    parts = transcript(trunk, [], [fork] * 9, [50] * 9)
    found = beginning(parts, max_parts=12, max_chars=1000)
    assert [(one.role, one.text) for one in found[:5]] == [
        *(("assistant", f"turn {i}") for i in range(4)),
        (LEFT_OUT, "46 more"),
    ]
    for number in (1, 2):
        assert [(one.role, one.text) for one in found[5 * number : 5 * number + 5]] == [
            (f"fork {number} of 9", "a context of its own, of 50 messages"),
            (LEFT_OUT, "49 before"),
            ("user", "context 49"),
            ("assistant", "forked 0"),
            (LEFT_OUT, "49 more"),
        ]
    assert found[-1] == TranscriptPart(LEFT_OUT, "7 more forks")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["role", "content", "name", "tool_calls", "other"])


@drawn(
    30,
    100,
    messages=st.lists(st.dictionaries(FIELDS, JSON | st.just("assistant"))),
    rewards=st.lists(st.none() | st.floats()),
)
def test_whatever_a_file_holds_is_text(messages: list[dict[str, Any]], rewards: list[float | None]) -> None:
    parts = transcript(messages, rewards)
    assert all(isinstance(one.role, str) and isinstance(one.text, str) for one in parts)
    assert [one.turn for one in parts if one.turn is not None] == list(
        range(1, 1 + sum(message.get("role") == "assistant" for message in messages))
    )
    assert msgspec.json.decode(msgspec.json.encode(parts), type=list[TranscriptPart]) == parts


CHATS = st.lists(st.lists(st.dictionaries(FIELDS, JSON | st.just("assistant")), max_size=4), max_size=4)


@drawn(
    30,
    100,
    branches=CHATS,
    contexts=st.lists(st.integers(-1, 5)),
    max_parts=st.integers(1, 20),
    max_chars=st.integers(1, 200),
)
def test_whatever_branches_hold_is_text_of_bounded_size(
    branches: list[Any], contexts: list[int], max_parts: int, max_chars: int
) -> None:
    parts = transcript(branches[0] if branches else [], [], branches, contexts)
    turns = [one.turn for one in parts if one.turn is not None]
    assert turns == list(range(1, 1 + len(turns)))
    assert [one.fork for one in parts if one.fork is not None] == list(range(1, 1 + len(branches)))
    found = [one for one in beginning(parts, max_parts=max_parts, max_chars=max_chars) if one.role != LEFT_OUT]
    assert len(found) <= max_parts
    assert sum(len(one.text.removesuffix(" ...")) for one in found) <= max_chars


@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 8), st.integers(1, 60))
def test_the_beginning_is_bounded_and_says_what_it_leaves_out(texts: list[str], max_parts: int, max_chars: int) -> None:
    parts = [TranscriptPart("r" * 200, text) for text in texts]
    found = beginning(parts, max_parts=max_parts, max_chars=max_chars)
    left = [one for one in found if one.role == LEFT_OUT]
    shown = found[: len(found) - len(left)]
    assert len(shown) <= max_parts
    assert all(len(one.role) == MAX_ROLE_CHARS for one in shown)
    assert sum(len(one.text.removesuffix(" ...")) for one in shown) <= max_chars
    assert bool(left) == (len(shown) < len(parts))
    assert [one.text for one in left] == ([f"{len(parts) - len(shown)} more"] if left else [])
    for whole, one in zip(texts, shown, strict=False):
        assert whole.startswith(one.text.removesuffix(" ...")) or one.text == whole
