"""The best configurations of a model and its work on a cluster, and the reasons why they are.

    1. `search.py` lists everything that fits, and finds the best division for each staleness bound k.
    2. `rehearsal.py` runs the real schedule with the best one for each k, and for each row of the table.
    3. The smallest k whose step is within 2% of the best one is recommended: fresher data costs nothing there.

`cpu.py` answers the same question for the cores of one machine without GPUs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TypeVar

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.plan.cost_model import CostModel
from slipstream.plan.layouts import AsynchronousPlan, Frees, SynchronousPlan, Workload
from slipstream.plan.reasons import against_synchronous, constraints, limits, losses, misfit_line, staleness
from slipstream.plan.rehearsal import Rehearsed, rehearse
from slipstream.plan.search import Found, Misfit, Search, Space, default_space, generator_layouts, trainer_layouts

STALENESS = (1, 2, 4, 8, 16)  # bounds that are tried, up to the largest one allowed
CLOSE = 1.02  # step times within this factor of the best one are as good
STEPS_IN_TURNS = 6  # steps of a rehearsal without overlap: there is no pipeline that would have to fill
SAME = 1.005  # step times whose quotient is less are the same
MOST_DEVICES = 1 << 14  # the largest cluster that is tried in search of one that is large enough
FREES: tuple[Frees, ...] = ("nothing", "gradients_and_activations", "optimizer_too")

Item = TypeVar("Item")
Other = TypeVar("Other")


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
    for each bound that was tried, and that for k = 1 with k = 0; `synchronous`: the best one whose executors take turns
    on the same devices."""

    workload: Workload
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


def plan_for_cluster(
    model: CostModel,
    *,
    precisions: Sequence[Precision] = ("bfloat16",),
    max_staleness: int = 8,
    num_rows: int = 3,
    space: Space | None = None,
) -> Plan:
    """Return the best plan for `model`'s cluster under bounds of at most `max_staleness` (1 or more) steps.

    ConfigError where nothing fits, with the number of devices on which something would.
    """
    space = space or default_space(model.model, model.cluster, model.workload, precisions=precisions)
    search = Search(model, space)
    tables = {bound: search.asynchronous(bound) for bound in bounds_up_to(max_staleness)}
    if not any(tables.values()):
        raise _too_small(model, search, precisions)
    best = {bound: _row(model, next(iter(table.values()))) for bound, table in tables.items()}
    best = {0: _in_turns(model, best[1].found)} | best
    steps_s = {bound: row.rehearsed.step_s for bound, row in best.items()}
    bound = recommended(steps_s)
    others = [_row(model, found) for found in list(tables.get(bound, {}).values())[1:num_rows]]
    rows = ranked((best[bound], *others))
    chosen, synchronous = rows[0].found, best_synchronous(model, space)
    why = [
        *limits(chosen),
        *constraints(model, space.slots, chosen),
        losses(search, chosen, tables.get(bound, {})),
        staleness(steps_s, bound),
        against_synchronous(rows[0].rehearsed.step_s, synchronous),
    ]
    return Plan(
        workload=model.workload,
        rows=rows,
        by_staleness=tuple(best.values()),
        synchronous=synchronous,
        misfits=tuple(search.misfits),
        why=tuple(line for line in why if line is not None),
    )


def _row(model: CostModel, found: Found) -> PlanRow:
    return PlanRow(found=found, rehearsed=rehearse(model, found.side_by_side, found.max_staleness))


def _in_turns(model: CostModel, found: Found) -> PlanRow:
    """Return the layout for k = 1 with k = 0: executors on devices of their own, of which one works at a time."""
    turns = rehearse(model, found.side_by_side, 0, steps=STEPS_IN_TURNS)
    return PlanRow(found=replace(found, max_staleness=0, longest_s=0.0), rehearsed=turns)


