"""Losses made for very old samples, at lags of 32, 64 and 128 updates: which keeps what synchronous training gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.comparison import is_greater, keeps_gains
from experiments.corrections.experiment import (
    MARGIN,
    MIXTURE,
    NONE,
    RECIPE,
    SWEEP_SEEDS,
    SYNC,
    SYNCHRONOUS,
    UNSTABLE,
    WINDOW,
    best_stable_rate,
    largest_fall,
    starts,
)
from experiments.figures import lines, panels, svg, ticks
from experiments.kept import Row, Wanted
from experiments.kept import outcomes as of_runs
from experiments.lab import Lab, Spec, metrics, summary
from experiments.section import Section, Verdict, markdown_table, spread
from slipstream.core.recipes import merge, stage_dir

LAGS = (32, 64, 128)
FAR = 64
"""The lag that verdicts are about."""
LADDER = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 4e-4, 1e-3)
"""All learning rates that can be tried."""
RATES = (5e-5, 1e-4, 2e-4)
"""Those that each loss is tried with first at the lag FAR."""
SYNC_RATES = (1e-4, 2e-4, 4e-4, 1e-3)
"""Those of synchronous training, which bears greater ones."""
LEAST_AGE = 0.9
"""Of the lag: what the mean age of a loss's tokens is at least, else the lag was not what is asked about."""
STEPS = 256
SEEDS = (0, 1, 2, 3, 4)
LOSSES: dict[str, dict[str, Any]] = {
    NONE: {"loss": {"name": "reinforce"}},
    "AIPO, rho = 4": {"loss": {"name": "aipo", "params": {"max_ratio": 4.0}}},
    "PPO's clip": {"loss": {"name": "ppo", "params": {"eps_low": 0.2, "eps_high": 0.2}}},
    "IcePop": {"loss": {"name": "icepop"}},
    "M2PO": {"loss": {"name": "m2po"}},
    "OAPL": {"loss": {"name": "oapl", "advantages": "optimal"}},
    "OAPL, one beta": {
        "loss": {"name": "oapl", "advantages": "optimal", "optimal_beta": 0.3, "params": {"beta": 0.3}},
    },
    "VCPO": {
        "loss": {"name": "aipo", "params": {"max_ratio": 8.0, "level": "sequence"}, "reduction": "sequence"},
        "trainer": {"ess_scaling": "sqrt"},
    },
}
"""Baselines are the group's mean but for OAPL; of VCPO the ratios of whole completions and its learning rate.

OAPL's authors train with beta_1 = 1 in the value and beta_2 = 1e-3 in the loss, and derive it with one for both.
"""
TRIED: dict[str, Sequence[float]] = dict.fromkeys(LOSSES, RATES) | {SYNC: SYNC_RATES}
"""Learning rates that are tried first."""
NEW = {
    "IcePop": "2510.18855",
    "M2PO": "2510.01161: no loss at staleness 256",
    "OAPL": "2602.19362: trains at lags above 400 updates",
    "OAPL, one beta": "2602.19362, equation 3",
    "VCPO": "2602.17616",
}
"""Those that are asked about, and where they are from."""

KEPT = Path(__file__).with_name("outcomes.jsonl")
"""What runs have come to, one line each."""

Key = tuple[str, int, float, int]
"""Loss, lag, learning rate and seed; SYNC has lag 0."""


def widened(tried: Sequence[float], best: float) -> Sequence[float]:
    """`tried` with the next rate of the LADDER beyond `best`, where that lies at an end."""
    low, high = LADDER.index(min(tried)), LADDER.index(max(tried))
    return LADDER[max(0, low - (best == LADDER[low])) : high + 1 + (best == LADDER[high])]


def swept(tried: Mapping[str, Sequence[float]]) -> list[Key]:
    """The runs that choose each loss's learning rate among those that are `tried`."""
    return [
        (loss, 0 if loss == SYNC else FAR, lr, seed)
        for loss, rates in tried.items()
        for lr in rates
        for seed in SWEEP_SEEDS
    ]


