"""Every configuration that fits a cluster, and the best division of its devices over all executors.

    asynchronous   minimise  max_e seconds_e(layout_e)   subject to  sum_e devices_e <= G0,   memory_e(layout_e) <= M0
    synchronous    minimise  training + generation        subject to  memory of both on the same devices <= M0

over integer degrees of parallelism m, bounded microbatches b_t and decode concurrencies b_g, recomputation, when
gradients are summed, the precision of the generators, and where the reference lies: LlamaRL's problems (7) and (8) with
what it leaves out (docs/planning.md). Nothing is approximated. Executors side by side share only devices and the
precision that versions are published in; so for each precision every executor's choices are listed, and `best_split`
finds the division exactly. Executors that take turns: `planner.best_synchronous`.

The staleness bound k enters twice. No more than k + 1 steps' completions are in flight, so decode slots beyond that
stay empty. And a completion that begins under version v is trained by step v + k at the latest, which waits for it:
where the longest one of a step takes L seconds, a step takes at least L / k. (A rule of thumb; the simulator is exact.)
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.models.config import TransformerConfig, local_config
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import GpuCluster
from slipstream.plan.layouts import (
    AsynchronousPlan,
    GeneratorLayout,
    Layout,
    Parts,
    ScorerLayout,
    StepTime,
    SynchronousPlan,
    TrainerLayout,
    Workload,
)

FINE_CLUSTER = 64
"""Devices up to which executors are given any number of them; in larger clusters whole nodes beyond the first."""
ROW_MULTIPLE = 8  # decode slots are a multiple of it (`generator.num_slots`)
_SLOTS = (*range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1536, 2048)
_ANY_TRAINER = TrainerLayout(devices=1, tensor_parallel=1, microbatch=1)
_ANY_GENERATOR = GeneratorLayout(devices=1, tensor_parallel=1, slots=ROW_MULTIPLE)

What = TypeVar("What")


@dataclass(frozen=True, kw_only=True)
class Space:
    """The layouts that are tried. `devices`: counts that an executor may get; `slots`: multiples of eight, ascending.

    `synchronous_devices`: counts that trainer and generator may share, one after the other.
    """

    devices: tuple[int, ...]
    trainer_parallel: tuple[int, ...]
    generator_parallel: tuple[int, ...]
    microbatches: tuple[int, ...]
    slots: tuple[int, ...]
    trainer_precisions: tuple[Precision, ...] = ("bfloat16",)
    generator_precisions: tuple[Precision, ...] = ("bfloat16",)
    recompute: tuple[bool, ...] = (False, True)
    reduce_once: tuple[bool, ...] = (False, True)
    synchronous_devices: tuple[int, ...] = ()


def default_space(
    model: TransformerConfig, cluster: GpuCluster, workload: Workload, *, precisions: Sequence[Precision]
) -> Space:
    """Return all degrees by which the model's heads divide, within a node or over whole nodes; microbatches by powers
    of two, slots by multiples of eight up to 64 and by factors of at most 1.25 up to 1024."""
    parallel = tuple(_degrees(model, cluster))
    per_rank = math.ceil(workload.rollouts / workload.minibatches)
    count, per_node = cluster.num_devices, cluster.device.devices_per_node
    return Space(
        devices=tuple(n for n in range(1, count + 1) if count <= FINE_CLUSTER or n < per_node or n % per_node == 0),
        trainer_parallel=parallel,
        generator_parallel=parallel,
        microbatches=tuple(2**power for power in range(per_rank.bit_length() + 1) if 2**power < 2 * per_rank),
        slots=_SLOTS,
        generator_precisions=tuple(precisions),
        synchronous_devices=tuple(sorted({max(1, count // 2**halvings) for halvings in range(4)})),
    )


def _degrees(model: TransformerConfig, cluster: GpuCluster) -> Iterator[int]:
    """Yield how many ranks can share the model's layers without straddling a node's border or leaving the cluster."""
    per_node = cluster.device.devices_per_node
    for degree in range(1, min(cluster.num_devices, model.num_heads) + 1):
        if model.num_heads % degree or (per_node % degree and degree % per_node):
            continue
        try:
            local_config(model, degree)
        except ConfigError:
            continue
        yield degree


def trainer_layouts(workload: Workload, space: Space, devices: int, degree: int) -> Iterator[TrainerLayout]:
    """Yield those of `space` on so many devices; microbatches up to the first that holds all rollouts of a rank."""
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
    """Yield those of `space` on so many devices."""
    for slots in space.slots:
        yield GeneratorLayout(devices=devices, tensor_parallel=degree, slots=slots, precision=precision)


def most_slots(workload: Workload, replicas: int, max_staleness: int) -> int:
    """Return the slots of a replica that the completions in flight can fill, at least ROW_MULTIPLE."""
    in_flight = (max_staleness + 1) * workload.rollouts / replicas
    return max(ROW_MULTIPLE, math.ceil(in_flight / ROW_MULTIPLE) * ROW_MULTIPLE)


# The division of devices over executors that work at the same time


@dataclass(frozen=True)
class Choice(Generic[What]):
    """A layout of an executor, which takes `seconds` on so many devices for its share of one step."""

    devices: int
    seconds: float
    what: What


class Frontier(Generic[What]):
    """The choices of one executor that no other one beats with as few devices, by rising devices and falling time."""

    def __init__(self, choices: Iterable[Choice[What]]) -> None:
        self.choices: list[Choice[What]] = []
        for choice in sorted(choices, key=lambda choice: (choice.devices, choice.seconds)):
            if not self.choices or choice.seconds < self.choices[-1].seconds:
                self.choices.append(choice)
        self._rising = [-choice.seconds for choice in self.choices]

    def within(self, seconds: float) -> Choice[What] | None:
        """Return the choice with the fewest devices that takes at most `seconds`."""
        index = bisect.bisect_left(self._rising, -seconds)
        return self.choices[index] if index < len(self.choices) else None

    def with_devices(self, devices: int) -> Choice[What] | None:
        """Return the fastest choice on at most `devices`."""
        index = bisect.bisect_right(self.choices, devices, key=lambda choice: choice.devices)
        return self.choices[index - 1] if index else None


def best_split(frontiers: Mapping[str, Frontier[What]], devices: int) -> dict[str, Choice[What]] | None:
    """Return the choices with the lowest largest time; None where `devices` do not suffice for one of each.

    To be done within T, each executor needs the fewest devices of its choices that take at most T. The sum of those
    falls as T rises, so the best T is found by bisection over the times that occur: exact, whatever the times look
    like. Among the choices within it the second largest time is lowest, and so on (leximin): devices that cannot help
    the slowest executor help the next one, and devices that help none are left over.
    """
    chosen = _within_best_time(frontiers, devices)
    if chosen is None or len(frontiers) == 1:
        return chosen
    best: dict[str, Choice[What]] | None = None
    slowest_s = max(choice.seconds for choice in chosen.values())
    for name, choice in chosen.items():
        if choice.seconds < slowest_s:
            continue  # one of those that tie is the slowest for good; the others may still get faster
        others = {other: frontier for other, frontier in frontiers.items() if other != name}
        rest = best_split(others, devices - choice.devices)
        assert rest is not None, "they fitted before"
        found = {each: choice if each == name else rest[each] for each in frontiers}
        if best is None or _falling(found) < _falling(best):
            best = found
    return best


def _falling(chosen: Mapping[str, Choice[What]]) -> list[float]:
    return sorted((choice.seconds for choice in chosen.values()), reverse=True)


def _within_best_time(frontiers: Mapping[str, Frontier[What]], devices: int) -> dict[str, Choice[What]] | None:
    """Return each executor's choice with the fewest devices that keeps the lowest T that can be kept."""
    times = sorted({choice.seconds for frontier in frontiers.values() for choice in frontier.choices})

    def within(seconds: float) -> dict[str, Choice[What]] | None:
        chosen = {name: frontier.within(seconds) for name, frontier in frontiers.items()}
        kept = {name: choice for name, choice in chosen.items() if choice is not None}
        is_enough = len(kept) == len(frontiers) and sum(choice.devices for choice in kept.values()) <= devices
        return kept if is_enough else None

    first = bisect.bisect_left(times, True, key=lambda seconds: within(seconds) is not None)
    return within(times[first]) if first < len(times) else None


