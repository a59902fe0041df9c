"""A reward that takes its time and gives nothing: whatever is scored waits for it in line, and grows old."""

from __future__ import annotations

import time
from typing import Any


def one_millisecond(
    prompts: list[str],  # noqa: ARG001 - rewards are called with these keywords
    completions: list[str],
    completion_ids: list[list[int]],  # noqa: ARG001
    **columns: Any,  # noqa: ARG001
) -> list[None]:
    """Abstain after a millisecond for each completion."""
    time.sleep(0.001 * len(completions))
    return [None] * len(completions)
