"""Property tests that cost much: a few examples in every run of the tests, many in the slow ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy


def drawn(
    few: int, many: int, /, **strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with `few` or, among the slow tests, `many` examples of what `strategies` draw.

    Its other parameters are pytest's.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("num_examples", [few, pytest.param(many, marks=pytest.mark.slow)])
        def run(num_examples: int, **fixed: Any) -> None:
            @settings(max_examples=num_examples, deadline=None)
            @given(**strategies)
            def holds(**example: Any) -> None:
                test(**fixed, **example)

            holds()

        own = [each for name, each in inspect.signature(test).parameters.items() if name not in strategies]
        number = inspect.Parameter("num_examples", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__name__, run.__doc__ = test.__name__, test.__doc__
        run.__signature__ = inspect.Signature([number, *own])  # type: ignore[attr-defined]
        return run

    return decorate
