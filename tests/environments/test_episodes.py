"""Both ends of an episode, the generator's and the environments', under any order of messages, losses and failures."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from drawn import drawn
from episode_world import LIMITS, PROMPT, PlainNumbers, World, prompt, versions_of
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import Segment, VersionSpan
from slipstream.environments.answers import LastWord, Lost, Said
from slipstream.environments.episodes import EpisodeTable, Finish, Open, Sources, Take, columns_of
from slipstream.environments.known_episode import EpisodeLimits


@drawn(
    60,
    150,
    seed=st.integers(0, 2**32),
    num_replicas=st.integers(1, 3),
    samples=st.integers(1, 3),
    spans_versions=st.booleans(),
    break_rate=st.sampled_from([0.1, 0.02]),
)
def test_every_episode_ends_whatever_is_lost(
    seed: int, num_replicas: int, samples: int, spans_versions: bool, break_rate: float
) -> None:
    rng = random.Random(seed)
    world = World(rng, num_replicas=num_replicas, samples=samples, spans_versions=spans_versions, break_rate=break_rate)
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
    episodes.sampled(msgspec.structs.replace(turn(1, [1, 2]), finish_reason="length"), 0.0)
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
    assert observation.finish_reason == "length", "of a turn that was sampled elsewhere"
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
    [over] = episodes.ended(LastWord(KEY, 1.0), 0.0)
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


def test_an_opening_that_leaves_no_room_is_the_environments_failure() -> None:
    episodes = table(max_len=5 + 3)
    episodes.sampled(opening(), 0.0)
    assert episodes.answered(said(0, "50 51 52"), 0.0) == [Finish(KEY)]
    [over] = episodes.ended(LastWord(KEY, 1.0), 0.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert (over.record.failure or "").startswith("environment: what reset said left no room for a turn")


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


def test_rewards_without_a_finite_sum_cost_their_own_episode() -> None:
    episodes = table()
    episodes.sampled(opening(), 0.0)
    episodes.answered(said(0), 0.0)
    episodes.sampled(turn(1, [1]), 0.0)
    episodes.answered(said(1, done=True, reward=1e308), 0.0)
    [over] = episodes.ended(LastWord(KEY, 1e308), 0.0)
    assert isinstance(over, Observation)
    assert over.record is not None
    assert over.record.failure == "environment: the sum of an episode's rewards is not finite"
    assert (over.record.reward, over.record.turn_rewards, episodes.counts["failed"]) == (None, [1e308], 1)


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
    episodes.ended(LastWord(KEY, None), 0.0)
    episodes.sampled(opening(), 0.0)
    episodes.failed(Lost(KEY, "ValueError: no", is_guilty=True), 0.0)
    episodes.failed(Lost(KEY, "ValueError: no", is_guilty=True), 0.0)
    assert episodes.counts == {
        **{"episodes": 2, "turns": 3, "restarts": 2, "restored": 0, "begun_again": 0},
        **{"ended": 2, "turns_of_ended": 2, "failed": 1, "cut": 1, "tool_calls": 3, "tool_errors": 0},
        **{"forks": 0, "refused": 0},
    }
    assert episodes.environment_s == 2.0, "four answers of half a second"


def test_environments_by_column_and_by_weight() -> None:
    by_column = Sources(("maze", "quiz"), (1.0, 1.0), column="kind")
    assert by_column.index_of(0, prompt(kind="quiz")) == 1
    by_column.check([prompt(kind="quiz")])
    with pytest.raises(ConfigError, match="names no environment") as caught:
        by_column.check([prompt(kind="quizz")])
    assert "quiz" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="names no environment"):  # a row that streams by
        by_column.index_of(0, prompt(kind="quizz"))
    with pytest.raises(ConfigError, match="names no environment"):
        by_column.check([prompt()])
    by_weight = Sources(("a", "b"), (3.0, 1.0), seed=5)
    chosen = [by_weight.index_of(ordinal, prompt()) for ordinal in range(4000)]
    assert 0.72 < chosen.count(0) / 4000 < 0.78
    assert chosen == [by_weight.index_of(ordinal, prompt()) for ordinal in range(4000)]


def test_columns_are_the_rows_own() -> None:
    assert columns_of(prompt(word="x")) == {"prompt": "p0", "answer": "7", "word": "x"}
    assert columns_of(prompt(prompt="mine"))["prompt"] == "mine"
