"""Scoring outside a run: order, failures, and terms."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipstream.core.sections import RewardsConfig, RewardTerm
from slipstream.core.types import Completion, Prompt, Segment, VersionSpan
from slipstream.evals.evaluate import _as_answer
from slipstream.evals.scoring import score
from slipstream.rewards.executor import Rewards


def completion(ordinal: int, text: str, answer: str = "yes") -> Completion:
    tokens = np.arange(1, len(text) + 1, dtype=np.int32)
    logprobs = np.zeros(len(text), dtype=np.float32)
    return Completion(
        ordinal=ordinal,
        sample=0,
        prompt=Prompt(prompt_id=str(ordinal), text="?", tokens=np.ones(1, dtype=np.int32), task="", answer=answer),
        segments=(
            Segment(tokens=tokens, behaviour_logprobs=logprobs, version_spans=(VersionSpan(start=0, version=0),)),
        ),
        text=text,
        finish_reason="stop",
    )


def test_rollouts_come_in_the_order_of_completions() -> None:
    def reward(completions: list[str], **_: object) -> list[float]:
        if completions == ["bad"]:
            raise ValueError("no")
        return [len(text) / 4 for text in completions]

    texts = ["aaaa", "bad", "a", "aa"] * 20
    completions = [completion(i, text) for i, text in enumerate(texts)]
    config = RewardsConfig(terms=[RewardTerm(function="python:mine")], failure_reward=-1.0)
    rollouts = score(completions, Rewards(config, {}, functions={"mine": reward}))
    assert [rollout.completion.text for rollout in rollouts] == texts
    assert [rollout.reward for rollout in rollouts[:4]] == [1.0, -1.0, 0.25, 0.5]
    line = reward.__code__.co_firstlineno + 2
    assert rollouts[1].failure == f"mine: ValueError: no ({Path(__file__).name}, line {line})"


def test_the_measure_says_what_is_correct() -> None:
    terms = [
        RewardTerm(function="exact_match"),
        RewardTerm(function="regex", params={"pattern": "^n"}, weight=2.0),
    ]
    rollouts = score([completion(0, "yes"), completion(1, "no")], Rewards(RewardsConfig(terms=terms), {}))
    answers = [_as_answer(rollout, "exact_match", sample=0, temperature=0.0) for rollout in rollouts]
    assert [answer.reward for answer in answers] == [1.0, 2.0]
    assert [answer.is_correct for answer in answers] == [True, False]
