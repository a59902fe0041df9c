"""Summarisation in miniature, for the recipe `tldr_mini`: posts with marked words, and summaries by careless people.

    cat *dog hat *sun mud>   key: "dog sun"   answer: "dog hat"

A post is a few words, some of them marked; a perfect summary is the marked ones in order. The reference summary forgets
some of them and mentions others, so that a policy that learned from references can become better than they are.
"""

from __future__ import annotations

import random
from typing import Any

_WORDS = """
    ant bag bat bed bee box bus cab can cap car cat cow cup dog ear egg elk fan fig fox gem hat hen ice ink jam jar
    jet key kit leg lid log map mud nut oak owl pan pea pen pie pig pin pot ram rat saw sea sun tea tin toy van web
"""
WORDS = _WORDS.split()


class Posts:
    """Item i is a pure function of seed + i. `forget` and `mention` are the references' mistakes, per word."""

    def __init__(
        self,
        *,
        seed: int,
        size: int,
        min_words: int = 5,
        max_words: int = 7,
        min_marked: int = 2,
        max_marked: int = 3,
        forget: float = 0.25,
        mention: float = 0.1,
    ) -> None:
        if not 1 <= min_marked <= max_marked <= min_words <= max_words <= len(WORDS):
            raise ValueError(
                f"1 <= min_marked {min_marked} <= max_marked {max_marked} <= min_words {min_words} "
                f"<= max_words {max_words} <= {len(WORDS)} does not hold"
            )
        self.seed, self.size = seed, size
        self.num_words, self.num_marked = (min_words, max_words), (min_marked, max_marked)
        self.forget, self.mention = forget, mention

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = random.Random(f"post {self.seed + index}")
        words = rng.sample(WORDS, rng.randint(*self.num_words))
        marked = set(rng.sample(words, rng.randint(*self.num_marked)))
        key = [word for word in words if word in marked]
        told = [word for word in words if rng.random() < (1 - self.forget if word in marked else self.mention)]
        return {
            "question": " ".join(f"*{word}" if word in marked else word for word in words),
            "answer": " ".join(told or key[:1]),
            "metadata": {"key": " ".join(key)},
        }
