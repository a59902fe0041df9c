"""What held-out answers come to: mean reward and parts always, accuracy where a term is named as the measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.held_out import (
    GREEDY_PREFIX,
    SAMPLED_PREFIX,
    Measured,
    check_measure,
    clustered_error,
    in_metrics,
    is_right,
    measured,
)
from slipstream.core.recipes import list_recipes, resolve
from slipstream.core.run_log import read_metrics
from slipstream.core.sections import names_of
from slipstream.observe.metrics import MetricsWriter
from slipstream.rewards.given import with_given


@dataclass(frozen=True)
class Answer:
    reward: float
    reward_parts: dict[str, float | None] = field(default_factory=dict)
    failure: str | None = None


TRL = [  # [format_reward, accuracy_reward], the first of which every answer earns
    Answer(2.0, {"format_reward": 1.0, "accuracy_reward": 1.0}),
    Answer(1.0, {"format_reward": 1.0, "accuracy_reward": 0.0}),
    Answer(1.5, {"format_reward": 1.0, "accuracy_reward": 0.5}),
    Answer(1.0, {"format_reward": 1.0, "accuracy_reward": None}),
    Answer(-3.0, failure="timed out"),
]


def test_the_mean_reward_and_its_parts_need_no_measure() -> None:
    found = measured(TRL, None)
    error = np.std([2.0, 1.0, 1.5, 1.0, -3.0], ddof=1) / 5**0.5
    assert found.reward_error == pytest.approx(error)
    parts = {"format_reward": 1.0, "accuracy_reward": 0.5}
    assert found == Measured(0.5, parts, None, found.reward_error)
    assert found.headline == ("reward", 0.5)


def test_several_answers_to_a_prompt_are_not_independent() -> None:
    """Of clusters of one size, the error is that of their means; of one answer each, the usual one."""
    rewards = [1.0, 0.0, 0.5, 3.0]
    answers = [Answer(reward) for reward in rewards]
    alone = np.std(rewards, ddof=1) / 4**0.5
    assert measured(answers, None, "abcd").reward_error == pytest.approx(alone)
    eight_times = measured(
        [one for one in answers for _ in range(8)], None, [name for name in "abcd" for _ in range(8)]
    )
    assert eight_times.reward_error == pytest.approx(alone), "the same answer again says nothing more"
    pairs = measured(answers, None, "abab")
    assert pairs.reward_error == pytest.approx(abs((1.0 + 0.5) / 2 - (0.0 + 3.0) / 2) / 2)
    assert measured(answers, None, "aaaa").reward_error == pytest.approx(alone), "given the prompt"
    assert measured(answers[:1], None, "a").reward_error is None
    uneven = clustered_error([1.0, 3.0, 8.0], "aab")  # mean 4, sums -4 and 4
    assert uneven == pytest.approx((2 * (16 + 16)) ** 0.5 / 3)


@pytest.mark.parametrize(("measure", "accuracy"), [("accuracy_reward", 1 / 4), ("format_reward", 4 / 5)])
def test_accuracy_is_the_share_of_what_the_measure_calls_right(measure: str, accuracy: float) -> None:
    """From 1 on. What failed is wrong; what the measure said nothing of does not count."""
    found = measured(TRL, measure)
    assert found.accuracy == pytest.approx(accuracy)
    assert found.headline == ("accuracy", found.accuracy)
    assert found.num_judged == {"accuracy_reward": 4, "format_reward": 5}[measure]
    assert measured(TRL, measure, "aabbc").num_judged == 3, "prompts: answers to one are not independent"


def test_prompts_whose_answers_nobody_judged_are_not_counted() -> None:
    answers = [Answer(0.0, {"a": value}) for value in (1.0, None, None, None, 0.0, 1.0)]
    assert measured(answers, "a", "ppqqrr").num_judged == 2
    assert measured(answers, None).num_judged is None
    assert measured(answers[1:4], "a").num_judged is None


def test_what_is_right() -> None:
    of_part = {value: is_right(Answer(0.0, {"a": value}), "a") for value in (0.999, 1.0 - 1e-9, 2.0, -1.0, None)}
    assert list(of_part.values()) == [False, True, True, False, None]
    assert is_right(Answer(5.0, {"a": 5.0}), None) is None
    assert is_right(Answer(0.0, failure="x"), "a") is False


def test_a_measure_that_abstains_everywhere_gives_no_accuracy() -> None:
    assert measured([Answer(0.5, {"a": None, "b": 0.5})], "a").accuracy is None
    assert measured([Answer(0.0, failure="x")], "a").accuracy == 0.0


@pytest.mark.parametrize("measure", [None, "accuracy_reward"])
def test_metrics_bring_it_back(tmp_path: Path, measure: str | None) -> None:
    greedy, sampled = measured(TRL, measure), measured(TRL[:2], measure)
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for found, prefix in ((greedy, GREEDY_PREFIX), (sampled, SAMPLED_PREFIX)):
        writer.write(step=0, version=0, wall_s=0.0, metrics=found.metrics(prefix))
    writer.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (in_metrics(first, GREEDY_PREFIX), in_metrics(first, SAMPLED_PREFIX)) == (greedy, None)
    assert (in_metrics(second, GREEDY_PREFIX), in_metrics(second, SAMPLED_PREFIX)) == (None, sampled)
    assert first["eval_reward_parts/format_reward"] == 1.0
    assert ("eval_accuracy" in first) == ("eval_sampled_accuracy" in second) == (measure is not None)


def test_lines_from_before_there_were_held_out_rewards() -> None:
    line = {"step": 0, "version": 0, "eval_accuracy": 0.25}
    assert in_metrics(line, GREEDY_PREFIX) == Measured(accuracy=0.25)
    assert in_metrics({"step": 0, "reward": 0.5}, GREEDY_PREFIX) is None


# Names


@pytest.mark.parametrize(
    ("functions", "names"),
    [
        (["task", "length"], ["task", "length"]),
        (["regex", "task", "regex"], ["regex", "task", "regex#2"]),
        (["/home/me/my_reward.py:reward"], ["reward"]),
        (["lib.rewards:format_reward", "~/a.py:accuracy_reward"], ["format_reward", "accuracy_reward"]),
        (["/x/a.py:reward", "b.py:reward", "/y/a.py:reward"], ["a.py:reward", "b.py:reward", "a.py:reward#2"]),
        (["a.py:reward", "a.py:reward"], ["reward", "reward#2"]),
        (["task", "my.py:task"], ["task", "my.py:task"]),
    ],
)
def test_terms_have_short_names_each_another_one(functions: list[str], names: list[str]) -> None:
    assert names_of(functions) == names
    assert len(set(names)) == len(names)


# Which term is the measure

TERMS: dict[str, Any] = {"terms": [{"function": "task"}, {"function": "lib:accuracy_reward"}]}


def config(measure: str | None = None, **rewards: Any) -> RunConfig:
    tables: dict[str, Any] = {"prompts": {"tasks": [{"name": "spell_backward"}]}, "rewards": TERMS | rewards}
    return resolve(tables, {} if measure is None else {"eval": {"measure": measure}})


def test_nobody_is_guessed_to_be_the_measure() -> None:
    assert resolve({"prompts": {"tasks": [{"name": "spell_backward"}]}}).eval.measure is None


@pytest.mark.parametrize(
    ("measure", "hint"),
    [("acuracy_reward", "did you mean 'accuracy_reward'?"), ("lib:accuracy_reward", "'accuracy_reward'"), ("", "mean")],
)
def test_a_measure_that_names_no_term_is_refused(measure: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_measure(config(measure))
    assert refused.value.allowed == "'task', 'accuracy_reward'"
    assert hint in str(refused.value.hint)


def test_a_reward_model_can_be_the_measure() -> None:
    models = [{"path": "a", "name": "judge"}]
    check_measure(config("judge", models=models))
    check_measure(config(None))


@pytest.mark.parametrize("recipe", [recipe.name for recipe in list_recipes()])
def test_shipped_recipes_name_their_correctness_term_and_no_other(recipe: str) -> None:
    found = resolve(recipe)
    check_measure(found)
    correctness = {"task", "exact_match", "math", "code"} & set(found.rewards.part_names)
    correctness |= {"environment"} if found.environment.is_set and not found.environment.tools else set()
    assert {found.eval.measure} == (correctness or {None})


@pytest.mark.parametrize(
    ("rewards", "measure"),
    [
        ({"terms": [{"function": "lib:brevity"}]}, None),
        ({"terms": [{"function": "lib:brevity"}, {"function": "task", "weight": 0}]}, "task"),
        ({"num_workers": 2}, "task"),
    ],
)
def test_a_measure_goes_with_the_term_it_names(rewards: dict[str, Any], measure: str | None) -> None:
    """As parameters of a loss go with the loss: another layer's terms are not the recipe's."""
    assert resolve("quickstart", {"rewards": rewards}).eval.measure == measure


@pytest.mark.parametrize(
    "over", [{"rewards": {"terms": "task"}}, {"rewards": 3}, {"rewards": {"terms": []}, "eval": 3}]
)
def test_layers_that_make_no_sense_are_told_of_as_ever(over: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rewards|eval"):
        resolve("quickstart", over)


def test_a_measure_given_with_the_terms_stays_right_or_wrong() -> None:
    over = {"rewards": {"terms": [{"function": "lib:accuracy_reward"}]}}
    assert resolve("quickstart", over | {"eval": {"measure": "accuracy_reward"}}).eval.measure == "accuracy_reward"
    with pytest.raises(ConfigError, match="names no term"):
        check_measure(resolve("quickstart", over | {"eval": {"measure": "task"}}))
    written = {"prompts": {"tasks": [{"name": "spell_backward"}]}, "eval": {"measure": "tusk"}}
    with pytest.raises(ConfigError, match="names no term"):  # it never named one: nothing has replaced it
        check_measure(resolve(written, over))


def test_a_function_from_python_replaces_the_terms_and_their_measure() -> None:
    def reward(prompts, completions, **columns):
        return [0.0] * len(completions)

    def measure_with(config: RunConfig, **more: Any) -> str | None:
        return with_given(config, reward, **more)[0].eval.measure

    assert measure_with(config("task")) is None
    assert measure_with(config("reward")) == "reward"
    assert measure_with(config(None)) is None
    judge = config("judge", models=[{"path": "a", "name": "judge"}])
    assert measure_with(judge) == "judge"
    for wrong, is_given in (("task", True), ("rewrd", False)):
        found, _ = with_given(config(wrong), reward, keeps_measure=is_given)
        with pytest.raises(ConfigError, match="names no term"):
            check_measure(found)
