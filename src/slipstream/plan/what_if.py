"""A finished run with other dials, simulated from its own files.

    result = what_if("runs/quickstart", {"max_staleness": 4, "generator": {"replicas": 3}})
    result.changed.step_s, result.as_it_was.step_s, result.measured.step_s

The run is simulated twice, as it was and as it might have been, from the same times, completions and noise: what
differs comes from the dials. That the first one agrees with what was measured is the reason to believe the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from slipstream.controller.placement import place
from slipstream.controller.policies import make_policy, schedule_for
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.fields import MAX_WAIT_S
from slipstream.core.plain import flat, shown
from slipstream.core.recipes import merge, nested, resolve, with_preset
from slipstream.generator.vllm.settings import check_settings
from slipstream.plan.calibrate import Calibration, calibrate, generator_dials, row_multiple
from slipstream.plan.lengths import AS_RECORDED, Turns, WithTurns
from slipstream.plan.recorded import RecordedRun, measured, read_run
from slipstream.plan.simulated_run import FOR_ENVIRONMENTS, RunOutcome, SimulatedSetup, SimulatedWorkload
from slipstream.plan.simulator import simulate

SEEDS, MAX_SEEDS = 3, 1000  # simulations of each run, whose mean is returned
_DIALS = {
    "": "steps groups_per_step completions_per_group max_staleness weight_update publish_every reorder_window "
    "overtake_steps",
    "schedule.": "policy staleness_threshold queue_groups",
    "generator.": "replicas num_slots segment_tokens weight_update_at kv_on_update max_kv_age prefill_tokens "
    "prefill_chunk",
    "rewards.": "num_workers",
    "loss.": "skip_no_signal",
    "trainer.": "minibatches epochs microbatch_tokens checkpoint_every",
    "eval.": "every num_prompts num_slots",
}
DIALS = tuple(section + name for section, names in _DIALS.items() for name in names.split())
"""The fields whose effect on time and staleness a run's files show: not a model, prompts or a learning rate."""
BAR = 20  # characters of the longest bar of a histogram
LEAST_STALENESS = 0.005  # steps: less is no difference


@dataclass(frozen=True)
class WhatIf:
    """A run as it was measured, as it is simulated with its own dials, and with `overrides`."""

    run: Path
    overrides: dict[str, Any]
    reward_s: float | None
    measured: RunOutcome
    as_it_was: RunOutcome
    changed: RunOutcome
    turns: Turns = AS_RECORDED

    @property
    def is_changed(self) -> bool:
        return bool(self.overrides) or self.reward_s is not None or self.turns.is_set

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types; `turns` only where they are others than the run's."""
        found = asdict(self) | {"run": str(self.run)}
        return found if self.turns.is_set else {name: value for name, value in found.items() if name != "turns"}


def what_if(
    run: str | Path | Sequence[str | Path],
    overrides: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    reward_s: float | None = None,
    turns: Turns = AS_RECORDED,
    sessions: int | None = None,
    seeds: int = SEEDS,
    events: Path | None = None,
) -> WhatIf:
    """Simulate `run` with `overrides` of its configuration (nested tables, or keys with dots).

    `reward_s`: seconds that the reward takes for each completion, in place of what it took. `turns`: those of the
    episodes, in place of the run's, which may have had none; `sessions`: episodes that a replica has open. With several
    runs of one model and machine the first is the one that is changed, and all of them say how long things take.
    `events` is for the decisions of the changed run, in the format of `events.jsonl`. ConfigError for what is no
    finished run, and for overrides that the files say nothing about.
    """
    tables = with_preset(preset, nested(overrides or {}))
    if not 1 <= seeds <= MAX_SEEDS:
        raise ConfigError("a mean takes some simulations", got=f"seeds = {shown(seeds)}", allowed=f"1..{MAX_SEEDS}")
    if reward_s is not None and not 0 <= reward_s <= MAX_WAIT_S:
        raise ConfigError(
            "a reward takes some time or none", got=f"reward_s = {reward_s}", allowed=f"0..{MAX_WAIT_S:g} seconds"
        )
    events = None if events is None else Path(events)
    if events is not None and events.exists():
        raise ConfigError("events are written to a new file", got=events)
    paths = [Path(run)] if isinstance(run, str | Path) else [Path(one) for one in run]
    runs = [read_run(path) for path in paths]
    config = as_simulated(runs[0])
    changed = changed_config(config, tables)
    calibration = calibrate(runs)
    return WhatIf(
        run=paths[0],
        overrides=tables,
        reward_s=reward_s,
        measured=measured(runs[0]),
        as_it_was=predict(calibration, config, seeds=seeds),
        changed=predict(calibration, changed, reward_s, turns, sessions, seeds=seeds, events=events),
        turns=turns,
    )


