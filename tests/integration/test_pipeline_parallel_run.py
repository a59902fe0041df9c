"""A whole run whose trainer lies in two pipeline stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from audit import audit
from trace_audit import audit_trace
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.core.errors import ConfigError

TWO = {"ranks": 2, "pipeline_parallel": 2}
MIXTURE = {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_width": 16}
ALIKE = ("reward_mean", "completion_tokens_mean", "tokens_trained", "staleness_max", "num_updates")
NEARLY = ("loss", "grad_norm", "entropy", "behaviour_surprisal_sum", "kl_reference", "logprob_diff_max/lag_0")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


def test_two_stages_train_and_serve_what_one_rank_does(tiny: dict[str, Any], tmp_path: Path) -> None:
    """The reference is what the warm start made, which went through both stages, too."""
    found = {}
    for ranks in (1, 2):
        overrides = tiny | {"steps": 2, "max_staleness": 0, "weight_update": "between_batches", "kl": {"coef": 0.1}}
        overrides["warm_start"] = tiny["warm_start"] | {"steps": 4}
        overrides["eval"] = tiny["eval"] | {"num_prompts": 4}
        overrides["trainer"] = {"ranks": ranks, "pipeline_parallel": ranks, "checkpoint_every": 1}
        overrides["host"] = "inline" if ranks == 1 else "process"
        overrides["observe"] = {"tokens_every": 1}
        out = tmp_path / str(ranks)
        summary = slipstream.run("quickstart", overrides=overrides, out=out, display=False).summary
        assert audit(out)["fates"]["trained"] == 8
        assert audit_trace(out)["swaps"] == 3, "versions 0 to 2, each with its probe"
        found[ranks] = metrics(out)[0], summary, out
    one, two = found[1][0], found[2][0]
    for name in ALIKE:
        assert two[name] == one[name], name
    for name in NEARLY:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    tokens = [(out / "tokens.jsonl").read_text().count('"policy_logprobs":[') for *_, out in found.values()]
    assert tokens[0] == tokens[1] > 0
    summary, out = found[2][1:]
    assert {"trainer", "trainer@1"} <= set(summary["accounting"])
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert sum(p.numel() for p in model.parameters()) == summary["model_params"]
    assert {path.stem for path in (out / "checkpoints").iterdir()} == {"step_1", "step_2"}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"pipeline_chunks": 2}, {"tensor_parallel": 2, "checkpoint_every": 1}], ids=str)
def test_four_ranks_get_their_rollouts_and_publish_together(
    more: dict[str, int], tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Two data-parallel pipelines, whose first ranks get rollouts; and one of two tensor-parallel stages."""
    out, model = tmp_path / "run", tiny["model"] | {"num_layers": 4}
    overrides = tiny | {"steps": 3, "model": model, "trainer": {"ranks": 4, "pipeline_parallel": 2, **more}}
    overrides["generator"] = tiny["generator"] | {"precision": "int8"}
    summary = slipstream.run("quickstart", overrides=overrides, out=out, display=False).summary
    audit(out)
    assert audit_trace(out)["swaps"] == 4
    assert {"trainer", "trainer@1", "trainer@2", "trainer@3"} <= set(summary["accounting"])
    exported = AutoModelForCausalLM.from_pretrained(out / "model")
    assert sum(p.numel() for p in exported.parameters()) == summary["model_params"]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"trainer": {"ranks": 3, "pipeline_parallel": 2}}, "divide into those of one model"),
        ({"trainer": {"ranks": 2, "pipeline_parallel": 2, "tensor_parallel": 2}}, "divide into those of one model"),
        ({"trainer": {"ranks": 2, "pipeline_chunks": 2}}, "chunks are ranges"),
        ({"trainer": {"ranks": 4, "pipeline_parallel": 4}}, "fewer layers"),
        ({"trainer": {"ranks": 2, "pipeline_parallel": 2, "pipeline_chunks": 2}}, "fewer layers"),
        ({"trainer": TWO, "model": {"lora": {"rank": 4}}}, "adapters"),
        ({"trainer": TWO, "loss": {"name": "ppo", "advantages": "gae"}}, "a critic"),
        ({"trainer": TWO, "loss": {"name": "aipo", "baseline": "min_variance"}}, "baseline"),
        ({"trainer": TWO | {"compile": True}}, "compile"),
        ({"trainer": TWO, "teacher": {"path": str(Path(__file__).parent)}, "loss": {"name": "distill"}}, "a teacher"),
        ({"trainer": TWO, "host": "inline"}, "processes of their own"),
        ({"trainer": TWO, "model": MIXTURE}, "mixture of experts"),
    ],
)
def test_what_stages_cannot_do_is_refused_before_anything_starts(
    overrides: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=match):
        slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()
