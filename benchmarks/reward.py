"""The reward of the speed benchmarks, for both sides: TRL's signature, cheap, and rarely equal within a group."""

from __future__ import annotations

from typing import Any


def vowel_share(completions: list[str], **columns: Any) -> list[float]:
    """Share of vowels among each completion's characters, in [0, 1]; 0 for an empty one."""
    return [sum(character in "aeiou" for character in text) / max(1, len(text)) for text in completions]
