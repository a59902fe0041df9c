"""A reward that asks a service, as a judge does, and one that gives up on it by itself."""

from __future__ import annotations

import os
import urllib.request
from typing import Any


def judged(completions: list[str], **columns: Any) -> list[float]:
    url = columns["url"][0]
    with urllib.request.urlopen(url, timeout=30) as answer:
        return [float(answer.read()) for _ in completions]


def keyed(completions: list[str], **columns: Any) -> list[float]:
    return [float(os.environ["JUDGE_KEY"]) for _ in completions]


def tries_for_ever(completions: list[str], **columns: Any) -> list[float]:
    while True:
        try:
            return judged(completions, **columns)
        except OSError:
            continue
