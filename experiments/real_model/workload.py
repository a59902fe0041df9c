"""Word problems of one step, which a model of 135 M parameters can partly solve in one equation.

    Nora has 7 shells. She finds 5 more. How many shells does she have now?     12

Four kinds: adding, taking away, putting together, packs of equal size. Every combination of kind, numbers, name and
thing is another row, and held-out rows have pairs of numbers that no training row of their kind has: what is learned is
the arithmetic, or nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from experiments.lab import keep_rows

NUM_TRAIN, NUM_HELD_OUT = 2000, 200
SEED = 0
HELD_OUT_SHARE = 0.2
"""Of the pairs of numbers of each kind."""
PEOPLE = (("Nora", "She"), ("Omar", "He"), ("Lena", "She"), ("Tom", "He"), ("Ivy", "She"))
THINGS = ("shells", "apples", "books", "coins", "stamps", "pens", "cards", "eggs")

Person = tuple[str, str]
Pair = tuple[int, int]


def _more(a: int, b: int, who: Person, things: str) -> str:
    return f"{who[0]} has {a} {things}. {who[1]} finds {b} more. How many {things} does {who[1].lower()} have now?"


def _fewer(a: int, b: int, who: Person, things: str) -> str:
    return f"{who[0]} has {a} {things}. {who[1]} gives {b} away. How many {things} are left?"


def _together(a: int, b: int, who: Person, things: str) -> str:
    return f"{who[0]} has {a} {things} and Sam has {b}. How many {things} do they have together?"


def _packs(a: int, b: int, who: Person, things: str) -> str:
    return f"{who[0]} buys {a} bags with {b} {things} in each. How many {things} is that?"


KINDS: dict[str, tuple[Callable[[int, int, Person, str], str], Callable[[int, int], int], Sequence[Pair]]] = {
    "more": (_more, lambda a, b: a + b, [(a, b) for a in range(2, 21) for b in range(2, 10)]),
    "fewer": (_fewer, lambda a, b: a - b, [(a, b) for a in range(5, 21) for b in range(2, 10) if b < a]),
    "together": (_together, lambda a, b: a + b, [(a, b) for a in range(2, 16) for b in range(2, 16)]),
    "packs": (_packs, lambda a, b: a * b, [(a, b) for a in range(2, 10) for b in range(2, 10)]),
}
"""Name -> what is asked, its answer, and the pairs of numbers it is asked of."""


def rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows: columns `prompt`, `answer` and `kind`, equal shares of the kinds, no row twice."""
    chance = random.Random(SEED)
    split = {kind: _split(chance, numbers) for kind, (_, _, numbers) in KINDS.items()}
    train = _some(chance, {kind: pairs for kind, (pairs, _) in split.items()}, NUM_TRAIN)
    return train, _some(chance, {kind: pairs for kind, (_, pairs) in split.items()}, NUM_HELD_OUT)


def write(folder: Path) -> tuple[Path, Path]:
    """Training and held-out rows as JSON lines in `folder`, under names that stand for what is in them."""
    train, held_out = rows()
    return keep_rows(folder, "stories-train", train), keep_rows(folder, "stories-held-out", held_out)


def _split(chance: random.Random, numbers: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    shuffled = chance.sample(numbers, len(numbers))
    held_out = round(HELD_OUT_SHARE * len(shuffled))
    return shuffled[held_out:], shuffled[:held_out]


def _some(chance: random.Random, pairs: Mapping[str, Sequence[Pair]], count: int) -> list[dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    kinds = list(KINDS)
    while len(found) < count:
        kind = kinds[len(found) % len(kinds)]
        ask, answer, _ = KINDS[kind]
        a, b = chance.choice(pairs[kind])
        prompt = ask(a, b, chance.choice(PEOPLE), chance.choice(THINGS))
        found.setdefault(prompt, {"prompt": prompt, "answer": str(answer(a, b)), "kind": kind})
    return list(found.values())


def write_chats(rows_path: Path, system: str, to: Path) -> None:
    """The rows as TRL reads them: `prompt` is a chat, of which its trainer makes a text by the model's template."""
    with rows_path.open(encoding="utf-8") as lines, to.open("w", encoding="utf-8") as out:
        for row in map(json.loads, lines):
            chat = [{"role": "system", "content": system}, {"role": "user", "content": row["prompt"]}]
            out.write(json.dumps({"prompt": chat, "answer": row["answer"]}) + "\n")
