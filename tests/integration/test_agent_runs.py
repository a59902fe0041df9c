"""Whole runs of agents that fork: every branch is trained as it was sampled, at every staleness, and nothing waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import turn_environments
from audit import audit
from test_episode_versions import ROUNDING, SYNCHRONOUS, Heard, episodes, heard, segment_versions, versions_of
from turn_environments import forking_agent

import slipstream
from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.run_log import read_metrics
from slipstream.core.types import Completion

__all__ = ["episodes", "heard"]


def branches_of(completion: Completion) -> list[list[Any]]:
    """Return the segments of each branch, from a given one that is its beginning on."""
    found: list[list[Any]] = [[]]
    for segment in completion.segments:
        if segment.begins:
            found.append([])
        found[-1].append(segment)
    return found


def largest_gap(heard: Heard) -> float:
    """Between a token's behaviour logprob and a pass of the version that sampled it over its own branch alone."""
    largest = 0.0
    for one in heard.completions:
        for number, segments in enumerate(branches_of(one)):
            start = one.prompt.tokens if number == 0 else np.zeros(0, dtype=np.int32)
            tokens = np.concatenate([start, *(segment.tokens for segment in segments)])
            place = len(start)
            versions = {version for segment in segments for version in segment_versions(segment)}
            of_version = {version: probe_logprobs(heard.models[version], tokens) for version in versions}
            for segment in segments:
                if segment.behaviour_logprobs is not None:
                    for n, version in enumerate(segment_versions(segment)):
                        expected = of_version[version][place + n - 1]
                        largest = max(largest, abs(float(expected) - float(segment.behaviour_logprobs[n])))
                place += len(segment.tokens)
    return largest


def run(overrides: dict[str, Any], out: Any, **more: Any) -> slipstream.RunResult:
    environment = {"max_turns": 6, "max_episode_tokens": 90, "observation": "{content}"}
    overrides = overrides | {"environment": environment, "steps": 3} | more
    result = slipstream.run("quickstart", overrides=overrides, agent=forking_agent, out=out, display=False)
    assert result.status == "done"
    audit(result.out)
    return result


@pytest.mark.parametrize("heard", [pytest.param("slots", marks=pytest.mark.slow), "pages"], indirect=True)
def test_trainer_and_generator_agree_on_every_branch(heard, episodes, tmp_path):
    result = run(episodes | SYNCHRONOUS, tmp_path / "run", steps=2)
    lines = [line for line in read_metrics(result.out / "metrics.jsonl") if "reward_mean" in line]
    assert max(line["logprob_diff_max/lag_0"] for line in lines) < ROUNDING
    assert largest_gap(heard) < ROUNDING
    trained = heard.of("train")
    assert {one.num_branches for one in trained} <= {3, 4}, "the request that was left behind hardly ever counts"
    assert min(line["episode/forks"] for line in lines) > 0
    assert all(len(one.episode.branches) == one.num_branches - 1 for one in trained)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "staleness"), [("in_flight", 2), ("between_batches", 1)])
def test_a_swap_waits_for_no_branch_that_waits_for_it(mode, staleness, heard, episodes, tmp_path):
    """Between batches a version waits for the end of begun episodes: their further branches must not wait for it."""
    generator = episodes["generator"] | {"kv_on_update": "recompute"}
    result = run(episodes, tmp_path / "run", weight_update=mode, max_staleness=staleness, generator=generator, steps=5)
    trained = heard.of("train")
    for one in trained:
        for segments in branches_of(one):
            versions = [version for segment in segments for version in segment_versions(segment)]
            assert versions == sorted(versions)
        assert mode == "in_flight" or len({*versions_of(one)}) == 1
    assert result.summary["staleness"]["max"] <= staleness
    assert largest_gap(heard) < ROUNDING


@pytest.mark.slow
def test_a_class_and_an_agent_are_trained_in_one_run(heard, episodes, tmp_path):
    source = turn_environments.__file__
    choices = [{"name": "echo", "class": f"{source}:Echo"}, {"name": "forks", "agent": f"{source}:forking_agent"}]
    environment = {"max_turns": 6, "max_episode_tokens": 90, "observation": "{content}", "choices": choices}
    changes = {"environment": environment, "model": episodes["model"] | {"max_positions": 128}, "steps": 2}
    result = slipstream.run(
        "quickstart",
        overrides=episodes | SYNCHRONOUS | changes | {"rewards": {"terms": []}},
        out=tmp_path / "run",
        display=False,
    )
    assert result.status == "done"
    audit(result.out)
    assert {one.num_branches > 1 for one in heard.of("train")} == {False, True}
    assert largest_gap(heard) < ROUNDING
