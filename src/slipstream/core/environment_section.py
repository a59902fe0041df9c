"""The section for what answers the policy between its turns: environments and tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from slipstream.core.errors import ConfigError
from slipstream.core.fields import (
    CodePath,
    Count,
    Interpreter,
    NonNegative,
    Number,
    Positive,
    PositiveFloat,
    Seconds,
    Section,
)

if TYPE_CHECKING:
    from slipstream.core.config import RunConfig

ENVIRONMENT = "environment"
"""Name of the part of a reward that is the environment's own."""
ToolFormat = Literal["auto", "hermes", "llama3", "smollm", "json_tags"]
"""The way in which a model writes a call of a tool (`environments/tool_calls.py`)."""


class NamedEnvironment(Section):
    """An environment by what it is made of: a class, or an agent in one of three forms."""

    class_path: CodePath | None = Field(
        None,
        description="The environment's class: 'module:Class' or 'file.py:Class', or 'guess' or "
        "'calculator' (docs/environments.md). Recipes may call this field `class`.",
    )
    parameters: dict[str, Any] = Field(
        default_factory=dict, description="Keywords of the class's constructor, or fields of verifiers' environment."
    )
    agent: CodePath | None = Field(
        None,
        description="An agent: 'module:function' or 'file.py:function' with (row, base_url, api_key), which asks for "
        "turns at an endpoint in OpenAI's form and returns a reward or None.",
    )
    program: list[str] = Field(
        default_factory=list,
        description="An agent: the words of a command, which is run for each episode with OPENAI_BASE_URL and "
        "OPENAI_API_KEY, and the row as JSON on standard input.",
    )
    verifiers: str | None = Field(
        None,
        description="An environment of verifiers 0.4 by name, e.g. 'textarena' (docs/environments.md).",
    )

    @property
    def forms(self) -> list[str]:
        """Return the names of the fields that say what it is: one of a complete environment."""
        found = {"class": self.class_path, "agent": self.agent, "program": self.program, "verifiers": self.verifiers}
        return [name for name, value in found.items() if value not in (None, [])]

    @property
    def takes_parameters(self) -> bool:
        """Whether `parameters` go anywhere."""
        return bool({"class", "verifiers"} & {*self.forms})

    @property
    def is_agent(self) -> bool:
        """Whether code asks for turns by itself, in place of answering them."""
        return self.forms not in ([], ["class"])


class EnvironmentChoice(NamedEnvironment):
    """One of several environments, for the rows that name it or for its share of them."""

    name: str = Field(description="What rows call it, in the column environment.column.")
    weight: PositiveFloat = Field(1.0, description="Share of the prompts, relative to the others; without a column.")


