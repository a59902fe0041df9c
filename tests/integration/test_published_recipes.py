"""Recipes with published settings: each goes through its whole chain, on rows with its datasets' columns and splits.

Overrides are those of sizes, lengths, steps and paths alone.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

import slipstream
from slipstream.core.config import RunConfig
from slipstream.core.jsonl import JsonlWriter, read_jsonl
from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.tokenizer import char_tokenizer, load_tokenizer
from slipstream.stages.preferences import PreferenceLine
from slipstream.stages.reward_model import read_preferences

NUM_ROWS = 20
PADDING = 50259


def tldr(index: int) -> dict[str, Any]:
    """A row of vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144, less its tokens."""
    post = f"I have {index} cats.\nThey sleep all day long.\nWhat should I do with number {index}?"
    query = f"SUBREDDIT: r/pets\n\nTITLE: Cat {index}\n\nPOST: {post}\n\nTL;DR:"
    return {
        "id": f"t3_{index}",
        "subreddit": "pets",
        "title": f"Cat {index}",
        "post": post,
        "summary": f"{index} cats sleep.",
        "query": query,
        "reference_response": f" {index} cats sleep.<|endoftext|>",
    }


def no_robots(index: int) -> dict[str, Any]:
    """A row of HuggingFaceH4/no_robots."""
    prompt, answer = f"Name {index} rivers.", f"The Rhine, {index} times."
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"prompt": prompt, "prompt_id": f"{index:064x}", "messages": messages, "category": "Generation"}


def gsm8k(index: int) -> dict[str, Any]:
    """A row of openai/gsm8k."""
    return {
        "question": f"Ann has {index} apples and buys 2. How many?",
        "answer": f"{index} + 2 = <<{index}+2={index + 2}>>{index + 2}\n#### {index + 2}",
    }


def math(index: int) -> dict[str, Any]:
    """A row of DigitalLearningGmbH/MATH-lighteval."""
    return {
        "problem": f"What is ${index} + 1$?",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": f"It is $\\boxed{{{index + 1}}}$.",
    }


def math500(index: int) -> dict[str, Any]:
    """A row of HuggingFaceH4/MATH-500."""
    return {**math(index), "answer": str(index + 1), "subject": "Prealgebra", "level": 1, "unique_id": f"test/{index}"}


def stylistic(index: int) -> dict[str, Any]:
    """A passage of a book: what lies between its first and its last period is the query."""
    return {"text": f"the end of one. Here is sentence {index}. Then comes another. And then"}


def feedback(index: int) -> dict[str, Any]:
    """A row of mnoukhov/summarize_from_feedback_oai_preprocessing_1706381144_relabel_pythia6.9b."""
    row = tldr(index)
    texts = {"chosen": f" {index} cats sleep.<eos>", "rejected": f" Cats, {index}.<eos>"}
    return {"prompt": row["query"], **texts, "chosen_score": 1.0, "rejected_score": -1.0}


def labels(path: Path) -> str:
    """Records like OpenAI's, through the script that imports them."""
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "import_lm_human_preferences.py"))
    tokenizer = char_tokenizer(None)
    writer = JsonlWriter(path)
    for index in range(NUM_ROWS):
        samples = {f"sample{k}": [20 + k + index, 30 + k, 40] for k in range(4)}
        record = {"query": [15 + index, 16, PADDING, PADDING], **samples, "best": index % 4}
        writer.write(script["preference"](record, index, tokenizer, 10))
    writer.close()
    return str(path)


