"""What the simulator is told of a plan, against the cost model; and plans from the files of a run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from test_calibrate import WrittenRun, config, true_costs, truth  # a run whose true costs are known

from slipstream.core.errors import ConfigError
from slipstream.plan.answer import make_plan
from slipstream.plan.calibrate import calibrate
from slipstream.plan.cost_model import CostModel
from slipstream.plan.cpu import CalibratedTimes, CpuMachine
from slipstream.plan.hardware import cluster
from slipstream.plan.layouts import (
    AsynchronousPlan,
    GeneratorLayout,
    ScorerLayout,
    SynchronousPlan,
    TrainerLayout,
    Workload,
    layout_tables,
)
from slipstream.plan.lengths import LengthSample, Turns
from slipstream.plan.planner import FREES, PlanRow, Rehearsed, best_rows, ranked, simulated_plan
from slipstream.plan.question import ARCHITECTURES
from slipstream.plan.reasons import CAUSES, USES
from slipstream.plan.recorded import measured, read_run
from slipstream.plan.search import Found
from slipstream.plan.simulated_run import Batch, GroupWork

WORKLOAD = Workload(groups=32, group_size=4, lengths=LengthSample(64.0, (100, 200, 300), "test"))
MODEL = CostModel(ARCHITECTURES["llama-3.1-8b"], cluster("h100", 16), WORKLOAD)
PLAN = AsynchronousPlan(
    trainer=TrainerLayout(devices=8, tensor_parallel=2, microbatch=3),
    generator=GeneratorLayout(devices=8, tensor_parallel=4, slots=32, precision="fp8"),
)


def test_a_decode_step_takes_what_the_model_says_of_its_rows_and_their_context():
    costs = simulated_plan(MODEL, PLAN)[1]
    for rows, context in itertools.product((1, 7, 32), (64, 300, 4000)):
        expected = MODEL.decode_step(PLAN.generator, live=rows, context=context).total
        assert costs.decode(0, rows, rows * context) == pytest.approx(expected)


def test_a_training_step_takes_what_the_model_says_of_the_mean_batch_and_more_of_a_longer_one():
    costs, step = simulated_plan(MODEL, PLAN)[1], MODEL.train_step(PLAN.trainer)
    mean = Batch(groups=32, completions=128, prompt_tokens=32 * 64, completion_tokens=128 * 200)
    assert sum(costs.train(mean).values()) == pytest.approx(step.total)
    double = Batch(groups=32, completions=128, prompt_tokens=2 * 32 * 64, completion_tokens=2 * 128 * 200)
    longer = costs.train(double)
    assert longer["forward_backward"] == pytest.approx(2 * costs.train(mean)["forward_backward"])
    assert longer["optimizer"] == costs.train(mean)["optimizer"] == pytest.approx(step["optimizer"] + step["serial"])


def test_given_tokens_are_in_a_batch_once():
    """A mean batch has those of its environments among its completions' tokens."""
    turns = Turns(turns=4, given_tokens=500)
    model = CostModel(MODEL.model, MODEL.cluster, replace(WORKLOAD, turns=turns))
    costs, step = simulated_plan(model, PLAN)[1], model.train_step(PLAN.trainer)
    given = round(128 * turns.given_mean)
    mean = Batch(groups=32, completions=128, prompt_tokens=32 * 64, completion_tokens=128 * 200 + given)
    assert given > 0
    assert sum(costs.train(mean).values()) == pytest.approx(step.total)


def test_versions_and_prompts_take_what_the_model_says():
    costs, sync = simulated_plan(MODEL, PLAN)[1], MODEL.weight_sync(PLAN.trainer, PLAN.generator)
    assert (costs.publish_s, costs.stage_s, costs.swap_s) == (sync["stage"], sync["transfer"], sync["pause"])
    assert costs.prefill(0, 640, False) == pytest.approx(10 * MODEL.prefill(PLAN.generator, prompts=1).total)
    assert costs.score_s == 0.0


def test_a_reference_is_read_where_it_lies():
    model = CostModel(MODEL.model, MODEL.cluster, replace(WORKLOAD, reference=True))
    mean = Batch(groups=32, completions=128, prompt_tokens=32 * 64, completion_tokens=128 * 200)
    beside = simulated_plan(model, PLAN)[1].train(mean)
    assert beside["reference"] == pytest.approx(model.reference_pass(PLAN.trainer).total)


