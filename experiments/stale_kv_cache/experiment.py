"""Weights replaced under a sequence that goes on: keep its keys and values, or make them anew? (Magistral, M4)"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.async_vs_sync.runs import RECIPE, start
from experiments.async_vs_sync.task import write
from experiments.comparison import is_as_great, is_greater
from experiments.figures import lines, panels, svg, ticks
from experiments.lab import Lab, Spec, metrics, summary
from experiments.section import Section, Verdict, markdown_table, spread
from experiments.stale_kv_cache.cache import KEEP, RECOMPUTE, WAYS, errors_by_lag, speed_by_swaps
from slipstream.core.recipes import merge
from slipstream.core.run_log import RolloutLine, read_rollouts

VERSION = 1
"""Of what is measured: raised when it changes."""
SEEDS = (0, 1, 2)
STEPS = 60
K = 4
SLOTS = 192
"""Three times the completions of a step: so each lives for about three steps."""
LAST_STEPS = 10
MARGIN = 0.05
"""Rewards that differ by less are equal to a user."""
LEAST_STALE = 0.25
"""Share of trained tokens that were sampled behind a swap; with fewer the runs are not about what a swap leaves."""

STARTS = (4, 20)
LAGS = (1, 2, 4, 8, 16)
PLACES = (1, 24)
"""Tokens of a completion before the swap: before the letters that the policy is learning, and far behind them."""
SWAPS: dict[str, Any] = {"max_new_tokens": 160, "num_prompts": 96}
SPEED: dict[str, Any] = {
    "model": {"hidden_size": 128, "intermediate_size": 384, "num_layers": 3},
    "swap_every": [0, 64, 32, 16, 8],
    "rows": 64,
    "prompt_tokens": 32,
    "new_tokens": 96,
    "repeats": 3,
}
SLIGHT = 0.5
"""The cache's part of the change in a logprob, against that of the new weights themselves."""

LESSONS: dict[str, Any] = {
    "steps": STEPS,
    "max_staleness": K,
    "generator": {"num_slots": SLOTS},
    "eval": {"num_prompts": 100},
}


def trained(dataset: Path, policy: Path, way: str, seed: int) -> Spec:
    """A continuous run, on the whole machine."""
    told = {
        "seed": seed,
        "model": {"path": str(policy)},
        "prompts": {"dataset": str(dataset)},
        "generator": {"kv_on_update": way},
    }
    return Spec(f"stale_kv_cache {way} seed={seed}", RECIPE, merge(LESSONS, told), "continuous")


def versions(dataset: Path, policy: Path) -> Spec:
    """A run that keeps every version that swaps are tried between."""
    newest = max(STARTS) + max(LAGS)
    kept = {
        "steps": newest,
        "trainer": {"checkpoint_every": 1, "keep_checkpoints": newest},
        "eval": {"every": 0, "num_prompts": SWAPS["num_prompts"]},
    }
    spec = trained(dataset, policy, KEEP, seed=SEEDS[0])
    return Spec("stale_kv_cache versions", RECIPE, merge(spec.overrides, kept), "continuous")


@dataclass(frozen=True)
class Outcome:
    """One run. `stale_share` of the trained tokens came behind a swap of their completion, `lag` versions on average.

    `tokens_per_s` are sampled, over the RL phase; `before` and `after` accuracies, sampled, of held-out prompts.
    """

    tokens_per_s: float
    reward: float
    before: float
    after: float
    stale_share: float
    lag: float
    rewards: tuple[float, ...]


def outcome(told: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], rollouts: Iterable[RolloutLine]) -> Outcome:
    """From `summary.json`, `metrics.jsonl` and `rollouts.jsonl`."""
    rewards = tuple(line["reward_mean"] for line in steps if "reward_mean" in line)
    stale_share, lag = behind_swaps([line for line in rollouts if line.step is not None])
    return Outcome(
        tokens_per_s=told["throughput"]["generated_tokens_per_s"],
        reward=fmean(rewards[-LAST_STEPS:]),
        before=told["eval"]["before"]["sampled_accuracy"],
        after=told["eval"]["after"]["sampled_accuracy"],
        stale_share=stale_share,
        lag=lag,
        rewards=rewards,
    )


def behind_swaps(rollouts: Iterable[RolloutLine]) -> tuple[float, float]:
    """Share of tokens sampled under a later version than their completion's first, and by how many, over all tokens."""
    tokens = stale = lags = 0
    for line in rollouts:
        ends = [first for first, _ in line.versions[1:]] + [line.num_tokens]
        for (first, version), end in zip(line.versions, ends, strict=True):
            lag = version - line.versions[0][1]
            tokens += end - first
            stale += (end - first) * (lag > 0)
            lags += (end - first) * lag
    return (stale / tokens, lags / tokens) if tokens else (0.0, 0.0)


