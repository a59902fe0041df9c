"""The search against brute force over every configuration of small spaces, on costs without any regularity."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from table_costs import TableCosts
from theory import Side, Theory

from slipstream.plan.cost_model import CostModel
from slipstream.plan.counts import adapters_of
from slipstream.plan.hardware import DEVICES, GpuCluster, cluster
from slipstream.plan.layouts import (
    AsynchronousPlan,
    GeneratorLayout,
    Parts,
    ScorerLayout,
    SynchronousPlan,
    TrainerLayout,
    Workload,
    layout_tables,
)
from slipstream.plan.lengths import LengthSample
from slipstream.plan.planner import CLOSE, FREES, best_synchronous, worth_staging
from slipstream.plan.question import ARCHITECTURES
from slipstream.plan.search import Search, Space, default_space, executors, signature_of, trainer_layouts

SPACE = Space(
    devices=(1, 2, 3, 4, 6),
    trainer_parallel=(1, 2),
    generator_parallel=(1, 2),
    microbatches=(1, 4),
    slots=(8, 16),
    generator_precisions=("bfloat16", "fp8"),
    recompute=(False, True),
    reduce_once=(False,),
    synchronous_devices=(2, 6),
)


K = 2  # eight rollouts a step, of which three steps' are in flight


def all_trainers(devices):
    return [
        TrainerLayout(devices=n, tensor_parallel=m, microbatch=b, recompute=recompute)
        for n, m, b, recompute in itertools.product(devices, (1, 2), (1, 4), (False, True))
        if n % m == 0 and (b == 1 or 8 / (n // m) > 1)  # one rollout each: a larger microbatch is the same
    ]


def all_generators(devices, steps_in_flight=10**6):
    return [
        GeneratorLayout(devices=n, tensor_parallel=m, slots=b, precision=precision)
        for n, m, b, precision in itertools.product(devices, (1, 2), (8, 16), ("bfloat16", "fp8"))
        if n % m == 0 and b <= max(8, -(-8 * steps_in_flight // (n // m) // 8) * 8)
    ]


def fastest_asynchronous(costs):
    """Seconds of the best plan, over the product of everything."""
    references = [None, *all_scorers()] if costs.reference else [None]
    reward_models = all_scorers() if costs.reward_model else [None]
    best = None
    pairs = itertools.product(all_trainers(SPACE.devices), all_generators(SPACE.devices, K + 1))
    for trainer, generator in pairs:
        for reference, reward_model in itertools.product(references, reward_models):
            layouts = [layout for layout in (trainer, generator, reference, reward_model) if layout is not None]
            if sum(layout.devices for layout in layouts) > costs.num_devices:
                continue
            plan = AsynchronousPlan(
                trainer=trainer, generator=generator, reference=reference, reward_model=reward_model
            )
            held = costs.train_memory(trainer, served=generator.precision)
            held = held.without("reference") if reference is not None else held
            scorers = [costs.scorer_memory(costs.model, one) for one in (reference, reward_model) if one is not None]
            if costs.fits(held, costs.generator_memory(generator), *scorers):
                replicas = generator.devices // generator.tensor_parallel
                token_s = (
                    costs.generation(generator, waits_for_longest=False).total * generator.slots * replicas / (8 * 6)
                )
                seconds = max(costs.asynchronous(plan).seconds, 7.5 * token_s / K)  # one in eight of 4 and 8 tokens
                best = seconds if best is None else min(best, seconds)
    return best


def all_scorers():
    """Whole copies, or one that is cut over all devices; nine heads are not shared by two."""
    return [ScorerLayout(devices=n, sharded=cut) for n in SPACE.devices for cut in (False, True) if n > cut]


STAGED = replace(
    SPACE,
    devices=(1, 2, 4, 6),
    trainer_stages=(1, 2),
    generator_stages=(1, 2),
    chunks=(1, 2),
    context_parallel=(1, 2),
    synchronous_devices=(2, 4),
)


def staged_trainers(devices):
    for layout in all_trainers(devices):
        for stages, chunks, context in itertools.product((1, 2), (1, 2), (1, 2)):
            shards, left = divmod(layout.devices, layout.tensor_parallel * stages * context)
            if (
                left == 0
                and 1 in (stages, context)
                and (stages > 1 or chunks == 1)
                and (layout.microbatch == 1 or 8 / shards > 1)
            ):
                yield replace(layout, pipeline_parallel=stages, chunks=chunks, context_parallel=context)


def staged_generators(devices, steps_in_flight=10**6):
    for n, m, p, b, precision in itertools.product(devices, (1, 2), (1, 2), (8, 16), ("bfloat16", "fp8")):
        if n % (m * p) == 0 and b <= max(8, -(-8 * steps_in_flight // (n // (m * p)) // 8) * 8):
            yield GeneratorLayout(devices=n, tensor_parallel=m, pipeline_parallel=p, slots=b, precision=precision)


@drawn(5, 60, seed=st.integers(0, 10_000), num_devices=st.integers(2, 8))
def test_stages_and_context_equal_brute_force(seed, num_devices):
    costs = TableCosts(seed=seed, num_devices=num_devices)
    best = {True: math.inf, False: math.inf}
    generators = []
    for layout in staged_generators(STAGED.devices, K + 1):
        if costs.fits(costs.generator_memory(layout)):
            seconds = costs.generation(layout, waits_for_longest=False).total
            pause_s = costs.weight_sync(None, layout)["pause"]
            bound_s = 7.5 * seconds * layout.slots * layout.replicas / (8 * 6) / K
            generators.append((max(seconds + pause_s, bound_s), layout))
    for trainer in staged_trainers(STAGED.devices):
        for seconds, layout in generators:
            held = costs.train_memory(trainer, served=layout.precision)
            if trainer.devices + layout.devices <= num_devices and costs.fits(held):
                stage_s = costs.weight_sync(trainer, layout)["stage"]
                step_s = max(costs.train_step(trainer).total + stage_s, seconds)
                for flat in (True, False):
                    if not flat or (trainer.is_flat and layout.is_flat):
                        best[flat] = min(best[flat], step_s)
    search = Search(costs, STAGED)
    for flat, expected in best.items():
        found = list(search.asynchronous(K, flat=flat).values())
        assert (found[0].seconds if found else math.inf) == expected
    table = worth_staging(search, K)
    expected = best[True] if best[True] <= CLOSE * best[False] else best[False]
    assert next((found.seconds for found in table.values()), math.inf) == expected


@drawn(2, 40, seed=st.integers(0, 10_000))
def test_synchronous_stages_equal_brute_force(seed):
    costs, best = TableCosts(seed=seed, num_devices=4), {True: math.inf, False: math.inf}
    for devices in STAGED.synchronous_devices:
        for trainer, generator in itertools.product(staged_trainers([devices]), staged_generators([devices])):
            for frees in FREES:
                plan = SynchronousPlan(trainer=trainer, generator=generator, frees=frees)
                if costs.fits(*costs.colocated_memory(plan).values()):
                    seconds = costs.synchronous(plan).seconds
                    for flat in {False, trainer.is_flat and generator.is_flat}:
                        best[flat] = min(best[flat], seconds)
    found = best_synchronous(costs, STAGED)
    expected = best[False] if best[False] < best[True] / CLOSE else best[True]
    assert (math.inf if found is None else found.seconds) == expected
    if found is not None:
        assert costs.fits(*costs.colocated_memory(found.plan).values())


def test_stages_have_to_make_a_step_more_than_two_percent_shorter():
    """A trainer alone with 100 s, and one of two stages with 98.5 or 97 s."""
    for staged_s, is_taken in ((98.5, False), (97.0, True)):

        class Two(TableCosts):
            def drawn(self, *key, staged_s=staged_s):
                if key[0] == "train":
                    return staged_s if key[1].pipeline_parallel == 2 else 100.0
                return 1.0

        table = worth_staging(Search(Two(seed=0, num_devices=6), STAGED), 100)
        assert (next(iter(table.values())).plan.trainer.pipeline_parallel == 2) is is_taken


@drawn(8, 20, seed=st.integers(0, 10_000), num_devices=st.integers(1, 9))
def test_asynchronous_equals_brute_force(seed, num_devices):
    costs = TableCosts(seed=seed, num_devices=num_devices)
    found = list(Search(costs, SPACE).asynchronous(K).values())
    expected = fastest_asynchronous(costs)
    assert (found[0].seconds if found else None) == expected


@drawn(3, 6, seed=st.integers(0, 10_000), num_devices=st.integers(2, 9))
def test_reference_and_reward_model_equal_brute_force(seed, num_devices):
    costs = TableCosts(seed=seed, num_devices=num_devices, reference=True, reward_model=True)
    found = list(Search(costs, SPACE).asynchronous(K).values())
    assert (found[0].seconds if found else None) == fastest_asynchronous(costs)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_what_is_found_fits_and_is_within_the_cluster(seed):
    costs = TableCosts(seed=seed, num_devices=7, reference=True)
    rows = Search(costs, SPACE).asynchronous(K)
    seconds = [found.seconds for found in rows.values()]
    assert seconds == sorted(seconds)
    for signature, found in rows.items():
        assert signature_of(found.plan) == signature
        layouts = executors(found.plan)
        assert sum(layout.devices for layout in layouts.values()) <= 7
        assert found.memory.keys() == layouts.keys() == found.step.sides.keys()
        assert costs.fits(*found.memory.values())
        held = costs.train_memory(found.plan.trainer, served=found.plan.generator.precision)
        own = found.plan.reference is not None
        assert found.memory["trainer"] == (held.without("reference") if own else held)


@drawn(8, 20, seed=st.integers(0, 10_000))
def test_synchronous_equals_brute_force(seed):
    costs = TableCosts(seed=seed, num_devices=6)
    expected = None
    for devices in (2, 6):
        pairs = itertools.product(all_trainers([devices]), all_generators([devices]), FREES)
        for trainer, generator, frees in pairs:
            plan = SynchronousPlan(trainer=trainer, generator=generator, frees=frees)
            if costs.fits(*costs.colocated_memory(plan).values()):
                seconds = costs.synchronous(plan).seconds
                expected = seconds if expected is None else min(expected, seconds)
    found = best_synchronous(costs, SPACE)
    assert (found and found.seconds) == expected
    if found is not None:
        assert costs.fits(*costs.colocated_memory(found.plan).values())


def test_misfits_say_how_much_memory_is_missing_and_from_where_on_it_is_not():
    """Two executors: the trainer holds 24 / devices bytes of 12 usable ones, the generator always 20."""

    class Shared(TableCosts):
        def train_memory(self, layout, *, served="bfloat16"):
            return super().train_memory(layout, served=None).times(0) + type(self).parts(weights=24 / layout.devices)

        def generator_memory(self, layout, *, shadow=True):
            return type(self).parts(weights=15.0, shadow=5.0)

        @staticmethod
        def parts(**parts):
            return Parts(parts)

    search = Search(Shared(seed=0, num_devices=6), SPACE)
    assert search.asynchronous(K) == {}
    by_executor = {}
    for misfit in search.misfits:
        by_executor.setdefault((misfit.executor, misfit.tensor_parallel), misfit)
    alone = by_executor["trainer", 1]
    assert (alone.devices, alone.memory.total - 12.0, alone.fits_from) == (1, 12.0, 2)
    assert ("trainer", 2) not in by_executor  # two devices hold 12 bytes each
    assert (by_executor["generator", 1].memory.total - 12.0, by_executor["generator", 1].fits_from) == (8.0, None)
    assert by_executor["generator", 2].devices == 6  # the largest number that was tried and did not help


@pytest.mark.parametrize(("giver", "taker"), [("trainer", "generator"), ("generator", "trainer")])
def test_shifted_moves_devices_from_one_executor_to_the_other(giver, taker):
    """Seconds are 12 / devices on both sides, plus a stage and a pause of nothing."""

    class Even(TableCosts):
        def drawn(self, *key):
            layout = key[1] if len(key) > 1 else None
            return 12.0 / layout.devices if key[0] in ("train", "generate") else 0.0

    search = Search(Even(seed=0, num_devices=6), SPACE)
    best = next(iter(search.asynchronous(max_staleness=100).values()))  # no completion takes so long
    assert {name: layout.devices for name, layout in executors(best.plan).items()} == {"trainer": 3, "generator": 3}
    assert best.seconds == 4.0
    moved = search.shifted(best, giver, taker)
    assert moved is not None
    assert {name: layout.devices for name, layout in executors(moved.plan).items()} == {giver: 2, taker: 4}
    assert moved.seconds == 6.0


class TheoryCosts(TableCosts):
    """LlamaRL's assumptions: devices work by themselves, memory divides evenly, communication and copies are free."""

    theory: Theory

    def train_step(self, layout):
        per_device = self.theory.trainer.eta(layout.microbatch) * layout.tensor_parallel / layout.devices
        return Parts({"train": self.theory.samples * per_device})

    def generation(self, layout, *, waits_for_longest):
        per_device = self.theory.generator.eta(layout.slots) * layout.tensor_parallel / layout.devices
        return Parts({"generate": self.theory.samples * per_device})

    def weight_sync(self, trainer, generator):
        return Parts({"stage": 0.0, "pause": 0.0})

    def train_memory(self, layout, *, served="bfloat16"):
        return Parts({"all": self.theory.trainer.memory(layout.microbatch) / layout.tensor_parallel})

    def generator_memory(self, layout, *, shadow=True):
        return Parts({"all": self.theory.generator.memory(layout.slots) / layout.tensor_parallel})


