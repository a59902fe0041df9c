"""Driving a pool of episodes as an executor does."""

from __future__ import annotations

import select
import time
from collections.abc import Hashable
from typing import Any

from slipstream.environments.pool import EpisodePool, LastWord, Lost, Said

GENEROUS_S = 120.0
"""For what ends by itself: it only ends a hang, on however slow a machine."""

Told = Said | LastWord | Lost


def wait_for(pool: EpisodePool, count: int) -> list[Told]:
    """Poll until there are `count` answers, as a host does: on descriptors and deadlines."""
    told: list[Told] = []
    end_s = time.monotonic() + GENEROUS_S
    while len(told) < count:
        assert time.monotonic() < end_s, f"hangs; told: {told}"
        deadline_s = pool.next_deadline_s()
        wait_s = 5.0 if deadline_s is None else min(5.0, max(0.0, deadline_s - pool._clock.now_s()))
        select.select(pool.fds(), [], [], wait_s)
        told += pool.poll()
    assert len(told) == count, told
    return told


def opened(pool: EpisodePool, keys: list[Hashable], source: int, **columns: Any) -> dict[Hashable, Told]:
    """Open episodes and wait for the answers of their resets."""
    for key in keys:
        pool.open(key, source, columns)
    return {one.key: one for one in wait_for(pool, len(keys))}


def text(told: Told) -> str:
    """Return the text of the only message of an answer, or the reason of a failure."""
    if isinstance(told, Lost):
        return told.reason
    assert isinstance(told, Said), told
    [message] = told.messages
    content: str = message["content"]
    return content


def asked(pool: EpisodePool, key: Hashable, content: str, *, turn: int = 1) -> Told:
    """Let one episode answer a message, and wait for it."""
    pool.take(key, turn, {"role": "assistant", "content": content})
    return wait_for(pool, 1)[0]


def take_all(pool: EpisodePool, keys: list[Hashable], content: str, *, turn: int = 1) -> dict[Hashable, Told]:
    for key in keys:
        pool.take(key, turn, {"role": "assistant", "content": content})
    return {one.key: one for one in wait_for(pool, len(keys))}
