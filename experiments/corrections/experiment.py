"""Which correction keeps continuous training stable where tokens are eight steps old (LlamaRL, Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.comparison import is_as_great, is_greater
from experiments.corrections.tasks import TASKS, write
from experiments.figures import COLOURS, MARKERS, lines, panels, svg, ticks
from experiments.lab import Lab, Spec, metrics, summary
from experiments.section import Section, Verdict, markdown_table, spread
from slipstream.core.recipes import merge, stage_dir

RECIPE = Path(__file__).with_name("recipe.toml")
K = 8
SYNC = "synchronous"
NONE = "no correction"
LOSSES: dict[str, dict[str, Any]] = {
    NONE: {"name": "reinforce"},
    "AIPO, rho = 1": {"name": "aipo", "params": {"max_ratio": 1.0}},
    "AIPO, rho = 2": {"name": "aipo", "params": {"max_ratio": 2.0}},
    "AIPO, rho = 4": {"name": "aipo", "params": {"max_ratio": 4.0}},
    "AIPO, rho = 10": {"name": "aipo", "params": {"max_ratio": 10.0}},
    "PPO's clip": {"name": "ppo", "params": {"eps_low": 0.2, "eps_high": 0.2}},
    "decoupled PPO": {"name": "decoupled_ppo", "params": {"eps_low": 0.2, "eps_high": 0.2}},
}
"""At staleness k; all are divided by tokens and have the group's mean as baseline."""
AIPO = "AIPO, rho = 4"
RECOMMENDED = ("AIPO, rho = 2", AIPO, "AIPO, rho = 10")
"""LlamaRL: rho in [2, 10] seems to work generally well."""

ONE, MIXTURE = "one task", "mixture"
ASKED = {ONE: ("b",), MIXTURE: tuple(TASKS)}
SEEDS = {MIXTURE: (0, 1, 2, 3, 4), ONE: (0, 1, 2)}
LR = 4e-4
LRS = (1e-4, 2e-4, 1e-3)
"""Besides LR, of the mixture, for the synchronous baseline, no correction and AIPO."""
SWEEP_SEEDS = (0, 1, 2)

WINDOW = 20
"""Steps over which training rewards are averaged before a fall is looked for."""
UNSTABLE = 0.1
"""A run whose averaged training reward falls so far below its best so far is unstable."""
MARGIN = 0.05
"""Accuracies that differ by less are equal to a user."""
LEAST_STALENESS = K - 1
"""Below it, in the mean over tokens after the first 2 k steps, the runs are not what they are about."""

SYNCHRONOUS = {
    "max_staleness": 0,
    "weight_update": "between_batches",
    "loss": {"name": "reinforce"},
    "rewards": {"terms": [{"function": "exact_match"}]},  # nobody waits in line
}


Key = tuple[str, str, float, int]
"""Tasks, loss, learning rate and seed."""


def start(dataset: Path, tasks: str, seed: int) -> Spec:
    """The policy that all runs of a seed begin with."""
    told = {"seed": seed, "stages": ["sft"], "prompts": {"dataset": str(dataset)}}
    return Spec(f"corrections start {tasks} seed={seed}", RECIPE, told, cores=1)


def run(key: Key, *, dataset: Path, begun: Path) -> Spec:
    """One run at staleness k, or on-policy."""
    tasks, loss, lr, seed = key
    told = {
        "seed": seed,
        "model": {"path": str(stage_dir(begun, "sft") / "model")},
        "prompts": {"dataset": str(dataset)},
        "trainer": {"optimizer": {"lr": lr}},
    }
    changed = SYNCHRONOUS if loss == SYNC else {"loss": LOSSES[loss]}
    return Spec(f"corrections {tasks} {loss} lr={lr:g} seed={seed}", RECIPE, merge(told, changed), cores=1)


def keys() -> list[Key]:
    """Every run."""
    losses = (SYNC, *LOSSES)
    return [(tasks, loss, LR, seed) for tasks in ASKED for seed in SEEDS[tasks] for loss in losses] + [
        (MIXTURE, loss, lr, seed) for lr in LRS for seed in SWEEP_SEEDS for loss in (SYNC, NONE, AIPO)
    ]


