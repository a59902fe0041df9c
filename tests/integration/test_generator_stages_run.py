"""Whole runs whose generator lies in pipeline stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from audit import audit
from trace_audit import audit_trace

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.run_log import read_rollouts

NEARLY = ("loss", "grad_norm", "entropy", "behaviour_surprisal_sum", "logprob_diff_max/lag_0")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


def test_without_staleness_two_stages_sample_what_one_rank_does(tiny: dict[str, Any], tmp_path: Path) -> None:
    found = {}
    for stages in (1, 2):
        overrides = tiny | {"steps": 2, "max_staleness": 0, "weight_update": "between_batches"}
        overrides["warm_start"] = tiny["warm_start"] | {"steps": 4}
        overrides["eval"] = tiny["eval"] | {"num_prompts": 4}
        overrides["generator"] = tiny["generator"] | {"pipeline_parallel": stages}
        overrides["host"] = "inline" if stages == 1 else "process"
        out = tmp_path / str(stages)
        summary = slipstream.run("quickstart", overrides=overrides, out=out, display=False).summary
        assert audit(out)["fates"]["trained"] == 8
        assert audit_trace(out)["swaps"] == 3 * stages, "versions 0 to 2, on every stage, each with its probe"
        lines = [line for line in read_rollouts(out / "rollouts.jsonl") if line.versions == [(0, 0)]]
        found[stages] = metrics(out)[0], {(line.ordinal, line.sample): line.completion for line in lines}, summary
    (one, texts, before), (two, texts_of_stages, after) = found[1], found[2]
    assert texts_of_stages == texts
    assert len(texts) >= 16, "those of groups without a signal are dropped"
    assert after["eval"]["before"] == before["eval"]["before"]
    for name in NEARLY:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert {"generator-0", "generator-0@1"} <= set(after["accounting"])


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
