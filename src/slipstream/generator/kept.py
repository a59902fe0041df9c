"""Kept sets while a completion grows: row by row from the sampler, whole to the trainer, cut and joined in between."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.core.packed import check_kept_sets
from slipstream.generator.requests import KeptSets


class KeptRecorder:
    """The kept sets of one live completion: begins with what a `Resume` brought, grows by one token at a time."""

    def __init__(self, start: KeptSets | None = None) -> None:
        self._sets: list[np.ndarray] = [] if start is None else as_rows(start)

    def __len__(self) -> int:
        return len(self._sets)

    def append(self, row: np.ndarray) -> None:
        """Add the set of the next token: a row of `runner.Decoded.kept`, int32 [K] filled up with -1. Copies it."""
        self._sets.append(row[row >= 0])

    def taken(self) -> KeptSets:
        """All sets so far; the recorder goes on."""
        return from_rows(self._sets)


def from_rows(rows: Sequence[np.ndarray]) -> KeptSets:
    """The sets of T tokens, int32 [count] each. Identity: `as_rows` gives them back."""
    return KeptSets(
        tokens=np.concatenate([np.zeros(0, dtype=np.int32), *rows]).astype(np.int32),
        counts=np.array([len(row) for row in rows], dtype=np.int32),
    )


def as_rows(kept: KeptSets) -> list[np.ndarray]:
    """One int32 [count] per token."""
    return np.split(kept.tokens, np.cumsum(kept.counts)[:-1]) if len(kept.counts) else []


def sliced(kept: KeptSets, start: int, stop: int) -> KeptSets:
    """The sets of tokens `start` up to `stop`."""
    first, last = (int(kept.counts[:end].sum()) for end in (start, stop))
    return KeptSets(tokens=kept.tokens[first:last].copy(), counts=kept.counts[start:stop].copy())


def joined(parts: Sequence[KeptSets]) -> KeptSets:
    """The sets of several runs of tokens, one behind the other."""
    return from_rows([row for part in parts for row in as_rows(part)])


def check_kept(kept: KeptSets, tokens: np.ndarray) -> None:
    """ShapeError unless every one of `tokens` int [T] is in its set."""
    check_kept_sets(tokens, kept.tokens, kept.counts)
