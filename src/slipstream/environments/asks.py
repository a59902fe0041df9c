"""Requests of a client for a turn of the policy, and the replies: what the gateway and those behind it share.

    client -> HTTP -> gateway -> Ask -> endpoint        endpoint -> TurnReply, or Refused -> gateway -> HTTP -> client

An endpoint is an episode of a run, or a model that is served on its own. The gateway (`gateway.py`) knows HTTP and
OpenAI's names; an endpoint knows neither.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import msgspec

from slipstream.core.types import FinishReason
from slipstream.environments.protocol import ChatMessage


class SamplingWishes(msgspec.Struct, frozen=True):
    """How a client would like its turn to be sampled; None: it does not say. In a run all but `max_tokens` is void.

    A `top_k` of 0 is no limit, as in a recipe. `unmet` are the fields of its request that no sampler here can meet.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()


class Ask(msgspec.Struct, frozen=True):
    """A client's request for one turn: a chat with tools, or the ids of its whole context, or a plain text.

    `messages` are of OpenAI's form, checked and made plain: "content" is a text, "tool_calls" have arguments that are
    dicts (a text where they are no JSON object). Exactly one of `messages`, `tokens` and `text` is there.
    """

    messages: list[ChatMessage] | None = None
    tools: list[dict[str, Any]] = []
    tokens: list[int] | None = None
    text: str | None = None
    wishes: SamplingWishes = SamplingWishes()


class TurnReply(msgspec.Struct, frozen=True):
    """The turn: as a message, and as the exact ids with their logprobs and the versions that sampled them.

    `versions` are (start, version): token `start` and those behind it, up to the next start. `pieces` are the texts of
    the ids, one by one. `message` is {"role": "assistant", "content": ..., "tool_calls": ...} with arguments as dicts,
    as `tool_calls.py` parses them; for an ask of ids or of a text its content is the whole text.
    """

    message: ChatMessage
    finish_reason: FinishReason
    num_prompt_tokens: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]] = []
    pieces: list[str] = []
    prompt_tokens: list[int] = []


class Refused(Exception):
    """An ask that gets no turn. `status` is HTTP's, `code` a word for programs; the text is a sentence for people."""

    def __init__(self, text: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.status, self.code = status, code


Tell = Callable[[str], None]
"""Takes the next piece of a turn's text."""


class Endpoint(Protocol):
    """The end that answers what a gateway has read: an episode of a run, or a model that is served on its own."""

    @property
    def model(self) -> str:
        """The model's name, as /v1/models shows it."""
        ...

    def session_of(self, path_key: str | None, api_key: str | None) -> Hashable | None:
        """Return whose request this is, by the keys in the path and in the header; None: refused with 401."""
        ...

    async def ask(self, session: Hashable, ask: Ask, tell: Tell | None = None) -> TurnReply:
        """Return the turn. Raises Refused. Cancelled when the client is gone or its time is over.

        An endpoint whose turns are of use before they are whole calls `tell`, in the loop, with piece after piece of
        the text with which the message's content begins.
        The client learns only the type of any other exception, with status 500.
        """
        ...


MAX_TOOLS = 128
"""Most tools of a request, and most calls of a message."""
_ROLES = ("system", "user", "assistant", "tool")


def looked_at(task: asyncio.Future[Any]) -> None:
    """Take a task's error, which asyncio would write to the log otherwise."""
    if not task.cancelled():
        task.exception()


def plain(ask: Ask) -> Ask:
    """Return an ask that came from a worker with exact types, or raise Refused: what is in it nobody vouches for."""
    kinds = [ask.messages is not None, ask.tokens is not None, ask.text is not None]
    if sum(kinds) != 1:
        raise Refused("a request has messages, ids, or a text", code="invalid_request")
    if len(ask.tools) > MAX_TOOLS or not all(_is_tool(tool) for tool in ask.tools):
        raise Refused("tools are functions with names and parameters", code="invalid_tools")
    if ask.messages is None:
        return ask
    if not ask.messages:
        raise Refused("a chat has at least one message", code="invalid_messages")
    return msgspec.structs.replace(ask, messages=[_plain_message(message) for message in ask.messages])


def _is_tool(tool: dict[str, Any]) -> bool:
    function = tool.get("function")
    return isinstance(function, dict) and isinstance(function.get("name"), str) and _is_json(tool)


def _is_json(value: Any) -> bool:
    """Tell whether JSON has types for all of it: a frame may bring bytes and times."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _plain_message(message: ChatMessage) -> ChatMessage:
    if message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
        raise Refused("a message has a role and a text", code="invalid_messages")
    found = {key: message[key] for key in ("role", "content", "name", "tool_call_id") if message.get(key) is not None}
    if not all(isinstance(value, str) for value in found.values()):
        raise Refused("the fields of a message are texts", code="invalid_messages")
    calls = message.get("tool_calls") if message["role"] == "assistant" else None
    if calls:
        if not isinstance(calls, list) or len(calls) > MAX_TOOLS:
            raise Refused(f"the calls of a message are a list, of at most {MAX_TOOLS}", code="invalid_messages")
        found["tool_calls"] = [_plain_call(call) for call in calls]
    return found


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict | str) or not _is_json(arguments):
        raise Refused("a call has a function with a name and arguments", code="invalid_messages")
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": name, "arguments": arguments}}
