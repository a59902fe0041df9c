"""Data of one's own through the stages: chats and held-out demonstrations, reference answers, pairs of texts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer, load_tokenizer
from slipstream.stages.named import resolve
from slipstream.stages.preference_data import positions_from
from slipstream.stages.sft import stage_demonstrations

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def chat(index: int) -> list[dict[str, str]]:
    """Two questions and answers, the first ones under a system message every other time."""
    turns = [
        {"role": "user", "content": f"what is {index}?"},
        {"role": "assistant", "content": "a number" + "!" * (index % 3)},
        {"role": "user", "content": f"and {index + 1}?"},
        {"role": "assistant", "content": f"one more than {index}"},
    ]
    return [{"role": "system", "content": "count"}, *turns] if index % 2 else turns


CHATS = [chat(index) for index in range(12)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def record_of(run: Path, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / stage / "stage.json").read_text())
    return found


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    config = ModelConfig(**SMALL, max_positions=128)
    model = new_model(config, len(tokenizer), 0, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    save_model(model, folder, tokenizer)
    return folder


def expected_targets(tokenizer: PreTrainedTokenizerBase, messages: Any, loss_on: str) -> tuple[list[int], np.ndarray]:
    """A chat's tokens and which of them are learned, as transformers' template renders it, up to its last answer."""
    found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    tokens, is_answer = found["input_ids"], np.array(found["assistant_masks"], dtype=bool)
    end = int(np.flatnonzero(is_answer)[-1]) + 1
    tokens, is_answer = tokens[:end], is_answer[:end]
    if loss_on == "all":
        return tokens, np.arange(end) > 0
    return tokens, np.arange(end) > int(np.flatnonzero(~is_answer)[-1])


def negative_logprobs(policy: Path, loss_on: str) -> Iterator[np.ndarray]:
    """Of what each chat teaches, by transformers' model."""
    tokenizer, model = load_tokenizer(policy), AutoModelForCausalLM.from_pretrained(policy)
    for messages in CHATS:
        tokens, is_learned = expected_targets(tokenizer, messages, loss_on)
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
        of_targets = logprobs[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
        yield -of_targets[is_learned[1:]]


@pytest.mark.parametrize("loss_on", ["completions", "all"])
def test_chats_teach_their_last_answer_or_everything(loss_on: str, policy: Path, tmp_path: Path) -> None:
    """The losses of the training part, before the first update, and of the held-out part add up to transformers'."""
    data = write(tmp_path / "chats.jsonl", [{"messages": messages} for messages in CHATS])
    tables: dict[str, Any] = {
        "stages": ["sft"],
        "host": "inline",
        "model": {"path": "stage:sft"},
        "prompts": {"dataset": data, "max_prompt_tokens": 100},
        "sft": {
            "path": str(policy),
            "dataset": data,
            "loss_on": loss_on,
            "held_out": 0.25,
            "batch_size": 9,
            "steps": 30,
            "optimizer": {"lr": 1e-2},
        },
    }
    slipstream.run(tables, out=tmp_path / "run", display=False)
    record = record_of(tmp_path / "run", "sft")
    assert (record["num_demonstrations"], record["num_held_out"], record["num_too_long"]) == (9, 3, 0)
    first = json.loads((tmp_path / "run" / "sft" / "metrics.jsonl").read_text().splitlines()[0])
    before, after = record["held_out"]["before"], record["held_out"]["after"]
    expected = list(negative_logprobs(policy, loss_on))
    assert first["num_tokens"] + before["num_tokens"] == sum(map(len, expected))
    total = first["loss"] * first["num_tokens"] + before["loss"] * before["num_tokens"]
    assert total == pytest.approx(sum(float(chat.sum()) for chat in expected), rel=1e-5)
    assert after["num_tokens"] == before["num_tokens"]
    assert after["loss"] < 0.7 * before["loss"]
    assert after["accuracy"] > before["accuracy"] + 0.1


def test_demonstrations_that_cannot_be_split(policy: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "ab>", "completion": "ba"}, {"prompt": "ab>", "completion": "b"}]
    data = write(tmp_path / "rows.jsonl", rows)
    tables: dict[str, Any] = {
        "stages": ["sft"],
        "host": "inline",
        "model": {"path": "stage:sft"},
        "prompts": {"dataset": data},
        "sft": {"path": str(policy), "dataset": data, "steps": 1, "batch_size": 2, "held_out": 0.4},
    }
    slipstream.run(tables, out=tmp_path / "run", display=False)
    record = record_of(tmp_path / "run", "sft")
    assert (record["num_demonstrations"], record["num_held_out"]) == (2, 0), "a prompt is on one side"
    assert record["held_out"] is None
    tables["sft"]["held_out"] = 0.6
    with pytest.raises(ConfigError, match="no demonstrations to train on"):
        slipstream.run(tables, out=tmp_path / "none", display=False)


