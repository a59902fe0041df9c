"""Every configuration that fits a cluster, and the best division of its devices over all executors.

    asynchronous   minimise  max_e seconds_e(layout_e)   subject to  sum_e devices_e <= G0,   memory_e(layout_e) <= M0
    synchronous    minimise  training + generation        subject to  memory of both on the same devices <= M0

over integer degrees of parallelism (tensor, pipeline, context), bounded microbatches and decode concurrencies,
recomputation, when gradients are summed, the precision of the generators, and where the reference lies: LlamaRL's
problems (7) and (8) with what it leaves out (docs/planning.md). Executors side by side share only devices and the
precision that versions are published in; so for each precision every executor's choices are listed, and `best_split`
finds the division exactly. Executors that take turns: `planner.best_synchronous`.

Of a trainer on so many devices only the fastest layout counts. One whose lower bound (`CostModel.train_floor_s`) is not
below the seconds of one that was found there is skipped: exact, as it could not have been taken.

The staleness bound k enters twice. No more than k + 1 steps' completions are in flight, so decode slots beyond that
stay empty. And a completion that begins under version v is trained by step v + k at the latest, which waits for it:
where the longest one of a step takes L seconds, a step takes at least L / k. (A rule of thumb; the simulator is exact.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

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
    is_flat,
)
from slipstream.plan.pipeline import MOST_STAGES

SCORERS = ("reference", "reward_model")
BESIDE = (*SCORERS, "critic")
"""Executors that a plan may have besides trainer and generators."""
FINE_CLUSTER = 64
"""Devices up to which executors are given any number of them; in larger clusters whole nodes beyond the first."""
LONG = 2**14
"""Tokens of a sequence up to which one rank trains on all of it."""
_STAGES, _CHUNKS, _CONTEXT = (1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4, 8)
ROW_MULTIPLE = 8  # decode slots are a multiple of it (`generator.num_slots`)
_SLOTS = (*range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1536, 2048)
_ANY_TRAINER = TrainerLayout(devices=1, tensor_parallel=1, microbatch=1)
_ANY_GENERATOR = GeneratorLayout(devices=1, tensor_parallel=1, slots=ROW_MULTIPLE)
_NOTHING = Parts({})


@dataclass(frozen=True, kw_only=True)
class Space:
    """The layouts that are tried. `devices`: counts that an executor may get; `slots`: multiples of eight, ascending.

    `synchronous_devices`: counts that trainer and generator may share, one after the other. `trainer_stages`,
    `generator_stages`, `chunks`, `context_parallel`, `expert_parallel`: ascending, from 1; chunks are those of several
    stages.
    """

    devices: tuple[int, ...]
    trainer_parallel: tuple[int, ...]
    generator_parallel: tuple[int, ...]
    microbatches: tuple[int, ...]
    slots: tuple[int, ...]
    generator_precisions: tuple[Precision, ...] = ("bfloat16",)
    recompute: tuple[bool, ...] = (False, True)
    reduce_once: tuple[bool, ...] = (False, True)
    synchronous_devices: tuple[int, ...] = ()
    trainer_stages: tuple[int, ...] = (1,)
    generator_stages: tuple[int, ...] = (1,)
    chunks: tuple[int, ...] = (1,)
    context_parallel: tuple[int, ...] = (1,)
    expert_parallel: tuple[int, ...] = (1,)

    @property
    def flat(self) -> Space:
        """The same without stages and parts of sequences."""
        return replace(self, trainer_stages=(1,), generator_stages=(1,), context_parallel=(1,))


def default_space(
    model: TransformerConfig,
    cluster: GpuCluster,
    workload: Workload,
    *,
    precisions: Sequence[Precision],
    max_stages: int = MOST_STAGES,
) -> Space:
    """Return all degrees by which the model's heads divide, within a node or over whole nodes; microbatches by powers
    of two, slots by multiples of eight up to 64 and by factors of at most 1.25 up to 1024; stages by powers of two.

    Ranks share sequences only where these may be longer than LONG tokens.
    """
    is_adapted = workload.adapters.params > 0  # adapters of a mixture are not divided with its experts
    parallel = (1,) if model.num_experts and is_adapted else tuple(_degrees(model, cluster))
    per_rank = math.ceil(workload.trained_rollouts / workload.minibatches)
    count, per_node = cluster.num_devices, cluster.device.devices_per_node
    stages = tuple(n for n in _STAGES if n <= min(max_stages, count, model.num_layers))
    longest = workload.lengths.prompt_mean + workload.lengths.longest + workload.turns.given_mean
    return Space(
        devices=tuple(n for n in range(1, count + 1) if count <= FINE_CLUSTER or n < per_node or n % per_node == 0),
        trainer_parallel=parallel,
        generator_parallel=parallel,
        microbatches=tuple(2**power for power in range(per_rank.bit_length() + 1) if 2**power < 2 * per_rank),
        slots=_SLOTS,
        generator_precisions=tuple(precisions),
        synchronous_devices=tuple(sorted({max(1, count // 2**halvings) for halvings in range(4)})),
        trainer_stages=stages,
        generator_stages=stages,
        chunks=_CHUNKS,
        context_parallel=_CONTEXT if longest > LONG else (1,),
        expert_parallel=(1,) if is_adapted else tuple(_expert_ranks(model, cluster)),
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


def _expert_ranks(model: TransformerConfig, cluster: GpuCluster) -> Iterator[int]:
    """Yield how many ranks may exchange tokens of a mixture: powers of two."""
    ranks = 1
    while ranks == 1 or (ranks <= cluster.num_devices and model.num_experts and model.num_experts % ranks == 0):
        yield ranks
        ranks *= 2


def trainer_layouts(costs: CostModel, space: Space, devices: int, degree: int) -> Iterator[TrainerLayout]:
    """Yield those of `space` on so many devices; microbatches up to the first that holds all that a rank trains on.

    Those without stages and parts of sequences come first.
    """
    for stages, chunks, context, experts in itertools.product(
        space.trainer_stages, space.chunks, space.context_parallel, space.expert_parallel
    ):
        is_possible = chunks == 1 or (stages > 1 and stages * chunks <= costs.model.num_layers)
        is_possible &= stages == 1 or context == 1  # the trainer has one or the other
        is_possible &= experts == 1 or (stages == context == 1 and not costs.model.num_experts % (experts * degree))
        ranks = degree * stages * context
        if devices % (ranks * experts) or not is_possible:
            continue
        shards = devices // ranks
        place: dict[str, Any] = {"devices": devices, "tensor_parallel": degree, "pipeline_parallel": stages}
        place |= {"chunks": chunks, "context_parallel": context, "expert_parallel": experts}
        mine = math.ceil(costs.workload.trained_rollouts / shards / costs.workload.minibatches)
        largest = min((size for size in space.microbatches if size >= mine), default=space.microbatches[-1])
        for size, recompute, once in itertools.product(space.microbatches, space.recompute, space.reduce_once):
            is_same = once and shards * context == 1 and False in space.reduce_once  # one rank has nothing to sum
            if size <= largest and not is_same:
                yield TrainerLayout(**place, microbatch=size, recompute=recompute, reduce_once=once)


def generator_layouts(space: Space, devices: int, degree: int, precision: Precision) -> Iterator[GeneratorLayout]:
    """Yield those of `space` on so many devices."""
    for stages in space.generator_stages:
        if devices % (degree * stages) == 0:
            place: dict[str, Any] = {"devices": devices, "tensor_parallel": degree, "pipeline_parallel": stages}
            for slots in space.slots:
                yield GeneratorLayout(**place, slots=slots, precision=precision)


def scorer_layouts(devices: int, degrees: Iterable[int]) -> Iterator[ScorerLayout]:
    """Yield those of an executor that only reads on so many devices. Whole copies come first: of equally fast layouts
    the search takes the first."""
    for sharded, degree in itertools.product((False, True), degrees):
        if devices % degree == 0 and (devices > degree or not sharded):
            yield ScorerLayout(devices=devices, tensor_parallel=degree, sharded=sharded)


def most_slots(workload: Workload, replicas: int, max_staleness: int) -> int:
    """Return the slots of a replica that the completions in flight can fill, at least ROW_MULTIPLE."""
    in_flight = (max_staleness + 1) * workload.rollouts / replicas
    return max(ROW_MULTIPLE, math.ceil(in_flight / ROW_MULTIPLE) * ROW_MULTIPLE)


@dataclass(frozen=True)
class Choice:
    """A layout of an executor that fits, which takes `seconds` on so many devices for its share of one step.

    `longest_s` are those of a step's longest completion. A `critic` of its own beside a trainer is divided alike, as it
    has as much work: each is on half of `devices`.
    """

    devices: int
    seconds: float
    layout: Any
    memory: Parts = _NOTHING
    longest_s: float = 0.0
    critic: TrainerLayout | None = None


Frontier = list[Choice]
"""The choices of one executor that no other one beats with as few devices, by rising devices and falling time."""


def frontier(choices: Iterable[Choice]) -> Frontier:
    """Return those of `choices` that no other one beats with as few devices."""
    kept: Frontier = []
    for choice in sorted(choices, key=lambda choice: (choice.devices, choice.seconds)):
        if not kept or choice.seconds < kept[-1].seconds:
            kept.append(choice)
    return kept


def fastest(choices: Frontier, devices: int) -> Choice | None:
    """Return the fastest choice on at most `devices`."""
    return next((choice for choice in reversed(choices) if choice.devices <= devices), None)


def best_split(frontiers: Mapping[str, Frontier], devices: int) -> dict[str, Choice] | None:
    """Return the choices with the lowest largest time; None where `devices` do not suffice for one of each.

    From the fewest devices on, the slowest executor gets its next choice as long as there are devices for it: exact,
    whatever the times look like. Among the choices with the lowest largest time the second largest is lowest, and so on
    (leximin): devices that cannot help the slowest executor help the next one, those that help none are left over.
    """
    if not all(frontiers.values()):
        return None
    places = dict.fromkeys(frontiers, 0)
    while True:
        chosen = {name: frontiers[name][place] for name, place in places.items()}
        slowest_s = max(choice.seconds for choice in chosen.values())
        tied = [name for name, choice in chosen.items() if choice.seconds == slowest_s]
        further = {name: place + (name in tied) for name, place in places.items()}
        if any(place == len(frontiers[name]) for name, place in further.items()):
            break
        if sum(frontiers[name][place].devices for name, place in further.items()) > devices:
            break
        places = further
    if sum(choice.devices for choice in chosen.values()) > devices:
        return None
    if len(frontiers) == 1:
        return chosen
    best: dict[str, Choice] = {}
    for name in tied:  # one of those that tie is the slowest for good; the others may still get faster
        rest = best_split({each: frontiers[each] for each in frontiers if each != name}, devices - chosen[name].devices)
        assert rest is not None, "they fitted before"
        found = {each: chosen[each] if each == name else rest[each] for each in frontiers}
        if not best or _falling(found) < _falling(best):
            best = found
    return best


def _falling(chosen: Mapping[str, Choice]) -> list[float]:
    return sorted((choice.seconds for choice in chosen.values()), reverse=True)


_Layouts = tuple[Callable[[int], Iterable[Layout]], Callable[[Any], Parts], Callable[[Any], tuple[float, float]]]
"""The layouts of an executor by devices; the memory of one; its seconds for a step, and those of the longest."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A configuration that fits: its layouts, its step, and the bytes on each executor's devices by what they hold.

    `longest_s`: seconds of a step's longest completion, where steps overlap. `flat`: found among the layouts without
    stages and parts of sequences alone.
    """

    plan: AsynchronousPlan | SynchronousPlan
    step: StepTime
    memory: Mapping[str, Parts]
    longest_s: float = 0.0
    max_staleness: int = 0
    flat: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of a step: the slowest executor's, or those that the staleness bound leaves to the longest one."""
        return max(self.step.seconds, self.longest_s / self.max_staleness if self.max_staleness else 0.0)

    @property
    def side_by_side(self) -> AsynchronousPlan:
        """The plan of a configuration whose executors work at the same time."""
        assert isinstance(self.plan, AsynchronousPlan)
        return self.plan


