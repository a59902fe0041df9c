"""What experiments there are, in the order of docs/results.md. `experiments/<name>/experiment.py`: `section(lab)`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """`minutes`: what it takes on two cores with nothing kept."""

    title: str
    minutes: int


EXPERIMENTS: dict[str, Entry] = {}
HEADLINE: tuple[str, ...] = ()
"""What `make experiments` runs, in under three hours."""