def compared(rates: Mapping[str, float]) -> list[Key]:
    """The runs of which something is claimed, each at its loss's rate."""
    return [
        (loss, lag, rates[loss], seed)
        for seed in SEEDS
        for loss, lag in [(SYNC, 0), *((loss, lag) for lag in LAGS for loss in LOSSES)]
    ]


def told(key: Key) -> dict[str, Any]:
    """The settings of a run, but for where its questions and its first policy lie."""
    loss, lag, rate, seed = key
    common = {
        "seed": seed,
        "steps": STEPS,
        "max_staleness": lag,
        "trainer": {"minibatches": 1, "optimizer": {"lr": rate}},
    }
    return merge(common, SYNCHRONOUS if loss == SYNC else LOSSES[loss])


def run(key: Key, *, begun: Spec, place: Path) -> Spec:
    """One run at its lag from the policy that the run `begun`, in the folder `place`, has fine-tuned."""
    loss, lag, rate, seed = key
    begins_with = {"model": {"path": str(stage_dir(place, "sft") / "model")}, "prompts": begun.overrides["prompts"]}
    settings = merge(told(key), begins_with)
    return Spec(f"far off-policy {loss} lag={lag} lr={rate:g} seed={seed}", RECIPE, settings, cores=1)


def begins(lab: Lab) -> dict[int, Spec]:
    """What the runs of each seed begin with."""
    begun = starts(lab)
    return {seed: begun[MIXTURE, seed] for seed in (*SEEDS, *SWEEP_SEEDS)}


def specs(lab: Lab, keys: Sequence[Key]) -> dict[Key, Spec]:
    """The runs of `keys`, each from the start of its seed."""
    begun = begins(lab)
    return {key: run(key, begun=begun[key[3]], place=lab.place(begun[key[3]])) for key in keys}


@dataclass(frozen=True)
class Outcome:
    """One run; `age` is the mean over tokens once the line is full, `oldest` the largest; `discarded` tokens."""

    before: float
    after: float
    fall: float
    age: float
    oldest: int
    discarded: int
    effective_share: float

    @property
    def is_unstable(self) -> bool:
        return self.fall > UNSTABLE


def outcome(steps: Sequence[Mapping[str, Any]], told: Mapping[str, Any], lag: int) -> Outcome:
    """From the lines of `metrics.jsonl` and from `summary.json`."""
    trained = [line for line in steps if "reward_mean" in line]
    settled = trained[lag:] or trained
    return Outcome(
        before=told["eval"]["before"]["sampled_accuracy"],
        after=told["eval"]["after"]["sampled_accuracy"],
        fall=largest_fall([line["reward_mean"] for line in trained], WINDOW),
        age=fmean(line["staleness_mean"] for line in settled),
        oldest=int(told["staleness"]["max"]),
        discarded=int(told["balance"]["wasted_tokens"]["stale"]),
        effective_share=fmean(line["ess"] or 0.0 for line in settled),
    )


def outcomes(lab: Lab, keys: Sequence[Key], kept: Path) -> dict[Key, Outcome]:
    """What the runs of `keys` came to, by the lines of `kept` or made now."""
    cells, begun = specs(lab, keys), begins(lab)

    def make(some: Sequence[Key]) -> list[Path]:
        lab.run_all([one for seed, one in begun.items() if seed in {key[3] for key in some}])
        return lab.run_all([cells[key] for key in some])

    def read(key: Key, place: Path) -> Row:
        return asdict(outcome(metrics(place), summary(place), key[1]))

    names = ("loss", "lag", "lr", "seed")
    wanted = {key: Wanted(dict(zip(names, key, strict=True)), told(key), lab.place(cells[key])) for key in keys}
    rows = of_runs(lab, kept, wanted, make=make, read=read)
    return {key: Outcome(**{name: row[name] for name in Outcome.__annotations__}) for key, row in rows.items()}


