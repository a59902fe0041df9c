"""The script that repeats the suite, over a `make` that passes and fails as it is told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "soak_tests.sh"
MAKE = """#!/bin/sh
[ "$1" = venv ] && exit 0
echo "$2 $ATEN_CPU_CAPABILITY" >>"$CALLS"
{then}
"""
PASSES = "echo '3 passed, 1 skipped in 0.10s'; echo '2 passed in 0.20s'"


@pytest.mark.parametrize(
    ("then", "code", "outcome"),
    [
        (PASSES, 0, "3 passed, 1 skipped;2 passed"),
        (
            "echo 'FAILED tests/a.py::test_b - assert 0'; echo '1 failed, 2 passed in 0.10s'; exit 2",
            1,
            "tests/a.py::test_b",
        ),
        ("echo 'no rule to make it' >&2; exit 2", 1, "FAILED:"),
    ],
    ids=["passes", "fails", "ends before its tests"],
)
def test_each_run_is_a_row(then: str, code: int, outcome: str, tmp_path: Path) -> None:
    (tmp_path / "make").write_text(MAKE.format(then=then))
    (tmp_path / "make").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [SCRIPT, "2", "1", "1"],
        env=os.environ | {"PATH": path, "CALLS": str(tmp_path / "calls"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    rows = done.stdout.splitlines()[2:]
    assert len(rows) == 3
    assert all(outcome in row for row in rows)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[:2] == ["ARGS= avx2"] * 2
    assert calls[2].startswith("ARGS=--shuffle-files "), "the last run has its files in another order"
