"""Build the pages as a site, and follow its links: `python scripts/build_site.py`, as `make docs` does.

Pages and the files that they may link to are copied to `build/pages` (a builder that is given the whole checkout reads
its environments, too), and zensical makes `site/` of them by `zensical.toml`. It fails on a link to a page or a title
that is not there. Then every page, picture, file and anchor that the pages of the site name must be in its folder, and
nothing that they show may come from the network.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
GATHERED = (
    *("*.md", "docs/**/*.*", "experiments/**/README.md"),
    *("src/slipstream/**/*.py", "recipes/*.toml", "examples/*.*", "notebooks/*.ipynb"),
)
NAVIGATES = ("a", "area", "form")


def gather(pages: Path) -> None:
    """Copy what the site is made of to the folder `pages`, which is emptied first."""
    shutil.rmtree(pages, ignore_errors=True)
    for pattern in GATHERED:
        for path in ROOT.glob(pattern):
            target = pages / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


class Page(HTMLParser):
    """The anchors of a page, and what its elements refer to, as (element, address)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "top"}
        self.references: set[tuple[str, str]] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src", "data") and value:
                self.references.add((tag, value))


@cache
def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def fault(root: Path, page: Path, element: str, address: str) -> str | None:
    """Return why what `element` on `page` refers to is not there, or None."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        is_foreign = parts.scheme not in ("data", "blob") and element not in NAVIGATES
        return "comes from the network" if is_foreign else None
    place = unquote(parts.path)
    target = page if not place else root / place.lstrip("/") if place.startswith("/") else page.parent / place
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file() or not target.resolve().is_relative_to(root.resolve()):
        return "is not there"
    if target.suffix == ".html" and unquote(parts.fragment) not in page_of(target.resolve()).anchors:
        return "has no such anchor"
    return None


def dead(root: Path) -> list[str]:
    """Return what is wrong with the references of the site in `root`, a sentence for each."""
    pages = sorted(root.resolve().rglob("*.html"))
    found = [
        f"{page.relative_to(root.resolve())}: {address} {why}"
        for page in pages
        for element, address in sorted(page_of(page).references)
        if (why := fault(root, page, element, address))
    ]
    return found if pages else [f"{root} has no page"]


def main() -> int:
    """Build and check. The exit code is zensical's where it fails, 1 where a reference is dead, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", type=Path, metavar="SITE", help="only follow the links of a site that is there")
    site = parser.parse_args().check
    if site is None:
        gather(ROOT / "build" / "pages")
        zensical = Path(sys.executable).with_name("zensical")
        done = subprocess.run([zensical, "build", "--clean", "--strict"], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        told, traceback, why = done.stderr.partition("Traceback ")
        sys.stderr.write(told if "--strict flag" in why else told + traceback + why)  # its warnings say enough
        if done.returncode:
            return done.returncode
        site = ROOT / "site"
    for line in (found := dead(site)):
        print(line, file=sys.stderr)
    print(f"{site}: every link leads somewhere" if not found else f"{site}: {len(found)} dead references")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
