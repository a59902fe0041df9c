"""Tool calls in text of a model: what each family writes, and what nobody should."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from drawn import drawn
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.environments.tool_calls import FORMATS, MALFORMED, ParsedTurn, detect_format, parse

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(TEXT.filter(bool), st.dictionaries(TEXT, VALUES, max_size=3)), min_size=1, max_size=4)


def called(turn: ParsedTurn) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in turn.tool_calls]


def test_hermes_as_qwen_writes_it() -> None:
    text = (
        'Let me add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )
    turn = parse(text, "hermes")
    assert turn == ParsedTurn(
        "Let me add.",
        [
            {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
            {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {}}},
        ],
        [],
    )
    assert turn.message == {"role": "assistant", "content": "Let me add.", "tool_calls": turn.tool_calls}


def test_a_turn_without_calls_is_its_text() -> None:
    for format in FORMATS:
        turn = parse(" 4 is {the} answer.\n", format)
        assert turn == ParsedTurn(" 4 is {the} answer.\n")
        assert turn.message == {"role": "assistant", "content": " 4 is {the} answer.\n"}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "parameters": {"a": 1}}',
        ' {"name": "add", "parameters": {"a": 1}}<|eot_id|>',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>',
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
        '{"name": "add", "arguments": {"a": 1}}',
    ],
)
def test_llama3_as_llama_writes_it(text: str) -> None:
    turn = parse(text, "llama3")
    assert called(turn) == [("add", {"a": 1})]
    assert (turn.content, turn.errors) == ("", [])


def test_llama3_with_several_calls() -> None:
    turn = parse('{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": ";"}}', "llama3")
    assert called(turn) == [("a", {}), ("b", {"x": ";"})]


@pytest.mark.parametrize(
    "text", ['{"answer": 4}', '{"name": "Ada"}', "{not JSON}", 'Yes: {"name": "a", "parameters": {}}']
)
def test_llama3_answers_that_are_no_calls(text: str) -> None:
    assert parse(text, "llama3") == ParsedTurn(text)


@pytest.mark.parametrize(
    "text",
    ['{"name": "add", "parameters": {"a": 1}', "<|python_tag|>add.call(a=1)", '{"name": "a", "parameters": {}} so'],
)
def test_llama3_malformed_calls(text: str) -> None:
    assert len(parse(text, "llama3").errors) == 1


@pytest.mark.parametrize("format", ["smollm", "json_tags"])
def test_a_list_and_an_object(format: str) -> None:
    text = '<tool_call>[{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]</tool_call>'
    assert called(parse(text, format)) == [("a", {"x": 1}), ("b", {})]
    assert called(parse('<tool_call>{"name": "a", "arguments": {}}</tool_call>', format)) == [("a", {})]
    assert parse("<tool_call>[]</tool_call>", format).tool_calls == []
    assert parse(text, "hermes").errors == ["a call is a JSON object with a name and arguments"]


def test_calls_in_a_thought_are_not_made() -> None:
    call = '<tool_call>{"name": "a"}</tool_call>'
    assert called(parse(f"<think>shall I {call}?</think>\n{call}", "hermes")) == [("a", {})]
    assert parse(f"<think>shall I {call}?</think>\n{call}", "hermes").content == f"<think>shall I {call}?</think>"
    assert parse(f"<think>shall I {call}", "hermes") == ParsedTurn(f"<think>shall I {call}")
    assert called(parse(f"shall I {call}?</think>no", "hermes", is_thinking=True)) == []
    assert called(parse(f"shall I {call}?</think>{call}", "hermes", is_thinking=True)) == [("a", {})]


@pytest.mark.parametrize(
    ("body", "lesson"),
    [
        ("", "malformed JSON: Expecting value"),
        ('{"name": "a", "arguments": {}', "malformed JSON"),
        ('{"name": "a", "arguments": {"x": }}', "malformed JSON: Expecting value, character 33"),
        ("{'name': 'a'}", "malformed JSON"),
        ('{"arguments": {}}', "the call has no name"),
        ('{"name": "", "arguments": {}}', "the call has no name"),
        ('{"name": 3, "arguments": {}}', "the call has no name"),
        ('{"name": "%s"}' % ("n" * 129), "more than 128 characters"),
        ('{"name": "a", "arguments": "{}"}', "'arguments' of the call is no JSON object"),
        ('{"name": "a", "arguments": [1]}', "'arguments' of the call is no JSON object"),
        ("[1]", "a call is a JSON object"),
        ('"a"', "a call is a JSON object"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is no number"),
        ('{"name": "a", "arguments": {"x": -Infinity}}', "-Infinity is no number"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "a number is too large"),
        ('{"name": "a", "arguments": {"x": 9223372036854775808}}', "more than 64 bits"),
        ('{"name": "a", "arguments": {"x": %s}}' % ("9" * 5000), "a number is too long"),
        ('{"name": "a", "arguments": {"x": 1, "x": 2}}', "a name stands twice"),
        ('{"name": "a", "name": "b"}', "a name stands twice"),
        ('{"name": "a", "arguments": {"x": "\\ud800"}}', "half of a surrogate pair"),
        ('{"name": "a", "arguments": {"x": %s}}' % ("[" * 70 + "]" * 70), "nested more than 64 deep"),
        ('{"name": "a", "arguments": {"x": %s' % ("[" * 5000), "nested too deep"),
        ('{"name": "a"} and more', "text between the JSON and </tool_call>"),
    ],
)
def test_malformed_calls_are_entries_among_the_others(body: str, lesson: str) -> None:
    good = '<tool_call>{"name": "b"}</tool_call>'
    turn = parse(f"{good}<tool_call>{body}</tool_call>{good}", "hermes")
    assert [call["id"] for call in turn.tool_calls] == ["call_0", "call_1", "call_2"]
    assert [name for name, _ in called(turn)][::2] == ["b", "b"]
    assert lesson in turn.tool_calls[1]["error"]
    assert turn.errors == [turn.tool_calls[1]["error"]]
    assert turn.tool_calls[1]["function"]["arguments"] == {}
    assert "error" not in turn.tool_calls[0]
    assert turn.content == ""


def test_a_malformed_call_keeps_the_name_that_can_be_read() -> None:
    turn = parse('<tool_call>{"name": "a", "arguments": 3}</tool_call><tool_call>{</tool_call>', "hermes")
    assert [name for name, _ in called(turn)] == ["a", MALFORMED]


def test_a_call_that_is_not_closed_is_malformed() -> None:
    for text in ('<tool_call>{"name": "a"}', '<tool_call>{"name": "a"', "x<tool_call>", '<tool_call>{"name": "a"} '):
        turn = parse(text, "hermes")
        assert turn.errors == ["the call does not end with </tool_call>"]


def test_a_closing_tag_in_a_string_is_text() -> None:
    call = {"name": "a", "arguments": {"x": "</tool_call><tool_call>"}}
    assert called(parse(f"<tool_call>{json.dumps(call)}</tool_call>", "hermes")) == [("a", call["arguments"])]


def test_too_many_calls_are_one_error() -> None:
    for format, text in (
        ("hermes", '<tool_call>{"name": "a"}</tool_call>' * 5 + "rest"),
        ("smollm", "<tool_call>[" + ", ".join(['{"name": "a"}'] * 5) + "]</tool_call>"),
        ("llama3", ";".join(['{"name": "a", "parameters": {}}'] * 5)),
    ):
        turn = parse(text, format, max_calls=3)
        assert [name for name, _ in called(turn)] == ["a", "a", "a", MALFORMED]
        assert turn.errors == ["more than 3 calls in one turn; the others were not made"]
        assert parse(text, format, max_calls=5).errors == []


def test_too_long_calls_are_malformed() -> None:
    body = json.dumps({"name": "a", "arguments": {"x": "y" * 100}})
    text = f"<tool_call>{body}</tool_call>"
    assert parse(text, "hermes", max_chars=len(body)).errors == []
    for most in (len(body) - 1, 20, 1):
        assert parse(text, "hermes", max_chars=most).errors == [f"the call has more than {most} characters"]
    bare = body.replace("arguments", "parameters")
    assert parse(bare, "llama3", max_chars=20).errors == ["the call has more than 20 characters"]
    assert parse("long" * 1000, "hermes", max_chars=20).content == "long" * 1000


@pytest.mark.parametrize("depth", [1_000, 200_000])
def test_deep_brackets_are_malformed(depth: int) -> None:
    for bracket in ("[", '{"a":'):
        for text in (f"<tool_call>{bracket * depth}</tool_call>", f"<tool_call>{bracket * depth}"):
            turn = parse(text, "smollm", max_chars=1_000_000)
            assert len(turn.errors) == 1


def rendered(format: str, calls: list[tuple[str, Any]], is_ascii: bool) -> str:
    key = "parameters" if format == "llama3" else "arguments"
    texts = [json.dumps({"name": name, key: arguments}, ensure_ascii=is_ascii) for name, arguments in calls]
    if format == "llama3":
        return ";".join(texts)
    if format == "hermes":
        return "".join(f"\n<tool_call>\n{text}\n</tool_call>" for text in texts)
    return f"<tool_call>[{', '.join(texts)}]</tool_call>"


@drawn(20, 100, format=st.sampled_from(FORMATS), calls=CALLS, is_ascii=st.booleans())
def test_calls_are_read_as_they_were_written(format: str, calls: list[tuple[str, Any]], is_ascii: bool) -> None:
    turn = parse(rendered(format, calls, is_ascii), format)
    assert called(turn) == calls
    assert (turn.content, turn.errors) == ("", [])


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<|eot_id|>", ";", "\\", '"', "\x00"),
        *(
            '{"name": "a", "arguments": {"x": 1}}',
            '{"name": "a", "parameters": ',
            '"name"',
            ":",
            ",",
            "{",
            "}",
            "[",
            "]",
        ),
        *("NaN", "1e999", "9" * 40, "-", "\ud800", "\\ud800", "\u2028", "\U0001f600", " ", "\n"),
    ]
)


@given(st.sampled_from(FORMATS), st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join), st.booleans())
@example("smollm", "<tool_call>" * 40, False)
@example("hermes", '<tool_call>{"a":"' * 30, False)
def test_no_text_raises_or_passes_its_bounds(format: str, text: str, is_thinking: bool) -> None:
    turn = parse(text, format, max_calls=3, max_chars=200, is_thinking=is_thinking)
    assert len(turn.tool_calls) <= 4
    assert len(turn.content) <= len(text)
    assert turn.errors == [call["error"] for call in turn.tool_calls if "error" in call]
    for index, call in enumerate(turn.tool_calls):
        assert call["id"] == f"call_{index}"
        assert isinstance(call["function"]["name"], str)
        assert isinstance(call["function"]["arguments"], dict)
        assert msgspec.json.decode(msgspec.json.encode(call)) == call
    if not turn.tool_calls:
        assert turn.content == text


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        parse("", "herms")


QWEN = (
    "{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>\' }}'
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN, "hermes"),
        ("{{- '<tool_call>\\n{\"name\": \"' ~ name ~ '\", \"arguments\": ' ~ arguments | tojson ~ '}' }}", "hermes"),
        ('{{ \'You are SmolLM\' }} <tool_call>{"name": ..., "arguments": ...}</tool_call>', "smollm"),
        ('format: <tool_call>\\n[\\n{"name": "f", "arguments": {}}]</tool_call>', "smollm"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3"),
        ("<|start_header_id|> {{ '{\"name\": \"' + name + '\", ' }}{{ '\"parameters\": ' }}", "llama3"),
        ("<tool_call>\\n<function=' + tool_call.name + '>\\n \"arguments\"", None),
        ("<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key>", None),
        ("{% for message in messages %}{{ '<|im_start|>' + message.role }}{% endfor %}", None),
        ("", None),
    ],
)
def test_the_format_is_told_by_the_template(template: str, expected: str | None) -> None:
    assert detect_format(template) == expected
