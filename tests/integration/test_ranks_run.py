"""Whole runs whose trainer and generators have several ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from audit import audit
from safetensors.numpy import load_file
from trace_audit import audit_trace
from transformers import AutoModelForCausalLM

import slipstream
from slipstream.core.errors import ConfigError


def metrics(run_dir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "grad_norm" in line]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "context"])
def test_two_ranks_train_what_one_does(axis, tiny, tmp_path):
    """Without staleness both runs sample the same first batch, so its step is the same, up to rounding."""
    found = {}
    for ranks in (1, 2):
        overrides = tiny | {"steps": 2, "max_staleness": 0, "weight_update": "between_batches"}
        overrides["trainer"] = {"minibatches": 2, "ranks": ranks, "context_parallel": ranks if axis == "context" else 1}
        overrides["generator"] = tiny["generator"] | {"replicas": ranks}
        overrides["host"] = "inline" if ranks == 1 else "process"
        out = tmp_path / str(ranks)
        slipstream.run("quickstart", overrides=overrides, out=out, display=False)
        assert audit(out)["fates"]["trained"] == 8
        found[ranks] = metrics(out)[0]
    one, two = found[1], found[2]
    for name in ("reward_mean", "completion_tokens_mean", "tokens_trained", "staleness_max", "num_updates"):
        assert two[name] == one[name], name
    for name in ("loss", "grad_norm", "entropy", "behaviour_surprisal_sum"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name


@pytest.mark.slow
def test_a_tensor_parallel_trainer_serves_a_tensor_parallel_generator_in_int8(tiny, tmp_path):
    out = tmp_path / "run"
    overrides = tiny | {"steps": 3}
    overrides["trainer"] = {"ranks": 2, "tensor_parallel": 2, "checkpoint_every": 1}
    overrides["generator"] = tiny["generator"] | {"tensor_parallel": 2, "precision": "int8"}
    result = slipstream.run("quickstart", overrides=overrides, out=out, display=False)
    audit(out)
    assert audit_trace(out)["swaps"] == 2 * 4, "both ranks take versions 0 to 3"
    assert result.summary["staleness"]["max"] <= 2
    assert {"trainer", "trainer@1", "generator-0", "generator-0@1"} <= set(result.summary["accounting"])
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert sum(p.numel() for p in model.parameters()) == result.summary["model_params"]
    assert {path.stem for path in (out / "checkpoints").iterdir()} == {"step_2", "step_3"}, "two are kept"


@pytest.mark.slow
def test_divided_experts_train_and_generate_what_one_rank_does(tiny, tmp_path):
    """The trainer's ranks exchange tokens; each rank of the generator has half of the experts, and takes those alone.

    A short warm start: in a long one rounding sends a token to another expert somewhere, with FSDP2 alone as well.
    """
    found = {}
    for ranks in (1, 2):
        overrides = tiny | {"steps": 2, "max_staleness": 0, "weight_update": "between_batches"}
        overrides["warm_start"] = tiny["warm_start"] | {"steps": 5}
        overrides["model"] = tiny["model"] | {"family": "qwen3_moe", "num_experts": 4}
        overrides["trainer"] = {"minibatches": 2, "ranks": ranks, "expert_parallel": ranks}
        overrides["generator"] = tiny["generator"] | {"tensor_parallel": ranks, "routing_replay": True}
        overrides["host"] = "inline" if ranks == 1 else "process"
        out = tmp_path / str(ranks)
        result = slipstream.run("quickstart", overrides=overrides, out=out, display=False)
        audit(out)
        found[ranks] = metrics(out)[0]
    one, two = found[1], found[2]
    for name in ("reward_mean", "completion_tokens_mean", "tokens_trained", "staleness_max", "num_updates"):
        assert two[name] == one[name], name
    for name in ("loss", "grad_norm", "entropy", "behaviour_surprisal_sum"):
        assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-6), name
    assert all(line["logprob_diff_mean/lag_0"] < 1e-4 for line in metrics(tmp_path / "2"))
    files = [load_file(path) for path in (tmp_path / "2" / "model").glob("*.safetensors")]
    assert sum(tensor.size for file in files for tensor in file.values()) == result.summary["model_params"]


def stored(checkpoint: Path, model: str) -> dict[str, np.ndarray]:
    """The tensors of `model` in a checkpoint, put together from the boxes of its ranks."""
    index, whole = json.loads((checkpoint / "index.json").read_text()), {}
    files = [load_file(path) for path in sorted(checkpoint.glob("rank_*.safetensors"))]
    for name, entry in index.items():
        if name.startswith(f"{model}/"):
            tensor = whole[name.partition("/")[2]] = np.full(entry["shape"], np.nan, np.float32)
            for rank, start, extent in entry["boxes"]:
                place = tuple(slice(first, first + size) for first, size in zip(start, extent, strict=True))
                tensor[place] = files[rank][f"{name}@{','.join(map(str, start))}"]
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("division", [{}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}], ids=str)
def test_a_reference_follows_the_policy_on_two_ranks_and_after_a_resume(division, tiny, tmp_path):
    trainer = {"ranks": 2, **division, "checkpoint_every": 1, "keep_checkpoints": 9}
    tables = tiny | {"steps": 4, "trainer": trainer, "kl": {"coef": 0.1, "sync_every": 2, "mixup": 0.6}}
    tables["warm_start"] = tiny["warm_start"] | {"steps": 5}
    run = slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False).out
    slipstream.run(resume=run, overrides={"steps": 6}, display=False)
    policies, references = (
        {step: stored(run / "checkpoints" / f"step_{step}", model) for step in range(1, 7)}
        for model in ("policy", "reference")
    )
    for name in policies[1]:
        for step in range(2, 7):
            before, after = (references[one][name] for one in (step - 1, step))
            expected = before if step % 2 else 0.4 * before + 0.6 * policies[step][name]
            np.testing.assert_allclose(after, expected, rtol=3e-7, atol=1e-8)  # two roundings
    assert any((references[6][name] != references[4][name]).any() for name in policies[1])


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"trainer": {"ranks": 3, "tensor_parallel": 2}}, "divide"),
        ({"trainer": {"ranks": 2, "tensor_parallel": 2, "context_parallel": 2}}, "context_parallel = 2"),
        ({"trainer": {"ranks": 2}, "host": "inline"}, "processes of their own"),
        ({"trainer": {"device": "cuda"}}, "GPU"),
        ({"trainer": {"precision": "bfloat16"}}, "float32"),
        ({"generator": {"tensor_parallel": 3}}, "divided"),
    ],
)
def test_impossible_groups_are_refused_before_anything_starts(overrides, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns_with_two_ranks_and_two_replicas(tmp_path):
    overrides = {"trainer": {"ranks": 2}, "generator": {"replicas": 2}}
    summary = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False).summary
    audit(tmp_path / "run")
    assert summary["eval"]["after"]["accuracy"] > 0.9
