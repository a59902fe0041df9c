"""Waiting for a page without a word of script in it: its policy forbids what Playwright's own waiting does (`eval`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

DEADLINE_S = 20.0


def until(page: Page, condition: str) -> None:
    """Return once the JavaScript expression `condition` is true; AssertionError that names it after `DEADLINE_S`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not page.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < deadline_s, f"it never came to this: {condition}"
        page.wait_for_timeout(40)
