"""OpenAI's forms of requests and responses, without HTTP: bodies become asks, replies become bodies.

A body is a client's, and hostile: each field is checked, what would change the turn and cannot be had is refused with
a sentence, and fields that nobody here knows are ignored. Responses have OpenAI's form to the letter, and on request
("return_token_ids": true) the exact ids, their logprobs and versions beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.core.plain import MAX_INT64, shortened, shown, wrong_with
from slipstream.environments.asks import Ask, Refused, Reply, SamplingWishes
from slipstream.environments.protocol import ChatMessage, cut

Body = Mapping[str, Any]
Json = dict[str, Any]

MAX_MESSAGES = 4_096
MAX_TOOLS = 128
MAX_CALLS = 128
MAX_STOPS = 16
MAX_NAME_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_TOKEN_ID = 2**31 - 1
LEAST_LOGPROB = -9_999.0
"""OpenAI's number for a token that is all but impossible; JSON has no -inf."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


# From a body to an ask


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
    wrong = next((one for one in prompt if not _is_integer(one) or not 0 <= one <= MAX_TOKEN_ID), None)
    if wrong is not None or None in prompt:
        raise Refused(f"a token id is an integer of at least 0, not {_brief(wrong)}")
    return list(prompt)


def _refuse_what_changes_the_turn(body: Body) -> None:
    """Refuse fields by which another turn is meant than there can be. None is as good as absent."""
    if body.get("n") not in (None, 1):
        raise Refused("'n' is 1: a request gets one completion; send more requests for more")
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
        raise Refused("'response_format' is {\"type\": \"text\"}: no grammar constrains a turn")


