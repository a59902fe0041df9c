"""Agents with OpenAI's own clients in hosts of both kinds: jailed workers, and this process."""

from __future__ import annotations

import gc
import os
import runpy
import select
import textwrap
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from covering import with_slow
from drive import GENEROUS_S, ends, repeat, reply, rewards, until, wait_for
from hosted_agents import POST
from processes import descendants, is_alive

from slipstream.core.clock import VirtualClock
from slipstream.environments.agents import AgentMaker, FunctionAgent
from slipstream.environments.answers import Asked, Lost
from slipstream.environments.asks import Refused, TurnReply
from slipstream.environments.hosting import MAX_REQUESTS
from slipstream.environments.inline import InlinePool
from slipstream.environments.pool import EpisodePool

MakePool = Callable[..., EpisodePool]
LIMIT_S = 7.0
TALKS = ["run", "run_plain", "run_awaitable"]
INLINE = pytest.mark.parametrize(
    "make_agents", ["inline", pytest.param("in_workers", marks=pytest.mark.slow)], indirect=True
)
"""For what hosts do wherever they are: in workers among the slow tests."""


def in_both(argument: str, *values: Any, alone: Any) -> pytest.MarkDecorator:
    """The value `alone` of an argument in workers, the other `values` in this process; all pairs in the slow tests."""
    pairs = [(where, value) for where in ("in_workers", "inline") for value in values]
    each = [
        pytest.param(*pair, marks=[] if (pair[0] == "in_workers") == (pair[1] == alone) else pytest.mark.slow)
        for pair in pairs
    ]
    return pytest.mark.parametrize(("make_agents", argument), each, indirect=["make_agents"])


PROGRAM = """
    import json, os, sys
    from openai import OpenAI
    row = json.loads(sys.stdin.readline())
    assert os.environ["OPENAI_BASE_URL"].endswith(os.environ["OPENAI_API_KEY"] + "/v1")
    client = OpenAI(max_retries=0)
    messages = [{"role": "user", "content": row["text"]}]
    for _ in range(row["turns"]):
        turn = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": "on"}]
    print("a word")
    print(json.dumps({"reward": len(messages[-2]["content"])}))
"""
LINES = """
    import asyncio, json, sys
    import httpx
    from openai import AsyncOpenAI
    http = httpx.AsyncClient(verify=False, trust_env=False)
    async def play(told):
        row, client = told["row"], AsyncOpenAI(base_url=told["base_url"], api_key=told["api_key"], http_client=http)
        if row.get("do") == "die":
            sys.exit(5)
        try:
            messages = [{"role": "user", "content": row["text"]}]
            for _ in range(row["turns"]):
                turn = (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message
                messages += [{"role": "assistant", "content": turn.content}, {"role": "user", "content": "on"}]
            said = {"reward": len(messages[-2]["content"])}
        except Exception as error:
            said = {"error": str(error)}
        print(json.dumps({"episode": told["episode"], **said}), flush=True)
    async def main():
        reader, tasks = asyncio.StreamReader(), {}
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        print("hello", file=sys.stderr)
        print(json.dumps({"ready": True}), flush=True)
        while raw := await reader.readline():
            told = json.loads(raw)
            if "cancel" in told:
                tasks.pop(told["cancel"]).cancel()
            else:
                tasks[told["episode"]] = asyncio.create_task(play(told))
    asyncio.run(main())
"""


LIGHT_PROGRAM = (
    POST
    + """
    row, base_url, key = json.loads(sys.stdin.readline()), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    assert base_url.endswith(key + "/v1")
    for _ in range(row["turns"]):
        said = post(base_url, key, row["text"])
    print("a word")
    print(json.dumps({"reward": len(said)}))
"""
)
LIGHT_LINES = (
    POST
    + """
    import threading
    def play(told):
        said = post(told["base_url"], told["api_key"], told["row"]["text"])
        print(json.dumps({"episode": told["episode"], "reward": len(said)}), flush=True)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        if "cancel" not in told:
            threading.Thread(target=play, args=[told], daemon=True).start()
"""
)


