"""Which correction keeps continuous training stable where tokens are eight steps old (LlamaRL, Figure 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from experiments.comparison import is_as_great, is_greater, keeps_gains
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

ONE, MIXTURE = "one task", "a mixture"
ASKED = {MIXTURE: tuple(TASKS), ONE: ("b",)}
SEEDS = tuple(range(10))
RATES = (1e-4, 2e-4, 4e-4, 1e-3)
"""Learning rates of the sweep: synchronous on either task, no correction and AIPO on the mixture, to be looked at."""
SWEEP_SEEDS = (100, 101, 102)
"""Apart from SEEDS: what chooses the rate decides nothing else."""
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


def swept() -> list[Key]:
    """The runs that choose the learning rate of each task, and those that are looked at beside them."""
    return [
        (tasks, loss, lr, seed)
        for tasks in ASKED
        for loss in ((SYNC, NONE, AIPO) if tasks == MIXTURE else (SYNC,))
        for lr in RATES
        for seed in SWEEP_SEEDS
    ]


def compared(rates: Mapping[str, float]) -> list[Key]:
    """The runs of which something is claimed, at the rate of their tasks."""
    return [(tasks, loss, rates[tasks], seed) for tasks in ASKED for seed in SEEDS for loss in (SYNC, *LOSSES)]


def starts(lab: Lab) -> dict[tuple[str, int], Spec]:
    """What runs begin with, by tasks and seed; what is asked lies in the lab's folder afterwards."""
    datasets = {tasks: write(kinds, lab.folder) for tasks, kinds in ASKED.items()}
    return {(tasks, seed): start(datasets[tasks], tasks, seed) for tasks in ASKED for seed in (*SEEDS, *SWEEP_SEEDS)}


def specs(lab: Lab, keys: Sequence[Key]) -> dict[Key, Spec]:
    """The runs of `keys`, each from the start of its tasks and seed."""
    begun = starts(lab)
    datasets = {tasks: write(kinds, lab.folder) for tasks, kinds in ASKED.items()}
    return {key: run(key, dataset=datasets[key[0]], begun=lab.place(begun[key[0], key[3]])) for key in keys}


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


def outcomes(lab: Lab, keys: Sequence[Key]) -> dict[Key, Outcome]:
    """What the runs of `keys` came to, made unless they are there."""
    cells = specs(lab, keys)
    places = lab.run_all(list(cells.values()))
    return {key: outcome(metrics(place), summary(place)) for key, place in zip(cells, places, strict=True)}


Swept = Mapping[tuple[str, str, float], Sequence[Outcome]]
"""(tasks, loss, learning rate) -> one outcome per seed of the sweep."""


class Judged(Protocol):
    """What a learning rate is chosen by: the accuracy at the end of a run, and whether it was stable."""

    @property
    def after(self) -> float: ...
    @property
    def is_unstable(self) -> bool: ...


def best_stable_rate(groups: Mapping[float, Sequence[Judged]]) -> float:
    """The rate with the best mean accuracy of those at which no run is unstable; of none, the smallest."""
    stable = [lr for lr, group in groups.items() if not any(one.is_unstable for one in group)]
    return max(stable, key=lambda lr: fmean(one.after for one in groups[lr]), default=min(groups))


def best_synchronous_rate(lab: Lab, tasks: str) -> float:
    """The rate of `best_stable_rate` for synchronous training on `tasks`; its runs are made unless there."""
    keys = [key for key in swept() if key[:2] == (tasks, SYNC)]
    return best_stable_rate({lr: group for (_, _, lr), group in by_cell(outcomes(lab, keys)).items()})


Runs = Mapping[tuple[str, str], Sequence[Outcome]]
"""(tasks, loss) -> one outcome per seed, at the rate of the tasks."""


def verdicts(runs: Runs) -> list[Verdict]:
    """Each claim by its rule in the README; None throughout where tokens were not as old as they should be."""
    of_tasks = [_is_unstable_without, _is_stable_with, _as_good_as_synchronous, _any_rho]
    of_tasks += [_one_side_suffices, _decoupled_is_better]
    found = [rule(runs, tasks) for tasks in ASKED for rule in of_tasks] + [_mixture_is_harder(runs)]
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


