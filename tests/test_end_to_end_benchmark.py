"""The comparison with TRL: its recipes pass every check that a run makes before it starts; it measures all sides."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.recipes import resolve
from slipstream.stages.chain import check_data, check_stages
from slipstream.stages.rl import FromPython

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        return runpy.run_path(str(BENCHMARKS / "end_to_end.py"), run_name="end_to_end")


@pytest.fixture(scope="module")
def folder(script: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("benchmark")
    assert script["prepare"](made) == 3_428_608
    return made


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("case", ["short", "long"])
def test_its_recipes_can_be_run(script: dict[str, Any], folder: Path, case: str, mode: str, tmp_path: Path) -> None:
    """In the case of one length no token ends a completion, and the run has to be told."""
    config = resolve(script["recipe_of"](script["CASES"][case], mode, folder, steps=4))
    check_stages(config)
    check_data(config, tmp_path, FromPython())
    assert config.generator.stop_at_eos is (case == "long")


@pytest.mark.slow
def test_every_side_of_every_case_is_measured(script: dict[str, Any]) -> None:
    """`make bench`, with a step and a round of each; in the case of one length all sides sample as many tokens."""
    if script["trl_version"]() is None:
        pytest.skip(f"no TRL: `{script['INSTALL']}`")
    command = [sys.executable, str(BENCHMARKS / "end_to_end.py"), "--rounds", "1", "--steps", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr
    tables = re.split(r"^(\w+): 3\.43 M parameters, 64 completions, ", done.stdout, flags=re.MULTILINE)[1:]
    assert tables[::2] == ["short", "long"]
    for table in tables[1::2]:
        rows = re.findall(r"^\| (\w+) \| ([\d.]+) \|.*\| ([\d.]+) \| (\d+) \|$", table, re.MULTILINE)
        assert [row[0] for row in rows] == ["sync", "async", "trl"]
        assert all(float(number) > 0 for row in rows for number in row[1:])
        if table is tables[1]:
            assert [int(row[3]) for row in rows] == [64 * 16] * 3
