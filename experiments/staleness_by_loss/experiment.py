"""How much staleness each loss bears: win rate and drift of `tldr_mini` by loss and N (README.md beside this file)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import log2
from pathlib import Path
from statistics import fmean, linear_regression

from experiments.comparison import LEAST_GAIN
from experiments.figures import panels, svg
from experiments.lab import Lab
from experiments.rlhf import (
    KL_COEF,
    LOSSES,
    LR,
    NAMES,
    USUAL,
    Cell,
    Ended,
    Outcome,
    Pipeline,
    Run,
    Step,
    Tuned,
    all_of,
    cell_of,
    drift_axes,
    is_greater_by_seed,
    is_near_by_seed,
    shades_of,
    share,
    shares_kept,
)
from experiments.section import Section, Verdict, markdown_table, spread
from experiments.staleness_by_loss.tuning import (
    DRIFT,
    ESS,
    FAR,
    ON_POLICY,
    ROUNDS,
    SEED,
    WINDOW,
    Trial,
    tune,
)

KEPT = Path(__file__).with_name("outcomes.jsonl")
"""What runs have come to, one line each."""

SEEDS = tuple(range(10))
FARTHEST = 64
ONE_GRADIENT = ("copg", "rloo")
"""The second is run once, at FAR with the first seed, to see that it ends where the first does."""
ALIKE = 0.05
"""Win rates at most this far apart are alike."""
AT_ZERO = 0.05
ON_FRONTIER = 0.03
"""Gold scores at most this far from those of N = 1 at the same KL are on its frontier."""
NEIGHBOURS = 16
"""Steps of N = 1 that a step of another N is compared with."""
MOST_ESS = 0.6
"""A loss that has a larger effective sample size at FAR has too little to bear to be called the better one there."""
MATCHED = 1.0
"""Nats at which gold scores are compared: every loss comes by there."""

Key = tuple[str, int]
"""A loss and its N."""
Point = tuple[float, float]
"""KL and gold score."""


@dataclass(frozen=True)
class Plan:
    """What is run on every seed: `finely` at every N, the other losses on-policy, at FAR and at FARTHEST.

    `rounds`: of tuning, at most. `kept`: the file of what runs have come to.
    """

    pipeline: Pipeline = field(default_factory=Pipeline)
    seeds: Sequence[int] = SEEDS
    losses: Sequence[str] = ("ppo", "proximal_rloo", "copg", "online_dpo", "best_of_2", "grpo", "aipo")
    finely: str = "ppo"
    minibatches: Sequence[int] = (ON_POLICY, 2, 4, 8, FAR, FARTHEST)
    rounds: int = ROUNDS
    kept: Path | None = KEPT

    def cells(self) -> Iterator[Key]:
        for loss in self.losses:
            of_loss = self.minibatches if loss == self.finely else (ON_POLICY, FAR, FARTHEST)
            yield from ((loss, num) for num in of_loss)


@dataclass(frozen=True)
class Found:
    """What all runs came to.

    `ess` are effective sample sizes of the ratios, shares, by seed the mean over all steps; `steps` are those of each
    cell and seed. `oldest` is the age, in updates, of the stalest minibatch at each N. `twins` are the ends of the two
    runs with ONE_GRADIENT.
    """

    cells: Mapping[Key, Cell]
    ess: Mapping[Key, Sequence[float]]
    steps: Mapping[Key, Sequence[Sequence[Step]]]
    oldest: Mapping[int, int]
    twins: tuple[Ended, Ended]
    tuned: Mapping[str, Trial]

    @property
    def losses(self) -> list[str]:
        return list(dict.fromkeys(loss for loss, _ in self.cells))

    @property
    def minibatches(self) -> list[int]:
        return sorted({num for _, num in self.cells})

    def of(self, loss: str) -> dict[int, Cell]:
        """By N."""
        return {num: cell for (name, num), cell in self.cells.items() if name == loss}

    def paths(self, loss: str, num: int) -> list[list[Point]]:
        """By seed, from the policy that RL began with, over the steps, to the last one.

        Points between are of about equally many completions: those of FAR updates, one step or several.
        """
        cell = self.cells[loss, num]
        return [
            [(began.kl, began.gold), *averaged(steps, max(1, FAR // num)), (last.kl, last.gold)]
            for began, steps, last in zip(cell.began, self.steps[loss, num], cell.ended, strict=True)
        ]

    def golds(self, loss: str, num: int) -> list[float] | None:
        """By seed, the gold score where the drift was MATCHED; None where a seed never drifted so far."""
        found = [gold_at(path, MATCHED) for path in self.paths(loss, num)]
        known = [gold for gold in found if gold is not None]
        return known if len(known) == len(found) else None


def runs_of(plan: Plan, tuned: Mapping[str, Tuned]) -> dict[Key, list[Run]]:
    """The RL runs of each cell, by seed."""

    def runs(loss: str, num: int, seeds: Sequence[int], of: str) -> list[Run]:
        return [Run(loss, num, seed, tuned=tuned[of], measured=True) for seed in seeds]

    first, second = ONE_GRADIENT
    made = {(loss, num): runs(loss, num, plan.seeds, loss) for loss, num in plan.cells()}
    return made | {(second, FAR): runs(second, FAR, plan.seeds[:1], first)}


def read(lab: Lab, plan: Plan, tuned: Mapping[str, Trial]) -> Found:
    """From the runs, which are made seed by seed."""
    wanted = runs_of(plan, {loss: trial.tuned for loss, trial in tuned.items()})
    in_order = sorted((run for some in wanted.values() for run in some), key=lambda run: run.seed)
    outcomes = plan.pipeline.outcomes(lab, in_order, plan.kept)
    found: dict[Key, list[Outcome]] = {key: [outcomes[run] for run in some] for key, some in wanted.items()}
    copg, rloo = (found[loss, FAR][0].ended for loss in ONE_GRADIENT)
    del found[ONE_GRADIENT[1], FAR]
    oldest: dict[int, int] = {}
    for (_, num), some in found.items():
        oldest[num] = max([oldest.get(num, 0), *(one.oldest for one in some)])
    return Found(
        cells={key: cell_of(some) for key, some in found.items()},
        ess={key: [one.ess for one in some] for key, some in found.items()},
        steps={key: [one.steps for one in some] for key, some in found.items()},
        oldest=oldest,
        twins=(copg, rloo),
        tuned=tuned,
    )


def points(steps: Sequence[Step]) -> list[Point]:
    return [(one.kl, one.gold) for one in steps]


def averaged(steps: Sequence[Step], size: int) -> list[Point]:
    """Every `size` consecutive steps as one point, the last of which may have fewer: means over all completions."""
    groups = [steps[at : at + size] for at in range(0, len(steps), size)]
    return [(_mean(own, [one.kl for one in own]), _mean(own, [one.gold for one in own])) for own in groups]


def _mean(steps: Sequence[Step], values: Sequence[float]) -> float:
    """The mean over the completions of `steps`, each of which has its step's value."""
    return fmean(values, weights=[one.completions for one in steps])


