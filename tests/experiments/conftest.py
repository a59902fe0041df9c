"""What tests of experiments share: recipes that are resolved once, and figures that nobody looks at."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import lab
from experiments.corrections import tasks
from experiments.section import ROOT
from slipstream.core.config import RunConfig
from slipstream.core.recipes import load_recipe, resolve


@pytest.fixture(scope="module")
def resolved_once() -> Iterator[None]:
    """One configuration for all specs of a file that say the same of a recipe of the checkout, which is read once."""
    made: dict[str, RunConfig] = {}
    read: dict[str, dict[str, Any]] = {}

    def once(recipe: Any, *more: Any) -> RunConfig:
        if not (isinstance(recipe, str) and "/" not in recipe) and ROOT not in Path(recipe).parents:
            return resolve(recipe, *more)
        key = repr((recipe, *more))
        if key not in made:
            if str(recipe) not in read:
                read[str(recipe)] = load_recipe(recipe)
            made[key] = resolve(read[str(recipe)], *more)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "resolve", once)
        yield


@pytest.fixture
def words_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of `corrections`, of which thousands are drawn, for each folder and choice of tasks."""
    monkeypatch.setattr("experiments.corrections.experiment.write", functools.cache(tasks.write))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made of what was found, but neither laid out nor drawn: another test of the file draws them."""
    monkeypatch.setattr("matplotlib.figure.Figure.tight_layout", lambda self: None)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, out, **_: out.write("<?xml"))
