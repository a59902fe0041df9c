"""What a model wrote steers neither the terminal nor the report."""

from __future__ import annotations

import io
import unicodedata

import pytest
from rich.console import Console

from slipstream import cli
from slipstream.core.errors import ConfigError
from slipstream.observe.display import printable
from slipstream.observe.report.html import model_text

HOSTILE = [
    "\x1b[2J\x1b[1;1Hcleared",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31mC1",
    "a\rb\x08\x08c\x00\x7f",
    "\u202eright to left\u2066\u2069\u200f",
    "\u2028\u2029\u200b\ufeff\U000e0041",
    "\ud800",
    "[bold red]markup[/] [/nothing]",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>&lt;",
    "]]></style><!-- -->",
    "x" * 100_000,
]


def steers(text: str) -> list[str]:
    return [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_text_of_a_model_steers_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not steers(printable(text))
    assert len(printable(text)) <= 160 * 10
    shown = model_text(text)
    assert not steers(shown)
    assert not set("<>\"'") & set(shown)
    out = io.StringIO()
    monkeypatch.setattr(cli, "_errors", Console(file=out, width=200))
    cli._print_error(ConfigError(text, got=text, hint=text))
    assert not steers(out.getvalue())
    if text.startswith("["):
        assert "[bold red]markup[/]" in out.getvalue()
