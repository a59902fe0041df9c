"""Reward functions with TRL's keyword signature, as a user would write them."""

from __future__ import annotations

import asyncio
from typing import Any


def starts_with(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(c.strip().startswith(a)) for c, a in zip(completions, answer, strict=True)]


async def slow_length(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [None if not ids else float(len(ids)) for ids in completion_ids]


def sees_everything(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], level: list[int], **columns: Any
) -> list[float]:
    assert columns["answer"] == ["four"]
    if isinstance(prompts[0], str):
        assert isinstance(completions[0], str)
    else:
        assert prompts[0][-1]["role"] == "user"
        assert completions[0] == [{"role": "assistant", "content": "4"}]
    return [float(level[0])]