def gold_at(path: Sequence[Point], kl: float) -> float | None:
    """The gold score where a path first has this KL, between two of its points by a straight line; None if it never."""
    for (before, low), (after, high) in pairwise(path):
        if before <= kl <= after and before < after:
            return low + (high - low) * (kl - before) / (after - before)
    return None


# The claims, each by the rule that README.md states


def verdicts(found: Found) -> list[Verdict]:
    return [
        dpo_most_robust(found),
        *dpo_against(found),
        best_of_2_does_not_keep(found),
        dpo_most_robust_at_equal_drift(found),
        only_dpo_far_off(found),
        ppo_best_on_policy(found),
        first_two_alike(found),
        logarithmic_fall(found),
        one_frontier(found),
        slower_along_it(found),
        copg_at_zero(found),
        proximal_above_copg(found),
    ]


OTHERS = ("ppo", "proximal_rloo", "best_of_2")
"""Those that the source compares with Online DPO."""


def is_better_at_far(found: Found, answer: bool | None, ours: str, theirs: str) -> bool | None:
    """`answer` to whether one loss is better than another at FAR, where the better of them had something to bear.

    One that was less far off-policy and is worse nevertheless says the more; one that is better says nothing.
    """
    if answer is None:
        return None
    return answer if fmean(found.ess[ours if answer else theirs, FAR]) <= MOST_ESS else None


