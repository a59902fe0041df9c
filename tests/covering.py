"""A part of many parameters in every run of the tests, and all of them in the slow ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def covering(first: Iterable[Any], second: Iterable[Any], *, times: int = 1) -> list[Any]:
    """Return all pairs; those beyond `times` (1 or 2) for each value of the longer parameter are slow.

    Values of the shorter one come equally often, give or take one. Two for one value are not neighbours in the other.
    """
    firsts, seconds = list(first), list(second)
    shorter = min(len(firsts), len(seconds))
    return [
        pytest.param(one, other, marks=[] if (i + j) % shorter in (0, 2)[:times] else [pytest.mark.slow])
        for i, one in enumerate(firsts)
        for j, other in enumerate(seconds)
    ]


def with_slow(usual: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """Return `usual` and, among the slow tests only, `slow`; a tuple is the values of several parameters."""
    return [
        *usual,
        *(pytest.param(*(one if isinstance(one, tuple) else [one]), marks=[pytest.mark.slow]) for one in slow),
    ]