def as_simulated(run: RecordedRun) -> RunConfig:
    """Return the configuration with the steps that `run` has done: one that was interrupted has fewer."""
    return run.config.model_copy(update={"steps": run.num_steps})


def changed_config(config: RunConfig, tables: Mapping[str, Any]) -> RunConfig:
    """Return `config` with overrides that can be simulated. ConfigError for others."""
    unknown = [name for name in flat(tables) if name not in DIALS]
    if unknown:
        what = "a run's files do not say what this would change"
        hint = "a run with it would: `slipstream run`; for another model, `slipstream plan`"
        raise ConfigError(what, got=", ".join(unknown), allowed=", ".join(DIALS), hint=hint)
    changed = resolve(merge(config.model_dump(), tables))
    check_settings(changed)
    return changed


def predict(
    calibration: Calibration,
    config: RunConfig,
    reward_s: float | None = None,
    turns: Turns = AS_RECORDED,
    sessions: int | None = None,
    *,
    seeds: int = SEEDS,
    events: Path | None = None,
) -> RunOutcome:
    """Return the mean of simulations of a run with `config`; the decisions of the first are written to `events`."""
    costs = calibration.costs(config)
    if reward_s is not None:
        costs = replace(costs, score_s=reward_s)
    outcomes = []
    for seed in range(seeds):
        setup, log = setup_of(config, calibration), None if seed else events
        groups: SimulatedWorkload = calibration.workload(config, seed)
        groups = WithTurns(groups, turns, seed) if turns.is_set else groups
        outcomes.append(simulate(_policy(config, sessions), setup, groups, costs, seed=seed, events=log).outcome)
    return mean_outcome(outcomes)


def _policy(config: RunConfig, sessions: int | None) -> SchedulingPolicy:
    """Return the schedule of a run with room for `sessions` completions on a replica, None: for its own number."""
    policy = schedule_for(config)
    if sessions is None:
        return policy
    group = config.samples_per_group
    return make_policy(config.schedule.policy, replace(policy.config, capacity=max(sessions, group) + group))


def setup_of(config: RunConfig, calibration: Calibration) -> SimulatedSetup:
    """Return the layout of a run with `config` on the machine of `calibration`."""
    threads, generator = place(config, calibration.cores), config.generator
    is_on_cpu = config.trainer.device == "cpu" and generator.device == "cpu"
    return SimulatedSetup(
        **generator_dials(config),
        row_multiple=row_multiple(generator),
        kv_on_update=generator.kv_on_update if config.weight_update == "in_flight" else "keep",
        max_kv_age=generator.max_kv_age,
        workers=config.rewards.num_workers,
        evaluates_first=2,  # greedy and sampled (`controller/controller.py`)
        evaluate_every=config.eval.every,
        evaluation_slots=config.eval.num_slots,
        checkpoint_every=config.trainer.checkpoint_every,
        cores=calibration.cores if is_on_cpu else None,
        trainer_threads=threads["trainer"].together,
        generator_threads=threads["generator"].together,
        beside=dict.fromkeys(("decode", "stage"), calibration.decode.beside) | {"train": calibration.train.beside},
        background=calibration.background,
    )