@pytest.mark.parametrize(("train_s", "generate_s"), [(1.0, 1.0), (3.0, 0.4), (0.2, 5.0)])
def test_where_the_paper_s_assumptions_hold_the_optimum_is_the_theory_s(train_s, generate_s):
    """Degrees at which memory is just full are integers here: what is lost is that instances of a model are whole."""
    sizes = (8, 16, 32, 64)
    theory = Theory(
        trainer=Side(fixed=400.0, per_sample=3.0, eta=lambda b: train_s * (1 + 20 / b), batches=sizes),
        generator=Side(fixed=104.0, per_sample=2.0, eta=lambda b: generate_s * (1 + 30 / b), batches=sizes),
        device_bytes=8.0,
        devices=4000.0,
        samples=100.0,
    )
    costs = TheoryCosts(seed=0, num_devices=4000, usable_bytes=theory.device_bytes)
    costs.theory = theory
    space = Space(
        devices=tuple(range(1, 4001)),
        trainer_parallel=(50, 53, 56, 62, 70, 74),
        generator_parallel=(15, 16, 17, 20, 21, 29),
        microbatches=sizes,
        slots=sizes,
        recompute=(True,),
        reduce_once=(False,),
    )
    costs.workload = replace(costs.workload, groups=10**6)  # microbatches and slots are always filled
    found = next(iter(Search(costs, space).asynchronous(max_staleness=10**12).values()))
    best = theory.asynchronous()
    assert best.seconds <= found.seconds <= 1.03 * best.seconds
    layouts = executors(found.plan)
    assert found.plan.trainer.microbatch == best.trainer.batch
    assert found.plan.generator.slots == best.generator.batch
    assert layouts["trainer"].devices / 4000 == pytest.approx(best.theta, abs=0.04)
    assert found.plan.generator.tensor_parallel == best.generator.degree
    assert found.plan.trainer.tensor_parallel == best.trainer.degree


