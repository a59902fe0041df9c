"""Agents' episodes at both ends: what goes on, what is a fork, and that nothing is lost or trained twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from drawn import drawn
from episode_world import LIMITS, PROMPT, PlainNumbers, World, prompt, versions_of
from hypothesis import strategies as st

from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import Segment, VersionSpan
from slipstream.environments.answers import Asked, LastWord, Lost
from slipstream.environments.asks import Ask, Refused, SamplingWishes, TurnReply
from slipstream.environments.chat import PlainChat
from slipstream.environments.episodes import EpisodeTable, Give, Open, Shut, Sources
from slipstream.environments.known_episode import EpisodeLimits, Key
from slipstream.environments.transcript import MAX_CHATS, Chats
from slipstream.models.tokenizer import CharTokenizer

Messages = list[dict[str, Any]]


def user(*ids: int) -> dict[str, Any]:
    return {"role": "user", "content": " ".join(map(str, ids))}


def ids_of(messages: Sequence[dict[str, Any]]) -> list[int]:
    return [int(word) for one in messages for word in one["content"].split()]


@dataclass
class ScriptedAgent:
    """An agent in its present life: what it asked, what it was told, and which chats it knows."""

    chats: list[Messages] = field(default_factory=list)
    asked: dict[int, Ask] = field(default_factory=dict)
    replies: list[tuple[Ask, TurnReply]] = field(default_factory=list)
    is_refused: bool = False


class AgentWorld(World):
    """Agents in place of environments: each asks as it likes, several times at once, and ends when it likes."""

    def __init__(self, rng: random.Random, **sizes: Any) -> None:
        self.agents: dict[Key, ScriptedAgent] = {}
        self.ended: dict[Key, ScriptedAgent] = {}
        self.gave_up: dict[Key, bool] = {}  # whether its last loss was its own doing for certain
        self.count = 0
        super().__init__(rng, **sizes)

    def _do(self, acts: Sequence[Any]) -> None:
        for act in acts:
            match act:
                case Observation():
                    self.replicas[act.replica].inbox.append(act)
                case Shut():
                    self.agents.pop(act.key, None)
                case Open():
                    assert act.key not in self.agents, "an agent plays one episode at a time"
                    self.agents[act.key] = ScriptedAgent()
                case Give():
                    self._give(self.agents[act.key], act)
                case _:
                    raise AssertionError(f"{act} is not for agents")

    def _give(self, agent: ScriptedAgent, act: Give) -> None:
        ask = agent.asked.pop(act.request)
        if isinstance(act.reply, Refused):
            agent.is_refused = True
            return
        agent.replies.append((ask, act.reply))
        if ask.messages is not None:
            agent.chats.append([*ask.messages, act.reply.message])

    def _answer(self) -> None:
        """An agent asks, or returns."""
        if not self.agents:
            return
        key = self.rng.choice(sorted(self.agents))
        agent = self.agents[key]
        if agent.replies and (agent.is_refused or self.rng.random() < 0.2):
            self.ended[key] = self.agents.pop(key)
            self._do(self.table.ended(LastWord(key, 0.5), 0.0))
        elif len(agent.asked) < 3 and not agent.is_refused:
            self.count += 1
            agent.asked[self.count] = ask = self._ask(agent)
            self._do(self.table.asked(Asked(key, self.count, ask), 0.0))

    def _ask(self, agent: ScriptedAgent) -> Ask:
        said = [user(*(self.rng.randint(50, 60) for _ in range(self.rng.randint(1, 3))))]
        wishes = SamplingWishes(max_tokens=self.rng.choice([None, 2]))
        kind = self.rng.choice(["new", "on", "on", "on", "again", "changed", "ids"])
        if kind == "new" or not agent.replies:
            return Ask(messages=said, wishes=wishes)
        _, reply = agent.replies[-1]
        if kind == "ids" or not agent.chats:
            return Ask(tokens=[*reply.prompt_tokens, *reply.tokens, *ids_of(said)], wishes=wishes)
        chat = agent.chats[-1] if kind == "on" else self.rng.choice(agent.chats)
        if kind == "changed":  # what it says has been said otherwise
            chat = [*chat[:-1], {"role": "assistant", "content": "7"}]
        return Ask(messages=[*chat, *said], wishes=wishes)

    def _fail(self) -> None:
        if self.agents:
            refused = [key for key, agent in self.agents.items() if agent.is_refused]  # few, each soon gone
            key = self.rng.choice(sorted(refused or self.agents))
            del self.agents[key]
            self.num_failures += 1
            is_guilty, is_suspected = self.rng.choice([True, None, False]), self.rng.random() < 0.5
            self.gave_up[key] = bool(is_guilty) and not is_suspected
            self._do(self.table.failed(Lost(key, "it broke", is_guilty, is_suspected), 0.0))

    _lose_innocent = _fail  # an agent has no state

    def _lose_environments(self) -> None:
        self.agents.clear()
        super()._lose_environments()

    def _resume(self) -> None:
        self.agents.clear()
        super()._resume()


def branches_of(segments: Sequence[Segment], prompt_ids: Sequence[int]) -> list[tuple[list[int], list[Segment]]]:
    """Return each branch as its first ids and its segments."""
    found: list[tuple[list[int], list[Segment]]] = [(list(prompt_ids), [])]
    for segment in segments:
        if segment.begins:
            found.append((segment.tokens.tolist(), []))
        else:
            found[-1][1].append(segment)
    return found


def turns_of(segments: Sequence[Segment], prompt_ids: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return each sampled turn as (all that is read before it, its ids), by a plain walk."""
    turns = []
    for first, own in branches_of(segments, prompt_ids):
        context = list(first)
        for segment in own:
            if segment.is_sampled:
                turns.append((list(context), segment.tokens.tolist()))
            context += segment.tokens.tolist()
    return turns


