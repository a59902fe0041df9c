"""The prefix tree of contexts: stretches of rows that contexts which begin alike have in common."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

FIRST_COMPARED = 256
"""Tokens compared at first; then four times as many, and so on: contexts that part early are not compared whole."""


@dataclass(eq=False)
class Stretch:
    """Rows that contexts read one after the other, behind those `above`, up to where one of them ends or two part.

    `tokens` [n], and `routes` [n, layers, k], the experts that the engine chose there, where they decide too.
    """

    tokens: np.ndarray
    routes: np.ndarray | None = None
    above: Stretch | None = None

    @property
    def path(self) -> list[Stretch]:
        """The stretches from the first row of a context to the last of this one, empty ones left out."""
        found: list[Stretch] = []
        at: Stretch | None = self
        while at is not None:
            if len(at.tokens):
                found.append(at)
            at = at.above
        return found[::-1]

    def cut(self, length: int) -> Stretch:
        """Split off the first `length` rows and return them; this stretch keeps the others."""
        routes = self.routes
        first = Stretch(self.tokens[:length], None if routes is None else routes[:length], self.above)
        self.tokens, self.routes, self.above = self.tokens[length:], None if routes is None else routes[length:], first
        return first


class PrefixForest:
    """A prefix tree for each group of contexts that may share rows, made by one walk per context.

    A walk compares arrays and takes a step for each stretch on its way: no context costs more than its tokens, and a
    step for each that it begins as. Stretches do not depend on the order in which contexts come.
    """

    def __init__(self) -> None:
        self._trees: dict[Hashable, Stretch] = {}
        self._below: dict[tuple[Stretch, bytes], Stretch] = {}  # by the first row, which no two behind a stretch share

    def add(self, tree: Hashable, tokens: np.ndarray, routes: np.ndarray | None = None, num_alike: int = 0) -> Stretch:
        """Return the stretch with which a context of `tokens` ends, also after others have cut it.

        The contexts of a `tree` begin with the same `num_alike` tokens, and share these whatever their `routes` are;
        behind them a row is shared where token and routes are the same.
        """
        at = self._trees.get(tree)
        if at is None:
            at = self._trees[tree] = Stretch(tokens[:num_alike])
        begin = num_alike
        while begin < len(tokens):
            place = at, _opening(tokens, routes, begin)
            own = tokens[begin:], None if routes is None else routes[begin:]
            below = self._below.get(place)
            if below is None:
                below = self._below[place] = Stretch(*own, above=at)
                return below
            num_common = _num_common(below, *own)
            if num_common < len(below.tokens):
                first = self._below[place] = below.cut(num_common)
                self._below[first, _opening(below.tokens, below.routes, 0)] = below
                below = first
            at, begin = below, begin + num_common
        return at


def _opening(tokens: np.ndarray, routes: np.ndarray | None, at: int) -> bytes:
    """Return the key of a row among those that may come behind a stretch."""
    token: bytes = tokens[at : at + 1].tobytes()
    return token if routes is None else token + routes[at : at + 1].tobytes()


def _num_common(stretch: Stretch, tokens: np.ndarray, routes: np.ndarray | None) -> int:
    """Return the number of rows up to the first in which they differ."""
    shorter = min(len(stretch.tokens), len(tokens))
    begin, compared = 0, FIRST_COMPARED
    while begin < shorter:
        part = slice(begin, min(begin + compared, shorter))
        differs = stretch.tokens[part] != tokens[part]
        if routes is not None and stretch.routes is not None:
            differs |= (stretch.routes[part] != routes[part]).reshape(len(differs), -1).any(1)
        if differs.any():
            return begin + int(differs.argmax())
        begin, compared = part.stop, 4 * compared
    return shorter