def _is_unstable_without(runs: Runs, tasks: str) -> Verdict:
    unstable = any(one.is_unstable for one in runs[tasks, NONE])
    is_worse = is_greater(_falls(runs, tasks, NONE), _falls(runs, tasks, SYNC), paired=True)
    return Verdict(
        f"On {tasks}: without a correction, asynchronous training is sometimes unstable.",
        "LlamaRL, Fig. 8",
        False if not unstable else True if is_worse else None,
        f"{_unstable(runs, tasks, NONE)} runs unstable, {_unstable(runs, tasks, SYNC)} synchronous ones",
    )


def _is_stable_with(runs: Runs, tasks: str) -> Verdict:
    stable = not any(one.is_unstable for loss in RECOMMENDED for one in runs[tasks, loss])
    ours = [fmean(falls) for falls in zip(*(_falls(runs, tasks, loss) for loss in RECOMMENDED), strict=True)]
    is_worse = is_greater(_falls(runs, tasks, NONE), ours, paired=True)
    return Verdict(
        f"On {tasks}: truncated importance weights, rho from 2 to 10, keep it stable.",
        "LlamaRL, Fig. 8 and section 6",
        False if not stable else is_worse,
        f"{_unstable(runs, tasks, *RECOMMENDED)} runs unstable; largest falls {spread(ours)}, "
        f"without {spread(_falls(runs, tasks, NONE))}",
    )


def _mixture_is_harder(runs: Runs) -> Verdict:
    mixed, single = _falls(runs, MIXTURE, NONE), _falls(runs, ONE, NONE)
    return Verdict(
        "Without a correction, a mixture of tasks is less stable than one task.",
        "LlamaRL, Fig. 8",
        is_greater(mixed, single),
        f"largest falls {spread(mixed)}, of one task {spread(single)}",
    )


def _as_good_as_synchronous(runs: Runs, tasks: str) -> Verdict:
    ours, sync, none = (_after(runs, tasks, loss) for loss in (AIPO, SYNC, NONE))
    began = [one.before for one in runs[tasks, SYNC]]
    return Verdict(
        f"On {tasks}: with a correction, it is as good as synchronous training.",
        "LlamaRL, section 4.2",
        keeps_gains(ours, sync, began, MARGIN, paired=True),
        f"accuracy {spread(ours)}, synchronous {spread(sync)}, uncorrected {spread(none)}",
    )


def _any_rho(runs: Runs, tasks: str) -> Verdict:
    after = {loss: _after(runs, tasks, loss) for loss in RECOMMENDED}
    best = max(after.values(), key=fmean)
    each = [is_as_great(values, best, MARGIN, paired=True) for values in after.values()]
    return Verdict(
        f"On {tasks}: any rho from 2 to 10 works well.",
        "LlamaRL, section 6",
        False if False in each else None if None in each else True,
        ", ".join(spread(values) for values in after.values()),
    )


def _one_side_suffices(runs: Runs, tasks: str) -> Verdict:
    ours, clip = _after(runs, tasks, AIPO), _after(runs, tasks, "PPO's clip")
    return Verdict(
        f"On {tasks}: the one-sided truncation is on par with PPO's clip, or slightly better.",
        "LlamaRL, appendix 10",
        is_as_great(ours, clip, MARGIN, paired=True),
        f"accuracy {spread(ours)}, clip {spread(clip)}",
    )


def _decoupled_is_better(runs: Runs, tasks: str) -> Verdict:
    ours, clip = _after(runs, tasks, "decoupled PPO"), _after(runs, tasks, "PPO's clip")
    return Verdict(
        f"On {tasks}: a clip around a recent policy beats one around the policy that sampled.",
        "AReaL (2505.24298)",
        is_greater(ours, clip, paired=True),
        f"accuracy {spread(ours)}, clip {spread(clip)}",
    )


# What is said


