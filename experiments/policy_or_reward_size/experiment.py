"""Which model's size buys robustness to staleness: the policy's or the reward model's (README.md beside this file)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from experiments.comparison import is_as_great
from experiments.figures import COLOURS, MARKERS, panels, svg
from experiments.lab import Lab
from experiments.policy_or_reward_size.sizes import comparable, held_out_loss, sft_parameters, tuned_by_size
from experiments.rlhf import (
    SEEDS,
    SIZES,
    USUAL,
    Cell,
    Pipeline,
    Run,
    Tuned,
    all_of,
    cell_of,
    drift_axes,
    is_greater_by_seed,
    mean_by_seed,
    reward_accuracy,
    share,
    shares_kept,
)
from experiments.section import Section, Verdict, markdown_table, spread
from experiments.staleness_by_loss.experiment import AS_TUNED, MOST_ESS, as_tuned, told_of_tuning
from experiments.staleness_by_loss.tuning import DRIFT, FAR, ROUNDS, WINDOW, Trial

LOSS = "online_dpo"
KEPT = Path(__file__).with_name("outcomes.jsonl")
ON_POLICY = 1
SMALL, LARGE = "S", "L"
EQUAL_LOSS = 0.05
"""Held-out losses of SFT policies, nats per token, at most this far apart are equal."""
AS_GOOD = 0.05
"""Win rates at most this much lower are as good."""

Models = tuple[str, str]
"""Sizes of policy and reward model."""
Key = tuple[Models, int]
POLICIES: tuple[Models, ...] = tuple((size, USUAL) for size in SIZES)
REWARD_MODELS: tuple[Models, ...] = tuple((USUAL, size) for size in SIZES)


@dataclass(frozen=True)
class Plan:
    """What is run: every size of either model beside the usual one of the other, at every N, on every seed.

    `rounds`: of tuning, at most. `kept`: the file of what runs have come to.
    """

    pipeline: Pipeline = field(default_factory=Pipeline)
    seeds: Sequence[int] = SEEDS
    minibatches: Sequence[int] = (ON_POLICY, FAR, 64)
    rounds: int = ROUNDS
    kept: Path | None = KEPT

    def cells(self) -> Iterator[Key]:
        for models in dict.fromkeys([*POLICIES, *REWARD_MODELS]):
            yield from ((models, num) for num in self.minibatches)


@dataclass(frozen=True)
class Found:
    """What the runs came to. `accuracies` are those of the reward models on held-out pairs, by size and seed.

    `ess` are effective sample sizes of the ratios, shares, by cell and seed; `losses` those of the SFT policies on
    held-out demonstrations, nats per token; `tuned` is what was found for RL of each size of the policy.
    """

    cells: Mapping[Key, Cell]
    parameters: Mapping[str, int]
    accuracies: Mapping[str, Sequence[float]]
    ess: Mapping[Key, Sequence[float]]
    losses: Mapping[str, float]
    tuned: Mapping[str, Trial]

    @property
    def minibatches(self) -> list[int]:
        return sorted({num for _, num in self.cells})

    @property
    def apart(self) -> float:
        """How far `losses` lie apart."""
        return max(self.losses.values()) - min(self.losses.values())

    def kept(self, models: Models) -> list[float] | None:
        """By seed, the share of the gain at N = 1 that is kept, mean over all larger N. None as in `shares_kept`."""
        on_policy = self.cells[models, ON_POLICY]
        shares = [shares_kept(self.cells[models, num], on_policy) for num in self.minibatches if num > ON_POLICY]
        known = [one for one in shares if one is not None]
        return mean_by_seed(known) if len(known) == len(shares) else None

    def grown(self, smaller: Models, larger: Models) -> list[float] | None:
        """By seed, how much more of its gain the larger one keeps."""
        less, more = self.kept(smaller), self.kept(larger)
        return None if less is None or more is None else [b - a for a, b in zip(less, more, strict=True)]


def runs_of(plan: Plan, tuned: Mapping[str, Tuned]) -> dict[Key, list[Run]]:
    """The RL runs of each cell, by seed."""
    return {
        ((policy, judge), num): [Run(LOSS, num, seed, policy, judge, tuned[policy]) for seed in plan.seeds]
        for (policy, judge), num in plan.cells()
    }


def read(lab: Lab, plan: Plan, tuned: Mapping[str, Trial]) -> Found:
    """From the runs, which are made."""
    wanted = runs_of(plan, {size: trial.tuned for size, trial in tuned.items()})
    outcomes = plan.pipeline.outcomes(lab, [run for some in wanted.values() for run in some], plan.kept)
    found = {key: [outcomes[run] for run in some] for key, some in wanted.items()}
    policies = {size: lab.place(plan.pipeline.sft(lab, size)) for size in SIZES}
    judges = {size: [lab.place(plan.pipeline.judge(lab, seed, size)) for seed in plan.seeds] for size in SIZES}
    return Found(
        cells={key: cell_of(some) for key, some in found.items()},
        parameters={size: sft_parameters(run) for size, run in policies.items()},
        accuracies={size: [reward_accuracy(run) for run in runs] for size, runs in judges.items()},
        ess={key: [one.ess for one in some] for key, some in found.items()},
        losses={size: held_out_loss(run) for size, run in policies.items()},
        tuned=tuned,
    )


# The claims, each by the rule that README.md states


def verdicts(found: Found) -> list[Verdict]:
    return [policy_size_helps(found), reward_size_does_not(found), reward_size_saves_drift(found)]


def has_something_to_bear(found: Found, several: Sequence[Models]) -> bool:
    """Whether all are as far off-policy at FAR as they were to be, or farther."""
    return all(fmean(found.ess[models, FAR]) <= MOST_ESS for models in several)


def judges_rise(found: Found) -> bool | None:
    """Whether a larger reward model is right more often, beyond the seeds' noise, from size to size."""
    several = [found.accuracies[size] for size in SIZES]
    return all_of(is_greater_by_seed(more, less) for less, more in pairwise(several))


