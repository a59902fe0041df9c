"""A run on streamed prompts that is stopped and goes on has the prompts of one that was never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.core.run_log import read_rollouts


def prompts_of(run: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for one in read_rollouts(run / "rollouts.jsonl"):
        assert found.setdefault(one.ordinal, one.prompt) == one.prompt
    return found


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


@pytest.mark.slow
def test_a_resumed_stream_goes_on_where_it_was(tiny: dict[str, Any], tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(40)))
    overrides = tiny | {
        "prompts": {"dataset": str(data), "streaming": True, "shuffle_buffer": 8, "num_eval": 1},
        "eval": {"num_prompts": 1, "num_slots": 8},
        "loss": {"skip_no_signal": False},
        "model": {**tiny["model"], "max_positions": 64},
        "generator": {"num_slots": 16, "max_new_tokens": 8},
    }
    del overrides["warm_start"]
    tables = {"host": "inline", **overrides}
    for name, steps in (("whole", 14), ("stopped", 6)):
        run = {**tables, "steps": steps}
        slipstream.run(run, reward=length, out=tmp_path / name, display=False)
    slipstream.run(resume=tmp_path / "stopped", overrides={"steps": 14}, reward=length, display=False)
    whole, resumed = prompts_of(tmp_path / "whole"), prompts_of(tmp_path / "stopped")
    assert len(whole) == 56, "more than a pass"
    assert resumed == whole
