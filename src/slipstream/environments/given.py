"""Environments that are handed over from Python: `slipstream.run(environment=Maze, tools=[f])`, and TRL's factories.

The configuration names them, 'python:Maze'; who has the objects runs them, in its own process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.fields import absolute_code
from slipstream.core.recipes import resolve
from slipstream.core.user_code import FROM_PYTHON
from slipstream.environments.agents import AgentMaker
from slipstream.environments.checks import Given, Maker
from slipstream.environments.sources import agent_of, check_methods
from slipstream.environments.tools import FunctionTools, by_name
from slipstream.environments.trl import CHOICE, FactoryEnvironment

EnvironmentMaker = Callable[..., Any] | Mapping[str, Callable[..., Any]] | str
"""A class with `reset` and `step`, or whatever makes such objects; several by name; or a path as in a recipe."""
AgentFunction = Callable[..., Any] | Mapping[str, Callable[..., Any]] | str
"""An agent; several by name; or a path as in a recipe."""


def with_given_environment(
    config: RunConfig,
    environment: EnvironmentMaker | None = None,
    tools: Sequence[Callable[..., Any] | str] | None = None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    agent: AgentFunction | None = None,
    *,
    keeps_terms: bool = True,
) -> tuple[RunConfig, Given | None]:
    """Return `config` with these in [environment], and the objects; as it is without any.

    `tools` and `environment_factory` are TRL's, and may be given together; `environment` and `agent` stand alone.
    Unless `keeps_terms`, what gives rewards takes the place of the terms of `rewards`. A run that is resumed
    keeps its configuration where that names these objects. ConfigError for what is none of them.
    """
    named = {"environment": environment, "tools": tools, "environment_factory": environment_factory, "agent": agent}
    there = [name for name, one in named.items() if one is not None]
    if not there:
        return config, None
    if (environment is not None or agent is not None) and len(there) > 1:
        allowed = "environment, or agent, or tools with environment_factory, or one of these"
        hint = "a class of your own may have tools: see slipstream.environments.tools.ToolEnvironment"
        raise ConfigError("an episode has one environment", got=" and ".join(there), allowed=allowed, hint=hint)
    over, makers = (
        _agent(config, agent) if agent is not None else _tables(config, environment, tools, environment_factory)
    )
    if makers and all(config.environment.model_dump()[name] == value for name, value in over.items()):
        return config, Given(makers)  # a run that goes on
    names = ("class_path", "column", "agent", "verifiers")
    nothing: dict[str, Any] = dict.fromkeys(names) | {"tools": [], "choices": [], "program": []}
    tables: dict[str, Any] = {"environment": nothing | over}
    has_reward = environment is not None or agent is not None or _gives_reward(environment_factory)
    if not keeps_terms and has_reward:
        tables["rewards"] = {"terms": []}
    if inspect.isclass(environment_factory) and not has_reward:
        config.rewards.check_sum("rewards")
    before = config.model_dump()
    if "class_path" not in over:
        before["environment"]["parameters"] = {}  # those of the recipe's class
    return resolve(before, tables), Given(makers) if makers else None


def _tables(
    config: RunConfig,
    environment: EnvironmentMaker | None,
    tools: Sequence[Callable[..., Any] | str] | None,
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
) -> tuple[dict[str, Any], dict[str, Maker]]:
    """Return the fields of [environment], and what makes each of the objects they name."""
    if isinstance(environment, str):
        return {"class_path": absolute_code(environment)}, {}
    if isinstance(environment, Mapping):
        makers = {str(name): _checked(one, f"environment['{name}']") for name, one in environment.items()}
        return _choices(makers, config.environment.column), makers
    if environment is not None:
        name = _name(environment)
        return {"class_path": FROM_PYTHON + name}, {name: _checked(environment, "environment")}
    if tools is not None and not isinstance(tools, list | tuple):
        raise ConfigError("tools are a list", got=repr(tools)[:100], allowed="tools=[function, ...]")
    listed = list(tools or ())
    if not listed and factory is None:
        raise ConfigError("the list of tools is empty", allowed="a function or more, or no argument `tools`")
    if factory is None and all(isinstance(tool, str) for tool in listed):
        return {"tools": [absolute_code(tool) for tool in listed]}, {}
    functions = [tool for tool in listed if not isinstance(tool, str)]
    if len(functions) < len(listed):
        allowed = "one kind: functions run in this process, and those of paths in a sandbox"
        raise ConfigError("tools are functions, or paths of functions", got="some of each", allowed=allowed)
    if functions:
        by_name(functions)  # their hints and docstrings
    if factory is None:
        names = [_name(function) for function in functions]
        return {"tools": [FROM_PYTHON + name for name in names]}, {names[0]: partial(FunctionTools, functions)}
    if isinstance(factory, Mapping):
        made = {str(name): _of_trl(one, functions, f"environment_factory['{name}']") for name, one in factory.items()}
        return _choices(made, CHOICE), made
    name = _name(factory)
    return {"class_path": FROM_PYTHON + name}, {name: _of_trl(factory, functions, "environment_factory")}


def _agent(config: RunConfig, agent: AgentFunction) -> tuple[dict[str, Any], dict[str, Maker]]:
    """Return the fields of one agent or several, and what makes them."""
    if isinstance(agent, str):
        return {"agent": absolute_code(agent)}, {}
    if isinstance(agent, Mapping):
        makers = {str(name): _agent_maker(one, str(name)) for name, one in agent.items()}
        return _choices(makers, config.environment.column, field="agent"), makers
    name = _name(agent)
    return {"agent": FROM_PYTHON + name}, {name: _agent_maker(agent, name)}


def _agent_maker(agent: Any, name: str) -> Maker:
    if not callable(agent) or inspect.isclass(agent):
        raise ConfigError(
            "an agent is a function", got=repr(agent)[:100], allowed="async def run(row, base_url, api_key), or a path"
        )
    return AgentMaker(agent_of(agent, name))


def _choices(makers: Mapping[str, Maker], column: str | None, *, field: str = "class_path") -> dict[str, Any]:
    if not makers:
        raise ConfigError("there is no environment in the table", allowed="{name: class, ...}")
    choices = [{"name": name, field: FROM_PYTHON + name} for name in makers]
    return {"choices": choices, "column": column}


def _gives_reward(factory: Any) -> bool:
    """Whether a class of TRL's kind has its own reward; of a function nothing is known before it is called."""
    factories = list(factory.values()) if isinstance(factory, Mapping) else [factory]
    return any(hasattr(one, "get_reward") for one in factories)


