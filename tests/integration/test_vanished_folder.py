"""The run's folder is removed, moved or replaced while the run writes to it: that is an error, and is told soon."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.controller.controller import Controller
from slipstream.core.errors import DiskError
from slipstream.core.service_messages import Exported
from slipstream.core.types import StepDone
from slipstream.stages import chain, one_process


def removed(run: Path) -> None:
    shutil.rmtree(run)


def emptied(run: Path) -> None:
    for path in run.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def moved(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def replaced(run: Path) -> None:
    moved(run)
    shutil.copytree(run.with_name("elsewhere"), run)


HOW = {removed: "deleted", emptied: "deleted", moved: "now .*elsewhere", replaced: "now .*elsewhere"}


@pytest.mark.parametrize(
    "vanish", [replaced, *(pytest.param(how, marks=pytest.mark.slow) for how in (removed, emptied, moved))]
)
def test_it_is_told_at_the_next_commit(
    vanish: Callable[[Path], None], tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    tables = tiny | {"host": "inline", "warm_start": {"steps": 2, "batch_size": 8, "num_demonstrations": 40}}
    tables["eval"] = tiny["eval"] | {"num_prompts": 4}
    handled: list[Any] = []
    handle = Controller._handle

    def vanishing(self: Controller, event: Any) -> None:
        handled.append(event)
        if isinstance(event, StepDone) and event.step == 1:
            vanish(run)
        handle(self, event)

    monkeypatch.setattr(Controller, "_handle", vanishing)
    with pytest.raises(DiskError, match="was removed, moved or replaced") as told:
        slipstream.run("quickstart", overrides=tables, out=run, display=False)
    told.match(HOW[vanish])
    told.match(r"run was|(ledger|events)\.jsonl was")  # these two are written in turn
    assert isinstance(handled[-1], StepDone), "the step that was being committed"
    if vanish in (removed, moved):
        assert not run.exists(), "nothing has made it anew"
    if vanish is replaced:
        assert not (run / "summary.json").exists(), "what is there now is not the run's"


@pytest.mark.slow
def test_it_is_told_also_when_the_last_line_is_written(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last event only whole files are replaced, which nobody holds open."""
    tables = tiny | {"host": "inline", "steps": 1, "warm_start": {"steps": 0}}
    tables["eval"] = tiny["eval"] | {"num_prompts": 4}
    handle = Controller._handle

    def vanishing(self: Controller, event: Any) -> None:
        handle(self, event)
        if isinstance(event, Exported):
            removed(tmp_path / "run")

    monkeypatch.setattr(Controller, "_handle", vanishing)
    with pytest.raises(DiskError, match="run was removed, moved or replaced"):
        slipstream.run("quickstart", overrides=tables, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("host", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_other_stages_notice_it_too(
    host: str, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = tiny | {
        "host": host,
        "stages": ["sft"],
        "warm_start": {"steps": 0},
        "sft": {"steps": 3 if host == "inline" else 1_000_000, "batch_size": 4, "num_demonstrations": 40},
    }
    run = tmp_path / "run"
    if host == "inline":
        run_sft = one_process.STAGES_OF_ONE_PROCESS["sft"]

        def vanishing(config: Any, folder: Path, progress: Any) -> dict[str, Any]:
            phase = progress.phase

            def told(*values: Any) -> None:
                if run.exists():
                    removed(run)
                phase(*values)

            progress.phase = told
            return run_sft(config, folder, progress)

        monkeypatch.setitem(one_process.STAGES_OF_ONE_PROCESS, "sft", vanishing)
    else:
        start = chain.run_in_child

        def vanishing_soon(stage: str, folder: Path, *, display: bool) -> None:
            removed(folder)
            start(stage, folder, display=display)

        monkeypatch.setattr(chain, "run_in_child", vanishing_soon)
    with pytest.raises(DiskError, match="run was removed, moved or replaced"):
        slipstream.run("quickstart", overrides=tables, out=run, display=False)
    assert not run.exists()
