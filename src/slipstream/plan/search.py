"""The best division of a cluster over all executors, and the best synchronous configuration to compare it with.

    asynchronous   minimise  max_e seconds_e(layout_e)   subject to  sum_e devices_e <= G0,   memory_e(layout_e) <= M0
    synchronous    minimise  training + generation        subject to  memory of both on the same devices <= M0

over integer degrees of parallelism m, bounded microbatches b_t and decode concurrencies b_g, recomputation, when
gradients are summed, the precision of the generators, and where the reference lies: LlamaRL's problems (7) and (8) with
what it leaves out (docs/planning.md). Nothing is approximated. Side by side, executors share only devices, and the
precision that versions are published in; so for each precision every executor's choices are listed, and
`split.best_split` finds the division exactly. One after the other: `colocated.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slipstream.core.errors import ConfigError
from slipstream.core.sections import Precision
from slipstream.models.config import TransformerConfig, local_config
from slipstream.plan.hardware import Cluster
from slipstream.plan.layouts import (
    AsynchronousPlan,
    Frees,
    GeneratorLayout,
    Parts,
    ScorerLayout,
    StepTime,
    SynchronousPlan,
    TrainerLayout,
    Workload,
)
from slipstream.plan.split import Choice, Frontier, best_split

FINE_CLUSTER = 64
"""Devices up to which executors are given any number of them; in larger clusters whole nodes beyond the first."""
ROW_MULTIPLE = 8
"""Of decode slots (`generator.num_slots`)."""
_SLOTS = (*range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1536, 2048)
_ANY_TRAINER = TrainerLayout(devices=1, tensor_parallel=1, microbatch=1)
_ANY_GENERATOR = GeneratorLayout(devices=1, tensor_parallel=1, slots=ROW_MULTIPLE)


class Costs(Protocol):
    """What the search has to know of a configuration; `cost_model.CostModel` says it."""

    model: TransformerConfig
    cluster: Cluster
    workload: Workload

    def train_step(self, layout: TrainerLayout) -> Parts: ...
    def reference_pass(self, layout: TrainerLayout) -> Parts: ...
    def generation(self, layout: GeneratorLayout, *, waits_for_longest: bool) -> Parts: ...
    def scoring(self, model: TransformerConfig, layout: ScorerLayout) -> Parts: ...
    def weight_sync(self, trainer: TrainerLayout, generator: GeneratorLayout) -> Parts: ...
    def train_memory(self, layout: TrainerLayout, *, served: Precision | None = ...) -> Parts: ...
    def generator_memory(self, layout: GeneratorLayout, *, shadow: bool = ...) -> Parts: ...
    def scorer_memory(self, model: TransformerConfig, layout: ScorerLayout) -> Parts: ...
    def colocated_memory(self, plan: SynchronousPlan) -> Mapping[str, Parts]: ...
    @property
    def usable_bytes(self) -> float: ...
    def fits(self, *memory: Parts) -> bool: ...
    def asynchronous(self, plan: AsynchronousPlan) -> StepTime: ...
    def training_turn(self, layout: TrainerLayout, frees: Frees) -> Parts: ...
    def generating_turn(self, layout: GeneratorLayout) -> Parts: ...
    def synchronous(self, plan: SynchronousPlan) -> StepTime: ...


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is tried. `devices`: counts that an executor may get; `max_in_flight`: completions that may be live at once.

    The staleness bound k caps them: (k + 1) steps' worth are admitted beyond what is trained.
    """

    devices: tuple[int, ...]
    trainer_parallel: tuple[int, ...]
    generator_parallel: tuple[int, ...]
    microbatches: tuple[int, ...]
    slots: tuple[int, ...]
    max_in_flight: int
    trainer_precisions: tuple[Precision, ...] = ("bfloat16",)
    generator_precisions: tuple[Precision, ...] = ("bfloat16",)
    recompute: tuple[bool, ...] = (False, True)
    reduce_once: tuple[bool, ...] = (False, True)
    synchronous_devices: tuple[int, ...] = ()
    """Counts that trainer and generator may share, one after the other."""


