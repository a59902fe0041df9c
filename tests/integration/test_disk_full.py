"""The disk fills up in the middle of a run: it ends at once, says so, and goes on when there is space."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from audit import audit
from test_endings import await_steps

import slipstream
from slipstream.controller.controller import Controller
from slipstream.core.errors import DiskError, SlipstreamError
from slipstream.core.types import StepDone


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small disk of its own, of 24 MiB or as many kB as a parameter says."""
    folder = tmp_path / "disk"
    folder.mkdir()
    size = f"{request.param}k" if hasattr(request, "param") else "24m"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> None:
    """Not a byte is left."""
    with (disk / "ballast").open("ab", buffering=0) as ballast, suppress(OSError):
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while ballast.write(b"0" * size):
                    pass


@pytest.mark.slow
def test_a_full_disk_ends_a_run_that_goes_on_when_there_is_space(tiny: dict[str, Any], disk: Path, monkeypatch) -> None:
    run = disk / "run"
    tables = tiny | {"host": "inline", "warm_start": {"steps": 5, "batch_size": 8, "num_demonstrations": 40}}
    tables["trainer"] = {"checkpoint_every": 1}
    decide = Controller._decide

    def filling(self: Controller, *events: Any) -> None:
        if isinstance(events[0], StepDone) and events[0].step == 2:
            fill(disk)
        decide(self, *events)

    with monkeypatch.context() as patch:
        patch.setattr(Controller, "_decide", filling)
        with pytest.raises(DiskError, match="could not be written") as told:
            slipstream.run("quickstart", overrides=tables, out=run, display=False)
    assert "No space left on device" in str(told.value)
    assert "--resume" in str(told.value)
    assert (run / "checkpoints" / "step_2" / "manifest.json").is_file()
    (disk / "ballast").unlink()
    resumed = slipstream.run("quickstart", resume=run, display=False)
    assert (resumed.status, resumed.summary["steps"]) == ("done", 5)
    audit(run)


@pytest.mark.parametrize("disk", [4, 8, *(pytest.param(kb, marks=pytest.mark.slow) for kb in (16, 48))], indirect=True)
def test_a_disk_with_hardly_any_room_is_told_as_one(tiny: dict[str, Any], disk: Path) -> None:
    """Whichever file comes first that does not fit: the configuration, the first events, or those of a few steps."""
    tables = tiny | {"host": "inline", "warm_start": {"steps": 0}}
    with pytest.raises(DiskError, match="could not be written") as told:
        slipstream.run("quickstart", overrides=tables, out=disk / "run", display=False)
    told.match("No space left on device")
    assert len(str(told.value).splitlines()) < 6
    assert (disk / "run" / "config.toml").exists() == (disk / "run").exists(), "a run's folder, or none"


@pytest.mark.slow
@pytest.mark.parametrize("disk", [16], indirect=True)
def test_a_stage_that_finds_no_room_for_its_weights_says_so(
    tiny: dict[str, Any], disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, which cannot leave a note on that disk."""
    tables = tiny | {"stages": ["sft"], "sft": {"steps": 1, "batch_size": 4, "num_demonstrations": 40}}
    with pytest.raises(SlipstreamError, match="could not be written") as told:
        slipstream.run("quickstart", overrides=tables | {"warm_start": {"steps": 0}}, out=disk / "run", display=False)
    told.match("No space left on device")
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.slow
def test_whoever_meets_the_full_disk_first_the_user_reads_of_it_on_one_screen(tiny: dict[str, Any], disk: Path) -> None:
    """With processes: most of what is written is written by the trainer."""
    run = disk / "run"
    recipe = disk.parent / "tables.json"
    tables = tiny | {"steps": 100_000, "trainer": {"checkpoint_every": 2}}
    recipe.write_text(json.dumps(tables))
    script = (
        "import json, pathlib, sys, slipstream\nfrom slipstream.core.errors import SlipstreamError\n"
        f"tables = json.loads(pathlib.Path({str(recipe)!r}).read_text())\n"
        f"try: slipstream.run('quickstart', overrides=tables, out={str(run)!r}, display=False)\n"
        "except SlipstreamError as error: sys.exit(str(error))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    await_steps(run, 4, process)
    fill(disk)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "No space left on device" in told
    assert "Traceback" not in told
    assert len(told.splitlines()) < 24
    (disk / "ballast").unlink()
    whole = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step_")]
    assert any("." not in name for name in whole)