Sweep = Mapping[str, Mapping[float, Sequence[Outcome]]]
"""loss -> learning rate -> one outcome per seed."""


def tuned(lab: Lab, kept: Path) -> tuple[Sweep, dict[str, float]]:
    """What was tried, and each loss's best rate, which has others on both of its sides where the LADDER has."""
    tried = TRIED
    while True:
        sweep: dict[str, dict[float, list[Outcome]]] = {}
        for (loss, _, lr, _), one in outcomes(lab, swept(tried), kept).items():
            sweep.setdefault(loss, {}).setdefault(lr, []).append(one)
        rates = {loss: best_stable_rate(groups) for loss, groups in sweep.items()}
        wider = {loss: widened(tried[loss], best) for loss, best in rates.items()}
        if wider == {loss: tuple(rates) for loss, rates in tried.items()}:
            return sweep, rates
        tried = wider


Runs = Mapping[tuple[str, int], Sequence[Outcome]]
"""(loss, lag) -> one outcome per seed."""


def is_old(runs: Runs, loss: str) -> bool:
    """Whether what this loss trained on at the lag FAR was as old as is asked about."""
    return fmean(one.age for one in runs[loss, FAR]) >= LEAST_AGE * FAR


def verdicts(runs: Runs) -> list[Verdict]:
    """By the rules of the README."""
    after = {key: [one.after for one in group] for key, group in runs.items()}
    began = [one.before for one in runs[SYNC, 0]]
    sync, none = after[SYNC, 0], after[NONE, FAR]
    kept = [
        Verdict(
            f"{loss} is as good at a lag of {FAR} updates as synchronous training",
            source,
            keeps_gains(after[loss, FAR], sync, began, MARGIN, paired=True) if is_old(runs, loss) else None,
            f"accuracy {spread(after[loss, FAR])}, synchronous {spread(sync)}",
        )
        for loss, source in NEW.items()
    ]
    better = [
        Verdict(
            f"{loss} is better at a lag of {FAR} than no correction",
            source,
            is_greater(after[loss, FAR], none, paired=True) if is_old(runs, loss) and is_old(runs, NONE) else None,
            f"accuracy {spread(after[loss, FAR])}, uncorrected {spread(none)}",
        )
        for loss, source in NEW.items()
    ]
    stale = [one for (loss, _), group in runs.items() if loss != SYNC for one in group]
    bounded = all(one.oldest <= lag for (_, lag), group in runs.items() for one in group)
    discarded = sum(one.discarded for one in stale)
    return [
        *kept,
        *better,
        Verdict(
            "No token is staler than the bound, and none is discarded for its age",
            "P1; docs/staleness.md",
            bounded and discarded == 0,
            f"in {len(stale)} runs: {'none' if bounded else 'some'} beyond, {discarded} tokens discarded",
        ),
    ]


