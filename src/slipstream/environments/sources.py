"""Environments by the paths that a recipe names: 'my_env.py:Maze', 'package.module:Class', or one that is shipped.

    class     a class with `reset` and `step` (`protocol.py`), made with `params`
    tools     functions, each by its path (`tools.py`)
    agent     a function that asks for its turns by itself (`agents.py`)
    program   the words of a command: a program that does so, started for each episode
    lines     the same, started once for all episodes

`make_source` looks at the files as text, and takes the text along: the process that imports them may not be able to
read them. `load` imports.
"""

from __future__ import annotations

import ast
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.user_code import defined, describe, member, module_of, text_of
from slipstream.environments.agents import Agent, AgentMaker, FunctionAgent, LineAgent, ProgramAgent
from slipstream.environments.protocol import Environment, tool_schemas
from slipstream.environments.tools import FunctionTools, tool_of
from slipstream.environments.trl import FactoryEnvironment

Kind = Literal["class", "tools", "agent", "program", "lines"]
AGENTS = ("agent", "program", "lines")
"""Kinds that ask for turns by themselves: a function, a program for each episode, one program for all of them."""
MakeEnvironment = Callable[[], Any]
"""Makes the environment of one episode."""

SHIPPED = {
    "guess": "slipstream.environments.guess:Guess",
    "calculator": "slipstream.environments.calculator:Calculator",
}
METHODS = ("reset", "step")
_NAMED = {"class": ("environment", "class"), "tools": ("tool", "function"), "agent": ("agent", "function")}
_FORMS = "'path/to/file.py:name' or 'package.module:name'"


class EnvironmentSource(msgspec.Struct, frozen=True):
    """How environments are made: the paths, the parameters, and the texts of the files that the paths name."""

    kind: Kind
    path: str = ""
    tools: tuple[str, ...] = ()
    params: dict[str, Any] = {}
    texts: dict[str, str] = {}
    command: tuple[str, ...] = ()

    @property
    def is_agent(self) -> bool:
        return self.kind in AGENTS

    @property
    def folders(self) -> list[str]:
        """The folders that a worker must see to run it."""
        found = [os.path.dirname(path) for path in self.texts]
        for path in filter(os.path.isabs, self.command):
            folder = path if os.path.isdir(path) else os.path.dirname(path)
            parent = os.path.dirname(folder)
            found.append(parent if os.path.exists(os.path.join(parent, "pyvenv.cfg")) else folder)
        return found


def make_source(
    kind: Kind,
    path: str = "",
    *,
    tools: Sequence[str] = (),
    params: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
) -> EnvironmentSource:
    """Return a checked source, with absolute paths and the texts of its files; nothing is imported.

    ConfigError for a path of another form, and for a file, module or name that there is not. What the text does not
    show is left to `load`.
    """
    if kind in ("program", "lines"):
        words = _checked_command(command)
        scripts = {word: Path(word).read_text("utf-8", "replace") for word in words if word.endswith(".py")}
        return EnvironmentSource(kind=kind, command=words, texts=scripts)
    if kind == "agent" and path in SHIPPED:
        raise ConfigError(f"'{path}' is no agent", allowed=f"class = '...' for {', '.join(SHIPPED)}")
    texts: dict[str, str] = {}
    path = "" if kind == "tools" else _checked(SHIPPED.get(path, path), kind, texts)
    functions = tuple(_checked(tool, "tools", texts) for tool in tools)
    return EnvironmentSource(kind=kind, path=path, tools=functions, params=dict(params or {}), texts=texts)