@pytest.mark.parametrize(("bound", "slots"), [(1, 8), (3, 8), (4, 16), (100, 16)])
def test_slots_that_the_bound_leaves_empty_are_not_counted_on(bound, slots):
    """Four replicas, eight rollouts a step: (k + 1) 8 / 4 completions each, in whole multiples of eight."""

    class Greedy(TableCosts):
        def drawn(self, *key):
            return 160.0 / key[1].slots ** 2 if key[0] == "generate" else 1.0

        def train_memory(self, layout, *, served="bfloat16"):
            return Parts({"all": 1.0 if layout.devices == 2 else 100.0})

        def generator_memory(self, layout, *, shadow=True):
            return Parts({"all": 1.0 if layout.replicas == 4 else 100.0})

    space = replace(SPACE, devices=(2, 4), generator_parallel=(1,), synchronous_devices=())
    found = next(iter(Search(Greedy(seed=0, num_devices=6), space).asynchronous(bound).values()))
    assert found.plan.generator.slots == slots


def test_a_scorer_is_divided_only_where_a_copy_does_not_fit():
    """A reference of 70 B does not fit on an H100; one of 8 B does, and stays whole."""
    for name, divided in (("llama-3.1-70b", True), ("llama-3.1-8b", False)):
        model = ARCHITECTURES[name]
        cluster = GpuCluster(device=DEVICES["H100"], num_devices=32)
        lengths = LengthSample(prompt_mean=100.0, completions=(400, 600), source="test")
        workload = Workload(groups=32, group_size=8, lengths=lengths, reference=True)
        costs = CostModel(model, cluster, workload)
        search = Search(costs, default_space(model, cluster, workload, precisions=("bfloat16",)).flat)
        own = [found for one, found in search.asynchronous(2).items() if one.own_reference]
        assert own
        for found in own:
            layout = found.side_by_side.reference
            assert bool(layout.division) == divided
            assert costs.fits(costs.scorer_memory(model, layout))
            tables = layout_tables(found.side_by_side, workload, 2, device="cuda")
            assert ("tensor_parallel" in tables["kl"] or "sharded" in tables["kl"]) == divided
        misfits = [one for one in search.misfits if one.executor == "reference"]
        assert bool(misfits) == divided


