"""Shifting words: a task whose every token counts, for rewards that lie along the whole answer.

    kfbacj>   lgcbdk     the next letter of each

The first policy is careless in every place alike: SLIPS of the letters that it learns from have stayed as they were. A
reward is the share of right letters, so no part of the answer decides, and what is to be found is a little everywhere.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from experiments.lab import keep_rows

NUM_ROWS = 4200
LETTERS = "abcdefghijklmnop"
SHORTEST, LONGEST = 6, 18
SLIPS = 0.4
SEED = 0


def shifted(word: str) -> str:
    """The next letter of each, the first after the last."""
    return "".join(LETTERS[(LETTERS.index(letter) + 1) % len(LETTERS)] for letter in word)


def rows() -> list[dict[str, str]]:
    """Columns `prompt`, `answer` and `careless`, the answer with slips; no word twice."""
    chance = random.Random(SEED)
    words: dict[str, None] = {}
    while len(words) < NUM_ROWS:
        words["".join(chance.choices(LETTERS, k=chance.randint(SHORTEST, LONGEST)))] = None
    return [{"prompt": f"{word}>", "answer": shifted(word), "careless": _careless(word, chance)} for word in words]


def write(folder: Path) -> Path:
    """The rows as JSON lines in `folder`, under a name that stands for what is in them."""
    return keep_rows(folder, "shifting", rows())


def share_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """A reward: right letters in their places over the letters of the longer of completion and answer."""
    return [
        sum(ours == theirs for ours, theirs in zip(text, right, strict=False)) / max(len(text), len(right))
        for text, right in zip(completions, answer, strict=True)
    ]


def _careless(word: str, chance: random.Random) -> str:
    """The answer to `word`, in which SLIPS of the letters have stayed as they were."""
    return "".join(
        letter if chance.random() < SLIPS else right for letter, right in zip(word, shifted(word), strict=True)
    )