def policy_size_helps(found: Found) -> Verdict:
    grown = found.grown((SMALL, USUAL), (LARGE, USUAL))
    is_known = grown is not None and found.apart <= EQUAL_LOSS and has_something_to_bear(found, POLICIES)
    return Verdict(
        "A larger policy is more robust to staleness",
        "A, Fig. 5",
        is_greater_by_seed(grown, [0.0] * len(grown)) if is_known and grown is not None else None,
        "share of the gain kept: " + ", ".join(f"{one[0]} {share(found.kept(one))}" for one in POLICIES),
    )


def reward_size_does_not(found: Found) -> Verdict:
    """No where it helps; yes where it helps less than the policy's size does. None unless larger ones are better."""
    by_policy = found.grown((SMALL, USUAL), (LARGE, USUAL))
    by_reward = found.grown((USUAL, SMALL), (USUAL, LARGE))
    holds = None
    bears = has_something_to_bear(found, [*POLICIES, *REWARD_MODELS])
    if by_policy is not None and by_reward is not None and bears and judges_rise(found):
        helps = is_greater_by_seed(by_reward, [0.0] * len(by_reward))
        helps_less = found.apart <= EQUAL_LOSS and is_greater_by_seed(by_policy, by_reward)
        holds = False if helps else helps_less or None
    return Verdict(
        "A larger reward model is not more robust",
        "A, Fig. 5",
        holds,
        "share of the gain kept: " + ", ".join(f"{one[1]} {share(found.kept(one))}" for one in REWARD_MODELS),
    )


def reward_size_saves_drift(found: Found) -> Verdict:
    small, large = (found.cells[(USUAL, size), ON_POLICY] for size in (SMALL, LARGE))
    kl = {size: [one.kl for one in cell.ended] for size, cell in ((SMALL, small), (LARGE, large))}
    rates = {SMALL: small.win_rates(), LARGE: large.win_rates()}
    is_as_good = is_as_great(rates[LARGE], rates[SMALL], AS_GOOD, paired=True)
    holds = all_of([is_greater_by_seed(kl[SMALL], kl[LARGE]), is_as_good]) if judges_rise(found) else None
    told = ", ".join(f"{size}: {spread(rates[size], 2)} at {spread(kl[size], 2)} nats" for size in (SMALL, LARGE))
    return Verdict("A larger reward model wins as often at less drift (N = 1)", "A, Fig. 5", holds, told)


# What is shown


