"""A look at a user's reward function before it runs: at its text, as importing it would run it outside the sandbox."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from slipstream.core.errors import ConfigError, did_you_mean

GIVEN = ("prompts", "completions", "completion_ids")
"""Keywords that every call has, before the row's columns."""


def check_function(function: str) -> None:
    """Raise ConfigError unless 'module:name' or 'file.py:name' names a function that takes TRL's keywords.

    What the text does not show (a name that is computed, a module without Python source) is left to the workers.
    """
    location, _, name = function.rpartition(":")
    path = _source_of(location, function)
    if path is None:
        return
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
            return
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
    _check_signature(function, bound[name])


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
    """What a module's text binds outside of functions and classes, and by what; '*' for imports of everything."""
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
