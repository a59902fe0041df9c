"""Tool calls in the text that a model wrote.

    hermes      <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, once for each call (Qwen, Hermes)
    llama3      {"name": "add", "parameters": {"a": 1}} and no other text, also after <|python_tag|> (Llama 3.1, 3.2)
    smollm      <tool_call>[{"name": "add", "arguments": {"a": 1}}, ...]</tool_call> (SmolLM2, SmolLM3)
    json_tags   an object or a list, as in the two above, in the same tags

The text is hostile: each call has a bounded length, there is a bounded number of them, and JSON that Python would read
but others would not (NaN, a name twice, an integer of more than 64 bits, half of a surrogate pair) is malformed. What
is malformed becomes an entry with "error" among the calls, and a tool environment answers it with that sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.plain import wrong_with
from slipstream.environments.protocol import ChatMessage

FORMATS = ("hermes", "llama3", "smollm", "json_tags")
TAGS = ("<tool_call>", "</tool_call>")
MAX_CALLS = 16
MAX_CALL_CHARS = 32_768
MAX_NAME_CHARS = 128
MALFORMED = "malformed"
"""The name of a call whose own name cannot be read."""

_PYTHON_TAG = "<|python_tag|>"
_END_OF_TURN = ("<|eot_id|>", "<|eom_id|>")


@dataclass(frozen=True)
class ParsedTurn:
    """A turn's text without its calls, and the calls in order.

    A call is {"id": "call_0", "type": "function", "function": {"name": ..., "arguments": {...}}}; one that is malformed
    also has "error", a sentence, and no arguments. `errors` lists these sentences.
    """

    content: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def message(self) -> ChatMessage:
        """The turn as the assistant's message, which environments get."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class _Malformed(Exception):
    """The text is no call, for this reason; `name` is the tool that was called, where that can be told."""

    def __init__(self, why: str, name: str = MALFORMED) -> None:
        super().__init__(why)
        self.name = name


def parse(
    text: str,
    format: str,
    *,
    max_calls: int = MAX_CALLS,
    max_chars: int = MAX_CALL_CHARS,
    is_thinking: bool = False,
) -> ParsedTurn:
    """Split a turn's `text` into content and tool calls. Never raises for a text; ConfigError for an unknown format.

    After `max_calls` calls, with malformed ones, the rest of the text is dropped and becomes one error. A call has at
    most `max_chars` characters. Calls in a thought (<think> at the text's beginning, or before it with `is_thinking`)
    are content.
    """
    check_format(format)
    thought, said = _without_thought(text, is_thinking)
    if format == "llama3":
        content, found = _bare(said, max_calls, max_chars)
    else:
        content, found = _tagged(said, format, max_calls, max_chars)
    calls, errors = [], []
    for index, one in enumerate(found):
        entry: dict[str, Any] = {"id": f"call_{index}", "type": "function"}
        if isinstance(one, _Malformed):
            entry |= {"function": {"name": one.name, "arguments": {}}, "error": str(one)}
            errors.append(str(one))
        else:
            entry["function"] = one
        calls.append(entry)
    return ParsedTurn(thought + content, calls, errors)


def check_format(format: str) -> None:
    """Raise ConfigError for a format that there is not."""
    if format not in FORMATS:
        raise ConfigError.unknown(f"unknown format of tool calls '{format}'", format, FORMATS)


def detect_format(template: str) -> str | None:
    """Return the format of calls that a chat template asks for, or None where it is none of those known here.

    It goes by what the template tells the model, so a template without tools has none.
    """
    text = "".join(template.replace('\\"', '"').replace("\\n", "").split())
    if TAGS[0] in text:
        if "<function=" in text or "<arg_key>" in text:  # Qwen3.5, GLM: XML inside of the tags
            return None
        if f"{TAGS[0]}[" in text or "SmolLM" in text:
            return "smollm"
        return "hermes" if '"arguments"' in text else None
    if _PYTHON_TAG in text or ('{"name":' in text and '"parameters":' in text and "<|start_header_id|>" in text):
        return "llama3"
    return None


def _without_thought(text: str, is_thinking: bool) -> tuple[str, str]:
    """Split off the thought at the beginning of a text, with its tags; one without an end is all of the text."""
    if not (is_thinking or text.lstrip().startswith("<think>")):
        return "", text
    thought, tag, said = text.partition("</think>")
    return thought + tag, said


_Found = list["dict[str, Any] | _Malformed"]


