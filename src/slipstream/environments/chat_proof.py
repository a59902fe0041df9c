"""The proof that a chat template extends its own text, so that a conversation of many turns can be built by appending.

Some templates do not: they remove the thoughts of earlier turns, move the tools behind the newest question, or change
what an assistant has said. A policy would then be trained on another text than it meets when the template renders the
whole conversation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.environments.chat import TemplateChat, calling
from slipstream.environments.protocol import ChatMessage

MAX_TURNS = 4
NUM_CONVERSATIONS = 3  # of each number of turns
AROUND = 60  # characters that are shown around a difference
THOUGHT = "<think>\nFirst {n}, and then the rest.\n</think>\n\nThe answer is {n}."
ANSWERS = (
    "It is {n}.",
    "One line: {n}\n\n- another, with \u00e9 and \u6f22\u5b57",
    "def f(x):\n    return x + {n}",
)
SAID = (
    "{n} degrees, and no rain",
    "\n  {n} lines:\n\n1. one\n2. two\n",
    '{{"result": [{n}, null], "text": "a \\"word\\""}}',
    "Traceback (most recent call last):\n  File 'x.py', line {n}\n",
)


@dataclass(frozen=True)
class _Turn:
    """An assistant's text, and what the environment says to it."""

    content: str
    observation: list[ChatMessage]


def prove(chat: TemplateChat, observes: Sequence[str] | None = None) -> None:
    """Raise ConfigError unless ids that `chat` appends are those of the template's text of the whole conversation.

    Tried are made-up conversations of 1..4 turns, with thoughts in the assistant's texts, whose observations have the
    roles `observes`, one or several messages at a time. By default that is "user", and with tools also "tool". An
    environment that answers with tools' messages only may say so: some templates keep thoughts until the next user's.
    The turns end once with the template's end of turn, and once without, as those that are cut by length.
    """
    roles = tuple(observes) if observes is not None else ("user",) if chat.tools is None else ("user", "tool")
    if not roles or not set(roles) <= {"user", "tool"}:
        raise ConfigError("unknown roles of observations", got=roles, allowed="user, tool")
    _check_stop(chat)
    draw = random.Random(0)
    conversations = [
        _conversation(draw, num_turns, roles) for num_turns in range(1, MAX_TURNS + 1) for _ in range(NUM_CONVERSATIONS)
    ]
    for turns in conversations:  # before the whole is rendered: it says which message the template does not take
        for turn in turns:
            chat.observation_text(turn.observation)
    question: list[ChatMessage] = [{"role": "user", "content": "A first question?"}]
    whole = [question + [m for turn in turns for m in _messages(chat, turn)] for turns in conversations]
    [start, *texts] = chat.render([question, *whole])
    for turns, text in zip(conversations, texts, strict=True):
        ends = _walk(chat, start, turns, text)
        for is_stopped in (True, False):
            _compare_ids(chat, start, turns, text, ends, is_stopped=is_stopped)


def _check_stop(chat: TemplateChat) -> None:
    if chat.stop_ids and chat.end is not None and chat.end not in chat.stop_ids:
        raise ConfigError(
            "sampling does not stop where the chat template ends an assistant's turn",
            got=f"stop tokens {sorted(chat.stop_ids)}",
            allowed=f"{chat.end} ({chat.speller.controls[chat.end]}) among them",
            hint="add it to the stop tokens, or use the checkpoint that the template belongs to",
        )


def _conversation(draw: random.Random, num_turns: int, roles: Sequence[str]) -> list[_Turn]:
    """Return turns whose texts are all different."""
    number = itertools.count(draw.randrange(100, 900))

    def said(text: str) -> str:
        return text.format(n=next(number))

    def observed() -> list[ChatMessage]:
        role = draw.choice(roles)
        if role == "user":
            return [{"role": "user", "content": said(draw.choice(SAID))}]
        return [
            {"role": "tool", "content": said(draw.choice(SAID)), "name": "search", "tool_call_id": f"id{index:07d}"}
            for index in range(draw.choice((1, 1, 2)))
        ]

    answers = [THOUGHT, *(draw.choice((THOUGHT, *ANSWERS)) for _ in range(num_turns - 1))]
    return [_Turn(said(answer), observed()) for answer in answers]


def _messages(chat: TemplateChat, turn: _Turn) -> list[ChatMessage]:
    answers_calls = chat.calls_first and turn.observation[0]["role"] == "tool"
    own = calling(turn.content, turn.observation) if answers_calls else {"role": "assistant", "content": turn.content}
    return [own, *turn.observation]


def _walk(chat: TemplateChat, start: str, turns: Sequence[_Turn], text: str) -> list[int]:
    """Return where in `text` each assistant's text ends. ConfigError unless `text` is `start` and the turns' texts."""
    built, ends = start, []
    for turn in turns:
        observed = chat.observation_text(turn.observation)
        at = text.find(observed, len(built))
        own = text[len(built) : at]  # whitespace may stand before the text; calls are in the template's own words
        is_own = turn.content in own if chat.calls_first else own.strip() == turn.content
        if at < 0 or not is_own or not text.startswith(built):
            raise _not_extended(built + turn.content + observed, text)
        ends.append(at)
        built = text[:at] + observed
    if built != text:
        raise _not_extended(built, text)
    return ends


def _compare_ids(
    chat: TemplateChat, start: str, turns: Sequence[_Turn], text: str, ends: Sequence[int], *, is_stopped: bool
) -> None:
    """Raise ConfigError unless the ids of `text` are those of its turns, one behind the other."""
    speller = chat.speller
    ids = speller.encode(start)
    for turn, end in zip(turns, ends, strict=True):
        until = speller.encode(text[:end])
        if until[: len(ids)] != ids:
            break  # the tokenizer merges the end of an observation with the text behind it
        cut = until[len(ids) :]
        given = chat.observation(_row(cut), turn.observation).tolist()
        if is_stopped and chat.end is not None and chat.end in given:
            stopped = cut + given[: given.index(chat.end) + 1]
            ids += stopped + chat.observation(_row(stopped), turn.observation).tolist()
        else:
            ids += cut + given
    expected = speller.encode(text)
    if ids == expected:
        return
    same = next(
        (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b), min(len(ids), len(expected))
    )
    raise ConfigError(
        "the tokens of the turns, one behind the other, are not those that the tokenizer makes of the whole chat",
        got=f"{ids[same : same + 8]} behind {same} equal tokens",
        allowed=f"{expected[same : same + 8]}: {chat.decode(expected[max(same - 8, 0) : same + 8])!r}",
        hint="a template whose messages begin and end with special tokens has no such places",
    )


def _row(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, dtype=np.int32)


def _not_extended(built: str, text: str) -> ConfigError:
    same = next((i for i, (a, b) in enumerate(zip(built, text, strict=False)) if a != b), min(len(built), len(text)))
    start, end = max(same - AROUND, 0), same + AROUND
    has_thought = "<think>" in built[max(same - AROUND, 0) : same + AROUND]
    return ConfigError(
        "the chat template does not extend its own text: with another turn it renders the earlier ones differently",
        got=f"{text[start:end]!r} in the whole conversation",
        allowed=f"{built[start:end]!r}, as the policy has read and sampled it",
        hint=("it removes the thoughts of earlier turns: " if has_thought else "")
        + "edit the tokenizer's chat_template so that it leaves earlier turns as they are, or use an environment that "
        "answers with messages of the role tool only: some templates change nothing before those",
    )