def _checked(path: str, kind: Kind, texts: dict[str, str]) -> str:
    """Return `path` with an absolute file, whose text is added to `texts`. ConfigError as `make_source`."""
    what, noun = _NAMED[kind]
    location, _, name = path.rpartition(":")
    if not location or not name:
        raise ConfigError(
            f"{what} '{path}' is no path to a {noun}",
            allowed=_FORMS + ("" if kind == "tools" else f", or {', '.join(SHIPPED)}"),
            hint=did_you_mean(path, SHIPPED),
        )
    if location.endswith(".py") and not _is_file(location):
        raise ConfigError(f"{what} '{path}': there is no such file", got=location, allowed=_FORMS)
    found = defined(path, what=what, kind=noun)
    if found is not None:
        is_class, is_function = (
            isinstance(found[1], ast.ClassDef),
            isinstance(found[1], ast.FunctionDef | ast.AsyncFunctionDef),
        )
        if (kind == "class" and is_function) or (kind in ("tools", "agent") and is_class):
            raise ConfigError(
                f"'{name}' of '{location}' is no {noun}",
                got="a function" if is_function else "a class",
                hint="a class of tools, or what makes one, is environment_factory= of slipstream.run"
                if is_function
                else "an environment is environment.class = 'file.py:Class'",
            )
        if kind == "class" and isinstance(found[1], ast.ClassDef):
            _check_text_of_class(found[1], path)
    if not location.endswith(".py"):
        return path
    file = Path(location).expanduser().resolve()
    texts[str(file)] = text_of(file)
    return f"{file}:{name}"


