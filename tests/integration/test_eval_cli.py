"""`slipstream eval` as its user meets it: the table, the file of answers, and what it says of bad input."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

import slipstream
from slipstream import cli
from slipstream.core.sections import ModelConfig
from slipstream.evals.evaluate import evaluate_model
from slipstream.models.build import build_policy
from slipstream.models.scalar import new_scalar_model, save_scalar_model


def test_answers_are_written_and_accuracies_shown(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    assert cli.main(["eval", str(trained), "--num-prompts", "20", "--num-samples", "3", "--out", str(out)]) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    greedy = [answer for answer in answers if answer["temperature"] == 0]
    sampled = [answer for answer in answers if answer["temperature"] == 1]
    assert (len(greedy), len(sampled)) == (20, 60)
    assert {answer["sample"] for answer in sampled} == {0, 1, 2}
    assert all(answer["is_correct"] == (answer["text"] == answer["reference"]) for answer in answers)
    by_prompt = {answer["prompt_id"]: 0 for answer in sampled}
    for answer in sampled:
        by_prompt[answer["prompt_id"]] += answer["is_correct"]
    expected = {
        "greedy": sum(answer["is_correct"] for answer in greedy) / 20,
        "sampled": sum(by_prompt.values()) / 60,
        "pass@3": sum(count > 0 for count in by_prompt.values()) / 20,
    }
    shown = capsys.readouterr().out
    for name, value in expected.items():
        assert name in shown
        assert f"{value:.3f}" in shown


def test_a_checkpoint_with_a_recipe_is_the_run(trained: Path) -> None:
    """The bare folder gives the same answers, when told the same configuration."""
    bare = evaluate_model(trained / "model", recipe=trained / "config.toml", num_prompts=10)
    assert bare.answers == evaluate_model(trained, num_prompts=10).answers


def test_other_data_is_evaluated_as_it_is_named(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": word, "answer": word[::-1]} for word in ("abc", "cba", "dog", "cat", "pig")]
    for name, some in (("old.jsonl", rows[:2]), ("other.jsonl", rows)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    old, other = str(tmp_path / "old.jsonl"), str(tmp_path / "other.jsonl")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(trained / "model")
    config = tomllib.loads((trained / "config.toml").read_text())
    config["prompts"] |= {"tasks": [], "dataset": old, "eval_dataset": old, "template": "{question}>", "num_eval": 2}
    config["rewards"]["terms"], config["eval"]["measure"] = [{"function": "exact_match"}], "exact_match"
    config["eval"]["num_prompts"], config["warm_start"]["steps"] = 2, 0
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps(config))

    run = str(tmp_path / "run")
    assert cli.main(["eval", run, "--data", other]) == 0
    assert f"{run}, 5 prompts of {other}\n" in capsys.readouterr().out
    found = slipstream.evaluate_model(run, data=other, num_prompts=3)
    assert [answer.prompt for answer in found.greedy_answers] == ["abc>", "cba>", "dog>"]
    assert [answer.reference for answer in found.greedy_answers] == ["cba", "abc", "god"]
    assert cli.main(["eval", run, "--num-prompts", "1", "--prompts.eval-dataset", other]) == 0
    assert f"{run}, 1 prompts of {other}\n" in capsys.readouterr().out
    for flags, said in (
        (["--prompts.dataset", other], "would not be evaluated on"),
        (["--data", other, "--prompts.eval-dataset", old], "would not be evaluated on"),
        (["--data", other, "--num-prompts", "6"], "num_prompts = 6, of 5 rows"),
        (["--data", str(tmp_path / "none.jsonl")], "dataset not found"),
    ):
        assert cli.main(["eval", run, *flags]) == 2
        assert said in capsys.readouterr().err


@pytest.fixture
def rewarded(trained: Path, tmp_path: Path) -> Path:
    """Directory of a run that made its reward model in a stage."""
    run = Path(shutil.copytree(trained, tmp_path / "rewarded"))
    policy, tokenizer = build_policy(ModelConfig(path=str(run / "model")), seed=0)
    save_scalar_model(new_scalar_model(policy, head_init="reward", seed=0), run / "reward_model" / "model", tokenizer)
    shutil.copytree(run / "model", run / "sft" / "model")
    config = tomllib.loads((run / "config.toml").read_text())
    config["stages"] = ["sft", "preferences", "reward_model", "rl"]
    config["model"]["path"] = config["kl"]["reference"] = "stage:sft"
    config["rewards"]["terms"][0]["weight"] = 0.0
    config["rewards"]["models"] = [{"path": "stage:reward_model"}]
    config["gold"]["terms"] = [{"function": "task"}]
    (run / "config.toml").write_text(tomli_w.dumps(config))
    return run


@pytest.mark.slow
def test_what_stages_made_is_found_in_the_run(rewarded: Path) -> None:
    """Whether the run is named, or a checkpoint in it together with the run's recipe or another one."""
    of_run = evaluate_model(rewarded, num_prompts=5)
    assert len({answer.reward for answer in of_run.answers}) > 1, "scored by the model"
    for checkpoint in ("model", "sft/model"):
        of_checkpoint = evaluate_model(rewarded / checkpoint, recipe=rewarded / "config.toml", num_prompts=5)
        assert of_checkpoint.answers == of_run.answers
    assert evaluate_model(rewarded, recipe="tldr_mini", num_prompts=2).num_prompts == 2


