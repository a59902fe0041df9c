"""What is asked: a word, and in front of it what to do with it.

b:oats>   stao        backward
n:oats>   pbut        the next letter of each
d:oats>   ooaattss    each twice
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.lab import keep_rows

NUM_ROWS = 9000
LENGTHS = (3, 4)
SEED = 0
_LETTERS = string.ascii_lowercase
_NEXT = str.maketrans(_LETTERS, _LETTERS[1:] + _LETTERS[0])

TASKS: dict[str, Callable[[str], str]] = {
    "b": lambda word: word[::-1],
    "n": lambda word: word.translate(_NEXT),
    "d": lambda word: "".join(2 * letter for letter in word),
}


def rows(tasks: Sequence[str]) -> list[dict[str, str]]:
    """NUM_ROWS rows with the columns `prompt`, `answer` and `word`: equal shares of `tasks` in turns, no word twice."""
    chance = random.Random(SEED)
    words: dict[str, None] = {}
    while len(words) < NUM_ROWS:
        words["".join(chance.choices(_LETTERS, k=chance.choice(LENGTHS)))] = None
    kinds = [tasks[index % len(tasks)] for index in range(NUM_ROWS)]
    return [
        {"prompt": f"{kind}:{word}>", "answer": TASKS[kind](word), "word": word}
        for kind, word in zip(kinds, words, strict=True)
    ]


def write(tasks: Sequence[str], folder: Path) -> Path:
    """The rows as JSON lines in `folder`, under a name that stands for what is in them."""
    return keep_rows(folder, "words", rows(tasks))