def dpo_most_robust(found: Found) -> Verdict:
    claim = "Online DPO is the most robust: at N = 16 it keeps more of its gain than PPO, Proximal RLOO and best of 2"
    return _dpo_keeps_more(found, OTHERS, claim)


def dpo_against(found: Found) -> list[Verdict]:
    """One by one, those that are left."""
    others = [loss for loss in OTHERS if loss != "best_of_2"]
    return [_dpo_keeps_more(found, (loss,), f"At N = 16 Online DPO keeps more than {NAMES[loss]}") for loss in others]


def best_of_2_does_not_keep(found: Found) -> Verdict:
    claim = "Two completions per prompt are not the cause: best of 2 keeps less than Online DPO"
    return _dpo_keeps_more(found, ("best_of_2",), claim)


def _dpo_keeps_more(found: Found, others: Sequence[str], claim: str) -> Verdict:
    def kept(loss: str) -> list[float] | None:
        return shares_kept(found.cells[loss, FAR], found.cells[loss, ON_POLICY])

    ours, theirs = kept("online_dpo"), {loss: kept(loss) for loss in others}
    told = ", ".join(f"{NAMES[loss]} {share(values)}" for loss, values in {"online_dpo": ours, **theirs}.items())
    compared = (
        None
        if ours is None or values is None
        else is_better_at_far(found, is_greater_by_seed(ours, values), "online_dpo", loss)
        for loss, values in theirs.items()
    )
    return Verdict(claim, "A, Fig. 4", all_of(compared), f"kept: {told}")


def dpo_most_robust_at_equal_drift(found: Found) -> Verdict:
    """By what gold loses from N = 1 to FAR where the drift is MATCHED."""
    lost: dict[str, list[float] | None] = {}
    for loss in ("online_dpo", *OTHERS):
        near, far = found.golds(loss, ON_POLICY), found.golds(loss, FAR)
        lost[loss] = None if near is None or far is None else [a - b for a, b in zip(near, far, strict=True)]
    ours = lost["online_dpo"]
    compared = [
        None
        if ours is None or values is None
        else is_better_at_far(found, is_greater_by_seed(values, ours), "online_dpo", loss)
        for loss, values in lost.items()
        if loss in OTHERS
    ]
    told = ", ".join(
        f"{NAMES[loss]} {'not there' if values is None else spread(values)}" for loss, values in lost.items()
    )
    return Verdict(
        f"At a drift of {MATCHED:g} nat Online DPO loses less gold from N = 1 to {FAR} than PPO, Proximal RLOO and "
        "best of 2",
        "A, Fig. 4",
        all_of(compared),
        f"lost: {told}",
    )


def only_dpo_far_off(found: Found) -> Verdict:
    gains = {loss: found.cells[loss, FARTHEST].gains() for loss in ("online_dpo", "ppo")}
    dpo, ppo = (learns(values) for values in gains.values())
    told = ", ".join(f"{NAMES[loss]} {spread(values, 2)}" for loss, values in gains.items())
    return Verdict(
        "At N = 64 Online DPO still learns, PPO does not",
        "A, 3.3",
        all_of([dpo, None if ppo is None else not ppo]),
        f"gain in win rate: {told}",
    )


def learns(gains: Sequence[float]) -> bool | None:
    """Yes for a mean gain of LEAST_GAIN or more that every seed shows, no for less."""
    return False if fmean(gains) < LEAST_GAIN else is_greater_by_seed(gains, [0.0] * len(gains))


def ppo_best_on_policy(found: Found) -> Verdict:
    """Against the losses that the source compares."""
    others = ("proximal_rloo", "online_dpo", "best_of_2")
    win_rates = {loss: found.cells[loss, ON_POLICY].win_rates() for loss in ("ppo", *others)}
    return Verdict(
        "PPO is best at N = 1",
        "A, 3.3",
        all_of(is_greater_by_seed(win_rates["ppo"], win_rates[loss]) for loss in others),
        ", ".join(f"{NAMES[loss]} {spread(values, 2)}" for loss, values in win_rates.items()),
    )


def first_two_alike(found: Found) -> Verdict:
    one, two = (found.cells["ppo", num].win_rates() for num in (1, 2))
    return Verdict(
        "PPO has the same win rate at N = 1 and 2",
        "A, Fig. 3",
        is_near_by_seed(one, two, ALIKE),
        f"{spread(one, 2)} and {spread(two, 2)}",
    )


