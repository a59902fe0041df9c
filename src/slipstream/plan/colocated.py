"""The best synchronous configuration: trainer and generator on the same devices, one after the other.

    minimise  training(trainer, frees) + generation(generator)    subject to  the memory of both phases <= M0

LlamaRL's baseline has one degree of parallelism for both and keeps everything in memory (section 7). This one may
divide the model differently in each phase, and give up what the other phase does not need: the strongest baseline there
is, so that an asynchronous plan is not compared with a weak one.

Time is a sum and memory is not, so pairs are taken in the order of their sum, from a heap, and the first one that fits
is the best. Layouts that would not fit with nothing beside them are left out before.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TypeVar

from slipstream.plan.cost_model import CostModel
from slipstream.plan.layouts import Frees, SynchronousPlan
from slipstream.plan.search import Found, Space, generator_layouts, trainer_layouts

FREES: tuple[Frees, ...] = ("nothing", "gradients_and_activations", "optimizer_too")

Item = TypeVar("Item")
Other = TypeVar("Other")


def best_synchronous(costs: CostModel, space: Space) -> Found | None:
    """Return the fastest co-located configuration of `space`; None where nothing fits."""
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
