"""What takes seconds is told of while it goes on."""

from __future__ import annotations

import math
import re
import time

import pytest

from slipstream.stages import progress


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
