"""The contract of pools of episodes: the same for jailed workers and for this process."""

from __future__ import annotations

import re
import select
from collections.abc import Callable

import hosted_environments
import pytest
from drive import GENEROUS_S, asked, opened, take_all, text, wait_for

from slipstream.core.clock import VirtualClock
from slipstream.environments.answers import LastWord, Lost, Said
from slipstream.environments.pool import EpisodePool

MakePool = Callable[..., EpisodePool]
LIMIT_S = 7.0


@pytest.mark.parametrize("name", ["Diary", "AsyncDiary"])
def test_each_episode_has_an_environment_of_its_own_and_its_turns_in_order(make_pool: MakePool, name: str) -> None:
    pool = make_pool(name)
    for number in range(20):
        pool.open(number, 0, {"name": f"n{number}", "other": [1, {"a": None}]})
    told = {one.key: one for one in wait_for(pool, 20)}
    assert {key: text(one) for key, one in told.items()} == {number: f"n{number} 0" for number in range(20)}
    for turn in (1, 2, 3):
        told = take_all(pool, list(range(20)), f"turn-{turn}", turn=turn)
        for number, one in told.items():
            assert isinstance(one, Said)
            assert text(one).split()[:3] == [f"n{number}", str(turn), f"turn-{turn}"]
            assert text(one).split()[4] == "True", "another thread than at its reset"
            assert (one.turn, one.is_done, one.reward) == (turn, turn == 3, turn / 2)
            assert one.seconds >= 0
    for number in range(20):
        pool.finish(number)
    assert {one.key: one for one in wait_for(pool, 20)} == {number: LastWord(number, 13.0) for number in range(20)}
    assert pool.num_open == pool.num_calls == 0
    assert pool.next_deadline_s() is None


def test_an_environment_may_say_nothing_and_have_no_other_methods(make_pool: MakePool) -> None:
    pool = make_pool("Silent", "Tools")
    [one] = opened(pool, ["a"], 0).values()
    assert isinstance(one, Said)
    assert (one.turn, one.messages, one.is_done, one.reward) == (0, [], False, None)
    assert text(asked(pool, "a", "é\U0001f600")) == "é\U0001f600"
    pool.finish("a")
    assert wait_for(pool, 1) == [LastWord("a", None)]
    [one] = opened(pool, ["b"], 1).values()
    assert isinstance(one, Said)
    assert one.messages == [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]


def test_messages_are_as_long_as_the_run_has_it(make_pool: MakePool) -> None:
    long = "x" * 50_000
    pool = make_pool("Silent", max_chars=40_000)
    opened(pool, ["a"], 0)
    assert text(asked(pool, "a", long)) == f"{'x' * 40_000} ... [cut: 50,000 characters]"
    assert text(asked(pool, "a", long[:40_000], turn=2)) == "x" * 40_000


def test_tool_calls_are_those_of_a_turn(make_pool: MakePool) -> None:
    pool = make_pool("Tools")
    opened(pool, ["a"], 0)
    for turn, (calls, errors) in enumerate([(2, 1), (0, 0), (3, 3)], start=1):
        one = asked(pool, "a", f"{calls} {errors}", turn=turn)
        assert isinstance(one, Said)
        assert (one.num_tool_calls, one.num_tool_errors) == (calls, errors)


@pytest.mark.parametrize("name", ["Meeting", "AsyncMeeting"])
def test_a_hundred_episodes_wait_side_by_side(make_pool: MakePool, name: str) -> None:
    """No step returns before a hundred are in one: in fewer threads, or one after the other, none would."""
    kind = vars(hosted_environments)[name]
    kind.present = 0
    hosted_environments.Meeting.all_here.clear()
    hosted_environments.AsyncMeeting.all_here = None
    pool = make_pool(name)
    opened(pool, list(range(100)), 0, count=100)
    told = take_all(pool, list(range(100)), "")
    assert all(isinstance(one, Said) and one.is_done for one in told.values())