def _checked_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command with the absolute paths of its program and of the files that it names.

    'python' is this interpreter. ConfigError where there is no such program.
    """
    if not command or not all(isinstance(word, str) and word and "\0" not in word for word in command):
        raise ConfigError(
            "a program is the words of a command", got=list(command), allowed="['python', 'my_agent.py', ...]"
        )
    name, *words = command
    found = sys.executable if name in ("python", "python3") else shutil.which(os.path.expanduser(name))
    if found is None:
        raise ConfigError(
            f"there is no program '{name}'",
            got=list(command),
            allowed="a name on PATH, or the path of a file that may be run",
            hint="a script of Python is ['python', 'my_agent.py']" if name.endswith(".py") else None,
        )
    files = [os.path.abspath(os.path.expanduser(word)) if _is_file(word) else word for word in words]
    missing = next((word for word in files if word.endswith(".py") and not _is_file(word)), None)
    if missing is not None:
        raise ConfigError(f"program '{name}': there is no such file", got=missing)
    return (os.path.abspath(found), *files)


def _check_text_of_class(node: ast.ClassDef, path: str) -> None:
    """Raise ConfigError where the text shows that a method is missing: that of a class without bases shows all."""
    if node.bases or node.keywords or node.decorator_list:
        return
    bound = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    if all(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Expr | ast.AnnAssign) for one in node.body):
        _check_lacks([name for name in METHODS if name not in bound], f"environment '{path}'")


def check_methods(made: type, what: str) -> None:
    """Raise ConfigError for a class without `reset` or `step`; the abstract one of `Environment` does not count."""
    abstract = inspect.getattr_static(Environment, "step")
    found = {name: inspect.getattr_static(made, name, None) for name in METHODS}
    _check_lacks([name for name, method in found.items() if not callable(method) or method is abstract], what)


def _check_lacks(lacks: Sequence[str], what: str) -> None:
    if lacks:
        raise ConfigError(
            f"{what} has no method '{lacks[0]}'",
            allowed="reset(self, **columns) -> messages or None, step(self, message) -> Step",
            hint="a class whose methods are tools is environment_factory= from Python" if lacks == ["step"] else None,
        )


def _is_file(location: str) -> bool:
    try:
        return Path(location).expanduser().is_file()
    except (RuntimeError, OSError):  # no such user's home; a name that is too long
        return False


def load(source: EnvironmentSource) -> MakeEnvironment:
    """Import what `source` names; return what makes an environment, one object with each call.

    ConfigError for a file that cannot be imported, no such name, no class, a class without `reset` or `step`,
    parameters that it does not take, and functions that are no tools.
    """
    modules: dict[str, ModuleType] = {}
    if source.is_agent:
        return AgentMaker(_agent(source, modules))
    if source.kind == "tools":
        tools = [tool_of(_imported(path, "tools", source.texts, modules)) for path in source.tools]
        FunctionTools(tools)  # checks the names
        return partial(FunctionTools, tools)
    made = _imported(source.path, "class", source.texts, modules)
    _check_params(made, source)
    _check_class(made, source.path)
    return partial(made, **source.params)


def with_tools_found(make: MakeEnvironment) -> tuple[MakeEnvironment, list[dict[str, Any]]]:
    """Return `make`, and the schemas of the tools of what it makes.

    Only where these are an object's own one is made to see them; the first call returns that one. That of a TRL
    environment is dropped: each of its objects is made in the thread that calls it.
    """
    made = make.func if isinstance(make, partial) else make
    if isinstance(make, AgentMaker):
        return make, []
    if inspect.isclass(made) and getattr(made, "tool_schemas", None) in (None, Environment.tool_schemas):
        return make, []
    first = make()
    is_kept = not isinstance(first, FactoryEnvironment)
    return _starting_with(first, make) if is_kept else make, tool_schemas(first)


def _agent(source: EnvironmentSource, modules: dict[str, ModuleType]) -> Agent:
    """Return the agent of a source: one object for all episodes."""
    if source.kind in ("program", "lines"):
        command = [_within_reach(word, source.texts) for word in source.command]
        return ProgramAgent(command) if source.kind == "program" else LineAgent(command)
    return agent_of(_imported(source.path, "agent", source.texts, modules), source.path)


def _within_reach(word: str, texts: Mapping[str, str]) -> str:
    """Return a word of a command; a script that this process may not read becomes a copy in its folder."""
    if word not in texts or os.access(word, os.R_OK):
        return word
    copy = Path(os.path.basename(word)).resolve()
    copy.write_text(texts[word], encoding="utf-8")
    return str(copy)


def agent_of(function: Callable[..., Any], name: str) -> Agent:
    """Return the agent of a function. ConfigError where it does not take a row, an address and a key."""
    try:
        inspect.signature(function).bind({}, "", "")
    except TypeError as error:
        got = f"{getattr(function, '__name__', name)}{inspect.signature(function)}"
        allowed = "async def run(row, base_url, api_key) -> float | None"
        raise ConfigError(f"agent '{name}' cannot be called: {error}", got=got, allowed=allowed) from error
    except ValueError:  # written in C
        pass
    return FunctionAgent(function)


def _imported(path: str, kind: Kind, texts: Mapping[str, str], modules: dict[str, ModuleType]) -> Callable[..., Any]:
    location, _, name = path.rpartition(":")
    what, noun = _NAMED[kind]
    if location not in modules:
        try:
            modules[location] = module_of(location, texts.get(location))
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{what} '{path}' cannot be imported", got=describe(error)) from error
    return member(modules[location], location, name, kind=noun)


def _check_class(made: Callable[..., Any], path: str) -> None:
    if not inspect.isclass(made):
        raise ConfigError(f"environment '{path}' is no class", got=type(made).__name__, allowed="a class with `step`")
    check_methods(made, f"environment '{path}'")


def _check_params(made: Callable[..., Any], source: EnvironmentSource) -> None:
    """Raise ConfigError for parameters that the class or function does not take, and for those that it lacks."""
    try:
        parameters = inspect.signature(made).parameters
    except (TypeError, ValueError):  # written in C
        return
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for name in source.params:
            if name not in parameters:
                raise ConfigError.unknown(
                    f"environment '{source.path}' has no parameter '{name}'", name, parameters, none="no parameters"
                )
    try:
        inspect.signature(made).bind(**source.params)
    except TypeError as error:
        what = f"environment '{source.path}' cannot be made: {error}"
        got = f"params = {source.params}"
        raise ConfigError(what, got=got, allowed=", ".join(map(str, parameters.values()))) from error


def _starting_with(first: Any, make: MakeEnvironment) -> MakeEnvironment:
    spare = [first]
    return lambda: spare.pop() if spare else make()
