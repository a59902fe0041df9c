"""Stragglers in virtual time: what each way to tolerate them gains, costs in staleness, and leaves out.

    python benchmarks/stragglers.py [--steps 120] [--seeds 3] [--tails heavy milder] [--max-staleness 1 2 4 8]
    python benchmarks/stragglers.py --ideas     # what else would pay: order by length, slots, segments, fewer rows

The machine, the costs and the heavy tail are those of `benchmarks/policies.py`; the milder tail has sigma = 0.6. For
each k: `drop_stale`, `areal`, StaleFlow's admission, and ours with windows from 1 to the widest live one, the preset
`tolerant` in bold. Means over the seeds.

    steps/h         in brackets: of those of `drop_stale` at the same k, and at k = 2, the default
    staleness       mean and worst, and the share of trained tokens that are older than 2 steps
    thrown away     tokens generated and discarded for their age, of all that were generated
    idle            share of the time that trainer, and decode slots, had nothing to do
    length bias     mean length of the trained groups against that of all that were admitted and have signal
    KS              largest distance of the distributions of a group's longest completion, trained and sampled, in the
                    first quarter of the run and in all of it; in the head what chance exceeds in one run of twenty

`reserved` is our reading of StaleFlow (arXiv:2601.12784): each step has a buffer of P entries; a group that version v
samples reserves an entry of a buffer up to v + k, takes the earliest free one when it is finished, and a step consumes
a full buffer. As reservations move, all can be kept if, for every step D, no more groups must be trained by D than the
buffers up to D have entries; this is checked here. Its routing and migration are not modelled. `reserved, a = 2` runs
two steps ahead at most, as `tolerant` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as the tests import it
from benchmarks.policies import (
    COMPLETIONS,
    COSTS,
    GROUPS,
    SETUP,
    SLOTS,
    SPEEDS,
    config,
    heavy_tailed,
    numbers,
    trained_of,
)
from slipstream.controller.policies import make_policy
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.config import PRESETS
from slipstream.core.run_log import Command, Event, ScheduleConfig
from slipstream.plan.simulated_run import Costs, MadeUp, Simulated, SimulatedSetup
from slipstream.plan.simulator import simulate

TAILS = {"heavy": 1.0, "milder": 0.6}
K, PASSING = PRESETS["tolerant"]["max_staleness"], PRESETS["tolerant"]["overtake_steps"]
DEFAULT_K = 2
Lengths = Callable[[int], tuple[int, ...]]


class Reserved(SchedulingPolicy):
    """StaleFlow's buffers, as far as groups are concerned (the module's docstring); `ahead`: at most so many steps."""

    name = "reserved"
    bounds_admissions = True
    ahead: int | None = None

    def __init__(self, config: ScheduleConfig) -> None:
        super().__init__(config)
        self.last: dict[int, int] = {}  # admitted, not trained -> the last step that may train it

    @property
    def staleness_bound(self) -> int:
        return self.config.max_staleness

    def apply(self, event: Event) -> list[Command]:
        commands = super().apply(event)
        self._reservations()
        return commands

    def _reservations(self) -> dict[int, int]:
        k = self.config.max_staleness
        for ordinal, group in self.in_flight.items():
            self.last.setdefault(ordinal, self.versions[group.replica] + k)
        self.last |= {ordinal: oldest + k for ordinal, oldest in self.ready.items()}  # now it is known
        kept = self.in_flight.keys() | self.ready.keys()
        self.last = {ordinal: last for ordinal, last in self.last.items() if ordinal in kept}
        return self.last

    def _fit(self, lasts: Iterable[int], step: int) -> bool:
        """Tell whether every group can be trained by its last step, when `step` is the next one."""
        size = self.config.groups_per_step
        return all(before < (last - step + 1) * size for before, last in enumerate(sorted(lasts)))

    def _may_start(self, ordinal: int, version: int, /) -> bool:
        size, place = self.config.groups_per_step, self.place(ordinal)
        limit = self.config.steps if self.ahead is None else min(self.config.steps, version + self.ahead + 1)
        lasts = [*self._reservations().values(), version + self.config.max_staleness]
        return place < limit * size and self._fit(lasts, self.steps_done + bool(self.training))

    def _next_batch(self) -> list[int] | None:
        last = self._reservations()
        batch = sorted(self.ready, key=lambda ordinal: (last[ordinal], ordinal))[: self.config.groups_per_step]
        left = [step for ordinal, step in last.items() if ordinal not in set(batch)]
        return batch if self._fit(left, self.steps_done + 1) else None


class ReservedAhead(Reserved):
    """The same, as far ahead as `tolerant`."""

    ahead = K - PASSING


def lengths_of(tail: str, seed: int) -> Lengths:
    return heavy_tailed(seed, completions=COMPLETIONS, sigma=TAILS[tail])


def run(
    policy: str | type[SchedulingPolicy],
    lengths: Lengths,
    *,
    seed: int,
    steps: int,
    k: int,
    window: int = 1,
    setup: SimulatedSetup = SETUP,
    costs: Costs = COSTS,
) -> Simulated:
    """Simulate one policy, by name or class; one group in five is without signal."""
    name = policy if isinstance(policy, str) else "oldest_first"
    dials = config(name, steps=steps, max_staleness=k, reorder_window=window)
    dials = replace(dials, capacity=setup.slots + COMPLETIONS)
    work = MadeUp(lengths=lengths, has_signal=lambda ordinal: (ordinal * 7919 + seed) % 5 != 0)
    return simulate(make_policy(policy, dials) if isinstance(policy, str) else policy(dials), setup, work, costs)


def distance(sample: Sequence[int], other: Sequence[int]) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples."""
    a, b = np.sort(sample), np.sort(other)
    both = np.concatenate([a, b])
    return float(np.abs(np.searchsorted(a, both, "right") / len(a) - np.searchsorted(b, both, "right") / len(b)).max())