@pytest.mark.parametrize("name", ["Careless", "AsyncCareless"])
@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("raises", "ValueError: z"),
        ("exits", "SystemExit"),
        ("stops", "StopIteration"),
        ("raises what cannot be told", "BrokenTextError"),
        ("raises half a character", r"ValueError: \?"),
        ("returns a number", "int"),
        ("returns text", "str"),
        ("returns nan", "nan"),
        ("returns a role", "role"),
        ("returns an object", "content"),
        ("returns much", "7,2..,... bytes at once"),
        ("returns inf", "float"),
    ],
)
def test_an_error_costs_its_own_episode_only(make_pool: MakePool, name: str, order: str, reason: str) -> None:
    pool = make_pool(name)
    opened(pool, ["good", "bad"], 0)
    one = asked(pool, "bad", f"step {order}")
    assert isinstance(one, Lost)
    assert (one.key, one.is_guilty) == ("bad", True)
    assert re.search(reason, one.reason), one.reason
    assert len(one.reason) < 1100
    assert text(asked(pool, "good", "hello")) == "fine"
    assert pool.num_open == 1
    opened(pool, ["bad"], 0)
    assert text(asked(pool, "bad", "hello")) == "fine"
    assert pool.num_restarts == 0


@pytest.mark.parametrize("name", ["Careless", "AsyncCareless"])
def test_errors_in_other_methods_cost_the_episode_too(make_pool: MakePool, name: str) -> None:
    pool = make_pool(name)
    [one] = opened(pool, ["a"], 0, order="reset raises").values()
    assert "ValueError" in text(one)
    for order in ("final_reward returns inf", "final_reward exits", "close raises"):
        opened(pool, ["a"], 0, order=order)
        pool.finish("a")
        [one] = wait_for(pool, 1)
        assert isinstance(one, Lost), order
    assert pool.num_open == 0


def test_reset_gets_the_columns_that_it_takes(make_pool: MakePool) -> None:
    pool = make_pool("Needy")
    [one] = opened(pool, ["a"], 0, target="x", unknown=1).values()
    assert isinstance(one, Said)
    assert text(one) == "x"
    [one] = opened(pool, ["b"], 0, unknown=1).values()
    assert "TypeError" in text(one)
    assert "target" in text(one)


def test_an_async_call_that_is_late_is_cancelled_alone(make_pool: MakePool) -> None:
    """The deadline passes when the clock is told so, not when a slow machine has taken long."""
    clock = VirtualClock()
    pool = make_pool("AsyncCareless", step_limit_s=LIMIT_S, clock=clock)
    opened(pool, ["late", "waits", "idle"], 0)
    pool.take("late", 1, {"content": "step sleeps"})
    pool.poll()
    clock.advance(LIMIT_S - 1.0)
    pool.take("waits", 1, {"content": "step sleeps"})
    assert pool.next_deadline_s() == LIMIT_S
    clock.advance(1.0)
    assert wait_for(pool, 1) == [Lost("late", "timed out after 7 s", is_guilty=True)]
    assert text(asked(pool, "idle", "hello")) == "fine"
    assert pool.num_restarts == 0
    clock.advance(LIMIT_S - 1.0)
    assert wait_for(pool, 1) == [Lost("waits", "timed out after 7 s", is_guilty=True)]


def test_an_answer_that_waits_is_read_before_its_deadline_is_judged(make_pool: MakePool) -> None:
    clock = VirtualClock()
    pool = make_pool("Diary", step_limit_s=LIMIT_S, clock=clock)
    opened(pool, ["a"], 0, name="n")
    pool.take("a", 1, {"content": "c"})
    wait_until_readable(pool)
    clock.advance(100 * LIMIT_S)
    [one] = pool.poll()
    assert text(one).startswith("n 1 c")


def wait_until_readable(pool: EpisodePool) -> None:
    """Wait until something waits to be read, without reading it."""

    for _ in range(2):  # the first time, it may be that something can be written
        assert select.select(pool.fds(), [], [], GENEROUS_S)[0]


