"""Rewards of whole groups, as a user would write them."""

from __future__ import annotations

import os
import time
from typing import Any


def ranks(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """The place of each among its group; None for an empty one; death, an error or a hang for those who ask."""
    assert len(answer) == len(completions)
    if "die" in completions:
        os._exit(7)
    if "raise" in completions:
        raise ValueError("not this group")
    if "hang" in completions:
        time.sleep(1000)
    return [float(sorted(completions).index(text)) if text else None for text in completions]


def hangs(completions: list[str], **_: Any) -> list[float]:
    if "hang alone" in completions:
        time.sleep(1000)
    return [0.5 for _ in completions]
