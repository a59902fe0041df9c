"""The table at the top of docs/results.md, made from the sections below it: it cannot say anything else.

    python -m experiments.overview

writes it anew. A line for each experiment that has run: its first claim, what was found, how many of its claims hold,
and what that took.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from experiments.catalogue import EXPERIMENTS, HEADLINE
from experiments.section import PAGE, WORDS, Told, markdown_table, read, replace_between

PLACE = "overview"
NOTHING = "Nothing has been run yet: `make experiments` writes a table here, and the sections below.\n"
_MINUTES = re.compile(r"(\d+) minutes on (.*?)(?:, commit |$)")


def table(found: Mapping[str, Told]) -> str:
    """Markdown of the experiments in `found`, in its order, and what all of them took."""
    if not found:
        return NOTHING
    head = ("experiment", "first claim", "holds here", "found", "all claims", "minutes")
    lines = [_line(told) for told in found.values()]
    return "\n".join((markdown_table(head, lines, left=4), "", _what_it_took(found), ""))


def write_table(*, page: Path = PAGE) -> None:
    """Replace the table of `page` by what its sections say now."""
    told = {name: read(name, page=page) for name in EXPERIMENTS}
    replace_between(page, PLACE, table({name: one for name, one in told.items() if one is not None}))


def anchor(title: str) -> str:
    """The fragment by which GitHub links to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _line(told: Told) -> tuple[str, ...]:
    link = f"[{told.title}](#{anchor(told.title)})"
    if not told.verdicts:
        return link, "", "", "", "", _minutes(told.took)
    first, counts = told.verdicts[0], Counter(verdict.holds for verdict in told.verdicts)
    tally = ", ".join(f"{counts[holds]} {word}" for holds, word in WORDS.items() if counts[holds])
    return link, _cell(first.claim), first.word, _cell(first.found), tally, _minutes(told.took)


def _what_it_took(found: Mapping[str, Told]) -> str:
    minutes = {name: int(text) for name, told in found.items() if (text := _minutes(told.took))}
    machines = sorted({match[2] for told in found.values() if (match := _MINUTES.search(told.took))})
    headline = sum(minutes.get(name, 0) for name in HEADLINE)
    missing = [name for name in EXPERIMENTS if name not in found]
    text = f"It took {sum(minutes.values())} minutes on {' and '.join(machines) or 'an unknown machine'}"
    if headline:
        text += f", {headline} of them for the headline set (`make experiments`)"
    return f"{text}." + (f" Not run yet: {', '.join(missing)}." if missing else "")


def _minutes(took: str) -> str:
    match = _MINUTES.search(took)
    return match[1] if match else ""


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    write_table()
