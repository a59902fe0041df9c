"""Python functions are called together: sync ones in threads, `async def` ones on one loop, each with its deadline."""

from __future__ import annotations

import asyncio
import functools
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ports import start
from reward_jobs import GENEROUS_S, job
from test_rewards_executor import completion, drive

from slipstream.core.clock import VirtualClock
from slipstream.core.sections import RewardsConfig, RewardTerm
from slipstream.core.types import Completion, EpisodeRecord, Rollout, Stop
from slipstream.rewards.awaited import LoopScorer, Seat
from slipstream.rewards.calls import Scoring, await_function, call_function, is_async
from slipstream.rewards.executor import Rewards
from slipstream.rewards.inline import CallableScorer
from slipstream.rewards.logged import CURRENT
from slipstream.rewards.pool import ScoredJob
from slipstream.rewards.protocol import AnyJob, RewardGroupJob


def together(n: int) -> Callable[..., list[float]]:
    """A function whose calls wait until `n` are inside: with fewer at once none returns."""
    barrier = threading.Barrier(n)

    def reward(completions: list[str], **_: Any) -> list[float]:
        barrier.wait(GENEROUS_S)
        return [float(len(text)) for text in completions]

    return reward


def rewards_of(
    functions: dict[str, Callable[..., Any]],
    tmp_path: Path,
    *,
    num: int = 8,
    num_hanging: int = 0,
    per: Any = "completion",
    of: Sequence[Completion] = (),
    **fields: Any,
) -> list[Rollout]:
    """No deadline passes before all answers are there but those of calls that hang."""
    clock = VirtualClock()
    terms = [RewardTerm(function=f"python:{name}", per=per) for name in functions]
    weight = 1.0 if of else None  # of episodes
    executor = Rewards(RewardsConfig(terms=terms, **fields), {}, functions=functions, environment_weight=weight)
    ports = start(executor, tmp_path, name="rewards", clock=clock)
    completions = of or [completion(i, "x" * i) for i in range(num)]
    num = len(completions)
    for one in completions:
        ports["completions"].put(one)
    try:
        drive(executor, lambda: len(ports["rollouts"].messages) == num - num_hanging)
        clock.advance(60.0)
        drive(executor, lambda: len(ports["rollouts"].messages) == num)
        ports["commands"].put(Stop())
        drive(executor)
    finally:
        executor.close()
    rollouts = [message for message in ports["rollouts"].messages if isinstance(message, Rollout)]
    return sorted(rollouts, key=lambda rollout: rollout.completion.ordinal)


def test_so_many_threads_are_called_at_once(tmp_path: Path) -> None:
    rollouts = rewards_of({"f": together(4)}, tmp_path, num_threads=4)
    assert [one.reward for one in rollouts] == [float(i) for i in range(8)]


def test_one_thread_is_for_functions_that_are_not_safe_in_several(tmp_path: Path) -> None:
    inside: list[int] = []

    def alone(completions: list[str], **_: Any) -> list[float]:
        inside.append(1)
        assert len(inside) == 1
        time.sleep(0.005)
        inside.pop()
        return [1.0]

    assert [one.failure for one in rewards_of({"f": alone}, tmp_path, num_threads=1)] == [None] * 8


def test_coroutines_are_awaited_together_on_one_loop(tmp_path: Path) -> None:
    """Two functions share what belongs to a loop; eight calls of each wait for each other."""
    loops: set[Any] = set()
    arrived: list[int] = []
    is_full: asyncio.Event | None = None

    async def meet(completions: list[str]) -> list[float]:
        nonlocal is_full
        loops.add(asyncio.get_running_loop())
        is_full = is_full or asyncio.Event()
        arrived.append(1)
        if len(arrived) == 16:
            is_full.set()
        await is_full.wait()
        return [float(len(text)) for text in completions]

    async def first(completions: list[str], **_: Any) -> list[float]:
        return await meet(completions)

    class Second:
        async def __call__(self, completions: list[str], **_: Any) -> list[float]:
            return await meet(completions)

    rollouts = rewards_of({"first": first, "second": functools.partial(Second())}, tmp_path)
    assert [one.reward for one in rollouts] == [2.0 * i for i in range(8)]
    assert len(loops) == 1


def test_what_belongs_to_the_loop_can_be_used_by_the_next_scorer(tmp_path: Path) -> None:
    """A client that is made in the dry call serves the run, and evaluations behind it."""
    made: list[Any] = []

    async def reward(completions: list[str], **_: Any) -> list[float]:
        made.append(asyncio.get_running_loop())
        ready = made[0].create_future()  # as a client's connection waits for an answer
        made[0].call_later(0.001, ready.set_result, 1.0)
        return [await ready]

    for number in range(3):
        (tmp_path / str(number)).mkdir()
        rollouts = rewards_of({"f": reward}, tmp_path / str(number))
        assert [one.failure for one in rollouts] == [None] * 8


