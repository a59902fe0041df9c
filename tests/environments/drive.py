"""Driving a pool of episodes as an executor does; agents are given their turns by a function."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Hashable
from typing import Any

from slipstream.environments.answers import Asked, LastWord, Lost, Said
from slipstream.environments.asks import Refused, TurnReply
from slipstream.environments.pool import EpisodePool

GENEROUS_S = 120.0
"""For what ends by itself: it only ends a hang, on however slow a machine."""

Told = Said | Asked | LastWord | Lost
Answer = Callable[[Asked], TurnReply | Refused | None]
"""Gives an agent its turn; None leaves the request open."""


def wait_for(pool: EpisodePool, count: int) -> list[Told]:
    """Poll until there are `count` answers, as a host does: on descriptors and deadlines."""
    told: list[Told] = []
    end_s = time.monotonic() + GENEROUS_S
    while len(told) < count:
        assert time.monotonic() < end_s, f"hangs; told: {told}"
        told += _polled(pool)
    assert len(told) == count, told
    return told


def until(pool: EpisodePool, is_there: Callable[[], bool]) -> list[Told]:
    """Poll until something is there; return what was told meanwhile."""
    told: list[Told] = []
    end_s = time.monotonic() + GENEROUS_S
    while not is_there():
        assert time.monotonic() < end_s, f"hangs; told: {told}"
        told += _polled(pool)
    return told


def _polled(pool: EpisodePool) -> list[Told]:
    """Wait as a host does, on descriptors and deadlines; return what was told."""
    deadline_s = pool.next_deadline_s()
    wait_s = 5.0 if deadline_s is None else min(5.0, max(0.0, deadline_s - pool._clock.now_s()))
    select.select(pool.fds(), [], [], wait_s)
    return pool.poll()  # type: ignore[return-value]


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


def reply(content: str, **message: Any) -> TurnReply:
    """Return a turn of one token."""
    said = {"role": "assistant", "content": content, **message}
    return TurnReply(said, "stop", 2, tokens=[1], logprobs=[-0.5], versions=[(0, 0)], prompt_tokens=[3, 4])


def repeat(asked: Asked) -> TurnReply:
    """Return the last message of a request as its turn."""
    assert asked.ask.messages is not None
    return reply(asked.ask.messages[-1]["content"])


def ends(pool: EpisodePool, count: int, answer: Answer = repeat) -> dict[Hashable, LastWord | Lost]:
    """Answer agents until `count` episodes have ended."""
    found: dict[Hashable, LastWord | Lost] = {}
    end_s = time.monotonic() + GENEROUS_S
    while len(found) < count:
        assert time.monotonic() < end_s, f"hangs; ended: {found}"
        for one in _polled(pool):
            if isinstance(one, Asked):
                turn = answer(one)
                if turn is not None:
                    pool.give(one.key, one.request, turn)
            else:
                assert isinstance(one, LastWord | Lost), one
                assert one.key not in found, "an episode ends once"
                found[one.key] = one
    assert len(found) == count, found
    return found


def rewards(told: dict[Hashable, LastWord | Lost]) -> dict[Hashable, float | None]:
    """Return the rewards of episodes that have all ended by themselves."""
    assert all(isinstance(one, LastWord) for one in told.values()), told
    return {key: one.reward for key, one in told.items() if isinstance(one, LastWord)}
