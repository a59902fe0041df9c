"""Environments by the paths that a recipe names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec

from slipstream.core.errors import ConfigError

Kind = Literal["class", "tools", "factory"]
MakeEnvironment = Callable[[], Any]
"""Makes the environment of one episode."""


class EnvironmentSource(msgspec.Struct, frozen=True):
    """How environments are made: the paths, the parameters, and the texts of the files that the paths name."""

    kind: Kind
    path: str = ""
    tools: tuple[str, ...] = ()
    params: dict[str, Any] = {}
    texts: dict[str, str] = {}


def load(source: EnvironmentSource) -> MakeEnvironment:
    """Import 'module:name'; return what makes an environment. ConfigError where there is no such name."""
    location, _, name = source.path.rpartition(":")
    found = vars(importlib.import_module(location)).get(name)
    if found is None:
        raise ConfigError(f"'{location}' has no class '{name}'")
    return partial(found, **source.params)