@drawn(
    60,
    150,
    seed=st.integers(0, 2**32),
    num_replicas=st.integers(1, 3),
    samples=st.integers(1, 3),
    spans_versions=st.booleans(),
    break_rate=st.sampled_from([0.1, 0.02]),
)
def test_what_agents_were_told_is_what_is_trained(
    seed: int, num_replicas: int, samples: int, spans_versions: bool, break_rate: float
) -> None:
    rng, kinds = random.Random(seed), {"spans_versions": spans_versions, "break_rate": break_rate}
    world = AgentWorld(rng, num_replicas=num_replicas, samples=samples, **kinds)
    for _ in range(200):
        world.step(may_break=True)
    world.finish()
    for key, done in world.done.items():
        episode, record = done.episode, done.record
        turns = turns_of(episode.segments, episode.prompt.tokens.tolist())
        for _, own in branches_of(episode.segments, []):
            versions = versions_of(own)
            assert versions == sorted(versions), "an older version never follows a newer one in a branch"
        assert spans_versions or len(set(versions_of(episode.segments))) <= 1
        assert len(turns) <= LIMITS.max_turns
        assert sum(len(segment.tokens) for segment in episode.segments) <= LIMITS.max_episode_tokens
        assert all(len(context) + len(own) <= LIMITS.max_len for context, own in turns)
        if record.failure is not None:
            assert world.num_failures
            continue
        agent = world.ended.get(key)
        if agent is None or not (agent.is_refused or not record.is_cut):  # it was lost after a limit had cut it
            assert record.is_cut
            assert record.reward is None
            assert world.gave_up[key], "what others did took no reward away"
            continue
        told = [
            (ids_of(ask.messages) if ask.messages is not None else list(ask.tokens or ()), list(reply.tokens))
            for ask, reply in agent.replies
        ]
        assert sorted(told) == sorted(turns), "every turn an agent was told of is there once, and no other"
        assert all(reply.prompt_tokens == context for (context, _), (_, reply) in zip(told, agent.replies, strict=True))
        assert record.reward == 0.5
    assert not len(world.table)
    assert not any(len(replica.episodes) for replica in world.replicas)


KEY = (-1, 3, 1)


def opened(chat: Any = None, *, chats: Chats | None = None, **limits: Any) -> EpisodeTable:
    limits = {**vars(LIMITS), **limits}
    table = EpisodeTable(EpisodeLimits(**limits), chat or PlainNumbers(), Sources(("",), (1.0,)), chats=chats)
    [act] = table.sampled(TurnSampled(ordinal=3, sample=1, replica=0, turn=0, prompt=prompt(3)), 0.0)
    assert isinstance(act, Open)
    return table


