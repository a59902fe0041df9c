"""Gold's word on each completion while it is trained on: does it beat the reference of its prompt?"""

from __future__ import annotations

from typing import Any

from slipstream.rewards.functions import word_overlap
from slipstream.rewards.protocol import Job

_overlap = word_overlap(column="key", characters=True)


def win(
    prompts: list[str],  # noqa: ARG001 - rewards are called with these keywords
    completions: list[str],
    completion_ids: list[list[int]],  # noqa: ARG001
    *,
    answer: list[str],
    key: list[str],
    **columns: Any,  # noqa: ARG001
) -> list[float]:
    """1 where the completion has more in common with the key than the reference has, a half where as much."""
    found = []
    for completion, reference, points in zip(completions, answer, key, strict=True):
        ours, theirs = (_score(text, points) for text in (completion, reference))
        found.append((ours > theirs) + 0.5 * (ours == theirs))
    return found


def _score(text: str, key: str) -> float:
    score = _overlap(Job(0, "", text, [], "", key, {"key": key}))
    assert score is not None, "every post has a key"
    return score
