"""Environments in this process: what cannot be killed is left behind, and there are bounds to that."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import hosted_environments
import pytest
from drive import GENEROUS_S, asked, opened, text, wait_for

from slipstream.core.clock import VirtualClock
from slipstream.environments.answers import LastWord, Lost, Said
from slipstream.environments.inline import InlinePool
from slipstream.environments.protocol import Step
from slipstream.environments.tools import FunctionTools
from slipstream.environments.trl import FactoryEnvironment

MakePool = Callable[..., InlinePool]
LIMIT_S = 7.0


@pytest.mark.parametrize(
    ("name", "order"), [("Careless", "step hangs"), ("AsyncCareless", "step holds on"), ("AsyncHostile", "block")]
)
def test_while_eight_hang_none_is_opened(
    make_inline: MakePool, name: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread each, a task that swallows its cancellation, or the loop that all share."""
    monkeypatch.setattr("slipstream.environments.inline._JOIN_S", 0.1)
    clock = VirtualClock()
    pool = make_inline(name, "Diary", step_limit_s=LIMIT_S, clock=clock)
    for _ in range(8):
        assert pool.num_restarts < 8
        opened(pool, ["a"], 0)
        pool.take("a", 1, {"content": order})
        pool.poll()
        clock.advance(LIMIT_S)
        pool.poll()
        clock.advance(5.0 if name == "AsyncHostile" else 0.0)
        [one] = wait_for(pool, 1)
        assert isinstance(one, Lost)
        assert one.is_guilty
    [one] = opened(pool, ["a"], 1, name="n").values()
    assert one == Lost("a", "environments hang in 8 calls, and none is opened meanwhile", is_guilty=True)
    assert pool.num_open == 0
    hosted_environments.RELEASED.set()
    assert all(returned.wait(GENEROUS_S) for returned in pool._abandoned)
    assert isinstance(opened(pool, ["a"], 1, name="n")["a"], Said)
    assert pool.num_restarts == 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its task is never done