def ask(table: EpisodeTable, request: int, *messages: dict[str, Any], now_s: float = 0.0, **fields: Any) -> Any:
    [act] = table.asked(Asked(KEY, request, Ask(messages=list(messages), **fields)), now_s)
    return act


def turn(table: EpisodeTable, number: int, ids: Sequence[int], *, branch: int = 0, life: int = 1) -> TurnReply:
    segment = Segment(
        tokens=np.array(ids, dtype=np.int32),
        behaviour_logprobs=np.linspace(-1, 0, len(ids), dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=4),),
    )
    [act] = table.sampled(
        TurnSampled(
            ordinal=3, sample=1, replica=0, turn=number, life=life, segment=segment, finish_reason="stop", branch=branch
        ),
        0.0,
    )
    assert isinstance(act, Give)
    assert isinstance(act.reply, TurnReply)
    return act.reply


def test_a_request_that_goes_on_is_given_only_what_is_new() -> None:
    table = opened()
    first = ask(table, 1, user(50, 51))
    assert (first.branch, first.turn, first.replaces) == (0, 0, True)
    assert first.prompt.tokens.tolist() == [50, 51], "an agent's chat stands in the place of the row's prompt"
    reply = turn(table, 1, [1, 2])
    assert (reply.tokens, reply.num_prompt_tokens, reply.versions) == ([1, 2], 2, [(0, 4)])
    following = ask(table, 2, user(50, 51), reply.message, user(52))
    assert (following.branch, following.turn, following.replaces) == (0, 1, False)
    assert following.tokens.tolist() == [52]


@pytest.mark.parametrize(
    ("messages", "context"),
    [
        pytest.param([user(50), {"role": "assistant", "content": "1 2"}, user(53)], [50, 1, 2, 53], id="another word"),
        pytest.param([user(50), user(54)], [50, 54], id="another beginning"),
        pytest.param([user(50), {"role": "assistant", "content": "9"}, user(53)], [50, 9, 53], id="another answer"),
    ],
)
def test_a_request_that_does_not_go_on_is_a_fork(messages: Messages, context: list[int]) -> None:
    table = opened()
    ask(table, 1, user(50))
    said = turn(table, 1, [1, 2]).message
    ask(table, 2, user(50), said, user(52))
    turn(table, 2, [3])
    fork = ask(table, 3, *messages)
    assert (fork.branch, fork.turn, fork.replaces) == (1, 0, True)
    assert fork.prompt.tokens.tolist() == context
    turn(table, 1, [5], branch=1)
    acts = table.ended(LastWord(KEY, None), 0.0)
    over = acts[-1]
    assert isinstance(over, Observation)
    assert over.record is not None
    assert [one["content"] for one in over.record.messages] == ["1 2", "52", "3"]
    assert [[one["content"] for one in chat] for chat in over.record.branches] == [
        [*(one["content"] for one in messages), "5"]
    ]
    assert over.record.contexts == [len(messages)]
    assert table.counts["forks"] == 1


def test_a_turn_without_text_that_a_client_leaves_out_makes_no_fork() -> None:
    table = opened(max_turns=9)
    ask(table, 1, user(50))
    turn(table, 1, [])
    following = ask(table, 2, user(50), user(51))
    assert (following.branch, following.turn, following.tokens.tolist()) == (0, 1, [51])
    said = turn(table, 2, [7]).message
    following = ask(table, 3, user(50), user(51), said, user(52))
    assert (following.branch, following.turn, following.tokens.tolist()) == (0, 2, [52]), "nor later"
    turn(table, 3, [8])
    fork = ask(table, 4, user(50), user(51), said, user(53))
    assert (fork.branch, fork.prompt.tokens.tolist()) == (1, [50, 51, 7, 53])
    turn(table, 1, [9], branch=1)
    assert ask(table, 5, user(50), user(51), {"role": "assistant", "content": "9"}, user(54)).branch == 2
    fork = ask(table, 6, user(50), {"role": "assistant", "content": ""}, user(51), said, user(55))
    assert (fork.branch, fork.prompt.tokens.tolist()) == (3, [50, 51, 7, 55])
    [*_, over] = table.ended(LastWord(KEY, None), 0.0)
    assert over.record.messages[0] == {"role": "assistant", "content": ""}, "it was a turn all the same"