def _wishes(body: Body) -> SamplingWishes:
    limit = _integer(body, "max_completion_tokens", 1, MAX_INT64)
    shorter = _integer(body, "max_tokens", 1, MAX_INT64)
    return SamplingWishes(
        max_tokens=shorter if limit is None else limit,
        temperature=_number(body, "temperature", 0, 2),
        top_p=_number(body, "top_p", 0, 1),
        top_k=_integer(body, "top_k", -1, MAX_INT64),
        min_p=_number(body, "min_p", 0, 1),
        seed=_integer(body, "seed", -MAX_INT64 - 1, MAX_INT64),
        stop=_stops(body.get("stop")),
    )


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(one, str) and one for one in stops):
        raise Refused(f"'stop' is a text, or a list of at most {MAX_STOPS} texts, none of them empty")
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
        raise Refused("'tool_choice' is \"auto\" or \"none\": no call is forced")
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
        if (wrong := wrong_with(value)) is not None:
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
    return message


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
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise Refused(f"'tool_calls' of a message is a list of at most {MAX_CALLS} calls")
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
    if isinstance(value, Mapping) and wrong_with(value) is None:  # not OpenAI's form, but some clients'
        return dict(value)
    if not isinstance(value, str):
        raise Refused(f"'arguments' of a call are a text, which is a JSON object, not {_brief(value)}")
    try:
        found = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _whole(value)
    is_plain = isinstance(found, dict) and wrong_with(found) is None and _is_finite(found)
    return found if is_plain else _whole(value)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def _is_finite(value: Any) -> bool:
    """Return whether JSON can write all numbers: Python reads 1e999 as inf."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise Refused(f"{what} is a text of 1 to {MAX_NAME_CHARS} characters, not {_brief(value)}")
    return _whole(value)


def _whole(text: str) -> str:
    """Return `text` as UTF-8 can write it: clients cut texts in the middle of a surrogate pair."""
    return cut(text, len(text))


def _brief(value: Any) -> str:
    return cut(shortened(shown(value), 80), 200)


# From a reply to a body


@dataclass(frozen=True)
class ResponseForm:
    """How a client would like its response."""

    is_stream: bool = False
    has_usage: bool = False
    has_logprobs: bool = False
    has_token_ids: bool = False


@dataclass(frozen=True)
class Stamp:
    """What all chunks of a response share: `created` in seconds since 1970."""

    id: str
    created: int
    model: str


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


def chat_completion(reply: Reply, form: ResponseForm, stamp: Stamp) -> Json:
    """Return the response to a chat."""
    choice = {
        "index": 0,
        "message": chat_message(reply.message),
        "logprobs": _chat_logprobs(reply) if form.has_logprobs else None,
        "finish_reason": _finish_reason(reply),
    }
    return _response("chat.completion", reply, form, stamp, choice)


def text_completion(reply: Reply, form: ResponseForm, stamp: Stamp) -> Json:
    """Return the response to a text, or to ids."""
    choice = {
        "index": 0,
        "text": reply.message["content"],
        "logprobs": _text_logprobs(reply) if form.has_logprobs else None,
        "finish_reason": _end(reply),
    }
    return _response("text_completion", reply, form, stamp, choice)


def _response(kind: str, reply: Reply, form: ResponseForm, stamp: Stamp, choice: Json) -> Json:
    return {
        **_head(kind, stamp),
        "choices": [choice | _exact_turn(reply, form)],
        "usage": _usage(reply),
        **_exact_prompt(reply, form),
    }


def chat_chunks(reply: Reply, form: ResponseForm, stamp: Stamp) -> Iterator[Json]:
    """Return the chunks of the streamed response to a chat. A turn is there as a whole, so its text is one of them."""
    message, calls = chat_message(reply.message), []
    for index, call in enumerate(message.get("tool_calls", ())):
        calls.append({"index": index, **call})
    deltas: list[tuple[Json, Json | None]] = [({"role": "assistant", "content": ""}, None)]
    if message["content"] or form.has_logprobs:
        logprobs = _chat_logprobs(reply) if form.has_logprobs else None
        deltas.append(({"content": message["content"] or ""}, logprobs))
    if calls:
        deltas.append(({"tool_calls": calls}, None))
    choices = [{"delta": delta, "logprobs": logprobs, "finish_reason": None} for delta, logprobs in deltas]
    choices.append({"delta": {}, "logprobs": None, "finish_reason": _finish_reason(reply)})
    return _chunks("chat.completion.chunk", choices, reply, form, stamp)


def text_chunks(reply: Reply, form: ResponseForm, stamp: Stamp) -> Iterator[Json]:
    """Return the chunks of the streamed response to a text, or to ids."""
    logprobs = _text_logprobs(reply) if form.has_logprobs else None
    choices = [
        {"text": reply.message["content"], "logprobs": logprobs, "finish_reason": None},
        {"text": "", "logprobs": None, "finish_reason": _end(reply)},
    ]
    return _chunks("text_completion", choices, reply, form, stamp)


def _chunks(kind: str, choices: list[Json], reply: Reply, form: ResponseForm, stamp: Stamp) -> Iterator[Json]:
    """Return a chunk for each choice and one for the usage; the exact turn is in the last one with a choice."""
    no_usage = {"usage": None} if form.has_usage else {}
    for position, choice in enumerate(choices):
        chunk = {**_head(kind, stamp), "choices": [{"index": 0, **choice}], **no_usage}
        if position == len(choices) - 1:
            chunk["choices"][0] |= _exact_turn(reply, form)
            chunk |= _exact_prompt(reply, form)
        yield chunk
    if form.has_usage:
        yield {**_head(kind, stamp), "choices": [], "usage": _usage(reply)}


def _head(kind: str, stamp: Stamp) -> Json:
    return {"id": stamp.id, "object": kind, "created": stamp.created, "model": stamp.model}


def _usage(reply: Reply) -> Json:
    num_prompt, num_turn = reply.num_prompt_tokens, len(reply.tokens)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_turn, "total_tokens": num_prompt + num_turn}


def _exact_prompt(reply: Reply, form: ResponseForm) -> Json:
    return {"prompt_token_ids": reply.prompt_tokens} if form.has_token_ids else {}


def _exact_turn(reply: Reply, form: ResponseForm) -> Json:
    if not form.has_token_ids:
        return {}
    versions = [list(one) for one in reply.versions]
    return {"token_ids": reply.tokens, "token_logprobs": _finite(reply.logprobs), "versions": versions}


def _end(reply: Reply) -> str:
    """Return why the text ends: OpenAI has no word for a deadline, and "length" says too that it was cut."""
    return "stop" if reply.finish_reason == "stop" else "length"


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.get("tool_calls") and _end(reply) == "stop" else _end(reply)


def chat_message(message: ChatMessage) -> Json:
    """Return a turn's message in OpenAI's form: `arguments` is a JSON text, and an empty content beside calls null.

    A malformed call stays a call, since content would hide from the client that the policy meant to call. Its arguments
    are the sentence about it, which is no JSON: a client that reads it as arguments fails, or tells the policy, as for
    OpenAI's models, whose arguments may be no JSON either. It must not find {} there, and call with nothing.
    """
    found: Json = {"role": "assistant", "content": message["content"], "refusal": None}
    if calls := message.get("tool_calls"):
        found["content"] = message["content"] or None
        found["tool_calls"] = [_sent_call(call) for call in calls]
    return found


def as_returned(message: ChatMessage) -> ChatMessage:
    """Return a turn's message as an ask will have it, when a client sends it back unchanged."""
    return _message(chat_message(message))