SAID = {"role": "assistant", "content": "Hello!"}


@pytest.mark.parametrize("column", ["completion", "answer"])
def test_a_completion_may_be_the_assistants_message(column: str, policy: Path, tmp_path: Path) -> None:
    """TRL's conversational form teaches what the same text teaches."""
    tokenizer = load_tokenizer(policy)
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], column: [SAID]},
        {"prompt": [{"role": "user", "content": "ho"}], column: [SAID | {"tool_calls": None}]},
        {"prompt": "plain", column: "Hello!"},
        {"messages": [{"role": "user", "content": "hu"}, SAID], column: [{"role": "user", "content": "?"}]},
    ]
    sft = {"dataset": write(tmp_path / "rows.jsonl", rows), "completion_column": column}
    config = resolve({"stages": ["sft"], "model": {"path": "stage:sft"}, "prompts": {"dataset": "d"}, "sft": sft})
    learned, _ = stage_demonstrations(config, tokenizer)
    assert [tokenizer.decode(completion) for _, completion in learned] == ["Hello!<eos>"] * 4


@pytest.mark.parametrize(
    "completion",
    [
        [],
        [{"role": "user", "content": "Hello!"}],
        [{"role": "user", "content": "hi"}, SAID],
        [SAID | {"content": [{"type": "text", "text": "Hello!"}]}],
        [SAID | {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}],
        SAID,
        ["Hello!"],
    ],
)
def test_a_completion_that_is_no_text_and_no_answer_is_refused(completion: object, tmp_path: Path) -> None:
    """Its JSON would be learned."""
    rows = [{"prompt": "p", "completion": "Hello!"}, {"prompt": "q", "completion": completion}]
    sft = {"dataset": write(tmp_path / "rows.jsonl", rows)}
    config = resolve({"stages": ["sft"], "model": {"path": "stage:sft"}, "prompts": {"dataset": "d"}, "sft": sft})
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 2: the completion is neither text nor"):
        stage_demonstrations(config, char_tokenizer())


@pytest.mark.parametrize(
    ("source", "own", "found"),
    [
        ("sft", {}, r"no split 'test'"),
        ("sft", {"dataset_split": "train_sft"}, ["c"]),
        ("sft", {"dataset_split": "train_sft", "dataset_config": "other"}, r"'other' not found.*sft\.dataset_config"),
        ("prompts", {}, ["a"]),
        ("prompts", {"dataset_config": "other", "dataset_split": "train"}, ["b"]),
    ],
)
def test_demonstrations_are_of_their_own_configuration_and_split(
    source: str, own: dict[str, str], found: str | list[str], tmp_path: Path
) -> None:
    """Those of [prompts] count where they are of the same data set, its split also of another one."""
    files = {"prompts": {"main": ("test", "a"), "other": ("train", "b")}, "sft": {"default": ("train_sft", "c")}}
    for folder, configurations in files.items():
        (tmp_path / folder).mkdir()
        named = "".join(
            f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {name}.jsonl\n"
            for name, (split, _) in configurations.items()
        )
        (tmp_path / folder / "README.md").write_text(f"---\nconfigs:\n{named}---\n")
        for name, (_, text) in configurations.items():
            write(tmp_path / folder / f"{name}.jsonl", [{"prompt": "q", "completion": text}])
    prompts = {"dataset": str(tmp_path / "prompts"), "dataset_config": "main", "dataset_split": "test"}
    tables = {"stages": ["sft", "rl"], "model": {"path": "stage:sft"}, "prompts": prompts}
    config = resolve(tables | {"sft": {"dataset": str(tmp_path / source), **own}})
    tokenizer = char_tokenizer()
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=f"(?s){found}"):
            stage_demonstrations(config, tokenizer)
        return
    learned, _ = stage_demonstrations(config, tokenizer)
    assert [tokenizer.decode(completion[:-1]) for _, completion in learned] == found


