"""A run on streamed prompts that is stopped and goes on has the prompts of one that was never stopped."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.controller.executors import Executors
from slipstream.core.run_log import read_rollouts
from slipstream.core.types import Prompt
from slipstream.prompts import build
from slipstream.prompts.streamed import Batches, StreamedPrompts


def prompts_of(run: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for one in read_rollouts(run / "rollouts.jsonl"):
        assert found.setdefault(one.ordinal, one.prompt) == one.prompt
    return found


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


@pytest.fixture
def tables(tiny: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
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
    return {"host": "inline", **overrides}


def test_a_run_keeps_in_touch_while_it_waits_for_rows(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further rows come when the controller has done so: without, none would."""
    released = threading.Event()

    def stalling(batches: Batches, seed: int, buffer: int) -> StreamedPrompts:
        def stalled() -> Iterator[list[Prompt]]:
            for number, prompt in enumerate(itertools.chain.from_iterable(batches())):
                assert number < 12 or released.wait(120), "nothing was heard of the controller"
                yield [prompt]

        return StreamedPrompts(stalled, seed, buffer)

    monkeypatch.setattr(build, "StreamedPrompts", stalling)
    monkeypatch.setattr(Executors, "keep_in_touch", lambda _: released.set())
    slipstream.run({**tables, "steps": 2}, reward=length, out=tmp_path / "run", display=False)
    assert released.is_set()


@pytest.mark.slow
def test_a_resumed_stream_goes_on_where_it_was(tables: dict[str, Any], tmp_path: Path) -> None:
    for name, steps in (("whole", 14), ("stopped", 6)):
        run = {**tables, "steps": steps}
        slipstream.run(run, reward=length, out=tmp_path / name, display=False)
    slipstream.run(resume=tmp_path / "stopped", overrides={"steps": 14}, reward=length, display=False)
    whole, resumed = prompts_of(tmp_path / "whole"), prompts_of(tmp_path / "stopped")
    assert len(whole) == 56, "more than a pass"
    assert resumed == whole