def _tagged(text: str, format: str, max_calls: int, max_chars: int) -> tuple[str, _Found]:
    """Return the content around tagged calls, and these. Each tag's text is decoded once, so the time is linear."""
    content, found = [], _Found()
    position = 0
    while (start := text.find(TAGS[0], position)) >= 0:
        content.append(text[position:start])
        position, calls = _tag(text, start + len(TAGS[0]), format, max_chars)
        found += calls
        if len(found) > max_calls or (len(found) == max_calls and TAGS[0] in text[position:]):
            return "".join(content).strip(), [*found[:max_calls], _too_many(max_calls)]
    content.append(text[position:])
    return "".join(content).strip() if found else text, found


def _tag(text: str, start: int, format: str, max_chars: int) -> tuple[int, _Found]:
    """Return where the tag ends whose text begins at `start`, and the calls in it.

    Its JSON may hold the closing tag in a string, so the JSON decides where the tag ends. Where it is malformed, the
    next closing tag does, or the text's end.
    """
    close = TAGS[1]
    after = text.find(close, start)
    try:
        value, length = _decode(text[start : start + max_chars + 1], max_chars)
        end = start + length
        while end < len(text) and text[end].isspace():
            end += 1
        if not text.startswith(close, end):
            raise _Malformed(
                f"the call does not end with {close}" if end == len(text) else f"text between the JSON and {close}"
            )
    except _Malformed as error:
        if after < 0:
            return len(text), [_Malformed(f"the call does not end with {close}")]
        return after + len(close), [error]
    many = isinstance(value, list) and format != "hermes"
    return end + len(close), [_call(one, "arguments") for one in value] if many else [_call(value, "arguments")]


def _bare(text: str, max_calls: int, max_chars: int) -> tuple[str, _Found]:
    """Return the content or the calls of Llama 3: JSON objects and nothing else, several with ';' between them."""
    body = text.strip()
    for mark in _END_OF_TURN:
        body = body.removesuffix(mark).rstrip()
    said, tag, tagged = body.partition(_PYTHON_TAG)
    body, content = (tagged.strip(), said.strip()) if tag else (body, "")
    if not tag and not body.startswith("{"):
        return text, []
    found = _Found()
    try:
        for value in _objects(body, max_chars):
            if not tag and not (isinstance(value, dict) and "name" in value and {"parameters", "arguments"} & {*value}):
                return text, []  # an answer that is JSON
            if len(found) == max_calls:
                return content, [*found, _too_many(max_calls)]
            found.append(_call(value, "parameters"))
    except _Malformed as error:
        if not tag and not _looks_like_call(body):
            return text, []
        found.append(error)
    return content, found


def _objects(body: str, max_chars: int) -> Iterator[Any]:
    position = 0
    while position < len(body):
        value, length = _decode(body[position : position + max_chars + 1], max_chars)
        yield value
        rest = body[position + length :].lstrip()
        if rest and not rest.startswith(";"):
            raise _Malformed("text after the JSON of the call")
        position = len(body) - len(rest.removeprefix(";").lstrip())


def _looks_like_call(body: str) -> bool:
    start = "".join(body[:64].split())
    return start.startswith(('{"name":', '{"type":"function"', '{"function":'))


def _call(value: Any, key: str) -> dict[str, Any] | _Malformed:
    """Return {"name": ..., "arguments": ...} of a decoded call; the arguments may be under the other family's key."""
    if not isinstance(value, dict):
        return _Malformed("a call is a JSON object with a name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _Malformed("the call has no name")
    if len(name) > MAX_NAME_CHARS:
        return _Malformed(f"the name of the call has more than {MAX_NAME_CHARS} characters")
    other = "arguments" if key == "parameters" else "parameters"
    arguments = value.get(key, value.get(other))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return _Malformed(f"'{key}' of the call is no JSON object", name)
    return {"name": name, "arguments": arguments}


def _too_many(max_calls: int) -> _Malformed:
    return _Malformed(f"more than {max_calls} calls in one turn; the others were not made")


def _decode(text: str, max_chars: int) -> tuple[Any, int]:
    """Return the JSON value at the beginning of `text`, after white space, and the characters that it takes."""
    start = len(text) - len(text.lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
    except _Malformed:
        raise
    except (ValueError, RecursionError) as error:
        if len(text) > max_chars:
            raise _Malformed(f"the call has more than {max_chars:,} characters") from error
        raise _Malformed(f"malformed JSON: {_why(error)}") from error
    if end > max_chars:
        raise _Malformed(f"the call has more than {max_chars:,} characters")
    if (wrong := wrong_with(value)) is not None:
        raise _Malformed(f"malformed JSON: {wrong}")
    return value, end


def _why(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep"
    return f"{error.msg}, character {error.pos}" if isinstance(error, json.JSONDecodeError) else "a number is too long"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise _Malformed("malformed JSON: a name stands twice in one object")
    return table


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Malformed("malformed JSON: a number is too large")
    return number


def _no_constant(name: str) -> Any:
    raise _Malformed(f"malformed JSON: {name} is no number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)
