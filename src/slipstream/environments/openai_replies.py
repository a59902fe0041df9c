"""Responses in OpenAI's form to the letter, whole and as chunks of a stream, from replies.

On request ("return_token_ids": true) the exact ids, their logprobs and the versions that sampled them stand beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.environments.asks import TurnReply
from slipstream.environments.protocol import ChatMessage

Json = dict[str, Any]

LEAST_LOGPROB = -9_999.0
"""OpenAI's number for a token that is all but impossible; JSON has no -inf."""


@dataclass(frozen=True)
class ResponseForm:
    """How a client would like its response."""

    is_stream: bool = False
    has_usage: bool = False
    has_logprobs: bool = False
    has_token_ids: bool = False


@dataclass(frozen=True)
class Stamp:
    """The fields that all chunks of a response share: `created` in seconds since 1970."""

    id: str
    created: int
    model: str


def chat_completion(reply: TurnReply, form: ResponseForm, stamp: Stamp) -> Json:
    """Return the response to a chat."""
    choice: Json = {
        "index": 0,
        "message": chat_message(reply.message),
        "logprobs": _chat_logprobs(reply) if form.has_logprobs else None,
        "finish_reason": _finish_reason(reply),
    }
    return _response("chat.completion", reply, form, stamp, choice)


def text_completion(reply: TurnReply, form: ResponseForm, stamp: Stamp) -> Json:
    """Return the response to a text, or to ids."""
    choice: Json = {
        "index": 0,
        "text": reply.message["content"],
        "logprobs": _text_logprobs(reply) if form.has_logprobs else None,
        "finish_reason": _end(reply),
    }
    return _response("text_completion", reply, form, stamp, choice)


def _response(kind: str, reply: TurnReply, form: ResponseForm, stamp: Stamp, choice: Json) -> Json:
    return {
        **_head(kind, stamp),
        "choices": [choice | _exact_turn(reply, form)],
        "usage": _usage(reply),
        **_exact_prompt(reply, form),
    }


def chat_chunks(reply: TurnReply, form: ResponseForm, stamp: Stamp, num_told: int = 0) -> Iterator[Json]:
    """Return the chunks of the streamed response to a chat, without `num_told` characters of its text, already told."""
    message, calls = chat_message(reply.message), []
    content = (message["content"] or "")[num_told:]
    for index, call in enumerate(message.get("tool_calls", ())):
        calls.append({"index": index, **call})
    deltas: list[tuple[Json, Json | None]] = [] if num_told else [({"role": "assistant", "content": ""}, None)]
    if content or form.has_logprobs:
        logprobs = _chat_logprobs(reply) if form.has_logprobs else None
        deltas.append(({"content": content}, logprobs))
    if calls:
        deltas.append(({"tool_calls": calls}, None))
    choices: list[Json] = [{"delta": delta, "logprobs": logprobs, "finish_reason": None} for delta, logprobs in deltas]
    choices.append({"delta": {}, "logprobs": None, "finish_reason": _finish_reason(reply)})
    return _chunks("chat.completion.chunk", choices, reply, form, stamp)


def text_chunks(reply: TurnReply, form: ResponseForm, stamp: Stamp, num_told: int = 0) -> Iterator[Json]:
    """Return the chunks of the streamed response to a text, or to ids; `num_told` as above."""
    logprobs = _text_logprobs(reply) if form.has_logprobs else None
    choices: list[Json] = [
        {"text": reply.message["content"][num_told:], "logprobs": logprobs, "finish_reason": None},
        {"text": "", "logprobs": None, "finish_reason": _end(reply)},
    ]
    return _chunks("text_completion", choices, reply, form, stamp)


