"""Summarisation in miniature, for the recipe `tldr_mini`: posts with marked points, and summaries by careless people.

    c*dh*sm    key: "ds"   answer: "dh"

A post is a few letters, some of them marked; a perfect summary is the marked ones in order. The reference summary
forgets some of them and mentions others, so that a policy that learned from references can become better than they are.
"""

from __future__ import annotations

import random
import string
from typing import Any


class Posts:
    """Item i is a pure function of seed + i. `forget` and `mention` are the references' mistakes, per letter."""

    def __init__(
        self,
        *,
        seed: int,
        size: int,
        min_length: int = 6,
        max_length: int = 9,
        min_marked: int = 2,
        max_marked: int = 4,
        forget: float = 0.25,
        mention: float = 0.1,
    ) -> None:
        if not 1 <= min_marked <= max_marked <= min_length <= max_length <= len(string.ascii_lowercase):
            raise ValueError(
                f"1 <= min_marked {min_marked} <= max_marked {max_marked} <= min_length {min_length} "
                f"<= max_length {max_length} <= 26 does not hold"
            )
        self.seed, self.size = seed, size
        self.length, self.num_marked = (min_length, max_length), (min_marked, max_marked)
        self.forget, self.mention = forget, mention

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"post {self.seed + index}")
        letters = rng.sample(string.ascii_lowercase, rng.randint(*self.length))
        marked = set(rng.sample(letters, rng.randint(*self.num_marked)))
        key = [letter for letter in letters if letter in marked]
        told = [x for x in letters if rng.random() < (1 - self.forget if x in marked else self.mention)]
        return {
            "question": "".join(f"*{letter}" if letter in marked else letter for letter in letters),
            "answer": "".join(told or key[:1]),
            "metadata": {"key": "".join(key)},
        }
