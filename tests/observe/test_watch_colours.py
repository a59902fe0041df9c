"""The ages of groups and tokens: seen on their station, and told apart by the colour-blind, too."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from test_report_colours import EYES, contrast, lab, named

from slipstream.observe.watch import server

STYLE = (Path(server.__file__).parent / "page" / "watch.css").read_text(encoding="utf-8")
LIGHT, DARK = (block.split("}")[0] for block in STYLE.split(":root {")[1:3])


@pytest.mark.parametrize("block", [LIGHT, DARK], ids=["light", "dark"])
def test_ages_stand_out_from_what_they_lie_on(block: str) -> None:
    for age, behind in itertools.product(range(5), ("card", "sunken")):
        assert contrast(named(block, f"age-{age}"), named(block, behind)) >= 3.0, (age, behind)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("block", [LIGHT, DARK], ids=["light", "dark"])
def test_ages_are_told_apart(block: str, eye: str) -> None:
    """By 20 at least, where 2.3 can just be seen."""
    seen = [lab(named(block, f"age-{age}"), eye) for age in range(5)]
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) >= 20.0
    likely = [lab(named(block, name), eye) for name in ("more", "less")]
    assert math.dist(*likely) >= 40.0