def test_an_episode_that_is_shut_is_heard_of_no_more(make_pool: MakePool) -> None:
    pool = make_pool("AsyncCareless", "Diary")
    pool.open("unborn", 0, {})
    pool.shut("unborn")
    opened(pool, ["a", "b"], 0)
    pool.take("a", 1, {"content": "step sleeps"})
    pool.poll()
    pool.shut("a")
    assert pool.num_open == 1
    opened(pool, ["a"], 1, name="again")
    assert text(asked(pool, "b", "hello")) == "fine"
    assert text(asked(pool, "a", "hello")).startswith("again 1")
    pool.take("a", 2, {"content": "x"})
    wait_until_readable(pool)
    pool.shut("a")  # its answer is on its way
    pool.shut("b")
    pool.shut("never opened")
    opened(pool, ["last"], 1, name="last")
    assert pool.num_open == 1
    while pool.next_deadline_s() is not None:
        wait_until_readable(pool)
        assert pool.poll() == []
    assert pool.num_restarts == 0


def test_an_exit_in_a_task_that_is_left_behind_ends_nothing(make_pool: MakePool) -> None:
    pool = make_pool("AsyncCareless")
    opened(pool, ["a"], 0)
    assert text(asked(pool, "a", "step leaves a task")) == "left"
    assert text(asked(pool, "a", "hello", turn=2)) == "fine"


def test_a_plain_call_that_hangs_costs_its_own_episode_or_its_worker(make_pool: MakePool) -> None:
    clock = VirtualClock()
    pool = make_pool("Careless", step_limit_s=LIMIT_S, clock=clock)
    opened(pool, ["hangs", "idle"], 0)
    pool.take("hangs", 1, {"content": "step hangs"})
    pool.poll()
    clock.advance(LIMIT_S)
    is_jailed = hasattr(pool, "_permissions")
    told = {one.key: one for one in wait_for(pool, 2 if is_jailed else 1)}
    assert told["hangs"] == Lost("hangs", "timed out after 7 s", is_guilty=True)
    if is_jailed:
        assert told["idle"] == Lost("idle", "another episode of its worker: timed out after 7 s", is_guilty=False)
        opened(pool, ["idle"], 0)
    assert text(asked(pool, "idle", "hello")) == "fine"
    assert pool.num_restarts == 1


def test_an_async_call_that_cannot_be_cancelled_is_like_a_plain_one(make_pool: MakePool) -> None:
    clock = VirtualClock()
    pool = make_pool("AsyncCareless", step_limit_s=LIMIT_S, clock=clock)
    opened(pool, ["holds", "idle"], 0)
    pool.take("holds", 1, {"content": "step holds on"})
    pool.poll()
    clock.advance(LIMIT_S)
    is_jailed = hasattr(pool, "_permissions")
    told = {one.key: one for one in wait_for(pool, 2 if is_jailed else 1)}
    assert told["holds"] == Lost("holds", "timed out after 7 s", is_guilty=True)
    assert not is_jailed or (isinstance(told["idle"], Lost) and told["idle"].is_guilty is False)


def test_who_blocks_all_async_environments_is_not_known(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.environments.inline._JOIN_S", 0.1)  # for a loop that does not end
    clock = VirtualClock()
    pool = make_pool("AsyncHostile", step_limit_s=LIMIT_S, clock=clock)
    opened(pool, ["waits", "blocks", "idle"], 0)
    pool.take("waits", 1, {"content": "wait"})
    pool.take("blocks", 1, {"content": "block"})
    pool.poll()
    clock.advance(LIMIT_S)
    assert pool.poll() == [], "it is asked what became of the calls"
    assert pool.next_deadline_s() == LIMIT_S + 5.0
    clock.advance(5.0)
    told = {one.key: one for one in wait_for(pool, 3)}
    guilt = {key: one.is_guilty for key, one in told.items() if isinstance(one, Lost)}
    assert guilt == {"waits": None, "blocks": None, "idle": False}
    opened(pool, ["idle"], 0)
