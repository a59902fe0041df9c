"""What runs have come to, in a file beside their experiment: hours of them need be made neither in one go nor twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from experiments.lab import Lab, Made, digest, locked
from slipstream.core.disk import replace_file

AT_ONCE = 8
"""Runs after which what they came to is kept."""

Key = TypeVar("Key")
Row = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A run: `names` tell it apart for people, `settings` are all that its outcome depends on, `place` is its folder.

    Settings name no folders, so that they are the same in every clone.
    """

    names: Mapping[str, Any]
    settings: Any
    place: Path

    @property
    def digest(self) -> str:
        return digest(json.dumps(self.settings, sort_keys=True))


def outcomes(
    lab: Lab,
    kept: Path | None,
    wanted: Mapping[Key, Wanted],
    *,
    make: Callable[[Sequence[Key]], Sequence[Path]],
    read: Callable[[Key, Path], Row],
) -> dict[Key, Row]:
    """What each run came to. Those that `kept` has no line for are made, and added to it as they end.

    `make` makes some of them and returns their folders, `read` returns what is kept of one. Without a file nothing is.
    """
    rows = read_rows(kept)
    missing = [key for key, one in wanted.items() if one.digest not in rows]
    at_once = AT_ONCE if kept is not None else max(1, len(missing))
    for at in range(0, len(missing), at_once):
        some = missing[at : at + at_once]
        for key, place in zip(some, make(some), strict=True):
            one = wanted[key]
            row = {**one.names, "settings": one.digest, **read(key, place), "made": asdict(lab.used[place])}
            rows[one.digest] = row
        if kept is not None:
            with locked(kept.parent):
                rows = read_rows(kept) | rows  # another process may have added its own
                replace_file(kept, "".join(json.dumps(row) + "\n" for row in rows.values()).encode())
    lab.used |= {one.place: Made(**rows[one.digest]["made"]) for one in wanted.values()}
    return {key: rows[one.digest] for key, one in wanted.items()}


def read_rows(kept: Path | None) -> dict[str, Row]:
    """The lines of `kept` by their runs' settings."""
    if kept is None or not kept.is_file():
        return {}
    return {row["settings"]: row for row in map(json.loads, kept.read_text().splitlines())}