def default_space(
    model: TransformerConfig,
    cluster: Cluster,
    workload: Workload,
    *,
    max_staleness: int,
    precisions: Sequence[Precision],
) -> Space:
    """All degrees by which the model's heads divide, within a node or over whole nodes; microbatches by powers of two,
    slots by multiples of eight up to 64 and by factors of at most 1.25 up to 1024."""
    parallel = tuple(_degrees(model, cluster))
    per_rank = math.ceil(workload.rollouts / workload.minibatches)
    microbatches = tuple(2**power for power in range(per_rank.bit_length() + 1) if 2**power < 2 * per_rank)
    in_flight = (max_staleness + 1) * workload.rollouts
    return Space(
        devices=tuple(_counts(cluster)),
        trainer_parallel=parallel,
        generator_parallel=parallel,
        microbatches=microbatches,
        slots=_SLOTS,
        max_in_flight=in_flight,
        generator_precisions=tuple(precisions),
        synchronous_devices=tuple(sorted({max(1, cluster.num_devices // 2**halvings) for halvings in range(4)})),
    )


def _degrees(model: TransformerConfig, cluster: Cluster) -> Iterator[int]:
    """Ranks that can share the model's layers and neither straddle a node's border nor leave the cluster."""
    per_node = cluster.device.devices_per_node
    for degree in range(1, min(cluster.num_devices, model.num_heads) + 1):
        if model.num_heads % degree or (per_node % degree and degree % per_node):
            continue
        try:
            local_config(model, degree)
        except ConfigError:
            continue
        yield degree


def _counts(cluster: Cluster) -> Iterator[int]:
    per_node = cluster.device.devices_per_node
    for count in range(1, cluster.num_devices + 1):
        if cluster.num_devices <= FINE_CLUSTER or count < per_node or count % per_node == 0:
            yield count


def trainer_layouts(workload: Workload, space: Space, devices: int, degree: int) -> Iterator[TrainerLayout]:
    """Those of `space` on so many devices; microbatches up to the first one that holds all of a rank's rollouts."""
    shards = devices // degree
    mine = math.ceil(workload.rollouts / shards / workload.minibatches)
    largest = min((size for size in space.microbatches if size >= mine), default=space.microbatches[-1])
    for precision, size, recompute, once in itertools.product(
        space.trainer_precisions, space.microbatches, space.recompute, space.reduce_once
    ):
        is_same = once and shards == 1 and False in space.reduce_once  # one rank has nothing to sum
        if size <= largest and not is_same:
            yield TrainerLayout(
                devices=devices,
                tensor_parallel=degree,
                microbatch=size,
                precision=precision,
                recompute=recompute,
                reduce_once=once,
            )


def generator_layouts(space: Space, devices: int, degree: int, precision: Precision) -> Iterator[GeneratorLayout]:
    """Those of `space` on so many devices; slots up to those that all completions in flight need."""
    most = math.ceil(space.max_in_flight / (devices // degree) / ROW_MULTIPLE) * ROW_MULTIPLE
    counts = [slots for slots in space.slots if slots < most]
    if most <= space.slots[-1]:
        counts.append(most)
    for slots in counts:
        yield GeneratorLayout(devices=devices, tensor_parallel=degree, slots=slots, precision=precision)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A configuration that fits: its layouts, its step, and the bytes on each executor's devices by what they hold."""

    plan: AsynchronousPlan | SynchronousPlan
    step: StepTime
    memory: Mapping[str, Parts]

    @property
    def seconds(self) -> float:
        return self.step.seconds


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """An executor of which no layout with this degree fits on `devices` or fewer; it does from `fits_from` on, if ever.

    `memory` is that of the layout on `devices` that comes closest, by `short_bytes`.
    """

    executor: str
    tensor_parallel: int
    precision: Precision
    devices: int
    memory: Parts
    short_bytes: float
    fits_from: int | None


@dataclass(frozen=True)
class Signature:
    """What tells configurations apart that are worth a row; all else is as good as it can be in each."""

    trainer_parallel: int
    generator_parallel: int
    precision: Precision
    own_reference: bool = False


@dataclass(frozen=True)
class _Option:
    layout: TrainerLayout | GeneratorLayout | ScorerLayout
    memory: Parts


@dataclass(frozen=True)
class _Listed:
    """The layouts of an executor that fit, by devices; and which did not, where some did not."""

    frontier: Frontier[_Option]
    misfit: Misfit | None


class Search:
    """Everything that fits of `space` on the cluster of `costs`, listed once."""

    def __init__(self, costs: Costs, space: Space) -> None:
        self.costs, self.space = costs, space
        workload = costs.workload
        self._train_s: dict[TrainerLayout, float] = {}
        self._trainers: dict[tuple[Precision, bool, int], _Listed] = {}
        self._generators: dict[tuple[Precision, int], _Listed] = {}
        self._scorers: dict[str, _Listed] = {}
        places = (False, True) if workload.reference else (False,)
        for precision in space.generator_precisions:
            for degree in space.generator_parallel:
                self._generators[precision, degree] = self._list_generators(precision, degree)
            for own, degree in itertools.product(places, space.trainer_parallel):
                self._trainers[precision, own, degree] = self._list_trainers(precision, degree, own_reference=own)
        if workload.reference:
            self._scorers["reference"] = self._list_scorers("reference", costs.model)
        if workload.reward_model is not None:
            self._scorers["reward_model"] = self._list_scorers("reward_model", workload.reward_model)

    @property
    def misfits(self) -> list[Misfit]:
        """What does not fit, of each executor, degree and precision."""
        listed = [*self._trainers.values(), *self._generators.values(), *self._scorers.values()]
        return [one.misfit for one in listed if one.misfit is not None]

    # Side by side

    def signatures(self) -> Iterator[Signature]:
        for precision, own_reference, trainer in self._trainers:
            for of, generator in self._generators:
                if of == precision:
                    yield Signature(trainer, generator, precision, own_reference)

    def asynchronous(self) -> dict[Signature, Found]:
        """The best configuration of every signature that has one, fastest first."""
        found = {signature: self.best_of(signature) for signature in self.signatures()}
        fitting = {signature: one for signature, one in found.items() if one is not None}
        return dict(sorted(fitting.items(), key=lambda item: _by_time(item[1])))

    def best_of(self, signature: Signature) -> Found | None:
        """The best configuration of this signature; None where nothing fits."""
        chosen = best_split(self._frontiers(signature), self.costs.cluster.num_devices)
        return None if chosen is None else self._found(chosen)

    def shifted(self, signature: Signature, found: Found, giver: str, taker: str) -> Found | None:
        """`found` with as many devices less for `giver` as it can do with at most, and what they are for `taker`."""
        frontiers = self._frontiers(signature)
        counts = {name: layout.devices for name, layout in executors(found.plan).items()}
        less = frontiers[giver].with_devices(counts[giver] - 1)
        if less is None:
            return None
        more = frontiers[taker].with_devices(counts[taker] + counts[giver] - less.devices)
        others = {name: frontiers[name].with_devices(count) for name, count in counts.items()}
        chosen = others | {giver: less, taker: more}
        return self._found({name: choice for name, choice in chosen.items() if choice is not None})

    def _frontiers(self, signature: Signature) -> dict[str, Frontier[_Option]]:
        key = signature.precision, signature.own_reference, signature.trainer_parallel
        listed = {
            "trainer": self._trainers[key],
            "generator": self._generators[signature.precision, signature.generator_parallel],
        }
        listed |= {
            name: scorers for name, scorers in self._scorers.items() if name != "reference" or signature.own_reference
        }
        return {name: one.frontier for name, one in listed.items()}

    def _found(self, chosen: Mapping[str, Choice[_Option]]) -> Found:
        layouts: dict[str, Any] = {name: choice.what.layout for name, choice in chosen.items()}
        plan = AsynchronousPlan(**layouts)
        step = self.costs.asynchronous(plan)
        listed_s = max(choice.seconds for choice in chosen.values())
        assert math.isclose(step.seconds, listed_s, rel_tol=1e-6), "a step takes what its slowest executor takes"
        return Found(plan=plan, step=step, memory={name: choice.what.memory for name, choice in chosen.items()})

    # What there is to choose from

    def _list_trainers(self, precision: Precision, degree: int, *, own_reference: bool) -> _Listed:
        costs = self.costs
        has_pass = costs.workload.reference and not own_reference

        def options(devices: int) -> Iterator[tuple[_Option, Callable[[], float]]]:
            for layout in trainer_layouts(costs.workload, self.space, devices, degree):
                memory = costs.train_memory(layout, served=precision)
                memory = memory.without("reference") if own_reference else memory

                def seconds(layout: TrainerLayout = layout) -> float:
                    reference_s = costs.reference_pass(layout).total if has_pass else 0.0
                    return self._seconds_of(layout) + reference_s + self._stage_s(layout, precision)

                yield _Option(layout, memory), seconds

        return self._listed("trainer", degree, precision, options)

    def _list_generators(self, precision: Precision, degree: int) -> _Listed:
        costs = self.costs

        def options(devices: int) -> Iterator[tuple[_Option, Callable[[], float]]]:
            for layout in generator_layouts(self.space, devices, degree, precision):

                def seconds(layout: GeneratorLayout = layout) -> float:
                    generating = costs.generation(layout, waits_for_longest=False)
                    return generating.total + costs.weight_sync(_ANY_TRAINER, layout)["pause"]

                yield _Option(layout, costs.generator_memory(layout)), seconds

        return self._listed("generator", degree, precision, options)

    def _list_scorers(self, name: str, model: TransformerConfig) -> _Listed:
        costs = self.costs

        def options(devices: int) -> Iterator[tuple[_Option, Callable[[], float]]]:
            layout = ScorerLayout(devices=devices)
            yield _Option(layout, costs.scorer_memory(model, layout)), lambda: costs.scoring(model, layout).total

        return self._listed(name, 1, ScorerLayout(devices=1).precision, options)

    def _listed(
        self,
        executor: str,
        degree: int,
        precision: Precision,
        options: Callable[[int], Iterable[tuple[_Option, Callable[[], float]]]],
    ) -> _Listed:
        """The fastest option that fits, for every number of devices; the closest one where none does."""
        choices: list[Choice[_Option]] = []
        closest: tuple[int, _Option] | None = None
        for devices in self.space.devices:
            if devices % degree:
                continue
            tried = list(options(devices))
            fitting = [(option, seconds) for option, seconds in tried if self.costs.fits(option.memory)]
            if fitting:
                timed = [Choice(devices, seconds(), option) for option, seconds in fitting]
                choices.append(min(timed, key=lambda choice: choice.seconds))
            elif tried:
                closest = devices, min((option for option, _ in tried), key=lambda option: option.memory.total)
        misfit = None
        if closest is not None:
            devices, option = closest
            fits_from = min((choice.devices for choice in choices if choice.devices > devices), default=None)
            misfit = Misfit(
                executor=executor,
                tensor_parallel=degree,
                precision=precision,
                devices=devices,
                memory=option.memory,
                short_bytes=option.memory.total - self.costs.usable_bytes,
                fits_from=fits_from,
            )
        return _Listed(Frontier(choices), misfit)

    def _seconds_of(self, layout: TrainerLayout) -> float:
        if layout not in self._train_s:
            self._train_s[layout] = self.costs.train_step(layout).total
        return self._train_s[layout]

    def _stage_s(self, layout: TrainerLayout, precision: Precision) -> float:
        """It depends on nothing of the generators but what they compute in."""
        return self.costs.weight_sync(layout, replace(_ANY_GENERATOR, precision=precision))["stage"]


def _by_time(found: Found) -> tuple[float, ...]:
    """The slowest executor's seconds first, then the next one's: among equals the least busy."""
    return tuple(sorted((side.total for side in found.step.sides.values()), reverse=True))


def executors(plan: AsynchronousPlan | SynchronousPlan) -> dict[str, TrainerLayout | GeneratorLayout | ScorerLayout]:
    """The layouts of a plan by executor."""
    named = {"trainer": plan.trainer, "generator": plan.generator}
    if isinstance(plan, AsynchronousPlan):
        named |= {"reference": plan.reference, "reward_model": plan.reward_model}  # type: ignore[dict-item]
    return {name: layout for name, layout in named.items() if layout is not None}


def signature_of(plan: AsynchronousPlan) -> Signature:
    """The signature that `plan` is the best of, if it came out of a search."""
    return Signature(
        plan.trainer.tensor_parallel,
        plan.generator.tensor_parallel,
        plan.generator.precision,
        plan.reference is not None,
    )
