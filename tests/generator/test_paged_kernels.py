"""Kernels without a GPU: interpreted they compute what torch does, and they compile for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from covering import with_slow

pytest.importorskip("triton")


def test_interpreted_they_compute_what_torch_does() -> None:
    """All kernels in one process: its imports take longer than the few cases of each."""
    script = Path(__file__).with_name("triton_on_cpu.py")
    kinds = ("checksums", "head", "sampling", "attention", "decode", "layer")
    command = [sys.executable, str(script), *kinds, "few"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_the_kernels_compile_for_gpus(tmp_path: Path) -> None:
    """In the precisions and head sizes there are, within the shared memory there is."""
    compile_for_gpus(tmp_path)


@pytest.mark.parametrize("cases", with_slow(["few"], ["all"]))
def test_attention_heads_rounding_and_sampling_keep_to_registers(cases: str, tmp_path: Path) -> None:
    """At the sizes of benchmarked models, for Hopper: no spills, few registers, 16 bytes at once."""
    compile_for_gpus(tmp_path, "attention", "head", "e4m3", "sampling", cases)


def compile_for_gpus(cache: Path, *kinds: str) -> None:
    script = Path(__file__).with_name("triton_for_gpus.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(script), *kinds], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
