"""Both ends of an episode, the generator's and the environments', under any order of messages, losses and failures."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.errors import ChannelClosed, ConfigError
from slipstream.core.types import Message, Observation, Prompt, Segment, TurnSampled, VersionSpan
from slipstream.environments.episodes import (
    EpisodeLimits,
    EpisodeTable,
    Finish,
    Key,
    Open,
    Shut,
    Sources,
    Take,
    columns_of,
)
from slipstream.environments.pool import LastWord, Lost, Said
from slipstream.generator.episodes import EndedEpisode
from slipstream.generator.episodes import Episodes as GeneratorEpisodes
from slipstream.generator.requests import Finished, Request

PROMPT = np.arange(5, dtype=np.int32)
LIMITS = EpisodeLimits(
    max_turns=4, max_turn_tokens=6, max_episode_tokens=40, max_len=48, episode_limit_s=1e9, max_restarts=2
)


class PlainNumbers:
    """A chat whose text is its token ids: what was said can be read back from either end."""

    def opening(self, prompt: Prompt, messages: Sequence[dict[str, Any]], *, extends_prompt: bool = False) -> Prompt:
        if not messages:
            return prompt
        tokens = np.concatenate([prompt.tokens, self._ids(messages)])
        return msgspec.structs.replace(prompt, tokens=tokens, text=f"{prompt.text}+")

    def observation(self, tokens: np.ndarray, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        return self._ids(messages)

    def message(self, tokens: np.ndarray) -> dict[str, Any]:
        return {"role": "assistant", "content": " ".join(map(str, tokens))}

    def _ids(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        return np.array([int(word) for one in messages for word in one["content"].split()], dtype=np.int32)


def prompt(ordinal: int = 0, **columns: Any) -> Prompt:
    return Prompt(prompt_id=str(ordinal), text=f"p{ordinal}", tokens=PROMPT, task="t", answer="7", columns=columns)


@dataclass
class Wire:
    """A channel's writing end that may lead to nobody."""

    name: str
    waiting: deque[Message] = field(default_factory=deque)
    is_closed: bool = False
    targets = frozenset({"environments"})

    def put(self, message: Message) -> None:
        if self.is_closed:
            raise ChannelClosed(f"'{self.name}' is gone")
        self.waiting.append(message)

    def has_room_for(self, message: Message) -> bool:
        return len(self.waiting) < 3


@dataclass
class Replica:
    number: int
    wire: Wire
    spans_versions: bool = True
    version: int = 0
    episodes: GeneratorEpisodes = field(init=False)
    queued: list[Request] = field(default_factory=list)
    inbox: deque[Observation] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.episodes = GeneratorEpisodes(
            self.wire, replica=self.number, release=lambda _: None, may_follow=self._may_follow
        )

    def _may_follow(self, segments: Sequence[Segment]) -> bool:
        versions = versions_of(segments)
        newest = max(versions, default=self.version)
        return newest <= self.version if self.spans_versions else set(versions) <= {self.version}

    @property
    def may_swap(self) -> bool:
        return self.spans_versions or not (self.queued or self.episodes.num_begun)


def versions_of(segments: Sequence[Segment]) -> list[int]:
    return [span.version for segment in segments for span in segment.version_spans]


