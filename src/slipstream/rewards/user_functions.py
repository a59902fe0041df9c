"""The place and signature of a user's reward function, from its text: importing it would run it outside the sandbox."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.core.errors import ConfigError
from slipstream.core.user_code import FROM_PYTHON, defined, place_of

if TYPE_CHECKING:  # as in `functions.py`
    from slipstream.core.sections import RewardsConfig

GIVEN = ("prompts", "completions", "completion_ids")  # keywords that every call has, before the row's columns
MORE = ("branches", "log_extra", "log_metric")  # that a function is given which names them
WHAT = "reward function"


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
    if ":" not in function or function.startswith(FROM_PYTHON) or (found := defined(function, what=WHAT)) is None:
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


def columns_needed(config: RewardsConfig, functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Return the columns that reward functions take without a default, each with the function that does.

    Not the answer, which is None where a row has none.
    """
    given = {FROM_PYTHON + name: function for name, function in functions.items()}
    needed: dict[str, str] = {}
    for term in config.terms:
        if (found := definition(term.function, given)) is not None:
            names = found.required - {*GIVEN, *MORE, "answer", "question"}
            needed |= dict.fromkeys(names, f"reward '{term.function}' ({found.place})")
    return needed


def check_function(function: str) -> None:
    """Raise ConfigError unless 'module:name' or 'file.py:name' names a function that takes TRL's keywords.

    What the text does not show (a name that is computed, a module without Python source) is left to the workers.
    """
    if (found := defined(function, what=WHAT)) is not None:
        _check_signature(function, found[1])


def _check_signature(function: str, node: ast.AST) -> None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
        return
    named = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    lacks = [name for name in GIVEN if name not in named]
    if node.args.posonlyargs or (node.args.kwarg is None and lacks):
        raise ConfigError(
            f"{WHAT} '{function}' cannot be called as rewards are",
            got=f"def {node.name}({ast.unparse(node.args)})",
            allowed=f"def {node.name}({', '.join(GIVEN)}, **columns)",
            hint="it is called with keywords, and returns one number or None per completion; **columns takes the rest",
        )
