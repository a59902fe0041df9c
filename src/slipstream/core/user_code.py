"""The user's own functions and classes, which a recipe names as 'module:name' or 'path/to/file.py:name'.

`defined` looks at the text of a name without importing it, since importing runs it: outside of a sandbox, or before
the process that needs it. `module_of` imports. `describe` tells an error of such code, with its place.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import tokenize
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.core.errors import ConfigError, did_you_mean

MAX_ERROR_CHARS = 500
FROM_PYTHON = "python:"
"""Prefix of a function or class that was handed over from Python: its name follows."""

_OURS = str(Path(__file__).parents[1])
_INSTALLED = {"site-packages", "dist-packages"}

SCRIPTS_BEING_IMPORTED: set[str] = set()


class ReachedRun(BaseException):
    """A script imported for what it defines came to its own `slipstream.run`: no more of it is needed.

    Not an Exception, so that no handler of the script takes it. This is why scripts need no main guard.
    """


@contextlib.contextmanager
def importing(script: str) -> Iterator[None]:
    """Import the file `script` within, as far as its own `slipstream.run`."""
    SCRIPTS_BEING_IMPORTED.add(script)
    try:
        with contextlib.suppress(ReachedRun):
            yield
    finally:
        SCRIPTS_BEING_IMPORTED.discard(script)


def module_of(location: str, text: str | None) -> ModuleType:
    """Import the module `location`; or run `text`, which the file `location` holds, as a module.

    A script runs as far as its own `slipstream.run`, and finds modules beside it. Raises what the import raises.
    """
    if text is None:
        with _on_path(os.getcwd()):
            return importlib.import_module(location)
    module = ModuleType(f"slipstream_user_{Path(location).stem}")
    module.__file__ = location
    sys.modules[module.__name__] = module
    beside = str(Path(location).expanduser().absolute().parent)
    with importing(location), _on_path(beside), _on_path(os.getcwd()):
        exec(compile(text, location, "exec", dont_inherit=True), vars(module))  # else annotations were texts there
    return module


@contextlib.contextmanager
def _on_path(folder: str) -> Iterator[None]:
    """Let modules be found in `folder`, behind all others. Workers look in the working folder and beside files, too."""
    is_new = folder not in sys.path
    if is_new:
        sys.path.append(folder)
    try:
        yield
    finally:
        if is_new and folder in sys.path:
            sys.path.remove(folder)


def member(module: ModuleType, location: str, name: str, *, kind: str = "function") -> Callable[..., Any]:
    """Return the callable `name` of a module that was imported from `location`. ConfigError where there is none."""
    callables = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in callables:
        raise ConfigError(
            f"'{location}' has no {kind} '{name}'",
            allowed=", ".join(key for key in callables if not key.startswith("_")),
            hint=did_you_mean(name, callables),
        )
    found: Callable[..., Any] = callables[name]
    return found


def imported(path: str, *, what: str, modules: dict[str, ModuleType]) -> Callable[..., Any]:
    """Import the callable of 'module:name' or 'file.py:name', a `what`; the names of one file share its module.

    Modules that `modules` has by location are not imported again. ConfigError where the import fails, or lacks it.
    """
    location, _, name = path.rpartition(":")
    if location not in modules:
        try:
            text = text_of(Path(location).expanduser()) if location.endswith(".py") else None
            modules[location] = module_of(location, text)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"the {what} '{path}' cannot be imported", got=describe(error)) from error
    return member(modules[location], location, name, kind=what)


def text_of(file: Path) -> str:
    """Return the text of a Python file in its own encoding, whatever the locale's is."""
    with tokenize.open(file) as text:
        return text.read()


def describe(error: BaseException) -> str:
    """Type, message and place of an error: the innermost line that is of no library, else the innermost of all."""
    frames = [
        (Path(frame.f_code.co_filename), line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(("<", _OURS))
    ]
    library = sysconfig.get_path("stdlib")
    own = [place for place in frames if not (_INSTALLED & {*place[0].parts} or str(place[0]).startswith(library))]
    text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    if not frames:
        return text
    path, line = (own or frames)[-1]
    return f"{text} ({path.name}, line {line})"


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


def defined(path: str, *, what: str, kind: str = "function") -> tuple[Path, ast.AST] | None:
    """Return the file of 'module:name' or 'file.py:name' and what binds the name there, from the file's text.

    None where the text does not show it: a name that is computed, a module without Python source. ConfigError where
    there is no such file, module or name. `what` ("reward function") and `kind` ("class") are for the message.
    """
    location, _, name = path.rpartition(":")
    file = _file_of(location, f"{what} '{path}'")
    if file is None:
        return None
    tree = _parsed(file, f"{what} '{path}'")
    bound = _bound_names(tree)
    if name not in bound:
        if "*" in bound:
            return None
        known = [key for key, node in bound.items() if not key.startswith("_") and not _is_plain_value(node)]
        raise ConfigError.unknown(
            f"'{location}' has no {kind} '{name}'", name, known, got=path, none="a file with functions"
        )
    if _is_plain_value(bound[name]):
        raise ConfigError(
            f"'{name}' of '{location}' is no {kind}", got=ast.unparse(bound[name])[:80], allowed=f"a {kind}"
        )
    return file, bound[name]


def _parsed(file: Path, name: str) -> ast.Module:
    try:
        return ast.parse(text_of(file), filename=str(file))
    except SyntaxError as error:  # also of the bytes in front of the first line of code, which has no number then
        raise ConfigError(
            f"{name}: {file.name} is no Python",
            got=f"{error.msg}, line {error.lineno or 1}",
            allowed="a file that Python can import",
            hint=f"`python {file}` shows the place",
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: {file} cannot be read", got=error, allowed="a Python file") from error


def _file_of(location: str, name: str) -> Path | None:
    if location.endswith(".py"):
        return Path(location).expanduser()
    package, *parts = location.split(".")
    try:
        with _on_path(os.getcwd()):
            spec = importlib.util.find_spec(package)
            for part in parts:  # `find_spec` of the whole would import the package
                spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or [])
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        raise ConfigError(
            f"{name}: there is no module '{location}'",
            got=f"'{location}' in front of ':'",
            allowed="a module that this Python finds, or 'path/to/file.py:name'",
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


def check_default_dtype() -> None:
    """Raise ConfigError where the caller has told torch to make tensors of another type than float32.

    In this process weights, caches and moments would have that type.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_default_dtype() is not torch.float32:
        what, got = "torch's default dtype is another than float32", torch.get_default_dtype()
        hint = "torch.set_default_dtype(torch.float32) before the call; fields named precision choose others"
        raise ConfigError(what, got=got, allowed="torch.float32", hint=hint)