def logarithmic_fall(found: Found) -> Verdict:
    win_rates = {num: cell.win_rates() for num, cell in found.of("ppo").items() if num > 1}
    slopes, means = slopes_by_seed(win_rates), [fmean(values) for values in win_rates.values()]
    by_log, by_num = unexplained([log2(num) for num in win_rates], means), unexplained([*map(float, win_rates)], means)
    falls = is_greater_by_seed([0.0] * len(slopes), slopes)
    return Verdict(
        f"From N = {min(win_rates)} on PPO falls with the logarithm of N",
        "A, Fig. 3",
        by_log < by_num if falls else falls,
        f"{spread(slopes)} per doubling; a line over log N leaves {by_log:.0%} of the variance, over N {by_num:.0%}",
    )


def one_frontier(found: Found) -> Verdict:
    own = found.steps["ppo", ON_POLICY]
    above = {
        num: [
            deviation(points(steps), points(frontier))
            for steps, frontier in zip(found.steps["ppo", num], own, strict=True)
        ]
        for num in found.of("ppo")
        if num > ON_POLICY
    }
    known = {num: [one for one in by_seed if one is not None] for num, by_seed in above.items()}
    return Verdict(
        "PPO is on one frontier of win rate and KL for all N",
        "A, Fig. 3",
        all_of(
            is_near_by_seed(values, [0.0] * len(values), ON_FRONTIER) if len(values) == len(above[num]) else None
            for num, values in known.items()
        ),
        "gold score above that of N = 1 at equal KL: "
        + ", ".join(f"{spread(values, 2) or 'none'} at N = {num}" for num, values in known.items()),
    )


def slower_along_it(found: Found) -> Verdict:
    slopes = slopes_by_seed({num: [one.kl for one in cell.ended] for num, cell in found.of("ppo").items()})
    return Verdict(
        "PPO moves less far along its frontier as N grows",
        "A, Fig. 3",
        is_greater_by_seed([0.0] * len(slopes), slopes),
        f"{spread(slopes, 2)} nats of KL per doubling",
    )


def copg_at_zero(found: Found) -> Verdict:
    far = found.cells["copg", FAR].win_rates()
    return Verdict("CoPG is at 0 by N = 16", "A, Fig. 13", fmean(far) <= AT_ZERO, f"win rate {spread(far, 2)}")


def proximal_above_copg(found: Found) -> Verdict:
    proximal, copg = (found.cells[loss, FAR].win_rates() for loss in ("proximal_rloo", "copg"))
    holds = is_greater_by_seed(proximal, copg)
    return Verdict(
        "Proximal RLOO is above CoPG at N = 16",
        "A, Fig. 13",
        is_better_at_far(found, holds, "proximal_rloo", "copg"),
        f"{spread(proximal, 2)} and {spread(copg, 2)}",
    )


def slopes_by_seed(values: Mapping[int, Sequence[float]]) -> list[float]:
    """N -> values by seed; the slope of each seed's values over log2 N."""
    x = [log2(num) for num in values]
    return [linear_regression(x, own).slope for own in zip(*values.values(), strict=True)]


def unexplained(x: Sequence[float], y: Sequence[float]) -> float:
    """Share of the variance of y that the best line over x leaves; 0 where y is constant."""
    line, mean = linear_regression(x, y), fmean(y)
    total = sum((value - mean) ** 2 for value in y)
    left = sum((value - line.slope * at - line.intercept) ** 2 for at, value in zip(x, y, strict=True))
    return left / total if total else 0.0


def deviation(path: Sequence[Point], frontier: Sequence[Point]) -> float | None:
    """How far the points of `path` lie above `frontier`, on average; both are single steps of training.

    A point is compared with the mean score of the NEIGHBOURS steps of the frontier that are nearest in KL. The first
    step, before anything was learned, and steps beyond the frontier's largest KL do not count: None without others.
    """
    largest = max(kl for kl, _ in frontier)
    found = []
    for kl, gold in path[1:]:
        if kl <= largest:
            nearest = sorted(frontier, key=lambda point, at=kl: abs(point[0] - at))[:NEIGHBOURS]
            found.append(gold - fmean(score for _, score in nearest))
    return fmean(found) if found else None


