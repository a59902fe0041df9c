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
from slipstream.core.recipes import resolve
from slipstream.core.sections import FROM_PYTHON
from slipstream.environments.build import Given, Maker
from slipstream.environments.protocol import Environment
from slipstream.environments.tools import ToolEnvironment, by_name
from slipstream.environments.trl import FactoryEnvironment

EnvironmentMaker = Callable[..., Any] | Mapping[str, Callable[..., Any]] | str
"""A class with `reset` and `step`, or whatever makes such objects; several by name; or a path as in a recipe."""


def with_given_environment(
    config: RunConfig,
    environment: EnvironmentMaker | None = None,
    tools: Sequence[Callable[..., Any] | str] | None = None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    *,
    keeps_terms: bool = True,
) -> tuple[RunConfig, Given | None]:
    """Return `config` with these in [environment], and the objects; as it is without any.

    `tools` and `environment_factory` are TRL's, and may be given together; `environment` stands alone. Unless
    `keeps_terms`, an environment that gives rewards takes the place of the terms of `rewards`. A run that is resumed
    keeps its configuration where that names these objects. ConfigError for what is none of them.
    """
    named = {"environment": environment, "tools": tools, "environment_factory": environment_factory}
    there = [name for name, one in named.items() if one is not None]
    if not there:
        return config, None
    if environment is not None and len(there) > 1:
        raise ConfigError(
            "an episode has one environment",
            got=" and ".join(there),
            allowed="environment, or tools with environment_factory, or one of these",
            hint="a class of your own may have tools: see slipstream.environments.tools.ToolEnvironment",
        )
    over, makers = _tables(config, environment, tools, environment_factory)
    if makers and all(config.environment.model_dump()[name] == value for name, value in over.items()):
        return config, Given(makers)  # a run that goes on
    tables: dict[str, Any] = {"environment": {"class_path": None, "tools": [], "choices": [], "column": None} | over}
    if not keeps_terms and environment is not None:
        tables["rewards"] = {"terms": []}
    return resolve(config.model_dump(), tables), Given(makers) if makers else None


def _tables(
    config: RunConfig,
    environment: EnvironmentMaker | None,
    tools: Sequence[Callable[..., Any] | str] | None,
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
) -> tuple[dict[str, Any], dict[str, Maker]]:
    """Return the fields of [environment], and what makes each of the objects they name."""
    if isinstance(environment, str):
        return {"class_path": environment}, {}
    if isinstance(environment, Mapping):
        makers = {str(name): _checked(one, f"environment['{name}']") for name, one in environment.items()}
        choices = [{"name": name, "class_path": FROM_PYTHON + name} for name in makers]
        return {"choices": choices, "column": config.environment.column}, makers
    if environment is not None:
        name = _name(environment)
        return {"class_path": FROM_PYTHON + name}, {name: _checked(environment, "environment")}
    listed = list(tools or ())
    if factory is None and all(isinstance(tool, str) for tool in listed):
        return {"tools": listed}, {}
    functions = [tool for tool in listed if not isinstance(tool, str)]
    if len(functions) < len(listed):
        raise ConfigError(
            "tools are functions, or paths of functions",
            got="some of each",
            allowed="one kind: functions run in this process, and those of paths in a sandbox",
        )
    if functions:
        by_name(functions)  # their hints and docstrings
    if factory is None:
        names = [_name(function) for function in functions]
        return {"tools": [FROM_PYTHON + name for name in names]}, {names[0]: partial(ToolEnvironment, functions)}
    name = "environment_factory" if isinstance(factory, Mapping) else _name(factory)
    return {"class_path": FROM_PYTHON + name}, {name: partial(FactoryEnvironment, factory, tools=functions)}


def _checked(one: Any, where: str) -> Maker:
    """Return what makes environments. ConfigError where it is none, or makes what lacks a method."""
    if not callable(one):
        raise ConfigError(f"{where} makes no environments", got=repr(one)[:100], allowed="a class, or a function")
    if inspect.isclass(one):
        abstract = inspect.getattr_static(Environment, "step")
        lacks = [
            name
            for name in ("reset", "step")
            if not callable(method := inspect.getattr_static(one, name, None)) or method is abstract
        ]
        if lacks:
            raise ConfigError(
                f"{where} '{one.__name__}' has no method '{lacks[0]}'",
                allowed="reset(self, **columns) -> messages or None, step(self, message) -> Step",
                hint="a class whose methods are tools is environment_factory=" if lacks == ["step"] else None,
            )
    made: Maker = one
    return made


def _name(one: Any) -> str:
    while isinstance(one, functools.partial):
        one = one.func
    name = getattr(one, "__name__", type(one).__name__)
    return "environment" if name == "<lambda>" else str(name)
