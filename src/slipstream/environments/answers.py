"""The answers of a pool of episodes: what environments say, what agents ask for, and which are over or lost."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from slipstream.environments.asks import Ask
from slipstream.environments.protocol import ChatMessage

Key = Hashable
"""The caller's name of an episode."""


@dataclass(frozen=True)
class Said:
    """Messages of the environment behind turn `turn`; 0: after its reset. Tool calls are those of this turn.

    `extends_prompt`: those of the reset belong to the prompt's last message, as in TRL. `state` is the environment's,
    as JSON; of one that is too large there is the size only, in bytes.
    """

    key: Key
    turn: int
    messages: list[ChatMessage]
    is_done: bool
    reward: float | None
    seconds: float = 0.0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    extends_prompt: bool = False
    state: str | None = None
    state_bytes: int = 0


@dataclass(frozen=True)
class Asked:
    """An agent asks for a turn; `request` counts its requests. `seconds` since it last had no request open."""

    key: Key
    request: int
    ask: Ask
    seconds: float = 0.0


@dataclass(frozen=True)
class LastWord:
    """The final reward, if there is one; the environment is closed, or the agent has returned.

    `seconds` as in `Asked`.
    """

    key: Key
    reward: float | None
    seconds: float = 0.0


@dataclass(frozen=True)
class Lost:
    """The environment of this episode is gone.

    `is_guilty`: by its own doing; False where it shared a worker with one; None where it may have been this one, as it
    had a call when its worker was lost, or as none had. `is_suspected`: guilty only as no other had a call then; its
    code said nothing.
    """

    key: Key
    reason: str
    is_guilty: bool | None = True
    is_suspected: bool = False


Answer = Said | Asked | LastWord | Lost
