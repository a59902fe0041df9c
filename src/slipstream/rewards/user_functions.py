"""The place and signature of a user's reward function, from its text: importing it would run it outside the sandbox."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.sections import FROM_PYTHON

GIVEN = ("prompts", "completions", "completion_ids")  # keywords that every call has, before the row's columns


@dataclass(frozen=True)
class Definition:
    """The file and line of a function, and its parameters without a default."""

    place: str
    required: frozenset[str]


def definition(function: str, given: Mapping[str, Callable[..., Any]]) -> Definition | None:
    """Return the definition of 'module:name' or 'file.py:name', or of a function that is `given` by that name.

    None where it cannot be told: a built-in, a name that is computed, a decorated function, a module without source.
    """
    if function in given:
        return _definition_of(given[function])
    if ":" not in function or function.startswith(FROM_PYTHON) or (found := _found(function)) is None:
        return None
    path, node = found
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return None
    positional = [*node.args.posonlyargs, *node.args.args]
    required = [argument.arg for argument in positional[: len(positional) - len(node.args.defaults)]]
    keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    required += [argument.arg for argument, default in keywords if default is None]
    return Definition(f"{path.name}, line {node.lineno}", frozenset(required))


def _definition_of(function: Callable[..., Any]) -> Definition | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    required = {one.name for one in parameters if one.kind in named and one.default is inspect.Parameter.empty}
    place = place_of(function)
    return None if place is None else Definition(place, frozenset(required))


def place_of(function: Callable[..., Any]) -> str | None:
    """Return 'file.py, line N' of a Python function, behind partials and wrappers; None of any other callable."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = type(function).__call__
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        return None
    return f"{Path(function.__code__.co_filename).name}, line {function.__code__.co_firstlineno}"


def check_function(function: str) -> None:
    """Raise ConfigError unless 'module:name' or 'file.py:name' names a function that takes TRL's keywords.

    What the text does not show (a name that is computed, a module without Python source) is left to the workers.
    """
    if (found := _found(function)) is not None:
        _check_signature(function, found[1])


def _found(function: str) -> tuple[Path, ast.AST] | None:
    """Return the file of a function and what binds its name there; None where the text does not show it."""
    location, _, name = function.rpartition(":")
    path = _source_of(location, function)
    if path is None:
        return None
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise ConfigError(
            f"reward function '{function}': {path.name} is no Python",
            got=f"{error.msg}, line {error.lineno}",
            allowed="a file that Python can import",
            hint=f"`python {path}` shows the place",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward function '{function}': {path} cannot be read", got=error, allowed="a Python file"
        ) from error
    bound = _bound_names(tree)
    if name not in bound:
        if "*" in bound:
            return None
        functions = [key for key, node in bound.items() if not key.startswith("_") and not _is_plain_value(node)]
        raise ConfigError(
            f"'{location}' has no function '{name}'",
            got=function,
            allowed=", ".join(functions) or "a file with functions",
            hint=did_you_mean(name, functions),
        )
    if _is_plain_value(bound[name]):
        raise ConfigError(
            f"'{name}' of '{location}' is no function", got=ast.unparse(bound[name])[:80], allowed="a function"
        )
    return path, bound[name]


def _source_of(location: str, function: str) -> Path | None:
    if location.endswith(".py"):
        return Path(location).expanduser()
    try:
        spec = importlib.util.find_spec(location)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"reward function '{function}': there is no module '{location}'",
            got=f"'{location}' in front of ':'",
            allowed="a module that this Python finds, or 'path/to/file.py:function'",
            hint="is it installed in this environment, or on PYTHONPATH?",
        )
    is_source = spec.origin is not None and spec.origin.endswith(".py")
    return Path(spec.origin) if is_source and spec.origin is not None else None


def _bound_names(tree: ast.Module) -> dict[str, ast.AST]:
    """Return the names that a module's text binds outside of functions and classes, and the nodes that bind them.

    An import of everything binds '*'.
    """
    bound: dict[str, ast.AST] = {}
    todo: list[ast.AST] = list(reversed(tree.body))
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound[node.name] = node
                continue
            case ast.Import() | ast.ImportFrom():
                bound |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                bound[name] = value
            case ast.Name(id=name, ctx=ast.Store()):
                bound.setdefault(name, node)
        todo += reversed(list(ast.iter_child_nodes(node)))
    return bound


def _is_plain_value(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant | ast.List | ast.Dict | ast.Tuple | ast.Set | ast.JoinedStr)


def _check_signature(function: str, node: ast.AST) -> None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return
    named = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    lacks = [name for name in GIVEN if name not in named]
    if node.args.posonlyargs or (node.args.kwarg is None and lacks):
        raise ConfigError(
            f"reward function '{function}' cannot be called as rewards are",
            got=f"def {node.name}({ast.unparse(node.args)})",
            allowed=f"def {node.name}({', '.join(GIVEN)}, **columns)",
            hint="it is called with keywords, and returns one number or None per completion; **columns takes the rest",
        )
