"""Recipes with published settings: each resolves offline and trains two steps on rows with its dataset's columns."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.core.jsonl import JsonlWriter
from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.tokenizer import char_tokenizer

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
    """A row of nlile/hendrycks-MATH-benchmark."""
    return {
        "problem": f"What is ${index} + 1$?",
        "solution": f"It is $\\boxed{{{index + 1}}}$.",
        "answer": str(index + 1),
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": f"train/{index}",
    }


def stylistic(index: int) -> dict[str, Any]:
    """A passage of a book: what lies between its first and its last period is the query."""
    return {"text": f"the end of one. Here is sentence {index}. Then comes another. And then"}


ROWS = {"tldr": tldr, "no_robots": no_robots, "gsm8k": gsm8k, "math": math, "stylistic": stylistic}


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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny random policy with a chat template, and a reward model with its tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = char_tokenizer(None)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}a:"
    config = ModelConfig(hidden_size=32, intermediate_size=48, num_layers=1, max_positions=256)
    policy = new_model(
        config, len(tokenizer), 0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    save_model(policy, folder / "policy", tokenizer)
    save_scalar_model(new_scalar_model(policy, head_init="reward", seed=1), folder / "reward", tokenizer)
    return {"policy": str(folder / "policy"), "reward": str(folder / "reward")}


@pytest.mark.parametrize("recipe", ROWS)
def test_two_steps(recipe: str, models: dict[str, str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(ROWS[recipe](index)) + "\n" for index in range(NUM_ROWS)), encoding="utf-8")
    published = resolve(recipe)
    overrides: dict[str, Any] = {
        "steps": 2,
        "groups_per_step": 2,
        "host": "inline",
        "model": {"path": models["policy"]},
        "prompts": {
            "dataset": str(rows),
            "dataset_config": None,
            "num_train": 12,
            "num_eval": 4,
            "max_prompt_tokens": 120,
        },
        "generator": {"num_slots": 8, "max_new_tokens": 6},
        "eval": {"num_prompts": 4, "num_slots": 8},
        "rewards": {"models": [{"path": models["reward"]}] if published.rewards.models else []},
        # A random model is never right; two groups make no eight parts.
        "loss": {"skip_no_signal": False, "whiten_parts": 1},
    }
    if "reward_model" in published.stages:
        overrides["rewards"] = {}
        overrides["reward_model"] = {
            "preferences": labels(tmp_path / "labels.jsonl"),
            "steps": 3,
            "batch_size": 4,
            "normalise_samples": 8,
        }
    result = slipstream.run(recipe, overrides=overrides, out=tmp_path / "run", display=False)
    assert result.summary["status"] == "done"
    assert result.summary["policy_version"] == 2
    trained = json.loads((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()[0])
    assert trained["prompt"], "rollouts show their prompts"
    if "reward_model" in published.stages:
        assert (tmp_path / "run" / "reward_model" / "model" / "config.json").is_file()
        assert trained["num_tokens"] == 6, "fixed length"
