"""On one GPU that both sides share: overlap or turns, old caches kept or rebuilt, and other systems' schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from experiments.async_vs_sync.experiment import reaches
from experiments.async_vs_sync.reading import Curve, Times, read_curve, read_times
from experiments.async_vs_sync.reward import JUDGE_S
from experiments.async_vs_sync.runs import COLD_STEPS, LAST_STEPS, MAX_STALENESS
from experiments.async_vs_sync.task import described
from experiments.comparison import is_greater, keeps_gains
from experiments.figures import lines, panels, svg
from experiments.gpu.runs import (
    BY_SIZE,
    CACHE,
    CASES,
    CONTINUOUS,
    GROUPS,
    KEPT,
    MEDIUM,
    OTHER_MODES,
    PEERS,
    RECOMPUTED,
    SEEDS,
    SIZES,
    STEPS,
    SYNC,
    WITH_JUDGE,
    Key,
    make,
)
from experiments.lab import Lab, metrics, summary
from experiments.section import Section, Verdict, markdown_table, spread

WINDOW = 5
"""Steps over which a point of a learning curve, and what is said of the end, is the mean."""
MARGIN = 0.02
"""Of the gold score: what counts as equal."""
BY_SIZE_NAMES = [(f"{SYNC}, {size}", f"{CONTINUOUS}, {size}") for size in SIZES]


@dataclass(frozen=True)
class Numbers:
    """What is read from a run beside its times: rates, waste, staleness, how far logprobs of both sides differ, and the
    gold score of its first step, which the policy that it began with has sampled."""

    completions_per_s: float
    generated_tokens_per_s: float
    wasted_share: float
    staleness_mean: float
    staleness_max: float
    trained_tokens_mean: float
    logprob_error: float
    first_gold: float
    seconds_to_reward: float | None


REWARD = 0.9
"""How soon a window's mean reward is there."""


@dataclass(frozen=True)
class Found:
    """By run."""

    times: Mapping[Key, Times]
    curves: Mapping[Key, Curve]
    numbers: Mapping[Key, Numbers]

    def time(self, name: str, value: Callable[[Times], float]) -> list[float]:
        return [value(self.times[name, seed]) for seed in SEEDS]

    def number(self, name: str, value: Callable[[Numbers], float]) -> list[float]:
        return [value(self.numbers[name, seed]) for seed in SEEDS]

    def gold(self, name: str) -> list[float]:
        return [self.curves[name, seed].gold[-1] for seed in SEEDS]

    def keeps_gains(self, ours: str, theirs: str) -> bool | None:
        """Whether `ours` ends with as good a gold score as `theirs`; None where that has learned nothing."""
        began = self.number(theirs, lambda one: one.first_gold)
        return keeps_gains(self.gold(ours), self.gold(theirs), began, MARGIN)

    def speed_up(self, slow: str, fast: str) -> list[float]:
        """By seed: a step of `slow` over a step of `fast`."""
        pairs = zip(self.time(slow, _step_s), self.time(fast, _step_s), strict=True)
        return [theirs / ours for theirs, ours in pairs]


def _step_s(times: Times) -> float:
    return times.step_s


def section(lab: Lab) -> Section:
    """Make what is missing, read everything, and say what it comes to. Unavailable without a GPU."""
    runs = make(lab)
    times, curves, numbers = {}, {}, {}
    for key, folder in runs.items():
        asked = {"run": str(folder), "cold": COLD_STEPS, "last": LAST_STEPS}
        times[key] = Times(**lab.measure(f"times {folder.name}", read_times, **asked))
        curves[key] = Curve(**read_curve(run=str(folder), metrics=metrics(folder), window=WINDOW))
        numbers[key] = numbers_of(summary(folder), metrics(folder), curves[key])
    return told(Found(times, curves, numbers), hardware=_hardware(), transport=_transport(runs[KEPT, SEEDS[0]]))


