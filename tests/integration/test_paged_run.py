"""A whole run as it goes on CUDA: weights in place, keys and values in pages. On a CPU, and with `-m gpu` on one."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import slipstream
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_metrics
from slipstream.core.sections import PROBE_TOLERANCES
from slipstream.generator import backends
from slipstream.generator.native import NativeBackend
from slipstream.generator.paged_runner import PagedRunner

SYNCHRONOUS = {"steps": 3, "max_staleness": 0, "weight_update": "between_batches"}
EVALUATED = {"every": 2, "num_prompts": 8, "num_slots": 8}


def probe_errors(run_dir: Path) -> list[float]:
    """Of every version that a generator swapped in, in nats."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [error for line in lines for error in _values(json.loads(line), "probe_error")]


def _values(node: Any, key: str) -> list[Any]:
    if isinstance(node, dict):
        return [value for name, v in node.items() for value in ([v] if name == key else _values(v, key))]
    return [value for item in node for value in _values(item, key)] if isinstance(node, list) else []


@pytest.fixture
def paged_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[PagedRunner]:
    """Runners of the engines that were built."""
    runners: list[PagedRunner] = []

    class Noted(NativeBackend):
        def _new_engine(self, *args: Any, **options: Any) -> Any:
            engine = super()._new_engine(*args, **options)
            assert isinstance(engine._runner, PagedRunner)
            runners.append(engine._runner)
            return engine

    monkeypatch.setattr(backends, "NativeBackend", functools.partial(Noted, is_paged=True))
    return runners


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_in_pages_with_weights_in_place(tiny, tmp_path, paged_on_a_cpu, precision) -> None:
    overrides = tiny | SYNCHRONOUS | {"host": "inline", "eval": EVALUATED}
    overrides["generator"] = tiny["generator"] | {"precision": precision}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert run.summary["steps"] == 3
    errors = probe_errors(run.out)
    assert len(errors) >= 3
    assert max(errors) < (1e-4 if precision == "float32" else 0.1)
    lines = read_metrics(run.out / "metrics.jsonl")
    gaps = [line["logprob_diff_max/lag_0"] for line in lines if "logprob_diff_max/lag_0" in line]
    assert len(gaps) == 3
    assert max(gaps) < (1e-4 if precision == "float32" else 0.1), "sampled by the weights of the version that is named"
    assert sum("eval_accuracy" in line for line in lines) >= 2
    assert [runner.num_rows for runner in paged_on_a_cpu] == [16, 8], "one of training, one of all evaluations"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "host"), [("float32", "inline"), ("bfloat16", "inline"), ("bfloat16", "process")]
)
def test_a_run_on_a_gpu(gpu, tiny, tmp_path, precision, host) -> None:
    """Versions reach the GPU as they were trained: their logprobs are the trainer's, up to the precision."""
    overrides = tiny | SYNCHRONOUS | {"host": host, "eval": EVALUATED}
    overrides["generator"] = tiny["generator"] | {"precision": precision, "device": "cuda"}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert run.summary["steps"] == 3
    errors = probe_errors(run.out)
    assert len(errors) >= 3
    assert 0 < max(errors) < (1e-3 if precision == "float32" else 0.2)
    if precision == "bfloat16":
        assert max(errors) > 1e-5, "float32 would be nearer"
    lines = read_metrics(run.out / "metrics.jsonl")
    gaps = [line["logprob_diff_max/lag_0"] for line in lines if "logprob_diff_max/lag_0" in line]
    assert 0 < max(gaps) < PROBE_TOLERANCES[precision]
    assert any("eval_accuracy" in line for line in lines)


@pytest.mark.gpu
def test_versions_are_swapped_in_while_a_gpu_decodes(gpu, tiny, tmp_path) -> None:
    """Staged and probed by a thread beside captured steps, with 19 pages for 16 rows of up to 2."""
    overrides = tiny | {"steps": 8, "eval": EVALUATED}
    overrides["generator"] = tiny["generator"] | {"precision": "bfloat16", "device": "cuda:0", "kv_cache_gb": 8e-5}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert run.summary["steps"] == 8
    assert max(probe_errors(run.out)) < 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("trained", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_whose_weights_stay_on_gpus(gpu, tiny, tmp_path, precision, trained) -> None:
    """Trainer and generator on one GPU or two, in processes of their own: over CUDA IPC, in bfloat16 both in place."""
    overrides = tiny | SYNCHRONOUS | {"host": "process", "eval": EVALUATED}
    overrides["generator"] = tiny["generator"] | {"precision": precision, "device": "cuda", "kv_cache_gb": 0.1}
    overrides["trainer"] = tiny.get("trainer", {}) | {"device": "cuda", "precision": trained}
    assert resolve("quickstart", overrides).publishes_in_place == (precision == trained == "bfloat16")
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert run.summary["steps"] == 3
    errors = probe_errors(run.out)
    assert len(errors) >= 3
    assert max(errors) < PROBE_TOLERANCES[precision]


@pytest.mark.gpu
def test_a_run_whose_gpu_memory_cannot_be_exported(gpu, tiny, tmp_path, monkeypatch) -> None:
    """Versions go by way of host memory, both sides by turns on one GPU, moments in host memory."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    overrides = tiny | SYNCHRONOUS | {"host": "process", "eval": EVALUATED}
    overrides["generator"] = tiny["generator"] | {"precision": "bfloat16", "device": "cuda:0", "kv_cache_gb": 0.1}
    overrides["trainer"] = tiny.get("trainer", {}) | {"device": "cuda", "offload_moments": True}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert run.summary["steps"] == 3
    assert len(errors := probe_errors(run.out)) >= 3
    assert max(errors) < PROBE_TOLERANCES["bfloat16"]
    assert "by way of host memory" in (run.out / "logs" / "trainer.log").read_text()


@pytest.mark.gpu
def test_fp8_on_a_gpu_that_has_it(gpu, tiny, tmp_path) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU does not multiply fp8")
    overrides = tiny | SYNCHRONOUS | {"host": "inline"}
    overrides["generator"] = tiny["generator"] | {"precision": "fp8", "device": "cuda"}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    assert max(probe_errors(run.out)) < PROBE_TOLERANCES["fp8"]
