"""What takes seconds is told of while it goes on."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fragile_disk import KINDS, FragileDisk, watching

from slipstream.core.recipes import resolve
from slipstream.stages import progress, rl
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
