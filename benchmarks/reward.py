"""The reward of the speed benchmarks, for both sides: TRL's signature, cheap, and rarely equal within a group."""

from __future__ import annotations

import time
from typing import Any

SLOW_S = 0.02


def vowel_share(completions: list[str], **columns: Any) -> list[float]:
    """Share of vowels among each completion's characters, in [0, 1]; 0 for an empty one."""
    return [sum(character in "aeiou" for character in text) / max(1, len(text)) for text in completions]


def slow(completions: list[str], **columns: Any) -> list[float]:
    """Nothing, after `SLOW_S` seconds for each completion: a reward that has to think."""
    time.sleep(SLOW_S * len(completions))
    return [0.0] * len(completions)
