"""The environments that a configuration names, and what can be wrong with the names; without a library of models."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.environment_section import NamedEnvironment
from slipstream.core.errors import ConfigError
from slipstream.core.user_code import FROM_PYTHON
from slipstream.environments.sources import EnvironmentSource, make_source

Maker = Callable[[], Any]
"""Makes the environment of one episode."""
Schemas = list[dict[str, Any]]


@dataclass(frozen=True)
class Given:
    """Environments that were handed over from Python, by the names that the configuration has for them."""

    makers: Mapping[str, Maker]


def sources_of(config: RunConfig) -> list[EnvironmentSource]:
    """Return the environments that the configuration names by path, in the order of its choices."""
    environment = config.environment
    if environment.tools:
        return [make_source("tools", tools=environment.tools)]
    return [_source_of(one, environment.verifiers_python) for one in environment.sources]


def _source_of(one: NamedEnvironment, verifiers_python: str) -> EnvironmentSource:
    if one.agent is not None:
        return make_source("agent", one.agent)
    if one.verifiers is not None:
        return _verifiers_source(one.verifiers, one.parameters, verifiers_python)
    if one.program:
        return make_source("program", command=one.program)
    return make_source("class", one.class_path or "", params=one.parameters)


def _verifiers_source(name: str, parameters: Mapping[str, Any], verifiers_python: str) -> EnvironmentSource:
    """Return the program that plays an environment of verifiers. ConfigError where there is no verifiers."""
    python = os.path.expanduser(verifiers_python)
    if not os.path.isfile(python):
        got = f"environment.verifiers_python = '{verifiers_python}', which is not there"
        hint = "in a checkout `make verifiers-env` makes it, in .venv-verifiers; or give the path of your own"
        raise ConfigError("environment.verifiers needs a Python that has verifiers", got=got, hint=hint)
    program = Path(__file__).with_name("verifiers_program.py")
    told = ["--environment", name, "--parameters", json.dumps(dict(parameters))]
    return make_source("lines", command=[python, str(program), *told, "--path", os.getcwd()])


def is_from_python(config: RunConfig) -> bool:
    """Whether its environments were handed over from Python: then all were."""
    paths = [*config.environment.tools, *map(_path_of, config.environment.sources)]
    return any(path.startswith(FROM_PYTHON) for path in paths)


def _path_of(one: NamedEnvironment) -> str:
    return one.class_path or one.agent or ""


def given_makers(config: RunConfig, given: Given | None) -> list[Maker]:
    """Return what makes the environments that were handed over. ConfigError where this process does not have one."""
    environment, makers = config.environment, {} if given is None else given.makers
    paths = environment.tools[:1] or [*map(_path_of, environment.sources)]
    names = [path.removeprefix(FROM_PYTHON) for path in paths]
    missing = next((name for name in names if name not in makers), None)
    if missing is not None:
        raise ConfigError(
            f"the environment '{missing}' is a Python object, which this process does not have",
            got=f"{FROM_PYTHON}{missing} in [environment]",
            allowed="slipstream.run(..., environment=..., tools=...) with it, also to resume, or evaluate_model(...)",
            hint="what a command is to use is a 'file.py:Class'",
        )
    parameters = environment.parameters if environment.class_path else {}
    return [partial(makers[name], **parameters) if parameters else makers[name] for name in names]


def check_environments(config: RunConfig, given: Given | None) -> None:
    """Raise ConfigError for environments that are not there, or that this run could not use; nothing is imported."""
    environment = config.environment
    _check_sums(config)
    if not environment.is_set:
        _check_one_turn(config)
        return
    if is_from_python(config):
        given_makers(config, given)
    else:
        sources_of(config)
        _check_variables(environment.variables)
    if environment.tools and not config.rewards.weighted:
        got = "environment.tools, and neither rewards.terms nor rewards.models"
        allowed = "a reward, such as your own function in rewards.terms"
        raise ConfigError("tools give no reward", got=got, allowed=allowed)
    _check_stages(config)


def _check_sums(config: RunConfig) -> None:
    """Raise ConfigError for constraints alone where nothing else gives a reward: no tools do, nor what is measured."""
    environment = config.environment
    if not environment.is_set or environment.tools or environment.reward_weight == 0.0:
        config.rewards.check_sum("rewards")
    if {"preferences", "evaluate"} & set(config.stages):
        config.gold.check_sum("gold")


def _check_stages(config: RunConfig) -> None:
    """Raise ConfigError for stages that cannot be where there is an environment."""
    if "preferences" in config.stages:
        what = "this stage samples completions of one turn"
        allowed = "sft, dpo, reward_model, rl and evaluate"
        raise ConfigError(what, got="stage 'preferences' with [environment]", allowed=allowed)
    if "evaluate" not in config.stages:
        return
    if is_from_python(config):
        raise ConfigError(
            "the stage evaluate plays episodes in a process of its own, without this one's objects",
            got="environments that were handed over from Python",
            allowed="'file.py:Class' and 'file.py:function' in [environment]",
            hint="slipstream.evaluate_model(run, environment=...) measures them when the run is done",
        )
    if config.judge.is_given:
        what = "a judge compares completions of one turn with references, and an episode has none"
        raise ConfigError(what, got="[judge] and the stage 'evaluate' with [environment]", allowed="one of them")


def _check_variables(names: Sequence[str]) -> None:
    """Raise ConfigError for variables that workers are to get, and that this process does not have."""
    if unset := [name for name in names if name not in os.environ]:
        raise ConfigError(
            "environments would lack a variable that they are to get",
            got=f"environment.variables: {', '.join(unset)}, not set here",
            allowed="names of variables that are set where the run starts",
            hint=f"export {unset[0]}=..., or leave it out of environment.variables",
        )


def _check_one_turn(config: RunConfig) -> None:
    """Raise ConfigError for fields that only episodes of several turns have a use for."""
    for name in ("sessions", "parked_tokens", "weight_update_at"):
        if (value := vars(config.generator)[name]) not in (None, "episode"):
            what = f"generator.{name} is about episodes of several turns"
            got = f"generator.{name} = {value} without an environment"
            raise ConfigError(what, got=got, allowed=f"generator.{name} with [environment]")
    if config.loss.credit == "turn":
        what = "loss.credit is about episodes of several turns"
        got = "loss.credit = 'turn' without an environment"
        raise ConfigError(what, got=got, allowed="loss.credit = 'turn' with [environment]")