class World:
    """A loop of replicas, environments and their calls in which a source of randomness decides what happens next."""

    def __init__(self, rng: random.Random, *, num_replicas: int, samples: int, spans_versions: bool = True) -> None:
        self.rng, self.spans_versions, self.newest = rng, spans_versions, 0
        self.replicas = [self._replica(number) for number in range(num_replicas)]
        self.table = self._table()
        self.calls: dict[Key, Open | Take | Finish] = {}
        self.keys = [(-1, ordinal, sample) for ordinal in range(2) for sample in range(samples)]
        self.holder = {key: key[1] % num_replicas for key in self.keys}
        self.done: dict[Key, EndedEpisode] = {}
        self.num_failures = 0
        for key in self.keys:
            self._begin(key)

    def _replica(self, number: int) -> Replica:
        return Replica(number, Wire("environments"), self.spans_versions, self.newest)

    def _swap(self) -> None:
        """A replica takes the newest version, or one that is newer still; others are behind it then."""
        replica = self.rng.choice(self.replicas)
        if replica.may_swap:
            self.newest += self.rng.randrange(2)
            replica.version = self.newest

    def _table(self) -> EpisodeTable:
        return EpisodeTable(LIMITS, PlainNumbers(), Sources(("",), (1.0,)))

    def _begin(self, key: Key, *, may_continue: bool = False) -> None:
        request = Request(ordinal=key[1], sample=key[2], prompt_tokens=PROMPT, max_new_tokens=6)
        self.replicas[self.holder[key]].episodes.begin(request, prompt(key[1]), may_continue=may_continue)

    def step(self, *, may_break: bool) -> None:
        moves = [
            self._take_turn,
            self._take_observation,
            self._decode,
            self._answer,
            self._answer,
            self._send,
            self._swap,
        ]
        if may_break and self.rng.random() < 0.1:
            moves = [self._lose_replica, self._lose_environments, self._fail]
        self.rng.choice(moves)()

    def _send(self) -> None:
        self.rng.choice(self.replicas).episodes.send()

    def _take_turn(self) -> None:
        replica = self.rng.choice(self.replicas)
        if replica.wire.waiting:
            message = replica.wire.waiting.popleft()
            assert isinstance(message, TurnSampled)
            self._do(self.table.sampled(message, 0.0))

    def _take_observation(self) -> None:
        replica = self.rng.choice(self.replicas)
        if not replica.inbox:
            return
        message = replica.inbox.popleft()
        following = replica.episodes.observe(message)
        if isinstance(following, EndedEpisode):
            key = following.episode.key
            assert key not in self.done, "an episode ends once"
            self.done[key] = following
        elif following is not None:
            assert following.max_new_tokens >= 1
            assert len(following.prompt_tokens) + following.max_new_tokens <= LIMITS.max_len
            replica.queued.append(following)

    def _decode(self) -> None:
        replica = self.rng.choice(self.replicas)
        if not replica.queued:
            return
        request = replica.queued.pop(self.rng.randrange(len(replica.queued)))
        count = self.rng.randint(1, request.max_new_tokens)
        # what is sampled depends on its place alone, as the engine's noise does
        start = 1000 * request.sample + request.num_before
        tokens = np.arange(start, start + count, dtype=np.int32)
        replica.episodes.finished(
            Finished(
                request=request,
                tokens=tokens,
                logprobs=-np.ones(count, dtype=np.float32),
                version_spans=(VersionSpan(start=0, version=replica.version),),
                finish_reason="stop",
                started_s=0.0,
                finished_s=1.0,
            )
        )

    def _do(self, acts: Sequence[Any]) -> None:
        for act in acts:
            match act:
                case Observation():
                    self.replicas[act.replica].inbox.append(act)
                case Shut():
                    self.calls.pop(act.key, None)
                case Open() | Take() | Finish():
                    assert act.key not in self.calls, "an environment has one call at a time"
                    self.calls[act.key] = act

    def _answer(self) -> None:
        if not self.calls:
            return
        call = self.calls.pop(self.rng.choice(sorted(self.calls)))
        if isinstance(call, Finish):
            self._do(self.table.ended(LastWord(call.key, 0.5)))
            return
        turn = call.turn if isinstance(call, Take) else 0
        words = " ".join(str(self.rng.randint(50, 60)) for _ in range(self.rng.randint(0, 5)))
        is_done = turn > 0 and self.rng.random() < 0.3
        said = [{"role": "user", "content": words}] if words else []
        self._do(self.table.answered(Said(call.key, turn, said, is_done, 0.25 if turn else None), 0.0))

    def _fail(self) -> None:
        if self.calls:
            key = self.rng.choice(sorted(self.calls))
            del self.calls[key]
            self.num_failures += 1
            self._do(self.table.failed(Lost(key, "it broke", is_guilty=self.rng.choice([True, None, False])), 0.0))

    def _lose_replica(self) -> None:
        """It comes back empty, and is admitted again what it had; or another one is."""
        lost = self.rng.randrange(len(self.replicas))
        self.replicas[lost] = self._replica(lost)
        for key in self.keys:
            if self.holder[key] == lost:
                self.done.pop(key, None)  # its completion was not settled
                self.holder[key] = self.rng.randrange(len(self.replicas))
                self._begin(key, may_continue=self.rng.random() < 0.7)

    def _lose_environments(self) -> None:
        self.table = self._table()
        self.calls.clear()
        for replica in self.replicas:
            replica.inbox.clear()  # of an incarnation that is shut out
            replica.wire.waiting.clear()
            replica.episodes.begin_again()

    def finish(self) -> None:
        for _ in range(20_000):
            if len(self.done) == len(self.keys):
                return
            self.step(may_break=False)
        raise AssertionError(f"episodes that never end: {set(self.keys) - self.done.keys()}")


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32), num_replicas=st.integers(1, 3), samples=st.integers(1, 3), spans_versions=st.booleans()
)
def test_every_episode_ends_whatever_is_lost(seed: int, num_replicas: int, samples: int, spans_versions: bool) -> None:
    world = World(random.Random(seed), num_replicas=num_replicas, samples=samples, spans_versions=spans_versions)
    for _ in range(200):
        world.step(may_break=True)
    world.finish()
    for key, ended in world.done.items():
        episode, record = ended.episode, ended.record
        versions = versions_of(episode.segments)
        assert versions == sorted(versions), "an older version never follows a newer one"
        assert spans_versions or len(set(versions)) <= 1, "between batches an episode has one version"
        kinds = [segment.is_sampled for segment in episode.segments]
        assert all(a != b or a for a, b in itertools.pairwise(kinds)), "given tokens are one segment"
        assert not kinds or kinds[-1] or record.failure is not None, "nothing is given behind the last turn"
        assert sum(kinds) <= LIMITS.max_turns
        behind = 0
        for segment in episode.segments:
            if segment.is_sampled:
                start = 1000 * key[2] + behind
                assert segment.tokens.tolist() == list(range(start, start + len(segment.tokens)))
            behind += len(segment.tokens)
        assert behind <= LIMITS.max_episode_tokens
        said = [one["content"] for one in record.messages if one["role"] == "assistant"]
        sampled = [" ".join(map(str, one.tokens)) for one in episode.segments if one.is_sampled]
        assert said == sampled, "what rewards read is what was sampled"
        if record.failure is None:
            assert len(record.turn_rewards) == len(sampled)
            assert record.reward == pytest.approx(0.25 * len(sampled) + 0.5)
        else:
            assert world.num_failures
    assert not len(world.table)
    assert not any(len(replica.episodes) for replica in world.replicas)


