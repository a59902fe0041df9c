"""What an experiment says: question, setup, table, figure, verdicts, as a section of docs/results.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images" / "results"


@dataclass(frozen=True)
class Verdict:
    """A claim of a source, and whether it holds here: None where this experiment cannot say."""

    claim: str
    source: str
    holds: bool | None
    found: str

    @property
    def word(self) -> str:
        return {True: "yes", False: "**no**", None: "cannot say"}[self.holds]


@dataclass(frozen=True)
class Section:
    """`tables` are Markdown, by caption; `figures` alt text -> SVG; `cost` is what it took to get all of it."""

    title: str
    question: str
    setup: str
    tables: Mapping[str, str]
    figures: Mapping[str, str]
    verdicts: Sequence[Verdict]
    cost: str
    notes: Sequence[str] = ()


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The first column to the left, the others to the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean, and half the range in brackets where there are several."""
    if not values:
        return ""
    mean = f"{fmean(values):.{digits}f}"
    return f"{mean} ({(max(values) - min(values)) / 2:.{digits}f})" if len(values) > 1 else mean


def render(name: str, section: Section) -> str:
    """Markdown of one section; figures are links to files that `write` makes."""
    lines = [f"## {section.title}", "", f"**Question.** {section.question}", "", f"**Setup.** {section.setup}", ""]
    for caption, table in section.tables.items():
        lines += [f"*{caption}*", "", table, ""]
    for index, alt in enumerate(section.figures):
        lines += [f"![{alt}](images/results/{_file(name, index)})", ""]
    if section.verdicts:
        rows = [(v.claim, v.source, v.word, v.found) for v in section.verdicts]
        head = "| claim | source | holds here | found |\n|---|---|---|---|"
        lines += [head, *("| " + " | ".join(row) + " |" for row in rows), ""]
    lines += [f"- {note}" for note in section.notes]
    lines += [""] if section.notes else []
    lines += [f"`python -m experiments {name}`; {section.cost}", ""]
    return "\n".join(lines)


def write(name: str, section: Section, *, page: Path = PAGE, images: Path = IMAGES) -> None:
    """Replace the experiment's section of the page, between `<!-- name -->` and `<!-- end -->`, and its figures."""
    images.mkdir(parents=True, exist_ok=True)
    for index, figure in enumerate(section.figures.values()):
        (images / _file(name, index)).write_text(figure, encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)"
    body = render(name, section)
    found, count = re.subn(pattern, lambda match: match[1] + body + match[2], text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{page} has {count} places for the experiment {name}: <!-- {name} --> ... <!-- end -->")
    page.write_text(found, encoding="utf-8")


def _file(name: str, index: int) -> str:
    return f"{name}.svg" if index == 0 else f"{name}_{index + 1}.svg"
