"""From the configuration to the parts of the node: hosts of environments, and the chat that their words go through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.environments.chat import Chat, Parse, PlainChat, TemplateChat, parsed_template
from slipstream.environments.chat_proof import prove
from slipstream.environments.checks import Given, Schemas, given_makers, is_from_python, sources_of
from slipstream.environments.hosting import HostSetup
from slipstream.environments.inline import InlinePool
from slipstream.environments.pool import EpisodePool
from slipstream.environments.tool_calls import detect_format
from slipstream.environments.tool_calls import parse as parse_calls
from slipstream.environments.transcript import Chats
from slipstream.environments.workers import EnvironmentPool
from slipstream.models.build import first_shape, stop_token_ids
from slipstream.models.foreign_text import ChatRenderer
from slipstream.models.tokenizer import check_alphabet

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer


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
            given_makers(config, given),
            step_limit_s=environment.step_limit_s,
            max_chars=environment.max_observation_chars,
            request_limit_s=environment.episode_limit_s,
            clock=clock,
        )
    setup = HostSetup(
        sources=sources_of(config),
        memory_bytes=environment.memory_mb << 20,
        step_limit_s=environment.step_limit_s,
        max_chars=environment.max_observation_chars,
        network=environment.network or ("gateway" if environment.has_agents else "none"),
        environment=environment.variables,
        request_limit_s=environment.episode_limit_s,
    )
    workers = environment.num_workers
    return EnvironmentPool(setup, num_workers=workers, clock=clock, private=private, num_spares=num_spares)


def keeps_states(config: RunConfig) -> bool:
    """Return whether a resumed run may go on with episodes that are open at a checkpoint.

    With one version for a whole episode, that is older than those that replicas hold after a resume. At staleness 0
    none is open.
    """
    return config.max_staleness > 0 and config.mixes_turns


def tools_of(pool: EpisodePool) -> Schemas:
    """Return the schemas of the tools that the policy may call; those of all environments are the same.

    Agents are no part of this: they bring their tools along.
    """
    found = [schemas for source, schemas in enumerate(pool.tool_schemas) if source not in pool.agents]
    if any(schemas != found[0] for schemas in found):
        raise ConfigError(
            "the environments of a run have the same tools: prompts name them",
            got=" and ".join(str([schema["function"]["name"] for schema in schemas]) for schemas in found),
            hint="let each class have the tools of all, or train in several runs",
        )
    return found[0] if found else []


def build_chat(
    config: RunConfig,
    tokenizer: Tokenizer,
    tools: Schemas | None,
    *,
    for_agents: bool = False,
    renderer: ChatRenderer | None = None,
) -> Chat:
    """Return what makes ids of an environment's words; `tools` are the schemas of functions that the policy may call.

    Chats by the model's template, proved to extend its own text (ConfigError else), and all that agents say where
    there is one; other prompts by `environment.observation`. `renderer` runs the template; None: one of its own.
    """
    stop_ids, environment = stop_token_ids(tokenizer, config.generator, first_shape(config)), config.environment
    has_chats = config.prompts.chat or (bool(tokenizer.chat_template) and bool(tools))
    if not has_chats and not (for_agents and tokenizer.chat_template):
        fixed = "".join(literal for literal, _ in parsed_template(environment.observation))
        check_alphabet(tokenizer, [("environment.observation", fixed)])
        parse = call_parser(environment.tool_format, tokenizer, tools)
        return PlainChat(tokenizer, environment.observation, stop_ids=stop_ids, parse=parse)
    renderer = renderer or _renderer(config, tokenizer)
    parse = call_parser(environment.tool_format, tokenizer, tools, renderer)
    chat = TemplateChat(tokenizer, renderer, tools or None, stop_ids=stop_ids, parse=parse)
    prove(chat, ("tool",) if environment.tools else None)
    return chat


def missing_end(config: RunConfig, tokenizer: Tokenizer) -> str | None:
    """Return a line where completions go on behind the token that ends a turn in the chat template; else None.

    With an environment that is an error (`chat_proof`); without `stop_at_eos` it is meant.
    """
    if config.environment.is_set or not config.generator.stop_at_eos:
        return None
    stop_ids = stop_token_ids(tokenizer, config.generator, first_shape(config))
    chat = TemplateChat(tokenizer, _renderer(config, tokenizer))
    try:
        end = chat.end
    except ConfigError:  # it does not write what an assistant says
        return None
    if end is None or end in stop_ids:
        return None
    field = f"generator.stop_token_ids = {[*config.generator.stop_token_ids, end]}"
    return f"chat: the template ends a turn with {chat.speller.controls[end]}, completions do not; {field} does so"


def build_chats(config: RunConfig, tokenizer: Tokenizer) -> Chats:
    """Return the chats of agents, which bring their tools along; one process runs the template for all of them."""
    renderer = _renderer(config, tokenizer) if tokenizer.chat_template else None
    return Chats(lambda tools: build_chat(config, tokenizer, tools, for_agents=True, renderer=renderer))


def _renderer(config: RunConfig, tokenizer: Tokenizer) -> ChatRenderer:
    return ChatRenderer(
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        origin=tokenizer.name_or_path,
        variables=config.prompts.chat_template_kwargs,
    )


def call_parser(
    tool_format: str, tokenizer: Tokenizer, tools: Schemas | None, renderer: ChatRenderer | None = None
) -> Parse | None:
    """Return what reads calls of tools in a turn's text; None where there are no tools.

    `renderer` is that of chats by the model's template, whose header of a turn may open a thought.
    """
    if not tools:
        return None
    form: str | None = tool_format
    if form == "auto":
        form = detect_format(str(tokenizer.chat_template or "")) or (None if tokenizer.chat_template else "json_tags")
    if form is None:
        what = "how this model writes calls of tools cannot be told from its chat template"
        allowed = "environment.tool_format = 'hermes', 'llama3', 'smollm' or 'json_tags' (of `serve`: --tool-format)"
        raise ConfigError(what, got=tokenizer.name_or_path or "its template", allowed=allowed)
    chosen, is_thinking = form, renderer is not None and _opens_thought(renderer, tools)

    def read(text: str) -> dict[str, Any]:
        return parse_calls(text, chosen, is_thinking=is_thinking).message

    return read


def _opens_thought(renderer: ChatRenderer, tools: Schemas) -> bool:
    [text] = renderer.render([[{"role": "user", "content": "A question."}]], tools=tools)
    return text.rstrip().endswith("<think>")