def _of_trl(factory: Any, tools: Sequence[Callable[..., Any]], where: str) -> Maker:
    """Return what makes environments of TRL's kind. ConfigError for what is no factory, or a class without `reset`."""
    lacks_reset = inspect.isclass(factory) and not callable(inspect.getattr_static(factory, "reset", None))
    if not callable(factory) or lacks_reset:
        raise ConfigError(
            f"{where} makes no environments",
            got=f"the class '{factory.__name__}', without a method 'reset'" if lacks_reset else repr(factory)[:100],
            allowed="a class, or a function without parameters: reset(self, **columns) -> str | None, and tools",
            hint="every episode has an object of its own: give the class" if hasattr(factory, "reset") else None,
        )
    return partial(FactoryEnvironment, factory, tools=tools)


def _checked(one: Any, where: str) -> Maker:
    """Return what makes environments. ConfigError where it is none, or makes what lacks a method."""
    if not callable(one):
        raise ConfigError(
            f"{where} makes no environments",
            got=repr(one)[:100],
            allowed="a class, or a function that makes an object with reset and step",
            hint="every episode has an object of its own: give the class" if hasattr(one, "step") else None,
        )
    if inspect.isclass(one):
        check_methods(one, f"{where} '{one.__name__}'")
    made: Maker = one
    return made


def _name(one: Any) -> str:
    while isinstance(one, functools.partial):
        one = one.func
    name = getattr(one, "__name__", type(one).__name__)
    return "environment" if name == "<lambda>" else str(name)
