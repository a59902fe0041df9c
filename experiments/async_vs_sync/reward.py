"""Rewards of spelling, in TRL's signature; workers read this file alone."""

from __future__ import annotations

import time
from typing import Any

JUDGE_S = 0.5
WORD = 3
"""Letters of a word."""
ITEM_CHARS = 4
"""One letter and three digits."""


def spelled(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """How far each completion is as its answer: 1 for the answer itself, 0 where the first letter is wrong.

    (right items before the first wrong one) / (items of the longer of the two); the repeated word's letters are items.
    """
    return [_share(_items(text), _items(right)) for text, right in zip(completions, answer, strict=True)]


def judged(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The same from a judge that takes `JUDGE_S` seconds for each completion, and no core: a model elsewhere."""
    time.sleep(JUDGE_S * len(completions))
    return spelled(completions, answer, **columns)


def _share(items: list[str], right: list[str]) -> float:
    matches = [ours == theirs for ours, theirs in zip(items, right, strict=False)]
    first_wrong = matches.index(False) if False in matches else len(matches)
    return first_wrong / max(len(items), len(right))


def _items(text: str) -> list[str]:
    return [*text[:WORD], *(text[at : at + ITEM_CHARS] for at in range(WORD, len(text), ITEM_CHARS))]