def row(step_s, staleness, plan=PLAN):
    told = Rehearsed(
        max_staleness=2, step_s=step_s, tokens_per_s=1.0, idle={}, staleness_mean=staleness, staleness_max=2
    )
    return PlanRow(found=Found(plan=plan, step=None, memory={}), rehearsed=told)


def test_the_fastest_row_comes_first_and_of_equals_the_freshest():
    slow, fast, as_fast_and_fresh = row(11.0, 0.1), row(10.0, 2.0), row(10.01, 0.5)
    assert ranked([slow, fast, as_fast_and_fresh]) == (as_fast_and_fresh, fast, slow)


def bounded(one, bound):
    return replace(one, rehearsed=replace(one.rehearsed, max_staleness=bound))


def test_the_best_of_every_bound_is_the_best_rehearsed():
    """Of each bound the first `num_rows` are rehearsed; `by_staleness` and the recommended bound's rows agree."""
    took_s = {0: [40.0], 1: [20.0, 19.0], 4: [10.5, 10.0, 1.0], 8: [12.0, 9.9]}
    rows = {bound: [bounded(row(took, 0.0), bound) for took in table] for bound, table in took_s.items()}
    every = [one for table in rows.values() for one in table]

    def rehearsed(found):
        return next(one.rehearsed for one in every if one.found is found)

    tables = {bound: [one.found for one in table] for bound, table in rows.items()}
    best, by_staleness = best_rows(tables, rehearsed, num_rows=2)
    assert by_staleness == (rows[0][0], rows[1][1], rows[4][1], rows[8][1])
    assert best == (rows[4][1], rows[4][0])  # 1% above the shortest, at a smaller bound


def test_a_plan_says_its_stages_where_there_are_several():
    flat = layout_tables(PLAN, WORKLOAD, 3, device="cuda")
    staged = AsynchronousPlan(
        trainer=replace(PLAN.trainer, pipeline_parallel=2, chunks=2, context_parallel=2),
        generator=replace(PLAN.generator, pipeline_parallel=2),
    )
    tables = layout_tables(staged, WORKLOAD, 3, device="cuda")
    divisions = {"pipeline_parallel": 2, "pipeline_chunks": 2, "context_parallel": 2}
    assert tables["trainer"] == flat["trainer"] | divisions
    assert tables["generator"] == flat["generator"] | {"replicas": 1, "pipeline_parallel": 2}