Runs = Mapping[str, Sequence[Outcome]]
"""What a swap does with the cache -> one outcome per seed."""
Errors = Mapping[int, Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]]
"""Place of the swap -> way -> lag -> one of `swap_errors` per version that was begun under."""
Speeds = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]


def column(runs: Runs, way: str, value: str) -> list[float]:
    return [getattr(one, value) for one in runs[way]]


def verdicts(runs: Runs, errors: Errors) -> list[Verdict]:
    """By the rules of the README."""
    return [_unnecessary(runs), _slightly(errors), _faster(runs)]


def share(found: Sequence[Mapping[str, float]]) -> float:
    """What the cache changes of logprobs, against what new weights do; infinite where these changed nothing."""
    error, shift = (fmean(one[value] for one in found) for value in ("error", "shift"))
    return error / shift if shift else math.inf


def _slightly(errors: Errors) -> Verdict:
    shares = [share(found) for by_way in errors.values() for found in by_way[KEEP].values()]
    holds = None if math.isinf(max(shares)) else True if max(shares) <= SLIGHT else False if max(shares) > 1 else None
    return Verdict(
        "Kept keys and values are slightly outdated.",
        "M, online training",
        holds,
        f"they change a logprob by {min(shares):.2f} to {max(shares):.2f} of what the new weights change it by",
    )


def _unnecessary(runs: Runs) -> Verdict:
    keep, recompute = column(runs, KEEP, "reward"), column(runs, RECOMPUTE, "reward")
    learned = min(one.reward - one.rewards[0] for way in WAYS for one in runs[way])
    stale = fmean(column(runs, KEEP, "stale_share"))
    holds = is_as_great(keep, recompute, MARGIN)
    told = f"reward of the last {LAST_STEPS} steps {spread(keep)} kept, {spread(recompute)} made anew"
    if stale < LEAST_STALE:
        holds, told = None, f"only {stale:.2f} of the tokens came behind a swap; {told}"
    elif learned <= MARGIN:
        holds, told = None, f"a run gained only {learned:.2f}; {told}"
    return Verdict("Recomputing the cache is not necessary.", "M, online training", holds, told)


def _faster(runs: Runs) -> Verdict:
    keep, recompute = column(runs, KEEP, "tokens_per_s"), column(runs, RECOMPUTE, "tokens_per_s")
    return Verdict(
        "Keeping it is faster.",
        "M, online training",
        is_greater(keep, recompute),
        f"{spread(keep, 0)} tokens/s kept, {spread(recompute, 0)} made anew, training included",
    )


def section(lab: Lab) -> Section:
    dataset = write("tailed", lab.folder)
    policy = lab.run(start("base", dataset)) / "sft" / "model"
    versions_run = lab.run(versions(dataset, policy))
    errors: Errors = {
        place: lab.measure(
            "stale_kv_cache errors",
            lambda version, **parameters: errors_by_lag(**parameters),  # noqa: ARG005 - what it is kept by
            version=VERSION,
            run=str(versions_run),
            starts=list(STARTS),
            lags=list(LAGS),
            swap_at=place,
            **SWAPS,
        )
        for place in PLACES
    }
    speeds: Speeds = lab.measure(
        "stale_kv_cache speed",
        lambda version, **parameters: speed_by_swaps(**parameters),  # noqa: ARG005
        version=VERSION,
        **SPEED,
    )
    keys = [(way, seed) for seed in SEEDS for way in WAYS]
    folders = dict(zip(keys, lab.run_all([trained(dataset, policy, *key) for key in keys]), strict=True))
    runs: Runs = {
        way: [
            outcome(summary(folder), metrics(folder), read_rollouts(folder / "rollouts.jsonl"))
            for folder in (folders[way, seed] for seed in SEEDS)
        ]
        for way in WAYS
    }
    return Section(
        title="Keep or recompute the cache",
        question="When weights change under sequences that go on, what does it cost to keep the keys and values of the "
        "old ones, in logprobs and in quality, and what to make them anew, in tokens per second?",
        setup=f"The task of `async_vs_sync` with its long tail, 0.64M parameters, continuous, k = {K}, {SLOTS} slots "
        f"for 64 completions a step, {STEPS} steps, seeds {', '.join(map(str, SEEDS))}. Errors: {SWAPS['num_prompts']} "
        f"completions begin under one version of such a run and go on under a later one behind their first "
        f"{' or '.join(map(str, PLACES))} tokens; their recorded logprobs against those of the new weights with a "
        "cache of their own. "
        "Speed of the engine alone: 64 rows, prompts of 32 and completions of 96 tokens.",
        tables={
            "Logprobs behind one swap, by its place and the versions that it skips, nats per token": error_table(
                errors
            ),
            "Whole runs": run_table(runs),
            "The engine alone, tokens/s by decode steps between two swaps": speed_table(speeds),
        },
        figures={"Logprob error and change by lag; reward by step; tokens/s by swaps": figure(errors, runs, speeds)},
        verdicts=verdicts(runs, errors),
        notes=[
            "*error*: |recorded - fresh| under the new weights, *early*: the 16 tokens behind the swap; *change*: "
            "what the new weights themselves do to the same tokens' logprobs; *std of ratio*: of the importance "
            "ratio that corrects for the cache.",
            "Where the cache is kept, prompts that were stored ahead and have not begun are read again.",
            "What this policy is unsure of, and learns, are the first three tokens of an answer: behind token 24 all "
            "is certain, and weights and cache change next to nothing.",
            "Recorded logprobs are those of the distribution that was sampled from, stale cache included, so a loss "
            "with importance weights corrects for it.",
        ],
        cost="ten minutes on two cores",
    )