# The search


@dataclass(frozen=True, kw_only=True)
class Found:
    """A configuration that fits: its layouts, its step, and the bytes on each executor's devices by what they hold.

    `longest_s`: seconds of a step's longest completion, where steps overlap.
    """

    plan: AsynchronousPlan | SynchronousPlan
    step: StepTime
    memory: Mapping[str, Parts]
    longest_s: float = 0.0
    max_staleness: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of a step: the slowest executor's, or those that the staleness bound leaves to the longest one."""
        return max(self.step.seconds, self.longest_s / self.max_staleness if self.max_staleness else 0.0)

    @property
    def side_by_side(self) -> AsynchronousPlan:
        """The plan of a configuration whose executors work at the same time."""
        assert isinstance(self.plan, AsynchronousPlan)
        return self.plan


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
    """The properties that give a configuration a row of its own; all else is as good as it can be in each."""

    trainer_parallel: int
    generator_parallel: int
    precision: Precision
    own_reference: bool = False


@dataclass(frozen=True)
class _Option:
    """One layout of an executor that fits, with its share of a step and the longest completion's time."""

    layout: Layout
    memory: Parts
    seconds: float
    longest_s: float = 0.0


@dataclass(frozen=True)
class _Listed:
    """The layouts of an executor that fit, by devices; and the closest one of those that did not."""

    options: Mapping[int, Sequence[_Option]]
    misfit: Misfit | None