def row(found: Simulated, lengths: Lengths) -> dict[str, float]:
    """Return the numbers of one run."""
    base, trained = numbers(found, lengths), [max(lengths(ordinal)) for ordinal in trained_of(found)]
    sampled = [max(lengths(ordinal)) for ordinal in range(1_000_000, 1_010_000)]
    older = sum(tokens for lag, tokens in found.lags.items() if lag > DEFAULT_K) / found.lags.total()
    early = distance(trained[: len(trained) // 4], sampled)
    return base | {"older %": 100 * older, "KS, first quarter": early, "KS": distance(trained, sampled)}


def averaged(policy: str | type[SchedulingPolicy], tail: str, *, seeds: int, **options: object) -> dict[str, float]:
    rows = []
    for seed in range(seeds):
        lengths = lengths_of(tail, seed)
        rows.append(row(run(policy, lengths, seed=seed, **options), lengths))  # type: ignore[arg-type]
    return {name: mean(one[name] for one in rows) for name in rows[0]}


def windows(k: int) -> list[int]:
    """Return steps by which W is widened: 0 to k, half as far behind the bound each time."""
    return sorted({0, *(k - ahead for ahead in (0, 1, 2, 3, k // 2) if ahead <= k)})


def table(tail: str, ks: Sequence[int], *, steps: int, seeds: int) -> None:
    groups = steps * GROUPS
    chance = [1.36 / np.sqrt(count) for count in (groups // 4, groups)]
    print(f"\n### The {tail} tail: sigma = {TAILS[tail]}\n")
    columns = ["steps/h", "staleness mean", "worst", "older than 2, %", "thrown away %", "trainer idle %"]
    columns += ["slots idle %", "length bias %", f"KS, first quarter ({chance[0]:.3f})", f"KS ({chance[1]:.3f})"]
    print("| k | policy | " + " | ".join(columns) + " |")
    print("|---:|---|" + "---:|" * len(columns))
    reference: float | None = None
    for k in sorted({DEFAULT_K, *ks}, key=lambda k: (k != DEFAULT_K, k)):
        contenders: list[tuple[str, str | type[SchedulingPolicy], int]] = [
            ("drop_stale", "drop_stale", 1),
            ("areal", "areal", 1),
            ("reserved", Reserved, 1),
        ]
        if k > ReservedAhead.ahead:
            contenders.append((f"reserved, a = {ReservedAhead.ahead}", ReservedAhead, 1))
        for passing in windows(k):
            bold = "**" if (k, passing) == (K, PASSING) else ""
            width = f"{passing} P + 1" if passing else "1"
            contenders.append((f"{bold}ours, W = {width}{bold}", "oldest_first", passing * GROUPS + 1))
        same_k: float | None = None
        for label, policy, window in contenders:
            one = averaged(policy, tail, seeds=seeds, steps=steps, k=k, window=window)
            speed = one["steps/h"]
            same_k = same_k or speed
            reference = reference or speed
            print(
                f"| {k} | {label} | {speed:.0f} ({speed / same_k:.2f}, {speed / reference:.2f}) "
                f"| {one['staleness mean']:.2f} | {one['max']:.0f} | {one['older %']:.1f} "
                f"| {one['tokens wasted %']:.1f} | {one['trainer idle %']:.0f} | {one['slots idle %']:.0f} "
                f"| {one['length bias %']:+.1f} "
                f"| {one['KS, first quarter']:.3f} | {one['KS']:.3f} |",
                flush=True,
            )


def longest_first(lengths: Lengths, seed: int, *, among: int, noise: float) -> Lengths:
    """Deal the groups of every `among` in falling order of a prediction: the log of the longest one, with noise."""
    dealt: dict[int, list[tuple[int, ...]]] = {}

    def of(ordinal: int) -> tuple[int, ...]:
        block = ordinal // among
        if block not in dealt:
            chance = np.random.default_rng((seed, among, block))
            works = [lengths(block * among + i) for i in range(among)]
            guess = [np.log(max(work)) + noise * chance.normal() for work in works]
            dealt[block] = [works[i] for i in np.argsort(guess)[::-1]]
        return dealt[block][ordinal % among]

    return of


def ideas(tail: str, *, steps: int, seeds: int) -> None:
    """Print what further measures would pay, at the default and at the preset."""

    by_rows = replace(COSTS, decode=lambda replica, rows, _: (0.5 + 0.5 * rows / SLOTS) / SPEEDS[replica])

    def wider(**changes: object) -> dict[str, object]:
        return {"setup": replace(SETUP, **changes)}  # type: ignore[arg-type]

    def measured(k: int, window: int, order: tuple[int, float] | None = None, **options: object) -> tuple[float, float]:
        found = []
        for seed in range(seeds):
            lengths = lengths_of(tail, seed)
            if order is not None:
                lengths = longest_first(lengths, seed, among=order[0], noise=order[1])
            one = run("oldest_first", lengths, seed=seed, steps=steps, k=k, window=window, **options)  # type: ignore[arg-type]
            found.append((len(one.timed) / one.wall_s * 3600, one.outcome.staleness_mean))
        speed, age = np.mean(found, axis=0)
        return float(speed), float(age)

    cases: list[tuple[str, str, dict[str, object]]] = [("as it is", "", {})]
    for among in (GROUPS, 3 * GROUPS, 10 * GROUPS):
        for noise, whose in ((0.0, "an oracle"), (0.5, "noise 0.5"), (1.5, "noise 1.5")):
            cases.append((f"longest first among {among}, {whose}", "as it is", {"order": (among, noise)}))
    cases += [
        ("twice the slots", "as it is", wider(slots=2 * SLOTS)),
        ("four times the slots", "as it is", wider(slots=4 * SLOTS)),
        ("between batches", "as it is", wider(weight_update="between_batches")),
        ("segments of 64", "between batches", wider(weight_update="between_batches", segment_tokens=64)),
        ("rows take half of a full step", "", {"costs": by_rows}),
        ("half the slots", "rows take half of a full step", {"costs": by_rows, **wider(slots=SLOTS // 2)}),
    ]
    print(f"\n### What more would pay, {tail} tail: steps/h, against which row, mean staleness\n")
    dials = [(DEFAULT_K, 1), (K, PASSING * GROUPS + 1)]
    heads = [f"k = {k}, W = {window}" for k, window in dials]
    print("| measure | against | " + " | ".join(heads) + " |\n|---|---|---:|---:|")
    speeds: dict[tuple[str, int], float] = {}
    for label, against, options in cases:
        cells = []
        for k, window in dials:
            speed, age = measured(k, window, **options)  # type: ignore[arg-type]
            speeds[label, k] = speed
            gain = f"{speed / speeds[against, k] - 1:+.0%}, " if against else ""
            cells.append(f"{speed:.0f} ({gain}{age:.2f})")
        print(f"| {label} | {against} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tails", nargs="+", choices=TAILS, default=list(TAILS))
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ideas", action="store_true")
    options = parser.parse_args()
    for tail in options.tails:
        if options.ideas:
            ideas(tail, steps=options.steps, seeds=options.seeds)
        else:
            table(tail, options.max_staleness, steps=options.steps, seeds=options.seeds)


if __name__ == "__main__":
    main()
