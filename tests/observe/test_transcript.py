"""An episode as text: who said what, which calls, for which rewards; of any messages whatever, and of bounded size."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["role", "content", "name", "tool_calls", "other"])


@given(st.lists(st.dictionaries(FIELDS, JSON | st.just("assistant"))), st.lists(st.none() | st.floats()))
def test_whatever_a_file_holds_is_text(messages: list[dict[str, Any]], rewards: list[float | None]) -> None:
    parts = transcript(messages, rewards)
    assert all(isinstance(one.role, str) and isinstance(one.text, str) for one in parts)
    assert [one.turn for one in parts if one.turn is not None] == list(
        range(1, 1 + sum(message.get("role") == "assistant" for message in messages))
    )
    assert msgspec.json.decode(msgspec.json.encode(parts), type=list[TranscriptPart]) == parts


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
