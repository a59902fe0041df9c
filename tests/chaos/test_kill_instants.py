"""`kill -9` of any one process at 20 random instants, then `--resume`: the same prompts, each trained once."""

from __future__ import annotations

import os

import pytest
from kill_instants import survey


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_twenty_instants():
    found = survey(int(os.environ.get("SLIPSTREAM_CHAOS_SEED", "0")), 20)
    assert not found