def _chunks(kind: str, choices: list[Json], reply: TurnReply, form: ResponseForm, stamp: Stamp) -> Iterator[Json]:
    """Return a chunk for each choice and one for the usage; the exact turn is in the last one with a choice."""
    for position, choice in enumerate(choices):
        chunk = _chunk(kind, choice, form, stamp)
        if position == len(choices) - 1:
            chunk["choices"][0] |= _exact_turn(reply, form)
            chunk |= _exact_prompt(reply, form)
        yield chunk
    if form.has_usage:
        yield {**_head(kind, stamp), "choices": [], "usage": _usage(reply)}


def chat_piece(text: str, form: ResponseForm, stamp: Stamp, num_told: int) -> Iterator[Json]:
    """Return the chunks of a piece of a chat's text, behind `num_told` characters of it."""
    for delta in [{"content": text}] if num_told else [{"role": "assistant", "content": ""}, {"content": text}]:
        choice = {"delta": delta, "logprobs": None, "finish_reason": None}
        yield _chunk("chat.completion.chunk", choice, form, stamp)


def text_piece(text: str, form: ResponseForm, stamp: Stamp, num_told: int) -> Iterator[Json]:  # noqa: ARG001
    """Return the chunk of a piece of a text."""
    yield _chunk("text_completion", {"text": text, "logprobs": None, "finish_reason": None}, form, stamp)


def _chunk(kind: str, choice: Json, form: ResponseForm, stamp: Stamp) -> Json:
    no_usage = {"usage": None} if form.has_usage else {}
    return {**_head(kind, stamp), "choices": [{"index": 0, **choice}], **no_usage}


def _head(kind: str, stamp: Stamp) -> Json:
    return {"id": stamp.id, "object": kind, "created": stamp.created, "model": stamp.model}


def _usage(reply: TurnReply) -> Json:
    num_prompt, num_turn = reply.num_prompt_tokens, len(reply.tokens)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_turn, "total_tokens": num_prompt + num_turn}


def _exact_prompt(reply: TurnReply, form: ResponseForm) -> Json:
    return {"prompt_token_ids": reply.prompt_tokens} if form.has_token_ids else {}


def _exact_turn(reply: TurnReply, form: ResponseForm) -> Json:
    if not form.has_token_ids:
        return {}
    versions = [list(one) for one in reply.versions]
    return {"token_ids": reply.tokens, "token_logprobs": _finite(reply.logprobs), "versions": versions}


def _end(reply: TurnReply) -> str:
    """Return why the text ends: OpenAI has no word for a deadline, and "length" says too that it was cut."""
    return "stop" if reply.finish_reason == "stop" else "length"


def _finish_reason(reply: TurnReply) -> str:
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


def _sent_call(call: Mapping[str, Any]) -> Json:
    arguments = call["error"] if "error" in call else call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": text}}


def _finite(logprobs: list[float]) -> list[float]:
    return [max(logprob, LEAST_LOGPROB) for logprob in logprobs]


def _pieces(reply: TurnReply) -> list[str]:
    """Return the texts of the turn's ids; where the endpoint gave none, their numbers."""
    return reply.pieces or [f"token_id:{token}" for token in reply.tokens]


def _chat_logprobs(reply: TurnReply) -> Json:
    """Return the logprobs of the sampled ids; those of others are not known."""
    content = [
        {"token": piece, "logprob": logprob, "bytes": _bytes(piece) if reply.pieces else None, "top_logprobs": []}
        for piece, logprob in zip(_pieces(reply), _finite(reply.logprobs), strict=True)
    ]
    return {"content": content, "refusal": None}


def _bytes(piece: str) -> list[int] | None:
    """Return the bytes of an id's text; None for a part of a character."""
    return None if "\ufffd" in piece else list(piece.encode(errors="replace"))


def _text_logprobs(reply: TurnReply) -> Json:
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


def model_entry(model: str) -> Json:
    """Return a model's entry in the list of models."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "slipstream"}


def error_body(sentence: str, status: int, code: str) -> Json:
    """Return an error in OpenAI's form."""
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return {"error": {"message": sentence, "type": kind, "param": None, "code": code}}