def numbers_of(told_by: Mapping[str, object], lines_of: list[dict[str, float]], curve: Curve) -> Numbers:
    """From a run's `summary.json` and `metrics.jsonl`."""
    throughput, staleness, balance = (told_by[name] for name in ("throughput", "staleness", "balance"))
    assert isinstance(throughput, dict)
    assert isinstance(staleness, dict)
    assert isinstance(balance, dict)
    steps = [line for line in lines_of if "reward" in line]
    trained = sum(staleness["histogram"].values())
    wasted = sum(balance["wasted_tokens"].values())
    arrived = (s for s, reward in zip(curve.seconds, curve.reward, strict=True) if reward >= REWARD)
    return Numbers(
        completions_per_s=throughput["completions_per_s"],
        generated_tokens_per_s=throughput["generated_tokens_per_s"],
        wasted_share=wasted / (trained + wasted),
        staleness_mean=staleness["mean"],
        staleness_max=staleness["max"],
        trained_tokens_mean=fmean(line["completion_tokens_mean"] for line in steps),
        logprob_error=fmean(line["logprob_diff_mean"] for line in steps),
        first_gold=steps[0]["reward_parts/exact_match"],
        seconds_to_reward=next(arrived, None),
    )


def _hardware() -> str:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "a GPU of another machine"


def _transport(run: Path) -> str:
    sync = summary(run)["weight_sync"]
    transfer_s = sync["transfer_s_p50"]
    return f"{sync['count']} versions, {'no time told' if transfer_s is None else f'{1000 * transfer_s:.1f} ms each'}"


# What it comes to


def told(found: Found, *, hardware: str, transport: str) -> Section:
    """The section: from numbers to words, without a file."""
    return Section(
        title="GPU edition: one GPU for both sides",
        question=(
            "Does overlap pay where generator and trainer share one GPU, what do old keys and values cost, and what do "
            "other systems' schedules waste?"
        ),
        setup=(
            f"The task of async_vs_sync on one {hardware}: {GROUPS * 8} completions a step, {STEPS} steps, "
            f"{len(SEEDS)} seeds, bfloat16 over float32 weights, versions by CUDA IPC ({transport} at "
            f"{SIZES[MEDIUM].words}); max_staleness {MAX_STALENESS} in asynchronous runs. Turns are on the whole GPU."
        ),
        tables={
            "Overlap and turns": _modes_table(found),
            "An in-flight swap keeps old keys and values, or recomputes them": _cache_table(found),
            f"Schedules of other systems in ours, {SIZES[MEDIUM].words}": _peers_table(found),
        },
        figures={"Gold score by seconds for turns and overlap, three sizes": _figure(found)},
        verdicts=verdicts(found),
        cost=f"{len(found.times)} runs on a GPU, one at a time",
    )


def verdicts(found: Found) -> list[Verdict]:
    """Each by its rule in the README."""
    fast, slow = f"{CONTINUOUS}, {MEDIUM}", f"{SYNC}, {MEDIUM}"
    speed_ups = [found.speed_up(slow, fast) for slow, fast in BY_SIZE_NAMES]
    judge_slow, judge_fast = WITH_JUDGE
    medium = speed_ups[list(SIZES).index(MEDIUM)]
    return [
        Verdict(
            "Overlap on one GPU is faster than turns",
            "A, Fig. 1; L, Fig. 7, on GPUs of their own",
            reaches(medium, 1.0),
            f"{spread(medium, 2)} times as fast at {SIZES[MEDIUM].words}",
        ),
        Verdict(
            "and ends as good",
            "A, Fig. 1; L, Fig. 6",
            found.keeps_gains(fast, slow),
            f"gold score {spread(found.gold(fast))} against {spread(found.gold(slow))}",
        ),
        Verdict(
            "The speed-up grows with the size of the policy",
            "A, Fig. 1; L, Fig. 7",
            is_greater(speed_ups[-1], speed_ups[0]),
            "; ".join(f"{SIZES[size].words}: {spread(one, 2)}" for size, one in zip(SIZES, speed_ups, strict=True)),
        ),
        Verdict(
            f"With a judge of {JUDGE_S} s it grows",
            "aim",
            is_greater(found.speed_up(judge_slow, judge_fast), medium),
            f"{spread(found.speed_up(judge_slow, judge_fast), 2)} against {spread(medium, 2)}",
        ),
        Verdict(
            "Old keys and values need not be recomputed",
            "M4",
            found.keeps_gains(KEPT, RECOMPUTED),
            f"gold score {spread(found.gold(KEPT))} kept, {spread(found.gold(RECOMPUTED))} recomputed",
        ),
    ]


