"""Functions as tools: their schemas, what a model may call them with, and what it reads."""

from __future__ import annotations

import asyncio
import functools
import json
from enum import Enum
from typing import Any, Literal, Optional

import pytest
import torch
from drawn import drawn
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from slipstream.core.errors import ConfigError
from slipstream.environments.forms import checked, checked_chat
from slipstream.environments.openai_api import chat_ask
from slipstream.environments.protocol import Step, as_step, play
from slipstream.environments.tool_calls import parse
from slipstream.environments.tools import Tool, ToolEnvironment, text_of, tool_of, wrong_arguments


def add(a: int, b: int = 1) -> int:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow_add(a: int, b: int) -> int:
    """Add two integers, slowly.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0)
    return a + b


def fail(kind: str) -> str:
    """Raise.

    Args:
        kind: What to raise.
    """
    raise {"value": ValueError("no such thing"), "exit": SystemExit("bye"), "empty": KeyError(), "nasty": Nasty()}[kind]


class Nasty(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def call(name: str, index: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(environment: ToolEnvironment, *calls: dict[str, Any]) -> list[str]:
    """The texts of the answers, which must be messages as the protocol has them."""
    step = as_step(asyncio.run(environment.step({"role": "assistant", "content": "", "tool_calls": list(calls)})))
    assert not step.done
    assert [m["role"] for m in step.messages] == ["tool"] * len(calls)  # type: ignore[index]
    assert [m["tool_call_id"] for m in step.messages] == [c["id"] for c in calls]  # type: ignore[index]
    return [m["content"] for m in step.messages]  # type: ignore[index]


def test_the_schema_is_transformers_own() -> None:
    tool = tool_of(add)
    assert (tool.name, tool.function) == ("add", add)
    assert tool.schema["function"]["description"] == "Add two integers."
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "The first."},
            "b": {"type": "integer", "description": "The second."},
        },
        "required": ["a"],
    }
    assert tool_of(tool) is tool


def test_calls_are_answered_in_order() -> None:
    environment = ToolEnvironment([add, slow_add])
    assert [schema["function"]["name"] for schema in environment.tool_schemas] == ["add", "slow_add"]
    texts = turn(environment, call("slow_add", 0, a=1, b=2), call("add", 1, a=4), call("slow_add", 2, a=0, b=0))
    assert texts == ["3", "5", "0"]
    assert (environment.num_tool_calls, environment.num_tool_errors) == (3, 0)


def test_an_episode_is_done_with_the_first_turn_without_a_call() -> None:
    for message in ({"role": "assistant", "content": "5"}, {"role": "assistant", "content": "5", "tool_calls": []}):
        step = as_step(asyncio.run(ToolEnvironment([add]).step(message)))
        assert (step.messages, step.done, step.reward) == ([], True, None)


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (call("ad", a=1), "Error: there is no tool 'ad'; did you mean 'add'?"),
        (call("multiply", a=1), "Error: there is no tool 'multiply'; there are: add, fail"),
        (call("add"), "Error: the parameter 'a' is missing"),
        (call("add", a=1, c=2), "Error: there is no parameter 'c'; there are: a, b"),
        (call("add", a="1"), "Error: 'a' must be an integer, not \"1\""),
        (call("add", a=True), "Error: 'a' must be an integer, not true"),
        (call("add", a=None), "Error: 'a' must be an integer, not null"),
        (call("fail", kind="value"), "Error: ValueError: no such thing"),
        (call("fail", kind="exit"), "Error: SystemExit: bye"),
        (call("fail", kind="empty"), "Error: KeyError"),
        (call("fail", kind="nasty"), "Error: Nasty"),
        (call("add") | {"error": "malformed JSON"}, "Error: malformed JSON"),
    ],
)
def test_errors_are_text_for_the_model(one: dict[str, Any], text: str) -> None:
    environment = ToolEnvironment([add, fail])
    assert turn(environment, one, call("add", 1, a=1)) == [text, "2"]
    assert (environment.num_tool_calls, environment.num_tool_errors) == (2, 1)


def test_an_interrupt_is_no_error_of_the_model() -> None:
    def interrupt() -> None:
        """Interrupt."""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(ToolEnvironment([interrupt]).answer(call("interrupt")))


def test_counts_begin_again() -> None:
    environment = ToolEnvironment([add])
    turn(environment, call("add", a=1), call("add"))
    assert (environment.num_tool_calls, environment.num_tool_errors) == (2, 1)
    environment.reset(answer="3")
    assert (environment.num_tool_calls, environment.num_tool_errors) == (0, 0)


def test_results_as_text() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert text_of("as it is") == "as it is"
    assert text_of(None) == "null"
    assert text_of({"a": [1, 2.5, True], "b": "\u00e9"}) == '{"a": [1, 2.5, true], "b": "\u00e9"}'
    assert text_of(1 + 2j) == '"(1+2j)"'
    assert text_of({(1, 2): 3}) == "{(1, 2): 3}"
    assert text_of(circle) == "[[...]]"


def test_long_results_are_cut() -> None:
    def much() -> str:
        """Return a long text."""
        return "x" * 100 + "\ud800"

    assert turn(ToolEnvironment([much], max_chars=5), call("much")) == ["xxxxx ... [cut: 101 characters]"]


class Colour(Enum):
    RED = "red"


class Box:
    def method(self, a: int) -> int:
        """Return it.

        Args:
            a: A number.
        """
        return a

    def without_self(a: int) -> int:  # type: ignore[misc]
        """Return it.

        Args:
            a: A number.
        """
        return 3


def no_hint(a) -> None:  # type: ignore[no-untyped-def]
    """Take it.

    Args:
        a: A thing.
    """


def no_doc(a: int) -> None: ...


def no_line(a: int, b: int) -> None:
    """Take two.

    Args:
        a: The first.
    """


def a_box(a: Box) -> None:
    """Take a box.

    Args:
        a: A box.
    """


def a_tensor(a: list[torch.Tensor]) -> None:
    """Take tensors.

    Args:
        a: Tensors.
    """


def many(*numbers: int) -> None:
    """Take many.

    Args:
        numbers: Numbers.
    """


def unknown_name(a: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Take it.

    Args:
        a: A thing.
    """


