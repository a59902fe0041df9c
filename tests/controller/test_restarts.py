"""When what was lost is started again: on a virtual clock."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from slipstream.controller.restarts import Restarts, delay_s
from slipstream.core.clock import VirtualClock


def test_the_delay_doubles_from_half_a_second_to_half_a_minute() -> None:
    assert [delay_s(count) for count in range(1, 10)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert delay_s(10_000) == 30.0


def test_each_is_due_once_and_when_it_was_said() -> None:
    clock = VirtualClock(100.0)
    restarts = Restarts(3, clock)
    assert restarts.wait_s() == math.inf
    assert restarts.plan("a") == 0.5
    clock.advance(0.25)
    assert restarts.plan("b") == 0.5
    assert restarts.plan("b") == 1.0, "lost again before its time: the later one counts"
    assert restarts.wait_s() == pytest.approx(0.25)
    assert restarts.take_due() == []
    clock.advance(0.25)
    assert restarts.take_due() == ["a"]
    assert restarts.take_due() == []
    clock.advance(restarts.wait_s())
    assert restarts.take_due() == ["b"]
    assert restarts.wait_s() == math.inf
    assert restarts.counts == {"a": 1, "b": 2}


def test_each_has_a_budget_of_its_own_that_is_never_refilled() -> None:
    clock = VirtualClock()
    counts = Counter({"a": 1})
    restarts = Restarts(2, clock, counts)
    assert restarts.left("a") == 1
    assert restarts.plan("a") == 1.0, "the second one"
    assert restarts.left("a") == 0
    clock.advance(1e6)
    assert restarts.plan("a") is None
    assert restarts.plan("b") == 0.5
    assert counts == {"a": 2, "b": 1}
    assert Restarts(0, clock).plan("a") is None
