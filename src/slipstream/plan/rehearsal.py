"""A plan in virtual time: the real schedule with the plan's layout, the cost model's times and the lengths' tail.

The cost model gives the seconds of a step in which no executor waits. Waiting and staleness depend on the bound k and
on the longest completions, which only the schedule itself takes into account: `simulator.py` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

from slipstream.controller.policies import make_policy
from slipstream.core.run_log import ScheduleConfig
from slipstream.plan.cost_model import CostModel
from slipstream.plan.layouts import AsynchronousPlan, Workload
from slipstream.plan.simulated_run import Batch, Costs, MadeUp, Simulated, SimulatedSetup, SimulatedWorkload
from slipstream.plan.simulator import simulate

STEPS, LEAST_STEPS = 14, 6  # looked at: so many less the bound, as more hangs on single completions where it is small
NEVER_WAITS = 0.01  # idle share below which the trainer limits
SEED = 0
SCORERS = ("reference", "reward_model")


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A plan's steps under the bound `max_staleness`, by the schedule. `idle`: shares of the step by executor."""

    max_staleness: int
    step_s: float
    tokens_per_s: float
    idle: dict[str, float]
    staleness_mean: float
    staleness_max: int


def rehearse(model: CostModel, plan: AsynchronousPlan, max_staleness: int, *, steps: int | None = None) -> Rehearsed:
    """Simulate `steps` steps of `plan` in the middle of a run, by default as many as are enough."""
    setup, costs = simulated_plan(model, plan)
    found = run_schedule(setup, costs, model.workload, max_staleness, steps=steps)
    others = {name: side.total for name, side in model.asynchronous(plan).sides.items() if name in SCORERS}
    return rehearsed(found, max_staleness, others)


def simulated_plan(model: CostModel, plan: AsynchronousPlan) -> tuple[SimulatedSetup, Costs]:
    """Return the simulator's layout of `plan`, and its seconds by the cost model."""
    sync = model.weight_sync(plan.trainer, plan.generator)
    token_s = model.prefill(plan.generator, prompts=1.0).total / model.workload.lengths.prompt_mean
    scoring_s, workers, behind_s = _scoring(model, plan)
    costs = Costs(
        decode=_decode(model, plan),
        prefill=lambda _, tokens, __: tokens * token_s,
        train=_train(model, plan),
        publish_s=sync["stage"],
        stage_s=sync["transfer"],
        swap_s=sync["pause"],
        score_s=scoring_s,
        from_rewards_s=behind_s,
    )
    return SimulatedSetup(replicas=plan.generator.replicas, slots=plan.generator.slots, workers=workers), costs


def run_schedule(
    setup: SimulatedSetup,
    costs: Costs,
    workload: Workload,
    max_staleness: int,
    work: SimulatedWorkload | None = None,
    *,
    steps: int | None = None,
) -> Simulated:
    """Simulate a window of steady steps with this layout and these times, of `work` or of lengths as `workload`'s."""
    first = max_staleness + 2  # what was admitted under version 0 is trained by then
    last = first + (steps or max(LEAST_STEPS, STEPS - max_staleness))
    group = workload.group_size
    config = ScheduleConfig(
        groups_per_step=workload.groups,
        completions_per_group=group,
        max_staleness=max_staleness,
        reorder_window=1,
        steps=last + max_staleness + 2,
        capacity=max(setup.slots, group) + group,
    )
    if work is None:
        drawn = workload.lengths.drawn(SEED, config.steps * config.groups_per_step, group)
        work = MadeUp(lengths=drawn.__getitem__, prompt_tokens=round(workload.lengths.prompt_mean))
    window = (first, last)
    return simulate(make_policy("oldest_first", config), setup, work, costs, seed=SEED, window=window)


def rehearsed(found: Simulated, max_staleness: int, scorers_s: Mapping[str, float] = MappingProxyType({})) -> Rehearsed:
    """Extrapolate a window to all steps; `scorers_s` are the seconds of work that other executors have of each.

    In the long run what is generated is trained. So where the trainer waits, a window's tokens are counted where they
    are made, which is even, and not where they are taken, which a few long completions delay. Then a short window says
    what a long one does, to a few per cent (`benchmarks/rehearsal.py`).
    """
    step_s, trained = found.step_s, sum(step.batch.completion_tokens for step in found.timed)
    if found.trainer_idle_frac > NEVER_WAITS and found.generated_tokens:
        step_s *= trained / found.generated_tokens
    busy_s = (1 - found.trainer_idle_frac) * found.step_s
    idle = {"trainer": max(0.0, 1 - busy_s / step_s), "generator": found.generator_idle_frac}
    return Rehearsed(
        max_staleness=max_staleness,
        step_s=step_s,
        tokens_per_s=trained / len(found.timed) / step_s,
        idle=idle | {name: max(0.0, 1 - seconds / step_s) for name, seconds in scorers_s.items()},
        staleness_mean=found.staleness_mean,
        staleness_max=found.staleness_max,
    )


def _decode(model: CostModel, plan: AsynchronousPlan) -> Callable[[int, int, float], float]:
    """Return a step's time, which is linear in the tokens that its rows see together."""

    @cache
    def line(rows: int) -> tuple[float, float]:
        start = model.decode_step(plan.generator, live=rows, context=0.0).total
        return start, (model.decode_step(plan.generator, live=rows, context=1000.0).total - start) / (1000.0 * rows)

    def decode(_: int, rows: int, context: float) -> float:
        start, slope = line(rows)
        return start + slope * context

    return decode


def _train(model: CostModel, plan: AsynchronousPlan) -> Callable[[Batch], dict[str, float]]:
    """Return a step's seconds by state: those of its passes grow with its tokens, those of its updates do not."""
    workload, lengths = model.workload, model.workload.lengths
    step = model.train_step(plan.trainer)
    fixed_s = step["optimizer"] + step["serial"]
    reference_s = 0.0
    if workload.reference and plan.reference is None:
        reference_s = model.reference_pass(plan.trainer).total
    mean_tokens = workload.groups * lengths.prompt_mean + workload.rollouts * lengths.mean

    def train(batch: Batch) -> dict[str, float]:
        share = (batch.prompt_tokens + batch.completion_tokens) / mean_tokens
        states = {"forward_backward": share * (step.total - fixed_s), "optimizer": fixed_s}
        return states | ({"reference": share * reference_s} if reference_s else {})

    return train


def _scoring(model: CostModel, plan: AsynchronousPlan) -> tuple[float, int, float]:
    """Return the seconds of a copy of the reward model for a completion, the number of copies, and seconds after it.

    Without a reward model a completion is scored at once: functions run beside. An own reference is a station more.
    """
    workload, behind_s = model.workload, 0.0
    if workload.reference and plan.reference is not None:
        scored_s = model.scoring(model.model, plan.reference).total
        behind_s = scored_s * plan.reference.devices / workload.rollouts
    if workload.reward_model is None or plan.reward_model is None:
        return 0.0, 0, behind_s
    scored_s = model.scoring(workload.reward_model, plan.reward_model).total
    return scored_s * plan.reward_model.devices / workload.rollouts, plan.reward_model.devices, behind_s
