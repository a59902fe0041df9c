"""Rewards of counting, in TRL's signature; workers read this file alone."""

from __future__ import annotations

import time
from typing import Any

JUDGE_S = 0.5


def counted(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """How far each completion counts as its answer does: 1 for the answer itself, 0 where the first number is wrong.

    (right numbers before the first wrong one) / (numbers of the longer of the two)
    """
    return [_share(text.split(" "), right.split(" ")) for text, right in zip(completions, answer, strict=True)]


def judged(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """The same from a judge that takes `JUDGE_S` seconds for each completion, and no core: a model elsewhere."""
    time.sleep(JUDGE_S * len(completions))
    return counted(completions, answer, **columns)


def _share(numbers: list[str], right: list[str]) -> float:
    matches = [ours == theirs for ours, theirs in zip(numbers, right, strict=False)]
    first_wrong = matches.index(False) if False in matches else len(matches)
    return first_wrong / max(len(numbers), len(right))