def mean_outcome(outcomes: Sequence[RunOutcome]) -> RunOutcome:
    """Return the mean of several simulations of one run."""
    lags: Counter[int] = sum((Counter(one.staleness) for one in outcomes), Counter())
    rates = ("step_s", "trained_tokens_per_s", "generated_tokens_per_s", "staleness_mean")
    return replace(
        outcomes[0],
        **dict[str, Any]((name, fmean(getattr(one, name) for one in outcomes)) for name in rates),
        idle={side: fmean(one.idle.get(side, 0.0) for one in outcomes) for side in outcomes[0].idle},
        staleness_max=max(one.staleness_max for one in outcomes),
        staleness={lag: round(lags[lag] / len(outcomes)) for lag in sorted(lags)},
    )


ENVIRONMENTS = "for environments"  # a row of runs that wait for some
ROWS: tuple[tuple[str, Callable[[RunOutcome], str]], ...] = (
    ("step time", lambda outcome: f"{outcome.step_s:.3g} s"),
    ("trained", lambda outcome: f"{outcome.trained_tokens_per_s:,.0f} tokens/s"),
    ("generated", lambda outcome: f"{outcome.generated_tokens_per_s:,.0f} tokens/s"),
    ("trainer waits", lambda outcome: f"{outcome.idle['trainer']:.1%}"),
    ("generators wait", lambda outcome: f"{outcome.idle['generator']:.1%}"),
    (ENVIRONMENTS, lambda outcome: f"{outcome.idle.get(FOR_ENVIRONMENTS, 0.0):.1%}"),
    ("staleness, mean", lambda outcome: f"{outcome.staleness_mean:.2f} steps"),
    ("staleness, most", lambda outcome: f"{outcome.staleness_max} steps"),
)


def show(found: WhatIf, console: Console) -> None:
    """Print the table, the histograms of staleness, and a verdict."""
    columns = {"measured": found.measured, "simulated": found.as_it_was, "what if": found.changed}
    if not found.is_changed:
        del columns["what if"]
    console.print(f"{found.run}: {found.measured.steps} steps measured", highlight=False, soft_wrap=True)
    if found.is_changed:
        words = [f"{name} = {value}" for name, value in flat(found.overrides).items()]
        words += [] if found.reward_s is None else [f"reward = {found.reward_s:g} s a completion"]
        words += [f"{name} = {value:g}" for name, value in asdict(found.turns).items() if value is not None]
        console.print(f"what if: {', '.join(words)}", highlight=False, soft_wrap=True, markup=False)
    table = Table("", *columns, show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    has_environments = any(FOR_ENVIRONMENTS in outcome.idle for outcome in columns.values())
    for name, text in ROWS:
        if name != ENVIRONMENTS or has_environments:
            table.add_row(name, *(text(outcome) for outcome in columns.values()))
    for lag in sorted({lag for outcome in columns.values() for lag in outcome.staleness}):
        table.add_row(f"tokens {lag} stale", *(_share(outcome, lag) for outcome in columns.values()))
    console.print(table)
    console.print(verdict(found), highlight=False, soft_wrap=True, markup=False)


def verdict(found: WhatIf) -> str:
    """Summarise the change in one sentence, and its reliability in another."""
    error = found.as_it_was.step_s / found.measured.step_s - 1
    side = "above" if error > 0 else "below"
    trust = f"The simulation of the run as it was is {abs(error):.0%} {side} its step time."
    if not found.is_changed:
        return trust
    was, now = found.as_it_was, found.changed
    # By tokens, as a step may have another number of them now.
    ratio = now.trained_tokens_per_s / max(was.trained_tokens_per_s, 1e-9)
    pace = f"{ratio - 1:.0%} more" if ratio >= 1 else f"{1 - ratio:.0%} fewer"
    stale = now.staleness_mean - was.staleness_mean
    if abs(stale) < LEAST_STALENESS:
        return f"{pace} tokens trained per second, as stale in the mean. {trust}"
    return f"{pace} tokens trained per second, {abs(stale):.2f} steps {'staler' if stale > 0 else 'fresher'}. {trust}"


def _share(outcome: RunOutcome, lag: int) -> str:
    total = sum(outcome.staleness.values())
    share = outcome.staleness.get(lag, 0) / total if total else 0.0
    return f"{'█' * round(BAR * share)} {share:4.0%}"
