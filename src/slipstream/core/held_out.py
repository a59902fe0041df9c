"""Summaries of held-out answers: their mean reward, and the share of right ones where a reward term says which are."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.core.config import RunConfig
from slipstream.core.environment_section import ENVIRONMENT
from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.stage_sections import EvalConfig

RIGHT_FROM = 1 - 1e-6
"""From here on the measure counts as 1, and the answer as right."""
PARTS = "reward_parts"
GREEDY_PREFIX, SAMPLED_PREFIX = "eval_", "eval_sampled_"
"""Prefixes of an evaluation's metrics."""


def set_prefix(name: str) -> str:
    """Return the prefix of the metrics of a named set."""
    return f"eval/{name}/"


class Scored(Protocol):
    """An answer with its reward, the parts of it by name (None: the term abstained), and why scoring failed."""

    @property
    def reward(self) -> float: ...

    @property
    def reward_parts(self) -> Mapping[str, float | None]: ...

    @property
    def failure(self) -> str | None: ...


@dataclass(frozen=True)
class Measured:
    """Means over answers: of `reward`, of each part of it where that was given, and of being right, in 0..1.

    `accuracy` is None without a measure, and where it abstained everywhere; `reward` in files of runs that had none.
    `reward_error` is the standard error of `reward`; None of a single answer, and in files of runs that had none.
    `num_judged` prompts have an answer that `accuracy` counts; None in files of runs that did not count them.
    """

    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    accuracy: float | None = None
    reward_error: float | None = None
    num_judged: int | None = None

    def value(self, config: EvalConfig) -> float | None:
        """Return the number that the run goes by (`eval.metric`); None where no answer could be judged."""
        return self.accuracy if config.goes_by == "accuracy" else self.reward

    @property
    def headline(self) -> tuple[str, float | None]:
        """Return name and value of the number to show first: accuracy, or the mean reward where there is none."""
        return ("reward", self.reward) if self.accuracy is None else ("accuracy", self.accuracy)

    def metrics(self, prefix: str) -> dict[str, Any]:
        """Return these as metrics of an evaluation, for `metrics.jsonl`."""
        found: dict[str, Any] = {f"{prefix}reward": self.reward, prefix + PARTS: self.reward_parts}
        others = {"accuracy": self.accuracy, "reward_error": self.reward_error, "num_judged": self.num_judged}
        return found | {prefix + name: value for name, value in others.items() if value is not None}


def measured(answers: Sequence[Scored], measure: str | None, prompts: Sequence[Hashable] | None = None) -> Measured:
    """Return the means over `answers`, at least one; `measure` is the config's `eval.measure`.

    Answers with the same entry in `prompts` are to one prompt; None: each has its own.
    """
    parts: dict[str, list[float]] = {}
    for answer in answers:
        for name, value in answer.reward_parts.items():
            if value is not None:
                parts.setdefault(name, []).append(value)
    prompts = range(len(answers)) if prompts is None else prompts
    rights = [(is_right(answer, measure), prompt) for answer, prompt in zip(answers, prompts, strict=True)]
    judged = [(right, prompt) for right, prompt in rights if right is not None]
    rewards = [answer.reward for answer in answers]
    return Measured(
        reward=_mean(rewards),
        reward_error=clustered_error(rewards, prompts),
        reward_parts={name: _mean(values) for name, values in parts.items()},
        accuracy=_mean([right for right, _ in judged]) if judged else None,
        num_judged=len({prompt for _, prompt in judged}) if judged else None,
    )


def clustered_error(values: Sequence[float], clusters: Sequence[Hashable]) -> float | None:
    """Return the standard error of the mean of values [N] of which those of one cluster are not independent.

        sqrt(G / (G - 1) sum_g (sum_{i in g} (x_i - mean))^2) / N,   over G clusters

    Of one cluster alone it is that of its values, which are independent given what they share; None of a single value.
    Identities: where each value has its own, std / sqrt(N); where all clusters are of one size, the standard error of
    their means. Liang and Zeger (1986), with the usual correction for few clusters.
    """
    mean, sums = _mean(values), dict.fromkeys(clusters, 0.0)
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += value - mean
    if len(sums) < 2:
        return clustered_error(values, range(len(values))) if len(values) > 1 else None
    return math.sqrt(len(sums) / (len(sums) - 1) * math.fsum(one * one for one in sums.values())) / len(values)


def is_right(answer: Scored, measure: str | None) -> bool | None:
    """Whether the term `measure` gave `answer` 1 or more. A failed one is wrong; None where nothing judged it."""
    if measure is None:
        return None
    if answer.failure is not None:
        return False
    part = answer.reward_parts.get(measure)
    return None if part is None else part >= RIGHT_FROM


def in_metrics(line: Mapping[str, Any], prefix: str) -> Measured | None:
    """Return what `Measured.metrics` put into a line of `metrics.jsonl`; None for a line of something else."""
    reward, accuracy = line.get(f"{prefix}reward"), line.get(f"{prefix}accuracy")
    if reward is None and accuracy is None:
        return None
    start = f"{prefix}{PARTS}/"
    parts = {name.removeprefix(start): value for name, value in line.items() if name.startswith(start)}
    found = {name: value for name, value in parts.items() if value is not None}
    return Measured(reward, found, accuracy, line.get(f"{prefix}reward_error"), line.get(f"{prefix}num_judged"))


def check_measure(config: RunConfig) -> None:
    """Raise ConfigError for a measure that names no part of the reward, and for an accuracy without any."""
    fields = {"eval.measure": config.eval.measure}
    fields |= {f"measure of eval.sets '{one.name}'": one.measure for one in config.eval.sets}
    if config.eval.measure_of("") is None and config.eval.metric == "accuracy":
        raise ConfigError(
            "there is no accuracy without a measure",
            got="eval.metric = 'accuracy' without eval.measure",
            allowed="eval.measure, the name of the reward term that says which answers are right",
            hint="eval.metric = 'reward' goes by the mean reward",
        )
    names = [*config.rewards.part_names, *([ENVIRONMENT] if config.environment.is_set else [])]
    for said, measure in fields.items():
        if measure is None or measure in names:
            continue
        hint = did_you_mean(measure, names) or "without it there is no accuracy, and the held-out mean reward is shown"
        allowed = ", ".join(repr(name) for name in names)
        raise ConfigError(f"{said} names no term of the reward", got=repr(measure), allowed=allowed, hint=hint)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