@dataclass(frozen=True)
class Misfit:
    """An executor of which no layout with this degree fits on `devices` or fewer; it does from `fits_from` on, if ever.

    `memory` is that of the layout on `devices` that comes closest, and `stages` its pipeline stages.
    """

    executor: str
    tensor_parallel: int
    precision: Precision
    devices: int
    memory: Parts
    fits_from: int | None
    stages: int = 1


@dataclass(frozen=True)
class Signature:
    """The properties that give a configuration a row of its own; all else is as good as it can be in each."""

    trainer_parallel: int
    generator_parallel: int
    precision: Precision
    own_reference: bool = False
    own_critic: bool = False

    def key(self, executor: str) -> tuple[Any, ...]:
        """Return the part of a signature that an executor's choices depend on."""
        if executor == "trainer":
            return executor, self.precision, self.own_reference, self.own_critic, self.trainer_parallel
        return (executor, self.precision, self.generator_parallel) if executor == "generator" else (executor,)


class Search:
    """Every layout of `space` that fits on the cluster of `costs`, listed once for all staleness bounds.

    `misfits`: the closest layouts that do not fit, of each executor, degree and precision.
    """

    def __init__(self, costs: CostModel, space: Space) -> None:
        self.costs, self.space = costs, space
        self.misfits: list[Misfit] = []
        owns, critics = ((False, True)[: 1 + is_one] for is_one in (costs.workload.reference, costs.workload.critic))
        self.signatures = [
            Signature(trainer, generator, precision, own, critic)
            for precision, own, critic, trainer, generator in itertools.product(
                space.generator_precisions, owns, critics, space.trainer_parallel, space.generator_parallel
            )
        ]
        self._train_s = cache(lambda own_critic, layout: self._of_trainer(own_critic).train_step(layout).total)
        self._floor_s = cache(lambda own_critic, layout: self._of_trainer(own_critic).train_floor_s(layout))
        self._kept: dict[tuple[int, bool], dict[tuple[Any, ...], Frontier]] = {}
        self._listed: dict[tuple[Any, ...], list[Choice]] = {}  # by executor, and what a signature says of it
        for executor in ("trainer", "generator", "reference", "reward_model"):
            for one in self.signatures:
                if executor in self._executors(one) and one.key(executor) not in self._listed:
                    self._listed[one.key(executor)] = self._list(executor, one)

    def _executors(self, signature: Signature) -> list[str]:
        is_there = {"reference": signature.own_reference, "reward_model": self.costs.workload.reward_model is not None}
        return ["trainer", "generator", *(name for name, is_one in is_there.items() if is_one)]

    def asynchronous(self, max_staleness: int, *, flat: bool = False) -> dict[Signature, Found]:
        """Return the best configuration of every signature that has one, under this bound (>= 1), fastest first.

        `flat`: of layouts without stages and parts of sequences.
        """
        frontiers, found = self._frontiers(max_staleness, flat=flat), {}
        for one in self.signatures:
            chosen = best_split(self._of(frontiers, one), self.costs.cluster.num_devices)
            if chosen is not None:
                found[one] = self._found(chosen, max_staleness, flat=flat)

        def by_time(item: tuple[Signature, Found]) -> tuple[float, ...]:  # among equals the least busy first
            return item[1].seconds, *sorted((side.total for side in item[1].step.sides.values()), reverse=True)

        return dict(sorted(found.items(), key=by_time))

    def shifted(self, found: Found, giver: str, taker: str) -> Found | None:
        """Return `found` with the fewest devices that `giver` can give moved to `taker`; None where it has no fewer."""
        every = self._frontiers(found.max_staleness, flat=found.flat)
        frontiers = self._of(every, signature_of(found.side_by_side))
        counts = devices_of(found.plan)
        less = fastest(frontiers[giver], counts[giver] - 1)
        if less is None:
            return None
        more = fastest(frontiers[taker], counts[taker] + counts[giver] - less.devices)
        others = {name: fastest(frontiers[name], count) for name, count in counts.items()}
        chosen = others | {giver: less, taker: more}
        fitting = {name: choice for name, choice in chosen.items() if choice is not None}
        return self._found(fitting, found.max_staleness, flat=found.flat)

    def _frontiers(self, max_staleness: int, *, flat: bool) -> dict[tuple[Any, ...], Frontier]:
        """Return the choices of every executor under a bound."""
        key = max_staleness, flat
        if key not in self._kept:
            self._kept[key] = {
                executor: frontier(
                    replace(choice, seconds=max(choice.seconds, choice.longest_s / max_staleness))
                    for choice in choices
                    if self._is_filled(choice.layout, max_staleness) and (is_flat(choice.layout) or not flat)
                )
                for executor, choices in self._listed.items()
            }
        return self._kept[key]

    def _is_filled(self, layout: Layout, max_staleness: int) -> bool:
        """Return whether the completions in flight can fill the slots of a layout that has any."""
        if not isinstance(layout, GeneratorLayout):
            return True
        return layout.slots <= most_slots(self.costs.workload, layout.replicas, max_staleness)

    def _of(self, frontiers: Mapping[tuple[Any, ...], Frontier], signature: Signature) -> dict[str, Frontier]:
        """Return those of the executors that configurations of this signature have."""
        return {name: frontiers[signature.key(name)] for name in self._executors(signature)}

    def _found(self, chosen: Mapping[str, Choice], max_staleness: int, *, flat: bool) -> Found:
        critic = chosen["trainer"].critic
        plan = AsynchronousPlan(**{name: choice.layout for name, choice in chosen.items()}, critic=critic)
        memory = {name: choice.memory for name, choice in chosen.items()}
        found = Found(
            plan=plan,
            step=self.costs.asynchronous(plan),
            memory=memory if critic is None else memory | {"critic": self.costs.critic_memory(critic)},
            longest_s=chosen["generator"].longest_s,
            max_staleness=max_staleness,
            flat=flat,
        )
        listed_s = max(choice.seconds for choice in chosen.values())
        assert math.isclose(found.seconds, listed_s, rel_tol=1e-6), "a step takes what its slowest executor takes"
        return found

    def _list(self, executor: str, signature: Signature) -> list[Choice]:
        """Time every layout that fits; of the most devices up to which none does, remember the closest one."""
        if executor == "trainer":
            degree, listed = signature.trainer_parallel, self._trainers(signature)
        elif executor == "generator":
            degree, listed = signature.generator_parallel, self._generators(signature)
        else:
            degree, listed = 1, self._scorers(executor)
        layouts, memory, times = listed
        choices: list[Choice] = []
        closest: tuple[Parts, Any] | None = None
        for devices in self.space.devices:
            if devices % degree:
                continue
            fitting, nearest = self._on_devices(devices, layouts(devices), memory, times, signature.own_critic)
            choices += fitting
            if nearest is not None and not choices:  # where some fit, a larger number may just not divide
                closest = nearest
        if closest is not None:
            held, layout = closest
            fits_from = [choice.devices for choice in choices if choice.devices > layout.devices]
            precision = signature.precision if executor == "trainer" else layout.precision
            least, stages = min(fits_from, default=None), 1 if executor in SCORERS else layout.pipeline_parallel
            self.misfits.append(
                Misfit(executor, layout.tensor_parallel, precision, layout.devices, held, least, stages)
            )
        if executor == "trainer" and signature.own_critic:
            return [replace(one, devices=2 * one.devices, critic=one.layout) for one in choices]
        return choices

    def _of_trainer(self, own_critic: bool) -> CostModel:
        """Return the costs of a trainer: without its critic, where that has an executor of its own."""
        return self.costs.without_critic if own_critic else self.costs

    def _on_devices(
        self,
        devices: int,
        layouts: Iterable[Any],
        memory: Callable[[Any], Parts],
        times: Callable[[Any], Any],
        own_critic: bool,
    ) -> tuple[list[Choice], tuple[Parts, Any] | None]:
        """Return the choices among `layouts`, and the one that takes least memory of those that do not fit."""
        fitting, nearest, full = list[Choice](), None, _Full(self.costs)
        least_s = {True: math.inf, False: math.inf}  # of flat layouts, which are listed first, and of all
        for layout in layouts:
            if isinstance(layout, TrainerLayout) and (
                self._floor_s(own_critic, layout) >= least_s[layout.is_flat] or full.has_less(layout)
            ):
                continue
            held = memory(layout)
            if self.costs.fits(held):
                seconds, longest_s = times(layout)
                fitting.append(Choice(devices, seconds, layout, held, longest_s))
                least_s[False] = min(least_s[False], seconds)
                least_s[True] = min(least_s[True], seconds) if is_flat(layout) else least_s[True]
            else:
                full.add(layout)
                nearest = (held, layout) if nearest is None or held.total < nearest[0].total else nearest
        return fitting, nearest

    def _trainers(self, signature: Signature) -> _Layouts:
        costs, precision, degree = (
            self._of_trainer(signature.own_critic),
            signature.precision,
            signature.trainer_parallel,
        )
        elsewhere = ("reference",) if signature.own_reference else ()
        has_pass = costs.workload.reference and not signature.own_reference

        def times(layout: Any) -> tuple[float, float]:
            stage_s = costs.weight_sync(layout, replace(_ANY_GENERATOR, precision=precision))["stage"]
            reference_s = costs.reference_pass(layout).total if has_pass else 0.0
            return self._train_s(signature.own_critic, layout) + stage_s + reference_s, 0.0

        def layouts(devices: int) -> Iterator[TrainerLayout]:
            listed = trainer_layouts(costs, self.space, devices, degree)
            return (one for one in listed if one.is_flat or not signature.own_critic)  # a critic has no stages

        return (
            layouts,
            lambda layout: costs.train_memory(layout, served=precision).without(*elsewhere),
            times,
        )

    def _generators(self, signature: Signature) -> _Layouts:
        costs, workload = self.costs, self.costs.workload
        longest = workload.lengths.longest_of(workload.rollouts)

        def times(layout: Any) -> tuple[float, float]:
            generating_s = costs.generation(layout, waits_for_longest=False).total
            pause_s = costs.weight_sync(_ANY_TRAINER, layout)["pause"]
            token_s = generating_s * layout.slots * layout.replicas / (workload.rollouts * workload.lengths.mean)
            return generating_s + pause_s, longest * token_s

        degree, precision = signature.generator_parallel, signature.precision
        return lambda devices: generator_layouts(self.space, devices, degree, precision), costs.generator_memory, times

    def _scorers(self, executor: str) -> _Layouts:
        costs = self.costs
        has_head = executor == "reference"
        model = costs.model if has_head else costs.workload.reward_model
        assert model is not None
        degrees = [degree for degree in _degrees(model, costs.cluster) if degree in self.space.trainer_parallel]
        return (
            lambda devices: scorer_layouts(devices, degrees),
            lambda layout: costs.scorer_memory(model, layout, has_head=has_head),
            lambda layout: (costs.scoring(model, layout, has_head=has_head).total, 0.0),
        )


