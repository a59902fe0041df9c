"""Skip a test where this machine cannot hold the barriers that it tries; a home with a secret for those that can."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.rewards.checks import isolation_report


def needs(*barriers: str) -> None:
    missing = [barrier for barrier in barriers if not isolation_report()[barrier]]
    if missing:
        pytest.skip(f"this platform cannot isolate: {missing}")


def secret_at_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a secret in `folder`/home, the home folder for workers that start from now on.

    They see the rest of `folder`, wherever that lies: modules may come from it.
    """
    home = folder / "home"
    home.mkdir()
    for one in (folder, home):
        one.chmod(0o755)
    (home / "secret").write_text("secret")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.syspath_prepend(str(folder))
    return home / "secret"
