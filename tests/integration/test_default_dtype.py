"""The default dtype of the caller's torch, which a notebook may have set, changes no bit of what is computed there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import slipstream


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_the_default_dtype_changes_nothing(tiny: dict[str, Any], tmp_path: Path, default_dtype: None) -> None:
    few = {"host": "inline", "steps": 1, "warm_start": {"steps": 1}, "eval": {"num_prompts": 4}}
    adapted = {"model": tiny["model"] | {"lora": {"rank": 2}}}
    answers, weights = [], []
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        run, exported = tmp_path / f"run-{dtype}", tmp_path / f"exported-{dtype}"
        slipstream.run("quickstart", overrides=tiny | few | adapted, out=run, display=False)
        slipstream.export(run, exported)
        answers.append([answer.text for answer in slipstream.evaluate_model(run, num_prompts=4).answers])
        weights += [load_file(folder / "adapter_model.safetensors") for folder in (run / "model", exported)]
    assert answers[0] == answers[1]
    assert any(answers[0])
    assert {weight.dtype for one in weights for weight in one.values()} == {torch.float32}
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.equal(other[name], weight) for name, weight in weights[0].items())
