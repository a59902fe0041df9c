"""Reward functions that are handed over from Python: `slipstream.run(reward=[f, "length"], reward_weights=[1, 0.1])`.

The configuration names them, 'python:f', so that terms, weights and metrics are those of any other; who has the
functions calls them, in its own process.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.fields import absolute_code
from slipstream.core.recipes import resolve
from slipstream.core.sections import RewardsConfig, RewardTerm
from slipstream.core.user_code import FROM_PYTHON
from slipstream.rewards.protocol import Term

Reward = Callable[..., Any] | str | Mapping[str, Any]
"""A function, what names one in `rewards.terms`, or a table of these whose `function` may be either."""
Functions = Mapping[str, Callable[..., Any]]
"""The functions of terms 'python:NAME', by name."""


def with_given(
    config: RunConfig,
    reward: Reward | Sequence[Reward] | None,
    weights: Sequence[float] | None = None,
    *,
    keeps_measure: bool = False,
) -> tuple[RunConfig, Functions]:
    """Return `config` with `reward` as its terms, and the functions among them; as it is without any.

    Terms have weight 1, or those of `weights`, or of their own table. A run that is resumed keeps the terms of its
    configuration where they name these functions, and the weights that are not given anew. An `eval.measure` that names
    a replaced term goes with it, unless `keeps_measure` says that it was given together with the functions. ConfigError
    for what is no function or does not fit.
    """
    if reward is None:
        if weights is not None:
            raise ConfigError("reward_weights are those of reward", got="reward_weights without reward")
        return config, {}
    listed = list(reward) if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
    if not listed:
        raise ConfigError("reward is empty", allowed="a function, or a list of functions and names of rewards.terms")
    if weights is not None and len(weights) != len(listed):
        raise ConfigError("each reward has a weight", got=f"{len(weights)} reward_weights for {len(listed)} rewards")
    tables, functions = _tables(listed)
    if weights is not None:
        if twice := next((table for table in tables if "weight" in table), None):
            raise ConfigError("a weight is given twice", got=f"reward_weights, and the table of '{twice['function']}'")
        tables = [{**table, "weight": weight} for table, weight in zip(tables, weights, strict=True)]
    terms, names = config.rewards.terms, [absolute_code(table["function"]) for table in tables]
    if [absolute_code(term.function) for term in terms] == names:
        tables = [_as_recorded(term, table) for term, table in zip(terms, tables, strict=True)]
    over: dict[str, Any] = {"rewards": {"terms": tables}}
    if keeps_measure:
        over["eval"] = {"measure": config.eval.measure}
    return resolve(config.model_dump(), over), functions


def _as_recorded(term: RewardTerm, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of `term` where `table` says nothing else of it, else `table`."""
    again = {**(recorded := term.model_dump()), **table, "function": term.function}
    return again if again == recorded else dict(table)


def _tables(listed: Sequence[Any]) -> tuple[list[dict[str, Any]], Functions]:
    tables: list[dict[str, Any]] = []
    functions: dict[str, Callable[..., Any]] = {}
    for index, one in enumerate(listed):
        table = dict(one) if isinstance(one, Mapping) else {"function": one}
        function = table.get("function")
        if callable(function):
            name = _name(function, functions)
            functions[name] = function
            table["function"] = FROM_PYTHON + name
        elif not isinstance(function, str):
            allowed = "a function, a name as in rewards.terms ('length', 'file.py:function'), or a table of either"
            raise ConfigError(f"reward {index} is no function", got=repr(function), allowed=allowed)
        tables.append(table)
    return tables, functions


def _name(function: Callable[..., Any], taken: Collection[str]) -> str:
    """Return the name that metrics show: `__name__`, numbered from the second on; 'reward' where there is none."""
    while isinstance(function, functools.partial):
        function = function.func
    name = function.__name__ if inspect.isroutine(function) else type(function).__name__
    name = "reward" if name == "<lambda>" else name
    same = sum(other.partition("#")[0] == name for other in taken)
    return f"{name}#{same + 1}" if same else name


def check_given(config: RewardsConfig, given: Collection[str]) -> None:
    """Raise ConfigError for a term that stands for a Python function which is not `given`."""
    named = (term.function.removeprefix(FROM_PYTHON) for term in config.terms if is_from_python(term))
    missing = next((name for name in named if name not in given), None)
    if missing is not None:
        raise ConfigError(
            f"the reward '{missing}' is a Python function, which this process does not have",
            got=f"{FROM_PYTHON}{missing} in rewards.terms",
            allowed="slipstream.run(..., reward=...) with that function, also to resume",
            hint="what a command or a stage of its own is to score with is a 'file.py:function', or [gold]",
        )


def is_from_python(term: RewardTerm | Term) -> bool:
    return term.function.startswith(FROM_PYTHON)
