"""What an experiment says: question, setup, table, figure, verdicts, as a section of docs/results.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images" / "results"
VERDICTS = "| claim | source | holds here | found |\n|---|---|---|---|"
TOOK = "It took "


WORDS = {True: "yes", False: "**no**", None: "cannot say"}


@dataclass(frozen=True)
class Verdict:
    """A claim of a source, and whether it holds here: None where this experiment cannot say."""

    claim: str
    source: str
    holds: bool | None
    found: str

    @property
    def word(self) -> str:
        return WORDS[self.holds]


@dataclass(frozen=True)
class Section:
    """`tables` are Markdown, by caption; `figures` alt text -> SVG. The first of `verdicts` goes into the overview.

    `cost` is a word on what it takes to get all of it; what it took is added (`Lab.cost`).
    """

    title: str
    question: str
    setup: str
    tables: Mapping[str, str]
    figures: Mapping[str, str]
    verdicts: Sequence[Verdict]
    cost: str
    notes: Sequence[str] = ()


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    """The first `left` columns to the left, the others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * left + "---:|" * (len(head) - left)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int = 3, style: Literal["f", "e"] = "f") -> str:
    """Mean, and half the range in brackets where there are several. Style "e" is for numbers that differ by decades."""
    if not values:
        return ""
    mean = f"{fmean(values):.{digits}{style}}"
    return f"{mean} ({(max(values) - min(values)) / 2:.{digits}{style}})" if len(values) > 1 else mean


def render(name: str, section: Section, took: str = "") -> str:
    """Markdown of one section; figures are links to files that `write` makes, `took` is what making it took."""
    lines = [f"## {section.title}", "", f"**Question.** {section.question}", "", f"**Setup.** {section.setup}", ""]
    for caption, table in section.tables.items():
        lines += [f"*{caption}*", "", table, ""]
    for index, alt in enumerate(section.figures):
        lines += [f"![{alt}](images/results/{_file(name, index)})", ""]
    if section.verdicts:
        lines += [VERDICTS, *map(_row, section.verdicts), ""]
    lines += [f"- {note}" for note in section.notes]
    lines += [""] if section.notes else []
    lines += [f"`python -m experiments {name}`; {section.cost}" + (f". {TOOK}{took}." if took else ""), ""]
    return "\n".join(lines)


def write(name: str, section: Section, took: str = "", *, page: Path = PAGE, images: Path = IMAGES) -> None:
    """Replace the experiment's section of the page, between `<!-- name -->` and `<!-- end -->`, and its figures."""
    images.mkdir(parents=True, exist_ok=True)
    for index, figure in enumerate(section.figures.values()):
        (images / _file(name, index)).write_text(figure, encoding="utf-8")
    replace_between(page, name, render(name, section, took))


def replace_between(page: Path, name: str, body: str) -> None:
    """Put `body` between `<!-- name -->` and the next `<!-- end -->` of a page, which has exactly one such place."""
    text = page.read_text(encoding="utf-8")
    found, count = _place(name).subn(lambda match: f"{match[1]}{body}{match[3]}", text)
    if count != 1:
        raise ValueError(f"{page} has {count} places for {name}: <!-- {name} --> ... <!-- end -->")
    page.write_text(found, encoding="utf-8")


@dataclass(frozen=True)
class Told:
    """What a page says of an experiment: its title, its verdicts, and what it took, as `Lab.cost` says it."""

    title: str
    verdicts: Sequence[Verdict]
    took: str


def read(name: str, *, page: Path = PAGE) -> Told | None:
    """What `write` has written; None where that is nothing yet."""
    match = _place(name).search(page.read_text(encoding="utf-8"))
    if match is None or not (text := match[2].strip()):
        return None
    lines = text.splitlines()
    _, _, table = text.partition(VERDICTS + "\n")
    rows = [line for line in table.split("\n\n")[0].splitlines() if line]
    _, _, took = lines[-1].partition(TOOK)
    return Told(lines[0].removeprefix("## "), [_verdict(row) for row in rows], took.removesuffix("."))


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {re.escape(name)} -->\n)(.*?)(<!-- end -->)", flags=re.DOTALL)


def _row(verdict: Verdict) -> str:
    cells = (verdict.claim, verdict.source, verdict.word, verdict.found)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _verdict(row: str) -> Verdict:
    claim, source, word, found = (cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1])
    return Verdict(claim, source, {word: holds for holds, word in WORDS.items()}[word], found)


def _file(name: str, index: int) -> str:
    return f"{name}.svg" if index == 0 else f"{name}_{index + 1}.svg"
