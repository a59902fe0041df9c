"""Whole runs whose trainer, or whose generator as well, lies in two pipeline stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from audit import audit
from covering import with_slow
from trace_audit import audit_trace
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.run_log import read_rollouts

TWO = {"ranks": 2, "pipeline_parallel": 2}
MIXTURE = {"family": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "expert_width": 16}
ALIKE = ("reward_mean", "completion_tokens_mean", "tokens_trained", "staleness_max", "num_updates")
NEARLY = ("loss", "grad_norm", "entropy", "behaviour_surprisal_sum", "kl_reference", "logprob_diff_max/lag_0")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


@pytest.mark.parametrize(("trainer", "generator"), with_slow([(2, 2)], [(2, 1), (1, 2)]))
def test_two_stages_train_sample_and_serve_what_one_rank_does(
    trainer: int, generator: int, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Without staleness. The reference is what the warm start made, which went through both stages, too."""
    found = {}
    for ranks, stages in [(1, 1), (trainer, generator)]:
        overrides = tiny | {"steps": 2, "max_staleness": 0, "weight_update": "between_batches", "kl": {"coef": 0.1}}
        overrides["warm_start"] = tiny["warm_start"] | {"steps": 4}
        overrides["eval"] = tiny["eval"] | {"num_prompts": 4}
        overrides["trainer"] = {"ranks": ranks, "pipeline_parallel": ranks, "checkpoint_every": 1}
        overrides["generator"] = tiny["generator"] | {"pipeline_parallel": stages}
        overrides["host"] = "process" if ranks + stages > 2 else "inline"
        overrides["observe"] = {"tokens_every": 1}
        out = tmp_path / f"{ranks}_{stages}"
        summary = slipstream.run("quickstart", overrides=overrides, out=out, display=False).summary
        assert audit(out)["fates"]["trained"] == 8
        assert audit_trace(out)["swaps"] == 3 * stages, "versions 0 to 2, on every stage, each with its probe"
        lines = [line for line in read_rollouts(out / "rollouts.jsonl") if line.versions == [(0, 0)]]
        texts = {(line.ordinal, line.sample): line.completion for line in lines}
        tokens = (out / "tokens.jsonl").read_text().count('"policy_logprobs":[')
        found[out] = metrics(out)[0], summary, texts, tokens
    (one, before, texts, tokens), (two, after, texts_of_stages, tokens_of_stages) = found.values()
    assert texts_of_stages == texts
    assert len(texts) >= 16, "those of groups without a signal are dropped"
    assert after["eval"]["before"] == before["eval"]["before"]
    for name in ALIKE:
        assert two[name] == one[name], name
    for name in NEARLY:
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert tokens == tokens_of_stages > 0
    assert ("trainer@1" in after["accounting"], "generator-0@1" in after["accounting"]) == (trainer > 1, generator > 1)
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert sum(p.numel() for p in model.parameters()) == after["model_params"]
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
