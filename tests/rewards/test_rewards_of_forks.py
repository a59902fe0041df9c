"""Reward functions that take `branches` get the chats of an episode's forks, here and in workers; others do not."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_jobs import GENEROUS_S

from slipstream.core.sections import RewardsConfig, RewardTerm
from slipstream.core.types import Completion, EpisodeRecord, Prompt, Segment
from slipstream.rewards.assembly import Assembly
from slipstream.rewards.calls import call_function
from slipstream.rewards.protocol import RewardJob
from slipstream.rewards.scorers import Scorers

FORK = [{"role": "user", "content": "so far: 7"}, {"role": "assistant", "content": "8"}]
JAILED = '''
def forks(prompts, completions, completion_ids, branches, **columns):
    """The length of the last message of each fork, added up."""
    return [float(sum(len(chat[-1]["content"]) for chat in chats)) if chats else None for chats in branches]
'''


def completion(sample: int, branches: list[Any] | None) -> Completion:
    said = [{"role": "assistant", "content": "7"}]
    return Completion(
        ordinal=0,
        sample=sample,
        prompt=Prompt(prompt_id="0", text="?", tokens=np.arange(3, dtype=np.int32), task=""),
        segments=(Segment(tokens=np.arange(3, dtype=np.int32)),),
        text="7",
        finish_reason="stop",
        episode=None if branches is None else EpisodeRecord(messages=said, branches=branches),
    )


def test_functions_here_and_in_workers_read_the_forks(tmp_path: Path) -> None:
    seen = []

    def inline(prompts: Any, completions: Any, branches: list[Any], **columns: Any) -> list[float]:
        seen.append(branches)
        return [float(len(chats)) for chats in branches]

    (tmp_path / "jailed_forks.py").write_text(JAILED)
    terms = [
        RewardTerm(function="python:inline", per="group"),
        RewardTerm(function=f"{tmp_path / 'jailed_forks.py'}:forks"),
    ]
    config = RewardsConfig(terms=terms, timeout_s=GENEROUS_S, memory_mb=512)
    found = {}
    with closing(Scorers(config, {}, {"inline": inline}, num_spares=0)) as scorers:
        assembly = Assembly(scorers.where, group_size=3)
        for sample, branches in enumerate(([FORK, FORK[:1]], [], None)):
            for call in assembly.add(completion(sample, branches)):
                scorers.submit(call)
        while assembly.num_called:
            select.select(scorers.fds(), [], [], 1.0)
            for scored in scorers.poll():
                assert scored.failure is None
                for entry in assembly.answer(scored.job_id, scored.parts, scored.failure):
                    found[entry.completion.sample] = entry.parts
    assert seen == [[[FORK, FORK[:1]], [], []]]
    assert found == {0: [2.0, float(len("8") + len("so far: 7"))], 1: [0.0, None], 2: [0.0, None]}


def only_keywords(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float("branches" in columns)]


def with_default(prompts: Any, completions: Any, branches: Any = None, **columns: Any) -> list[float]:
    return [float(len(branches[0]))]


@pytest.mark.parametrize(
    ("function", "columns", "expected"),
    [
        (only_keywords, {}, 0.0),
        (only_keywords, {"branches": "oak"}, 1.0),
        (with_default, {}, 1.0),
        (with_default, {"branches": "oak"}, 3.0),  # the row's column goes before
    ],
)
def test_a_function_that_names_it_gets_it(
    function: Callable[..., Any], columns: dict[str, Any], expected: float
) -> None:
    asked = RewardJob(0, "?", "7", [], "", None, columns, branches=[FORK])
    assert call_function(function, [asked]) == [expected]