def test_a_call_that_ends_with_its_loop_has_come_back(make_inline: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One swallows its cancellation as long as the loop lasts, which another one blocks for a time."""
    monkeypatch.setattr("slipstream.environments.inline._JOIN_S", 0.1)
    released = threading.Event()
    monkeypatch.setattr(hosted_environments, "RELEASED", threading.Event())  # of the first, for good
    monkeypatch.setattr(hosted_environments.AsyncHostile, "step", blocked_until(released))
    clock = VirtualClock()
    pool = make_inline("AsyncCareless", "AsyncHostile", step_limit_s=LIMIT_S, clock=clock)
    opened(pool, ["holds"], 0)
    pool.take("holds", 1, {"content": "step holds on"})
    pool.poll()
    clock.advance(LIMIT_S)
    assert isinstance(wait_for(pool, 1)[0], Lost)
    opened(pool, ["blocks"], 1)
    pool.take("blocks", 1, {"content": "block"})
    pool.poll()
    clock.advance(LIMIT_S)
    pool.poll()
    clock.advance(5.0)
    assert isinstance(wait_for(pool, 1)[0], Lost)
    assert [returned.is_set() for returned in pool._abandoned] == [False, False]
    released.set()
    assert all(returned.wait(GENEROUS_S) for returned in pool._abandoned)
    pool.close()
    gc.collect()  # here, where the warning is expected


def blocked_until(released: threading.Event) -> Callable[..., Any]:
    """Return a step that blocks its loop until then."""

    async def step(self: Any, message: dict[str, Any]) -> Step:
        released.wait(GENEROUS_S)
        return Step(done=True)

    return step


def test_what_is_open_at_the_end_is_closed(make_inline: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
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


class Board:
    """Plays on what it was given, and on the policy's message."""

    def reset(self, board: list[list[str]], prompt: list[dict[str, Any]]) -> str:
        self.board = board
        prompt.append({"role": "user", "content": "more"})
        return f"{len(prompt)} {board}"

    def step(self, message: dict[str, Any]) -> Step:
        self.board[0][0] = "X"
        message["content"] = "mine"
        return Step(f"{self.board}")


@pytest.mark.parametrize("is_async", [False, True])
def test_what_it_is_given_is_its_own(make_inline: MakePool, monkeypatch: pytest.MonkeyPatch, is_async: bool) -> None:
    """A prompt's columns are those of all samples, of the trial before a run and of evaluations."""

    class AsyncBoard(Board):
        async def reset(self, **columns: Any) -> str:  # type: ignore[override]
            return super().reset(**columns)

        async def step(self, message: dict[str, Any]) -> Step:  # type: ignore[override]
            return super().step(message)

    monkeypatch.setattr(hosted_environments, "Board", AsyncBoard if is_async else Board, raising=False)
    pool = make_inline("Board")
    columns = {"board": [["."]], "prompt": [{"role": "user", "content": "q"}]}
    message = {"role": "assistant", "content": "X"}
    for key in ("a", "b"):
        assert text(opened(pool, [key], 0, **columns)[key]) == "2 [['.']]"
        pool.take(key, 1, message)
        assert text(wait_for(pool, 1)[0]) == "[['X']]"
    assert columns == {"board": [["."]], "prompt": [{"role": "user", "content": "q"}]}
    assert message == {"role": "assistant", "content": "X"}, "a record shows what was sampled"


MEETING = threading.Barrier(2, timeout=20.0)
"""Two episodes that are called at the same time get on; one that holds up the other breaks it."""


def meet() -> str:
    """Wait for the other episode."""
    MEETING.wait()
    return "met"


async def rest() -> str:
    """Let others go on."""
    await asyncio.sleep(0)
    return "rested"


def stop() -> str:
    """Raise what no coroutine can raise."""
    return next(iter(()))


class Meeting:
    """A TRL environment whose methods are not async."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def reset(self, **columns: Any) -> str:
        assert self.thread == threading.get_ident()
        return meet()

    def look(self) -> bool:
        """Wait for the other episode; tell whether this is the thread that made the object."""
        meet()
        return self.thread == threading.get_ident()

    def get_reward(self) -> float:
        meet()
        return 1.0


class Built:
    """A plain environment that runs the loop of its tools by itself."""

    def reset(self) -> None:
        self.tools = FunctionTools([meet, rest])

    def step(self, message: dict[str, Any]) -> Step:
        return asyncio.run(self.tools.step(message))


@pytest.mark.parametrize(
    ("make", "calls", "answers", "reward"),
    [
        (partial(FunctionTools, [meet, rest]), ["meet"], ["met"], None),
        (partial(FunctionTools, [meet, rest]), ["rest", "meet", "rest"], ["rested", "met", "rested"], None),
        (partial(FunctionTools, [meet, stop]), ["stop", "meet"], ["Error: StopIteration", "met"], None),
        (partial(FactoryEnvironment, Meeting), ["look"], ["True"], 1.0),
        (partial(FactoryEnvironment, Meeting, tools=[rest]), ["rest", "look"], ["rested", "True"], 1.0),
        (Built, ["rest", "meet"], ["rested", "met"], None),
    ],
    ids=["tools", "plain and async tools", "a tool that stops", "TRL", "TRL and an async tool", "tools within"],
)
def test_plain_functions_of_two_episodes_run_side_by_side(
    make: Callable[[], Any], calls: list[str], answers: list[str], reward: float | None
) -> None:
    pool = InlinePool([make], step_limit_s=GENEROUS_S)
    MEETING.reset()
    try:
        pool.wait_ready()
        assert not any(isinstance(one, Lost) for one in opened(pool, ["a", "b"], 0).values())
        tool_calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in calls]
        for key in ("a", "b"):
            pool.take(key, 1, {"role": "assistant", "content": "", "tool_calls": tool_calls})
        for one in wait_for(pool, 2):
            assert isinstance(one, Said)
            assert [message["content"] for message in one.messages] == answers
        for key in ("a", "b"):
            pool.finish(key)
        assert sorted(wait_for(pool, 2), key=str) == [LastWord("a", reward), LastWord("b", reward)]
    finally:
        pool.close()
