"""Rewards handed over from Python become terms of the configuration, with names, weights and functions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve, save_config
from slipstream.rewards.checks import check_rewards, terms_of
from slipstream.rewards.given import with_given


def accuracy(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


class Judge:
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return [0.5 for _ in completions]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return resolve("quickstart")


def test_functions_and_names_may_be_mixed(config: RunConfig) -> None:
    path = "tests/rewards/user_rewards.py:starts_with"
    other = partial(accuracy, strict=True)
    judge = Judge()
    length = {"function": "length", "params": {"target_tokens": 4}, "weight": 0.1}
    of_group = {"function": accuracy, "per": "group"}
    found, functions = with_given(config, [accuracy, path, length, other, judge, lambda **_: [], of_group])
    terms = found.rewards.terms
    names = ["accuracy", "accuracy#2", "Judge", "reward", "accuracy#3"]
    assert [
        term.function.removeprefix("python:") for term in terms if ":" in term.function and term.function != path
    ] == names
    assert list(functions) == names
    assert (functions["accuracy"], functions["accuracy#2"], functions["Judge"]) == (accuracy, other, judge)
    assert [term.weight for term in terms] == [1.0, 1.0, 0.1, 1.0, 1.0, 1.0, 1.0]
    assert [term.per for term in terms] == ["completion"] * 6 + ["group"]
    assert len({term.name for term in terms_of(found.rewards)}) == 7
    assert found.eval.measure is None  # it named a term that is gone
    assert found.model_copy(update={"rewards": config.rewards, "eval": config.eval}) == config


def test_weights_are_those_of_trl(config: RunConfig) -> None:
    found, _ = with_given(config, [accuracy, "task"], [2, 0.5])
    assert [(term.function, term.weight) for term in found.rewards.terms] == [("python:accuracy", 2.0), ("task", 0.5)]
    assert with_given(config, accuracy)[0].rewards.terms[0].function == "python:accuracy"
    assert with_given(config, None) == (config, {})


def test_a_resumed_run_keeps_its_weights_and_needs_its_functions(config: RunConfig, tmp_path: Path) -> None:
    found, functions = with_given(config, [accuracy, "task"], [2.0, 0.5])
    save_config(found, tmp_path / "config.toml")
    recorded = resolve(tmp_path / "config.toml")
    assert recorded.rewards == found.rewards
    assert with_given(recorded, [accuracy, "task"]) == (recorded, functions)
    assert with_given(recorded, [accuracy, "task"], [1.0, 1.0])[0].rewards.terms[0].weight == 1.0
    with pytest.raises(ConfigError, match="the reward 'accuracy' is a Python function") as caught:
        check_rewards(recorded.rewards, {}, given=())
    assert "slipstream.run(..., reward=...)" in str(caught.value)


BREVITY = "length.py:brevity"


@pytest.mark.parametrize(
    ("reward", "weights"),
    [
        ([accuracy, BREVITY], [1.0, 0.1]),
        ([accuracy, {"function": Judge(), "per": "group"}], [1.0, 0.1]),
        ([accuracy, {"function": BREVITY, "weight": 0.1}], None),
        ([{"function": "length", "params": {"target_tokens": 4}}, accuracy], [0.1, 1.0]),
    ],
)
def test_a_run_is_resumed_and_evaluated_with_what_it_was_given(
    config: RunConfig, reward: Any, weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's path is absolute in config.toml, and given again as it was; an evaluation is given no weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "length.py").write_text("def brevity(completions, **_): return [-len(c) for c in completions]\n")
    found, functions = with_given(
        resolve(config.model_dump(), {"eval.measure": "accuracy"}), reward, weights, keeps_measure=True
    )
    save_config(found, tmp_path / "config.toml")
    recorded = resolve(tmp_path / "config.toml")
    assert sorted(term.weight for term in recorded.rewards.terms) == [0.1, 1.0]
    assert recorded.eval.measure == "accuracy"
    for again in (None, weights):
        assert with_given(recorded, reward, again) == (recorded, functions)
    assert with_given(recorded, [accuracy, "other.py:brevity"])[0].rewards != recorded.rewards


def test_a_term_that_is_given_otherwise_has_a_weight_of_its_own(config: RunConfig) -> None:
    terms = [{"function": "length", "weight": 0.1, "params": {"target_tokens": 4}}]
    recipe = resolve(config.model_dump(), {"rewards.terms": terms})
    again = {"function": "length", "params": {"target_tokens": 4}}
    for given, weight in ((again, 0.1), (again | {"params": {"target_tokens": 8}}, 1.0)):
        assert [term.weight for term in with_given(recipe, [given])[0].rewards.terms] == [weight]


@pytest.mark.parametrize(
    ("reward", "weights", "words"),
    [
        ([], None, "reward is empty"),
        ([accuracy, 3], None, "reward 1 is no function"),
        ([{"weight": 1.0}], None, "reward 0 is no function"),
        ([accuracy], [1.0, 2.0], "2 reward_weights for 1 rewards"),
        ([{"function": accuracy, "weight": 1.0}], [1.0], "given twice"),
        (None, [1.0], "reward_weights without reward"),
        ([{"function": accuracy, "wieght": 1.0}], None, "did you mean 'weight'"),
        ([accuracy], ["1"], "rewards.terms.0.weight"),
    ],
)
def test_what_does_not_fit_is_refused(config: RunConfig, reward: Any, weights: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_given(config, reward, weights)