def test_experts_are_divided_where_ranks_divide_them():
    """Brute force over divisors; a plan's table says so. Beside adapters, and without experts, nothing is tried."""
    model, gpus = ARCHITECTURES["qwen3-30b-a3b"], cluster("H100", 24)
    lengths = LengthSample(prompt_mean=100.0, completions=(400, 600), source="test")
    work = Workload(groups=64, group_size=8, lengths=lengths)
    space = default_space(model, gpus, work, precisions=("bfloat16",))
    assert space.expert_parallel == (1, 2, 4, 8, 16)
    costs = CostModel(model, gpus, work)
    for devices, degree in ((8, 1), (8, 4), (12, 2)):
        found = {one.expert_parallel for one in trainer_layouts(costs, space, devices, degree)}
        assert found == {n for n in (1, 2, 4, 8, 16) if devices % (n * degree) == 0}
        assert all(one.is_flat for one in trainer_layouts(costs, space, devices, degree) if one.expert_parallel > 1)
    assert default_space(ARCHITECTURES["qwen3-4b"], gpus, work, precisions=("bfloat16",)).expert_parallel == (1,)
    adapted = default_space(model, gpus, replace(work, adapters=adapters_of(model, 8)), precisions=("bfloat16",))
    assert adapted.expert_parallel == adapted.trainer_parallel == (1,)
    trainer = TrainerLayout(devices=8, tensor_parallel=1, microbatch=4, expert_parallel=4)
    plan = AsynchronousPlan(trainer=trainer, generator=GeneratorLayout(devices=2, tensor_parallel=2, slots=8))
    tables = layout_tables(plan, work, 2, device="cuda")
    assert (tables["trainer"]["expert_parallel"], tables["generator"]["tensor_parallel"]) == (4, 2)
