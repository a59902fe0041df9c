"""What a run tells of its rewards: the held-out mean reward of any reward, accuracy by a term that is named for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import slipstream
from slipstream import cli
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_metrics

FORMAT, RIGHT = "format_reward", "accuracy_reward"
REWARDS = """
def format_reward(completions, **columns):
    return [1.0 if text.strip() else 0.5 for text in completions]

def accuracy_reward(completions, answer, **columns):
    return [1.0 if text == right else 0.25 for text, right in zip(completions, answer)]
"""


@pytest.fixture
def small(tiny: dict[str, Any]) -> dict[str, Any]:
    evaluation = tiny["eval"] | {"num_prompts": 24}
    rule = {"max_staleness": 0, "weight_update": "between_batches"}
    return tiny | rule | {"steps": 3, "host": "inline", "eval": evaluation}


def shown(out: str) -> str:
    return re.sub(r"\s+", " ", out)


@pytest.mark.slow
def test_a_reward_below_0_is_told_by_its_held_out_mean(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In [-1, 0], best without any vowel: never 1, so that an accuracy of it would be 0.0% for ever."""

    def no_vowels(completions: list[str], **_: Any) -> list[float]:
        return [-sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]

    overrides = small | {"steps": 5, "groups_per_step": 8, "trainer": {"minibatches": 2, "optimizer": {"lr": 3e-3}}}
    overrides |= {"warm_start": small["warm_start"] | {"steps": 60, "batch_size": 32}}  # it spells some words
    result = slipstream.run("quickstart", overrides=overrides, reward=no_vowels, out=tmp_path / "run")
    before, after = (result.summary["eval"][moment] for moment in ("before", "after"))
    assert -1.0 <= before["reward"] < after["reward"] - 0.05
    assert after["reward"] <= 0.0
    for moment in (before, after):
        assert (moment["accuracy"], moment["sampled_accuracy"], moment["num_prompts"]) == (None, None, 24)
        assert moment["reward_parts"] == {"no_vowels": moment["reward"]}
        assert moment["sampled_reward"] is not None
    told = shown(capsys.readouterr().out)
    assert f"held-out reward before: {before['reward']:.3f}" in told
    assert f"held-out reward after: {after['reward']:.3f}" in told
    assert f"reward, greedy │ {before['reward']:.3f} │ {after['reward']:.3f}" in told
    page = (result.out / "report.html").read_text()
    assert "The held-out mean reward went from" in page
    assert "eld-out accuracy" not in told + page
    lines = read_metrics(result.out / "metrics.jsonl")
    assert [line["eval_reward"] for line in lines if "eval_reward" in line] == [before["reward"], after["reward"]]
    assert not any("eval_accuracy" in line for line in lines)
    assert resolve(result.out / "config.toml").eval.measure is None


@pytest.mark.slow
def test_the_second_of_two_terms_is_the_measure(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's usual list [format_reward, accuracy_reward], of functions in a file, whose names the terms have."""
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    terms = [{"function": f"{file}:{FORMAT}", "weight": 0.5}, {"function": f"{file}:{RIGHT}"}]
    overrides = small | {"rewards": {"terms": terms}, "eval": small["eval"] | {"measure": RIGHT}}
    result = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run")
    lines = read_metrics(result.out / "metrics.jsonl")
    for moment in ("before", "after"):
        found = result.summary["eval"][moment]
        parts = found["reward_parts"]
        assert list(parts) == [FORMAT, RIGHT]
        assert found["accuracy"] == pytest.approx((parts[RIGHT] - 0.25) / 0.75, abs=1e-9)
        assert 0.0 <= found["accuracy"] < 1.0
        assert found["reward"] == pytest.approx(0.5 * parts[FORMAT] + parts[RIGHT])
        version = result.summary["policy_version"] if moment == "after" else 0
        (line,) = (line for line in lines if "eval_reward" in line and line["version"] == version)
        assert line["eval_accuracy"] == found["accuracy"]
        assert line[f"eval_reward_parts/{FORMAT}"] == parts[FORMAT]
    assert not [name for line in lines for name in line if str(tmp_path) in name or ".py" in name]
    step = next(line for line in lines if "reward_mean" in line)
    assert {f"reward_parts/{FORMAT}", f"reward_parts/{RIGHT}"} <= step.keys()
    told = shown(capsys.readouterr().out)
    after = result.summary["eval"]["after"]
    assert f"held-out accuracy after: {after['accuracy']:.3f} reward {after['reward']:.3f} ({FORMAT} " in told
    evaluated = slipstream.evaluate_model(result.out)
    assert (evaluated.accuracy, evaluated.reward, evaluated.reward_parts) == (
        after["accuracy"],
        pytest.approx(after["reward"]),
        pytest.approx(after["reward_parts"]),
    )
    assert cli.main(["eval", str(result.out)]) == 0
    table = shown(capsys.readouterr().out)
    for name, value in {"accuracy": after["accuracy"], "reward": after["reward"]}.items():
        assert re.search(rf"{name} │ {value:.3f} │", table), table
    assert cli.main(["eval", str(result.out), "--eval.measure", FORMAT]) == 0
    rows = dict(re.findall(r"(\w+) │ ([\d.]+ │ [\d.]+) │", shown(capsys.readouterr().out)))
    right, mean = ([float(value) for value in rows[name].split(" │ ")] for name in ("accuracy", FORMAT))
    assert right == pytest.approx([(value - 0.5) / 0.5 for value in mean], abs=0.002), "the share of answers with text"
    assert max(right) > 0.0, "some answers have text, whatever the model has learned"
    assert f"accuracy │ {rows['accuracy']} │" not in table, "none of them is right"


@pytest.mark.parametrize(
    "start",
    [
        lambda out: cli.main(["run", "quickstart", "--eval.measure", "tusk", "--out", str(out)]),
        lambda out: cli.main(["eval", str(out.parent), "--eval.measure", "tusk"]),
    ],
)
def test_a_measure_that_is_no_term_is_refused_before_anything_starts(
    start: Callable[[Path], int], trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_bytes((trained / "config.toml").read_bytes())
    (tmp_path / "model").symlink_to(trained / "model")
    assert start(tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "eval.measure names no term of the reward" in error
    assert "did you mean 'task'?" in error
    assert not (tmp_path / "out").exists()


def test_a_measure_given_beside_a_function_has_to_be_that(small: dict[str, Any], tmp_path: Path) -> None:
    """The recipe's went with the recipe's terms; one that is written names what the run is scored by."""
    overrides = small | {"eval": small["eval"] | {"measure": "task"}}
    with pytest.raises(ConfigError, match=r"eval\.measure names no term"):
        slipstream.run("quickstart", overrides=overrides, reward=len, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()


def test_a_model_evaluated_by_a_function_has_no_accuracy(trained: Path) -> None:
    """A reward given from Python replaces the run's terms, and the measure that named one of them."""

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    found = slipstream.evaluate_model(trained, reward=length, num_prompts=5, num_samples=2)
    assert (found.accuracy, found.sampled_accuracy, found.pass_at_k) == (None, None, {})
    assert found.reward == pytest.approx(sum(len(answer.text) for answer in found.greedy_answers) / 5)
    assert all(answer.is_correct is None for answer in found.answers)
    msgspec.json.encode(found)
