"""Print each dependency of the package at its lower bound, as constraints for pip.

    python scripts/lower_bounds.py > lowest.txt; pip install -c lowest.txt -e '.[dev]'

`make test-lowest` does that in an environment of its own, and runs the tests of models, losses, batching, trainer and
generator there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def lowest(requirements: Iterable[str]) -> Iterator[str]:
    """Yield `name==version` for each `name>=version`. ValueError for a requirement of another form."""
    for requirement in requirements:
        if not (found := re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement)):
            raise ValueError(f"{requirement!r} has no plain lower bound")
        yield "==".join(found.groups())


if __name__ == "__main__":
    print("\n".join(lowest(tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"])))