def test_what_belongs_to_the_loop_of_a_thread_can_be_used_by_its_next_call(tmp_path: Path) -> None:
    """A `def` that returns a coroutine; what each call logs is its own."""
    made, threads = list[Any](), set[threading.Thread]()

    async def awaited(completions: list[str]) -> list[float]:
        threads.add(threading.current_thread())
        made.append(asyncio.get_running_loop())
        ready = made[0].create_future()
        made[0].call_later(0.001, ready.set_result, float(len(completions[0])))
        CURRENT.get().log_metric("length", await ready)
        return [0.0]

    def reward(completions: list[str], **_: Any) -> Any:
        return awaited(completions)

    rollouts = rewards_of({"f": reward}, tmp_path, num_threads=1)
    assert [one.failure for one in rollouts] == [None] * 8
    assert [one.logged for one in rollouts] == [{"length": float(i)} for i in range(8)]
    [thread] = threads
    thread.join(GENEROUS_S)
    assert made[0].is_closed(), "it ends with its thread"


def test_what_a_call_leaves_running_ends_with_it(tmp_path: Path) -> None:
    left: list[asyncio.Task[None]] = []

    async def awaited() -> list[float]:
        left.append(asyncio.create_task(asyncio.sleep(GENEROUS_S)))
        return [float(sum(task.done() for task in left))]

    rollouts = rewards_of({"f": lambda **_: awaited()}, tmp_path, num=3, num_threads=1)
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0]


def test_a_loop_that_was_left_behind_is_not_gone_on_with() -> None:
    clock, awaited_by = VirtualClock(), []
    blocked, comes_back = threading.Event(), threading.Event()

    async def scores(job: AnyJob) -> list[float | None]:
        awaited_by.append(asyncio.get_running_loop())
        if len(awaited_by) == 1:
            blocked.set()
            comes_back.wait(GENEROUS_S)
        return [1.0]

    seats = {"f": Seat(name="f", score=scores, timeout_s=5.0, max_at_once=1)}
    for passing_s, numbers in (((6.0, 1.5), (0, 1)), ((), (2,))):  # the second job begins again on another loop
        scorer = LoopScorer(seats, clock=clock, keeps_loop=True)
        for number in numbers:
            scorer.submit(job(number, "a"), "f")
        done = scorer.poll()
        assert blocked.wait(GENEROUS_S)
        for seconds in passing_s:
            clock.advance(seconds)
            done += scorer.poll()
        while len(done) < len(numbers):
            select.select(scorer.fds(), [], [], GENEROUS_S)
            done += scorer.poll()
        comes_back.set()
        for thread in vars(scorer)["_abandoned"]:
            thread.join(GENEROUS_S)
        scorer.close()
    assert awaited_by[0] is not awaited_by[1]
    assert awaited_by[1:] == [awaited_by[1]] * 2