def script(folder: Path, text: str) -> list[str]:
    """Write a program; return the words of its command."""
    path = folder / f"agent_{len(list(folder.iterdir()))}.py"
    path.write_text(textwrap.dedent(text))
    folder.chmod(0o755)  # a worker is another user
    return ["python", str(path)]


@in_both("name", *TALKS, alone="run")
def test_many_episodes_talk_at_once_and_each_has_its_own_reward(make_agents: MakePool, name: str) -> None:
    pool = make_agents(name, "run_plain")  # in workers a pool that other tests play, too
    count = 8 if isinstance(pool, InlinePool) and name != "run" else 40
    for key in range(count):
        pool.open(key, 0, {"do": "talk", "text": "x" * key, "turns": 1 + key % 3})
    asked: dict[Any, list[int]] = {}

    def answer(one: Asked) -> TurnReply:
        assert one.ask.messages is not None
        asked.setdefault(one.key, []).append(len(one.ask.messages))
        return reply(one.ask.messages[0]["content"] + "!" * len(asked[one.key]))

    assert rewards(ends(pool, count, answer)) == {key: key + 1 + key % 3 for key in range(count)}
    assert asked == {key: [1, 3, 5][: 1 + key % 3] for key in range(count)}
    assert pool.num_open == pool.num_calls == 0
    assert pool.next_deadline_s() is None