def specs(lab: Lab) -> tuple[list[Spec], dict[Key, Spec]]:
    """What runs begin with, and the runs; what is asked lies in the lab's folder afterwards."""
    datasets = {tasks: write(kinds, lab.folder) for tasks, kinds in ASKED.items()}
    starts = {(tasks, seed): start(datasets[tasks], tasks, seed) for tasks in ASKED for seed in SEEDS[tasks]}
    places = {of: lab.place(spec) for of, spec in starts.items()}
    runs = {key: run(key, dataset=datasets[key[0]], begun=places[key[0], key[3]]) for key in keys()}
    return list(starts.values()), runs


# What runs came to


@dataclass(frozen=True)
class Outcome:
    """One run. `rewards` are its steps' mean training rewards; the others are means over steps, or of its end."""

    rewards: tuple[float, ...]
    before: float
    after: float
    staleness: float
    effective_share: float

    @property
    def fall(self) -> float:
        return largest_fall(self.rewards, WINDOW)

    @property
    def is_unstable(self) -> bool:
        return self.fall > UNSTABLE


def outcome(steps: Sequence[Mapping[str, Any]], told: Mapping[str, Any]) -> Outcome:
    """From the lines of `metrics.jsonl` and from `summary.json`."""
    trained = [line for line in steps if "reward_mean" in line]
    settled = trained[2 * K :] or trained
    return Outcome(
        rewards=tuple(line["reward_mean"] for line in trained),
        before=told["eval"]["before"]["sampled_accuracy"],
        after=told["eval"]["after"]["sampled_accuracy"],
        staleness=fmean(line["staleness_mean"] for line in settled),
        effective_share=fmean(line["ess"] or 0.0 for line in settled),
    )


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means over `window` values in a row; over all where there are fewer."""
    window = min(window, len(values))
    return [fmean(values[end - window : end]) for end in range(window, len(values) + 1)]


def largest_fall(values: Sequence[float], window: int) -> float:
    """How far the smoothed values ever lie below their best so far."""
    best, fall = float("-inf"), 0.0
    for value in smoothed(values, window):
        best = max(best, value)
        fall = max(fall, best - value)
    return fall


Runs = Mapping[tuple[str, str], Sequence[Outcome]]
"""(tasks, loss) -> one outcome per seed, at LR."""


def verdicts(runs: Runs) -> list[Verdict]:
    """Each claim by its rule in the README; None throughout where tokens were not as old as they should be."""
    found = [_is_unstable_without(runs), _is_stable_with(runs), _mixture_is_harder(runs)]
    found += [_as_good_as_synchronous(runs), _any_rho(runs), _one_side_suffices(runs), _decoupled_is_better(runs)]
    least = min(one.staleness for (_, loss), group in runs.items() if loss != SYNC for one in group)
    if least >= LEAST_STALENESS:
        return found
    short = f"tokens were only {least:.1f} steps old"
    return [Verdict(one.claim, one.source, None, f"{short}; {one.found}") for one in found]


def _falls(runs: Runs, tasks: str, loss: str) -> list[float]:
    return [one.fall for one in runs[tasks, loss]]


def _after(runs: Runs, tasks: str, loss: str) -> list[float]:
    return [one.after for one in runs[tasks, loss]]


def _unstable(runs: Runs, tasks: str, *losses: str) -> str:
    group = [one for loss in losses for one in runs[tasks, loss]]
    return f"{sum(one.is_unstable for one in group)} of {len(group)}"


def _is_unstable_without(runs: Runs) -> Verdict:
    unstable = any(one.is_unstable for one in runs[MIXTURE, NONE])
    is_worse = is_greater(_falls(runs, MIXTURE, NONE), _falls(runs, MIXTURE, SYNC), paired=True)
    return Verdict(
        "Without a correction, asynchronous training on a mixture is sometimes unstable.",
        "LlamaRL, Fig. 8",
        False if not unstable else True if is_worse else None,
        f"{_unstable(runs, MIXTURE, NONE)} runs unstable, {_unstable(runs, MIXTURE, SYNC)} synchronous ones",
    )


def _is_stable_with(runs: Runs) -> Verdict:
    stable = not any(one.is_unstable for loss in RECOMMENDED for one in runs[MIXTURE, loss])
    ours = [fmean(falls) for falls in zip(*(_falls(runs, MIXTURE, loss) for loss in RECOMMENDED), strict=True)]
    is_worse = is_greater(_falls(runs, MIXTURE, NONE), ours, paired=True)
    return Verdict(
        "Truncated importance weights, rho from 2 to 10, keep it stable.",
        "LlamaRL, Fig. 8 and section 6",
        False if not stable else is_worse,
        f"{_unstable(runs, MIXTURE, *RECOMMENDED)} runs unstable; largest falls {spread(ours)}, "
        f"without {spread(_falls(runs, MIXTURE, NONE))}",
    )


def _mixture_is_harder(runs: Runs) -> Verdict:
    mixed, single = _falls(runs, MIXTURE, NONE), _falls(runs, ONE, NONE)
    return Verdict(
        "Without a correction, a mixture of tasks is less stable than one task.",
        "LlamaRL, Fig. 8",
        is_greater(mixed, single),
        f"largest falls {spread(mixed)}, of one task {spread(single)}",
    )


def _as_good_as_synchronous(runs: Runs) -> Verdict:
    ours, sync = _after(runs, MIXTURE, AIPO), _after(runs, MIXTURE, SYNC)
    return Verdict(
        "With a correction, it is as good as synchronous training.",
        "LlamaRL, section 4.2",
        is_as_great(ours, sync, MARGIN, paired=True),
        f"accuracy {spread(ours)}, synchronous {spread(sync)}",
    )


def _any_rho(runs: Runs) -> Verdict:
    after = {loss: _after(runs, MIXTURE, loss) for loss in RECOMMENDED}
    best = max(after.values(), key=fmean)
    each = [is_as_great(values, best, MARGIN, paired=True) for values in after.values()]
    return Verdict(
        "Any rho from 2 to 10 works well.",
        "LlamaRL, section 6",
        False if False in each else None if None in each else True,
        ", ".join(spread(values) for values in after.values()),
    )


def _one_side_suffices(runs: Runs) -> Verdict:
    ours, clip = _after(runs, MIXTURE, AIPO), _after(runs, MIXTURE, "PPO's clip")
    return Verdict(
        "The one-sided truncation is on par with PPO's clip, or slightly better.",
        "LlamaRL, appendix 10",
        is_as_great(ours, clip, MARGIN, paired=True),
        f"accuracy {spread(ours)}, clip {spread(clip)}",
    )


def _decoupled_is_better(runs: Runs) -> Verdict:
    ours, clip = _after(runs, MIXTURE, "decoupled PPO"), _after(runs, MIXTURE, "PPO's clip")
    return Verdict(
        "On stale samples a clip around a recent policy beats one around the policy that sampled.",
        "AReaL (2505.24298)",
        is_greater(ours, clip, paired=True),
        f"accuracy {spread(ours)}, clip {spread(clip)}",
    )


# What is said


def section(lab: Lab) -> Section:
    starts, cells = specs(lab)
    lab.run_all(starts)
    places = lab.run_all(list(cells.values()))
    outcomes = {key: outcome(metrics(place), summary(place)) for key, place in zip(cells, places, strict=True)}
    runs: dict[tuple[str, str], list[Outcome]] = {}
    for (tasks, loss, lr, _), one in outcomes.items():
        if lr == LR:
            runs.setdefault((tasks, loss), []).append(one)
    rates: dict[tuple[str, float], list[Outcome]] = {}
    for (tasks, loss, lr, _), one in outcomes.items():
        if tasks == MIXTURE and loss in (SYNC, NONE, AIPO):
            rates.setdefault((loss, lr), []).append(one)
    stale = [one for (_, loss), group in runs.items() if loss != SYNC for one in group]
    oldest = fmean(one.staleness for one in stale)
    return Section(
        title="Corrections for staleness",
        question=f"Which loss keeps continuous training stable and good when tokens are {K} steps old, on one task and "
        "on a mixture?",
        setup="A model of 0.1 M parameters, fine-tuned first on answers half of which are wrong; "
        f"{_step_words()}. Scores come one by one, 1.5 ms apart, so groups wait: their tokens were {oldest:.2f} "
        f"steps old on average when they were trained on (bound {K}, after the first {2 * K} steps). "
        f"Learning rate {LR:g}; "
        f"{len(SEEDS[MIXTURE])} seeds on the mixture, {len(SEEDS[ONE])} on one task. "
        f"A run is unstable if its training reward, averaged over {WINDOW} steps, falls more than {UNSTABLE} below its "
        "best so far.",
        tables={
            f"{name.capitalize()}: held-out accuracy at temperature 1, falls of training reward": table(
                {loss: group for (tasks, loss), group in runs.items() if tasks == name}
            )
            for name in (MIXTURE, ONE)
        }
        | {"Mixture: accuracy by learning rate": rates_table(rates)},
        figures={"Training reward by loss, falls by loss and tasks, accuracy by learning rate": figure(runs, rates)},
        verdicts=verdicts(runs),
        cost=f"{len(outcomes)} runs on one core each",
        notes=[by_rate(rates)],
    )


def by_rate(rates: Mapping[tuple[str, float], Sequence[Outcome]]) -> str:
    """At which learning rates stale training ends as good as synchronous training, in words."""
    sync = {lr: fmean(one.after for one in group) for (loss, lr), group in rates.items() if loss == SYNC}
    learns = [lr for lr in sorted(sync) if sync[lr] > fmean(one.before for one in rates[SYNC, lr])]
    as_good = {
        loss: [f"{lr:g}" for lr in learns if fmean(one.after for one in rates[loss, lr]) >= sync[lr] - MARGIN]
        for loss in (AIPO, NONE)
    }
    told = "; ".join(f"{loss}: {', '.join(found) or 'none'}" for loss, found in as_good.items())
    return (
        f"Verdicts are those of the learning rate {LR:g}. Synchronous training learns the mixture at "
        f"{', '.join(f'{lr:g}' for lr in learns)}; rates among these at which training at staleness {K} ends at most "
        f"{MARGIN} below it: {told}."
    )


def _step_words() -> str:
    config = Spec("", RECIPE).config()
    return (
        f"{config.steps} steps of {config.groups_per_step} x {config.completions_per_group} completions in "
        f"{config.trainer.minibatches} updates"
    )


def table(runs: Mapping[str, Sequence[Outcome]]) -> str:
    """One row per loss."""
    head = ["loss", "before", "after", "largest fall", "unstable runs", "staleness", "effective samples"]
    return markdown_table(
        head,
        [
            (
                loss,
                spread([one.before for one in group]),
                spread([one.after for one in group]),
                spread([one.fall for one in group]),
                f"{sum(one.is_unstable for one in group)} of {len(group)}",
                spread([one.staleness for one in group], 2),
                spread([one.effective_share for one in group], 2),
            )
            for loss, group in runs.items()
        ],
    )


def rates_table(rates: Mapping[tuple[str, float], Sequence[Outcome]]) -> str:
    """One row per loss, one column per learning rate."""
    used = sorted({lr for _, lr in rates})
    rows = [[loss, *(spread([one.after for one in rates[loss, lr]]) for lr in used)] for loss in (SYNC, NONE, AIPO)]
    return markdown_table(["loss", *(f"{lr:g}" for lr in used)], rows)


def figure(runs: Runs, rates: Mapping[tuple[str, float], Sequence[Outcome]]) -> str:
    """Training rewards on the mixture, the falls of all runs, and accuracy by learning rate."""
    image, (curves, falls, by_rate) = panels(["training reward, mixture", "largest fall", "accuracy, mixture"])
    shown = {loss: group for (tasks, loss), group in runs.items() if tasks == MIXTURE}
    lines(curves, {loss: _curve(group) for loss, group in shown.items()})
    curves.set_xlabel("step")
    curves.legend(fontsize=6)
    for index, (tasks, marker) in enumerate(zip(ASKED, MARKERS, strict=False)):
        for row, loss in enumerate(shown):
            values = [one.fall for one in runs[tasks, loss]]
            label = tasks if row == 0 else None
            falls.plot(values, [row - 0.12 + 0.24 * index] * len(values), marker, color=COLOURS[index], label=label)
    falls.set_yticks(range(len(shown)), list(shown), fontsize=7)
    falls.invert_yaxis()
    falls.axvline(UNSTABLE, color="#888888", linewidth=0.8, linestyle="--")
    falls.legend(fontsize=7)
    series = {}
    for loss in (SYNC, NONE, AIPO):
        used = sorted(lr for name, lr in rates if name == loss)
        series[loss] = (used, [[one.after for one in rates[loss, lr]] for lr in used])
    lines(by_rate, series)
    by_rate.set_xscale("log")
    ticks(by_rate.xaxis, sorted({lr for _, lr in rates}))
    by_rate.set_xlabel("learning rate")
    by_rate.legend(fontsize=7)
    return svg(image)


def _curve(group: Sequence[Outcome], points: int = 12) -> tuple[list[float], list[list[float]]]:
    """Steps, and the smoothed rewards of every run there."""
    curves = [smoothed(one.rewards, WINDOW) for one in group]
    length = min(len(curve) for curve in curves)
    at = sorted({round(index * (length - 1) / max(1, points - 1)) for index in range(points)})
    return [float(index + WINDOW) for index in at], [[curve[index] for curve in curves] for index in at]
