"""Rewards of the benchmarks, for both sides, ours and TRL's: in TRL's signature, and cheap."""

from __future__ import annotations

import re
import time
from typing import Any

SLOW_S = 0.02


def vowel_share(completions: list[str], **columns: Any) -> list[float]:
    """Share of vowels among each completion's characters, in [0, 1]; 0 for an empty one. Rarely equal in a group."""
    return [sum(character in "aeiou" for character in text) / max(1, len(text)) for text in completions]


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the answer, 0 for anything else; surrounding whitespace apart."""
    return [float(text.strip() == right.strip()) for text, right in zip(completions, answer, strict=True)]


def last_number(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last number that is written is the answer; completions are texts, or chats' messages."""
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    written = [re.findall(r"-?\d+", text) for text in texts]
    return [float(numbers[-1:] == [right]) for numbers, right in zip(written, answer, strict=True)]


def nothing(completions: list[Any], **columns: Any) -> list[float]:
    """0: the reward comes from elsewhere."""
    return [0.0] * len(completions)


def slow(completions: list[str], **columns: Any) -> list[float]:
    """Nothing, after `SLOW_S` seconds for each completion: a reward that has to think."""
    time.sleep(SLOW_S * len(completions))
    return [0.0] * len(completions)
