"""An episode as people read it: what the policy and its environment said, one after the other, as plain text.

Forks follow the trunk, each with a part that heads it and its whole context.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

import msgspec

from slipstream.core.jsonl import finite
from slipstream.core.plain import plural
from slipstream.core.run_log import EpisodeLine
from slipstream.core.types import EpisodeRecord

POLICY = "assistant"
CALL = "call"
"""The role of a part that is a call of a tool by the policy."""
LEFT_OUT = "..."
"""The role of a part in whose place others are left out."""
MAX_ROLE_CHARS = 80
MIN_PARTS = 4
"""Parts that a branch has room for, at least, where it is shown at all and others are too."""

Chat = Sequence[Mapping[str, Any]]


class TranscriptPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message, a call of a tool, or the head of a fork, which has its number, from 1.

    The messages that the policy sampled have the number of their turn, from 1 through all branches, and its reward.
    """

    role: str
    text: str
    turn: int | None = None
    reward: float | None = None
    fork: int | None = None


def transcript_of(episode: EpisodeRecord | EpisodeLine) -> list[TranscriptPart]:
    return transcript(episode.messages, episode.turn_rewards, episode.branches, episode.contexts)


def transcript(
    messages: Chat,
    turn_rewards: Sequence[float | None] = (),
    branches: Sequence[Chat] = (),
    contexts: Sequence[int] = (),
) -> list[TranscriptPart]:
    """Return the parts of an episode, in order: texts as they are, whatever they are.

    `messages` are the trunk's, `branches` those of its forks, of which the first `contexts` were given, not sampled.
    """
    turns = count(1)
    parts = list(_parts(messages, turn_rewards, turns))
    for number, chat in enumerate(branches, start=1):
        num_given = contexts[number - 1] if number <= len(contexts) else 0
        size = f", of {plural(num_given, 'message')}" if num_given else ""
        parts.append(TranscriptPart(f"fork {number} of {len(branches)}", f"a context of its own{size}", fork=number))
        parts += _parts(chat, turn_rewards, turns, num_given)
    return parts


def beginning(parts: Sequence[TranscriptPart], *, max_parts: int, max_chars: int) -> list[TranscriptPart]:
    """Return the first of `parts`, at most `max_parts` with texts of `max_chars` in all, and those that say so.

    A trunk and its forks have equal shares of that. A fork that does not fit lacks the beginning of its context first.
    A role, which may be as long as a tool's name, is cut to `MAX_ROLE_CHARS`.
    """
    starts = [0, *(index for index, one in enumerate(parts) if one.fork is not None), len(parts)]
    branches = [parts[start:end] for start, end in pairwise(starts)]
    num_shown = min(len(branches), max(1, max_parts // MIN_PARTS))
    share = {"max_parts": max_parts // num_shown, "max_chars": max_chars // num_shown}
    found = [one for branch in branches[:num_shown] for one in _beginning(branch, **share)]
    if num_left := len(branches) - num_shown:
        found.append(TranscriptPart(LEFT_OUT, plural(num_left, "more fork")))
    return found


def _beginning(parts: Sequence[TranscriptPart], *, max_parts: int, max_chars: int) -> list[TranscriptPart]:
    """Return the first parts of one branch; of a fork, the end of the context before what was sampled."""
    found: list[TranscriptPart] = []
    is_too_long = len(parts) > max_parts or sum(len(one.text) for one in parts) > max_chars
    if is_too_long and parts[0].fork is not None:
        first_turn = next((index for index, one in enumerate(parts) if one.turn is not None), 0)
        if (num_before := first_turn - 2) > 0:
            found = [_cut(parts[0], max_chars), TranscriptPart(LEFT_OUT, f"{num_before} before")]
            max_chars -= len(parts[0].text)
            parts, max_parts = parts[first_turn - 1 :], max_parts - 2
    num_before = len(found)
    room = max_chars
    for one in parts[:max_parts]:
        if room <= 0:
            break
        found.append(_cut(one, room))
        room -= len(one.text)
    if num_left := len(parts) - (len(found) - num_before):
        found.append(TranscriptPart(LEFT_OUT, f"{num_left} more"))
    return found


def _cut(part: TranscriptPart, room: int) -> TranscriptPart:
    text = part.text if len(part.text) <= room else f"{part.text[:room]} ..."
    return msgspec.structs.replace(part, role=part.role[:MAX_ROLE_CHARS], text=text)


def _parts(
    messages: Chat, turn_rewards: Sequence[float | None], turns: Iterator[int], num_given: int = 0
) -> Iterator[TranscriptPart]:
    for index, message in enumerate(messages):
        role, text = _as_text(message.get("role")), _as_text(message.get("content"))
        if role != POLICY:
            name = message.get("name")
            yield TranscriptPart(role if name is None else f"{role} {_as_text(name)}", text)
            continue
        turn = next(turns) if index >= num_given else None
        reward = turn_rewards[turn - 1] if turn is not None and turn <= len(turn_rewards) else None
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
