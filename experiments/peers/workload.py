"""Counting down: answers whose lengths have a heavy tail that the prompt decides.

    kqv05>   05 04 03 02 01

Each number takes three tokens of one character, the space or the end behind it included. How many there are is
lognormal, median 3, sigma 1, cut at 60, twenty medians: the tail with which docs/staleness.md runs the same scheduling
policies in virtual time. The word before the number keeps prompts distinct and says nothing. Counting up,
which the policy has learned as well, takes as many tokens, so lengths stay what they are while it learns.
"""

from __future__ import annotations

import json
import math
import random
import string
from pathlib import Path

from experiments.lab import keep_rows

SMALLEST, MEDIAN, LARGEST = 2, 3, 60
SIGMA = 1.0
NUM_TRAIN, NUM_HELD_OUT = 4000, 400
WORD_LETTERS = 3
SEED = 0


def rows(count: int, chance: random.Random) -> list[dict[str, str]]:
    """Columns `prompt`, `answer` and `upward`, the answer of a policy that counts the other way. Prompts differ."""
    words = chance.sample(range(26**WORD_LETTERS), count)
    return [_row(_word(word), _number(chance)) for word in words]


def num_tokens(answer: str) -> int:
    """A character each, and the end."""
    return len(answer) + 1


def write(folder: Path) -> tuple[Path, Path]:
    """Training and held-out rows as JSON lines in `folder`, under names that stand for what is in them."""
    found = rows(NUM_TRAIN + NUM_HELD_OUT, random.Random(SEED))
    return keep_rows(folder, "countdown-train", found[:NUM_TRAIN]), keep_rows(
        folder, "countdown-held-out", found[NUM_TRAIN:]
    )


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _row(word: str, number: int) -> dict[str, str]:
    numbers = [f"{n:02d}" for n in range(number, 0, -1)]
    return {"prompt": f"{word}{number:02d}>", "answer": " ".join(numbers), "upward": " ".join(reversed(numbers))}


def _number(chance: random.Random) -> int:
    return min(LARGEST, max(SMALLEST, round(MEDIAN * math.exp(SIGMA * chance.gauss(0.0, 1.0)))))


def _word(index: int) -> str:
    letters = []
    for _ in range(WORD_LETTERS):
        index, letter = divmod(index, 26)
        letters.append(string.ascii_lowercase[letter])
    return "".join(letters)