# What is shown


def who_keeps(found: Found, num: int) -> str:
    """Losses that were run at N = `num`, by what they keep there of their gain on-policy."""
    shares = {
        loss: shares_kept(cells[num], cells[ON_POLICY]) for loss in found.losses if num in (cells := found.of(loss))
    }
    known = {loss: values for loss, values in shares.items() if values is not None}
    in_order = sorted(known, key=lambda loss: -fmean(known[loss]))
    return ", ".join(f"{NAMES[loss]} {share(known[loss])}" for loss in in_order) or "nobody gained enough to say"


def tables(found: Found) -> dict[str, str]:
    """Captions and tables, a row per loss and a column per N."""
    columns = found.minibatches
    ages = ", ".join(str(found.oldest[num]) for num in columns)
    began = next(iter(found.cells.values())).began
    start, perplexity = ([getattr(one, what) for one in began] for what in ("win_rate", "perplexity"))

    def table(values: Mapping[Key, Sequence[float]]) -> str:
        head = ["loss", *(f"N = {num}" for num in columns)]
        rows = ([NAMES[loss], *(spread(values.get((loss, num), []), 2) for num in columns)] for loss in found.losses)
        return markdown_table(head, rows)

    def at_the_end(what: str) -> str:
        return table({key: [getattr(one, what) for one in cell.ended] for key, cell in found.cells.items()})

    def kept(loss: str) -> list[str]:
        cells = found.of(loss)
        shares = (share(shares_kept(cells[num], cells[ON_POLICY])) if num in cells else "" for num in columns[1:])
        return [NAMES[loss], spread(cells[ON_POLICY].gains(), 2), *shares]

    matched = {key: golds for key in found.cells if (golds := found.golds(*key)) is not None}
    return {
        "Each loss as it was tuned": markdown_table(
            ["loss", *AS_TUNED], ([NAMES[loss], *as_tuned(loss, found.tuned[loss])] for loss in found.losses)
        ),
        f"Gold win rate against the references. RL begins at {spread(start, 2)}; the stalest minibatch is {ages} "
        "updates old": at_the_end("win_rate"),
        "Drift: KL from the SFT policy in nats per completion": at_the_end("kl"),
        "Drift: the SFT policy's perplexity on the completions, per response token. RL begins at "
        f"{spread(perplexity, 2)}": at_the_end("perplexity"),
        "How far off-policy: effective sample size of the importance ratios, 1 where all are 1; mean over all "
        "steps": table(found.ess),
        f"Gold score where the drift is {MATCHED:g} nat; empty where a seed never drifts so far": table(matched),
        "Gain in win rate at N = 1, and the share of it that is kept": markdown_table(
            ["loss", "gain at N = 1", *(f"kept at N = {num}" for num in columns[1:])], map(kept, found.losses)
        ),
    }


AS_TUNED = ("learning rate", "penalty", f"effective samples at N = {FAR}", f"KL at N = {ON_POLICY}", "within")


def as_tuned(loss: str, trial: Trial) -> tuple[str, str, str, str, str]:
    """A row of AS_TUNED."""
    own, tuned = LOSSES[loss], trial.tuned
    rate = own.get("trainer", {}).get("optimizer", {}).get("lr", LR) * tuned.lr_times
    beta = own["loss"].get("params", {}).get("beta")
    where = " in the loss" * (own.get("kl", {}).get("place") == "loss")
    penalty = f"KL {KL_COEF * tuned.penalty_times:g}{where}" if beta is None else f"beta {beta * tuned.penalty_times:g}"
    return (
        f"{rate:.1e}",
        penalty,
        f"{trial.far.ess:.2f}",
        f"{trial.on_policy.kl:.2f}",
        "yes" if trial.is_within else "**no**",
    )


def told_of_tuning(tuned: Mapping[str, Trial]) -> str:
    """A note on AS_TUNED: what *within* is, and which of these, by name, are not."""
    least, most = WINDOW
    outside = [name for name, trial in tuned.items() if not trial.is_within]
    return (
        f"Tuning, on seed {SEED}: *within* is an effective sample size of {least:g} to {most:g} where neither run has "
        f"collapsed. Not within: {', '.join(outside) or 'none'}."
    )


