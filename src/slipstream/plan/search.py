"""The best division of a cluster over all executors, and the best synchronous configuration to compare it with.

    asynchronous   minimise  max_e seconds_e(layout_e)   subject to  sum_e devices_e <= G0,   memory_e(layout_e) <= M0
    synchronous    minimise  training + generation        subject to  memory of both on the same devices <= M0

over integer degrees of parallelism m, bounded microbatches b_t and decode concurrencies b_g, recomputation, when
gradients are summed, the precision of the generators, and where the reference lies: LlamaRL's problems (7) and (8) with
what it leaves out (docs/planning.md). Nothing is approximated. Side by side, executors share only devices, and the
precision that versions are published in; so for each precision every executor's choices are listed, and
`split.best_split` finds the division exactly. One after the other: `colocated.py`.

The staleness bound k enters twice. No more than k + 1 steps' completions are in flight, so decode slots beyond that
stay empty. And a completion that begins under version v is trained by step v + k at the latest, which waits for it:
where the longest one of a step takes L seconds, a step takes at least L / k. (A rule of thumb; the simulator is exact.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
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
    """What is tried. `devices`: counts that an executor may get; `slots`: multiples of eight, ascending."""

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
    """Counts that trainer and generator may share, one after the other."""


def default_space(
    model: TransformerConfig,
    cluster: Cluster,
    workload: Workload,
    *,
    precisions: Sequence[Precision],
) -> Space:
    """All degrees by which the model's heads divide, within a node or over whole nodes; microbatches by powers of two,
    slots by multiples of eight up to 64 and by factors of at most 1.25 up to 1024."""
    parallel = tuple(_degrees(model, cluster))
    per_rank = math.ceil(workload.rollouts / workload.minibatches)
    microbatches = tuple(2**power for power in range(per_rank.bit_length() + 1) if 2**power < 2 * per_rank)
    return Space(
        devices=tuple(_counts(cluster)),
        trainer_parallel=parallel,
        generator_parallel=parallel,
        microbatches=microbatches,
        slots=_SLOTS,
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
    """Those of `space` on so many devices."""
    for slots in space.slots:
        yield GeneratorLayout(devices=devices, tensor_parallel=degree, slots=slots, precision=precision)


def most_slots(workload: Workload, replicas: int, max_staleness: int) -> int:
    """Slots of a replica that the completions in flight can fill, at least those of one row group."""
    in_flight = (max_staleness + 1) * workload.rollouts / replicas
    return max(ROW_MULTIPLE, math.ceil(in_flight / ROW_MULTIPLE) * ROW_MULTIPLE)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A configuration that fits: its layouts, its step, and the bytes on each executor's devices by what they hold."""

    plan: AsynchronousPlan | SynchronousPlan
    step: StepTime
    memory: Mapping[str, Parts]
    longest_s: float = 0.0
    """Seconds of a step's longest completion, where steps overlap."""
    max_staleness: int = 0

    @property
    def seconds(self) -> float:
        """Of a step: the slowest executor's, or those that the staleness bound leaves to the longest completion."""
        return max(self.step.seconds, self.longest_s / self.max_staleness if self.max_staleness else 0.0)


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
    """One layout of an executor that fits, with its share of a step and the longest completion's time."""

    layout: TrainerLayout | GeneratorLayout | ScorerLayout
    memory: Parts
    seconds: float
    longest_s: float = 0.0


@dataclass(frozen=True)
class _Listed:
    """The layouts of an executor that fit, by devices; and the closest one of those that did not."""

    options: Mapping[int, Sequence[_Option]]
    misfit: Misfit | None


_Candidate = tuple[TrainerLayout | GeneratorLayout | ScorerLayout, Parts]