def test_a_plan_says_every_field_that_it_decides():
    tables = layout_tables(PLAN, WORKLOAD, 3, device="cuda")
    trainer, generator = tables["trainer"], tables["generator"]
    assert (trainer["ranks"], trainer["tensor_parallel"]) == (8, 2)
    assert (generator["replicas"], generator["tensor_parallel"], generator["num_slots"]) == (2, 4, 32)
    assert generator["precision"] == "fp8"
    assert trainer["microbatch_tokens"] == 3 * (64 // 4 + 200)  # a prompt is read once for four completions
    assert tables["max_staleness"] == 3
    assert layout_tables(PLAN, WORKLOAD, 0, device="cuda")["weight_update"] == "between_batches"


# From a run's files


class Groups:
    """Completions of 4 to 11 tokens; every `signal`-th group has signal."""

    def __init__(self, signal):
        self.signal = signal

    def group(self, ordinal, step):
        lengths = np.random.default_rng(ordinal).integers(4, 12, 4)
        return GroupWork(6, tuple(lengths.tolist()), ordinal % self.signal == 0)

    def held_out(self, version):
        return ()


def written(folder, signal):
    short = config(steps=20)
    WrittenRun(short, truth(short), Groups(signal), true_costs(), folder, (0.03, 0.0004)).write()
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return written(tmp_path_factory.mktemp("runs") / "recorded", 1)


@pytest.fixture(scope="module")
def machine(recorded):
    return machine_of(recorded)


def machine_of(folder):
    run = read_run(folder)
    times = CalibratedTimes(calibrate([run]))
    lengths = LengthSample(6.0, tuple(sorted(line.num_tokens for line in run.rollouts)), "test")
    workload = Workload(groups=12, group_size=4, lengths=lengths, minibatches=2)
    return CpuMachine(
        config=run.config,
        shape=ARCHITECTURES["smollm2-135m"],
        workload=workload,
        times=times,
        cores=times.calibration.cores,
        memory_bytes=64e9,
    )


def test_a_run_s_own_layout_takes_what_it_took(machine, recorded):
    assert machine.cores == 2
    rollouts_of_it = 24  # of 48, in each of two microbatches
    found = next(
        found
        for found in machine.candidates(1)
        if found.plan.generator.slots == 32 and found.plan.trainer.microbatch == rollouts_of_it
    )
    told = machine.rehearse(found)
    assert told.step_s == pytest.approx(measured(read_run(recorded)).step_s, rel=0.1)
    # The search's own estimate knows that both sides slow each other, and takes them to overlap always.
    assert found.seconds == pytest.approx(told.step_s, rel=0.25)
    assert machine.times.guessed(found.plan) is None
    in_turns = next(machine.candidates(0))
    assert "2 threads" in machine.times.guessed(in_turns.plan)


def test_what_the_trainer_of_a_run_measured_is_in_a_plan_and_no_other_model(machine, recorded):
    layout = TrainerLayout(devices=1, tensor_parallel=1, microbatch=24, precision="float32")
    seconds = machine.times.calibration.seconds | {"reference": 1e-4, "values": 2e-4}
    times = CalibratedTimes(replace(machine.times.calibration, seconds=seconds))
    rows = 12 * 6 + 48 * (machine.workload.lengths.mean - 1)
    found = times.train(layout, machine.workload)
    assert found["measures"] == pytest.approx(3e-4 * rows)
    assert machine.times.train(layout, machine.workload)["measures"] == 0
    for model in ("reference", "critic"):
        with pytest.raises(ConfigError, match="a model that it did not have"):
            make_plan(str(recorded), **{model: True})


def test_every_cause_and_every_use_that_a_plan_has_is_said_in_words(machine):
    """And no other has words: layouts of all kinds have them all between them."""
    turns = Turns(turns=4, given_tokens=500, environment_s=1.0)
    workload = replace(WORKLOAD, turns=turns, reference=True, reward_model=MODEL.model)
    costs = CostModel(ARCHITECTURES["mixtral-8x7b"], MODEL.cluster, workload)
    kinds = ({"pipeline_parallel": 2}, {"context_parallel": 2}, {"expert_parallel": 2})
    trainers = [TrainerLayout(devices=8, tensor_parallel=2, microbatch=3, **kind) for kind in kinds]
    alone = TrainerLayout(devices=1, tensor_parallel=1, microbatch=1)
    scorer = ScorerLayout(devices=8, sharded=True)
    plans = [replace(PLAN, trainer=trainer, reward_model=scorer) for trainer in trainers]
    in_turns = [SynchronousPlan(trainer=trainers[0], generator=PLAN.generator, frees=frees) for frees in FREES]
    steps = [*map(costs.asynchronous, plans), *map(costs.synchronous, in_turns)]
    spent = [parts for step in steps for parts in step.sides.values()]
    times = machine.times
    spent += [times.train(alone, WORKLOAD), times.generate(PLAN.generator, WORKLOAD)]
    held = [costs.train_memory(alone), costs.generator_memory(PLAN.generator), costs.scorer_memory(costs.model, scorer)]
    held += [parts for plan in in_turns for parts in costs.colocated_memory(plan).values()]
    assert set().union(*(parts.parts for parts in spent)) == CAUSES.keys()
    assert set().union(*(parts.parts for parts in held)) == USES.keys()


def test_what_is_done_for_groups_without_signal_is_counted(machine, tmp_path):
    half, all_of_it = machine_of(written(tmp_path / "half", 2)), machine
    layout = GeneratorLayout(devices=1, tensor_parallel=1, slots=24, precision="float32")
    once, twice = (one.times.generate(layout, all_of_it.workload).total for one in (all_of_it, half))
    assert twice == pytest.approx(2 * once, rel=0.1)