@in_both("kind", "program", "lines", alone="lines")
def test_programs_play_side_by_side(
    request: pytest.FixtureRequest, make_agents: MakePool, tmp_path: Path, kind: str
) -> None:
    count = 2 if kind == "program" else 40
    text = LINES
    if kind == "program":  # OpenAI's client takes each half a second to import: in workers, among the slow tests, only
        text = LIGHT_PROGRAM if request.node.callspec.params["make_agents"] == "inline" else PROGRAM
    pool = make_agents((kind, script(tmp_path, text)))
    for key in range(count):
        pool.open(key, 0, {"text": "x" * key, "turns": 2})
    first = wait_for(pool, count)
    assert {one.key for one in first} == set(range(count)), "none waits for another"
    for one in first:
        assert isinstance(one, Asked)
        pool.give(one.key, one.request, repeat(one))

    def answer(one: Asked) -> TurnReply:
        return reply("y" * one.key)

    assert rewards(ends(pool, count, answer)) == {key: float(key) for key in range(count)}


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "a.org,b.org"}, "a.org,b.org,127.0.0.1,localhost"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_an_agent_of_this_process_asks_past_the_proxy_that_the_environment_names(
    make_agents_inline: MakePool, monkeypatch: pytest.MonkeyPatch, before: dict[str, str], meanwhile: str
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    pool = make_agents_inline("run_with_plain_client")
    assert os.environ["no_proxy"] == meanwhile
    pool.open("a", 0, {"text": "abc"})
    assert rewards(ends(pool, 1)) == {"a": 3.0}
    pool.close()
    assert {name: os.environ[name] for name in ("no_proxy", "NO_PROXY") if name in os.environ} == before


def test_the_shipped_agent_asks_past_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported before the run begins."""
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody listens there
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "openai_agent.py"))

    async def play(*asked: Any) -> Any:
        try:
            return await example["play"](*asked)
        finally:
            await example["client"]().close()  # the loop ends before the process does

    pool = InlinePool([AgentMaker(FunctionAgent(play))], step_limit_s=GENEROUS_S)
    try:
        pool.wait_ready()
        pool.open("a", 0, {"prompt": "guess"})
        number = 1 + zlib.crc32(b"guess") % 16
        assert rewards(ends(pool, 1, lambda _: reply(str(number)))) == {"a": 1.0}
    finally:
        pool.close()


@INLINE
def test_requests_of_an_episode_are_open_side_by_side(make_agents: MakePool) -> None:
    pool = make_agents("run")
    pool.open("a", 0, {"do": "parallel", "count": 9})
    asked = wait_for(pool, 9)
    assert pool.num_calls == 0, "it waits for turns"
    assert pool.next_deadline_s() is None, "none of its time passes meanwhile"
    assert len({one.request for one in asked if isinstance(one, Asked)}) == 9
    for one in reversed(asked):
        assert isinstance(one, Asked)
        pool.give("a", one.request, repeat(one))
    assert rewards(ends(pool, 1)) == {"a": 36.0}


@INLINE
def test_rewards_are_numbers_of_any_type_or_none(make_agents: MakePool) -> None:
    expected = {"a number": 3.0, "none": None, "numpy": 0.5}
    pool = make_agents("run")
    for what in expected:
        pool.open(what, 0, {"do": "give", "what": what})
    found = rewards(ends(pool, len(expected)))
    assert found == expected
    assert {type(reward) for reward in found.values()} == {float, type(None)}


@INLINE
def test_what_is_no_reward_costs_its_episode(make_agents: MakePool) -> None:
    pool = make_agents("run")
    bad = ["true", "text", "nan", "a list"]
    for what in bad:
        pool.open(what, 0, {"do": "give", "what": what})
    pool.open("good", 0, {"do": "talk", "text": "abc", "turns": 1})
    told = ends(pool, 1 + len(bad))
    assert rewards({"good": told["good"]}) == {"good": 3.0}
    for what in bad:
        one = told[what]
        assert isinstance(one, Lost), one
        assert one.is_guilty is True
        assert "a reward is" in one.reason


@INLINE
def test_a_turn_with_calls_of_tools_arrives_in_openais_form(make_agents: MakePool) -> None:
    pool = make_agents("run")
    pool.open("a", 0, {"do": "call_a_tool"})
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    def answer(one: Asked) -> TurnReply:
        assert [tool["function"]["name"] for tool in one.ask.tools] == ["add"]
        return reply("", tool_calls=[call])

    assert rewards(ends(pool, 1, answer)) == {"a": 1.0}


@INLINE
def test_a_refusal_is_an_error_of_the_client_with_its_sentence(make_agents: MakePool) -> None:
    pool = make_agents("run")
    sentence = "the episode is over: environment.max_turns = 2"
    pool.open("a", 0, {"do": "note_a_refusal", "sentence": sentence, "code": "max_turns"})
    assert rewards(ends(pool, 1, lambda _: Refused(sentence, code="max_turns"))) == {"a": 1.0}


ERRORS: list[tuple[int, dict[str, Any], str]] = [
    (0, {"do": "fail", "text": "z" * 10_000}, "ValueError: zzz"),
    (0, {"do": "fail", "turns": 2, "text": "no"}, "ValueError: no"),
    (0, {"do": "exits"}, "SystemExit"),
    (1, {"do": "exits"}, "SystemExit"),
    (0, {"do": "cancels_itself"}, "cancelled"),
    (0, {}, "KeyError"),
]


def test_an_error_costs_its_own_episode(make_agents: MakePool) -> None:
    pool = make_agents("run", "run_plain")
    for key, (source, row, _) in enumerate(ERRORS):
        pool.open(key, source, row)
    pool.open("good", 1, {"do": "talk", "text": "abc", "turns": 1})
    told = ends(pool, 1 + len(ERRORS))
    assert rewards({"good": told["good"]}) == {"good": 3.0}
    for key, (_, _, reason) in enumerate(ERRORS):
        one = told[key]
        assert isinstance(one, Lost), one
        assert one.is_guilty is True
        assert reason in one.reason
        assert len(one.reason) < 1_100
    assert pool.num_restarts == 0


@in_both("turns", 0, 2, alone=2)
def test_an_agent_that_hangs_is_late_by_its_own_time_alone(make_agents: MakePool, turns: int) -> None:
    """The time of the policy is not its own: it may take for ever."""
    clock = VirtualClock()
    pool = make_agents("run_light", "run_light", step_limit_s=LIMIT_S, clock=clock)  # a pool that other tests play, too
    pool.open("a", 0, {"do": "hang", "turns": turns})
    pool.poll()
    for _ in range(turns):
        [one] = wait_for(pool, 1)
        assert isinstance(one, Asked)
        assert pool.next_deadline_s() is None
        clock.advance(1_000.0)
        assert pool.poll() == []
        pool.give("a", one.request, repeat(one))
        assert pool.next_deadline_s() == clock.now_s() + LIMIT_S
    clock.advance(LIMIT_S)
    assert wait_for(pool, 1) == [Lost("a", "timed out after 7 s", is_guilty=True)]
    assert pool.num_restarts == 0


def test_one_that_is_refused_and_asks_for_ever_is_late(make_agents: MakePool) -> None:
    clock = VirtualClock()
    pool = make_agents("run_light", "run_light", step_limit_s=LIMIT_S, clock=clock)  # a pool that other tests play, too
    refused = Refused("the episode is over", code="max_turns")
    pool.open("a", 0, {"do": "insist"})
    for told in (refused, reply("a turn gives it all of its time again"), refused, refused):
        [one] = wait_for(pool, 1)
        assert isinstance(one, Asked)
        pool.give("a", one.request, told)
        clock.advance(5.0)
    asked: list[Any] = [None]
    while len(asked) < 1_000 and not isinstance(asked[-1], Lost):
        select.select(pool.fds(), [], [], GENEROUS_S)  # its next request is there before its time is looked at
        for one in pool.poll():
            asked.append(one)
            if isinstance(one, Asked):
                pool.give("a", one.request, refused)
    assert asked[-1] == Lost("a", "timed out after 7 s", is_guilty=True)
    assert pool.num_restarts == 0


@INLINE
def test_an_agents_own_seconds_are_told(make_agents: MakePool) -> None:
    clock = VirtualClock()
    pool = make_agents("run", step_limit_s=LIMIT_S, clock=clock)
    pool.open("a", 0, {"do": "talk", "text": "abc", "turns": 2})
    pool.poll()
    clock.advance(2.0)
    [one] = wait_for(pool, 1)
    assert isinstance(one, Asked)
    assert one.seconds == 2.0
    clock.advance(50.0)
    pool.give("a", one.request, repeat(one))
    clock.advance(3.0)
    [one] = wait_for(pool, 1)
    assert isinstance(one, Asked)
    assert one.seconds == 3.0


@INLINE
def test_one_that_waits_is_closed_when_it_is_shut_and_its_key_is_free(make_agents: MakePool) -> None:
    pool = make_agents("run", "run_plain")
    for source in (0, 1):
        row = {"do": "talk", "text": "abc", "turns": 1}
        pool.open("a", source, row)
        [asked] = wait_for(pool, 1)
        assert isinstance(asked, Asked)
        pool.shut("a")
        assert pool.num_open == 0
        pool.give("a", asked.request, reply("late"))
        pool.open("a", source, {**row, "text": "abcd"})
        assert rewards(ends(pool, 1)) == {"a": 4.0}
    assert until(pool, lambda: not pool._site_of) == [], "of those that were shut nothing is told"
    assert pool.num_restarts == 0


@in_both("name", "run", "run_plain", alone="run")
@pytest.mark.parametrize("is_shut", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_cannot_be_cancelled_costs_its_worker(make_agents: MakePool, name: str, is_shut: bool) -> None:
    """And where it is shut, too: nothing of it may go on behind the pool's back."""
    row = {"do": "swallow", "turns": 0} if name == "run" else {"do": "hang"}
    clock = VirtualClock()
    light = "run_light" if name == "run" else name
    pool = make_agents(light, "run_light", step_limit_s=LIMIT_S, clock=clock)
    pool.open("holds", 0, {**row, "turns": 1})
    [one] = wait_for(pool, 1)
    assert isinstance(one, Asked)
    pool.open("waits", 1, {"do": "hang", "turns": 1})
    wait_for(pool, 1)
    pool.give("holds", one.request, repeat(one))
    until_it_holds(pool)
    if is_shut:
        pool.shut("holds")
    pool.poll()
    clock.advance(LIMIT_S)
    is_jailed = not isinstance(pool, InlinePool)
    told = {one.key: one for one in until(pool, lambda: pool.num_restarts > 0)}
    if not is_shut:
        assert told.pop("holds") == Lost("holds", "timed out after 7 s", is_guilty=True)
    assert [one.is_guilty for one in told.values() if isinstance(one, Lost)] == [False] * is_jailed
    pool.open("again", 1, {"do": "talk", "text": "abc", "turns": 1})
    assert rewards(ends(pool, 1)) == {"again": 3.0}


def until_it_holds(pool: EpisodePool) -> None:
    """Let an episode beside it have a whole turn, so that its own reply has arrived."""
    pool.open("beside", 1, {"do": "talk", "text": "abc", "turns": 2})
    ends(pool, 1)


def test_one_that_blocks_the_loop_costs_all_that_share_it(
    make_agents: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.environments.inline._JOIN_S", 0.1)  # for a loop that does not end
    clock = VirtualClock()
    pool = make_agents("run_light", "run_light", step_limit_s=LIMIT_S, clock=clock)
    pool.open("waits", 0, {"do": "hang", "turns": 1})
    wait_for(pool, 1)
    pool.open("blocks", 0, {"do": "block"})
    pool.poll()
    clock.advance(LIMIT_S)
    assert pool.poll() == [], "it is asked what became of the call"
    clock.advance(5.0)
    told = {one.key: one for one in wait_for(pool, 2)}
    assert {key: one.is_guilty for key, one in told.items() if isinstance(one, Lost)} == {"waits": None, "blocks": None}
    pool.open("again", 0, {"do": "talk", "text": "abc", "turns": 1})
    assert rewards(ends(pool, 1)) == {"again": 3.0}


def test_keys_of_others_wrong_ones_and_none_are_refused(make_agents: MakePool) -> None:
    pool = make_agents("run", "run_plain")
    pool.open("other", 0, {"do": "show_keys", "text": "x"})
    [asked] = wait_for(pool, 1)
    assert isinstance(asked, Asked)
    pool.open("thief", 0, {"do": "steal"})
    assert rewards(ends(pool, 1, lambda one: pytest.fail(f"it was asked: {one}"))) == {"thief": 1.0}
    pool.give("other", asked.request, reply("x"))
    assert rewards(ends(pool, 1)) == {"other": 0.0}


@INLINE
def test_requests_behind_an_episodes_end_are_refused(make_agents: MakePool) -> None:
    pool = make_agents("run")
    pool.open("a", 0, {"do": "leave_a_task", "reward": 0.25})
    for one in wait_for(pool, 2):
        assert isinstance(one, Asked)
        assert one.ask.messages is not None
        if one.ask.messages[-1]["content"] == "first":
            pool.give("a", one.request, reply("y"))
    assert rewards(ends(pool, 1)) == {"a": 0.25}
    pool.open("b", 0, {"do": "tell_what_was_left"})
    assert rewards(ends(pool, 1)) == {"b": 1.0}


@pytest.fixture
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many requests of an episode may be open: fewer in this process, where that can be set."""
    if request.node.callspec.params["make_agents"] == "in_workers":
        return MAX_REQUESTS
    for module in ("pool", "host"):
        monkeypatch.setattr(f"slipstream.environments.{module}.MAX_REQUESTS", 9)
    return 9


@INLINE
def test_more_requests_than_there_are_places_are_refused(make_agents: MakePool, places: int) -> None:
    pool = make_agents("run")
    pool.open("a", 0, {"do": "too_many", "count": places + 6})
    asked = wait_for(pool, places)
    assert pool.poll() == []
    for one in asked:
        assert isinstance(one, Asked)
        pool.give("a", one.request, repeat(one))
    assert rewards(ends(pool, 1)) == {"a": 6.0}


@INLINE
def test_bodies_that_are_too_large_are_refused(make_agents: MakePool) -> None:
    pool = make_agents("run")
    pool.open("a", 0, {"do": "send_too_much"})
    assert rewards(ends(pool, 1, lambda _: reply("2.5"))) == {"a": 2.5}


@INLINE
@pytest.mark.parametrize(("count", "error"), with_slow([(64, "429 too_many_pending")], [(63, "none")]))
def test_a_request_that_was_given_up_holds_its_place_until_its_turn_is_there(
    make_agents: MakePool, places: int, count: int, error: str
) -> None:
    """The policy is busy with it all the same; and the host asks for no more than the pool allows."""
    count += places - MAX_REQUESTS  # the ids are those of workers
    pool = make_agents("run")
    pool.open("a", 0, {"do": "go_away", "count": count, "error": error})
    given_up = wait_for(pool, count)
    pool.open("b", 0, {"do": "signal"})
    assert rewards(ends(pool, 2)) == {"a": 1.0, "b": None}
    for one in given_up:
        assert isinstance(one, Asked)
        pool.give("a", one.request, reply("nobody hears it"))
    pool.open("again", 0, {"do": "parallel", "count": places})
    assert rewards(ends(pool, 1)) == {"again": places * (places - 1) / 2}
    assert pool.num_restarts == 0


def test_open_episodes_end_with_their_pool_and_nothing_is_left(
    make_agents: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # else what tests before this one have left may go in the middle of it
    before = {thread.ident for thread in threading.enumerate()}
    descriptors = len(os.listdir("/proc/self/fd"))
    others = set(descendants(os.getpid()))  # of tests before this one, such as the process that renders chats
    programs = ("program", script(tmp_path, LIGHT_PROGRAM)), ("lines", script(tmp_path, LIGHT_LINES))
    pool = make_agents("run_light", "run_plain_light", *programs)
    for source in range(4):
        pool.open(source, source, {"do": "talk", "text": "abc", "turns": 1})
        pool.open(4 + source, source, {"do": "talk", "text": "abc", "turns": 1})
    wait_for(pool, 8)
    below = set(descendants(os.getpid())) - others
    assert len(below) >= 2
    pool.close()
    assert not [pid for pid in below if is_alive(pid)]
    for thread in threading.enumerate():
        if thread.ident not in before:
            thread.join(GENEROUS_S)
            assert not thread.is_alive(), thread
    assert len(os.listdir("/proc/self/fd")) == descriptors


@INLINE
def test_nothing_of_an_episode_is_left_in_its_host(make_agents: MakePool, tmp_path: Path) -> None:
    pool = make_agents("run", "run_plain", ("program", script(tmp_path, "print(0.5)")), "run_light")

    def counted() -> list[float]:
        kinds = ["descriptors", "threads"]
        for kind in kinds:
            pool.open(kind, 3, {"do": "give", "what": kind})
        found = rewards(ends(pool, 2))
        return [found[kind] or 0.0 for kind in kinds]

    row = {"do": "talk", "text": "abc", "turns": 1}
    for key in range(16):
        pool.open(key, key % 2, row)
    ends(pool, 16)  # clients keep threads of their own from then on
    before = counted()
    for key in range(16):
        pool.open(key, key % 2, row)
    held = wait_for(pool, 16)
    for key in range(4):
        pool.shut(key)
    for one in held:
        if one.key not in range(4):
            assert isinstance(one, Asked)
            pool.give(one.key, one.request, repeat(one))
    assert rewards(ends(pool, 12)) == dict.fromkeys(range(4, 16), 3.0)
    for key in range(3):
        pool.open(key, 2, {})
    assert rewards(ends(pool, 3)) == dict.fromkeys(range(3), 0.5)
    looks = (counted() for _ in range(200))  # connections and threads end a little later
    assert any(all(now <= then for now, then in zip(look, before, strict=True)) for look in looks), (before, counted())
