"""Python functions as tools, and the environment that is made of them.

A tool is a function with type hints and a docstring in Google's style, as for `transformers.utils.get_json_schema` and
TRL's `tools=[...]`:

    def add(a: int, b: int) -> int:
        '''Add two integers.

        Args:
            a: The first integer.
            b: The second integer.
        '''
        return a + b

The model sees its schema, and the text that it returns. Nothing that a tool raises, and nothing that the model calls
it with, ends the episode: both come back to the model as "Error: ...".
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.plain import shortened, shown
from slipstream.core.user_code import place_of
from slipstream.environments.protocol import ChatMessage, Environment, Step, called, cut
from slipstream.environments.tool_calls import MALFORMED

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_ARTICLES = {"object": "an object", "array": "an array", "integer": "an integer", "null": "null"}
_EXAMPLE = "def add(a: int, b: int) -> int, with a docstring that has a line for each parameter under 'Args:'"


@dataclass(frozen=True)
class Tool:
    """A function that the model may call by `name`; `schema` is the JSON schema that the chat template shows it."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]

    @property
    def parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.schema["function"]["parameters"]
        return parameters


def tool_of(function: Callable[..., Any] | Tool) -> Tool:
    """Return a function, or an object's method, as a tool.

    ConfigError unless it has a name, a docstring, and a type hint and a description for each parameter.
    """
    if isinstance(function, Tool):
        return function
    name = _checked_name(function)
    _check_parameters(function, name)
    schema = _schema_of(function, name)
    declared = schema["function"]["parameters"]["properties"]
    if (unknown := declared.keys() - inspect.signature(function).parameters.keys()) != set():
        raise _refused(function, name, f"is a method whose first parameter is '{min(unknown)}', not self")
    for parameter, one in declared.items():
        if (strange := _strange_type(one)) is not None:
            raise _refused(function, name, f"has the parameter '{parameter}' of type {strange}: a model writes JSON")
    return Tool(name, function, schema)


def _checked_name(function: Any) -> str:
    if not callable(function):
        raise ConfigError(f"a tool is a function, not {_brief(function)}", allowed=_EXAMPLE)
    if not inspect.isroutine(function):
        hint = "wrap it in a function; a class whose methods are tools is environment_factory= of slipstream.run"
        raise ConfigError(f"a tool is a function, and {_brief(function)} is none", allowed=_EXAMPLE, hint=hint)
    if function.__name__ == "<lambda>":
        raise _refused(function, "a lambda", "has no name for the model to call it by")
    return str(function.__name__)


def _check_parameters(function: Callable[..., Any], name: str) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise _refused(function, name, "shows no parameters: it is not written in Python") from error
    for parameter in parameters:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            shown_name = str(parameter.replace(annotation=parameter.empty))
            raise _refused(function, name, f"takes '{shown_name}', and the model calls it with named arguments")
    first = parameters[0] if parameters else None
    if first is not None and first.name in ("self", "cls") and first.annotation is first.empty:
        raise _refused(function, name, "is a method of a class and not of an object, so it has no self")


def _schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except DocstringParsingException as error:
        has_any = bool(inspect.getdoc(function))
        why = "has no docstring" if not has_any else f"has a docstring without a parameter: {_last_sentence(error)}"
        raise _refused(function, name, why) from error
    except (TypeHintParsingException, NameError, TypeError, ValueError) as error:
        raise _refused(function, name, f"has type hints that give no schema: {_last_sentence(error)}") from error
    return schema


def _last_sentence(error: Exception) -> str:
    return shortened(" ".join(str(error).split()), 160)


def _strange_type(schema: Mapping[str, Any]) -> str | None:
    """Return a type of `schema` that JSON does not have (images, tensors), or None."""
    kind = schema.get("type", ())
    strange = [one for one in ([kind] if isinstance(kind, str) else kind) if one not in _TYPES]
    parts = [*schema.get("anyOf", ()), *schema.get("prefixItems", ())]
    parts += [schema[key] for key in ("items", "additionalProperties") if key in schema]
    return strange[0] if strange else next((one for one in map(_strange_type, parts) if one is not None), None)


def _refused(function: Callable[..., Any], name: str, why: str) -> ConfigError:
    place = place_of(function)
    return ConfigError(f"tool '{name}' {why}", got=place, allowed=_EXAMPLE)


def wrong_arguments(arguments: Any, parameters: Mapping[str, Any]) -> str | None:
    """Return in words what `arguments` have that the schema `parameters` does not allow, or None.

    Knows the schemas that `get_json_schema` makes. An integer is a number; a float is no integer; true and false are
    neither. Parameters that the schema does not name are wrong.
    """
    if not isinstance(arguments, dict):
        return "the arguments are no object"
    properties = parameters.get("properties", {})
    for name in arguments:
        if name not in properties:
            near = did_you_mean(name, properties) or f"there are: {', '.join(properties) or 'none'}"
            return f"there is no parameter '{shortened(name, 40)}'; {near}"
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"the parameter '{name}' is missing"
    wrong = (_wrong_value(value, properties[name], name) for name, value in arguments.items())
    return next((one for one in wrong if one is not None), None)


