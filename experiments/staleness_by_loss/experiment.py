"""How much staleness each loss bears: win rate and drift of `tldr_mini` by loss and N (README.md beside this file)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from pathlib import Path
from statistics import fmean, linear_regression

from experiments.figures import panels, svg
from experiments.lab import Lab, Spec, metrics
from experiments.rlhf import (
    LEAST_GAIN,
    NAMES,
    SEEDS,
    USUAL,
    Cell,
    Ended,
    Pipeline,
    all_of,
    cell_of,
    drift_axes,
    ended,
    is_greater_by_seed,
    is_near_by_seed,
    oldest_update,
    read_evaluation,
    shades_of,
    share,
    shares_kept,
    trodden,
)
from experiments.section import Section, Verdict, markdown_table, spread

ON_POLICY, FAR, FARTHEST = 1, 16, 64
ONE_GRADIENT = ("copg", "rloo")
"""The second is run once, at FAR with the first seed, to see that it ends where the first does."""
ALIKE = 0.05
"""Win rates at most this far apart are alike."""
AT_ZERO = 0.05
ON_FRONTIER = 0.03
"""Gold scores at most this far from those of N = 1 at the same KL are on its frontier."""
NEIGHBOURS = 16
"""Steps of N = 1 that a step of another N is compared with."""
LARGER_LR = 12.0
"""Over each loss's own learning rate: with larger updates the same N is further off-policy."""


@dataclass(frozen=True)
class Plan:
    """What is run: every loss at every N, some at FARTHEST as well, on every seed.

    At the larger learning rate `minibatches_at_larger_lr` of `losses_at_larger_lr`; the others, which have no KL
    in the reward, on-policy alone.
    """

    pipeline: Pipeline = field(default_factory=Pipeline)
    seeds: Sequence[int] = SEEDS
    losses: Sequence[str] = ("ppo", "proximal_rloo", "copg", "online_dpo", "best_of_2", "grpo", "aipo")
    minibatches: Sequence[int] = (ON_POLICY, 2, 4, 8, FAR)
    losses_at_farthest: Sequence[str] = ("ppo", "online_dpo")
    losses_at_larger_lr: Sequence[str] = ("ppo", "proximal_rloo", "copg", "grpo", "aipo")
    minibatches_at_larger_lr: Sequence[int] = (ON_POLICY, 4, FAR)

    def cells(self) -> Iterator[Key]:
        for loss in self.losses:
            farthest = [FARTHEST] if loss in self.losses_at_farthest else []
            yield from ((loss, num) for num in [*self.minibatches, *farthest])

    def cells_at_larger_lr(self) -> Iterator[Key]:
        for loss in self.losses:
            if loss in self.losses_at_larger_lr:
                farthest = [FARTHEST] if loss in self.losses_at_farthest else []
                yield from ((loss, num) for num in [*self.minibatches_at_larger_lr, *farthest])
            else:
                yield loss, ON_POLICY


Key = tuple[str, int]
"""A loss and its N."""


@dataclass(frozen=True)
class AtOneRate:
    """What the runs at one learning rate came to.

    `ess` are effective sample sizes of the ratios, shares, by seed the mean over all steps.
    """

    cells: Mapping[Key, Cell]
    ess: Mapping[Key, Sequence[float]]

    @property
    def losses(self) -> list[str]:
        return list(dict.fromkeys(loss for loss, _ in self.cells))

    @property
    def minibatches(self) -> list[int]:
        return sorted({num for _, num in self.cells})

    def of(self, loss: str) -> dict[int, Cell]:
        """By N."""
        return {num: cell for (name, num), cell in self.cells.items() if name == loss}


@dataclass(frozen=True)
class Found(AtOneRate):
    """What all runs came to, those at the usual learning rate first.

    `paths` are PPO's, by N and seed: (KL, gold score) of each step. `oldest` is the age, in updates, of the stalest
    minibatch at each N. `twins` are the ends of the two runs with ONE_GRADIENT.
    """

    paths: Mapping[int, Sequence[Sequence[tuple[float, float]]]]
    oldest: Mapping[int, int]
    twins: tuple[Ended, Ended]
    at_larger_lr: AtOneRate


def specs(lab: Lab, plan: Plan) -> dict[Key, list[Spec]]:
    """The RL runs of each cell, by seed."""
    made = {key: [plan.pipeline.rl(lab, *key, seed) for seed in plan.seeds] for key in plan.cells()}
    return made | {(ONE_GRADIENT[1], FAR): [plan.pipeline.rl(lab, ONE_GRADIENT[1], FAR, plan.seeds[0])]}


def specs_at_larger_lr(lab: Lab, plan: Plan) -> dict[Key, list[Spec]]:
    return {
        key: [plan.pipeline.rl(lab, *key, seed, lr_times=LARGER_LR) for seed in plan.seeds]
        for key in plan.cells_at_larger_lr()
    }


