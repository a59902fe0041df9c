"""A reward that takes its time and gives nothing: whatever is scored waits for it in line, and grows old."""

from __future__ import annotations

import time
from typing import Any


def pause_1500_us(
    prompts: list[str],  # noqa: ARG001 - rewards are called with these keywords
    completions: list[str],
    completion_ids: list[list[int]],  # noqa: ARG001
    **columns: Any,  # noqa: ARG001
) -> list[None]:
    """Abstain after 1.5 ms for each completion. Its name says so, as runs are kept by the name."""
    time.sleep(0.0015 * len(completions))
    return [None] * len(completions)