def test_what_a_coroutine_logs_is_of_its_own_completion(tmp_path: Path) -> None:
    async def reward(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("length", [len(text) for text in completions])
        await asyncio.sleep(0.01)  # others log meanwhile
        log_metric("length", len(completions[0]))
        return [0.0]

    rollouts = rewards_of({"f": reward}, tmp_path, max_awaited=8)
    assert [one.extra for one in rollouts] == [{"length": i} for i in range(8)]
    assert [one.logged for one in rollouts] == [{"length": float(i)} for i in range(8)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_may_change_what_it_is_given(tmp_path: Path, is_async: bool) -> None:
    """Prompts serve all completions of a group, and a record is what was said."""

    def changes(prompts: Any, completions: Any, tests: list[list[int]], **_: Any) -> list[float]:
        prompts[0].append({"role": "assistant", "content": "a"})
        completions[0].append({"role": "user", "content": "b"})
        return [100.0 * len(prompts[0]) + 10 * len(completions[0]) + tests[0].pop()]

    async def awaited(**columns: Any) -> list[float]:
        return changes(**columns)

    one = completion(0, "x")
    prompt = msgspec.structs.replace(one.prompt, messages=[{"role": "user", "content": "q"}], columns={"tests": [3, 4]})
    said = EpisodeRecord(messages=[{"role": "assistant", "content": "x"}])
    episodes = [msgspec.structs.replace(completion(i, "x"), prompt=prompt, episode=said) for i in range(3)]
    function = awaited if is_async else changes
    rollouts = rewards_of({"f": function, "g": function}, tmp_path, of=episodes)
    assert [rollout.reward for rollout in rollouts] == [448.0] * 3
    assert (len(prompt.messages or ()), prompt.columns, len(said.messages)) == (1, {"tests": [3, 4]}, 1)


def test_coroutines_may_be_called_one_by_one(tmp_path: Path) -> None:
    inside: list[int] = []

    async def alone(completions: list[str], **_: Any) -> list[float]:
        inside.append(1)
        assert len(inside) == 1
        await asyncio.sleep(0.005)
        inside.pop()
        return [1.0]

    assert [one.failure for one in rewards_of({"f": alone}, tmp_path, max_awaited=1)] == [None] * 8


def test_a_coroutine_that_fails_or_hangs_fails_its_completion_alone(tmp_path: Path) -> None:
    async def mixed(completions: list[str], **_: Any) -> list[float]:
        n = len(completions[0])
        if n == 1:
            raise SystemExit(3)
        if n == 2:
            raise asyncio.CancelledError
        if n == 3:
            await asyncio.Event().wait()
        return [float(n)]

    failures = [one.failure or "" for one in rewards_of({"f": mixed}, tmp_path, num_hanging=1, timeout_s=9.0)]
    assert failures[1].startswith("f: SystemExit: 3 (test_calls_together.py, line")
    assert failures[2].startswith("f: CancelledError")
    assert failures[3] == "f: timed out after 9 s"
    assert failures[0] == "".join(failures[4:]) == ""


def test_a_task_of_a_coroutine_that_exits_fails_its_completion_alone(tmp_path: Path) -> None:
    """It leaves asyncio's loop by way of `run_forever`, with all that the loop has open."""

    async def part(n: int) -> float:
        await asyncio.sleep(0)
        if n % 3 == 1:
            raise SystemExit(n)
        await asyncio.sleep(0.01)
        return float(n)

    async def gathers(completions: list[str], **_: Any) -> list[float]:
        return list(await asyncio.gather(*(part(len(text)) for text in completions)))

    failures = [one.failure or "" for one in rewards_of({"f": gathers}, tmp_path)]
    assert [bool(failure) for failure in failures] == [n % 3 == 1 for n in range(8)]
    assert failures[4].startswith("f: SystemExit: 4")


def test_sync_and_async_functions_score_beside_each_other(tmp_path: Path) -> None:
    async def awaited(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def awaits(completions: list[str], **_: Any) -> Any:
        return awaited(completions)  # no `async def`: it is called in a thread, and its coroutine awaited there

    assert (is_async(awaited), is_async(awaits), is_async(partial(awaited)), is_async(len)) == (
        True,
        False,
        True,
        False,
    )
    rollouts = rewards_of({"awaited": awaited, "awaits": awaits}, tmp_path)
    assert [one.reward_parts for one in rollouts] == [{"awaited": float(i), "awaits": float(i)} for i in range(8)]


def test_a_group_is_one_call_of_a_coroutine(tmp_path: Path) -> None:
    async def rank(completions: list[str], **_: Any) -> list[float]:
        return [float(sorted(completions).index(text)) for text in completions]

    async def score(one: AnyJob) -> list[float | None]:
        assert isinstance(one, RewardGroupJob)
        return await await_function(rank, one.jobs)

    with closed(LoopScorer({"here": Seat("rank", score, GENEROUS_S, 1)})) as scorer:
        scorer.submit(RewardGroupJob(5, [job(5, text) for text in "cab"]), "here")
        assert finished(scorer, 1)[5].parts == [2.0, 0.0, 1.0]


@contextmanager
def closed(scorer: Any) -> Iterator[Any]:
    try:
        yield scorer
    finally:
        scorer.close()


def finished(scorer: Any, num: int, *, tick: Callable[[], None] = lambda: None) -> dict[int, ScoredJob]:
    done: dict[int, ScoredJob] = {}
    end_s = time.monotonic() + 60
    while len(done) < num:
        assert time.monotonic() < end_s, sorted(done)
        done |= {one.job_id: one for one in scorer.poll()}
        tick()
        select.select(scorer.fds(), [], [], 0.01)
    return done


def test_a_loop_that_is_blocked_is_left_and_what_it_had_begins_again() -> None:
    """Job 0 blocks the loop. When it is overdue, job 1, which came later, is not: it is scored by another loop."""
    clock, release, blocks = VirtualClock(), threading.Event(), threading.Event()

    async def score(one: AnyJob) -> list[float | None]:
        if one.job_id == 0:
            blocks.set()
            release.wait(GENEROUS_S)
        return [1.0]

    with closed(LoopScorer({"f": Seat("f", score, 5.0, 4)}, clock=clock)) as scorer:
        scorer.submit(job(0, "a"), "f")
        scorer.poll()
        assert blocks.wait(GENEROUS_S)
        clock.advance(4.0)
        scorer.submit(job(1, "b"), "f")
        scorer.poll()
        clock.advance(1.0)
        [late] = scorer.poll()
        assert (late.job_id, late.failure) == (0, "f: timed out after 5 s")
        clock.advance(1.0)  # nor does it turn within a second
        assert finished(scorer, 1)[1].parts == [1.0]
        assert scorer.num_restarts == 1
        release.set()


def test_threads_that_hang_are_replaced_and_others_go_on() -> None:
    clock, release = VirtualClock(), threading.Event()
    hung: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        if completions[0] == "hang":
            hung.append("here")
            release.wait(GENEROUS_S)
        return [1.0]

    scorings = [Scoring("f", "completion", partial(call_function, reward))]
    with closed(CallableScorer(scorings, timeout_s=2.0, num_threads=2, clock=clock)) as scorer:
        for i in range(6):
            scorer.submit(job(i, "hang" if i in (0, 3) else "ok"))

        def tick() -> None:
            if len(hung) == 2:  # in both threads: nobody else is at work while time goes on
                hung.clear()
                clock.advance(2.0)

        try:
            done = finished(scorer, 6, tick=tick)
        finally:
            release.set()
        assert [done[i].failure for i in (1, 2, 4, 5)] == [None] * 4
        assert {done[0].failure, done[3].failure} == {"f: timed out after 2 s"}
        assert scorer.num_restarts == 2


def test_while_eight_hang_no_call_begins_but_one_in_another_thread_may_hang() -> None:
    """Two threads, in turn overdue each second: when the eighth is, the ninth has begun."""
    clock, release = VirtualClock(), threading.Event()

    def reward(completions: list[str], **_: Any) -> list[float]:
        release.wait(GENEROUS_S)
        return [1.0]

    scorings = [Scoring("f", "completion", partial(call_function, reward))]
    with closed(CallableScorer(scorings, timeout_s=2.0, num_threads=2, clock=clock)) as scorer:
        done: list[ScoredJob] = []
        for i in range(12):
            scorer.submit(job(i, "a"))
            if i < 2:
                done += scorer.poll()
                clock.advance(1.0)
        for _ in range(9):
            done += scorer.poll()
            clock.advance(1.0)
        release.set()
        assert scorer.next_deadline_s() is None
        failures = {one.job_id: one.failure for one in done}
        assert [failures[i] for i in range(9)] == ["f: timed out after 2 s"] * 9
        meanwhile = "the reward function hangs in 8 threads and is not called meanwhile"
        assert [failures[i] for i in range(9, 12)] == [meanwhile] * 3
        assert scorer.num_restarts == 9


def test_while_eight_loops_are_blocked_none_is_begun() -> None:
    clock, blocks, release = VirtualClock(), threading.Semaphore(0), threading.Event()

    async def score(one: AnyJob) -> list[float | None]:
        if one.job_id < 8:
            blocks.release()
            release.wait(GENEROUS_S)
        return [1.0]

    with closed(LoopScorer({"f": Seat("f", score, 5.0, 1)}, clock=clock)) as scorer:
        for i in range(8):
            scorer.submit(job(i, "a"), "f")
            scorer.poll()
            assert blocks.acquire(timeout=GENEROUS_S)
            clock.advance(5.0)
            [late] = scorer.poll()
            assert late.failure == "f: timed out after 5 s"
            clock.advance(1.0)
            assert scorer.poll() == []
        threads = [thread for thread in threading.enumerate() if thread.name == "reward-loop"]
        scorer.submit(job(8, "a"), "f")
        assert [one.failure for one in scorer.poll()] == ["f: 8 loops hang, and none is begun meanwhile"]
        release.set()
        for thread in threads:
            thread.join(GENEROUS_S)
        scorer.submit(job(9, "a"), "f")
        assert finished(scorer, 1)[9].parts == [1.0]


def test_an_answer_after_the_end_goes_nowhere() -> None:
    release, inside = threading.Event(), threading.Event()

    def reward(completions: list[str], **_: Any) -> list[float]:
        inside.set()
        release.wait(GENEROUS_S)
        return [1.0]

    scorer = CallableScorer([Scoring("f", "completion", partial(call_function, reward))], timeout_s=9.0)
    scorer.submit(job(0, "a"))
    scorer.poll()
    assert inside.wait(GENEROUS_S)
    thread = next(thread for thread in threading.enumerate() if thread.name == "reward-function" and thread.is_alive())
    scorer.close()
    release.set()
    thread.join(GENEROUS_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("field", ["num_threads", "max_awaited"])
def test_none_at_once_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        RewardsConfig(**{field: 0})
