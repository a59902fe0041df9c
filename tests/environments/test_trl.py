"""TRL's environments behind Slipstream's protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from user_environments import BadTool, Counter, NoReset, Plain, add

from slipstream.core.errors import ConfigError
from slipstream.environments.protocol import (
    EnvironmentFault,
    as_messages,
    extends_prompt,
    play,
    tool_schemas,
)
from slipstream.environments.tool_calls import parse
from slipstream.environments.trl import FactoryEnvironment

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Here is a counter."}]


def played(environment: FactoryEnvironment, texts: list[str], **columns: Any) -> Any:
    turns = iter(texts)
    policy = lambda messages: parse(next(turns), "hermes").message  # noqa: E731
    return asyncio.run(play(environment, policy, PROMPT, columns))


def tool_call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def names(environment: FactoryEnvironment) -> list[str]:
    return [schema["function"]["name"] for schema in tool_schemas(environment)]


def test_an_episode_goes_as_in_trl() -> None:
    environment = FactoryEnvironment(Counter)
    calls = tool_call("increment", '{"step": 2}') + tool_call("look", "{}") + tool_call("increment", '{"step": 1}')
    episode = played(environment, [calls, tool_call("increment", '{"step": 9}'), "Done."], target=3, level=1)
    assert [message["role"] for message in episode.messages] == [
        *("system", "user", "assistant", "tool", "tool", "tool", "assistant", "tool", "assistant")
    ]
    assert episode.messages[0] == PROMPT[0]
    assert episode.messages[1]["content"] == "Here is a counter. Increment it by 3."
    contents = [message["content"] for message in episode.messages if message["role"] == "tool"]
    assert contents == ["2", "{'count': 2}", "3", "{'error': 'Game over.'}"]
    assert (episode.reward, episode.num_turns, episode.is_done) == (1.0, 3, True)
    assert environment.environment.columns == {"level": 1}
    assert (environment.num_tool_calls, environment.num_tool_errors) == (4, 1)


def test_public_methods_are_tools_but_reset_and_get_reward() -> None:
    environment = FactoryEnvironment(Counter)
    assert names(environment) == ["increment", "look"]
    assert names(FactoryEnvironment(Counter, tools=[add])) == ["add", "increment", "look"]
    assert extends_prompt(environment)


def test_without_a_reward_and_without_a_word() -> None:
    environment = FactoryEnvironment(Plain)
    assert as_messages(asyncio.run(environment.reset(target=3))) == []
    assert asyncio.run(environment.final_reward()) is None
    assert played(environment, [tool_call("name", "{}"), "x"]).messages[-2]["content"] == "None"


def test_each_environment_has_an_object_of_its_own() -> None:
    first, second = FactoryEnvironment(Counter), FactoryEnvironment(Counter)
    played(first, [tool_call("increment", '{"step": 2}'), ""], target=3)
    assert first.environment is not second.environment
    assert (first.environment.count, second.environment.count) == (2, 0)


def test_what_reset_returns_is_text() -> None:
    class Chatty(Plain):
        def reset(self, **columns: Any) -> Any:
            return [{"type": "text", "text": "hello"}]

    with pytest.raises(EnvironmentFault, match="returns a string or None, not a list"):
        asyncio.run(FactoryEnvironment(Chatty).reset())


def test_objects_that_are_no_environments() -> None:
    with pytest.raises(ConfigError, match="type NoReset, which has no method 'reset'"):
        FactoryEnvironment(NoReset)
    with pytest.raises(ConfigError, match="tool 'move' has type hints"):
        FactoryEnvironment(BadTool)
    with pytest.raises(ConfigError, match="two tools have the name 'increment'"):
        FactoryEnvironment(Counter, tools=[Counter().increment])
