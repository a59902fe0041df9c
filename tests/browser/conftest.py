"""A real Chromium, where one is installed: pages are looked at as people do, and must be quiet.

    visit(url)                       a page of 1280 x 900 in light colours
    visit(url, width=390, dark=True)

At its end each visit is checked: nothing was written to the console as an error or a warning, no script failed, and
nothing was asked of anybody but this machine.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "observe"))

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # whatever else it would like to know, it cannot
)

Visit = Callable[..., "Page"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One for all tests of a file, as it takes a second to start, and no longer: its event loop runs in this thread."""
    path = next(filter(runs, filter(None, map(shutil.which, NAMES))), None)
    if path is None:
        pytest.skip(f"no browser is installed (looked for {', '.join(NAMES)}): on Debian, apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra `dev`")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def servers() -> Iterator[ExitStack]:
    """What pages ask is entered here: it ends behind them, as they ask on."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def visit(chromium: Browser, servers: ExitStack) -> Iterator[Visit]:
    """Opens pages; all are closed, and checked, at the end of the test, before `servers` are."""
    opened: list[tuple[Any, Page, list[str]]] = []

    def open_page(url: str, *, width: int = 1280, height: int = 900, dark: bool = False, still: bool = False) -> Page:
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if still else "no-preference",
            has_touch=width < 500,
        )
        page = context.new_page()
        page.set_default_timeout(15_000)
        faults: list[str] = []
        page.on("console", lambda said: said.type in ("error", "warning") and faults.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: faults.append(f"script: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: is_here(request.url) or faults.append(f"request: {request.url}"))
        opened.append((context, page, faults))
        page.goto(url)
        return page

    yield open_page
    found = []
    for context, _, faults in opened:
        found += faults
        context.close()
    assert not found


def runs(path: str) -> bool:
    """Some systems have a script of that name which only says where to get the program."""
    return subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False).returncode == 0


def is_here(url: str) -> bool:
    return urlsplit(url).scheme in ("file", "data") or urlsplit(url).hostname == "127.0.0.1"
