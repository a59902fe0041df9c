"""The comparison with TRL: its recipes pass every check that a run makes before it starts."""

from __future__ import annotations

import runpy
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