def test_imported_labels_take_the_place_of_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 labels the default holds out two; a file that had them already, too, would have trained on these."""
    main = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "import_lm_human_preferences.py"))["main"]
    tokenizer = SimpleNamespace(from_pretrained=lambda _: char_tokenizer(None))
    monkeypatch.setitem(main.__globals__, "AutoTokenizer", tokenizer)
    record = {"query": [15, PADDING], **{f"sample{k}": [20 + k] for k in range(4)}, "best": 2}
    (source := tmp_path / "labels.json").write_text(json.dumps([record] * 20))
    out = tmp_path / "new" / "preferences.jsonl"
    for options in (["--held-out", "0"], []):
        monkeypatch.setattr(sys, "argv", ["script", str(source), str(out), "--tokenizer", "models/gpt2", *options])
        main()
    lines = list(read_jsonl(out, PreferenceLine))
    assert [index for index, line in enumerate(lines) if line.is_held_out] == [9, 19]
    assert [line.prompt_id for line in lines] == [f"label-{index}" for index in range(20)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny random policy with a chat template, one without (as base models are), and a reward model."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer, plain = char_tokenizer(None), char_tokenizer(None)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
    config = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=1, max_positions=256)
    policy = new_model(
        config, len(tokenizer), 0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    save_model(policy, folder / "policy", tokenizer)
    save_model(policy, folder / "plain", plain)
    save_scalar_model(new_scalar_model(policy, head_init="reward", seed=1), folder / "reward", tokenizer)
    return {name: str(folder / name) for name in ("policy", "plain", "reward")}


def data(folder: Path, row: Callable[[int], dict[str, Any]], *splits: str) -> str:
    """A dataset with these splits, whose rows are all different."""
    made = {
        split: datasets.Dataset.from_list([row(100 * at + index) for index in range(NUM_ROWS)])
        for at, split in enumerate(splits)
    }
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return str(folder)


def small(published: RunConfig, models: dict[str, str], source: str, **of_sets: str) -> dict[str, Any]:
    """The recipe in small, on the data at `source`; sets that name other data have theirs."""
    sets = [
        one.model_copy(update={"num_prompts": 4, "dataset": of_sets[one.name] if one.dataset else None})
        for one in published.eval.sets
    ]
    return {
        "steps": 2,
        "groups_per_step": 2,
        "host": "inline",
        "model.path": published.model.path if published.model.path == "stage:sft" else models["policy"],
        "prompts.dataset": source,
        "prompts.max_prompt_tokens": 120,
        "generator": {"num_slots": 8, "max_new_tokens": 6},
        "eval.num_slots": 8,
        "eval.sets": [one.model_dump() for one in sets],
    }


def run(recipe: str, overrides: dict[str, Any], folder: Path) -> dict[str, Any]:
    summary = slipstream.run(recipe, overrides=overrides, out=folder, display=False).summary
    assert summary["status"] == "done"
    assert summary["policy_version"] == 2
    return dict(summary)


def prompts_in(run_dir: Path, name: str) -> set[str]:
    """The prompts of the rollouts or of the samples of a run."""
    text = (run_dir / name).read_text()
    rows = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
    return {row["prompt"] for row in rows}


def test_gsm8k_is_trained_on_one_split_and_measured_on_the_other(models: dict[str, str], tmp_path: Path) -> None:
    source = data(tmp_path / "gsm8k", gsm8k, "train", "test")
    summary = run("gsm8k", small(resolve("gsm8k"), models, source), tmp_path / "run")
    template = resolve("gsm8k").prompts.template
    texts = {
        split: {template.format(question=gsm8k(at + index)["question"]) for index in range(NUM_ROWS)}
        for split, at in (("train", 0), ("test", 100))
    }
    assert prompts_in(tmp_path / "run", "rollouts.jsonl") <= texts["train"]
    assert prompts_in(tmp_path / "run", "samples.json") <= texts["test"]
    assert summary["data"]["num_train"] == NUM_ROWS
    assert summary["data"]["sets"] == {"test": 4}
    assert summary["eval"]["primary"] == "test"
    assert summary["eval"]["after"]["accuracy"] == 0.0, "a random model is never right"


def test_tldr_from_sft_to_the_gold_win_rate(models: dict[str, str], tmp_path: Path) -> None:
    source = data(tmp_path / "tldr", tldr, "train", "validation")
    overrides = small(resolve("tldr"), models, source) | {
        "prompts.max_prompt_tokens": 180,
        "sft": {"path": models["policy"], "batch_size": 8},
        "reward_model": {"preferences": data(tmp_path / "feedback", feedback, "train"), "batch_size": 8},
        "gold.models": [{"path": models["reward"]}],
    }
    tokenizer = load_tokenizer(models["policy"])
    preferences = read_preferences(resolve("tldr", overrides), tmp_path, tokenizer)
    assert not preferences.held_out
    assert tokenizer.decode(preferences.train[0].candidates[0]).replace(" ", "") == "0catssleep.<eos>", "one EOS token"
    summary = run("tldr", overrides, tmp_path / "run")
    assert summary["stages"]["sft"]["num_demonstrations"] == NUM_ROWS
    assert summary["stages"]["sft"]["steps"] == summary["stages"]["reward_model"]["steps"] == 3
    assert summary["stages"]["reward_model"]["num_preferences"] == NUM_ROWS
    found = summary["evaluation"]
    assert (found["num_prompts"], found["temperature"]) == (4, 0.01)
    for moment in ("before", "after"):
        assert 0.0 <= found[moment]["gold"]["win_rate"]["mean"] <= 1.0
        assert len(found[moment]["reward_models"]) == 1


@pytest.mark.slow
def test_no_robots_from_sft_to_the_judge(models: dict[str, str], tmp_path: Path) -> None:
    source = data(tmp_path / "no_robots", no_robots, "train", "test")
    (tmp_path / "judge.py").write_text("def longer(prompt, a, b):\n    return 'a' if len(a) > len(b) else 'b'\n")
    overrides = small(resolve("no_robots"), models, source) | {
        "sft": {"path": models["plain"], "dataset": source, "batch_size": 8},
        "preferences.num_prompts": 5,
        "judge": {"function": f"{tmp_path / 'judge.py'}:longer", "base_url": None},
        "reward_model.batch_size": 8,
    }
    summary = run("no_robots", overrides, tmp_path / "run")
    assert summary["stages"]["sft"]["num_demonstrations"] == NUM_ROWS
    lines = [json.loads(line) for line in (tmp_path / "run/preferences/preferences.jsonl").read_text().splitlines()]
    pairs = [[one["is_reference"] for one in line["candidates"]] for line in lines]
    assert len({line["prompt"] for line in lines}) == 5
    assert 15 < len(lines) <= 5 * 6, "of four candidates, ties apart"
    assert sum(map(any, pairs)) == 15, "three with each human answer"
    assert all(line["prompt"].endswith("<|assistant|>\n") for line in lines)
    assert summary["stages"]["reward_model"]["num_preferences"] == len(lines)
    assert summary["evaluation"]["num_prompts"] == 4
    saved = load_tokenizer(tmp_path / "run" / "model").chat_template
    assert saved == resolve("no_robots").model.chat_template, "the base model has none"
    judged = summary["evaluation"]["after"]["judge"]
    assert sum(judged[f"num_{outcome}"] for outcome in ("wins", "ties", "losses")) == 4


@pytest.mark.slow
def test_math_on_three_sets(models: dict[str, str], tmp_path: Path) -> None:
    source = data(tmp_path / "math", math, "train", "test")
    others = {
        "math500": data(tmp_path / "math500", math500, "none", "test"),
        "gsm8k": data(tmp_path / "gsm8k", gsm8k, "train", "test"),
    }
    overrides = small(resolve("math"), models, source, **others) | {"prompts.max_prompt_tokens": 180}
    summary = run("math", overrides, tmp_path / "run")
    assert summary["data"]["sets"] == {"math500": 4, "gsm8k": 4, "math_test": 4}
    assert summary["data"]["num_train"] == NUM_ROWS
    for found in (summary["eval"], *summary["eval"]["sets"].values()):
        assert found["after"]["accuracy"] == 0.0


def test_stylistic_from_labels(models: dict[str, str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(stylistic(index)) + "\n" for index in range(NUM_ROWS)), encoding="utf-8")
    overrides = small(resolve("stylistic"), models, str(rows)) | {
        "prompts": {"dataset": str(rows), "num_train": 12, "num_eval": 4, "max_prompt_tokens": 120},
        "eval": {"num_prompts": 4, "num_slots": 8},
        "loss.whiten_parts": 1,  # two groups make no eight parts
        "reward_model": {
            "preferences": labels(tmp_path / "labels.jsonl"),
            "steps": 3,
            "batch_size": 4,
            "normalise_samples": 8,
        },
    }
    for name in ("prompts.dataset", "prompts.max_prompt_tokens", "eval.num_slots", "eval.sets"):
        del overrides[name]
    run("stylistic", overrides, tmp_path / "run")
    trained = json.loads((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()[0])
    assert trained["num_tokens"] == 6, "fixed length"
    assert (tmp_path / "run" / "reward_model" / "model" / "config.json").is_file()
