from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.core.clock import VirtualClock
from slipstream.core.lease import BEATS_PER_LEASE, Lease


def test_silence_ends_a_lease_and_a_sign_of_life_renews_it() -> None:
    clock = VirtualClock(100.0)
    lease = Lease(8.0, clock)
    lease.watch("a")
    clock.advance(3)
    lease.watch("b")
    clock.advance(4.9)
    assert lease.silent() == []
    clock.advance(0.1)
    assert lease.silent() == ["a"]
    assert lease.silence_s("a") == 8.0
    clock.advance(3)
    assert lease.silent() == ["a", "b"], "the longest silent first"
    lease.heard("a")
    assert lease.silent() == ["b"]
    lease.forget("b")
    lease.heard("b")
    lease.heard("nobody")
    assert lease.watched == ("a",)


def test_old_news_does_not_shorten_a_lease() -> None:
    clock = VirtualClock()
    lease = Lease(8.0, clock)
    lease.watch("a")
    clock.advance(5)
    lease.heard("a", ago_s=1.0)
    lease.heard("a", ago_s=3.0)
    clock.advance(6)
    assert lease.silence_s("a") == pytest.approx(7.0)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(0.01, 5.0), max_size=30), st.floats(0.5, 20.0))
def test_sleeping_wait_s_misses_neither_beat_nor_end(silences: list[float], lease_s: float) -> None:
    """A watcher that sleeps `wait_s` beats in every quarter of a lease and sees the end of one at that instant."""
    clock = VirtualClock()
    lease = Lease(lease_s, clock)
    lease.watch("a")
    assert lease.is_beat_due()
    beat_s, heard_s = clock.now_s(), clock.now_s()
    for silence in silences:  # the peer speaks after so many seconds, unless its lease ends before
        while clock.now_s() < heard_s + silence and not lease.silent():
            clock.advance(min(lease.wait_s(), max(heard_s + silence - clock.now_s(), 0.0)) + 1e-9)
            if lease.is_beat_due():
                assert clock.now_s() - beat_s <= lease_s / BEATS_PER_LEASE + 1e-6
                beat_s = clock.now_s()
        assert bool(lease.silent()) == (silence >= lease_s - 1e-6) or abs(silence - lease_s) < 1e-5
        if lease.silent():
            assert clock.now_s() == pytest.approx(heard_s + lease_s, abs=1e-5)
        lease.heard("a")
        heard_s = clock.now_s()


def test_some_may_be_silent_for_longer() -> None:
    clock = VirtualClock()
    lease = Lease(8.0, clock)
    lease.watch("a")
    lease.watch("b")
    lease.allow("b", 20.0)
    clock.advance(8)
    assert lease.silent() == ["a"]
    lease.forget("a")
    assert lease.is_beat_due()
    clock.advance(2)
    assert lease.wait_s() == 0.0, "a beat"
    assert lease.is_beat_due()
    clock.advance(10)
    assert lease.silent() == ["b"]
    lease.allow("b", 30.0)
    assert lease.silent() == []
    lease.forget("b")
    lease.watch("b")
    clock.advance(8)
    assert lease.silent() == ["b"], "what it was allowed went with it"


def test_a_watcher_that_did_not_listen_reports_no_silence() -> None:
    clock = VirtualClock(50.0)
    lease = Lease(8.0, clock)
    lease.watch("a")
    for _ in range(4):
        clock.advance(4)
        lease.listens()
        if lease.silence_s("a") < 8:
            assert lease.silent() == []
    assert lease.silent() == ["a"], "listening does not renew a lease"
    lease.heard("a")
    clock.advance(100)
    lease.listens()
    assert lease.silent() == []
    clock.advance(7.9)
    assert lease.silent() == []
    clock.advance(0.1)
    assert lease.silent() == ["a"]
