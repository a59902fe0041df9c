"""The best configurations of a model and its work on a cluster, and the reasons why they are.

    1. `search.py` lists everything that fits, and finds the best division for each staleness bound k.
    2. A rehearsal runs the real schedule in virtual time with the best one for each k, and for each row of the table:
       waiting and staleness depend on the bound and on the longest completions, and only the schedule tells how.
    3. The smallest k whose step is within 2% of the best one is recommended: fresher data costs nothing there.

`cpu.py` answers the same question for the cores of one machine without GPUs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any, get_args

import numpy as np

from slipstream.controller.policies import make_policy
from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.core.run_log import ScheduleConfig
from slipstream.plan.cost_model import CostModel
from slipstream.plan.layouts import AsynchronousPlan, Frees, Parts, SynchronousPlan, Workload
from slipstream.plan.lengths import WithTurns
from slipstream.plan.pipeline import MOST_STAGES
from slipstream.plan.reasons import against_synchronous, constraints, limits, losses, misfit_line, staleness
from slipstream.plan.search import (
    BESIDE,
    Found,
    Misfit,
    Search,
    Signature,
    Space,
    default_space,
    generator_layouts,
    trainer_layouts,
)
from slipstream.plan.simulated_run import Batch, Costs, MadeUp, Simulated, SimulatedSetup, SimulatedWorkload
from slipstream.plan.simulator import simulate

STALENESS = (1, 2, 4, 8, 16)  # bounds that are tried, up to the largest one allowed
CLOSE = 1.02  # step times within this factor of the best one are as good
STEPS_IN_TURNS = 6  # steps of a rehearsal without overlap: there is no pipeline that would have to fill
SAME = 1.005  # step times whose quotient is less are the same
MOST_DEVICES = 1 << 14  # the largest cluster that is tried in search of one that is large enough
FREES: tuple[Frees, ...] = get_args(Frees)
STEPS, LEAST_STEPS = 14, 6  # looked at: so many less the bound, as more hangs on single completions where it is small
NEVER_WAITS = 0.01  # idle share below which the trainer limits
SEED = 0


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
    steps = steps if steps or max_staleness else STEPS_IN_TURNS
    found = run_schedule(setup, costs, model.workload, max_staleness, steps=steps)
    others = {name: side.total for name, side in model.asynchronous(plan).sides.items() if name in BESIDE}
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
        capacity=max(workload.open_on(setup.slots), group) + group,
    )
    if work is None:
        drawn = workload.lengths.drawn(SEED, config.steps * config.groups_per_step, group)
        work = MadeUp(lengths=drawn.__getitem__, prompt_tokens=round(workload.lengths.prompt_mean))
    if workload.turns.is_set:
        work = WithTurns(work, workload.turns, SEED)
    window = (first, last)
    return simulate(make_policy("oldest_first", config), setup, work, costs, seed=SEED, window=window)


def rehearsed(found: Simulated, max_staleness: int, scorers_s: Mapping[str, float] = MappingProxyType({})) -> Rehearsed:
    """Extrapolate a window to all steps; `scorers_s` are the seconds of work that other executors have of each.

    In the long run what is generated is trained. So where the trainer waits, a window's tokens are counted where they
    are made, which is even, and not where they are taken, which a few long completions delay. Then a short window says
    what a long one does, to a few per cent (`benchmarks/rehearsal.py`).
    """
    outcome, batches = found.outcome, [step.batch for step in found.timed]
    trained = sum(batch.completion_tokens - batch.given_tokens for batch in batches)
    step_s = outcome.step_s
    if outcome.idle["trainer"] > NEVER_WAITS and found.generated_tokens:
        step_s *= trained / found.generated_tokens
    busy_s = (1 - outcome.idle["trainer"]) * outcome.step_s
    idle = outcome.idle | {"trainer": max(0.0, 1 - busy_s / step_s)}
    return Rehearsed(
        max_staleness=max_staleness,
        step_s=step_s,
        tokens_per_s=trained / len(found.timed) / step_s,
        idle=idle | {name: max(0.0, 1 - seconds / step_s) for name, seconds in scorers_s.items()},
        staleness_mean=outcome.staleness_mean,
        staleness_max=outcome.staleness_max,
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
    step = (model if plan.critic is None else model.without_critic).train_step(plan.trainer)
    fixed_s = step["optimizer"] + step["serial"]
    reference_s = 0.0
    if workload.reference and plan.reference is None:
        reference_s = model.reference_pass(plan.trainer).total
    given = workload.turns.given_mean  # environments' tokens, which a batch's completions have in them
    mean_tokens = workload.groups * lengths.prompt_mean + workload.rollouts * (lengths.mean + given)

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
        behind_s = scored_s * plan.reference.copies / workload.rollouts
    if workload.reward_model is None or plan.reward_model is None:
        return 0.0, 0, behind_s
    scored_s = model.scoring(workload.reward_model, plan.reward_model, has_head=False).total
    return scored_s * plan.reward_model.copies / workload.rollouts, plan.reward_model.copies, behind_s


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A configuration, and its rehearsal under the bound it was found for."""

    found: Found
    rehearsed: Rehearsed

    @property
    def plan(self) -> AsynchronousPlan:
        return self.found.side_by_side


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An answer. `rows`: the best configurations under the recommended bound, best first; `by_staleness`: the best one
    for each bound that was tried, for k = 0 of those found for k = 1; `synchronous`: the best one whose executors take
    turns on the same devices; `usable_bytes`: of one of the devices, or of a machine with so many cores."""

    workload: Workload
    num_devices: int
    usable_bytes: float
    rows: tuple[PlanRow, ...]
    by_staleness: tuple[PlanRow, ...]
    synchronous: Found | None
    misfits: tuple[Misfit, ...]
    why: tuple[str, ...]

    @property
    def best(self) -> PlanRow:
        return self.rows[0]

    @property
    def max_staleness(self) -> int:
        """The recommended bound: the smallest one within 2% of the best step time."""
        return self.best.rehearsed.max_staleness


def bounds_up_to(largest: int) -> tuple[int, ...]:
    """Return those of STALENESS below `largest`, and `largest`."""
    return tuple(sorted({bound for bound in STALENESS if bound < largest} | {largest}))


def recommended(steps_s: Mapping[int, float]) -> int:
    """Return the smallest bound whose step takes at most 2% longer than the shortest."""
    best_s = min(steps_s.values())
    return min(bound for bound, seconds in steps_s.items() if seconds <= CLOSE * best_s)


def ranked(rows: Iterable[PlanRow]) -> tuple[PlanRow, ...]:
    """Sort by step time; where it differs by less than half a percent, by staleness."""

    def key(row: PlanRow) -> tuple[int, float]:
        return round(math.log(row.rehearsed.step_s) / math.log(SAME)), row.rehearsed.staleness_mean

    return tuple(sorted(rows, key=key))


def steps_of(rows: Iterable[PlanRow]) -> dict[int, float]:
    """Return the seconds of a step by staleness bound."""
    return {row.rehearsed.max_staleness: row.rehearsed.step_s for row in rows}


def best_rows(
    tables: Mapping[int, Sequence[Found]], rehearsed: Callable[[Found], Rehearsed], num_rows: int
) -> tuple[tuple[PlanRow, ...], tuple[PlanRow, ...]]:
    """Return the best configurations under the recommended bound, and the best one for each bound.

    `tables` has what was found for each bound, fastest first by the cost model; the first `num_rows` are rehearsed.
    """

    def row(found: Found) -> PlanRow:
        return PlanRow(found=found, rehearsed=rehearsed(found))

    rows = {bound: ranked(map(row, table[:num_rows])) for bound, table in tables.items()}
    best = tuple(of_bound[0] for of_bound in rows.values())
    return rows[recommended(steps_of(best))], best


def plan_for_cluster(
    model: CostModel,
    *,
    precisions: Sequence[Precision] = ("bfloat16",),
    max_staleness: int = 8,
    num_rows: int = 3,
    max_stages: int = MOST_STAGES,
) -> Plan:
    """Return the best plan for `model`'s cluster under bounds of at most `max_staleness` (1 or more) steps.

    ConfigError where nothing fits, with the number of devices on which something would.
    """
    place = model.model, model.cluster, model.workload
    space = default_space(*place, precisions=precisions, max_stages=max_stages)
    search = Search(model, space)
    tables = {bound: worth_staging(search, bound) for bound in bounds_up_to(max_staleness)}
    if not any(tables.values()):
        raise _too_small(model, search, precisions, max_stages)
    found = {bound: list(table.values()) for bound, table in tables.items()}
    # Executors on devices of their own, of which one works at a time.
    in_turns = [replace(one, max_staleness=0, longest_s=0.0) for one in found[1]]
    rows, by_staleness = best_rows(
        {0: in_turns} | found, lambda one: rehearse(model, one.side_by_side, one.max_staleness), num_rows
    )
    chosen, synchronous = rows[0].found, best_synchronous(model, space)
    why = [
        *limits(chosen),
        *constraints(model, space.slots, chosen),
        losses(search, chosen, tables.get(chosen.max_staleness, {})),
        staleness(steps_of(by_staleness), chosen.max_staleness),
        against_synchronous(rows[0].rehearsed.step_s, synchronous),
    ]
    return Plan(
        workload=model.workload,
        num_devices=model.cluster.num_devices,
        usable_bytes=model.usable_bytes,
        rows=rows,
        by_staleness=by_staleness,
        synchronous=synchronous,
        misfits=tuple(search.misfits),
        why=tuple(line for line in why if line is not None),
    )


def worth_staging(search: Search, max_staleness: int) -> dict[Signature, Found]:
    """Return the best configurations under a bound, flat ones unless others make a step more than 2% shorter."""
    flat, staged = (search.asynchronous(max_staleness, flat=flat) for flat in (True, False))
    best_s = [next((found.seconds for found in table.values()), math.inf) for table in (flat, staged)]
    return flat if best_s[0] <= CLOSE * best_s[1] else staged


def _too_small(model: CostModel, search: Search, precisions: Sequence[Precision], max_stages: int) -> ConfigError:
    """Name the executor that is furthest from fitting, and a cluster that is large enough."""
    cluster, usable = model.cluster, model.usable_bytes
    by_size = sorted(search.misfits, key=lambda misfit: misfit.memory.total)
    nearest = {misfit.executor: misfit for misfit in reversed(by_size)}
    worst = max(nearest.values(), key=lambda misfit: misfit.memory.total, default=None)
    return ConfigError(
        f"this model does not fit on {cluster.num_devices} {cluster.device.name}",
        got="executors that need more devices than there are" if worst is None else misfit_line(worst, usable),
        allowed=_large_enough(model, precisions, max_stages),
        hint="lower the longest completion or prompt, or take GPUs with more memory",
    )


def _large_enough(model: CostModel, precisions: Sequence[Precision], max_stages: int) -> str:
    """Name the smallest of ever larger clusters on which something fits."""
    per_node = model.cluster.device.devices_per_node
    count = model.cluster.num_devices
    while count < MOST_DEVICES:
        count = count * 2 if count < per_node else (count // per_node + max(1, count // per_node // 4)) * per_node
        larger = CostModel(model.model, replace(model.cluster, num_devices=count), model.workload, model.efficiency)
        place = larger.model, larger.cluster, larger.workload
        space = default_space(*place, precisions=precisions, max_stages=max_stages)
        if Search(larger, space).asynchronous(max_staleness=1):
            return f"{count} of them, for one"
    return f"more than {MOST_DEVICES} of them"


def best_synchronous(costs: CostModel, space: Space) -> Found | None:
    """Return the fastest configuration of `space` with both sides on the same devices, in turns; None where none fits.

        minimise  training(trainer, frees) + generation(generator)    subject to  the memory of both phases <= M0

    LlamaRL's baseline has one degree of parallelism for both and keeps everything in memory (section 7). This one may
    divide the model differently in each phase, and give up what the other phase does not need. Time is a sum and memory
    is not, so pairs are taken in the order of their sum, and the first one that fits is the best.

    Stages and parts of sequences only where they make a step more than 2% shorter.
    """
    best = _best_of(costs, space.flat, math.inf)
    if space == space.flat:
        return best
    return _best_of(costs, space, math.inf if best is None else best.seconds / CLOSE) or best


def _best_of(costs: CostModel, space: Space, below_s: float) -> Found | None:
    """Return the fastest configuration of `space` that takes less than `below_s`."""
    best = None
    for devices in space.synchronous_devices:
        found = _best_on(costs, space, devices, below_s)
        if found is not None:
            best, below_s = found, found.seconds
    return best


@dataclass(frozen=True)
class SideInTurns:
    """A layout of one side of a co-located plan: its seconds, and its bytes while the devices train and generate."""

    seconds: float
    bytes_of: Mapping[str, float]
    layout: Any
    frees: Frees


def _turns(seconds: float, layout: Any, frees: Frees, memory: Mapping[str, Parts]) -> SideInTurns:
    return SideInTurns(seconds, {phase: parts.total for phase, parts in memory.items()}, layout, frees)


def undominated(turns: Iterable[SideInTurns]) -> list[SideInTurns]:
    """Return those of `turns`, by rising seconds, that no earlier one with the same `frees` needs at most the bytes of.

    The others are in no best pair: memory of a pair is a sum, so what fits with one of them fits with that earlier one,
    which takes no longer.
    """
    kept: list[SideInTurns] = []
    for turn in sorted(turns, key=lambda one: one.seconds):
        if not any(
            one.frees == turn.frees and all(one.bytes_of[phase] <= held for phase, held in turn.bytes_of.items())
            for one in kept
        ):
            kept.append(turn)
    return kept


def _best_on(costs: CostModel, space: Space, devices: int, below_s: float) -> Found | None:
    """Return the best pair that takes less than `below_s`: layouts that cannot be in one are skipped, untimed."""
    layouts = [
        (costs.train_floor_s(layout), layout)
        for degree in space.trainer_parallel
        if devices % degree == 0
        for layout in trainer_layouts(costs, space, devices, degree)
    ]
    least_s = min((floor_s for floor_s, _ in layouts), default=math.inf)
    generators = [
        (costs.generating_turn(layout).total, layout)
        for degree, precision in itertools.product(space.generator_parallel, space.generator_precisions)
        if devices % degree == 0
        for layout in generator_layouts(space, devices, degree, precision)
        if costs.fits(costs.generator_memory(layout, shadow=False))
        and least_s + costs.generating_floor_s(layout) < below_s
    ]
    least_s = min((seconds for seconds, _ in generators), default=math.inf)
    trainers = [
        layout
        for floor_s, layout in layouts
        if floor_s + least_s < below_s and costs.fits(costs.train_memory(layout, served=None).without("reference"))
    ]
    turns = undominated(
        _turns(costs.training_turn(layout, frees).total, layout, frees, costs.colocated_trainer(layout, frees))
        for layout in trainers
        for frees in FREES
    )
    others = undominated(
        _turns(seconds, layout, frees, costs.colocated_generator(layout, frees))
        for seconds, layout in generators
        for frees in FREES
    )
    sums = np.add.outer([turn.seconds for turn in turns], [other.seconds for other in others])
    for place in np.argsort(sums, axis=None, kind="stable").tolist():
        turn, other = turns[place // len(others)], others[place % len(others)]
        if sums.flat[place] >= below_s:
            return None
        plan = SynchronousPlan(trainer=turn.layout, generator=other.layout, frees=turn.frees)
        if turn.frees == other.frees and costs.fits(*(memory := costs.colocated_memory(plan)).values()):
            step = costs.synchronous(plan)
            assert math.isclose(step.seconds, sums.flat[place], rel_tol=1e-6), "a step takes both turns"
            return Found(plan=plan, step=step, memory=memory)
    return None