@pytest.mark.parametrize(
    ("function", "lesson"),
    [
        (3, r"a tool is a function, not 3 \(int\)"),
        (Box, "a tool is a function, and .*Box"),
        (functools.partial(add, 1), "a tool is a function, and functools.partial"),
        (lambda a: a, "has no name"),
        (Box.method, "tool 'method' is a method of a class"),
        (Box().without_self, "first parameter is 'a', not self"),
        (no_hint, "tool 'no_hint' has type hints .* missing a type hint"),
        (no_doc, r"tool 'no_doc' has no docstring(.|\n)*test_tools.py, line"),
        (no_line, "no description for the argument 'b'"),
        (a_box, "custom class"),
        (a_tensor, "parameter 'a' of type audio"),
        (many, r"takes '\*numbers'"),
        (unknown_name, "'Missing' is not defined"),
    ],
)
def test_functions_that_are_no_tools(function: Any, lesson: str) -> None:
    with pytest.raises(ConfigError, match=lesson):
        tool_of(function)


def test_methods_of_an_object_are_tools() -> None:
    assert turn(ToolEnvironment([Box().method]), call("method", a=3)) == ["3"]


def test_two_tools_of_one_name_and_none() -> None:
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        ToolEnvironment([add, Tool("add", slow_add, {})])
    with pytest.raises(ConfigError, match="has no tool"):
        ToolEnvironment([])