def read(lab: Lab, made: Mapping[Key, Sequence[Spec]], at_larger_lr: Mapping[Key, Sequence[Spec]]) -> Found:
    folders = {key: [lab.place(spec) for spec in some] for key, some in made.items()}
    copg, rloo = (ended(read_evaluation(folders[loss, FAR][0])) for loss in ONE_GRADIENT)
    del folders[ONE_GRADIENT[1], FAR]
    oldest: dict[int, int] = {}
    for (_, num), runs in folders.items():
        oldest[num] = max([oldest.get(num, 0), *map(oldest_update, runs)])
    return Found(
        *cells_and_ess(folders),
        paths={num: [trodden(run) for run in runs] for (loss, num), runs in folders.items() if loss == "ppo"},
        oldest=oldest,
        twins=(copg, rloo),
        at_larger_lr=AtOneRate(
            *cells_and_ess({key: [lab.place(spec) for spec in some] for key, some in at_larger_lr.items()})
        ),
    )


def cells_and_ess(folders: Mapping[Key, Sequence[Path]]) -> tuple[dict[Key, Cell], dict[Key, list[float]]]:
    cells = {key: cell_of(runs) for key, runs in folders.items()}
    return cells, {key: [effective_share(run) for run in runs] for key, runs in folders.items()}


def effective_share(run: Path) -> float:
    """Mean over a run's steps."""
    return fmean(line["ess"] for line in metrics(run) if "ess" in line)


# The claims, each by the rule that README.md states


def verdicts(found: Found) -> list[Verdict]:
    return [
        dpo_most_robust(found),
        best_of_2_does_not_keep(found),
        only_dpo_far_off(found),
        ppo_best_on_policy(found),
        first_two_alike(found),
        logarithmic_fall(found),
        one_frontier(found),
        slower_along_it(found),
        copg_at_zero(found),
        proximal_above_copg(found),
        *(
            replace(verdict, claim=f"At {LARGER_LR:g} times the learning rate: {verdict.claim}")
            for verdict in (
                ppo_best_on_policy(found.at_larger_lr),
                logarithmic_fall(found.at_larger_lr),
                slower_along_it(found.at_larger_lr),
                copg_at_zero(found.at_larger_lr),
                proximal_above_copg(found.at_larger_lr),
            )
        ),
    ]


def dpo_most_robust(found: Found) -> Verdict:
    claim = "Online DPO is the most robust: at N = 16 it keeps more of its gain than PPO, Proximal RLOO and best of 2"
    return _dpo_keeps_more(found, ("ppo", "proximal_rloo", "best_of_2"), claim)


def best_of_2_does_not_keep(found: Found) -> Verdict:
    claim = "Two completions per prompt are not the cause: best of 2 keeps less than Online DPO"
    return _dpo_keeps_more(found, ("best_of_2",), claim)


def _dpo_keeps_more(found: Found, others: Sequence[str], claim: str) -> Verdict:
    def kept(loss: str) -> list[float] | None:
        return shares_kept(found.cells[loss, FAR], found.cells[loss, ON_POLICY])

    ours, theirs = kept("online_dpo"), {loss: kept(loss) for loss in others}
    told = ", ".join(f"{NAMES[loss]} {share(values)}" for loss, values in {"online_dpo": ours, **theirs}.items())
    compared = (
        None if ours is None or values is None else is_greater_by_seed(ours, values) for values in theirs.values()
    )
    return Verdict(claim, "A, Fig. 4", all_of(compared), f"kept: {told}")


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


def ppo_best_on_policy(found: AtOneRate) -> Verdict:
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


