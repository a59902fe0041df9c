"""The meaning and the unit of every metric of `metrics.jsonl`, for docs/observability.md and TensorBoard's hints.

They are in `metrics.toml`. A name in angle brackets stands for one part of it: `staleness_tokens/lag_<k>`. The suite
checks that no run writes what is not there, and that nothing is there that the sources do not write.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Metric:
    """`unit` is empty for what is a plain number. `meaning` is a phrase."""

    unit: str
    meaning: str

    @property
    def is_amount(self) -> bool:
        """Whether it is a share, a count or a time, which begin at 0: everything with a unit but what is in nats."""
        return bool(self.unit) and "nats" not in self.unit

    @property
    def in_words(self) -> str:
        return f"{self.meaning} ({self.unit})" if self.unit else self.meaning


def _read(part: str) -> Mapping[str, Mapping[str, Metric]]:
    groups = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))[part]
    return {title: {name: Metric(*entry) for name, entry in group.items()} for title, group in groups.items()}


CATALOGUE = _read("run")
"""Group -> name -> what it is, in the order of the documents."""
STAGES = _read("stages")
"""What stages other than RL write to files of their own."""


@cache
def described(name: str) -> tuple[str, Metric] | None:
    """The catalogue's name for metric `name` of a run, and what it is; None for one that is not there."""
    for group in CATALOGUE.values():
        for known, metric in group.items():
            if _fits(known, name):
                return known, metric
    return None


def table(groups: Mapping[str, Mapping[str, Metric]]) -> Iterator[str]:
    """The lines of a Markdown table, a row with its name above each group."""
    yield "| metric | unit | what it is |"
    yield "|---|---|---|"
    for title, group in groups.items():
        yield f"| **{title}** | | |"
        for name, metric in group.items():
            yield f"| `{name}` | {metric.unit} | {metric.meaning} |"


_FILLINGS = {"<k>": r"\d+", "<edge>": r"(?=.*\d)\d*\.?\d*", "<term>": r"(?s:.*)"}


def _fits(known: str, name: str) -> bool:
    """Whether `name` is `known` with its placeholders filled: numbers in `<k>` and `<edge>`, anything in `<term>`."""
    pieces = re.split("(<[a-z]+>)", known)
    return bool(
        re.fullmatch("".join(_FILLINGS.get(p, "[^/]+" if p[:1] == "<" else re.escape(p)) for p in pieces), name)
    )
