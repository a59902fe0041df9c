"""The metrics of the episodes of a step, by hand, from heads as ranks send them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from slipstream.core.recipes import resolve
from slipstream.core.types import Completion, EpisodeHead, EpisodeRecord, Prompt, Rollout, RolloutHead, Segment
from slipstream.trainer.scores import head_of
from slipstream.trainer.step_metrics import episode_metrics


def sampled(count: int) -> Segment:
    return Segment(tokens=np.arange(count, dtype=np.int32), behaviour_logprobs=np.zeros(count, dtype=np.float32))


def rollout(*lengths: int, record: EpisodeRecord | None) -> Rollout:
    """Turns and what was said between them, by turns, beginning with a turn."""
    given = [Segment(tokens=np.arange(count, dtype=np.int32)) for count in lengths]
    segments = tuple(sampled(count) if i % 2 == 0 else given[i] for i, count in enumerate(lengths))
    prompt = Prompt(prompt_id="p", text="p", tokens=np.zeros(1, dtype=np.int32), task="t")
    completion = Completion(
        ordinal=0, sample=0, prompt=prompt, segments=segments, text="", finish_reason="stop", episode=record
    )
    return Rollout(completion=completion, reward=1.0)


def heads(*rollouts: Rollout) -> list[RolloutHead]:
    """Through the wire, as those of another rank."""
    own = [head_of(one, resolve("quickstart").rewards) for one in rollouts]
    return msgspec.msgpack.decode(msgspec.msgpack.encode(own), type=list[RolloutHead])


def test_the_metrics_of_two_episodes_by_hand() -> None:
    short = EpisodeRecord(num_tool_calls=1, environment_s=0.25)
    long = EpisodeRecord(
        is_cut=True, num_tool_calls=4, num_tool_errors=3, num_restarts=1, environment_s=1.75, messages=[{"role": "x"}]
    )
    found = heads(rollout(5, record=short), rollout(6, 4, 3, 2, record=long))
    assert found[1].episode == EpisodeHead(
        turns=2, is_cut=True, tool_calls=4, tool_errors=3, restarts=1, environment_s=1.75
    )
    assert episode_metrics(found) == pytest.approx(
        {
            "episode/turns_mean": 1.5,
            "episode/turns_max": 2.0,
            "episode/cut_frac": 0.5,
            "episode/given_frac": 6 / 20,
            "episode/forks": 0.0,
            "episode/tool_calls_mean": 2.5,
            "episode/tool_errors_mean": 1.5,
            "episode/restarts_mean": 0.5,
            "episode/environment_s_mean": 1.0,
            "episode/environment_s_max": 1.75,
        }
    )


def test_without_an_environment_there_are_none() -> None:
    assert episode_metrics(heads(rollout(5, record=None))) == {}


def test_an_episode_that_failed_before_its_first_turn_has_none() -> None:
    found = episode_metrics(heads(rollout(record=EpisodeRecord(failure="environment: gone", num_restarts=2))))
    assert (found["episode/turns_mean"], found["episode/given_frac"], found["episode/restarts_mean"]) == (0.0, 0.0, 2.0)


def test_forks_are_branches_besides_the_trunk() -> None:
    begun = Segment(tokens=np.arange(3, dtype=np.int32), begins=True)
    plain = rollout(5, record=EpisodeRecord())
    segments = (*plain.completion.segments, begun, sampled(2), begun, sampled(4))
    forked = msgspec.structs.replace(plain, completion=msgspec.structs.replace(plain.completion, segments=segments))
    found = heads(plain, forked)
    assert [one.episode.branches for one in found if one.episode is not None] == [1, 3]
    metrics = episode_metrics(found)
    assert (metrics["episode/forks"], metrics["episode/turns_mean"]) == (1.0, 2.0)
    assert metrics["episode/given_frac"] == pytest.approx(6 / 22)
