"""An episode as people read it: what the policy and its environment said, one after the other, as plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import msgspec

from slipstream.core.jsonl import finite

POLICY = "assistant"
CALL = "call"
"""The role of a part that is a call of a tool by the policy."""
LEFT_OUT = "..."
"""The role of the last part where others are left out."""
MAX_ROLE_CHARS = 80


class TranscriptPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message, or a call of a tool. The policy's messages have the number of their turn, from 1, and its reward."""

    role: str
    text: str
    turn: int | None = None
    reward: float | None = None


def transcript(
    messages: Sequence[Mapping[str, Any]], turn_rewards: Sequence[float | None] = ()
) -> list[TranscriptPart]:
    """Return the parts of an episode's `messages`, in order: texts as they are, whatever they are."""
    return list(_parts(messages, turn_rewards))


def beginning(parts: Sequence[TranscriptPart], *, max_parts: int, max_chars: int) -> list[TranscriptPart]:
    """Return the first of `parts`, at most `max_parts` with texts of `max_chars` in all, and a last one that says so.

    A role, which may be as long as a tool's name, is cut to `MAX_ROLE_CHARS`.
    """
    found: list[TranscriptPart] = []
    room = max_chars
    for one in parts[:max_parts]:
        if room <= 0:
            break
        text = one.text if len(one.text) <= room else f"{one.text[:room]} ..."
        found.append(msgspec.structs.replace(one, role=one.role[:MAX_ROLE_CHARS], text=text))
        room -= len(one.text)
    if num_left := len(parts) - len(found):
        found.append(TranscriptPart(LEFT_OUT, f"{num_left} more"))
    return found


def _parts(messages: Sequence[Mapping[str, Any]], turn_rewards: Sequence[float | None]) -> Iterator[TranscriptPart]:
    turns = count(1)
    for message in messages:
        role, text = _as_text(message.get("role")), _as_text(message.get("content"))
        if role != POLICY:
            name = message.get("name")
            yield TranscriptPart(role if name is None else f"{role} {_as_text(name)}", text)
            continue
        turn = next(turns)
        reward = turn_rewards[turn - 1] if turn <= len(turn_rewards) else None
        yield TranscriptPart(role, text, turn, finite(reward))
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            yield TranscriptPart(CALL, _call(call))


def _call(call: Any) -> str:
    """Return a call as `name(argument=value, ...)`, values in JSON, or with its error; what has no form as JSON."""
    match call:
        case {"function": {"name": name}, "error": error}:
            return f"{_as_text(name)}: {_as_text(error)}"
        case {"function": {"name": name, "arguments": dict(arguments)}}:
            inside = ", ".join(f"{_as_text(key)}={_as_json(value)}" for key, value in arguments.items())
            return f"{_as_text(name)}({inside})"
        case {"function": {"name": name, "arguments": arguments}}:
            return f"{_as_text(name)}({_as_text(arguments)})"
    return _as_json(call)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else _as_json(value)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
