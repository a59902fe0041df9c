"""Counting from one number to another: a task whose answers have exactly the lengths that we choose.

    008-011>   008 009 010 011

Each number takes four tokens of one character, the space or the end behind it included. Lengths are quantiles of their
distribution, not draws from it, so that every data set of `NUM_ROWS` rows has the same ones.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.lab import digest

NUM_ROWS = 4200
TOKENS_PER_NUMBER = 4
LARGEST = 999
SHORTEST, LONGEST = 8, 120
TAIL = 1.2
"""Pareto's alpha: P(n > x) = (SHORTEST / x) ** TAIL. Below 2 the variance without the cut at LONGEST is infinite."""
EQUAL = 25
"""Of the control: the mean of the tailed lengths, in whole numbers."""
SEED = 0


def tailed(num_rows: int) -> list[int]:
    """Numbers in each answer: n = min(LONGEST, floor(SHORTEST * u^(-1 / TAIL))) at u = (i + 1/2) / num_rows."""
    quantiles = [(index + 0.5) / num_rows for index in range(num_rows)]
    return [min(LONGEST, int(SHORTEST * u ** (-1 / TAIL))) for u in quantiles]


def equal(num_rows: int) -> list[int]:
    """As many numbers in every answer."""
    return [EQUAL] * num_rows


LENGTHS: dict[str, Callable[[int], list[int]]] = {"tailed": tailed, "equal": equal}


def most_rows(lengths: str) -> int:
    """Distinct rows that there are, at most NUM_ROWS: answers of n numbers begin at 0 to LARGEST + 1 - n."""
    return NUM_ROWS if lengths == "tailed" else LARGEST + 2 - EQUAL


def rows(lengths: str) -> list[dict[str, str]]:
    """Columns `prompt`, `answer` and `downward`, the answer of a policy that counts the other way. All distinct."""
    chance = random.Random(SEED)
    counts = LENGTHS[lengths](most_rows(lengths))
    places = defaultdict(list)
    for index, count in enumerate(counts):
        places[count].append(index)
    firsts = [0] * len(counts)
    for count, indices in places.items():
        for index, first in zip(indices, chance.sample(range(LARGEST + 2 - count), len(indices)), strict=True):
            firsts[index] = first
    found = [_row(first, count) for first, count in zip(firsts, counts, strict=True)]
    chance.shuffle(found)
    return found


def write(lengths: str, folder: Path) -> Path:
    """The rows as JSON lines in `folder`, under a name that stands for what is in them."""
    text = "".join(json.dumps(row) + "\n" for row in rows(lengths))
    path = folder / f"counting-{lengths}-{digest(text)}.jsonl"
    if not path.is_file():
        part = path.with_suffix(".part")
        part.write_text(text)
        part.replace(path)
    return path


def described(lengths: str) -> dict[str, float]:
    """Tokens of an answer: mean, median, quantiles, longest; of all of them, the share in the longest tenth."""
    tokens = sorted(TOKENS_PER_NUMBER * count for count in LENGTHS[lengths](most_rows(lengths)))
    tenth = tokens[-(len(tokens) // 10) :]
    return {
        "mean": sum(tokens) / len(tokens),
        "median": _quantile(tokens, 0.5),
        "p90": _quantile(tokens, 0.9),
        "p99": _quantile(tokens, 0.99),
        "longest": tokens[-1],
        "in_longest_tenth": sum(tenth) / sum(tokens),
    }


def _row(first: int, count: int) -> dict[str, str]:
    numbers = [f"{number:03d}" for number in range(first, first + count)]
    return {
        "prompt": f"{numbers[0]}-{numbers[-1]}>",
        "answer": " ".join(numbers),
        "downward": " ".join(reversed(numbers)),
    }


def _quantile(ordered: Sequence[int], share: float) -> float:
    return float(ordered[min(len(ordered) - 1, int(share * len(ordered)))])
