"""Environments in this process: what cannot be killed is left behind, and there are bounds to that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drive import asked, opened, text, wait_for

from slipstream.core.clock import VirtualClock
from slipstream.environments.answers import Lost
from slipstream.environments.inline import InlinePool

MakePool = Callable[..., InlinePool]
LIMIT_S = 7.0


@pytest.mark.parametrize("name", ["Careless", "AsyncHostile"])
def test_after_eight_that_hang_none_is_opened(
    make_inline: MakePool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread each, or the loop that all share."""
    monkeypatch.setattr("slipstream.environments.inline._JOIN_S", 0.1)
    clock = VirtualClock()
    pool = make_inline(name, "Diary", step_limit_s=LIMIT_S, clock=clock)
    for _ in range(8):
        assert pool.num_restarts < 8
        opened(pool, ["a"], 0)
        pool.take("a", 1, {"content": "step hangs" if name == "Careless" else "block"})
        pool.poll()
        clock.advance(LIMIT_S)
        pool.poll()
        clock.advance(0.0 if name == "Careless" else 5.0)
        [one] = wait_for(pool, 1)
        assert isinstance(one, Lost)
        assert one.is_guilty
    [one] = opened(pool, ["a"], 1, name="n").values()
    assert one == Lost("a", "environments hung 8 times, and none is opened again", is_guilty=True)
    assert pool.num_open == 0


def test_what_is_open_at_the_end_is_closed(make_inline: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    import hosted_environments

    closed: list[str] = []
    monkeypatch.setattr(hosted_environments.Diary, "close", lambda self: closed.append(self.name), raising=False)
    pool = make_inline("Diary", "AsyncDiary")
    opened(pool, ["a"], 0, name="a")
    opened(pool, ["b"], 1, name="b")
    assert text(asked(pool, "a", "x")).startswith("a 1")
    pool._sites[0].host.close()
    pool._sites.clear()
    assert sorted(closed) == ["a", "b"]


def test_its_messages_are_copies(make_inline: MakePool) -> None:
    pool = make_inline("Tools")
    first, second = opened(pool, ["a", "b"], 0).values()
    assert first != second
    assert not isinstance(first, Lost)
    assert pool.isolation == frozenset()
