"""The transcript of an episode as branches, and the place of a request for a turn among them.

A branch is a context that the policy goes on sampling behind: its prompt's ids, then turns that were sampled and what
was given between them. Most episodes have one. An agent may send what does not go on where a branch ends (it
summarises what was said, asks twice, lets a sub-agent begin): that is a fork, another branch of the same episode.

    first request                 [system, user]                                 branch 0
    goes on where that ends       [system, user, assistant, tool]                branch 0, turn 2
    goes on behind turn 1 again   [system, user, assistant, tool']               a fork: branch 1 begins with these ids
    has said something else       [system, user', assistant', user]              a fork: branch 2 is rendered as a whole

Messages of a request that are known are replaced by the ids that were sampled and given for them: what was sampled is
never tokenized again. Messages are the same where role, text (whitespace around it aside) and calls are. A turn
without text and calls may be left out.
"""

from __future__ import annotations

import bisect
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from slipstream.core.types import Prompt, Segment
from slipstream.environments.chat import Chat
from slipstream.environments.protocol import ChatMessage

MAX_CHATS = 32
"""Lists of tools whose chats are kept."""


def no_tokens() -> np.ndarray:
    return np.zeros(0, dtype=np.int32)


@dataclass
class Branch:
    """A context of an episode. `given` are tokens behind the last sampled turn.

    `history` are the messages of the whole branch, known by their ids; those of a branch that was asked for by ids are
    for people only. `ends` are the numbers of messages up to the end of each turn. `request` is the agent's number of
    what is being sampled, by ids or a text if `asks_text`, and `num_asked` the most tokens that it may have: fewer than
    the limits left, if `is_wished`.
    """

    number: int
    prompt: Prompt
    chat: Chat
    tools: str = ""
    by_ids: bool = False
    segments: list[Segment] = field(default_factory=list)
    given: np.ndarray = field(default_factory=no_tokens)
    history: list[ChatMessage] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    is_moved: bool = True  # the replica knows nothing of it: the next observation brings all
    is_sampling: bool = False
    request: int = -1
    asks_text: bool = False
    num_asked: int = 0
    is_wished: bool = False

    @property
    def turn(self) -> int:
        """Turns that were sampled."""
        return sum(segment.is_sampled for segment in self.segments)

    @property
    def num_behind(self) -> int:
        """Tokens behind the prompt."""
        return sum(len(segment.tokens) for segment in self.segments) + len(self.given)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.tokens) + self.num_behind

    def sampled(self, segment: Segment) -> None:
        """Take the next turn: what was given before it is a segment of its own."""
        if len(self.given):
            self.segments.append(Segment(tokens=self.given))
            self.given = no_tokens()
        self.segments.append(segment)
        self.is_sampling = False

    def said(self, message: ChatMessage) -> None:
        """Take the message of the turn that was sampled last."""
        self.history.append(message)
        self.ends.append(len(self.history))

    def ids(self, turn: int | None = None) -> np.ndarray:
        """Return the ids up to the end of turn `turn`, 1 being the first; None: all but what is given last."""
        parts, count = [self.prompt.tokens], 0
        for segment in self.segments:
            if turn is not None and count == turn:
                break
            parts.append(segment.tokens)
            count += segment.is_sampled
        return np.concatenate(parts)

    def turn_ids(self, turn: int) -> np.ndarray:
        """Return the ids that were sampled in turn `turn`, 1 being the first."""
        return [segment for segment in self.segments if segment.is_sampled][turn - 1].tokens


@dataclass(frozen=True)
class RequestPlace:
    """A request goes on behind turn `turn` of `branch`, which has all of its messages but the last ones, `rest`."""

    branch: Branch
    turn: int
    rest: Sequence[ChatMessage]

    @property
    def is_at_end(self) -> bool:
        """Whether the branch ends there, so that it may go on."""
        return self.turn == self.branch.turn and not self.branch.is_sampling


def find(branches: Sequence[Branch], messages: Sequence[ChatMessage], tools: str) -> RequestPlace | None:
    """Return the place with most of `messages`; None where there is no turn that only what was given would follow.

    Among several the one where a branch ends, then that of the first branch.
    """
    best: tuple[tuple[int, bool, int], RequestPlace] | None = None
    for branch in branches:
        if branch.by_ids or branch.tools != tools:
            continue
        counts = _num_known(branch.history, messages)
        turn = bisect.bisect_right(branch.ends, len(counts) - 1)
        if not turn:
            continue
        num_messages = counts[branch.ends[turn - 1]]
        place = RequestPlace(branch, turn, messages[num_messages:])
        if not place.rest or any(message["role"] == "assistant" for message in place.rest):
            continue
        rank = (num_messages, place.is_at_end, -branch.number)
        if best is None or rank > best[0]:
            best = rank, place
    return None if best is None else best[1]


def find_ids(branches: Sequence[Branch], tokens: np.ndarray) -> Branch | None:
    """Return the branch whose end `tokens` go on behind, the longest one; None where there is none."""
    found: Branch | None = None
    for branch in branches:
        ids = branch.ids() if branch.turn and not branch.is_sampling else None
        if ids is None or len(ids) >= len(tokens) or not np.array_equal(ids, tokens[: len(ids)]):
            continue
        if found is None or len(ids) > len(found.ids()):
            found = branch
    return found


def _num_known(known: Sequence[ChatMessage], messages: Sequence[ChatMessage]) -> list[int]:
    """Return how many of `messages` the first 0, 1, ... of `known` are, as far as they are the same.

    Some clients leave out a turn without text and calls.
    """
    counts = [0]
    for one in known:
        count = counts[-1]
        if count < len(messages) and same(one, messages[count]):
            counts.append(count + 1)
        elif one["role"] == "assistant" and not one.get("tool_calls") and not str(one.get("content") or "").strip():
            counts.append(count)
        else:
            break
    return counts


def same(known: ChatMessage, message: ChatMessage) -> bool:
    """Return whether a client's `message` is the `known` one.

    Whitespace around texts counts for nothing; a client may leave out the text beside calls, and what has no value.
    """
    if known["role"] != message["role"] or _calls(known) != _calls(message):
        return False
    text, other = (str(one.get("content") or "").strip() for one in (known, message))
    return text == other or (not other and bool(_calls(known)))


def _calls(message: ChatMessage) -> list[tuple[str, str]]:
    """Return names and arguments of a message's calls; ids are the client's to change.

    A client has the sentence about a malformed call in the place of its arguments, and sends that back.
    """
    return [(call["function"]["name"], _text_of(call)) for call in message.get("tool_calls") or ()]


def _text_of(call: dict[str, Any]) -> str:
    arguments = call.get("error", call["function"]["arguments"])
    return arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)


def key_of(tools: list[dict[str, Any]]) -> str:
    """Return what tells this list of tools from others."""
    return msgspec.json.encode(tools, order="sorted").decode() if tools else ""


class Chats:
    """The chat of each list of tools, made by `make` when it is first asked for; the last used ones are kept."""

    def __init__(self, make: Callable[[list[dict[str, Any]] | None], Chat]) -> None:
        self._make = make
        self._chats: OrderedDict[str, Chat] = OrderedDict()

    def of(self, tools: list[dict[str, Any]]) -> tuple[str, Chat]:
        """Return the `key_of` tools, and their chat. ConfigError where there can be none."""
        key = key_of(tools)
        chat = self._chats.get(key)
        if chat is None:
            chat = self._chats[key] = self._make(tools or None)
            if len(self._chats) > MAX_CHATS:
                self._chats.popitem(last=False)
        else:
            self._chats.move_to_end(key)
        return key, chat
