"""Callbacks: functions of the user's that hear of steps, evaluations and checkpoints, and may end the run.

A recipe names them in [callbacks]; in Python they are an argument of `slipstream.run`. `controller/callbacks.py` calls
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.observe_sections import HOOKS
from slipstream.core.user_code import defined, imported

STOP = "stop"
"""A callback that returns this ends the run after the step that is being trained."""
Hooks = Mapping[str, Sequence[Callable[[Any], Any]]]
"""Functions by what they hear of: `HOOKS`."""


@dataclass(frozen=True)
class StepRecord:
    """Step `step` is trained: the policy is `version`. `metrics` is the line of `metrics.jsonl`."""

    step: int
    version: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class EvalRecord:
    """Version `version` has answered the held-out prompts: greedily, or at `temperature` 1 at the ends of the run.

    `name` is that of a further set of `eval.sets`; there `temperature` 0 is that of the set.
    """

    version: int
    temperature: float
    accuracy: float | None
    reward: float | None
    reward_parts: Mapping[str, float]
    name: str = ""


@dataclass(frozen=True)
class CheckpointRecord:
    """The checkpoint of `step` steps is on disk at `path`, until there are `trainer.keep_checkpoints` newer ones."""

    step: int
    path: Path


def given_callbacks(given: object) -> Hooks:
    """Return the functions of `callbacks=`: an object with methods of `HOOKS`, a mapping of these, or a list of either.

    ConfigError for what has none.
    """
    found: dict[str, list[Callable[[Any], Any]]] = {hook: [] for hook in HOOKS}
    for one in given if isinstance(given, list | tuple) else [] if given is None else [given]:
        if isinstance(one, Mapping) and (unknown := [name for name in one if name not in HOOKS]):
            raise ConfigError.unknown(
                "callbacks has an unknown name", str(unknown[0]), HOOKS, got=", ".join(map(str, unknown))
            )
        has = one.get if isinstance(one, Mapping) else lambda name, one=one: getattr(one, name, None)
        hooks: dict[str, Any] = {name: function for name in HOOKS if (function := has(name)) is not None}
        if isinstance(one, type) or not hooks or not all(map(callable, hooks.values())):
            allowed = f"an object with methods {', '.join(HOOKS)} (one or more), or a mapping of these to functions"
            raise ConfigError("callbacks has what is no callback", got=repr(one)[:100], allowed=allowed)
        for name, function in hooks.items():
            found[name].append(function)
    return found


def check_callbacks(config: RunConfig) -> None:
    """Raise ConfigError for functions in [callbacks] that are not there, without importing them."""
    for names in config.callbacks.hooks.values():
        for name in names:
            defined(name, what="callback")


def load_callbacks(config: RunConfig, given: Hooks) -> Hooks:
    """Return the functions of [callbacks], and those `given` behind them. ConfigError where the import fails.

    Functions of one file share its module.
    """
    modules: dict[str, ModuleType] = {}
    return {
        hook: [*(imported(name, what="callback", modules=modules) for name in names), *given.get(hook, ())]
        for hook, names in config.callbacks.hooks.items()
    }
