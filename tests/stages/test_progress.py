"""What takes seconds is told of while it goes on."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fragile_disk import KINDS, FragileDisk, watching

from slipstream.core.recipes import resolve
from slipstream.stages import progress, rl
from slipstream.stages.chain import check_data
from slipstream.stages.rl import FromPython


def test_a_recent_mean_is_that_of_what_was_measured() -> None:
    assert progress.recent_mean([9.0] + [1.0] * 8 + [math.nan, 4.0]) == 12 / 9
    assert math.isnan(progress.recent_mean([math.nan]))


def test_what_goes_on_is_told_with_its_seconds(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(progress, "TELL_EVERY_S", 0.01)
    said, end_s = "", time.monotonic() + 60
    with progress.told_of("reading prompts", display=True):
        while said.count("\n") < 2:
            said += capfd.readouterr().err
            assert time.monotonic() < end_s, "nothing was told"
    assert re.fullmatch(r"(reading prompts, \d+ s\n)+", said)
    capfd.readouterr()
    with progress.told_of("reading prompts", display=False):
        pass
    assert capfd.readouterr().err == ""


def test_the_check_of_the_data_of_stages_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "TELL_EVERY_S", 0.001)
    config = resolve("quickstart", {"stages": ["sft", "rl"], "model": {"path": "stage:sft"}})
    check_data(config, tmp_path, FromPython())
    assert re.search(r"^checking the data and rewards of all stages, 0 s$", capfd.readouterr().err, re.MULTILINE)
    check_data(config, tmp_path, FromPython(display=False))
    assert capfd.readouterr().err == ""


def test_a_stage_in_a_process_of_its_own_tells_that_it_imports(tmp_path: Path) -> None:
    """Until it ends here, as the run in this folder has no configuration."""
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from slipstream.stages import child, progress\n"
        "progress.TELL_EVERY_S = 0.05\n"
        "errors = os.open(sys.argv[1] + '/errors', os.O_CREAT | os.O_WRONLY)\n"
        "code = child.main(Path(sys.argv[1]), 'sft', errors, display=True)\n"
        "os._exit(code + 1)"
    )
    reading, lifeline = os.pipe()
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, stdin=reading, capture_output=True, text=True, timeout=600, check=False)
    os.close(reading)
    os.close(lifeline)
    assert done.returncode == 2, done.stderr
    assert "config.toml" in (tmp_path / "errors").read_text()
    assert re.fullmatch(r"(sft: importing torch, \d+ s\n)+", done.stderr)
    assert done.stdout == ""


def test_a_stage_is_done_only_once_its_output_is_on_the_disk(tmp_path: Path) -> None:
    run, album = tmp_path / "run", tmp_path / "album"
    run.mkdir()
    album.mkdir()
    with watching(FragileDisk(run, album)) as disk:
        folder = progress.fresh_folder(run, "sft")
        (folder / "model").mkdir()
        for path in (folder / "metrics.jsonl", folder / "model" / "model.safetensors"):
            path.write_bytes(b"all of it")
        progress.write_record(run, "sft", times=progress.StageTimes())
        (run / "next").mkdir()
    done = [picture / "sft" for _, _, picture in disk.pictures() if (picture / "sft" / "stage.json").is_file()]
    assert {picture.parent.name.partition("-")[2] for picture in done} == set(KINDS)
    for picture in done:
        for name in ("metrics.jsonl", "model/model.safetensors"):
            assert (picture / name).read_bytes() == b"all of it", picture


@pytest.mark.parametrize(
    ("overrides", "is_told"), [({}, True), ({"generator.device": "cuda"}, False), ({"generator.engine": "vllm"}, False)]
)
def test_a_run_that_leaves_gpus_alone_says_so(
    overrides: dict[str, str], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe of a large model would else be trained on the CPU for days, without a word."""
    told: list[str] = []
    monkeypatch.setattr(rl, "tell", lambda config, given, notes: told.extend(notes))
    monkeypatch.setattr(rl, "describe", lambda: SimpleNamespace(gpus=("a GPU",) * 8))
    monkeypatch.setattr("slipstream.plan.gpu_sizes.with_sizes", lambda config, **_: (config, None))
    monkeypatch.setattr("slipstream.plan.one_gpu.with_shares", lambda config, **_: (config, None))
    config = resolve("quickstart", overrides)
    assert rl._for_gpus(config, config, FromPython()) == (config, config)
    line = "this machine has 8 GPUs, and trainer and generator compute on its CPU: their `device` is 'cpu'"
    assert told == [line] * is_told