def test_references_score_zero_on_average_under_reference_bias(tmp_path: Path) -> None:
    """By transformers' classifier and config.json's `score_bias`, on the references of all training prompts."""
    num_prompts = 100
    overrides = {
        "stages": ["preferences", "reward_model"],
        "host": "inline",
        "model": SMALL,
        "prompts": {"num_train": num_prompts, "num_eval": 10},
        "generator": {"num_slots": 16},
        "warm_start": {"steps": 0},
        "eval": {"num_prompts": 10},
        "gold": {"terms": [{"function": "task"}]},
        "preferences": {"num_prompts": num_prompts, "samples_per_prompt": 2, "with_reference": True},
        "reward_model": {
            "normalise": "reference_bias",
            "normalise_samples": 20,
            "batch_size": 16,
            "optimizer": {"lr": 3e-3},
        },
    }
    run = tmp_path / "run"
    slipstream.run("quickstart", overrides=overrides, out=run, display=False)
    references: dict[str, list[int]] = {}
    for line in map(json.loads, (run / "preferences" / "preferences.jsonl").read_text().splitlines()):
        for candidate in line["candidates"]:
            if candidate["is_reference"]:
                references[line["prompt_id"]] = line["prompt_tokens"] + candidate["tokens"]
    assert len(references) == num_prompts, "a random policy never says the right answer"
    model = AutoModelForSequenceClassification.from_pretrained(run / "reward_model" / "model")
    with torch.no_grad():
        scores = [float(model(torch.tensor([tokens])).logits[0, 0]) for tokens in references.values()]
    assert np.std(scores) > 0.01
    assert abs(model.config.score_bias) > 0.1
    assert np.mean(scores) + model.config.score_bias == pytest.approx(0.0, abs=1e-4)
    record = record_of(run, "reward_model")
    assert record["sample_score_mean"] == pytest.approx(0.0, abs=1e-5)
    assert record["sample_score_std"] == pytest.approx(np.std(scores), rel=1e-3)


def pairs(*, num_prompts: int) -> list[dict[str, str]]:
    """Three pairs of each prompt: whoever says the prompt's word again is preferred."""
    words = [f"{chr(97 + index % 26)}{chr(97 + index // 26)}" for index in range(num_prompts)]
    return [
        {"prompt": word, "chosen": f"yes{ending}", "rejected": f"no{ending}"}
        for word in words
        for ending in ("", "!", "?")
    ]


