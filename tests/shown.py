"""Commands, code and links that the documents show, read with a Markdown parser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "experiments").rglob("README.md")),
]
PROGRAMS = (
    r"(?:\.venv[\w-]*/bin/)?(?:slipstream|python3?|pytest|pip|make|kubectl|scancel|wandb|trackio|ssh|hf)|jobs/\S+\.sh"
)
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:for \w+ in .*; do )?(?:{PROGRAMS})(?: |$)")


@dataclass(frozen=True)
class Block:
    """A block of code: its language ("" where none is named), its text, and the line where it begins."""

    document: Path
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


@cache
def _tokens(document: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(document.read_text(encoding="utf-8"))


def blocks(document: Path) -> list[Block]:
    """Return the document's fenced and indented blocks of code, in order."""
    return [
        Block(document, token.map[0] + 1, token.info.strip(), token.content)
        for token in _tokens(document)
        if token.type in ("fence", "code_block") and token.map is not None
    ]


def inlines(document: Path) -> Iterator[tuple[int, Token]]:
    """Yield every inline token, such as a link or a span of code, with the line of its paragraph."""
    for token in _tokens(document):
        for child in token.children or ():
            yield (token.map or [0])[0] + 1, child


def commands_of(block: Block) -> list[str]:
    """Return the command lines of a block, without prompts and remarks: of `sh` each, else what looks like one.

    Lines of a text in quotes stay as they are.
    """
    if block.language in ("python", "toml", "json"):
        return []
    found = []
    quoted = False
    for line in block.text.replace("\\\n", " ").splitlines():
        was_quoted, quoted = quoted, quoted ^ (line.count('"') % 2 == 1)
        if was_quoted:
            found.append(line)
            continue
        command = re.sub(r"(?:^| +)#.*", "", line.removeprefix("$ ")).strip()
        if command and (block.language in ("sh", "bash") or COMMAND.match(command)):
            found.append(re.sub(r" {2,}", " ", command))
    return found


def command_blocks(document: Path) -> list[Block]:
    """Return what a reader would type: the commands of each block together, and each command within a paragraph.

    A list of several lines in a text is a session: its commands belong together.
    """
    found = []
    for block in blocks(document):
        if commands := commands_of(block):
            found.append(Block(document, block.line, "sh", "\n".join(commands)))
    for line, token in inlines(document):
        if token.type == "code_inline" and COMMAND.match(token.content):
            found.append(Block(document, line, "sh", token.content))
    return found


@cache
def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's titles, as GitHub makes them."""
    found: list[str] = []
    tokens = _tokens(document)
    for opening, title in pairwise(tokens):
        if opening.type == "heading_open":
            plain = "".join(child.content for child in title.children or ())
            slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
            found.append(slug if slug not in found else f"{slug}-{sum(one.startswith(slug) for one in found)}")
    return set(found)


def links(document: Path) -> Iterator[str]:
    """Yield the targets of links and pictures that are not on the web."""
    for _, token in inlines(document):
        target = token.attrs.get("href") or token.attrs.get("src")
        if isinstance(target, str) and "://" not in target:
            yield target


def files_of(document: Path) -> dict[str, str]:
    """Return the files that a document shows: blocks whose first line is `# name.ending: ...`, by name."""
    found = {}
    if document.suffix == ".md":
        for block in blocks(document):
            if named := re.match(r"# (\w+\.(?:py|toml)): ", block.text):
                found[named[1]] = block.text
    return found


def remarks() -> list[Block]:
    """Return the commands in first lines of shown files, and in remarks of recipes and examples."""
    found = []
    for document in DOCUMENTS:
        for text in files_of(document).values():
            command = text.splitlines()[0].partition(": ")[2]
            if COMMAND.match(command):
                found.append(Block(document, 1, "sh", command))
    for path in (*sorted((ROOT / "recipes").glob("*.toml")), *sorted((ROOT / "examples").glob("*"))):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.startswith("#"):
                continue
            spans = re.findall(r"`([^`]+)`", line) or [line.removeprefix("#").strip()]
            found += [Block(path, number, "sh", span.replace(" && ", "\n")) for span in spans if COMMAND.match(span)]
    return found
