"""OpenAI's forms of requests, without HTTP: bodies become asks; and its two pages, with both ways.

A body is a client's, and hostile: each field is checked, what would change the turn and cannot be had is refused with
a sentence, and fields that nobody here knows are ignored. Those of sampling are wishes: a run does without them, a
served model refuses what it cannot meet. `openai_replies.py` has the way back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.core.plain import MAX_INT64, shortened, shown, wrong_with
from slipstream.environments.asks import MAX_TOOLS, Ask, Refused, SamplingWishes, TurnReply
from slipstream.environments.openai_replies import (
    Json,
    ResponseForm,
    Stamp,
    chat_chunks,
    chat_completion,
    chat_piece,
    text_chunks,
    text_completion,
    text_piece,
)
from slipstream.environments.protocol import ChatMessage, cut, named_plainly

Body = Mapping[str, Any]

MAX_MESSAGES = 4_096
MAX_STOPS, MAX_STOP_CHARS = 16, 4096
MAX_NAME_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_TOKEN_ID = 2**31 - 1
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
UNMET: dict[str, Any] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "min_new_tokens", "ignore_eos"), 0),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), 0),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "grammar", "bad_words", "allowed_token_ids"), 0),
    **dict.fromkeys(("stop_token_ids", "use_beam_search", "no_repeat_ngram_size", "thinking_token_budget"), 0),
    **dict.fromkeys(("chat_template", "documents", "continue_final_message"), 0),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), 1),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), True),
    "truncate_prompt_tokens": -1,
    **dict.fromkeys(("reasoning_effort", "verbosity"), "medium"),
}
"""Fields of OpenAI's, vLLM's and others' that would change the turn and that no sampler here has, by the value that
changes nothing; 0 stands for all that is empty."""


def chat_ask(body: Body) -> Ask:
    """Return the ask of a chat. Raises Refused."""
    _refuse_what_changes_the_turn(body)
    tools = _tools(body)
    return Ask(messages=_messages(body), tools=tools, wishes=_wishes(body))


def completions_ask(body: Body) -> Ask:
    """Return the ask of a text, or of the ids of a whole context. Raises Refused."""
    _refuse_what_changes_the_turn(body)
    if body.get("echo"):
        raise Refused("'echo' is not supported: the prompt is not part of the answer")
    if body.get("suffix"):
        raise Refused("'suffix' is not supported: a text is continued at its end alone")
    if body.get("best_of") not in (None, 1):
        raise Refused("'best_of' is 1: a request gets one completion")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Ask(text=_whole(prompt), wishes=_wishes(body))
    return Ask(tokens=_token_ids(prompt), wishes=_wishes(body))


def _token_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, list) or not prompt:
        raise Refused(f"'prompt' is a text, or a list of token ids, not {_brief(prompt)}")
    if all(isinstance(one, str | list) for one in prompt):
        raise Refused("a request has one prompt: send a request for each")
    for token in prompt:
        if not _is_integer(token) or not 0 <= token <= MAX_TOKEN_ID:
            raise Refused(f"a token id is an integer of at least 0, not {_brief(token)}")
    return list(prompt)


def _refuse_what_changes_the_turn(body: Body) -> None:
    """Refuse fields by which another turn is meant than there can be. None is as good as absent."""
    if body.get("n") not in (None, 1):
        raise Refused("'n' is 1: a request gets one completion; send more requests for more")
    if body.get("chat_template_kwargs"):
        raise Refused("'chat_template_kwargs' are those of the run, or of `slipstream serve --chat-template-kwargs`")
    if body.get("logit_bias"):
        raise Refused("'logit_bias' is not supported")
    for name in ("functions", "audio"):
        if body.get(name) is not None:
            raise Refused(f"'{name}' is not supported" + ("; use 'tools'" if name == "functions" else ""))
    if body.get("modalities") not in (None, ["text"]):
        raise Refused("'modalities' is [\"text\"]: there is text alone")
    if body.get("function_call") not in (None, "auto", "none"):
        raise Refused("'function_call' is not supported; use 'tools'")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, Mapping) or form.get("type") != "text"):
        raise Refused('\'response_format\' is {"type": "text"}: no grammar constrains a turn')


def _wishes(body: Body) -> SamplingWishes:
    limit = _integer(body, "max_completion_tokens", 1, MAX_INT64)
    deprecated = _integer(body, "max_tokens", 1, MAX_INT64)
    top_k = _integer(body, "top_k", -1, MAX_INT64)
    return SamplingWishes(
        max_tokens=deprecated if limit is None else limit,
        temperature=_number(body, "temperature", 0, 2),
        top_p=_number(body, "top_p", 0, 1),
        top_k=None if top_k is None else max(0, top_k),
        min_p=_number(body, "min_p", 0, 1),
        seed=_integer(body, "seed", -MAX_INT64 - 1, MAX_INT64),
        stop=_stops(body.get("stop")),
        unmet=tuple(_unmet(body)),
    )


def _unmet(body: Body) -> Iterator[str]:
    for name, neutral in UNMET.items():
        value = body.get(name)
        if value is not None and (value != neutral if neutral else value):
            yield name
    if body.get("parallel_tool_calls") is False and body.get("tools"):
        yield "parallel_tool_calls"
    if body.get("include_stop_str_in_output") and body.get("stop"):
        yield "include_stop_str_in_output"


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(one, str) and one for one in stops):
        raise Refused(f"'stop' is a text, or a list of at most {MAX_STOPS} texts, none of them empty")
    if max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise Refused(f"a text of 'stop' has at most {MAX_STOP_CHARS:,} characters")
    return tuple(_whole(one) for one in stops)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(body: Body, name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not _is_integer(value) or not low <= value <= high:
        most = f"to {high}" if high < MAX_INT64 else "on"
        raise Refused(f"'{name}' is an integer from {low} {most}, not {_brief(value)}")
    return int(value)


def _number(body: Body, name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not (_is_integer(value) or isinstance(value, float)) or not low <= value <= high:
        raise Refused(f"'{name}' is a number from {low} to {high}, not {_brief(value)}")
    return float(value)


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"'{name}' is true or false, not {_brief(value)}")
    return bool(value)


def _tools(body: Body) -> list[Json]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise Refused('\'tool_choice\' is "auto" or "none": no call is forced')
    if tools is None:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise Refused(f"'tools' is a list of at most {MAX_TOOLS} tools")
    found = [_tool(tool) for tool in tools]
    return [] if choice == "none" else found


def _tool(tool: Any) -> Json:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type") != "function":
        raise Refused('a tool is {"type": "function", "function": {"name": ...}}')
    found: Json = {"name": _name(function.get("name"), "the name of a tool")}
    for field, kind in (("description", str), ("parameters", dict)):
        if (value := function.get(field)) is None:
            continue
        if not isinstance(value, kind):
            raise Refused(f"'{field}' of the tool '{found['name']}' is {'a text' if kind is str else 'a JSON schema'}")
        if (wrong := _wrong(value)) is not None:
            raise Refused(f"'{field}' of the tool '{found['name']}' has {wrong}")
        found[field] = value
    return {"type": "function", "function": found}


def _messages(body: Body) -> list[ChatMessage]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise Refused(f"'messages' is a list of 1 to {MAX_MESSAGES:,} messages")
    return [_message(message) for message in messages]


def _message(value: Any) -> ChatMessage:
    """Return a message with the fields that matter, of exact types."""
    if not isinstance(value, Mapping):
        raise Refused(f'a message is {{"role": ..., "content": ...}}, not {_brief(value)}')
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise Refused(f"the role of a message is {', '.join(ROLES)}, not {_brief(role)}")
    if value.get("function_call") is not None:
        raise Refused("'function_call' of a message is not supported; use 'tool_calls'")
    calls = _calls(value.get("tool_calls")) if role == "assistant" else []
    message: ChatMessage = {"role": ROLES[role], "content": _content(value.get("content"), role, bool(calls))}
    if calls:
        message["tool_calls"] = calls
    if value.get("name") is not None:
        message["name"] = _name(value["name"], "'name' of a message")
    if role == "tool":
        message["tool_call_id"] = _name(value.get("tool_call_id"), "'tool_call_id' of a tool's message")
    return named_plainly(message)


def _content(value: Any, role: str, has_calls: bool) -> str:
    if isinstance(value, str):
        return _whole(value)
    if value is None and has_calls:
        return ""
    if not isinstance(value, list):
        raise Refused(f"the content of a message of role '{role}' is a text, or a list of texts, not {_brief(value)}")
    return _whole("".join(_part(part) for part in value))


def _part(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = _brief(part.get("type") if isinstance(part, Mapping) else part)
    raise Refused(f'a part of a content is {{"type": "text", "text": ...}}: there is text alone, and no {kind}')


def _calls(value: Any) -> list[Json]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise Refused(f"'tool_calls' of a message is a list of at most {MAX_TOOLS} calls")
    return [_call(call) for call in value]


def _call(call: Any) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise Refused('a call is {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}')
    name = _name(function.get("name"), "the name of a call")
    known = {"name": name, "arguments": _arguments(function.get("arguments"))}
    return {"id": _name(call.get("id"), "the id of a call"), "type": "function", "function": known}


def _arguments(value: Any) -> Json | str:
    """Return a call's arguments as a dict, or as the text that they are where this is no JSON object."""
    if isinstance(value, dict) and _wrong(value) is None:  # not OpenAI's form, but some clients'
        return value
    if not isinstance(value, str):
        raise Refused(f"'arguments' of a call are a text, which is a JSON object, not {_brief(value)}")
    try:
        found = json.loads(value, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return _whole(value)
    return found if isinstance(found, dict) and _wrong(found) is None else _whole(value)


def no_constant(name: str) -> Any:
    """Refuse NaN and the infinities, which Python's JSON reads."""
    raise ValueError(f"{name} is no number in JSON")


def _wrong(value: Any) -> str | None:
    """Return in words why not all can write `value`, or None. Python reads 1e999 as inf, which is no JSON."""
    if (wrong := wrong_with(value)) is not None:
        return wrong
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return "a number that is too large"
    return None


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise Refused(f"{what} is a text of 1 to {MAX_NAME_CHARS} characters, not {_brief(value)}")
    return _whole(value)


def _whole(text: str) -> str:
    """Return `text` as UTF-8 can write it: clients cut texts in the middle of a surrogate pair."""
    return cut(text, len(text))


def _brief(value: Any) -> str:
    return cut(shortened(shown(value), 80), 200)


def response_form(body: Body) -> ResponseForm:
    """Return the form of the response that a body asks for. Raises Refused."""
    options = body.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        raise Refused("'stream_options' is an object")
    _integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    logprobs = body.get("logprobs")
    if not isinstance(logprobs, bool):
        logprobs = _integer(body, "logprobs", 0, MAX_TOP_LOGPROBS) is not None
    return ResponseForm(
        is_stream=_flag(body, "stream"),
        has_usage=_flag(options or {}, "include_usage"),
        has_logprobs=logprobs,
        has_token_ids=_flag(body, "return_token_ids"),
    )


@dataclass(frozen=True)
class Dialect:
    """One of OpenAI's two pages for turns: how its bodies are read, and its responses written.

    A stream is a `piece` for each text that is told of a turn, then the `chunks` of the rest.
    """

    prefix: str
    ask: Callable[[Body], Ask]
    whole: Callable[[TurnReply, ResponseForm, Stamp], Json]
    chunks: Callable[[TurnReply, ResponseForm, Stamp, int], Iterator[Json]]
    piece: Callable[[str, ResponseForm, Stamp, int], Iterator[Json]]


CHAT = Dialect("chatcmpl", chat_ask, chat_completion, chat_chunks, chat_piece)
TEXT = Dialect("cmpl", completions_ask, text_completion, text_chunks, text_piece)