HINTS = [
    int,
    float,
    str,
    bool,
    list,
    dict,
    list[int],
    list[list[float]],
    dict[str, int],
    dict[str, list[str]],
    tuple[int, str],
    int | str,
    Optional[int],  # noqa: UP045
    list[int] | None,
    list[int] | dict[str, bool],
    Literal["red", "green"],
    Literal["red", "green"] | None,
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(["red", "green", "", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=5,
)


@functools.cache
def parameters_of(index: int) -> dict[str, Any]:
    def tool(value: Any) -> None:
        """Take a value.

        Args:
            value: A value.
        """

    tool.__annotations__ = {"value": HINTS[index]}
    return tool_of(tool).parameters


@drawn(50, 100, index=st.integers(0, len(HINTS) - 1), value=JSON)
def test_arguments_fit_where_pydantic_takes_them(index: int, value: Any) -> None:
    """Pydantic's strict reading of the JSON for the same type hint is the oracle."""
    try:
        TypeAdapter(HINTS[index]).validate_json(json.dumps(value), strict=True)
        fits = True
    except ValidationError:
        fits = False
    assert (wrong_arguments({"value": value}, parameters_of(index)) is None) == fits


def test_what_is_wrong_is_said_with_its_place() -> None:
    def tool(rows: dict[str, list[int]], pair: tuple[int, str], colour: Colour) -> None:
        """Take values.

        Args:
            rows: Rows.
            pair: A pair.
            colour: A colour.
        """

    parameters = _parameters(tool)
    good = {"rows": {"x": [1]}, "pair": [1, "a"], "colour": "red"}
    assert wrong_arguments(good, parameters) is None
    for change, lesson in (
        ({"rows": {"x": [1, "2"]}}, "'rows.x[1]' must be an integer, not \"2\""),
        ({"pair": [1]}, "'pair' must have 2 items, not 1"),
        ({"pair": [1, 2]}, "'pair[1]' must be a string, not 2"),
        ({"colour": "blue"}, '\'colour\' must be one of ["red"], not "blue"'),
    ):
        assert wrong_arguments(good | change, parameters) == lesson
    assert wrong_arguments([], parameters) == "the arguments are no object"


def _parameters(function: Any) -> dict[str, Any]:
    function.__annotations__ = {
        "rows": dict[str, list[int]],
        "pair": tuple[int, str],
        "colour": Colour,
        "return": type(None),
    }
    return tool_of(function).parameters


def test_an_enum_is_strict_about_types() -> None:
    schema = {"properties": {"x": {"enum": [1, "a"]}}}
    assert wrong_arguments({"x": 1}, schema) is None
    assert wrong_arguments({"x": True}, schema) is not None
    assert wrong_arguments({"x": 1.0}, schema) is not None


def test_a_whole_episode_from_text() -> None:
    texts = iter(
        [
            '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call><tool_call>{</tool_call>',
            "The sum is 4.",
        ]
    )
    environment = ToolEnvironment([add])
    played = asyncio.run(play(environment, lambda messages: parse(next(texts), "hermes").message, "2 + 2?"))
    assert [message["role"] for message in played.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert played.messages[2]["content"] == "4"
    assert played.messages[3]["content"].startswith("Error: malformed JSON")
    assert (played.is_done, played.num_turns, played.reward) == (True, 2, None)
    assert (environment.num_tool_calls, environment.num_tool_errors) == (2, 1)


@pytest.mark.parametrize("name", ["looN{", "look: ", "looku ", "größe", "{" * 128])
def test_vetting_takes_the_reply_to_a_call_of_any_name(name: str) -> None:
    """Tools, a class that quotes the call, and an agent's program that does."""
    asked = {"role": "assistant", "content": "", "tool_calls": [call(name)]}
    sent = [{**one, "function": {**one["function"], "arguments": "{}"}} for one in asked["tool_calls"]]
    quoted = {"role": "tool", "name": name, "content": "no", "tool_call_id": "call_0"}
    for messages in (
        as_step(asyncio.run(ToolEnvironment([add]).step(asked))).messages,
        as_step(Step([quoted])).messages,
        chat_ask({"messages": [{"role": "user", "content": "x"}, {**asked, "tool_calls": sent}, quoted]}).messages,
    ):
        reply = checked_chat(messages)[-1]
        assert reply["role"] == "tool"
        assert reply["content"]


def test_vetting_quotes_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="got:     'f '"):
        checked([{"role": "tool", "name": "f ", "content": "x"}])
