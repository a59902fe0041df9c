"""Messages between a pool and the hosts of environments: jailed workers, or a thread of this process.

A host holds many episodes, each with an environment of its own. An episode has one call at a time. Each call has one
answer: `Spoke` or `Closed`, or `Faulted`, after which the host has forgotten the episode.

An agent has one call from `OpenEpisode` to its end, `Closed` or `Faulted`. Meanwhile it asks for turns, `AskedTurn`,
any number at a time, each of which is answered by a `Replied`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.environments.asks import Ask, TurnReply
from slipstream.environments.protocol import MAX_CHARS, ChatMessage
from slipstream.environments.sources import EnvironmentSource
from slipstream.jail.isolation import Network
from slipstream.jail.protocol import SetupFailed, TriedNetwork, WorkerReady

MAX_SPOKEN_BYTES = 4 << 20  # a larger frame from a worker is an attack or a bug: the worker is killed
MAX_REQUESTS = 64  # of one agent at a time
MAX_EPISODES_PER_HOST = 256  # each environment that is not async has a thread


class HostSetup(msgspec.Struct, frozen=True):
    """First frame to a worker: the environments that it makes, and its limits."""

    sources: list[EnvironmentSource]
    memory_bytes: int
    step_limit_s: float
    max_chars: int = MAX_CHARS  # of a message
    network: Network = "none"
    environment: list[str] = []  # names of variables that the worker gets besides its own
    request_limit_s: float = 600.0  # of an agent's request, until its turn is there

    @property
    def has_agents(self) -> bool:
        return any(source.is_agent for source in self.sources)


class ToolsFound(msgspec.Struct, frozen=True, tag=True):
    """The schemas of the tools of each source's environments; it comes before a worker is ready."""

    schemas: list[list[dict[str, Any]]]


class OpenEpisode(msgspec.Struct, frozen=True, tag=True):
    """Make the environment of an episode by source `source`, and reset it with the row's columns.

    With `keeps_state` its answers bring its state. With a `state` it is not reset, but restored as it was behind turn
    `turn`.
    """

    episode: int
    source: int
    columns: dict[str, Any]
    keeps_state: bool = False
    state: str | None = None
    turn: int = 0


class TakeTurn(msgspec.Struct, frozen=True, tag=True):
    """Let the environment answer the policy's turn."""

    episode: int
    turn: int
    message: ChatMessage


class EndEpisode(msgspec.Struct, frozen=True, tag=True):
    """Close the environment, after its final reward if that is asked for; else whatever it is doing."""

    episode: int
    asks_reward: bool


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """The episode's call is late: cancel it, or say that it cannot be cancelled."""

    episode: int


class Replied(msgspec.Struct, frozen=True, tag=True):
    """Give the agent the turn that it asked for as `request`; without a reply, `refusal` says why there is none."""

    episode: int
    request: int
    reply: TurnReply | None = None
    refusal: str = ""
    status: int = 400
    code: str = ""


class Spoke(msgspec.Struct, frozen=True, tag=True):
    """Messages of the environment behind turn `turn`; 0: of its reset. Tool calls are those of this turn.

    `extends_prompt`: those of the reset belong to the prompt's last message. `state` is the environment's, as JSON; one
    that is too large to be kept has a size only, in bytes.
    """

    episode: int
    turn: int
    messages: list[ChatMessage]
    done: bool
    reward: float | None
    seconds: float
    num_tool_calls: int
    num_tool_errors: int
    extends_prompt: bool = False
    state: str | None = None
    state_bytes: int = 0


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The environment is closed; its final reward, if it was asked for and there is one."""

    episode: int
    reward: float | None


class AskedTurn(msgspec.Struct, frozen=True, tag=True):
    """An agent asks for a turn; `request` counts its requests."""

    episode: int
    request: int
    ask: Ask


class Faulted(msgspec.Struct, frozen=True, tag=True):
    """The environment raised, was cancelled, or returned nonsense. It is closed.

    `is_shared`: the fault is one of a program that several episodes share.
    """

    episode: int
    error: str
    is_shared: bool = False


class Stuck(msgspec.Struct, frozen=True, tag=True):
    """The episode's late call cannot be cancelled."""

    episode: int


class AskedNetwork(msgspec.Struct, frozen=True, tag=True):
    """The environment of this episode has tried to reach a network that there is not."""

    episode: int


ToHost = OpenEpisode | TakeTurn | EndEpisode | Interrupt | Replied
FromEpisode = Spoke | Closed | Faulted | Stuck | AskedNetwork | AskedTurn
FromHost = WorkerReady | SetupFailed | TriedNetwork | ToolsFound | FromEpisode
