"""Environments that answer the policy's turns: the protocol, tools, TRL's environments, and two that are shipped."""

from slipstream.environments.protocol import (
    ChatMessage,
    Environment,
    EnvironmentFault,
    Played,
    Step,
    play,
)
from slipstream.environments.sources import EnvironmentSource, load, make_source
from slipstream.environments.tool_calls import ParsedTurn, detect_format, parse
from slipstream.environments.tools import Tool, ToolEnvironment
from slipstream.environments.trl import FactoryEnvironment

__all__ = [
    "ChatMessage",
    "Environment",
    "EnvironmentFault",
    "EnvironmentSource",
    "FactoryEnvironment",
    "ParsedTurn",
    "Played",
    "Step",
    "Tool",
    "ToolEnvironment",
    "detect_format",
    "load",
    "make_source",
    "parse",
    "play",
]