class Search:
    """Every layout of `space` that fits on the cluster of `costs`, listed once for all staleness bounds."""

    def __init__(self, costs: CostModel, space: Space) -> None:
        self.costs, self.space = costs, space
        workload = costs.workload
        self._train_s: dict[TrainerLayout, float] = {}
        self._listed: dict[tuple[Any, ...], _Listed] = {}  # by executor, and what a signature says of it
        for precision in space.generator_precisions:
            for own, degree in itertools.product((False, True)[: 1 + workload.reference], space.trainer_parallel):
                self._listed["trainer", precision, own, degree] = self._list_trainers(precision, degree, own)
        for precision, degree in itertools.product(space.generator_precisions, space.generator_parallel):
            self._listed["generator", precision, degree] = self._list_generators(precision, degree)
        if workload.reference:
            self._listed["reference",] = self._list_scorers("reference", costs.model)
        if workload.reward_model is not None:
            self._listed["reward_model",] = self._list_scorers("reward_model", workload.reward_model)

    @property
    def misfits(self) -> list[Misfit]:
        """The closest layouts that do not fit, of each executor, degree and precision."""
        return [one.misfit for one in self._listed.values() if one.misfit is not None]

    def asynchronous(self, max_staleness: int) -> dict[Signature, Found]:
        """Return the best configuration of every signature that has one, under this bound (>= 1), fastest first."""
        trainers = [key[1:] for key in self._listed if key[0] == "trainer"]
        generators = [key[1:] for key in self._listed if key[0] == "generator"]
        found: dict[Signature, Found] = {}
        frontiers = self._frontiers(max_staleness)
        for (precision, own_reference, trainer), (of, generator) in itertools.product(trainers, generators):
            if of != precision:
                continue
            signature = Signature(trainer, generator, precision, own_reference)
            chosen = best_split(_of(frontiers, signature), self.costs.cluster.num_devices)
            if chosen is not None:
                found[signature] = self._found(chosen, max_staleness)
        return dict(sorted(found.items(), key=lambda item: _by_time(item[1])))

    def shifted(self, found: Found, giver: str, taker: str) -> Found | None:
        """Return `found` with the fewest devices that `giver` can give moved to `taker`; None where it has no fewer."""
        frontiers = _of(self._frontiers(found.max_staleness), signature_of(found.side_by_side))
        counts = {name: layout.devices for name, layout in executors(found.plan).items()}
        less = frontiers[giver].with_devices(counts[giver] - 1)
        if less is None:
            return None
        more = frontiers[taker].with_devices(counts[taker] + counts[giver] - less.devices)
        others = {name: frontiers[name].with_devices(count) for name, count in counts.items()}
        chosen = others | {giver: less, taker: more}
        return self._found({name: choice for name, choice in chosen.items() if choice is not None}, found.max_staleness)

    def _frontiers(self, max_staleness: int) -> dict[tuple[Any, ...], Frontier[_Option]]:
        """Return the choices of every executor under a bound."""
        return {
            key: Frontier(
                Choice(devices, max(option.seconds, option.longest_s / max_staleness), option)
                for devices, options in listed.options.items()
                for option in options
                if not isinstance(option.layout, GeneratorLayout)
                or option.layout.slots <= most_slots(self.costs.workload, option.layout.replicas, max_staleness)
            )
            for key, listed in self._listed.items()
        }

    def _found(self, chosen: Mapping[str, Choice[_Option]], max_staleness: int) -> Found:
        layouts: dict[str, Any] = {name: choice.what.layout for name, choice in chosen.items()}
        plan = AsynchronousPlan(**layouts)
        found = Found(
            plan=plan,
            step=self.costs.asynchronous(plan),
            memory={name: choice.what.memory for name, choice in chosen.items()},
            longest_s=chosen["generator"].what.longest_s,
            max_staleness=max_staleness,
        )
        listed_s = max(choice.seconds for choice in chosen.values())
        assert math.isclose(found.seconds, listed_s, rel_tol=1e-6), "a step takes what its slowest executor takes"
        return found

    def _list_trainers(self, precision: Precision, degree: int, own_reference: bool) -> _Listed:
        costs = self.costs
        has_pass = costs.workload.reference and not own_reference

        def layouts(devices: int) -> Iterator[TrainerLayout]:
            return trainer_layouts(costs.workload, self.space, devices, degree)

        def memory(layout: Any) -> Parts:
            held = costs.train_memory(layout, served=precision)
            return held.without("reference") if own_reference else held

        def times(layout: Any) -> tuple[float, float]:
            if layout not in self._train_s:
                self._train_s[layout] = costs.train_step(layout).total
            stage_s = costs.weight_sync(layout, replace(_ANY_GENERATOR, precision=precision))["stage"]
            reference_s = costs.reference_pass(layout).total if has_pass else 0.0
            return self._train_s[layout] + stage_s + reference_s, 0.0

        return self._list("trainer", degree, precision, layouts, memory, times)

    def _list_generators(self, precision: Precision, degree: int) -> _Listed:
        costs, workload = self.costs, self.costs.workload
        longest = workload.lengths.longest_of(workload.rollouts)

        def layouts(devices: int) -> Iterator[GeneratorLayout]:
            return generator_layouts(self.space, devices, degree, precision)

        def times(layout: Any) -> tuple[float, float]:
            generating_s = costs.generation(layout, waits_for_longest=False).total
            pause_s = costs.weight_sync(_ANY_TRAINER, layout)["pause"]
            token_s = generating_s * layout.slots * layout.replicas / (workload.rollouts * workload.lengths.mean)
            return generating_s + pause_s, longest * token_s

        return self._list("generator", degree, precision, layouts, costs.generator_memory, times)

    def _list_scorers(self, name: str, model: TransformerConfig) -> _Listed:
        costs = self.costs

        def memory(layout: Any) -> Parts:
            return costs.scorer_memory(model, layout)

        def times(layout: Any) -> tuple[float, float]:
            return costs.scoring(model, layout).total, 0.0

        precision = ScorerLayout(devices=1).precision
        return self._list(name, 1, precision, lambda devices: (ScorerLayout(devices=devices),), memory, times)

    def _list(
        self,
        executor: str,
        degree: int,
        precision: Precision,
        layouts: Callable[[int], Iterable[Layout]],
        memory: Callable[[Any], Parts],
        times: Callable[[Any], tuple[float, float]],
    ) -> _Listed:
        """Time every layout that fits; of the most devices on which none does, remember the closest one."""
        options: dict[int, list[_Option]] = {}
        closest: tuple[int, Parts] | None = None
        for devices in self.space.devices:
            if devices % degree:
                continue
            tried = [(layout, memory(layout)) for layout in layouts(devices)]
            fitting = [_Option(layout, held, *times(layout)) for layout, held in tried if self.costs.fits(held)]
            if fitting:
                options[devices] = fitting
            elif tried:
                closest = devices, min((held for _, held in tried), key=lambda held: held.total)
        if closest is None:
            return _Listed(options, None)
        devices, held = closest
        misfit = Misfit(
            executor=executor,
            tensor_parallel=degree,
            precision=precision,
            devices=devices,
            memory=held,
            short_bytes=held.total - self.costs.usable_bytes,
            fits_from=min((count for count in options if count > devices), default=None),
        )
        return _Listed(options, misfit)


