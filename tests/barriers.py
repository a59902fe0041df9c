"""Skip a test where this machine cannot hold the barriers that it tries."""

from __future__ import annotations

import pytest

from slipstream.rewards.checks import isolation_report


def needs(*barriers: str) -> None:
    missing = [barrier for barrier in barriers if not isolation_report()[barrier]]
    if missing:
        pytest.skip(f"this platform cannot isolate: {missing}")
