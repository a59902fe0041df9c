"""Episodes across a resume: what is kept of their environments, and what becomes of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from drive import asked, opened, text, wait_for
from episode_world import LIMITS, PROMPT, PlainNumbers, World, prompt

from slipstream.core.clock import VirtualClock
from slipstream.core.saved import load_messages, save_messages
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import EpisodeRecord, Segment, VersionSpan
from slipstream.core.unfinished_messages import PartialEpisode
from slipstream.environments.answers import LastWord, Lost, Said
from slipstream.environments.calculator import Calculator
from slipstream.environments.episodes import EpisodeTable, Finish, Open, Sources, Take
from slipstream.environments.guess import Guess
from slipstream.environments.known_episode import EpisodeLimits
from slipstream.environments.pool import EpisodePool
from slipstream.environments.protocol import EnvironmentFault, as_state

MakePool = Callable[..., EpisodePool]
KEY = (-1, 3, 1)


# Hosts


def one_of(pool: EpisodePool) -> Any:
    [told] = wait_for(pool, 1)
    return told


@pytest.mark.parametrize("name", ["Keeper", "AsyncKeeper", "CountingKeeper"])
def test_another_object_goes_on_from_a_state(make_pool: MakePool, name: str) -> None:
    pool = make_pool(name)
    pool.open("a", 0, {"name": "n", "state": "a column of that name"}, keeps_state=True)
    assert json.loads(one_of(pool).state) == {"words": ["n"], "nothing": None, "half": "\U0001f600"}
    before = asked(pool, "a", "é", turn=1)
    assert isinstance(before, Said)
    pool.open("b", 0, {"name": "n", "state": "a column of that name"}, keeps_state=True, state=before.state, turn=1)
    told = one_of(pool)
    assert (told.turn, told.messages, told.is_done, told.reward, told.num_tool_calls) == (1, [], False, None, 0)
    for key in ("a", "b"):
        after = asked(pool, key, "2", turn=2)
        assert isinstance(after, Said)
        assert text(after) == "n é 2"
        assert json.loads(after.state or "")["words"] == ["n", "é", "2"]
        assert after.num_tool_calls == (name == "CountingKeeper")
    over = asked(pool, "b", "end", turn=3)
    assert isinstance(over, Said)
    assert (over.is_done, over.state) == (True, None), "nothing comes behind it"


def test_a_state_is_not_asked_for_where_it_is_not_kept(make_pool: MakePool) -> None:
    pool = make_pool("BadKeeper", "OnlyState")
    opened(pool, ["a"], 0, name="n")
    told = asked(pool, "a", "raises")
    assert isinstance(told, Said)
    assert (told.state, told.state_bytes) == (None, 0)
    pool.open("b", 1, {}, keeps_state=True)
    assert one_of(pool).state is None, "an attribute is no method"
    pool.open("c", 1, {}, state="3", turn=1)
    assert "no methods state and restore" in text(one_of(pool))


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("raises", "ValueError: no state"),
        ("nan", "value of JSON"),
        ("tuple", "without tuples"),
        ("number key", "keys that are no strings"),
        ("object", "TypeError"),
        ("circle", "RecursionError"),
        ("bytes", "value of JSON"),
        ("half a character", "UnicodeEncodeError"),
    ],
)
def test_a_state_that_is_none_costs_the_episode(make_pool: MakePool, order: str, reason: str) -> None:
    pool = make_pool("BadKeeper")
    pool.open("a", 0, {"name": "n"}, keeps_state=True)
    one_of(pool)
    told = asked(pool, "a", order)
    assert isinstance(told, Lost)
    assert told.is_guilty
    assert re.search(reason, told.reason), told.reason


def test_a_state_that_is_too_large_is_not_kept_and_costs_nothing(make_pool: MakePool) -> None:
    pool = make_pool("BadKeeper")
    pool.open("a", 0, {"name": "n"}, keeps_state=True)
    one_of(pool)
    told = asked(pool, "a", "large")
    assert isinstance(told, Said)
    assert (told.state, told.state_bytes) == (None, (256 << 10) + 2)
    told = asked(pool, "a", "small", turn=2)
    assert isinstance(told, Said)
    assert json.loads(told.state or "") == ["n", "large", "small"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [('["restore raises"]', "KeyError"), ("[]", "restore returns nothing"), ("{", "DecodeError")],
)
def test_a_restore_that_fails_costs_the_episode(make_pool: MakePool, state: str, reason: str) -> None:
    pool = make_pool("BadKeeper")
    pool.open("a", 0, {"name": "n"}, keeps_state=True, state=state, turn=2)
    told = one_of(pool)
    assert isinstance(told, Lost)
    assert reason in told.reason
    pool.open("a", 0, {"name": "n"})
    assert text(one_of(pool)) == "n", "the key is free"


@pytest.mark.parametrize("value", [None, 0, "", [], {"a": [1, 2.5, True, None, "é\U0001f600"]}, 10**30])
def test_what_restore_gets_is_what_state_returned(value: Any) -> None:
    assert json.loads(as_state(value)) == value


@pytest.mark.parametrize("value", [(1,), {1: 1}, {None: 1}, float("inf"), "\ud800", {1, 2}, np.int64(1), np.zeros(1)])
def test_values_that_json_would_change_are_refused(value: Any) -> None:
    with pytest.raises(EnvironmentFault, match="a value of JSON"):
        as_state(value)


@pytest.mark.parametrize(
    ("make", "columns", "turns"),
    [(Guess, {"answer": "9"}, ["1", "x", "12", "9"]), (Calculator, {"answer": "9"}, ["3*3=", "?=", "9"])],
)
def test_shipped_environments_go_on_from_any_turn(make: Callable[..., Any], columns: Any, turns: list[str]) -> None:
    """Limits count what was before: the last turn allowed is the same one."""
    for limit in range(1, 4):
        for place in range(len(turns)):
            whole, other = make(*([16] if make is Guess else []), limit), make(*([16] if make is Guess else []), limit)
            whole.reset(**columns)
            for word in turns[:place]:
                whole.step({"content": word})
            other.restore(json.loads(as_state(whole.state())), **columns)
            for word in turns[place:]:
                assert whole.step({"content": word}) == other.step({"content": word})


# The table


def table(**limits: Any) -> EpisodeTable:
    limited = EpisodeLimits(**{**vars(LIMITS), **limits})
    return EpisodeTable(limited, PlainNumbers(), Sources(("",), (1.0,)), keeps_states=True)


def turn(number: int, tokens: list[int], *, life: int = 1, version: int = 0) -> TurnSampled:
    segment = Segment(
        tokens=np.array(tokens, dtype=np.int32),
        behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=version),),
    )
    return TurnSampled(ordinal=3, sample=1, replica=0, turn=number, life=life, segment=segment, finish_reason="stop")


def opening(**fields: Any) -> TurnSampled:
    return TurnSampled(ordinal=3, sample=1, replica=0, turn=0, prompt=prompt(3), **fields)


def said(number: int, words: str = "", **fields: Any) -> Said:
    messages = [{"role": "user", "content": words}] if words else []
    fields = {"is_done": False, "reward": 0.25 if number else None, "state": f"{number}"} | fields
    return Said(KEY, number, messages, num_tool_calls=1, **fields)


def begun(num_answers: int, **fields: Any) -> EpisodeTable:
    """A table with an episode whose second turn has `num_answers` - 1 answers."""
    episodes = table()
    [call] = episodes.sampled(opening(), 0.0)
    assert isinstance(call, Open)
    assert (call.keeps_state, call.state) == (True, None)
    episodes.answered(said(0, "50"), 0.0)
    episodes.sampled(turn(1, [1, 2]), 0.0)
    episodes.answered(said(1, "51 52"), 0.0)
    episodes.sampled(turn(2, [3], version=1), 0.0)
    if num_answers > 1:
        episodes.answered(said(2, "53", **fields), 0.0)
    return episodes


def kept(episodes: EpisodeTable, tmp_path: Path) -> PartialEpisode:
    """What a file gives back of the only open episode."""
    save_messages(tmp_path / "r" / "environments.safetensors", episodes.partials({3}), cut="c")
    [partial] = load_messages(tmp_path / "r" / "environments.safetensors", PartialEpisode, cut="c")
    return partial


def test_an_episode_goes_on_behind_its_last_answer(tmp_path: Path) -> None:
    partial = kept(begun(2), tmp_path)
    assert partial.versions == {0, 1}
    episodes = table()
    [call] = episodes.sampled(opening(may_continue=True, is_again=True, partial=partial), 0.0)
    assert call == Open(KEY, 0, {"prompt": "p3", "answer": "7"}, keeps_state=True, state="2", turn=2)
    [observation] = episodes.answered(said(2, reward=None, state=None), 0.0)
    assert isinstance(observation, Observation)
    assert (observation.turn, observation.replaces, observation.versions) == (2, True, (0, 1))
    assert observation.prompt is not None
    assert observation.prompt.tokens.tolist() == [*PROMPT, 50]
    assert [one.tokens.tolist() for one in observation.segments] == [[1, 2], [51, 52], [3]]
    assert observation.tokens.tolist() == [53]
    episodes.sampled(turn(3, [4], life=observation.life, version=2), 0.0)
    assert episodes.answered(said(3, is_done=True), 0.0) == [Finish(KEY)]
    [over] = episodes.ended(LastWord(KEY, 1.0), 0.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert over.record.reward == 3 * 0.25 + 1.0
    assert over.record.num_tool_calls == 4, "that of the restored answer is no turn's"
    assert over.record.num_restored == 2 + 2 + 1 + 1
    assert [one["content"] for one in over.record.messages] == ["1 2", "51 52", "3", "53", "4"]
    assert (episodes.counts["restored"], episodes.counts["begun_again"], episodes.counts["turns"]) == (1, 0, 1)


def test_a_turn_without_an_answer_is_answered_again(tmp_path: Path) -> None:
    partial = kept(begun(1), tmp_path)
    episodes = table()
    [call] = episodes.sampled(opening(may_continue=True, is_again=True, partial=partial), 0.0)
    assert isinstance(call, Open)
    assert (call.state, call.turn) == ("1", 2), "as it was when the turn came"
    assert episodes.answered(said(2), 0.0) == [Take(KEY, 2, {"role": "assistant", "content": "3"})]
    [observation] = episodes.answered(said(2, "54"), 0.0)
    assert isinstance(observation, Observation)
    assert [one.tokens.tolist() for one in observation.segments] == [[1, 2], [51, 52], [3]]
    assert observation.tokens.tolist() == [54]


def test_an_environment_that_cannot_be_restored_begins_again(tmp_path: Path) -> None:
    partial = kept(begun(2), tmp_path)
    episodes = table(max_restarts=1)
    episodes.sampled(opening(may_continue=True, is_again=True, partial=partial), 0.0)
    [call] = episodes.failed(Lost(KEY, "no such place"), 0.0)
    assert isinstance(call, Open)
    assert (call.state, call.turn) == (None, 0)
    assert [episodes.counts[name] for name in ("restored", "begun_again", "restarts")] == [0, 1, 1]
    [observation] = episodes.answered(said(0), 0.0)
    assert isinstance(observation, Observation)
    assert (observation.segments, observation.versions) == ((), ())
    [over] = episodes.failed(Lost(KEY, "again"), 0.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert over.record.failure == "environment: again"
    assert over.record.num_restored == 0


def test_restarts_before_the_checkpoint_count(tmp_path: Path) -> None:
    episodes = table(max_restarts=1)
    episodes.sampled(opening(), 0.0)
    episodes.failed(Lost(KEY, "first"), 0.0)
    episodes.answered(said(0), 0.0)
    episodes.sampled(turn(1, [1], life=2), 0.0)
    episodes.answered(said(1, "51"), 0.0)
    partial = kept(episodes, tmp_path)
    episodes = table(max_restarts=1)
    episodes.sampled(opening(may_continue=True, partial=partial), 0.0)
    [over] = episodes.failed(Lost(KEY, "second"), 0.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert over.record.num_restarts == 1


def test_what_is_not_kept() -> None:
    assert begun(2).partials({4}) == [], "another group's"
    assert begun(2, state=None).partials({3}) == [], "no state, or one that is too large"
    episodes = begun(2, is_done=True)
    assert episodes.partials({3}) == [], "it waits for its last word"
    episodes = table()
    episodes.sampled(opening(), 0.0)
    episodes.answered(said(0, "50"), 0.0)
    assert episodes.partials({3}) == [], "nothing was sampled"
    held_out = table()
    [call] = held_out.sampled(opening(eval_id=2), 0.0)
    assert isinstance(call, Open)
    assert not call.keeps_state


@pytest.mark.parametrize(
    "broken",
    [
        {"segments": ()},
        {"segments": (Segment(tokens=np.arange(3, dtype=np.int32)),)},
        {"record": EpisodeRecord(messages=[{"role": "assistant", "content": ""}], turn_rewards=[None])},
        {"record": EpisodeRecord(messages=[{"role": "assistant", "content": ""}], turn_rewards=[None] * 3)},
        {"record": EpisodeRecord(messages=[], turn_rewards=[None, None])},
    ],
)
def test_what_does_not_fit_together_begins_again(broken: Any, tmp_path: Path) -> None:
    partial = msgspec.structs.replace(kept(begun(2), tmp_path), **broken)
    episodes = table()
    [call] = episodes.sampled(opening(may_continue=True, is_again=True, partial=partial), 0.0)
    assert isinstance(call, Open)
    assert (call.state, call.turn) == (None, 0)
    assert episodes.counts["begun_again"] == 1


def test_what_is_known_here_is_newer_than_a_checkpoint(tmp_path: Path) -> None:
    episodes = begun(2)
    partial = kept(episodes, tmp_path)
    episodes.sampled(turn(3, [4], version=1), 0.0)
    episodes.answered(said(3, "55"), 0.0)
    [observation] = episodes.sampled(opening(may_continue=True, is_again=True, partial=partial), 0.0)
    assert isinstance(observation, Observation)
    assert (observation.turn, observation.tokens.tolist()) == (3, [55])


def test_episodes_are_restored_in_a_world_in_which_anything_happens() -> None:
    """`test_episodes.py` says what must hold of them; here, that its worlds come to it."""
    num_restored = 0
    for seed in range(20):
        world = World(random.Random(seed), num_replicas=2, samples=3, break_rate=0.02)
        for _ in range(200):
            world.step(may_break=True)
        world.finish()
        num_restored += world.num_restored
    assert num_restored > 10


# Another one's doing


INNOCENT = Lost(KEY, "another episode of its worker: it hung", is_guilty=False)


def test_one_whose_worker_another_has_ended_goes_on_from_its_last_answer() -> None:
    """While the policy samples, or behind the turn that waits for an answer; nothing is sampled twice."""
    episodes = begun(2)  # the policy samples turn 3
    [call] = episodes.failed(INNOCENT, 0.0)
    assert call == Open(KEY, 0, {"prompt": "p3", "answer": "7"}, keeps_state=True, state="2", turn=2)
    assert episodes.answered(said(2, state=None, reward=None), 0.0) == [], "it is still being sampled"
    assert episodes.sampled(turn(3, [4]), 0.0) == [Take(KEY, 3, {"role": "assistant", "content": "4"})]
    [call] = episodes.failed(INNOCENT, 0.0)
    assert isinstance(call, Open)
    assert (call.state, call.turn) == ("2", 3)
    assert episodes.answered(said(3, state=None), 0.0) == [Take(KEY, 3, {"role": "assistant", "content": "4"})]
    [observation] = episodes.answered(said(3, "55"), 0.0)
    assert isinstance(observation, Observation)
    assert (observation.turn, observation.replaces, observation.tokens.tolist()) == (3, False, [55])
    assert [episodes.counts[name] for name in ("restored", "restarts", "turns")] == [2, 0, 3]


def test_one_that_is_cut_is_not_gone_on_with(tmp_path: Path) -> None:
    """Its last answer left no room: nothing is sampled behind the turn before, without that answer."""
    episodes = begun(1)
    assert episodes.answered(said(2, " ".join(["53"] * LIMITS.max_len)), 0.0) == [Finish(KEY)]
    [call] = episodes.failed(INNOCENT, 0.0)
    assert isinstance(call, Open)
    assert (call.state, call.turn) == ("2", 2)
    resumed = table()
    resumed.sampled(opening(may_continue=True, is_again=True, partial=kept(episodes, tmp_path)), 0.0)
    for one in (episodes, resumed):
        assert one.answered(said(2, state=None, reward=None), 0.0) == [Finish(KEY)]
        [over] = one.ended(LastWord(KEY, 1.0), 0.0)
        assert isinstance(over, Observation)
        assert over.record is not None
        assert (over.record.is_cut, over.record.reward, len(over.tokens)) == (True, 2 * 0.25 + 1.0, 0)


def test_a_turn_that_comes_while_its_environment_is_restored_waits_for_it() -> None:
    episodes = begun(2)
    episodes.failed(INNOCENT, 0.0)
    assert episodes.sampled(turn(3, [4]), 0.0) == []
    assert episodes.answered(said(2, state=None), 0.0) == [Take(KEY, 3, {"role": "assistant", "content": "4"})]
    assert episodes.answered(said(3, is_done=True), 0.0) == [Finish(KEY)]
    [call] = episodes.failed(INNOCENT, 0.0)
    assert isinstance(call, Open)
    assert (call.state, call.turn) == (None, 0), "nothing comes behind its end, so no state does"


@pytest.mark.parametrize("is_guilty", [True, None])
def test_the_culprit_begins_again(is_guilty: bool | None) -> None:
    episodes = begun(2)
    [call] = episodes.failed(Lost(KEY, "it hung", is_guilty=is_guilty), 0.0)
    assert isinstance(call, Open)
    assert (call.state, call.turn) == (None, 0)


def test_a_pool_gives_back_an_episode_of_a_worker_that_another_has_ended(make_workers: MakePool) -> None:
    clock = VirtualClock()
    pool = make_workers("Keeper", "Careless", step_limit_s=7.0, clock=clock)
    pool.open("a", 0, {"name": "n"}, keeps_state=True)
    assert one_of(pool)
    before = asked(pool, "a", "x", turn=1)
    assert isinstance(before, Said)
    opened(pool, ["b"], 1)
    pool.take("b", 1, {"role": "assistant", "content": "step hangs"})
    pool.poll()
    clock.advance(7.0)
    lost = {one.key: one.is_guilty for one in wait_for(pool, 2)}
    assert lost == {"a": False, "b": True}
    pool.open("a", 0, {"name": "n"}, keeps_state=True, state=before.state, turn=1)
    assert one_of(pool).turn == 1
    after = asked(pool, "a", "2", turn=2)
    assert isinstance(after, Said)
    assert text(after) == "n x 2"
