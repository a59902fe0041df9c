"""The site of the pages: its navigation has all of them, and its builder sees what is dead. `make docs` builds it."""

from __future__ import annotations

import fnmatch
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel
from shown import DOCUMENTS, ROOT, inlines, links

from slipstream.core.config import RunConfig
from slipstream.core.run_log import RolloutLine
from slipstream.observe.catalogue import described
from slipstream.observe.health import RULES
from slipstream.observe.summary import Summary

SITE = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
BUILDER = runpy.run_path(str(ROOT / "scripts" / "build_site.py"))


def pages_of(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        for place in entry.values():
            yield from [place] if isinstance(place, str) else pages_of(place)


def test_every_page_is_in_the_navigation_once() -> None:
    pages = sorted(pages_of(SITE["nav"]))
    assert pages == sorted(path.relative_to(ROOT).as_posix() for path in DOCUMENTS)


def test_what_pages_link_to_is_gathered(tmp_path: Path) -> None:
    BUILDER["gather"](tmp_path)
    left_out = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in links(document)
        if not (tmp_path / document.relative_to(ROOT).parent / target.partition("#")[0]).exists()
    ]
    assert not left_out, f"add them to GATHERED in scripts/build_site.py: {left_out}"
    assert not any(fnmatch.fnmatch(path.name, "*.pyc") for path in tmp_path.rglob("*"))


def test_a_site_is_built_and_its_links_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the real navigation, with a word on each page, and a link on one: what all of them say takes long to build."""
    for document in DOCUMENTS:
        copy = tmp_path / document.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        link = "\n\n[Word](staleness.md#word)" if document.name == "glossary.md" else ""
        copy.write_text("# Word" + link)
    for name in ("zensical.toml", "docs/site.css"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setitem(BUILDER["main"].__globals__, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["build_site.py"])
    assert BUILDER["main"]() == 0
    assert "every link leads somewhere" in capsys.readouterr().out
    assert len(list((tmp_path / "site").rglob("index.html"))) >= len(DOCUMENTS)


@pytest.mark.slow
def test_the_site_is_built_and_every_link_leads_somewhere() -> None:
    command = [sys.executable, "scripts/build_site.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every link leads somewhere" in done.stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('<a href="b/#there">', None),
        ('<a href="https://example.org/gone">', None),
        ('<img src="data:image/png;base64,AA">', None),
        ('<a href="b/#gone">', "no such anchor"),
        ('<a href="#gone">', "no such anchor"),
        ('<a href="c/">', "not there"),
        ('<img src="b/none.png">', "not there"),
        ('<a href="../outside.html">', "not there"),
        ('<script src="https://example.org/x.js"></script>', "comes from the network"),
        ('<link rel="stylesheet" href="//example.org/x.css">', "comes from the network"),
    ],
)
def test_dead_references_are_found(text: str, why: str | None, tmp_path: Path) -> None:
    (tmp_path / "outside.html").write_text("<p>")
    (tmp_path / "site" / "b").mkdir(parents=True)
    (tmp_path / "site" / "b" / "index.html").write_text('<h2 id="there">There</h2>')
    (tmp_path / "site" / "index.html").write_text(text)
    found = BUILDER["dead"](tmp_path / "site")
    assert len(found) == (why is not None)
    assert all(str(why) in line for line in found)


def test_an_empty_site_is_no_success(tmp_path: Path) -> None:
    assert BUILDER["dead"](tmp_path) == [f"{tmp_path} has no page"]


# The page on runs that do not learn


def names_in(model: type[Any], depth: int = 3) -> Iterator[str]:
    """Names of the fields of a configuration, dotted, or of a struct and those in it, plain and dotted."""
    if issubclass(model, BaseModel):
        for name, info in model.model_fields.items():
            yield name
            if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
                yield from (f"{name}.{inner}" for inner in names_in(info.annotation))
        return
    for field in msgspec.structs.fields(model):
        yield field.encode_name
        for part in getattr(field.type, "__args__", (field.type,)) if depth else ():
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                for inner in names_in(part, depth - 1):
                    yield from (inner, f"{field.encode_name}.{inner}")


def test_the_page_on_debugging_names_only_what_is_there() -> None:
    page = ROOT / "docs" / "debugging.md"
    assert len(page.read_text(encoding="utf-8").splitlines()) <= 120
    known = {*names_in(RunConfig), *names_in(Summary), *names_in(RolloutLine), *RULES}
    known |= {recipe.stem for recipe in (ROOT / "recipes").glob("*.toml")}
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    text += (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    words = [token.content for _, token in inlines(page) if token.type == "code_inline"]
    names = [re.sub(r" = .*", "", word) for word in words if re.fullmatch(r"[a-z_0-9]+([./][\w<>.]+)*( = .*)?", word)]
    names = [name for name in names if not (name.endswith((".jsonl", ".json", ".html", ".md")))]
    known |= set(re.findall(r"`([\w.]+)(?: = [^`]*)?`", text))
    unknown = [name for name in names if name not in known and described(name) is None]
    assert len(names) > 60
    assert not unknown
