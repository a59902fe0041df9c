"""Prompts that are handed over from Python, and what a run that goes on may be handed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream import api
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import PROMPTS_FILE, names_terms, resolve, resumed_config, save_config
from slipstream.evals.target import eval_target
from slipstream.models.tokenizer import CharTokenizer
from slipstream.prompts import build_prompts

ROWS = [{"question": f"q{i}", "solution": f"a{i}"} for i in range(40)]
RECIPE = {"prompts": {"tasks": [{"name": "chain_sum"}], "num_eval": 8}, "eval": {"num_prompts": 8}}


def given(folder: Path, prompts: Any, *layers: dict[str, Any]) -> slipstream.RunConfig:
    folder.mkdir()
    tables = RECIPE
    for layer in layers:
        tables = api.merge(tables, api.nested(layer))
    return api._with_prompts(resolve(tables), prompts, folder, api._kept(layers))


def test_prompts_replace_what_a_recipe_holds_out(tmp_path: Path) -> None:
    sets = {"eval.sets": [{"name": "own", "dataset": "theirs.jsonl"}]}
    config = api._with_prompts(resolve(RECIPE | sets), ["a", "b", "c"], tmp_path, {})
    assert (config.prompts.dataset, config.prompts.tasks) == (str(tmp_path / PROMPTS_FILE), [])
    assert (config.eval.sets, config.prompts.num_eval, config.eval.num_prompts) == ([], 1, 1)


def test_columns_that_were_named_stay(tmp_path: Path) -> None:
    columns = {"prompts.prompt_column": "question", "prompts.answer_column": "solution"}
    config = given(tmp_path / "a", ROWS, columns)
    assert (config.prompts.prompt_column, config.prompts.answer_column) == ("question", "solution")
    assert (config.prompts.num_eval, config.eval.num_prompts) == (4, 4), "a tenth is held out"
    given(tmp_path / "b", ["x", "y"], columns)
    assert json.loads((tmp_path / "b" / PROMPTS_FILE).read_text().splitlines()[0]) == {"question": "x"}


@pytest.mark.parametrize("is_resolved", [False, True])
def test_how_a_recipe_reads_its_own_data_goes_with_them(is_resolved: bool, tmp_path: Path) -> None:
    reading = {"dataset_config": "main", "dataset_split": "test", "streaming": True}
    reading |= {"messages_column": "chat", "between_periods": True}
    recipe = {"prompts": {"dataset": "org/name", "identity": "row", "num_eval": 2, **reading}, "eval.num_prompts": 2}
    recipe = resolve(recipe) if is_resolved else recipe
    config = api._with_prompts(api._resolved(recipe, None, None, ROWS), ["no period", "at all"], tmp_path, {})
    assert config.prompts.identity == "row"
    assert {name: getattr(config.prompts, name) for name in reading} == {
        "dataset_config": None,
        "dataset_split": "train",
        "streaming": False,
        "messages_column": None,
        "between_periods": False,
    }
    assert len(build_prompts(config, CharTokenizer()).all) == 2
    kept = given(tmp_path / "b", ["x. one. y", "x. two. y"], {"prompts.between_periods": True})
    assert kept.prompts.between_periods, "whoever gives the prompts has named it"


def test_chats_are_rows_with_their_messages_as_the_prompt(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
    api._check_prompts([chat, tuple(chat), "x"])
    given(tmp_path / "a", [chat, tuple(chat), "x"])
    lines = (tmp_path / "a" / PROMPTS_FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"prompt": chat}, {"prompt": chat}, {"prompt": "x"}]


def test_held_out_data_that_were_named_stay(tmp_path: Path) -> None:
    config = given(tmp_path / "a", ["x", "y"], {"prompts.eval_dataset": "test.jsonl"})
    assert (config.prompts.eval_dataset, config.prompts.num_eval) == ("test.jsonl", 8)
    sets = {"eval": {"sets": [{"name": "own", "dataset": "test.jsonl", "num_prompts": 5}]}}
    config = given(tmp_path / "b", ["x", "y"], sets)
    assert [one.name for one in config.eval.sets] == ["own"]


def test_all_rows_are_trained_on_unless_a_number_is_named(tmp_path: Path) -> None:
    assert given(tmp_path / "a", [f"p{i}" for i in range(30_000)]).prompts.num_train == 30_000
    assert given(tmp_path / "b", ROWS, {"prompts.num_train": 7}).prompts.num_train == 7
    layers = resolve(RECIPE | {"prompts": {**RECIPE["prompts"], "num_train": 9}}), {}
    assert api._kept(layers) == {"num_train": 9}
    assert api._kept((resolve(RECIPE), {})) == {}


@pytest.mark.parametrize("config", ["quickstart", RECIPE])
def test_rows_of_one_text_beside_a_recipe_of_tasks(config: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "Count.", "target": n} for n in range(20)]
    over = {"prompts": {"identity": "row"}, "warm_start.steps": 0, "prompts.template": "{question}"}
    resolved = api._with_prompts(api._resolved(config, over, None, rows), rows, tmp_path, {})
    prompts = build_prompts(resolved, CharTokenizer())
    assert sorted(one.columns["target"] for one in prompts.all) == list(range(20))
    assert len(prompts.eval) == 2


def test_a_run_that_was_moved_has_its_own_prompts(tmp_path: Path) -> None:
    """Another run may lie where it was."""
    save_config(given(tmp_path / "a", ["x", "y"]), tmp_path / "a" / "config.toml")
    (tmp_path / "a" / "model").mkdir()
    (tmp_path / "a" / "model" / "config.json").write_text("{}")
    (tmp_path / "a").rename(tmp_path / "b")
    given(tmp_path / "a", ["z", "w"])
    for config in (resumed_config(tmp_path / "b"), eval_target(tmp_path / "b")[1]):
        assert config.prompts.dataset == str(tmp_path / "b" / PROMPTS_FILE)


def test_rows_of_pandas_and_numpy(tmp_path: Path) -> None:
    """Numbers unboxed, arrays as lists, and nothing where a table has NaN for an answer."""
    rows = [{"prompt": f"p{i}", "answer": [np.float64("nan"), "a"][i % 2], "tests": np.array([i, 2])} for i in range(8)]
    config = given(tmp_path / "a", rows)
    assert json.loads((tmp_path / "a" / PROMPTS_FILE).read_text().splitlines()[1])["tests"] == [1, 2]
    prompts = build_prompts(resolve(config.model_dump(), {"warm_start.steps": 0}), CharTokenizer())
    assert sorted(str(one.answer) for one in prompts.all) == ["None"] * 4 + ["a"] * 4


def test_a_configuration_beside_a_resume_is_refused() -> None:
    for config in (resolve(RECIPE), RECIPE):
        with pytest.raises(ConfigError, match="keeps its configuration"):
            slipstream.run(config, resume="anywhere", display=False)


def test_terms_that_a_file_or_a_configuration_names_stay(tmp_path: Path) -> None:
    terms = {"terms": [{"function": "length", "weight": 0.1}]}
    file = tmp_path / "mine.toml"
    file.write_text("[[rewards.terms]]\nfunction = 'length'\nweight = 0.1\n")
    for named in (str(file), file, {"rewards": terms}, resolve(RECIPE | {"rewards": terms})):
        assert names_terms(named), named
    (tmp_path / "bare.toml").write_text("steps = 3\n")
    for other in ("quickstart", str(tmp_path / "bare.toml"), {"steps": 3}, resolve(RECIPE)):
        assert not names_terms(other), other


def good(completions: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def other(completions: list[str], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


class Silent:
    def reset(self) -> None: ...

    def step(self, message: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    "changed",
    [
        {"reward": other},
        {"reward": good, "reward_weights": [5.0]},
        {"environment": Silent},
        {"config": {"steps": 400}},
        {"prompts": np.array(["a", "b"])},
    ],
    ids=["reward", "weight", "environment", "tables", "prompts"],
)
def test_a_resumed_run_keeps_what_it_began_with(changed: dict[str, Any], tmp_path: Path) -> None:
    terms = {"rewards": {"terms": [{"function": "python:good"}]}}
    save_config(resolve(RECIPE | terms | {"model": {"max_positions": 2048}}), tmp_path / "config.toml")
    asked = {"reward": good, "resume": tmp_path} | changed
    with pytest.raises(ConfigError, match="a resumed run keeps its configuration"):
        slipstream.run(asked.pop("config", None), **asked)
