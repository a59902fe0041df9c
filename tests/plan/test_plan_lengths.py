"""Length distributions: they have the mean and the tail they were asked for, or those of a run's file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slipstream.core.errors import ConfigError
from slipstream.plan.lengths import AS_RECORDED, LengthSample, Turns, lengths_of_run, lengths_with_tail


@pytest.mark.parametrize(
    ("mean", "p99", "longest"),
    [(1000, 4000, 8000), (1000, 1000, 1000), (1000, 12_000, 16_000), (5, 8, 12), (300, 3000, 3000)],
)
def test_lengths_have_the_mean_and_the_tail_that_were_asked_for(mean, p99, longest):
    found = lengths_with_tail(128, mean, p99, longest)
    assert found.prompt_mean == 128
    assert found.mean == pytest.approx(mean, rel=0.01)
    assert np.quantile(found.completions, 0.99) == pytest.approx(p99, rel=0.05)
    assert min(found.completions) >= 1
    assert found.longest == longest >= found.completions[-1]
    assert list(found.completions) == sorted(found.completions)


def test_a_cut_tail_is_lognormal_below_the_cut():
    """The median of a lognormal distribution with mean m and deviation s is m exp(-s^2/2), nothing being cut here."""
    found = lengths_with_tail(1, 1000, 3000, 1_000_000)
    sigma = 2.32634787 - np.sqrt(2.32634787**2 - 2 * np.log(3.0))  # of exp(2.326 s - s^2/2) = p99/mean = 3
    assert np.median(found.completions) == pytest.approx(1000 * np.exp(-(sigma**2) / 2), rel=0.01)


def test_groups_have_their_lengths_however_many_there_are():
    found = lengths_with_tail(1, 100, 400, 800)
    many = found.drawn(0, 2000, 4)
    assert many[:7] == found.drawn(0, 7, 4)
    assert found.drawn(1, 7, 4) != many[:7]
    drawn = [length for group in many for length in group]
    assert np.mean(drawn) == pytest.approx(100, rel=0.05)
    assert np.quantile(drawn, 0.99) == pytest.approx(400, rel=0.1)


def test_the_longest_of_so_many_is_what_one_in_so_many_exceeds():
    found = LengthSample(prompt_mean=4.0, completions=tuple(range(1, 101)), source="test")
    assert found.longest_of(100) == pytest.approx(99.01)
    assert found.longest_of(2) == found.mean == 50.5
    assert found.longest_of(1) == 50.5


@pytest.mark.parametrize(
    ("mean", "p99", "longest", "named"),
    [
        (100, 99, 200, "out of order"),
        (100, 300, 200, "out of order"),
        (100, 1500, 4000, "too heavy"),
        (0.5, 2, 3, "pos"),
    ],
)
def test_lengths_that_cannot_be_are_refused(mean, p99, longest, named):
    with pytest.raises(ConfigError, match=named):
        lengths_with_tail(10, mean, p99, longest)


def rollout(num_tokens, prompt="ab>", completion="ba", **more):
    line = {"ordinal": 0, "sample": 0, "step": 0, "outcome": "trained", "prompt_id": "", "task": "", "answer": None}
    line |= {"reward": 1.0, "parts": {}, "failure": None, "finish_reason": "stop", "versions": [], "replica": 0}
    line |= {"mean_behaviour_logprob": None, "started_s": 0.0, "finished_s": 0.0, "scored_s": 0.0}
    return json.dumps(line | {"prompt": prompt, "completion": completion, "num_tokens": num_tokens} | more)


def test_lengths_of_a_run_are_those_that_it_recorded(tmp_path):
    lines = [rollout(count) for count in (3, 3, 9, 5)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found, turns = lengths_of_run(tmp_path)
    assert turns == AS_RECORDED
    assert found.completions == (3, 3, 5, 9)
    assert found.prompt_mean == 3.0  # a token per character: completions have at least as many tokens as characters
    assert found.mean == 5.0


def test_given_tokens_of_episodes_are_no_lengths_and_their_turns_are_told(tmp_path):
    def episode(environment_s):
        return {"messages": [], "turns": 1, "turn_rewards": [], "environment_s": environment_s}

    lines = [
        rollout(20, completion="b" * 40, versions=[[0, 3], [6, -1], [14, 4]], episode=episode(4.0)),  # 12 of 20
        rollout(5, completion="b" * 10, versions=[[0, 3]], episode=episode(2.0)),
        rollout(0, completion="", episode=episode(0.0)),
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found, turns = lengths_of_run(tmp_path)
    assert found.completions == (5, 12)
    assert found.prompt_mean == 1.5  # 3 characters, of which all tokens have 2 each
    assert turns == Turns(turns=4 / 3, given_tokens=8, environment_s=1.5)


def test_a_folder_without_rollouts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"rollouts\.jsonl"):
        lengths_of_run(tmp_path)
    (tmp_path / "rollouts.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="no completions"):
        lengths_of_run(tmp_path)


def test_statistics():
    found = LengthSample(prompt_mean=4.0, completions=tuple(range(1, 101)), source="test")
    assert (found.mean, found.mean_square, found.longest) == (50.5, 3383.5, 100)
    assert found.p99 == pytest.approx(99.01)
