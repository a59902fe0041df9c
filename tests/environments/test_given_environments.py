"""Environments that are handed over from Python, as `slipstream.run` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from user_environments import Counter, Maze, add

from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve, save_config
from slipstream.core.user_code import FROM_PYTHON
from slipstream.environments.checks import check_environments
from slipstream.environments.given import with_given_environment

CONFIG = resolve(
    {"recipe": "t", "steps": 1, "model": {"max_positions": 1024}, "prompts": {"tasks": [{"name": "chain_sum"}]}},
    {"generator": {"max_new_tokens": 16}},
)


def test_a_factory_of_trl_stands_alone_or_beside_tools() -> None:
    for tools in (None, [], [add]):
        config, given = with_given_environment(CONFIG, tools=tools, environment_factory=Counter)
        assert config.environment.class_path == FROM_PYTHON + "Counter"
        assert given is not None


def test_an_environment_and_a_factory_are_two() -> None:
    with pytest.raises(ConfigError, match="an episode has one environment"):
        with_given_environment(CONFIG, Counter, environment_factory=Counter)


class NoReward:
    """TRL's kind of environment, whose reward is a function's."""

    def reset(self, **columns: object) -> str:
        return "Go on."


def test_constraints_go_with_an_environment_that_gives_the_reward() -> None:
    bound = {"terms": [{"function": "regex", "params": {"pattern": "a"}, "at_least": 1.0}]}
    config = resolve(CONFIG.model_dump(), {"rewards": bound})
    episodes, given = with_given_environment(config, Maze, keeps_terms=True)
    assert episodes.rewards == config.rewards
    check_environments(episodes, given)

    measured = resolve(episodes.model_dump(), {"environment": {"reward_weight": 0.0}})
    as_gold = resolve(episodes.model_dump(), {"gold": bound, "stages": ["rl", "evaluate"]})
    with_tools, their_tools = with_given_environment(config, tools=[add])
    for refused, made in ((config, None), (measured, given), (as_gold, given), (with_tools, their_tools)):
        with pytest.raises(ConfigError, match="constraints alone"):
            check_environments(refused, made)
    with pytest.raises(ConfigError, match="constraints alone"):
        with_given_environment(config, environment_factory=NoReward)
    with_given_environment(config, environment_factory=Counter)


@pytest.mark.parametrize("given", [{"environment": "env.py:Maze"}, {"tools": ["env.py:add"]}, {"agent": "env.py:ask"}])
def test_a_resumed_run_is_given_the_file_that_it_was_given(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path is absolute in config.toml; from another folder it is another file."""
    monkeypatch.chdir(tmp_path)
    config, _ = with_given_environment(CONFIG, **given)
    save_config(config, tmp_path / "config.toml")
    recorded = resolve(tmp_path / "config.toml")
    assert with_given_environment(recorded, **given)[0] == recorded
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    assert with_given_environment(recorded, **given)[0].environment != recorded.environment
