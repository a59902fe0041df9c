"""The few shapes that the report's pages are made of, as HTML; all text that comes in is escaped here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from slipstream.observe.display import printable

MAX_TEXT = 600  # characters of a prompt, a completion or a value that are shown
STRIPES = '<rect class="stripe" width="2" height="6"/><rect class="stripe dark" x="3" width="2" height="6"/>'
HATCH = "".join(  # areas are stretched: drawn 1000 wide and shown about 330 wide, so their stripes are drawn wider
    f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="{transform}">'
    f"{STRIPES}</pattern>"
    for name, transform in (("hatch", "rotate(45)"), ("hatch-areas", "scale(3 1) rotate(45)"))
)
DEFS = f'<svg class="defs" aria-hidden="true" width="0" height="0"><defs>{HATCH}</defs></svg>'
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(*, title: str, heading: str, parts: Mapping[str, str]) -> str:
    """A whole page. `heading` is HTML; so are its `parts`, by their names in the menu: those with something in them."""
    parts = {name: content for name, content in parts.items() if content}
    anchors = {name: content.split('"')[1] for name, content in parts.items()}  # `<section id="...`
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{anchor}">{text(name)}</a>' for name, anchor in anchors.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{text(title)} - Slipstream</title><style>{style}</style></head>"
        f'<body>{DEFS}<header>{heading}</header><nav aria-label="Parts of this page">{links}</nav>'
        f"<main>{''.join(parts.values())}</main></body></html>\n"
    )


def part(anchor: str, title: str, lead: str, content: Iterable[str]) -> str:
    """A part of the page: a question as its title, what answers it, cards."""
    inside = "".join(content)
    return (
        f'<section id="{anchor}"><h2>{text(title)}</h2><p class="lead">{text(lead)}</p>{inside}</section>'
        if inside
        else ""
    )


def card(title: str, note: str, content: str, *, size: str = "", details: str = "", folds: bool = False) -> str:
    """A picture: what it is, how to read it in a sentence, the picture, and its numbers folded away.

    `folds`: on a phone no more than the title, until it is touched.
    """
    told = f'<p class="note">{text(note)}</p>' if note else ""
    heading, inside = f"<h3>{text(title)}</h3>", f'{told}<div class="body">{content}</div>{details}'
    if folds:
        return f'<article class="card folds {size}">{folded_on_phones(heading, inside, wide=heading)}</article>'
    return f'<article class="card {size}">{heading}{inside}</article>'


def folded_on_phones(summary: str, content: str, *, wide: str = "") -> str:
    """`content` below a `summary` to touch where the screen is narrow, else by itself below `wide`; all of it HTML.

    `<details>` cannot be open on one screen and closed on another without a script, so what it opens lies beside it.
    """
    return f'<details class="fold"><summary>{summary}</summary></details>{wide}<div class="rest">{content}</div>'


def cards(*items: str) -> str:
    """Cards beside each other, as many as there is room for; in rows of two, three or four, with the fewest gaps."""
    shown = [item for item in items if item]
    columns = len(shown) if len(shown) < 3 else min((3, 4), key=lambda columns: -len(shown) % columns)
    return f'<div class="cards n{columns}">{"".join(shown)}</div>' if shown else ""


def folded(title: str, content: str) -> str:
    return f"<details><summary>{text(title)}</summary>{content}</details>" if content else ""


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "", row_heads: bool = True, stacks: bool = False
) -> str:
    """`rows` of HTML cells under `head` of text; the first cell of a row is its heading.

    `stacks`: on a narrow screen the cells of a row lie under each other, each with the name of its column.
    """
    lines = []
    names_of = [f' data-name="{text(name)}"' if stacks else "" for name in head[1:]] or itertools.repeat("")
    for row in rows:
        first, *rest = row
        start = f'<th scope="row">{first}</th>' if row_heads else f"<td>{first}</td>"
        cells = "".join(f"<td{name}>{cell}</td>" for cell, name in zip(rest, names_of, strict=False))
        lines.append(f"<tr>{start}{cells}</tr>")
    if not lines:
        return ""
    names = "".join(f'<th scope="col">{field(name)}</th>' for name in head)
    top = f"<thead><tr>{names}</tr></thead>" if any(head) else ""
    kind = f"{kind} stacks" if stacks else kind
    inside = f'<table class="{kind}">{top}<tbody>{"".join(lines)}</tbody></table>'
    return f'<div class="scroll" role="region" aria-label="table" tabindex="0">{inside}</div>'


def facts(values: Mapping[str, object]) -> str:
    """Names and values as a table."""
    return table((), ((field(name), text(str(value))) for name, value in values.items()), kind="facts")


def items(lines: Iterable[str], *, kind: str = "") -> str:
    """A list of sentences, which are text."""
    inside = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{inside}</ul>' if inside else ""


def text(value: str) -> str:
    """Return `value` on one line, cut and escaped, control characters spelled out."""
    return escape(printable(value, limit=MAX_TEXT))


def field(name: str) -> str:
    """A name of a field, a file or a metric: where a line has no room for it, it is broken behind a mark."""
    return re.sub(r"(?<=[._/:@])(?=.)", "<wbr/>", text(name))


def model_text(value: str | None) -> str:
    """Text of a model or data set: line breaks kept, other control characters spelled out, cut, escaped."""
    return "" if value is None else "\n".join(text(line) for line in value[:MAX_TEXT].split("\n"))
