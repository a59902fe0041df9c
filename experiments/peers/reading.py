"""From the files of a run, or what TRL's script says, to the numbers that contenders are compared by."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.lab import metrics, summary
from experiments.peers.contenders import K
from slipstream.core.recipes import resolve
from slipstream.core.run_log import RolloutLine, read_rollouts
from slipstream.observe.accounting import read_accounting

TARGET = 0.9
"""Mean reward of `WINDOW` batches in a row that counts as learned."""
WINDOW = 5
EDGE = 5
"""Steps at either end of a run that its pace does not count: it fills up, and runs dry."""
LONGEST = 0.05
"""Of the admitted prompts: the share whose answers are longest."""
BINS = (6, 12, 24, 48, 96)
"""Tokens of the answer, up to and with: the last bin is open."""


@dataclass(frozen=True)
class Seen:
    """One run. `ended_s` of each step, since RL began, beside the mean reward of its batch.

    `discarded`, `left` and `reread` are shares of the tokens sampled: thrown away for their age, sampled and not
    trained when the run ended, and read again. `length_bias` is the mean length of the trained answers over that of all
    admitted ones, less 1; `longest_trained` the share of the longest ones that was trained; `discarded_length` the mean
    length of the discarded over that of the trained, less 1, None where nothing was. `age` is the mean age of
    completions when trained, by their oldest token, for each bin of lengths; None where there were none. `older` is the
    share of the trained tokens that were more than K steps old, `straggler` that of the time since RL began in which
    the trainer waited for one group while a batch lay ready.
    `accuracy` is that of sampled answers to held-out prompts in the end, `before` when RL began, None where it was
    not measured.
    """

    ended_s: tuple[float, ...]
    rewards: tuple[float, ...]
    completions_per_s: float
    accuracy: float
    before: float | None = None
    trainer_idle: float | None = None
    discarded: float = 0.0
    left: float = 0.0
    reread: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    length_bias: float = 0.0
    longest_trained: float = 1.0
    discarded_length: float | None = None
    age: tuple[float | None, ...] = ()
    older: float = 0.0
    straggler: float = 0.0

    @property
    def reached(self) -> int | None:
        """The first step after which the last `WINDOW` batches had a mean reward of `TARGET`, counted from 1."""
        means = trailing_means(self.rewards, WINDOW)
        return next((step for step, mean in enumerate(means, start=1) if mean is not None and mean >= TARGET), None)

    @property
    def reached_s(self) -> float | None:
        """When that was."""
        return None if self.reached is None else self.ended_s[self.reached - 1]


def read_run(run: Path, length_of: Callable[[int], int]) -> Seen:
    """What a run's files say. `length_of` an ordinal: tokens of the answer to its prompt, sampled already or not.

    ValueError where a completion of the run belongs to an answer of another length.
    """
    told, accounting = summary(run), read_accounting(run)
    if accounting.loop is None:
        raise ValueError(f"{run} has trained no step")
    began_s, done_s = accounting.loop
    ended_s = tuple(step.end_s - began_s for step in accounting.steps)
    straggler_s = sum(step.states["trainer"].get("wait_straggler", 0.0) for step in accounting.steps)
    lines = [line for line in metrics(run) if "reward" in line]
    fates = read_fates(run / "ledger.jsonl")
    trained, dropped = ({o for o, fate in fates.items() if fate == wanted} for wanted in ("trained", "skipped"))
    wasted = told["balance"]["wasted_tokens"]
    sampled = sum(line["tokens_trained"] for line in lines) + sum(
        tokens for cause, tokens in wasted.items() if cause != "re_prefilled"
    )
    rollouts = list(read_rollouts(run / "rollouts.jsonl"))
    for line in rollouts:
        if line.answer is None or len(line.answer) + 1 != length_of(line.ordinal):
            raise ValueError(f"group {line.ordinal} of {run} asked for '{line.answer}': not the prompt of that ordinal")
    lengths = {ordinal: length_of(ordinal) for ordinal in fates}
    return Seen(
        ended_s=ended_s,
        rewards=tuple(line["reward"] for line in lines),
        completions_per_s=pace(ended_s, resolve(run / "config.toml").completions_per_step),
        accuracy=told["eval"]["after"]["sampled_accuracy"],
        before=told["eval"]["before"]["sampled_accuracy"],
        trainer_idle=accounting.idle["trainer"],
        discarded=wasted["stale"] / sampled,
        left=wasted["left"] / sampled,
        reread=wasted["re_prefilled"] / sampled,
        staleness_mean=told["staleness"]["mean"],
        staleness_max=told["staleness"]["max"],
        length_bias=length_bias(lengths, trained),
        longest_trained=share_of_longest(lengths, trained),
        discarded_length=mean_length(lengths, dropped) / mean_length(lengths, trained) - 1 if dropped else None,
        age=age_by_length(
            (length_of(line.ordinal), line.step - line.versions[0][1])
            for line in rollouts
            if line.step is not None and line.versions
        ),
        older=share_older(rollouts, K),
        straggler=straggler_s / (done_s - began_s),
    )


def read_trl(measured: Mapping[str, Any]) -> Seen:
    """What `runs.measure_trl` found. A synchronous trainer: it trains all that it samples, at once."""
    ended_s = tuple(measured["ended_s"])
    return Seen(
        ended_s=ended_s,
        rewards=tuple(measured["rewards"]),
        completions_per_s=pace(ended_s, measured["completions_per_step"]),
        accuracy=measured["accuracy"],
        age=tuple(0.0 for _ in range(len(BINS) + 1)),
    )


def trailing_means(values: Sequence[float], window: int) -> list[float | None]:
    """Mean of each value and the `window - 1` before it; None where there are fewer."""
    return [fmean(values[end - window : end]) if end >= window else None for end in range(1, len(values) + 1)]


def pace(ended_s: Sequence[float], completions_per_step: int) -> float:
    """Completions trained per second between the end of step `EDGE` and that of the last but `EDGE`.

    Of runs that are shorter: between the first and the last.
    """
    edge = EDGE if len(ended_s) > 2 * EDGE + 1 else 0
    window = ended_s[edge : len(ended_s) - edge]
    return (len(window) - 1) * completions_per_step / (window[-1] - window[0])


def read_fates(path: Path) -> dict[int, str]:
    """Each admitted ordinal and what became of it, by the ledger. All groups have signal or are trained without: those
    that were skipped were too old.
    """
    entries = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {entry["ordinal"]: entry["state"] for entry in entries}


def share_older(rollouts: Iterable[RolloutLine], k: int) -> float:
    """Of the tokens of trained completions: those more than `k` steps old when trained."""
    tokens = older = 0
    for line in rollouts:
        if line.step is None or not line.versions:
            continue
        ends = [first for first, _ in line.versions[1:]] + [line.num_tokens]
        for (first, version), end in zip(line.versions, ends, strict=True):
            tokens += end - first
            older += (end - first) * (line.step - version > k)
    return older / tokens if tokens else 0.0


def mean_length(lengths: Mapping[int, int], ordinals: Iterable[int]) -> float:
    return fmean(lengths[ordinal] for ordinal in ordinals)


def length_bias(lengths: Mapping[int, int], trained: set[int]) -> float:
    """Mean length of the trained ordinals over that of all admitted ones, less 1. 0 where all were trained."""
    return mean_length(lengths, trained) / mean_length(lengths, lengths) - 1


def share_of_longest(lengths: Mapping[int, int], trained: set[int]) -> float:
    """Which share of the longest `LONGEST` of the admitted was trained; at least one, ties by ordinal."""
    count = max(1, math.floor(LONGEST * len(lengths)))
    longest = sorted(lengths, key=lambda ordinal: (-lengths[ordinal], ordinal))[:count]
    return len(trained.intersection(longest)) / count


def age_by_length(found: Iterable[tuple[int, int]]) -> tuple[float | None, ...]:
    """Mean age of (length, age) in each bin of lengths."""
    ages: list[list[int]] = [[] for _ in range(len(BINS) + 1)]
    for length, age in found:
        ages[sum(length > edge for edge in BINS)].append(age)
    return tuple(fmean(own) if own else None for own in ages)
