"""`benchmarks/one_gpu.py` without a GPU: what it runs, what it prints, and the daemon that it starts and ends."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.lab import Lab, Spec

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "one_gpu.py"
DAEMON = """#!/bin/sh
echo "$1 $CUDA_MPS_PIPE_DIRECTORY $(test -t 0 || test "$1" = -d || cat)" >> {log}
"""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Spec, str | None]]:
    """Specs that would have run, and where the daemon's pipe lay; their folders hold made-up numbers."""
    found: list[tuple[Spec, str | None]] = []

    def run(self: Lab, spec: Spec) -> Path:
        found.append((spec, os.environ.get("CUDA_MPS_PIPE_DIRECTORY")))
        spec.config()
        folder = self.place(spec)
        folder.mkdir(parents=True, exist_ok=True)
        told: dict[str, Any] = {"throughput": {"completions_per_s": 1234.5}, "staleness": {"mean": 1.25}}
        (folder / "summary.json").write_text(json.dumps(told))
        lines = [{"step": step, "step_s": s, "reward": 0.5} for step, s in enumerate([9.0, 9.0, 1.0, 2.0, 3.0])]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder

    monkeypatch.setattr(Lab, "run", run)
    return found


def test_three_ways(
    made: list[tuple[Spec, str | None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "calls"
    daemon.write_text(DAEMON.format(log=log))
    daemon.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "argv", ["one_gpu.py", "--size", "small", "--steps", "5", "--out", str(tmp_path / "out")])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (start, _), (turns, no_pipe), (overlap, _), (mps, pipe) = made
    assert start.config().warm_start.steps == 300
    assert (turns.config().max_staleness, overlap.config().max_staleness) == (0, 4)
    assert mps.config() == overlap.config()
    assert mps.name != overlap.name, "kept runs are told apart by it"
    assert no_pipe is None
    assert pipe is not None
    assert log.read_text() == f"-d {pipe} \n {pipe} quit\n"
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert "| mps | 2.00 | 1,234 | 1.25 | 0.500 |" in capsys.readouterr().out
