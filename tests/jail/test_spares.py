"""Warm spares of pools: later than the workers, once, on the pool's clock."""

from __future__ import annotations

from slipstream.jail import sandbox
from slipstream.jail.sandbox import Spares


def test_spares_start_once_and_seconds_after_the_first_worker() -> None:
    spares = Spares(2)
    assert spares.take(1e9) == 0, "no worker is ready"
    spares.plan(100.0)
    spares.plan(103.0)
    (due_s,) = spares.due_s
    assert due_s == 100.0 + sandbox._SPARES_AFTER_S
    assert spares.take(due_s - 0.01) == 0
    assert spares.take(due_s) == 2
    spares.plan(200.0)
    assert spares.due_s == []
    assert spares.take(1e9) == 0


def test_where_none_are_wanted_nothing_is_awaited() -> None:
    spares = Spares(0)
    spares.plan(0.0)
    assert spares.due_s == []
