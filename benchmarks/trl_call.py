"""TRL in its own environment, from ours: whether it is there, and `trl_baseline.py` called with options."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRL_PYTHON = HERE.parent / ".venv-trl" / "bin" / "python"
INSTALL = "make .venv-trl/installed"
DEADLINE_S = 1800.0
LAST_WORDS = 2000


class TrlFailed(Exception):
    """TRL's script ended without a result."""


def trl_version(python: Path = TRL_PYTHON) -> str | None:
    """The version of TRL in the environment of `python`; None where there is none."""
    if not python.is_file():
        return None
    asked = [str(python), "-c", "import importlib.metadata; print(importlib.metadata.version('trl'))"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def call_trl(python: Path = TRL_PYTHON, **options: Any) -> dict[str, Any]:
    """What `trl_baseline.py` measured with these options (`max_new_tokens = 16` is `--max-new-tokens 16`).

    TrlFailed with its last words where it fails, or is not done after `DEADLINE_S`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "measured.json"
        command = [str(python), str(HERE / "trl_baseline.py"), "--out", str(result)]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            raise TrlFailed(f"TRL is not done after {DEADLINE_S:.0f} s") from None
        if done.returncode:
            raise TrlFailed(f"TRL ended with {done.returncode}:\n{done.stderr[-LAST_WORDS:]}")
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return measured