class _Full:
    """The trainers that did not fit, to skip those that certainly need as much memory or more.

    Those are of the same division with a microbatch as large or larger, where nothing is given up that the former did.
    Microbatches come in ascending order.
    """

    def __init__(self, costs: CostModel) -> None:
        self._grows = costs.memory_grows
        self._seen: dict[tuple[Any, ...], list[TrainerLayout]] = {}

    @staticmethod
    def _key(layout: TrainerLayout) -> tuple[Any, ...]:
        return layout.pipeline_parallel, layout.chunks, layout.context_parallel, layout.expert_parallel

    def add(self, layout: Layout) -> None:
        if self._grows and isinstance(layout, TrainerLayout):
            self._seen.setdefault(self._key(layout), []).append(layout)

    def has_less(self, layout: TrainerLayout) -> bool:
        """Return whether one that takes no more than `layout` did not fit."""
        return any(
            (one.recompute or not layout.recompute) and (layout.reduce_once or not one.reduce_once)
            for one in self._seen.get(self._key(layout), ())
        )


def executors(plan: AsynchronousPlan | SynchronousPlan) -> dict[str, Layout]:
    """Return the layouts of a plan by executor."""
    return {name: layout for name, layout in vars(plan).items() if layout is not None and name != "frees"}


def signature_of(plan: AsynchronousPlan) -> Signature:
    """Return the signature that `plan` is the best of, if it came out of a search."""
    degree, generator = plan.trainer.tensor_parallel, plan.generator
    own = plan.reference is not None, plan.critic is not None
    return Signature(degree, generator.tensor_parallel, generator.precision, *own)


def devices_of(plan: AsynchronousPlan | SynchronousPlan) -> dict[str, int]:
    """Return the devices of each executor; those of a critic count to the trainer, which it goes with."""
    counts = {name: layout.devices for name, layout in executors(plan).items()}
    critic = counts.pop("critic", 0)
    return counts | {"trainer": counts["trainer"] + critic}