def test_a_chat_that_goes_on_is_not_made_again_however_many_lists_of_tools_there_are() -> None:
    made: list[Any] = []

    def make(tools: Any) -> Any:
        made.append(tools)
        return PlainNumbers()

    tools = [
        [{"type": "function", "function": {"name": f"f{number}", "parameters": {}}}] for number in range(MAX_CHATS + 1)
    ]
    chats = Chats(make)
    table = opened(max_turns=9, chats=chats)
    ask(table, 1, user(50), tools=tools[0])
    said = turn(table, 1, [1]).message
    for other in tools[1:]:  # of other episodes
        chats.of(other)
    following = ask(table, 2, user(50), said, user(51), tools=tools[0])
    assert (following.branch, following.tokens.tolist()) == (0, [51])
    assert len(made) == len(tools)


def test_equal_requests_at_once_are_branches_of_their_own() -> None:
    table = opened()
    branches = [ask(table, number, user(50)).branch for number in (1, 2, 3)]
    assert branches == [0, 1, 2]


def test_limits_refuse_a_turn_and_leave_the_agent_its_last_word() -> None:
    table = opened(max_turns=1)
    ask(table, 1, user(50))
    turn(table, 1, [1])
    act = ask(table, 2, user(50), user(51))
    assert isinstance(act, Give)
    assert isinstance(act.reply, Refused)
    assert "environment.max_turns = 1" in str(act.reply)
    assert act.reply.code == "max_turns"
    [over] = table.ended(LastWord(KEY, 1.0), 0.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert (over.record.is_cut, over.record.reward) == (True, 1.0)


def test_an_agent_that_gets_a_turn_behind_a_refused_one_is_not_cut() -> None:
    """It goes on with a shorter chat; what breaks it then is no limit, and it begins again."""
    table = opened(max_len=8, max_episode_tokens=1_000, max_turns=9)
    ask(table, 1, user(50))
    turn(table, 1, [1])
    act = ask(table, 2, user(*range(50, 59)))
    assert isinstance(act.reply, Refused)
    assert act.reply.code == "context_length_exceeded"
    assert "over" not in str(act.reply)
    shorter = ask(table, 3, user(51))
    turn(table, 1, [2], branch=shorter.branch)
    [again] = table.failed(Lost(KEY, "it broke", is_guilty=True), 0.0)
    assert isinstance(again, Open)
    for request, messages in enumerate(([user(50)], [user(*range(50, 59))], [user(51)]), 4):
        act = ask(table, request, *messages)
        if isinstance(act, Observation):
            turn(table, 1, [3], branch=act.branch, life=act.life)
    [*_, over] = table.ended(LastWord(KEY, 1.0), 0.0)
    assert (over.record.is_cut, len(over.record.branches), table.counts["refused"]) == (False, 1, 2)
    assert table.counts["cut"] == 0


def test_an_agent_that_does_not_bear_a_limit_is_cut_and_does_not_begin_again() -> None:
    table = opened(episode_limit_s=5.0)
    ask(table, 1, user(50))
    turn(table, 1, [1])
    ask(table, 2, user(50), user(51), now_s=6.0)
    [over] = table.failed(Lost(KEY, "BadRequestError: over"), 6.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert (over.record.is_cut, over.record.failure, over.record.reward) == (True, None, None)


@pytest.mark.parametrize(
    "lost", [Lost(KEY, "killed", True, is_suspected=True), Lost(KEY, "killed", None), Lost(KEY, "killed", False)]
)
def test_one_whose_worker_is_lost_behind_a_limit_begins_again(lost: Lost) -> None:
    table = opened(episode_limit_s=5.0)
    ask(table, 1, user(50))
    turn(table, 1, [1])
    ask(table, 2, user(50), user(51), now_s=6.0)
    [again] = table.failed(lost, 6.0)
    assert isinstance(again, Open), "its reward was on the way"
    anew = ask(table, 3, user(50), now_s=6.0)
    turn(table, 1, [1], life=anew.life)
    [over] = table.ended(LastWord(KEY, 1.0), 7.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert (over.record.is_cut, over.record.failure, over.record.reward) == (False, None, 1.0)


def test_an_agent_without_a_turn_has_failed() -> None:
    table = opened(max_restarts=0)
    [over] = table.ended(LastWord(KEY, 1.0), 0.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert "without a turn" in (over.record.failure or "")


def test_the_clients_bound_on_tokens_counts_and_ids_are_looked_at() -> None:
    table = opened(num_ids=100)
    assert ask(table, 1, user(50), wishes=SamplingWishes(max_tokens=3)).max_new_tokens == 3
    [act] = table.asked(Asked(KEY, 2, Ask(tokens=[5, 100])), 0.0)
    assert isinstance(act, Give)
    assert "no 100" in str(act.reply)
    [act] = table.asked(Asked(KEY, 3, Ask(tokens=[5, 99])), 0.0)
    assert isinstance(act, Observation)
    assert act.prompt is not None
    assert act.prompt.tokens.tolist() == [5, 99]


@pytest.mark.parametrize(
    "bad",
    [
        Ask(),
        Ask(messages=[]),
        Ask(messages=[{"role": "user"}]),
        Ask(messages=[{"role": "king", "content": "x"}]),
        Ask(messages=[{"role": "user", "content": 5}]),
        Ask(messages=[{"role": "user", "content": "x", "name": ["y"]}]),
        Ask(messages=[{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 1}}]}]),
        Ask(messages=[{"role": "assistant", "content": "", "tool_calls": ["call"]}]),
        Ask(messages=[user(1)], tools=[{"function": {}}]),
        Ask(messages=[user(1)], tokens=[1]),
        Ask(tokens=[]),
    ],
)
def test_what_a_lying_worker_asks_is_refused(bad: Ask) -> None:
    table = opened()
    [act] = table.asked(Asked(KEY, 1, bad), 0.0)
    assert isinstance(act, Give)
    assert isinstance(act.reply, Refused)


def test_a_prompt_without_a_token_is_refused_and_the_episode_goes_on() -> None:
    """An agent may send back the text of a turn that was nothing but a stop token."""
    table = opened(PlainChat(CharTokenizer()))
    empty = {"role": "user", "content": ""}
    for bad in (Ask(messages=[empty]), Ask(messages=[{"role": "system", "content": ""}, empty]), Ask(text="")):
        [act] = table.asked(Asked(KEY, 1, bad), 0.0)
        assert isinstance(act, Give)
        assert isinstance(act.reply, Refused)
        assert (str(act.reply), act.reply.code) == ("a prompt has at least one token", "invalid_prompt")
    first = ask(table, 2, {"role": "user", "content": "a"})
    assert (first.branch, first.prompt.text) == (0, "a")
    said = turn(table, 1, [1]).message
    fork = ask(table, 3, empty)
    assert isinstance(fork, Give), "nor does a fork begin with nothing"
    assert ask(table, 4, {"role": "user", "content": "a"}, said, empty).branch == 0


def test_a_refusal_for_want_of_room_counts_forks_and_open_requests() -> None:
    table = opened(max_episode_tokens=12)
    rooms = [ask(table, number, user(50)).max_new_tokens for number in (1, 2)]
    assert rooms == [6, 5], "the fork's context is a token of the episode's"
    act = ask(table, 3, user(50))
    assert isinstance(act, Give)
    assert isinstance(act.reply, Refused)
    assert "1 tokens of context leave no room" in str(act.reply)
    assert "environment.max_episode_tokens = 12 behind its prompt; with this request 13 of them are used" in str(
        act.reply
    )


def test_a_turn_that_came_too_late_for_an_agent_that_has_returned_is_left_out() -> None:
    """The replica may have finished it, and so hears which turns count."""
    table = opened()
    ask(table, 1, user(50))
    turn(table, 1, [1])
    ask(table, 2, user(50), {"role": "assistant", "content": "1"}, user(51))
    [over] = table.ended(LastWord(KEY, 1.0), 0.0)
    assert isinstance(over, Observation)
    assert not over.replaces, "only a replica that knows the episode is to take this for its end"
    assert [one.tokens.tolist() for one in over.segments] == [[1]]
    assert len(PROMPT)