def tables(found: Found) -> dict[str, str]:
    def rows(what: str) -> Iterator[list[str]]:
        for models in dict.fromkeys([*POLICIES, *REWARD_MODELS]):
            cells = (found.cells[models, num] for num in found.minibatches)
            yield [*models, *(spread([getattr(one, what) for one in cell.ended], 2) for cell in cells)]

    def kept() -> Iterator[list[str]]:
        for models in dict.fromkeys([*POLICIES, *REWARD_MODELS]):
            cell = found.cells[models, ON_POLICY]
            began = spread([one.win_rate for one in cell.began], 2)
            yield [*models, began, spread(cell.gains(), 2), share(found.kept(models))]

    head = ["policy", "reward model", *(f"N = {num}" for num in found.minibatches)]
    sizes = (
        [
            size,
            f"{found.parameters[size]:,}",
            f"{found.losses[size]:.3f}",
            spread(found.accuracies[size], 2),
        ]
        for size in SIZES
    )
    as_found = ([size, *as_tuned(LOSS, found.tuned[size])] for size in SIZES)
    ess = (
        [*models, *(spread(found.ess[models, num], 2) for num in found.minibatches)]
        for models in dict.fromkeys([*POLICIES, *REWARD_MODELS])
    )
    larger = " and ".join(str(num) for num in found.minibatches if num > ON_POLICY)
    return {
        "Gold win rate against the references": markdown_table(head, rows("win_rate"), left=2),
        "Drift: KL from the SFT policy in nats per completion": markdown_table(head, rows("kl"), left=2),
        f"The share kept of the gain in win rate at N = 1, mean over N = {larger}": markdown_table(
            ["policy", "reward model", "RL begins at", "gain at N = 1", "share kept"], kept(), left=2
        ),
        "How far off-policy: effective sample size of the ratios, mean over all steps": markdown_table(
            head, ess, left=2
        ),
        "RL of each size of the policy as it was tuned": markdown_table(["policy", *AS_TUNED], as_found),
        "The sizes; the last column is the reward model's": markdown_table(
            ["size", "parameters", "SFT, held-out loss", "right on held-out pairs"], sizes
        ),
    }


def figure(found: Found) -> str:
    """Win rate against KL: sizes of the policy, and of the reward model, each a line through N."""
    titles = {"Policy (reward model M)": POLICIES, "Reward model (policy M)": REWARD_MODELS}
    drawn, axes = panels(list(titles))
    for axis, several, place in zip(axes, titles.values(), (0, 1), strict=True):
        for models, colour in zip(several, COLOURS, strict=False):
            cells = {num: found.cells[models, num] for num in found.minibatches}
            kl = {num: [one.kl for one in cell.ended] for num, cell in cells.items()}
            means = [(fmean(kl[num]), fmean(cell.win_rates())) for num, cell in cells.items()]
            axis.plot(*zip(*means, strict=True), "-", color=colour, linewidth=1.0, alpha=0.5)
            for (num, cell), mean, marker in zip(cells.items(), means, MARKERS, strict=False):
                axis.plot(kl[num], cell.win_rates(), marker, color=colour, markersize=3, alpha=0.4, markeredgewidth=0)
                axis.plot(*mean, marker, color=colour, markersize=7, label=f"{models[place]}, N = {num}")
        axis.set(ylabel="gold win rate")
        axis.legend(fontsize=6, ncols=3, loc="lower right")
    drift_axes(axes, max(one.kl for cell in found.cells.values() for one in cell.ended))
    return svg(drawn)


def section(lab: Lab, plan: Plan | None = None) -> Section:
    plan = plan or Plan()
    plan = replace(plan, pipeline=comparable(lab, plan.pipeline))
    tuned = tuned_by_size(lab, plan.pipeline, LOSS, rounds=plan.rounds, kept=plan.kept)
    plan.pipeline.make(lab, plan.seeds, [], policies=list(SIZES), reward_models=list(SIZES))
    found = read(lab, plan, tuned)
    return Section(
        title="Policy size or reward-model size",
        question="Does a larger policy tolerate more staleness, and does a larger reward model?",
        setup=f"Online DPO on {plan.pipeline.told}, on {len(plan.seeds)} seeds. Each of the two models has three "
        "sizes, beside the middle size of the other. Each size has rates of its own in SFT, reward model and RL; "
        "policies are trained to held-out losses as near each other as the tried updates come. A reward model of any "
        "size begins as the SFT policy of that size and learns from the same pairs. Rate and penalty of RL are tuned "
        "for each size of the policy by the rule of the section on losses, in "
        f"{plan.rounds} rounds at most: an effective sample size of {WINDOW[0]:g} to {WINDOW[1]:g} at N = {FAR}, a "
        f"drift near {DRIFT:g} nats at N = {ON_POLICY}, neither run collapsed.",
        tables=tables(found),
        figures={"Win rate against KL by size and N": figure(found)},
        verdicts=verdicts(found),
        cost="two to three hours on two cores, by the rounds that tuning takes",
        notes=[
            told_of_tuning({f"policy {size}": trial for size, trial in tuned.items()}),
            f"Held-out losses of the SFT policies lie up to {found.apart:.3f} nats per token apart.",
        ],
    )
