"""Completions end at each end token that the model's files name, in a run and in an evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AddedToken

import slipstream
from slipstream.core.run_log import read_rollouts
from slipstream.core.sections import ModelConfig
from slipstream.evals.evaluate import evaluate_model
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer

ENDS, ORDINARY = "02468abcde", "1357"
FIELDS = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
RUN: dict[str, Any] = {
    "recipe": "ends",
    "steps": 1,
    "groups_per_step": 4,
    "completions_per_group": 4,
    "host": "inline",
    "max_staleness": 0,
    "prompts": {"tasks": [{"name": "chain_sum"}], "num_train": 20, "num_eval": 8},
    "generator": {"max_new_tokens": 60, "num_slots": 16},
    "loss": {"skip_no_signal": False},
    "warm_start": {"steps": 0},
    "eval": {"num_prompts": 8, "num_slots": 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says anything, and whose generation_config.json ends completions with digits and letters, too.

    The odd digits are ordinary tokens.
    """
    folder, tokenizer = tmp_path_factory.mktemp("models") / "model", char_tokenizer()
    tokenizer.add_tokens([AddedToken(end, normalized=False) for end in ENDS])
    save_model(new_model(ModelConfig(**FIELDS), len(tokenizer), 0, eos_token_id=1, pad_token_id=0), folder, tokenizer)
    ends = [tokenizer.convert_tokens_to_ids(digit) for digit in ENDS + ORDINARY]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *ends]}))
    return folder


@pytest.mark.parametrize("ends", [True, False])
def test_completions_end_with_the_model(folder: Path, tmp_path: Path, ends: bool) -> None:
    tables = RUN | {"model": {"path": str(folder)}, "generator": RUN["generator"] | {"stop_at_eos": ends}}
    slipstream.run(tables, out=tmp_path / "run", display=False)
    rollouts = read_rollouts(tmp_path / "run" / "rollouts.jsonl")
    said = [(one.completion, one.finish_reason, one.num_tokens) for one in rollouts]
    answers = [one for one in evaluate_model(folder, recipe=tables, num_samples=2).answers if one.temperature]
    for texts in (said, [(one.text, one.finish_reason, one.num_tokens) for one in answers]):
        assert len(texts) >= 8
        with_ends = sum(any(end in text for end in ENDS) for text, _, _ in texts)
        if ends:
            assert not with_ends
            assert any(one in text for text, _, _ in texts for one in ORDINARY)
            assert sum(reason == "stop" for _, reason, _ in texts) > len(texts) / 2, "one token in nine is an end"
            assert all(num == 60 for _, reason, num in texts if reason != "stop")
        else:
            assert with_ends > len(texts) / 2
            assert all((reason, num) == ("length", 60) for _, reason, num in texts)


@pytest.mark.parametrize("end", ["<eos>", "<pad>"])
def test_a_run_says_where_chats_end_and_completions_do_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    template = "{% for m in messages %}{{ m.content }}" + end + "{% endfor %}"
    model = {"path": str(folder), "chat_template": template}
    slipstream.run(RUN | {"model": model, "prompts": RUN["prompts"] | {"chat": True}}, out=tmp_path / "run")
    line = "ends a turn with <pad>, completions do not; generator.stop_token_ids = [0]"
    assert (line in capsys.readouterr().out) == (end == "<pad>")