def error_table(errors: Errors) -> str:
    head = ["behind token", "lag", "error, kept", "early", "largest", "change", "error / change", "std of ratio"]
    rows = []
    for place, by_way in errors.items():
        for lag, kept in by_way[KEEP].items():
            error, early, largest, shift, ratio_std = (
                spread([one[value] for one in kept], 1, "e")
                for value in ("error", "early", "largest", "shift", "ratio_std")
            )
            anew = f"{fmean(one['error'] for one in by_way[RECOMPUTE][lag]):.1e}"
            rows.append([place, lag, error, early, largest, shift, f"{share(kept):.2f}", ratio_std, anew])
    return markdown_table([*head, "error, made anew"], rows)


def run_table(runs: Runs) -> str:
    digits = {"reward": 3, "before": 3, "after": 3, "tokens_per_s": 0, "stale_share": 2, "lag": 2}
    head = ["cache", f"reward, last {LAST_STEPS} steps", "accuracy before", "after", "tokens/s"]
    head += ["tokens behind a swap", "versions behind"]
    names = {KEEP: "kept", RECOMPUTE: "made anew"}
    rows = [[names[way], *(spread(column(runs, way, value), digits[value]) for value in digits)] for way in WAYS]
    return markdown_table(head, rows)


def speed_table(speeds: Speeds) -> str:
    rows = []
    for every in speeds[KEEP]:
        kept, anew = ([one["tokens_per_s"] for one in speeds[way][every]] for way in WAYS)
        again = [f"{fmean(one['re_prefilled'] for one in speeds[way][every]):.2f}" for way in WAYS]
        cells = [spread(kept, 0), spread(anew, 0), f"{fmean(kept) / fmean(anew):.2f}", *again]
        rows.append([every if every != "0" else "none", *cells])
    head = ["steps", "kept", "made anew", "kept / anew", "read again per token sampled, kept", "made anew"]
    return markdown_table(head, rows)


def figure(errors: Errors, runs: Runs, speeds: Speeds) -> str:
    drawn, axes = panels(["Behind one swap", "Reward in training", "The engine alone"])
    changes = {}
    for place, by_way in errors.items():
        for cause, value in (("kept cache", "error"), ("new weights", "shift")):
            kept = by_way[KEEP]
            changes[f"{cause}, token {place}"] = (
                [int(lag) for lag in kept],
                [[one[value] for one in found] for found in kept.values()],
            )
    lines(axes[0], changes)
    axes[0].set_xscale("log", base=2)
    ticks(axes[0].xaxis, LAGS)
    axes[0].set_yscale("log")
    axes[0].set_ylim(top=1.0)  # room for the legend
    axes[0].set_xlabel("versions skipped")
    axes[0].set_ylabel("|change of a logprob|, nats")
    names = {KEEP: "kept", RECOMPUTE: "made anew"}
    width = LAST_STEPS // 2
    curves = {}
    for way in WAYS:
        parts = [
            [fmean(one.rewards[first : first + width]) for one in runs[way]]
            for first in range(0, min(len(one.rewards) for one in runs[way]) - width + 1, width)
        ]
        curves[names[way]] = ([width * (index + 1) for index in range(len(parts))], parts)
    lines(axes[1], curves)
    axes[1].set_xlabel("step")
    axes[1].set_ylabel("reward")
    swaps = {
        names[way]: (
            [SPEED["new_tokens"] / int(every) if every != "0" else 0.0 for every in speeds[way]],
            [[one["tokens_per_s"] for one in found] for found in speeds[way].values()],
        )
        for way in WAYS
    }
    lines(axes[2], swaps)
    axes[2].set_xlabel("swaps per completion")
    axes[2].set_ylabel("tokens/s")
    axes[2].set_ylim(bottom=0)
    for axis in axes:
        axis.legend(frameon=False, fontsize=8, loc="upper left" if axis is axes[0] else "best")
    return svg(drawn)