class Search:
    """Everything that fits of `space` on the cluster of `costs`, listed once for all staleness bounds."""

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

    def asynchronous(self, max_staleness: int) -> dict[Signature, Found]:
        """The best configuration of every signature that has one, under this bound (1 or more), fastest first."""
        signatures = [
            Signature(trainer, generator, precision, own_reference)
            for precision, own_reference, trainer in self._trainers
            for of, generator in self._generators
            if of == precision
        ]
        found: dict[Signature, Found] = {}
        frontiers = self._frontiers(max_staleness)
        for signature in signatures:
            chosen = best_split(_of(frontiers, signature), self.costs.cluster.num_devices)
            if chosen is not None:
                found[signature] = self._found(chosen, max_staleness)
        return dict(sorted(found.items(), key=lambda item: _by_time(item[1])))

    def shifted(self, found: Found, giver: str, taker: str) -> Found | None:
        """`found` with the least that `giver` can give of its devices given to `taker`; None where it has no less."""
        assert isinstance(found.plan, AsynchronousPlan)
        frontiers = _of(self._frontiers(found.max_staleness), signature_of(found.plan))
        counts = {name: layout.devices for name, layout in executors(found.plan).items()}
        less = frontiers[giver].with_devices(counts[giver] - 1)
        if less is None:
            return None
        more = frontiers[taker].with_devices(counts[taker] + counts[giver] - less.devices)
        others = {name: frontiers[name].with_devices(count) for name, count in counts.items()}
        chosen = others | {giver: less, taker: more}
        return self._found({name: choice for name, choice in chosen.items() if choice is not None}, found.max_staleness)

    # What there is to choose from under a bound

    def _frontiers(self, max_staleness: int) -> dict[tuple[Any, ...], Frontier[_Option]]:
        """Of every executor by what a signature says of it."""
        listed: dict[tuple[Any, ...], _Listed] = {
            **{("trainer", *key): one for key, one in self._trainers.items()},
            **{("generator", *key): one for key, one in self._generators.items()},
            **{(name,): one for name, one in self._scorers.items()},
        }
        return {key: self._frontier(one, max_staleness) for key, one in listed.items()}

    def _frontier(self, listed: _Listed, max_staleness: int) -> Frontier[_Option]:
        return Frontier(
            [
                Choice(devices, max(option.seconds, option.longest_s / max_staleness), option)
                for devices, options in listed.options.items()
                for option in options
                if self._may_be_filled(option.layout, max_staleness)
            ]
        )

    def _may_be_filled(self, layout: TrainerLayout | GeneratorLayout | ScorerLayout, max_staleness: int) -> bool:
        if not isinstance(layout, GeneratorLayout):
            return True
        return layout.slots <= most_slots(self.costs.workload, layout.replicas, max_staleness)

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

    # What there is to choose from at all

    def _list_trainers(self, precision: Precision, degree: int, *, own_reference: bool) -> _Listed:
        costs = self.costs
        has_pass = costs.workload.reference and not own_reference

        def candidates(devices: int) -> Iterator[_Candidate]:
            for layout in trainer_layouts(costs.workload, self.space, devices, degree):
                memory = costs.train_memory(layout, served=precision)
                yield layout, memory.without("reference") if own_reference else memory

        def timed(layout: Any, memory: Parts) -> _Option:
            if layout not in self._train_s:
                self._train_s[layout] = costs.train_step(layout).total
            stage_s = costs.weight_sync(layout, replace(_ANY_GENERATOR, precision=precision))["stage"]
            reference_s = costs.reference_pass(layout).total if has_pass else 0.0
            return _Option(layout, memory, self._train_s[layout] + stage_s + reference_s)

        return self._listed("trainer", degree, precision, candidates, timed)

    def _list_generators(self, precision: Precision, degree: int) -> _Listed:
        costs = self.costs
        workload = costs.workload
        longest = workload.lengths.longest_of(workload.rollouts)

        def candidates(devices: int) -> Iterator[_Candidate]:
            for layout in generator_layouts(self.space, devices, degree, precision):
                yield layout, costs.generator_memory(layout)

        def timed(layout: Any, memory: Parts) -> _Option:
            generating_s = costs.generation(layout, waits_for_longest=False).total
            pause_s = costs.weight_sync(_ANY_TRAINER, layout)["pause"]
            token_s = generating_s * layout.slots * layout.replicas / (workload.rollouts * workload.lengths.mean)
            return _Option(layout, memory, generating_s + pause_s, longest_s=longest * token_s)

        return self._listed("generator", degree, precision, candidates, timed)

    def _list_scorers(self, name: str, model: TransformerConfig) -> _Listed:
        costs = self.costs

        def candidates(devices: int) -> Iterator[_Candidate]:
            layout = ScorerLayout(devices=devices)
            yield layout, costs.scorer_memory(model, layout)

        def timed(layout: Any, memory: Parts) -> _Option:
            return _Option(layout, memory, costs.scoring(model, layout).total)

        return self._listed(name, 1, ScorerLayout(devices=1).precision, candidates, timed)

    def _listed(
        self,
        executor: str,
        degree: int,
        precision: Precision,
        candidates: Callable[[int], Iterable[_Candidate]],
        timed: Callable[[Any, Parts], _Option],
    ) -> _Listed:
        """Every candidate that fits, timed; and of the most devices on which none does, the closest one."""
        options: dict[int, list[_Option]] = {}
        closest: tuple[int, Parts] | None = None
        for devices in self.space.devices:
            if devices % degree:
                continue
            tried = list(candidates(devices))
            fitting = [timed(layout, memory) for layout, memory in tried if self.costs.fits(memory)]
            if fitting:
                options[devices] = fitting
            elif tried:
                closest = devices, min((memory for _, memory in tried), key=lambda memory: memory.total)
        misfit = None
        if closest is not None:
            devices, memory = closest
            misfit = Misfit(
                executor=executor,
                tensor_parallel=degree,
                precision=precision,
                devices=devices,
                memory=memory,
                short_bytes=memory.total - self.costs.usable_bytes,
                fits_from=min((count for count in options if count > devices), default=None),
            )
        return _Listed(options, misfit)


def _of(frontiers: Mapping[tuple[Any, ...], Frontier[_Option]], signature: Signature) -> dict[str, Frontier[_Option]]:
    """Those of the executors that configurations of this signature have."""
    precision, own_reference = signature.precision, signature.own_reference
    found = {
        "trainer": frontiers["trainer", precision, own_reference, signature.trainer_parallel],
        "generator": frontiers["generator", precision, signature.generator_parallel],
    }
    scorers = ["reference"] if own_reference else []
    return found | {name: frontiers[name,] for name in [*scorers, "reward_model"] if (name,) in frontiers}


def _by_time(found: Found) -> tuple[float, ...]:
    """The slowest executor's seconds first, then the next one's: among equals the least busy."""
    return found.seconds, *sorted((side.total for side in found.step.sides.values()), reverse=True)


def executors(plan: AsynchronousPlan | SynchronousPlan) -> dict[str, TrainerLayout | GeneratorLayout | ScorerLayout]:
    """The layouts of a plan by executor."""
    found: dict[str, TrainerLayout | GeneratorLayout | ScorerLayout] = {
        "trainer": plan.trainer,
        "generator": plan.generator,
    }
    if isinstance(plan, AsynchronousPlan):
        if plan.reference is not None:
            found["reference"] = plan.reference
        if plan.reward_model is not None:
            found["reward_model"] = plan.reward_model
    return found


def signature_of(plan: AsynchronousPlan) -> Signature:
    """The signature that `plan` is the best of, if it came out of a search."""
    return Signature(
        plan.trainer.tensor_parallel,
        plan.generator.tensor_parallel,
        plan.generator.precision,
        plan.reference is not None,
    )
