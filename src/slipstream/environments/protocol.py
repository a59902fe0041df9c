"""The answers of an environment, and the strict reading of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

ChatMessage = dict[str, Any]

ROLES = ("user", "tool", "system")
_MESSAGE_FIELDS = {"role", "content", "name", "tool_call_id"}


class EnvironmentFault(Exception):
    """An environment returned what the protocol does not allow; the message is a sentence about it."""


@dataclass(frozen=True)
class Step:
    """The environment's answer to a turn."""

    messages: Sequence[ChatMessage] | str = ()
    done: bool = False
    reward: float | None = None


def as_messages(value: Any) -> list[ChatMessage]:
    """Return what an environment said as messages; EnvironmentFault for anything else than text and messages."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list | tuple):
        raise EnvironmentFault(f"messages are a list, a string or None, not {type(value).__name__}")
    for message in value:
        if not isinstance(message, Mapping) or not message.keys() <= _MESSAGE_FIELDS:
            raise EnvironmentFault('a message is a dict {"role": ..., "content": ...}')
        if message.get("role") not in ROLES or not all(isinstance(field, str) for field in message.values()):
            raise EnvironmentFault(f"a message has a role, {' or '.join(ROLES)}, and a text as content")
    return [dict(message) for message in value]


def as_step(value: Any) -> Step:
    """Return an environment's answer to a turn with exact types; EnvironmentFault for anything else."""
    if not isinstance(value, Step):
        raise EnvironmentFault(f"step returns a Step, not {type(value).__name__}")
    if not isinstance(value.done, bool):
        raise EnvironmentFault("'done' of a step is True or False")
    return Step(as_messages(value.messages), value.done, as_reward(value.reward))


def as_reward(value: Any) -> float | None:
    """Return a reward as a finite float, or None. EnvironmentFault for anything else."""
    if value is None:
        return None
    if isinstance(value, bool | str | bytes) or not isinstance(value, SupportsFloat):
        raise EnvironmentFault(f"a reward is a number or None, not {type(value).__name__}")
    if not math.isfinite(number := float(value)):
        raise EnvironmentFault(f"a reward is finite, not {number}")
    return number