def _modes_table(found: Found) -> str:
    rows = []
    for name, case in (BY_SIZE | OTHER_MODES | WITH_JUDGE).items():
        slow = next(iter(WITH_JUDGE)) if name in WITH_JUDGE else f"{SYNC}, {case.size}"
        rows.append(
            (
                f"{SIZES[case.size].words}{', judge' if name in WITH_JUDGE else ''}",
                case.mode,
                spread(found.time(name, _step_s)),
                spread(found.speed_up(slow, name), 2),
                f"{fmean(found.time(name, lambda times: times.trainer_idle)):.0%}",
                f"{fmean(found.time(name, lambda times: times.generator_idle)):.0%}",
                f"{fmean(found.number(name, lambda one: one.staleness_mean)):.2f}",
                spread(found.gold(name)),
            )
        )
    head = ["policy", "mode", "step, s", "speed-up over turns", "trainer waits", "generator waits", "staleness"]
    return markdown_table([*head, "gold score"], rows, left=2)


def _cache_table(found: Found) -> str:
    rows = [
        (
            "kept" if name == KEPT else "recomputed",
            spread(found.number(name, lambda one: one.logprob_error), 4),
            spread(found.number(name, lambda one: one.generated_tokens_per_s), 0),
            spread(found.time(name, _step_s)),
            spread(found.gold(name)),
        )
        for name in CACHE
    ]
    return markdown_table(["cache", "logprob difference, nats", "tokens/s", "step, s", "gold score"], rows)


def _peers_table(found: Found) -> str:
    mean_tokens = described("tailed")["mean"]
    rows = []
    for name in (KEPT, *PEERS):
        arrived = [found.numbers[name, seed].seconds_to_reward for seed in SEEDS]
        known = [seconds for seconds in arrived if seconds is not None]
        rows.append(
            (
                "oldest_first (ours)" if name == KEPT else name,
                spread(found.number(name, lambda one: one.completions_per_s), 0),
                f"{fmean(found.number(name, lambda one: one.wasted_share)):.1%}",
                spread(found.number(name, lambda one: one.staleness_mean), 2),
                f"{max(found.number(name, lambda one: one.staleness_max)):.0f}",
                f"{fmean(found.number(name, lambda one: one.trained_tokens_mean)) / mean_tokens - 1:+.0%}",
                spread(known, 0) if len(known) == len(arrived) else f"{len(known)} of {len(arrived)} arrive",
            )
        )
    head = ["policy", "completions/s", "tokens wasted", "staleness", "largest", "length bias"]
    return markdown_table([*head, f"s to a reward of {REWARD}"], rows)


def _figure(found: Found) -> str:
    figure, axes = panels([f"Gold score by seconds, {size.words}" for size in SIZES.values()])
    for axis, names in zip(axes, BY_SIZE_NAMES, strict=True):
        series = {}
        for name in names:
            curves = [found.curves[name, seed] for seed in SEEDS]
            points = range(min(len(curve.steps) for curve in curves))
            series[CASES[name].mode] = (
                [fmean(curve.seconds[at] for curve in curves) for at in points],
                [[curve.gold[at] for curve in curves] for at in points],
            )
        lines(axis, series)
        axis.set_xlabel("seconds")
        axis.set_ylim(0, 1.02)
    axes[0].legend(fontsize=7, frameon=False)
    return svg(figure)