class EnvironmentConfig(NamedEnvironment):
    """The environment that answers between turns: a class, tools, an agent, or several. Without any: one turn."""

    tools: list[CodePath] = Field(
        default_factory=list,
        description="Functions that the policy may call, 'module:function' or 'file.py:function', with type hints and "
        "a docstring that describes each argument. A chat template that knows tools shows them to the model. A model "
        "without a chat template is not shown them: it knows of calls (tool_format: json_tags) what [warm_start] says.",
    )
    verifiers_python: Interpreter = Field(
        ".venv-verifiers/bin/python", description="The Python that has verifiers: an environment of its own."
    )
    choices: list[EnvironmentChoice] = Field(
        default_factory=list,
        description="Several environments, classes and agents, in place of one, by column or weight.",
    )
    column: str | None = Field(None, description="Column of the prompts that names one of the choices.")
    reward_weight: Number = Field(
        1.0,
        description="Factor of the environment's own reward, an episode's sum, beside rewards.terms; 0: it is measured "
        "only.",
    )
    max_turns: Count = Field(8, description="Turns of the policy in an episode at most; then it is cut.")
    max_episode_tokens: Positive | None = Field(
        None,
        description="Tokens of an episode behind its prompt at most, sampled and given ones; then it is cut. null: "
        "max_turns times generator.max_new_tokens.",
    )
    max_observation_chars: Positive = Field(
        20_000, description="Longer messages of an environment are cut to so many characters, with a mark."
    )
    observation: str = Field(
        "{content}",
        description="What a message of the environment looks like to a model without a chat template.",
    )
    tool_format: ToolFormat = Field(
        "auto", description="How the model writes calls of tools: 'auto' goes by its chat template."
    )
    step_limit_s: Seconds = Field(
        30.0,
        description="Longest answer of an environment, in seconds; then its episode begins again. Of an agent: the "
        "longest time without an open request, and from a refused turn to its next one.",
    )
    episode_limit_s: Seconds = Field(
        1800.0, description="Longest episode in seconds, from its reset; it is cut at the end of the turn."
    )
    max_restarts: NonNegative = Field(
        2, description="How often an episode begins again whose environment fails, before the completion has failed."
    )
    dry_run: bool = Field(
        True,
        description="Before a run starts, reset each environment and let it answer one made-up turn, and refuse what "
        "fails. false: for environments that should not be called in vain.",
    )
    num_workers: Count = Field(1, description="Sandboxed worker processes; each has many episodes.")
    memory_mb: Positive = Field(2048, description="Address-space limit of a worker beyond what it starts with, in MiB.")
    network: Literal["none", "gateway", "host"] | None = Field(
        None,
        description="What workers reach: nothing ('none'), the endpoint of agents alone ('gateway'), or this machine's "
        "network ('host'). null: 'gateway' with an agent, else 'none'.",
    )
    variables: list[str] = Field(
        default_factory=list,
        description="Names of environment variables that workers get besides PATH, e.g. that of an API key.",
    )

    @property
    def is_set(self) -> bool:
        """Whether there is an environment at all."""
        return bool(self.forms or self.tools or self.choices)

    @property
    def sources(self) -> list[NamedEnvironment]:
        """Return the environments that rows may have: the choices, or the only one."""
        return [*self.choices] or [self]

    @property
    def has_agents(self) -> bool:
        """Whether one of them asks for its turns by itself."""
        return any(one.is_agent for one in self.sources)

    @property
    def has_only_agents(self) -> bool:
        """Whether all of them do."""
        return all(one.is_agent for one in self.sources)

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        forms = self.forms + ["tools"] * bool(self.tools) + ["choices"] * bool(self.choices)
        if len(forms) > 1:
            raise ConfigError(
                "an episode has one environment",
                got=" and ".join(f"environment.{name}" for name in forms),
                allowed="one of environment.class, tools, choices, agent, program, verifiers",
                hint="a class may have tools of its own; several environments go into [[environment.choices]]",
            )
        for place, choice in enumerate(self.choices):
            if len(choice.forms) != 1:
                got = f"environment.choices.{place}, '{choice.name}', with {' and '.join(choice.forms) or 'none'}"
                allowed = "one of class, agent, program, verifiers"
                raise ConfigError("a choice is one environment", got=got, allowed=allowed)
        named: list[NamedEnvironment] = [self, *self.choices]
        lost = next((one for one in named if one.parameters and not one.takes_parameters), None)
        if lost is not None:
            what = "environment.parameters belong to environment.class or environment.verifiers"
            got = f"parameters {', '.join(lost.parameters)} without a class"
            raise ConfigError(what, got=got, allowed="environment.class with environment.parameters")
        return self

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        names = [choice.name for choice in self.choices]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError("environments need names of their own", got=f"{', '.join(repeated)} more than once")
        if self.network == "none" and self.has_agents:
            what = "an agent speaks to the policy over a network"
            allowed = "'gateway', which reaches nothing but the policy, or 'host'"
            raise ConfigError(what, got="environment.network = 'none' with an agent", allowed=allowed)
        if self.column is not None and not self.choices:
            what = "environment.column names a column that chooses among environments"
            allowed = "[[environment.choices]] with environment.column"
            raise ConfigError(what, got=f"column = '{self.column}' without choices", allowed=allowed)
        if self.observation.count("{content}") != 1:
            what = "environment.observation says where the message goes"
            allowed = 'a text with one {content}, such as "\\n{content}\\n" in double quotes'
            raise ConfigError(what, got=repr(self.observation), allowed=allowed)
        wrong = next((name for name in self.variables if not name or "=" in name or "\0" in name), None)
        if wrong is not None:
            raise ConfigError("no environment variable has such a name", got=f"environment.variables: {wrong!r}")
        return self


def check_episodes(config: RunConfig) -> None:
    """Raise ConfigError for what cannot be together with episodes of several turns."""
    environment, generator = config.environment, config.generator
    if not environment.is_set:  # one may be handed over from Python later: `environments.build.check_environments`
        return
    if generator.segment_tokens is not None:
        what = "an episode is not cut into segments: a version waits for its end, or comes in flight"
        hint = "weight_update = 'in_flight' swaps between any two tokens"
        raise ConfigError(what, got="generator.segment_tokens with [environment]", allowed="one of them", hint=hint)
    if ENVIRONMENT in config.rewards.part_names:
        what = "the environment's own reward has this name among the parts of a reward"
        got = f"a reward function or a reward model with the name '{ENVIRONMENT}' beside [environment]"
        raise ConfigError(what, got=got, allowed="another name")
    if config.rewards.truncate_token is not None:
        what = "rewards.truncate_token would end an episode in its first turn, or in what was given"
        got = f"rewards.truncate_token = {config.rewards.truncate_token} with [environment]"
        raise ConfigError(what, got=got, allowed="null", hint="generator.stop_token_ids end a turn where it is sampled")
    if config.loss.advantages == "greedy_baseline":
        got = "loss.advantages = 'greedy_baseline' with [environment]"
        allowed = "another estimator, such as 'leave_one_out'"
        raise ConfigError("ReMax's greedy baseline is of one turn", got=got, allowed=allowed)
    if environment.max_episode_tokens is not None and environment.max_episode_tokens < generator.max_new_tokens:
        raise ConfigError(
            "an episode has room for a turn",
            got=f"environment.max_episode_tokens = {environment.max_episode_tokens}, "
            f"generator.max_new_tokens = {generator.max_new_tokens}",
            allowed="environment.max_episode_tokens >= generator.max_new_tokens",
        )