def test_pairs_of_texts_make_a_reward_model(tmp_path: Path) -> None:
    """What is read is prompt by its template and text up to the scored token; whole prompts are held out."""
    rows = pairs(num_prompts=40)
    rows += [{"prompt": "same", "chosen": "well. yes", "rejected": "well. no"}]  # all that is scored is equal
    data = write(tmp_path / "pairs.jsonl", rows)
    tables: dict[str, Any] = {
        "stages": ["reward_model"],
        "host": "inline",
        "model": SMALL,
        "prompts": {"dataset": data, "template": "{question}>", "max_prompt_tokens": 8},
        "rewards": {"truncate_token": char_tokenizer().convert_tokens_to_ids(".")},
        "preferences": {"held_out": 0.25},
        "reward_model": {
            "preferences": data,
            "normalise": "none",
            "steps": 40,
            "batch_size": 16,
            "optimizer": {"lr": 5e-3},
        },
    }
    run = tmp_path / "run"
    slipstream.run(tables, out=run, display=False)
    record = record_of(run, "reward_model")
    assert (record["num_preferences"], record["num_held_out"]) == (90, 30)
    assert record["held_out_accuracy"] == 1.0

    tokenizer = load_tokenizer(run / "reward_model" / "model")
    model = AutoModelForSequenceClassification.from_pretrained(run / "reward_model" / "model")

    def score(prompt: str, text: str) -> float:
        tokens = tokenizer(f"{prompt}>{text}")["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            return float(model(torch.tensor([tokens])).logits[0, 0])

    assert all(score("zz", f"yes{ending}") > score("zz", f"no{ending}") for ending in ("", "!", "?"))

    write(tmp_path / "pairs.jsonl", rows[-1:])
    with pytest.raises(ConfigError, match="no preferences to train on") as refused:
        slipstream.run(tables, out=tmp_path / "none", display=False)
    assert "1 of equal completions" in str(refused.value)
    write(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b"}])
    with pytest.raises(ConfigError, match="line 1 is no preference"):
        slipstream.run(tables, out=tmp_path / "torn", display=False)
    write(tmp_path / "pairs.jsonl", [*rows, {"prompt": "a", "chosen": "b", "rejected": "caf\u00e9"}])
    with pytest.raises(ConfigError, match=r"a completion of .* not in the alphabet") as refused:
        slipstream.run(tables, out=tmp_path / "unknown", display=False)
    assert "U+00E9" in str(refused.value)
    write(tmp_path / "pairs.jsonl", [*rows, {"prompt": "a", "chosen": "b", "rejected": "c", "question": "d"}])
    with pytest.raises(ConfigError, match="a column 'question' beside 'prompt'"):
        slipstream.run(tables, out=tmp_path / "two", display=False)


def test_what_a_reward_model_cannot_read_is_left_out_and_counted(tmp_path: Path) -> None:
    """A pair, and a reference that it would be normalised on when all updates are made."""
    questions = [{"prompt": word, "answer": f"yes {word}" + "!" * (40 * (word == "c"))} for word in "abcd"]
    rows = pairs(num_prompts=4)
    tables: dict[str, Any] = {
        "stages": ["reward_model"],
        "host": "inline",
        "model": SMALL | {"max_positions": 32},
        "prompts": {
            "dataset": write(tmp_path / "questions.jsonl", questions),
            "num_eval": 1,
            "template": "{question}>",
            "max_prompt_tokens": 8,
        },
        "generator": {"max_new_tokens": 16},
        "eval": {"num_prompts": 1},
        "preferences": {"held_out": 0.0},
        "reward_model": {
            "preferences": write(tmp_path / "pairs.jsonl", [*rows, rows[0] | {"rejected": "no" * 16}]),
            "normalise": "reference_bias",
            "steps": 1,
            "batch_size": 4,
        },
    }
    slipstream.run(tables, out=tmp_path / "run", display=False)
    record = record_of(tmp_path / "run", "reward_model")
    assert (record["num_preferences"], record["num_too_long"]) == (12, 1)
    assert record["sample_score_mean"] == pytest.approx(0.0, abs=1e-5)
    assert (tmp_path / "run" / "reward_model" / "model" / "config.json").exists()

    write(tmp_path / "pairs.jsonl", [rows[0] | {"rejected": "no" * 16}])
    tables |= {"stages": ["sft", "reward_model"], "sft": {"steps": 1, "batch_size": 2}}
    with pytest.raises(ConfigError, match=r"no preferences to train on(?s:.*)1 too long"):
        slipstream.run(tables, out=tmp_path / "none", display=False)
    assert not (tmp_path / "none" / "sft").exists(), "before the first stage"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ({}, 24),
        ({"reward_model": {"path": "stage:sft"}}, 24),
        ({"reward_model": {"path": "stage:dpo"}}, 24),
        ({"reward_model": {"path": "long"}}, 40),
        ({"sft": {"path": None}}, 64),
    ],
)
def test_the_positions_of_models_that_are_not_there_yet(paths: dict[str, Any], expected: int, tmp_path: Path) -> None:
    for name, max_positions in (("short", 24), ("long", 40)):
        config = ModelConfig(**SMALL, max_positions=max_positions)
        save_model(new_model(config, len(char_tokenizer()), 0), tmp_path / name, char_tokenizer())
    tables: dict[str, Any] = {
        "stages": ["sft", "preferences", "dpo", "reward_model"],
        "model": {"path": "stage:sft", "max_positions": 64},
        "generator": {"max_new_tokens": 16},
        "prompts": {"max_prompt_tokens": 8},
        "sft": {"path": str(tmp_path / "short")},
    }
    for section, fields in paths.items():
        given = {name: str(tmp_path / path) if path == "long" else path for name, path in fields.items()}
        tables[section] = tables.get(section, {}) | given
    config = resolve("quickstart", {name: table for name, table in tables.items() if table != {"path": None}})
    assert positions_from(config, config.reward_model.path) == expected


def test_preferences_in_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    candidate = {"text": "x", "tokens": [5, 1]}
    line = {
        "prompt_id": "p",
        "prompt": "q",
        "prompt_tokens": [4],
        "candidates": [candidate, candidate | {"tokens": [50_000, 1]}],
        "best": 0,
        "is_held_out": False,
    }
    data = write(tmp_path / "preferences.jsonl", [line])
    tables: dict[str, Any] = {
        "stages": ["reward_model"],
        "host": "inline",
        "model": SMALL,
        "prompts": {"dataset": data},
        "reward_model": {"preferences": data, "normalise": "none"},
    }
    with pytest.raises(ConfigError, match="tokens of another tokenizer"):
        slipstream.run(tables, out=tmp_path / "run", display=False)
