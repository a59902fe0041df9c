"""The kernel of checksums and copies: interpreted, against numpy's integers, and compiled; none of it on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
TESTS = Path(__file__).resolve().parents[1]


def run(script: str, *words: str, **variables: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1"} | variables
    found = subprocess.run([sys.executable, TESTS / script, *words], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_the_kernel_sums_and_copies() -> None:
    """Extreme words, blocks that fill no group, versions that end anywhere; nothing is written beyond the end.

    In all cases; `test_paged_kernels.py` has a few of them in every run.
    """
    run("weight_sync/checksums_on_cpu.py", TRITON_INTERPRET="1")


@pytest.mark.slow
def test_the_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """16 bytes at once, no spills, six programs on a multiprocessor, no exchange of threads but of sums."""
    run("generator/triton_for_gpus.py", "checksums", TRITON_CACHE_DIR=str(tmp_path))
