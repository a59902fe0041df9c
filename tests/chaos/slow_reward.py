"""A term of weight 0 that takes its time: scores come in another order in every run."""

from __future__ import annotations

import os
import time

MEAN_S = 0.01


def score(completions: list[str], **_columns: object) -> list[float]:
    """Zero, after up to twice `MEAN_S` seconds."""
    time.sleep(2 * MEAN_S * os.urandom(1)[0] / 256)
    return [0.0] * len(completions)
