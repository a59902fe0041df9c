"""Stages besides RL, and `slipstream eval`, on a GPU where the config says so, and on the CPU where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import slipstream
import slipstream.evals.sampling as sampling
from slipstream.core.errors import ConfigError
from slipstream.evals.evaluate import evaluate_model
from slipstream.stages.named import resolve
from slipstream.stages.one_process import run_stage

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
ON_CUDA = {"device": "cuda", "precision": "bfloat16"}


def write_data(folder: Path) -> str:
    data = folder / "data.jsonl"
    rows = [
        {"prompt": f"{index}>", "completion": "ab", "answer": "ab", "chosen": "ab", "rejected": "b"}
        for index in range(40)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(data)


def tables(data: str, *stages: str, **sections: Any) -> dict[str, Any]:
    return {
        "host": "inline",
        "stages": list(stages),
        "model": SMALL | {"path": "stage:sft"},
        "prompts": {"tasks": [], "dataset": data, "num_eval": 8, "template": "{prompt}"},
        "rewards": {"terms": [{"function": "exact_match"}]},
        "warm_start": {"steps": 0},
        "sft": {"dataset": data, "steps": 60, "batch_size": 16, "held_out": 0.2, "optimizer": {"lr": 5e-3}},
        "dpo": {"preferences": data, "steps": 5, "batch_size": 8, "path": "stage:sft"},
        "reward_model": {"preferences": data, "steps": 5, "batch_size": 8, "normalise_samples": 16},
        "eval": {"num_prompts": 8},
        "evaluation": {"num_prompts": 8},
        **sections,
    }


def record_of(run: slipstream.Result, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.out / stage / "stage.json").read_text())
    return found


@pytest.mark.gpu
def test_a_chain_on_a_gpu_learns_what_it_does_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFT, DPO, a reward model normalised on samples, evaluation, all in bfloat16; weights are saved in float32."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    data, runs = write_data(tmp_path), {}
    for name, devices in {"cpu": {}, "gpu": {"trainer": ON_CUDA, "generator": ON_CUDA}}.items():
        overrides = tables(data, "sft", "dpo", "reward_model", "evaluate", **devices)
        runs[name] = slipstream.run("quickstart", overrides=overrides, out=tmp_path / name, display=False)
    for stage in ("sft", "dpo", "reward_model"):
        ours, theirs = record_of(runs["gpu"], stage), record_of(runs["cpu"], stage)
        assert (ours["device"], theirs["device"]) == ("cuda:0", "cpu")
        weights = load_file(runs["gpu"].out / stage / "model" / "model.safetensors").values()
        assert {one.dtype for one in weights} == {torch.float32}
        if stage != "reward_model":
            assert ours["first_loss"] == pytest.approx(theirs["first_loss"], rel=0.02)
            assert ours["last_loss"] == pytest.approx(theirs["last_loss"], rel=0.1, abs=0.02)
    evaluated = [json.loads((runs[name].out / "evaluation.json").read_text()) for name in ("gpu", "cpu")]
    perplexities = [one["before"]["drift"]["perplexity"]["per_response_token"]["mean"] for one in evaluated]
    np.testing.assert_allclose(perplexities[0], perplexities[1], rtol=0.2)
    on_gpu = evaluate_model(runs["gpu"].out)
    on_cpu = evaluate_model(runs["gpu"].out, overrides={"generator.device": "cpu", "generator.precision": "float32"})
    assert (on_gpu.sampled_on, on_cpu.sampled_on) == ("cuda:0", "cpu")
    same = [one.text == other.text for one, other in zip(on_gpu.greedy_answers, on_cpu.greedy_answers, strict=True)]
    assert np.mean(same) > 0.7
    monkeypatch.setattr(sampling, "free_bytes", lambda *_: 10)
    with pytest.raises(ConfigError, match="no room for the weights"):
        evaluate_model(runs["gpu"].out)


def test_where_there_is_no_gpu_a_stage_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As on a controller's machine whose trainer has GPUs elsewhere: in float32, whatever the precision there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    data = write_data(tmp_path)
    for name, devices in {"elsewhere": {"trainer": ON_CUDA, "generator": ON_CUDA}, "here": {}}.items():
        config = resolve("quickstart", tables(data, "sft", **devices))
        (tmp_path / name).mkdir()
        run_stage("sft", config, tmp_path / name, display=True)
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("sft: computes on cpu (not on 'cuda': this machine has no GPU)") == 1
    assert json.loads((tmp_path / "elsewhere" / "sft" / "stage.json").read_text())["device"] == "cpu"
    here, elsewhere = (load_file(tmp_path / n / "sft" / "model" / "model.safetensors") for n in ("here", "elsewhere"))
    assert all(torch.equal(here[name], elsewhere[name]) for name in here)
