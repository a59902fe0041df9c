"""Whole runs whose generator lies in pipeline stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit import audit
from trace_audit import audit_trace

import slipstream
from slipstream.core.errors import ConfigError


@pytest.mark.slow
def test_a_trainer_in_stages_serves_stages_that_share_layers_in_int8(tiny: dict[str, Any], tmp_path: Path) -> None:
    overrides = tiny | {"steps": 3, "trainer": {"ranks": 2, "pipeline_parallel": 2}}
    division = {"pipeline_parallel": 2, "tensor_parallel": 2, "precision": "int8"}
    overrides["generator"] = tiny["generator"] | division
    summary = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False).summary
    audit(tmp_path / "run")
    assert audit_trace(tmp_path / "run")["swaps"] == 4 * 4, "four ranks take versions 0 to 3"
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]


VLLM = {"engine": "vllm", "vllm": {"python": "python"}}
MIXTURE = {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_width": 16}


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"generator": {"pipeline_parallel": 4}}, "fewer layers"),
        ({"generator": {"pipeline_parallel": 0}}, "pipeline_parallel"),
        ({"generator": {"pipeline_parallel": 2}, "host": "inline"}, "processes of their own"),
        ({"generator": {"pipeline_parallel": 2}, "model": {"lora": {"rank": 4}}}, "pipeline stages"),
        ({"generator": {"pipeline_parallel": 2, "routing_replay": True}, "model": MIXTURE}, "its own layers"),
        ({"generator": {"pipeline_parallel": 2} | VLLM}, "divides models by itself"),
        ({"generator": {"pipeline_parallel": 2, "device": "cuda"}}, "GPU"),
    ],
)
def test_what_stages_cannot_do_is_refused_before_anything_starts(
    overrides: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()
