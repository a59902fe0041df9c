"""A file that `trl grpo --config` takes is converted, and `slipstream run` trains the recipe as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer

FILE = """
model_name_or_path: model
dataset_name: rows.jsonl
reward_funcs: [own_reward.share_of_a]
output_dir: trl-out
use_cpu: true
learning_rate: 1e-3
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 4
num_generations: 4
num_train_epochs: 1
max_completion_length: 8
beta: 0.04
eval_strategy: "no"
"""
REWARD = """
def share_of_a(completions, **columns):
    assert len(completions) == 4, "a group, as TRL gives whole batches"
    return [text.count("a") / 8 for text in completions]
"""


@pytest.mark.slow
def test_a_file_of_trl_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = char_tokenizer("abcdefgh")
    shape = ModelConfig(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2)
    eos = tokenizer.eos_token_id
    save_model(new_model(shape, len(tokenizer), 0, eos_token_id=eos, pad_token_id=0), tmp_path / "model", tokenizer)
    texts = [a + b + c for a in "abcd" for b in "efgh" for c in "abcdefgh"][:40]
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    Path("own_reward.py").write_text(REWARD)
    Path("grpo.yaml").write_text(FILE)
    assert cli.main(["import-config", "grpo.yaml", "--rows", "40", "--out", "grpo.toml"]) == 0
    assert cli.main(["run", "grpo.toml", "--out", "run"]) == 0
    steps = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in steps if "loss" in line]
    assert len(steps) == 10, "40 prompts, 4 in each batch"
    rates = [line["lr"] for line in steps]
    assert rates == sorted(rates, reverse=True)
    assert all(line["staleness_max"] == 0 for line in steps)
    assert all(line["kl_k3"] >= 0 for line in steps)
    assert max(line["ratio_max"] for line in steps) > 1.0, "the second update of a step has left the sampler"