def section(lab: Lab) -> Section:
    sweep, rates = tuned(lab, KEPT)
    runs: dict[tuple[str, int], list[Outcome]] = {}
    for (loss, lag, _, _), one in outcomes(lab, compared(rates), KEPT).items():
        runs.setdefault((loss, lag), []).append(one)
    return Section(
        title="Very old samples",
        question="Some losses are made for samples that are hundreds of updates old. Which of them keeps what "
        f"synchronous training gains, when all tokens are {', '.join(map(str, LAGS[:-1]))} or {LAGS[-1]} updates old?",
        setup=f"The mixture of tasks, the policies and the line of slow scores of the section on corrections; {STEPS} "
        "steps of 16 x 8 completions in one update, so that a lag is one of updates. The first `lag` steps are trained "
        "on what the first policy has sampled, from then on every token is as old as the bound. Losses have their "
        f"authors' settings, and each the best learning rate at which it is stable at a lag of {FAR}, synchronous "
        f"training at none, with others tried on both of its sides where {LADDER[0]:g} to {LADDER[-1]:g} have any, on "
        f"seeds {SWEEP_SEEDS[0]} to {SWEEP_SEEDS[-1]}. "
        f"Verdicts are on {len(SEEDS)} other seeds.",
        tables={
            f"Held-out accuracy at a lag of {FAR}, synchronous at none, by learning rate; {len(SWEEP_SEEDS)} seeds": (
                rates_table(sweep, rates)
            ),
            f"Held-out accuracy at the end, synchronous {spread([one.after for one in runs[SYNC, 0]])}, RL begins at "
            f"{spread([one.before for one in runs[SYNC, 0]])}": table(runs, lambda one: one.after),
            f"Effective sample size of the ratios, synchronous "
            f"{spread([one.effective_share for one in runs[SYNC, 0]])}": table(runs, lambda one: one.effective_share),
            f"Unstable runs, synchronous {unstable(runs[SYNC, 0])}": unstable_table(runs),
        },
        figures={"Accuracy at the end by lag": figure(runs)},
        verdicts=verdicts(runs),
        cost="seven hours on two cores",
        notes=[
            "Tokens were "
            + ", ".join(
                f"{fmean(one.age for loss in LOSSES for one in runs[loss, lag]):.1f} (bound {lag})" for lag in LAGS
            )
            + " updates old on average.",
            "VCPO is its ratios of whole completions and its learning rate; its baseline, which costs a backward pass "
            "for each completion (`loss.baseline`), is left out.",
            "The limit of no staleness is exact: at max_staleness 0 a run has the bits of the synchronous trainer "
            "(`tests/integration/test_sync_equals_reference.py` has GRPO's).",
        ],
    )


def rates_table(sweep: Sweep, rates: Mapping[str, float]) -> str:
    def told(group: Sequence[Outcome]) -> str:
        falls = sum(one.is_unstable for one in group)
        return spread([one.after for one in group]) + (f", {falls} unstable" if falls else "")

    tried = sorted({lr for groups in sweep.values() for lr in groups})
    rows = (
        [loss, *(told(groups[lr]) if lr in groups else "" for lr in tried), f"{rates[loss]:g}"]
        for loss, groups in sweep.items()
    )
    return markdown_table(["loss", *(f"{lr:g}" for lr in tried), "rate"], rows)


def table(runs: Runs, value: Callable[[Outcome], float]) -> str:
    rows = ([loss, *(spread([value(one) for one in runs[loss, lag]]) for lag in LAGS)] for loss in LOSSES)
    return markdown_table(["loss", *(f"lag {lag}" for lag in LAGS)], rows)


def unstable(group: Sequence[Outcome]) -> str:
    return f"{sum(one.is_unstable for one in group)} of {len(group)}"


def unstable_table(runs: Runs) -> str:
    rows = ([loss, *(unstable(runs[loss, lag]) for lag in LAGS)] for loss in LOSSES)
    return markdown_table(["loss", *(f"lag {lag}" for lag in LAGS)], rows)


def figure(runs: Runs) -> str:
    drawn, (axis,) = panels(["Mixture, held-out accuracy"])
    middle = (len(LOSSES) - 1) / 2
    drawn_at = {loss: [lag * 1.03 ** (index - middle) for lag in LAGS] for index, loss in enumerate(LOSSES)}
    lines(axis, {loss: (at, [[one.after for one in runs[loss, lag]] for lag in LAGS]) for loss, at in drawn_at.items()})
    axis.axhline(fmean(one.after for one in runs[SYNC, 0]), color="#888888", linewidth=0.8, linestyle="--")
    axis.set_xscale("log")
    ticks(axis.xaxis, LAGS)
    axis.set(xlabel="lag, updates", ylabel="accuracy, sampled")
    axis.legend(fontsize=6, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return svg(drawn)