def opening(**fields: Any) -> TurnSampled:
    return TurnSampled(ordinal=3, sample=1, replica=0, turn=0, prompt=prompt(3), **fields)


def turn(number: int, tokens: Sequence[int], *, life: int = 1) -> TurnSampled:
    segment = Segment(
        tokens=np.array(tokens, dtype=np.int32),
        behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
        version_spans=(VersionSpan(start=0, version=0),),
    )
    return TurnSampled(ordinal=3, sample=1, replica=0, turn=number, life=life, segment=segment, finish_reason="stop")


KEY = (-1, 3, 1)


def said(number: int, words: str = "", *, done: bool = False, reward: float | None = None) -> Said:
    messages = [{"role": "user", "content": words}] if words else []
    return Said(KEY, number, messages, done, reward, seconds=0.5, num_tool_calls=1)


def table(**limits: Any) -> EpisodeTable:
    return EpisodeTable(EpisodeLimits(**{**vars(LIMITS), **limits}), PlainNumbers(), Sources(("",), (1.0,)))


def test_a_replica_that_follows_a_lost_one_goes_on_from_the_tokens_known_here() -> None:
    episodes = table()
    episodes.sampled(opening(), 0.0)
    episodes.answered(said(0, "50"), 0.0)
    episodes.sampled(turn(1, [1, 2]), 0.0)
    episodes.answered(said(1, "51 52"), 0.0)
    [observation] = episodes.sampled(
        TurnSampled(ordinal=3, sample=1, replica=4, turn=0, prompt=prompt(3), may_continue=True), 0.0
    )
    assert isinstance(observation, Observation)
    assert (observation.replica, observation.replaces, observation.turn) == (4, True, 1)
    assert observation.prompt is not None
    assert observation.prompt.tokens.tolist() == [*PROMPT, 50], "what was said first belongs to the prompt"
    assert [one.tokens.tolist() for one in observation.segments] == [[1, 2]]
    assert observation.tokens.tolist() == [51, 52]
    assert observation.segments[0].behaviour_logprobs is not None
    assert episodes.sampled(turn(2, [9]), 0.0) == [], "what the lost one still says is void"
    assert episodes.sampled(turn(2, [9], life=observation.life), 0.0) == [
        Take(KEY, 2, {"role": "assistant", "content": "9"})
    ]


def test_limits_cut_an_episode_and_its_environment_has_the_last_word() -> None:
    episodes = table(max_turns=1)
    episodes.sampled(opening(), 0.0)
    episodes.answered(said(0), 0.0)
    episodes.sampled(turn(1, [1]), 0.0)
    assert episodes.answered(said(1, "55", reward=0.25), 0.0) == [Finish(KEY)]
    [over] = episodes.ended(LastWord(KEY, 1.0))
    assert isinstance(over, Observation)
    assert over.record is not None
    assert over.record.is_cut
    assert over.record.reward == 1.25
    assert over.record.turn_rewards == [0.25]
    assert over.record.environment_s == 1.0
    assert over.record.num_tool_calls == 2
    assert not len(over.tokens), "nothing is sampled behind it, so nothing is given"


