"""Named sets of held-out prompts: what is measured on each, what a resume repeats, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

import slipstream
from slipstream import cli
from slipstream.controller import build
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.evals.evaluate import evaluate, evaluate_model

WORDS = [f"{a}{b}" for a in "abcde" for b in "abcde"]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of a tiny model with three sets, of which the first shares its prompts with the training data."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"prompt": word, "answer": word[::-1]} for word in WORDS]
    other = [{"q": word.upper(), "a": word, "more": 1} for word in WORDS[:6]]
    own = {"dataset": write(folder / "other.jsonl", other), "prompt_column": "q", "answer_column": "a"}
    return {
        "recipe": "sets",
        "steps": 4,
        "groups_per_step": 2,
        "completions_per_group": 2,
        "max_staleness": 0,
        "host": "inline",
        "model": {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "max_positions": 32},
        "prompts": {"dataset": write(folder / "train.jsonl", rows)},
        "generator": {"num_slots": 8, "max_new_tokens": 4},
        "rewards": {
            "terms": [{"function": "exact_match", "weight": 0}, {"function": "regex", "params": {"pattern": "[a-m]"}}]
        },
        "loss": {"skip_no_signal": False},
        "trainer": {"checkpoint_every": 2, "optimizer": {"lr": 1e-2}},
        "eval": {
            "every": 2,
            "num_slots": 8,
            "measure": "exact_match",
            "sets": [
                {"name": "own", "dataset": write(folder / "own.jsonl", rows[5:10]), "num_prompts": 4},
                {"name": "warm.7", **own, "template": "{q}=", "measure": "regex", "temperature": 0.7},
                {"name": "greedy", **own, "measure": "regex", "num_samples": 2},
            ],
        },
    }


@pytest.fixture(scope="module")
def run(tables: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slipstream.run(tables, out=tmp_path_factory.mktemp("sets") / "run", display=False).out


def evaluations(run_dir: Path) -> dict[str, dict[int, Any]]:
    """The values of each metric of evaluations, by version."""
    found: dict[str, dict[int, Any]] = {}
    for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        for name in line.keys() - {"step", "version", "wall_s"} if "step_s" not in line else ():
            found.setdefault(name, {})[line["version"]] = line[name]
    return found


def test_each_set_is_measured_by_what_is_its_own(run: Path) -> None:
    found, summary = evaluations(run), json.loads((run / "summary.json").read_text())
    for name, measure in (("own", "exact_match"), ("warm.7", "regex"), ("greedy", "regex")):
        assert found[f"eval/{name}/reward"].keys() == {0, 2, 4}
        assert found[f"eval/{name}/accuracy"] == found[f"eval/{name}/reward_parts/{measure}"]
        told = summary["eval"] if name == "own" else summary["eval"]["sets"][name]
        for moment, version in (("before", 0), ("after", 4)):
            assert told[moment]["reward"] == found[f"eval/{name}/reward"][version]
            assert told[moment]["num_prompts"] == summary["data"]["sets"][name]
    assert found["eval_reward"] == found["eval/own/reward"], "the first is the primary one"
    assert found["eval_sampled_reward"].keys() == {0, 4}
    assert summary["eval"]["primary"] == "own"
    assert summary["data"]["sets"] == {"own": 4, "warm.7": 6, "greedy": 6}
    left = set(WORDS) - set(WORDS[5:9]) - set(WORDS[:6])  # those of `greedy` differ in case alone
    assert summary["data"]["num_train"] == len(left)
    texts = {one["prompt"] for one in json.loads((run / "samples.json").read_text())}
    assert texts == set(WORDS[5:9])
    report = (run / "report.html").read_text()
    assert "Held-out sets" in report
    assert "warm.7" in report


def test_a_set_is_answered_again_as_in_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((run / "summary.json").read_text())["eval"]
    warm = evaluate_model(run, eval_set="warm.7")
    assert warm.sampled_reward == summary["sets"]["warm.7"]["after"]["reward"]
    assert {answer.temperature for answer in warm.answers} == {0.0, 0.7}
    assert [answer.prompt for answer in warm.greedy_answers] == [f"{word.upper()}=" for word in WORDS[:6]]
    assert cli.main(["eval", str(run), "--set", "gredy"]) == 2
    assert "did you mean 'greedy'" in capsys.readouterr().err


def test_a_rule_of_the_run_asks_no_measure_of_another_set_or_of_other_data(run: Path, tables: dict[str, Any]) -> None:
    first, _, last = tables["eval"]["sets"]
    sets = [first | {"measure": "exact_match"}, last | {"measure": None}]
    rule = {"eval": {"metric": "accuracy", "measure": None, "sets": sets}}
    assert evaluate_model(run, overrides=rule, num_prompts=1).accuracy is not None
    assert evaluate_model(run, overrides=rule, num_prompts=1, eval_set="greedy").accuracy is None
    assert evaluate_model(run, overrides=rule, num_prompts=1, data=first["dataset"]).accuracy is None
    high = {"eval": {"metric": "reward", "stop_at": 2.0}}
    assert evaluate_model(run, overrides=high, num_prompts=1, data=first["dataset"]).accuracy is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [({"num_prompts": 0}, "num_prompts = 0"), ({"num_samples": 0}, "at least one sample")],
)
def test_no_prompts_and_no_samples_are_not_those_of_the_set(
    given: dict[str, int], message: str, tables: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(resolve(tables), **given)


@pytest.mark.slow
def test_without_a_name_the_first_set_is_answered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads((run / "summary.json").read_text())["eval"]
    primary = evaluate_model(run)
    assert (primary.eval_set, primary.num_prompts) == ("own", 4)
    assert (primary.reward, primary.accuracy) == (summary["after"]["reward"], summary["after"]["accuracy"])
    assert cli.main(["eval", str(run), "--set", "greedy", "--num-prompts", "3"]) == 0
    assert "3 prompts of" in (told := capsys.readouterr().out)
    assert "the set greedy" in told
    assert evaluate_model(run, eval_set="greedy", num_prompts=3).num_samples == 2


def test_a_resumed_run_measures_the_same(run: Path, tables: dict[str, Any], tmp_path: Path) -> None:
    first = slipstream.run(tables, overrides={"steps": 2}, out=tmp_path / "run", display=False)
    slipstream.run(resume=first.out, overrides={"steps": 4}, display=False)
    whole, parts = evaluations(run), evaluations(tmp_path / "run")
    of_sets = [name for name in whole if name.startswith(("eval/", "eval_reward"))]
    assert {name: whole[name] for name in of_sets} == {name: parts[name] for name in of_sets}
    summaries = [json.loads((folder / "summary.json").read_text())["eval"] for folder in (run, tmp_path / "run")]
    assert summaries[0] == summaries[1]


def own_set(**fields: Any) -> dict[str, Any]:
    return {"eval.sets": [{"name": "one", **fields}]}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"eval.sets": [{"name": "one"}, {"name": "one"}]}, r"named twice\n  got:     one"),
        (own_set(name="a/b"), r"(?s)eval\.sets.*name"),
        (own_set(dataset="{splits}", split="tset"), r"(?s)no split 'tset'.*did you mean 'test'"),
        (own_set(dataset="absent.jsonl"), "dataset not found"),
        (own_set(prompt_column="promt"), r"(?s)no column 'promt'.*did you mean 'prompt'"),
        (own_set(template="{word}>"), "names a column that the row does not have"),
        (own_set(measure="regexp"), r"(?s)eval\.sets 'one' names no term.*did you mean 'regex'"),
        (own_set(dataset="{strange}"), "alphabet"),
        (own_set(num_prompts=26), "num_prompts = 26, of 25 rows"),
        (own_set(), "there are no training prompts"),
        (own_set() | {"prompts.eval_dataset": "{splits}"}, "held-out prompts are named twice"),
        (own_set() | {"prompts.dataset": None, "prompts.tasks": [{"name": "posts"}]}, "a set of prompts needs data"),
        (own_set(dataset="{splits}") | {"eval.metric": "accuracy", "eval.measure": None}, "no accuracy without"),
        (own_set(temperature=-1.0), r"(?s)eval\.sets.*temperature.*allowed"),
    ],
)
def test_bad_sets_are_refused_before_anything_starts(
    overrides: dict[str, Any], message: str, tables: dict[str, Any], tmp_path: Path
) -> None:
    rows = datasets.Dataset.from_list([{"prompt": word, "answer": word} for word in ("xy", "yx")])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "splits"))
    write(tmp_path / "strange.jsonl", [{"prompt": "żółw", "answer": "a"}])
    given = json.dumps(overrides)
    for name, path in (("splits", "splits"), ("strange", "strange.jsonl")):
        given = given.replace(f"{{{name}}}", str(tmp_path / path))
    with pytest.raises(ConfigError, match=message):
        slipstream.run(tables, overrides=json.loads(given), out=tmp_path / "run", display=False)
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_set_that_fits_no_message_is_refused(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "MAX_MESSAGE_BYTES", 2_000)
    with pytest.raises(ConfigError, match=r"'own' do not fit one message\n  got:     4 prompts x 9 samples"):
        slipstream.run(
            tables,
            overrides={"eval.sets": [tables["eval"]["sets"][0] | {"num_samples": 9}]},
            out=tmp_path / "run",
            display=False,
        )


@pytest.mark.parametrize("streaming", [pytest.param(False, marks=pytest.mark.slow), True])
def test_no_prompt_of_any_set_is_trained_on(streaming: bool, tables: dict[str, Any], tmp_path: Path) -> None:
    """Also where prompts are read as the run goes on; and sets may share prompts with each other."""
    both = {"dataset": write(tmp_path / "rows.jsonl", [{"prompt": word, "answer": word} for word in WORDS[:20]])}
    over = {
        "steps": 3,
        "eval.every": 0,
        "prompts.streaming": streaming,
        "eval.sets": [{"name": "first", **both, "num_prompts": 2}, {"name": "all", **both}],
    }
    result = slipstream.run(tables, overrides=over, out=tmp_path / "run", display=False)
    assert result.summary["data"]["sets"] == {"first": 2, "all": 20}
    trained = {json.loads(line)["prompt"] for line in (result.out / "rollouts.jsonl").read_text().splitlines()}
    assert trained <= set(WORDS[20:])
