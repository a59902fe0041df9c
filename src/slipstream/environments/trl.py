"""TRL's environments, as `GRPOTrainer(environment_factory=..., tools=[...])` takes them, as an `Environment`.

    class Counter:
        def reset(self, target, **columns) -> str | None:   # called with the row's columns
            self.count, self.target = 0, target
        def increment(self, step: int) -> int:              # every other public method is a tool
            '''Increase the counter.

            Args:
                step: What to add.
            '''
            self.count += step
            return self.count
        def get_reward(self) -> float:                      # optional
            return float(self.count == self.target)

As in TRL: `reset` and `get_reward` are no tools, names that begin with "_" are neither; what `reset` returns is
appended to the prompt's last message; an episode ends with the first turn without a call; a result is what `str` makes
of it, and an error is {'error': message}. Otherwise than in TRL: arguments are checked against the tool's schema, the
answers to the calls of a turn have the order of the calls (TRL's has those of `async def` last), a call that cannot be
parsed is answered as an error instead of ending the episode, and an object serves one episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.environments.protocol import (
    ChatMessage,
    Environment,
    EnvironmentFault,
    Step,
    called,
)
from slipstream.environments.tools import Tool, ToolEnvironment, message_of

RESERVED = ("reset", "get_reward")
CHOICE = "environment"
"""The column that names a row's factory, where there are several."""


class FactoryEnvironment(Environment):
    """The object that a TRL factory makes, as an environment; standalone `tools` stand beside its methods."""

    extends_prompt = True

    def __init__(self, factory: Callable[[], Any], *, tools: Sequence[Callable[..., Any] | Tool] = ()) -> None:
        """Make the object. ConfigError unless it has a method `reset` and its other public methods are tools."""
        self.environment = factory()
        self._tools = ToolEnvironment(
            [*tools, *tool_methods(self.environment)],
            result=str,
            error=lambda why: str({"error": why if isinstance(why, str) else message_of(why)}),
        )

    @property
    def tool_schemas(self) -> list[dict[str, Any]]:
        return self._tools.tool_schemas

    @property
    def num_tool_calls(self) -> int:
        return self._tools.num_tool_calls

    @property
    def num_tool_errors(self) -> int:
        return self._tools.num_tool_errors

    async def reset(self, **columns: Any) -> list[ChatMessage]:
        """Begin the episode; return what the object's `reset` says, which extends the prompt. None is nothing."""
        self._tools.reset()
        said = await called(self.environment.reset, **columns)
        if said is not None and not isinstance(said, str):
            raise EnvironmentFault(f"reset of a TRL environment returns a string or None, not a {type(said).__name__}")
        return [{"role": "user", "content": said}] if said is not None else []

    async def step(self, message: ChatMessage) -> Step:
        return await self._tools.step(message)

    async def final_reward(self) -> Any:
        """Return what the object's `get_reward` says; None where it has none."""
        has_reward = inspect.ismethod(_member(self.environment, "get_reward"))
        return await called(self.environment.get_reward) if has_reward else None


def tool_methods(instance: Any) -> list[Callable[..., Any]]:
    """Return the public methods of an object that are tools, by name. ConfigError for one without `reset`."""
    if not inspect.ismethod(_member(instance, "reset")):
        raise ConfigError(
            f"the environment factory made an object of type {type(instance).__name__}, which has no method 'reset'",
            allowed="reset(self, **columns) -> str | None, and methods with type hints and docstrings",
        )
    names = [name for name in dir(instance) if not name.startswith("_") and name not in RESERVED]
    return [method for name in names if inspect.ismethod(method := _member(instance, name))]


def _member(instance: Any, name: str) -> Any:
    """Return an attribute of an object, None where it has none. A property is not read: it may do anything."""
    static = inspect.getattr_static(instance, name, None)
    return None if static is None or isinstance(static, property) else getattr(instance, name)