def figure(found: Found) -> str:
    """Win rate against KL, a panel per loss; in the last one PPO's gold score against KL as it trains."""
    shades = shades_of(found.minibatches)
    second = {ONE_GRADIENT[0]: f" = {NAMES[ONE_GRADIENT[1]]}"}
    drawn, axes = panels([*(NAMES[loss] + second.get(loss, "") for loss in found.losses), "PPO, step by step"], rows=2)
    for loss, axis in zip(found.losses, axes, strict=False):
        cells = found.of(loss)
        began = next(iter(cells.values())).began
        axis.plot(0.0, fmean(one.win_rate for one in began), "*", color="#4a4a4a", markersize=9, label="RL begins")
        for num, cell in cells.items():
            kl, win_rates = [one.kl for one in cell.ended], cell.win_rates()
            axis.plot(kl, win_rates, "o", color=shades[num], markersize=3, alpha=0.6, markeredgewidth=0)
            axis.plot(fmean(kl), fmean(win_rates), "o", color=shades[num], markersize=7, label=f"N = {num}")
        axis.set(ylabel="gold win rate")
    # Where there is room: the last panel has the same colours, and nothing so low.
    handles, labels = axes[found.losses.index("ppo")].get_legend_handles_labels()
    axes[-1].legend(handles, labels, fontsize=6, ncols=2, loc="lower left")
    of_ppo = {num: [step for steps in found.steps["ppo", num] for step in steps] for num in found.of("ppo")}
    for num, steps in of_ppo.items():
        kl, golds = [one.kl for one in steps], [one.gold for one in steps]
        axes[-1].plot(kl, golds, "o", color=shades[num], markersize=2.5, alpha=0.5, markeredgewidth=0)
    axes[-1].set(ylabel="mean gold score of a step")
    seen = [one.kl for cell in found.cells.values() for one in cell.ended]
    drift_axes(axes, max(seen + [one.kl for steps in of_ppo.values() for one in steps]))
    return svg(drawn)


def section(lab: Lab, plan: Plan | None = None) -> Section:
    plan = plan or Plan()
    trials = tune(lab, plan.pipeline, [(loss, USUAL) for loss in plan.losses], rounds=plan.rounds, kept=plan.kept)
    tuned = {loss: trial for (loss, _), trial in trials.items()}
    found = read(lab, plan, tuned)
    copg, rloo = found.twins
    same = "ends as CoPG's does, bit for bit" if copg == rloo else f"ends at {rloo}, CoPG's at {copg}"
    return Section(
        title="How much staleness each loss bears",
        question="A policy samples N minibatches and is then trained once on each of them. How do win rate and drift "
        "change with N, and for which loss least, if all are equally far off-policy and drift alike?",
        setup=f"{plan.pipeline.told}, on {len(plan.seeds)} seeds. The N minibatches are those of one step at "
        "staleness 0, as in the source. Each loss has a learning rate and a penalty of its own, tuned on seed "
        f"{SEED} in {plan.rounds} rounds at most. A round takes the penalty with which N = {ON_POLICY} ends nearest "
        f"{DRIFT:g} nats of KL. It is the last if the effective sample size at N = {FAR} then lies in {WINDOW[0]:g} to "
        f"{WINDOW[1]:g} and neither run has collapsed; else the rate is corrected towards {ESS:g}. Best of 2, "
        "which has no penalty in the source, has one in its loss. The KL of a step is over all completions that were "
        "sampled, also of losses that train on some of them.",
        tables=tables(found),
        figures={"Win rate against KL by loss and N": figure(found)},
        verdicts=verdicts(found),
        cost="four hours on two cores, by the rounds that tuning takes",
        notes=[
            told_of_tuning({NAMES[loss]: trial for loss, trial in tuned.items()}),
            f"At N = {FAR} the kept shares of the gain are, largest first: {who_keeps(found, FAR)}.",
            f"At N = {FARTHEST}: {who_keeps(found, FARTHEST)}.",
            f"CoPG was tuned as all losses were, to a rate at which N = {FAR} does not collapse, if there was one: a "
            "*no* on its being at 0 says that it can bear that, not that it does at any rate.",
            f"RLOO and CoPG have the same gradient: RLOO's run at N = {FAR} with the first seed {same}.",
        ],
    )