def _too_small(model: CostModel, search: Search, precisions: Sequence[Precision]) -> ConfigError:
    """Name the executor that is furthest from fitting, and a cluster that is large enough."""
    cluster, usable = model.cluster, model.usable_bytes
    nearest: dict[str, Misfit] = {}
    for misfit in search.misfits:
        if misfit.executor not in nearest or misfit.short_bytes < nearest[misfit.executor].short_bytes:
            nearest[misfit.executor] = misfit
    worst = max(nearest.values(), key=lambda misfit: misfit.short_bytes, default=None)
    return ConfigError(
        f"this model does not fit on {cluster.num_devices} {cluster.device.name}",
        got="executors that need more devices than there are" if worst is None else misfit_line(worst, usable),
        allowed=_large_enough(model, precisions),
        hint="lower the longest completion or prompt, or take GPUs with more memory",
    )


def _large_enough(model: CostModel, precisions: Sequence[Precision]) -> str:
    """Name the smallest of ever larger clusters on which something fits."""
    per_node = model.cluster.device.devices_per_node
    count = model.cluster.num_devices
    while count < MOST_DEVICES:
        count = count * 2 if count < per_node else (count // per_node + max(1, count // per_node // 4)) * per_node
        larger = CostModel(model.model, replace(model.cluster, num_devices=count), model.workload, model.efficiency)
        space = default_space(larger.model, larger.cluster, larger.workload, precisions=precisions)
        if Search(larger, space).asynchronous(max_staleness=1):
            return f"{count} of them, for one"
    return f"more than {MOST_DEVICES} of them"


def best_synchronous(costs: CostModel, space: Space) -> Found | None:
    """Return the fastest configuration of `space` with both sides on the same devices, in turns; None where none fits.

        minimise  training(trainer, frees) + generation(generator)    subject to  the memory of both phases <= M0

    LlamaRL's baseline has one degree of parallelism for both and keeps everything in memory (section 7). This one may
    divide the model differently in each phase, and give up what the other phase does not need: the strongest baseline
    there is. Time is a sum and memory is not, so pairs are taken in the order of their sum, from a heap, and the first
    one that fits is the best; layouts that would not fit with nothing beside them are left out before.
    """
    found = [_best_on(costs, space, devices) for devices in space.synchronous_devices]
    return min((one for one in found if one is not None), key=lambda one: one.seconds, default=None)


def _best_on(costs: CostModel, space: Space, devices: int) -> Found | None:
    trainers = [
        layout
        for degree in space.trainer_parallel
        if devices % degree == 0
        for layout in trainer_layouts(costs.workload, space, devices, degree)
        if costs.fits(costs.train_memory(layout, served=None).without("reference"))
    ]
    generators = [
        layout
        for degree, precision in itertools.product(space.generator_parallel, space.generator_precisions)
        if devices % degree == 0
        for layout in generator_layouts(space, devices, degree, precision)
        if costs.fits(costs.generator_memory(layout, shadow=False))
    ]
    turns = [(costs.training_turn(layout, frees).total, (layout, frees)) for layout in trainers for frees in FREES]
    others = [(costs.generating_turn(layout).total, layout) for layout in generators]
    for seconds, (trainer, frees), generator in _pairs(turns, others):
        plan = SynchronousPlan(trainer=trainer, generator=generator, frees=frees)
        memory = costs.colocated_memory(plan)
        if costs.fits(*memory.values()):
            step = costs.synchronous(plan)
            assert math.isclose(step.seconds, seconds, rel_tol=1e-6), "a step takes both turns"
            return Found(plan=plan, step=step, memory=memory)
    return None


def _pairs(
    first: Sequence[tuple[float, Item]], second: Sequence[tuple[float, Other]]
) -> Iterator[tuple[float, Item, Other]]:
    """Yield all pairs by the sum of their seconds, lowest first."""
    first, second = sorted(first, key=itemgetter(0)), sorted(second, key=itemgetter(0))
    heap = [(first[0][0] + second[0][0], 0, 0)] if first and second else []
    while heap:
        seconds, i, j = heapq.heappop(heap)
        yield seconds, first[i][1], second[j][1]
        if j + 1 < len(second):
            heapq.heappush(heap, (first[i][0] + second[j + 1][0], i, j + 1))
        if j == 0 and i + 1 < len(first):
            heapq.heappush(heap, (first[i + 1][0] + second[0][0], i + 1, 0))
