"""Spelling a word round and round while counting down: answers have exactly the lengths that we choose.

    kfb004>   kfbk004f003b002k001

The answer repeats the word, and then spells it: an item takes four tokens of one character, and the end one more. The
first policy is careless when it repeats the word, and in nothing else. Where to end is easy to see, so that lengths
are the task's from the start and stay so. Lengths are quantiles of their distribution, not draws from it: every data
set of `NUM_ROWS` rows has the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import groupby, permutations
from pathlib import Path

from experiments.async_vs_sync.reward import ITEM_CHARS, WORD
from experiments.lab import keep_rows

NUM_ROWS = 4200
LETTERS = "abcdefghijkl"
SLIPS = 0.4
"""Share of the repeated word's letters that are wrong in what the first policy learns from."""
SHORTEST, LONGEST = 8, 120
TAIL = 1.2
"""Pareto's alpha: P(n > x) = (SHORTEST / x) ** TAIL. Below 2 the variance without the cut at LONGEST is infinite."""
EQUAL = 25
"""Of the control: the mean of the tailed lengths, rounded up."""
SEED = 0


def tailed(num_rows: int) -> list[int]:
    """Items in each answer: n = min(LONGEST, floor(SHORTEST * u^(-1 / TAIL))) at u = (i + 1/2) / num_rows."""
    quantiles = [(index + 0.5) / num_rows for index in range(num_rows)]
    return [min(LONGEST, int(SHORTEST * u ** (-1 / TAIL))) for u in quantiles]


def equal(num_rows: int) -> list[int]:
    """As many items in every answer."""
    return [EQUAL] * num_rows


LENGTHS: dict[str, Callable[[int], list[int]]] = {"tailed": tailed, "equal": equal}


def most_rows(lengths: str) -> int:
    """Distinct rows that there are, at most NUM_ROWS: of answers of one length one for each word."""
    return NUM_ROWS if lengths == "tailed" else math.perm(len(LETTERS), WORD)


def rows(lengths: str) -> list[dict[str, str]]:
    """Columns `prompt`, `answer`, and `careless`, the answer with slips. Prompts are distinct."""
    chance = random.Random(SEED)
    words = ["".join(letters) for letters in permutations(LETTERS, WORD)]
    found = []
    for count, alike in groupby(sorted(LENGTHS[lengths](most_rows(lengths)))):
        found += [_row(word, count, chance) for word in chance.sample(words, len(list(alike)))]
    chance.shuffle(found)
    return found


def write(lengths: str, folder: Path) -> Path:
    """The rows as JSON lines in `folder`, under a name that stands for what is in them."""
    return keep_rows(folder, f"spelling-{lengths}", rows(lengths))


def described(lengths: str) -> dict[str, float]:
    """Tokens of an answer: mean, median, quantiles, longest; of all of them, the share in the longest tenth."""
    tokens = sorted(num_tokens(count) for count in LENGTHS[lengths](most_rows(lengths)))
    tenth = tokens[-(len(tokens) // 10) :]
    return {
        "mean": sum(tokens) / len(tokens),
        "median": _quantile(tokens, 0.5),
        "p90": _quantile(tokens, 0.9),
        "p99": _quantile(tokens, 0.99),
        "longest": tokens[-1],
        "in_longest_tenth": sum(tenth) / sum(tokens),
    }


def num_tokens(count: int) -> int:
    """Of an answer of so many items, its end included; a token is a character."""
    return WORD + ITEM_CHARS * count + 1


def _row(word: str, count: int, chance: random.Random) -> dict[str, str]:
    items = "".join(f"{word[index % WORD]}{count - index:03d}" for index in range(count))
    careless = "".join(_other(letter, chance) if chance.random() < SLIPS else letter for letter in word)
    return {"prompt": f"{word}{count:03d}>", "answer": word + items, "careless": careless + items}


def _other(letter: str, chance: random.Random) -> str:
    return chance.choice([one for one in LETTERS if one != letter])


def _quantile(ordered: Sequence[int], share: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
