"""The colours of the report's lines: seen on their page, and told apart by the colour-blind, too."""

from __future__ import annotations

import itertools
import math
import re
from importlib import resources

import pytest

STYLE = resources.files("slipstream.observe.report").joinpath("style.css").read_text(encoding="utf-8")
LIGHT, DARK = (block.split("}")[0] for block in STYLE.split(":root {")[1:3])

# What the eye makes of linear RGB: G. Machado, M. Oliveira, L. Fernandes, IEEE TVCG 15(6), 2009, table 1, severity 1.
EYES = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
WHITE = (0.95047, 1.0, 1.08883)


def linear(shade: str) -> list[float]:
    parts = [int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(shade: str, eye: str) -> tuple[float, float, float]:
    """CIE 1976 L*a*b*, D65, of what this eye sees."""
    seen = [min(max(part, 0.0), 1.0) for part in times(EYES[eye], linear(shade))]
    x, y, z = (
        ratio ** (1 / 3) if ratio > 0.008856 else 7.787 * ratio + 16 / 116
        for ratio in (part / white for part, white in zip(times(XYZ, seen), WHITE, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(a: str, b: str) -> float:
    low, high = sorted(sum(w * c for w, c in zip(XYZ[1], linear(shade), strict=True)) for shade in (a, b))
    return (high + 0.05) / (low + 0.05)


def named(block: str, name: str) -> str:
    (found,) = re.findall(rf"--{name}: (#[0-9a-f]{{6}});", block)
    return found


@pytest.mark.parametrize("block", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_stand_out_from_their_card(block: str) -> None:
    card = named(block, "card")
    for hue in range(7):
        assert contrast(named(block, f"c{hue}"), card) >= 3.0, hue
    assert contrast(named(block, "soft"), card) >= 4.5


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("block", [LIGHT, DARK], ids=["light", "dark"])
def test_lines_are_told_apart(block: str, eye: str) -> None:
    """By 10 at least, where 2.3 can just be seen; the first four, which nearly all charts make do with, by 15."""
    seen = [lab(named(block, f"c{hue}"), eye) for hue in range(7)]
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) >= 10.0
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen[:4], 2)) >= 15.0