def _wrong_value(value: Any, schema: Mapping[str, Any], path: str) -> str | None:
    if value is None and schema.get("nullable", False):
        return None
    if "anyOf" in schema:
        found = [_wrong_value(value, one, path) for one in schema["anyOf"]]
        return None if None in found else f"'{path}' fits none of its types: {found[0]}"
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds is not None and not any(_is_of(value, kind) for kind in kinds):
        wanted = " or ".join(_ARTICLES.get(kind, f"a {kind}") for kind in kinds)
        return f"'{path}' must be {wanted}, not {_brief_json(value)}"
    if "enum" in schema and not any(type(value) is type(one) and value == one for one in schema["enum"]):
        return f"'{path}' must be one of {_brief_json(schema['enum'])}, not {_brief_json(value)}"
    if isinstance(value, list):
        return _wrong_items(value, schema, path)
    if isinstance(value, dict) and "additionalProperties" in schema:
        inner = (_wrong_value(one, schema["additionalProperties"], f"{path}.{key}") for key, one in value.items())
        return next((one for one in inner if one is not None), None)
    return None


def _wrong_items(values: list[Any], schema: Mapping[str, Any], path: str) -> str | None:
    if "prefixItems" in schema:
        schemas = schema["prefixItems"]
        if len(values) != len(schemas):
            return f"'{path}' must have {len(schemas)} items, not {len(values)}"
    else:
        schemas = [schema.get("items", {})] * len(values)
    pairs = enumerate(zip(values, schemas, strict=True))
    inner = (_wrong_value(value, one, f"{path}[{index}]") for index, (value, one) in pairs)
    return next((one for one in inner if one is not None), None)


def _is_of(value: Any, kind: str) -> bool:
    is_bool = isinstance(value, bool)
    return is_bool if kind == "boolean" else not is_bool and isinstance(value, _TYPES[kind])


def _brief_json(value: Any) -> str:
    return shortened(json.dumps(value, ensure_ascii=False), 60)


def _brief(value: Any) -> str:
    return f"{shortened(shown(value), 60)} ({type(value).__name__})"


def text_of(result: Any) -> str:
    """Return a tool's result as the model reads it: a string as it is, all else as JSON, or as `str` has it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no strings, a circle, nesting
        return str(result)


def error_text(why: str | BaseException) -> str:
    """Return what the model reads in place of a result: a sentence, or the type and message of what a tool raised."""
    if isinstance(why, str):
        return f"Error: {why}"
    text = message_of(why)
    return f"Error: {type(why).__name__}: {text}" if text else f"Error: {type(why).__name__}"


def message_of(error: BaseException) -> str:
    """Return an error's message, whatever its own `str` does."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an object of the tool's
        return ""


class ToolEnvironment(Environment):
    """An environment made of tools: it runs the calls of a turn, in order, and answers each with a message.

    The episode is done with the first turn that calls none. `num_tool_calls` and `num_tool_errors` count those of the
    episode. It gives no reward of its own. Functions hold no state of an episode, as in TRL: an object that does is
    `trl.FactoryEnvironment`, or an `Environment`.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | Tool],
        *,
        max_chars: int | None = None,
        result: Callable[[Any], str] = text_of,
        error: Callable[[str | BaseException], str] = error_text,
    ) -> None:
        """Make the environment; `result` and `error` write what the model reads.

        `max_chars` limits each answer, beside the limit on messages (`environment.max_observation_chars`).

        ConfigError for two tools of one name, and for functions that are no tools (`tool_of`).
        """
        self.tools = by_name(tools)
        self.num_tool_calls = 0
        self.num_tool_errors = 0
        self._max_chars, self._result, self._error = max_chars, result, error

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    def reset(self, **columns: Any) -> Any:  # noqa: ARG002 - tools know nothing of the row
        self.num_tool_calls = self.num_tool_errors = 0
        return None

    async def step(self, message: ChatMessage) -> Step:
        calls = message.get("tool_calls") or []
        return Step([await self.answer(call) for call in calls], done=not calls)

    async def answer(self, call: Mapping[str, Any]) -> ChatMessage:
        """Run one call; return the message that answers it. Raises nothing that a tool raises."""
        self.num_tool_calls += 1
        function = call.get("function", {})
        name = function.get("name", MALFORMED)
        why: str | BaseException | None = self._wrong_call(call)
        text = ""
        if why is None:
            try:
                text = self._result(await called(self.tools[name].function, **function["arguments"]))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a tool raises is the model's to read
                # A coroutine, in which the tool was called, cannot raise StopIteration.
                is_stop = isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration)
                why = error.__cause__ if is_stop else error
        if why is not None:
            self.num_tool_errors += 1
            text = self._error(why)
        content = text if self._max_chars is None else cut(text, self._max_chars)
        answer = {"role": "tool", "name": name, "content": content}
        return answer | ({"tool_call_id": call["id"]} if "id" in call else {})

    def _wrong_call(self, call: Mapping[str, Any]) -> str | None:
        """Return in words why a call cannot be made, or None."""
        if "error" in call:
            return str(call["error"])
        function = call.get("function", {})
        name = function.get("name")
        if name not in self.tools:
            near = did_you_mean(str(name), self.tools) or f"there are: {', '.join(self.tools)}"
            return f"there is no tool '{name}'; {near}"
        return wrong_arguments(function.get("arguments"), self.tools[name].parameters)


class FunctionTools(ToolEnvironment):
    """The environment of functions alone: there is no state of an episode, so that it can be restored."""

    def state(self) -> None:
        return None

    def restore(self, state: None, **columns: Any) -> None:
        """Go on with the next turn."""


def by_name(tools: Sequence[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Return tools by their names. ConfigError where there is none, or where two have one name."""
    made = [tool_of(one) for one in tools]
    if not made:
        raise ConfigError("an environment of tools has no tool", allowed="one function or more")
    found: dict[str, Tool] = {}
    for tool in made:
        if tool.name in found:
            places = (place_of(found[tool.name].function), place_of(tool.function))
            raise ConfigError(f"two tools have the name '{tool.name}'", got=" and ".join(map(str, places)))
        found[tool.name] = tool
    return found