def _sent_call(call: Mapping[str, Any]) -> Json:
    arguments = call["error"] if "error" in call else call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": text}}


def _finite(logprobs: list[float]) -> list[float]:
    return [max(logprob, LEAST_LOGPROB) for logprob in logprobs]


def _pieces(reply: Reply) -> list[str]:
    """Return the texts of the turn's ids; where the endpoint gave none, their numbers."""
    return reply.pieces or [f"token_id:{token}" for token in reply.tokens]


def _chat_logprobs(reply: Reply) -> Json:
    """Return the logprobs of the sampled ids; those of others are not known."""
    content = [
        {"token": piece, "logprob": logprob, "bytes": _bytes(piece) if reply.pieces else None, "top_logprobs": []}
        for piece, logprob in zip(_pieces(reply), _finite(reply.logprobs), strict=True)
    ]
    return {"content": content, "refusal": None}


def _bytes(piece: str) -> list[int] | None:
    """Return the bytes of an id's text; None for a part of a character."""
    return None if "\ufffd" in piece else list(piece.encode(errors="replace"))


def _text_logprobs(reply: Reply) -> Json:
    pieces, logprobs = _pieces(reply), _finite(reply.logprobs)
    offsets = [0]
    for piece in pieces[:-1]:
        offsets.append(offsets[-1] + len(piece))
    top = [{piece: logprob} for piece, logprob in zip(pieces, logprobs, strict=True)]
    return {
        "tokens": pieces,
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": offsets[: len(pieces)],
    }


# What else a gateway says


def model_entry(model: str) -> Json:
    """Return a model's entry in the list of models."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "slipstream"}


def error_body(sentence: str, status: int, code: str) -> Json:
    """Return an error in OpenAI's form."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return {"error": {"message": sentence, "type": kind, "param": None, "code": code}}


@dataclass(frozen=True)
class Dialect:
    """One of OpenAI's two pages for turns: how its bodies are read, and its responses written."""

    prefix: str
    ask: Callable[[Body], Ask]
    whole: Callable[[Reply, ResponseForm, Stamp], Json]
    chunks: Callable[[Reply, ResponseForm, Stamp], Iterator[Json]]


CHAT = Dialect("chatcmpl", chat_ask, chat_completion, chat_chunks)
TEXT = Dialect("cmpl", completions_ask, text_completion, text_chunks)