def section(lab: Lab) -> Section:
    lab.run_all(list(starts(lab).values()))
    sweep = by_cell(outcomes(lab, swept()))
    rates = {tasks: best_synchronous_rate(lab, tasks) for tasks in ASKED}
    found = outcomes(lab, compared(rates))
    runs = {(tasks, loss): group for (tasks, loss, _), group in by_cell(found).items()}
    stale = [one for (_, loss), group in runs.items() if loss != SYNC for one in group]
    oldest = fmean(one.staleness for one in stale)
    chosen = ", ".join(f"{rate:g} on {tasks}" for tasks, rate in rates.items())
    return Section(
        title="Corrections for staleness",
        question=f"Which loss keeps continuous training stable and good when tokens are {K} steps old, on one task and "
        "on a mixture, at the best rate at which synchronous training is stable?",
        setup="A model of 0.1 M parameters, fine-tuned first on answers half of which are wrong; "
        f"{_step_words()}. Scores come one by one, 1.5 ms apart, so groups wait: their tokens were {oldest:.2f} "
        f"steps old on average when they were trained on (bound {K}, after the first {2 * K} steps). "
        f"Learning rates: {chosen}, the best at which the synchronous baseline is stable over seeds "
        f"{SWEEP_SEEDS[0]} to {SWEEP_SEEDS[-1]}; a second condition on them was dropped after the runs of its choice, "
        f"1e-3 on the mixture, were seen (its README). Verdicts are on {len(SEEDS)} other seeds. "
        f"A run is unstable if its training reward, averaged over {WINDOW} steps, falls more than {UNSTABLE} below its "
        "best so far.",
        tables={
            f"On {name}: held-out accuracy at temperature 1, falls of training reward": table(
                {loss: group for (tasks, loss), group in runs.items() if tasks == name}
            )
            for name in ASKED
        }
        | {f"Accuracy by learning rate, {len(SWEEP_SEEDS)} seeds": rates_table(sweep)},
        figures={"Training reward by loss, falls by loss and tasks, accuracy by learning rate": figure(runs, sweep)},
        verdicts=verdicts(runs),
        cost=f"{len(sweep) * len(SWEEP_SEEDS) + len(found)} runs on one core each",
        notes=[by_rate(sweep)],
    )


def by_cell(found: Mapping[Key, Outcome]) -> dict[tuple[str, str, float], list[Outcome]]:
    """Outcomes by tasks, loss and learning rate, one for each seed."""
    cells: dict[tuple[str, str, float], list[Outcome]] = {}
    for (tasks, loss, lr, _), one in found.items():
        cells.setdefault((tasks, loss, lr), []).append(one)
    return cells


def by_rate(sweep: Swept) -> str:
    """At which learning rates stale training of the mixture ends as good as synchronous training, in words."""
    sync = {lr: fmean(one.after for one in sweep[MIXTURE, SYNC, lr]) for lr in RATES}
    learns = [lr for lr in RATES if sync[lr] > fmean(one.before for one in sweep[MIXTURE, SYNC, lr])]
    as_good = {
        loss: [f"{lr:g}" for lr in learns if fmean(one.after for one in sweep[MIXTURE, loss, lr]) >= sync[lr] - MARGIN]
        for loss in (AIPO, NONE)
    }
    told = "; ".join(f"{loss}: {', '.join(found) or 'none'}" for loss, found in as_good.items())
    return (
        f"In the sweep, synchronous training learns the mixture at {', '.join(f'{lr:g}' for lr in learns)}; rates "
        f"among these at which training at staleness {K} ends at most {MARGIN} below it: {told}."
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


def rates_table(sweep: Swept) -> str:
    """One row per tasks and loss, one column per learning rate."""
    rows = dict.fromkeys((tasks, loss) for tasks, loss, _ in sweep)
    cells = [[*row, *(spread([one.after for one in sweep[(*row, lr)]]) for lr in RATES)] for row in rows]
    return markdown_table(["tasks", "loss", *(f"{lr:g}" for lr in RATES)], cells, left=2)


def figure(runs: Runs, sweep: Swept) -> str:
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
    of_mixture = {
        loss: (RATES, [[one.after for one in sweep[MIXTURE, loss, lr]] for lr in RATES]) for loss in (SYNC, NONE, AIPO)
    }
    lines(by_rate, of_mixture)
    by_rate.set_xscale("log")
    ticks(by_rate.xaxis, RATES)
    by_rate.set_xlabel("learning rate")
    by_rate.legend(fontsize=7)
    return svg(image)


def _curve(group: Sequence[Outcome], points: int = 12) -> tuple[list[float], list[list[float]]]:
    """Steps, and the smoothed rewards of every run there."""
    curves = [smoothed(one.rewards, WINDOW) for one in group]
    length = min(len(curve) for curve in curves)
    at = sorted({round(index * (length - 1) / max(1, points - 1)) for index in range(points)})
    return [float(index + WINDOW) for index in at], [[curve[index] for curve in curves] for index in at]