@pytest.mark.slow
def test_a_reference_of_a_stage_is_not_needed(trained: Path, tmp_path: Path) -> None:
    """Evaluation reads rewards, not what RL is held to."""
    checkpoint = shutil.copytree(trained / "model", tmp_path / "elsewhere")
    config = tomllib.loads((trained / "config.toml").read_text())
    config["stages"] = ["sft", "rl"]
    config["kl"] |= {"reference": "stage:sft", "coef": 0.1}
    assert (
        evaluate_model(checkpoint, recipe=config, num_prompts=10).answers
        == evaluate_model(trained, num_prompts=10).answers
    )


def test_a_reward_model_that_only_a_stage_would_make(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = shutil.copytree(trained / "model", tmp_path / "elsewhere")
    assert cli.main(["eval", str(bare), "--recipe", "tldr_mini"]) == 2
    error = capsys.readouterr().err
    for words in ("'reward_model' is made by a stage", "stage:reward_model", "allowed:", "slipstream eval RUN"):
        assert words in error
    assert cli.main(["eval", str(trained), "--recipe", "tldr_mini"]) == 2
    error = capsys.readouterr().err
    assert "there is no reward model 'reward_model'" in error
    assert "no stage that makes it" in error


def _without_tokenizer(run: Path) -> Path:
    for file in (run / "model").glob("tokenizer*"):
        file.unlink()
    return run


def _without_model(run: Path) -> Path:
    shutil.rmtree(run / "model")
    return run


def _torn_config(run: Path) -> Path:
    (run / "config.toml").write_text("steps = [")
    return run


def _torn_model(run: Path) -> Path:
    (run / "model" / "config.json").write_text("{")
    return run


def _torn_weights(run: Path) -> Path:
    (run / "model" / "model.safetensors").write_bytes(b"half")
    return run


@pytest.mark.parametrize(
    ("target", "flags", "message"),
    [
        (lambda run: run / "nowhere", "", "nothing of that name"),
        (lambda run: run / "summary.json", "", "a file"),
        (lambda run: run / "logs", "", "there is no checkpoint"),
        (_without_model, "", "a run without an exported model"),
        (_without_tokenizer, "", "no tokenizer found"),
        (_torn_config, "", "not valid TOML"),
        (_torn_model, "", "config.json"),
        (_torn_weights, "", "not a whole safetensors file"),
        (lambda run: run / "model", "", "add --recipe"),
        (lambda run: run / "model", "--recipe quickstrat", "did you mean 'quickstart'?"),
        (lambda run: run, "--num-prompts 51", "1..50"),
        (lambda run: run, "--num-prompts 0", "1..50"),
        (lambda run: run, "--num-samples 0", "at least one sample"),
        (lambda run: run, "--out nowhere/answers.jsonl", "existing folder"),
    ],
)
def test_bad_input_is_2_and_explained(
    trained: Path,
    tmp_path: Path,
    target: Callable[[Path], Path],
    flags: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    assert cli.main(["eval", str(target(run)), *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert not out
