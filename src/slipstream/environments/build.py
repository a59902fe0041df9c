"""From the configuration to the parts of the node: hosts of environments, and the chat that their words go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.sections import FROM_PYTHON
from slipstream.environments.chat import Chat, Parse, PlainChat, TemplateChat
from slipstream.environments.chat_proof import prove
from slipstream.environments.hosting import HostSetup
from slipstream.environments.inline import InlinePool
from slipstream.environments.pool import EpisodePool
from slipstream.environments.sources import EnvironmentSource, make_source
from slipstream.environments.tool_calls import detect_format, parse
from slipstream.environments.workers import EnvironmentPool
from slipstream.models.build import stop_token_ids
from slipstream.models.foreign_text import ChatRenderer

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer

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
    if environment.class_path is not None:
        return [make_source("class", environment.class_path, params=environment.parameters)]
    return [make_source("class", one.class_path, params=one.parameters) for one in environment.choices]


def is_from_python(config: RunConfig) -> bool:
    """Whether its environments were handed over from Python: then all were."""
    environment = config.environment
    paths = [environment.class_path or "", *environment.tools, *(one.class_path for one in environment.choices)]
    return any(path.startswith(FROM_PYTHON) for path in paths)


def make_pool(
    config: RunConfig,
    given: Given | None,
    *,
    clock: Clock | None = None,
    private: Sequence[str] = (),
    num_spares: int = 1,
) -> EpisodePool:
    """Return the hosts of a run's environments: jailed workers, or for those from Python this process."""
    environment = config.environment
    if is_from_python(config):
        return InlinePool(
            _given_makers(config, given),
            step_limit_s=environment.step_limit_s,
            max_chars=environment.max_observation_chars,
            clock=clock,
        )
    setup = HostSetup(
        sources=sources_of(config),
        memory_bytes=environment.memory_mb << 20,
        step_limit_s=environment.step_limit_s,
        max_chars=environment.max_observation_chars,
        allow_network=environment.network == "host",
        environment=environment.secrets,
    )
    workers = environment.num_workers
    return EnvironmentPool(setup, num_workers=workers, clock=clock, private=private, num_spares=num_spares)


def _given_makers(config: RunConfig, given: Given | None) -> list[Maker]:
    environment, makers = config.environment, {} if given is None else given.makers
    paths = [environment.class_path] if environment.class_path else environment.tools[:1]
    names = [path.removeprefix(FROM_PYTHON) for path in paths or [one.class_path for one in environment.choices]]
    missing = next((name for name in names if name not in makers), None)
    if missing is not None:
        raise ConfigError(
            f"the environment '{missing}' is a Python object, which this process does not have",
            got=f"{FROM_PYTHON}{missing} in [environment]",
            allowed="slipstream.run(..., environment=..., tools=...) with it, also to resume",
            hint="what a command is to use is a 'file.py:Class'",
        )
    parameters = environment.parameters if environment.class_path else {}
    return [partial(makers[name], **parameters) if parameters else makers[name] for name in names]


def check_environments(config: RunConfig, given: Given | None) -> None:
    """Raise ConfigError for environments that are not there, or that this run could not use; nothing is imported."""
    environment = config.environment
    if not environment.is_set:
        _check_one_turn(config)
        return
    if is_from_python(config):
        _given_makers(config, given)
    else:
        sources_of(config)
    if environment.tools and not config.rewards.weighted:
        raise ConfigError(
            "tools give no reward",
            got="environment.tools, and neither rewards.terms nor rewards.models",
            allowed="a reward, such as your own function in rewards.terms",
        )
    if others := [stage for stage in config.stages if stage not in ("sft", "reward_model", "rl")]:
        raise ConfigError(
            "this stage samples completions of one turn",
            got=f"stage '{others[0]}' with [environment]",
            allowed="sft, reward_model and rl",
        )


def _check_one_turn(config: RunConfig) -> None:
    """Raise ConfigError for fields that only episodes of several turns have a use for."""
    for name in ("sessions", "parked_tokens"):
        if (value := vars(config.generator)[name]) is not None:
            raise ConfigError(
                f"generator.{name} is about episodes of several turns",
                got=f"generator.{name} = {value} without an environment",
                allowed=f"generator.{name} with [environment]",
            )


def tools_of(pool: EpisodePool) -> Schemas:
    """Return the schemas of the tools that the policy may call; those of all environments are the same."""
    first, *others = pool.tool_schemas
    if any(schemas != first for schemas in others):
        raise ConfigError(
            "the environments of a run have the same tools: prompts name them",
            got=" and ".join(str([schema["function"]["name"] for schema in schemas]) for schemas in pool.tool_schemas),
            hint="let each class have the tools of all, or train in several runs",
        )
    return first


def build_chat(config: RunConfig, tokenizer: Tokenizer, tools: Schemas | None) -> Chat:
    """Return what makes ids of an environment's words; `tools` are the schemas of functions that the policy may call.

    Chats by the model's template, proved to extend its own text (ConfigError else); other prompts by
    `environment.observation`.
    """
    stop_ids, environment = stop_token_ids(tokenizer, config.generator), config.environment
    has_chats = config.prompts.chat or (bool(tokenizer.chat_template) and bool(tools))
    if not has_chats:
        return PlainChat(tokenizer, environment.observation, stop_ids=stop_ids, parse=_parse(config, tokenizer, tools))
    chat = TemplateChat(
        tokenizer,
        ChatRenderer(tokenizer.chat_template, tokenizer.special_tokens_map, origin=tokenizer.name_or_path),
        tools or None,
        stop_ids=stop_ids,
        parse=_parse(config, tokenizer, tools),
    )
    prove(chat, ("tool",) if environment.tools else None)
    return chat


def _parse(config: RunConfig, tokenizer: Tokenizer, tools: Schemas | None) -> Parse | None:
    """Return what reads calls of tools in a turn's text; None where there are no tools."""
    if not tools:
        return None
    form: str | None = config.environment.tool_format
    if form == "auto":
        form = detect_format(str(tokenizer.chat_template or "")) or (None if tokenizer.chat_template else "json_tags")
    if form is None:
        raise ConfigError(
            "how this model writes calls of tools cannot be told from its chat template",
            got=tokenizer.name_or_path or "its template",
            allowed="environment.tool_format = 'hermes', 'llama3', 'smollm' or 'json_tags'",
        )
    chosen = form

    def read(text: str) -> dict[str, Any]:
        return parse(text, chosen).message

    return read