@pytest.mark.parametrize("limits", [{"max_len": 5 + 3}, {"max_episode_tokens": 3}])
def test_an_observation_that_leaves_no_room_ends_the_episode(limits: dict[str, int]) -> None:
    episodes = table(**limits)
    episodes.sampled(opening(), 0.0)
    episodes.answered(said(0), 0.0)
    episodes.sampled(turn(1, [1, 2]), 0.0)
    assert episodes.answered(said(1, "55"), 0.0) == [Finish(KEY)]


def test_an_episode_that_takes_too_long_is_cut_at_the_end_of_its_turn() -> None:
    episodes = table(episode_limit_s=10.0)
    episodes.sampled(opening(), 0.0)
    episodes.answered(said(0), 5.0)
    episodes.sampled(turn(1, [1]), 11.0)
    assert episodes.answered(said(1, "55"), 12.0) == [Finish(KEY)]


def test_a_guilty_environment_begins_again_until_its_completion_has_failed() -> None:
    episodes = table(max_restarts=1)
    episodes.sampled(opening(), 0.0)
    episodes.answered(said(0, "50"), 0.0)
    episodes.sampled(turn(1, [1]), 0.0)
    for is_guilty in (False, False, True):
        [again] = episodes.failed(Lost(KEY, "ValueError: no", is_guilty=is_guilty), 0.0)
        assert isinstance(again, Open)
    [observation] = episodes.answered(said(0), 0.0)
    assert isinstance(observation, Observation)
    assert observation.replaces
    assert (observation.segments, observation.prompt) == ((), None)
    [over] = episodes.failed(Lost(KEY, "ValueError: no"), 0.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert over.record.failure == "environment: ValueError: no"
    assert over.record.num_restarts == 3
    assert episodes.failed(Lost(KEY, "late"), 0.0) == []


def test_counts_are_of_all_turns_and_of_the_episodes_that_ended() -> None:
    """One that begins again after its first turn and is cut after two, and one that fails for good."""
    episodes = table(max_turns=2, max_restarts=1)
    episodes.sampled(opening(), 0.0)
    episodes.answered(said(0), 0.0)
    episodes.sampled(turn(1, [1]), 0.0)
    episodes.failed(Lost(KEY, "ValueError: no"), 0.0)
    [observation] = episodes.answered(said(0), 0.0)
    assert isinstance(observation, Observation)
    for number in (1, 2):
        episodes.sampled(turn(number, [1], life=observation.life), 0.0)
        episodes.answered(said(number), 0.0)
    assert (episodes.counts["ended"], len(episodes)) == (0, 1), "its environment has the last word"
    episodes.ended(LastWord(KEY, None))
    episodes.sampled(opening(), 0.0)
    episodes.failed(Lost(KEY, "ValueError: no", is_guilty=True), 0.0)
    episodes.failed(Lost(KEY, "ValueError: no", is_guilty=True), 0.0)
    assert episodes.counts == {
        **{"episodes": 2, "turns": 3, "restarts": 2},
        **{"ended": 2, "turns_of_ended": 2, "failed": 1, "cut": 1, "tool_calls": 3, "tool_errors": 0},
    }
    assert episodes.environment_s == 2.0, "four answers of half a second"


def test_environments_by_column_and_by_weight() -> None:
    by_column = Sources(("maze", "quiz"), (1.0, 1.0), column="kind")
    assert by_column.index_of(0, prompt(kind="quiz")) == 1
    by_column.check([prompt(kind="quiz")])
    with pytest.raises(ConfigError, match="names no environment") as caught:
        by_column.check([prompt(kind="quizz")])
    assert "quiz" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="names no environment"):
        by_column.check([prompt()])
    by_weight = Sources(("a", "b"), (3.0, 1.0), seed=5)
    chosen = [by_weight.index_of(ordinal, prompt()) for ordinal in range(4000)]
    assert 0.72 < chosen.count(0) / 4000 < 0.78
    assert chosen == [by_weight.index_of(ordinal, prompt()) for ordinal in range(4000)]


def test_columns_are_the_rows_own() -> None:
    assert columns_of(prompt(word="x")) == {"prompt": "p0", "answer": "7", "word": "x"}
    assert columns_of(prompt(prompt="mine"))["prompt"] == "mine"
