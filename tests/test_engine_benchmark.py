"""`benchmarks/engine.py` where what it measures cannot take part."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import engine

    return engine


class Floor:
    """The process that measures the bounds; all others have no interpreter."""

    def __init__(self, module: str, python: Path, job: Path, environment: dict[str, str]) -> None:
        import engine
        from contenders.protocol import read_job

        if module != engine.FLOOR:
            raise engine.Missing(f"{python} does not exist")
        self.facts: dict[str, str] = {}
        self._lengths = read_job(job).workloads

    def run(self, workload: str, turn: int) -> dict[str, Any]:
        names = ("read_bytes_per_s", "gemm_flop_per_s", *(f"{way}_products_s" for way in ("engine", "linear", "torch")))
        return {"lengths": self._lengths[workload].lengths, "extra": dict.fromkeys(names, 1.0)}

    def close(self) -> None:
        pass


def test_without_any_contender_it_says_so(
    engine: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "Process", Floor)
    words = ["--quick", "--models", "tiny", "--contenders", "vllm", "--vllm-python", str(tmp_path / "python")]
    monkeypatch.setattr(sys, "argv", ["engine.py", *words])
    assert engine.main() == 0
    assert f"vllm: NOT RUN: {tmp_path / 'python'} does not exist" in capsys.readouterr().out


@pytest.mark.parametrize(("too_large", "code"), [("llama-3.1-8b", 1), ("none", 0)])
def test_a_model_that_a_gpu_has_no_memory_for_is_a_failure(
    engine: ModuleType, monkeypatch: pytest.MonkeyPatch, too_large: str, code: int
) -> None:
    from contenders import gpu

    def measure(name: str, config: Any, arguments: Namespace, device: torch.device) -> list[dict[str, Any]]:
        if name == too_large:
            raise torch.cuda.OutOfMemoryError
        return [{"model": name, "batch": batch} for batch in arguments.batch]

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    models = ["--models", "qwen2.5-0.5b", "llama-3.1-8b", "--batch", "8", "16"]
    monkeypatch.setattr(sys, "argv", ["engine.py", "--device", "cuda", *models])
    assert engine.main() == code