def _of(frontiers: Mapping[tuple[Any, ...], Frontier[_Option]], signature: Signature) -> dict[str, Frontier[_Option]]:
    """Return those of the executors that configurations of this signature have."""
    precision, own_reference = signature.precision, signature.own_reference
    found = {
        "trainer": frontiers["trainer", precision, own_reference, signature.trainer_parallel],
        "generator": frontiers["generator", precision, signature.generator_parallel],
    }
    scorers = ["reference"] if own_reference else []
    return found | {name: frontiers[name,] for name in [*scorers, "reward_model"] if (name,) in frontiers}


def _by_time(found: Found) -> tuple[float, ...]:
    """Order by the slowest executor's seconds, then the next one's: among equals the least busy."""
    return found.seconds, *sorted((side.total for side in found.step.sides.values()), reverse=True)


def executors(plan: AsynchronousPlan | SynchronousPlan) -> dict[str, Layout]:
    """Return the layouts of a plan by executor."""
    found: dict[str, Layout | None] = {"trainer": plan.trainer, "generator": plan.generator}
    if isinstance(plan, AsynchronousPlan):
        found |= {"reference": plan.reference, "reward_model": plan.reward_model}
    return {name: layout for name, layout in found.items() if layout is not None}


def signature_of(plan: AsynchronousPlan) -> Signature:
    """Return the signature that `plan` is the best of, if it came out of a search."""
    trainer, generator = plan.trainer, plan.generator
    return Signature(
        trainer.tensor_parallel, generator.tensor_parallel, generator.precision, plan.reference is not None
    )