def logarithmic_fall(found: AtOneRate) -> Verdict:
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
    above = {
        num: [deviation(path, own) for path, own in zip(paths, found.paths[ON_POLICY], strict=True)]
        for num, paths in found.paths.items()
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


def slower_along_it(found: AtOneRate) -> Verdict:
    slopes = slopes_by_seed({num: [one.kl for one in cell.ended] for num, cell in found.of("ppo").items()})
    return Verdict(
        "PPO moves less far along its frontier as N grows",
        "A, Fig. 3",
        is_greater_by_seed([0.0] * len(slopes), slopes),
        f"{spread(slopes, 2)} nats of KL per doubling",
    )


def copg_at_zero(found: AtOneRate) -> Verdict:
    far = found.cells["copg", FAR].win_rates()
    return Verdict("CoPG is at 0 by N = 16", "A, Fig. 13", fmean(far) <= AT_ZERO, f"win rate {spread(far, 2)}")


def proximal_above_copg(found: AtOneRate) -> Verdict:
    proximal, copg = (found.cells[loss, FAR].win_rates() for loss in ("proximal_rloo", "copg"))
    return Verdict(
        "Proximal RLOO is above CoPG at N = 16",
        "A, Fig. 13",
        is_greater_by_seed(proximal, copg),
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


def deviation(path: Sequence[tuple[float, float]], frontier: Sequence[tuple[float, float]]) -> float | None:
    """How far the points of `path` lie above `frontier`, on average; both are (KL, gold score) by step.

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


def who_keeps(found: AtOneRate, num: int) -> str:
    """Losses that were run at N = `num`, by what they keep there of their gain on-policy."""
    shares = {
        loss: shares_kept(cells[num], cells[ON_POLICY]) for loss in found.losses if num in (cells := found.of(loss))
    }
    known = {loss: values for loss, values in shares.items() if values is not None}
    in_order = sorted(known, key=lambda loss: -fmean(known[loss]))
    return ", ".join(f"{NAMES[loss]} {share(known[loss])}" for loss in in_order) or "nobody gained enough to say"


def tables(found: Found) -> dict[str, str]:
    ages = ", ".join(str(found.oldest[num]) for num in found.minibatches)
    larger = {
        f"At {LARGER_LR:g} times the learning rate. {caption}": table for caption, table in _tables(found.at_larger_lr)
    }
    return dict(_tables(found, f"; the stalest minibatch is {ages} updates old")) | larger


def _tables(found: AtOneRate, of_age: str = "") -> Iterator[tuple[str, str]]:
    """Captions and tables of one learning rate, a row per loss and a column per N."""
    columns = found.minibatches
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

    yield f"Gold win rate against the references. RL begins at {spread(start, 2)}{of_age}", at_the_end("win_rate")
    yield "Drift: KL from the SFT policy in nats per completion", at_the_end("kl")
    yield (
        "Drift: the SFT policy's perplexity on the completions, per response token. "
        f"RL begins at {spread(perplexity, 2)}",
        at_the_end("perplexity"),
    )
    yield (
        "How far off-policy: effective sample size of the importance ratios, 1 where all are 1; mean over all steps",
        table(found.ess),
    )
    yield (
        "Gain in win rate at N = 1, and the share of it that is kept",
        markdown_table(
            ["loss", "gain at N = 1", *(f"kept at N = {num}" for num in columns[1:])], map(kept, found.losses)
        ),
    )


def figure(found: Found) -> str:
    """Win rate against KL, a panel per loss; in the last one PPO's gold score against KL as it trains.

    Diamonds are runs at the larger learning rate.
    """
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
        for num, cell in found.at_larger_lr.of(loss).items():
            kl, win_rates = [one.kl for one in cell.ended], cell.win_rates()
            axis.plot(kl, win_rates, "D", color=shades[num], markersize=2.5, alpha=0.6, markeredgewidth=0)
            label = f"N = {num}, {LARGER_LR:g} x learning rate"
            axis.plot(fmean(kl), fmean(win_rates), "D", color=shades[num], markersize=6, label=label)
        axis.set(ylabel="gold win rate")
    # Where there is room: the last panel has the same colours, and nothing so low.
    handles, labels = axes[found.losses.index("ppo")].get_legend_handles_labels()
    axes[-1].legend(handles, labels, fontsize=6, ncols=2, loc="lower left")
    for num, paths in found.paths.items():
        points = [point for path in paths for point in path]
        axes[-1].plot(*zip(*points, strict=True), "o", color=shades[num], markersize=2.5, alpha=0.5, markeredgewidth=0)
    axes[-1].set(ylabel="mean gold score of a step")
    cells = [*found.cells.values(), *found.at_larger_lr.cells.values()]
    seen = [one.kl for cell in cells for one in cell.ended]
    drift_axes(axes, max(seen + [kl for paths in found.paths.values() for path in paths for kl, _ in path]))
    return svg(drawn)


def section(lab: Lab, plan: Plan | None = None) -> Section:
    plan = plan or Plan()
    made, faster = specs(lab, plan), specs_at_larger_lr(lab, plan)
    runs = [spec for some in (*made.values(), *faster.values()) for spec in some]
    plan.pipeline.make(lab, plan.seeds, [USUAL], runs)
    found = read(lab, made, faster)
    copg, rloo = found.twins
    same = "ends as CoPG's does, bit for bit" if copg == rloo else f"ends at {rloo}, CoPG's at {copg}"
    return Section(
        title="How much staleness each loss bears",
        question="A policy samples N minibatches and is then trained once on each of them. How do win rate and drift "
        "change with N, and for which loss least?",
        setup=f"{plan.pipeline.told}, on {len(plan.seeds)} seeds. The N minibatches are those of one step at staleness "
        "0, as in the source. Best of 2 learns at a third of the others' rate, as in the source. Runs at "
        f"{LARGER_LR:g} times the learning rate were added after those at the usual rate had been seen.",
        tables=tables(found),
        figures={"Win rate against KL by loss and N": figure(found)},
        verdicts=verdicts(found),
        cost="90 minutes on two cores",
        notes=[
            f"At {LARGER_LR:g} times the learning rate and N = {FAR} the kept shares of the gain are, largest first: "
            f"{who_keeps(found.at_larger_lr, FAR)}.",
            f"RLOO and CoPG have the same gradient: RLOO's run at N = {FAR} with the first seed {same}.",
        ],
    )
