"""What a run makes of `prompts.max_prompt_tokens = null`: slots for the longest prompt, no other configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.controller.build import default_pipeline
from slipstream.core.config import RunConfig
from slipstream.core.recipes import read_toml

TINY = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


def test_a_run_has_slots_for_its_longest_prompt_and_tells_of_dropped_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{i:0{60 if i < 10 else 9}}", "answer": str(i)} for i in range(40)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    built: list[RunConfig] = []

    def pipeline(config: RunConfig) -> Any:
        built.append(config)
        return default_pipeline(config)

    tables = {
        "steps": 1,
        "host": "inline",
        "groups_per_step": 2,
        "completions_per_group": 2,
        "model": TINY | {"max_positions": 32},
        "prompts": {"dataset": str(data), "num_eval": 4},
        "generator": {"num_slots": 8, "max_new_tokens": 8},
        "rewards": {"terms": [{"function": "exact_match"}], "num_workers": 1},
        "loss": {"skip_no_signal": False},
        "eval": {"num_prompts": 4, "num_slots": 8},
    }
    result = slipstream.run(tables, out=tmp_path / "run", pipeline=pipeline)
    assert built[0].prompts.max_prompt_tokens == 9
    assert "max_prompt_tokens" not in read_toml(result.out / "config.toml")["prompts"], "nobody asked for a limit"
    assert result.summary["data"] == {
        "num_train": 26,
        "num_eval": 4,
        "num_too_long": 10,
        "max_tokens": 24,
        "longest_tokens": 9,
        "sets": {},
    }
    assert "WARNING: 10 of 40 prompts (25%) have more than 24 tokens" in " ".join(capsys.readouterr().out.split())
