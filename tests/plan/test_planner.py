"""Plans of small workloads on the real cost model: what is recommended, what is said of it, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.core.errors import ConfigError
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import DEVICES, GpuCluster
from slipstream.plan.layouts import Workload
from slipstream.plan.lengths import LengthSample, lengths_with_tail
from slipstream.plan.planner import CLOSE, PlanRow, bounds_up_to, plan_for_cluster, recommended, rehearse
from slipstream.plan.question import ARCHITECTURES
from slipstream.plan.reasons import constraints, gigabytes, staleness
from slipstream.plan.search import Search, default_space, executors

SPREAD = LengthSample(prompt_mean=256.0, completions=tuple(range(256, 769, 16)), source="test")
TAIL = lengths_with_tail(256, 512, 2048, 4096)
PARAMS_8B = 8_030_261_248


def model_of(devices, *, lengths=TAIL, name="llama-3.1-8b", gpu="H100", groups=64, **workload):
    work = Workload(groups=groups, group_size=4, lengths=lengths, **workload)
    return CostModel(ARCHITECTURES[name], GpuCluster(device=DEVICES[gpu], num_devices=devices), work)


@pytest.fixture(scope="module")
def plan_of_eight():
    return plan_for_cluster(model_of(8, groups=8), precisions=("bfloat16", "fp8"), max_staleness=4, num_rows=2)


def test_the_smallest_bound_within_two_percent_is_recommended():
    assert recommended({1: 10.3, 2: 10.15, 4: 10.0, 8: 9.99}) == 2
    assert recommended({1: 10.0, 2: 10.0}) == 1
    assert recommended({4: 20.0, 8: 10.0}) == 8
    assert bounds_up_to(8) == (1, 2, 4, 8)
    assert bounds_up_to(5) == (1, 2, 4, 5)
    assert bounds_up_to(1) == (1,)


def test_a_plan_has_the_best_of_every_bound_and_of_several_layouts(plan_of_eight):
    plan = plan_of_eight
    bounds = [row.rehearsed.max_staleness for row in plan.by_staleness]
    assert bounds == [0, 1, 2, 4]
    in_turns, one = plan.by_staleness[:2]
    assert in_turns.plan == one.plan
    assert in_turns.rehearsed.staleness_max == 0
    assert in_turns.rehearsed.step_s > one.rehearsed.step_s
    steps_s = {row.rehearsed.max_staleness: row.rehearsed.step_s for row in plan.by_staleness}
    close = [bound for bound, seconds in steps_s.items() if seconds <= CLOSE * min(steps_s.values())]
    assert plan.max_staleness == min(close)
    assert 1 <= len(plan.rows) <= 2
    for row in plan.rows:
        assert row.rehearsed.max_staleness == plan.max_staleness
        assert row.rehearsed.staleness_max <= plan.max_staleness
        assert sum(layout.devices for layout in executors(row.plan).values()) <= 8
        assert row.rehearsed.step_s >= 0.9 * row.found.step.seconds  # waiting makes no step shorter
    assert plan.synchronous is not None
    assert plan.synchronous.seconds > plan.best.rehearsed.step_s
    assert any("times as fast as the best synchronous" in line for line in plan.why)
    assert any(f"k = {plan.max_staleness} is the smallest" in line for line in plan.why)


def test_the_trainer_s_memory_of_8b_with_adam(plan_of_eight):
    """Float32 weights, two moments and gradients, and two staged versions, cut over all of its devices."""
    best = next(row for row in plan_of_eight.rows if row.plan.trainer.tensor_parallel == 1)
    trainer, held = best.plan.trainer, best.found.memory["trainer"]
    assert held["weights"] == pytest.approx(4 * PARAMS_8B / trainer.devices)
    assert held["moments"] == pytest.approx(8 * PARAMS_8B / trainer.devices)
    assert held["gradients"] == pytest.approx(4 * PARAMS_8B / (1 if trainer.reduce_once else trainer.devices))
    staged = {"bfloat16": 2, "fp8": 1}[best.plan.generator.precision]
    assert held["staging"] == pytest.approx(2 * staged * PARAMS_8B / trainer.devices, rel=0.15)  # norms, embeddings
    assert held.total <= 0.92 * 80e9


def test_when_nothing_waits_the_schedule_takes_what_the_cost_model_says():
    model = model_of(16, lengths=SPREAD, groups=128)
    search = Search(model, default_space(model.model, model.cluster, model.workload, precisions=("bfloat16",)))
    found = next(iter(search.asynchronous(8).values()))
    row = PlanRow(found=found, rehearsed=rehearse(model, found.plan, 8))
    assert row.rehearsed.step_s == pytest.approx(row.found.step.seconds, rel=0.03)
    slowest = max(row.found.step.sides, key=lambda name: row.found.step.sides[name].total)
    assert row.rehearsed.idle[slowest] < 0.03


def test_a_heavy_tail_costs_a_small_bound_time():
    model = model_of(16, lengths=lengths_with_tail(256, 512, 6000, 12_000), groups=16)
    search = Search(model, default_space(model.model, model.cluster, model.workload, precisions=("bfloat16",)))
    found = next(iter(search.asynchronous(8).values()))
    steps_s = {bound: rehearse(model, found.plan, bound).step_s for bound in (1, 2, 8)}
    assert steps_s[1] > 1.2 * steps_s[2] > 1.2 * steps_s[8]


@pytest.mark.slow
def test_reference_and_reward_model_get_devices_and_are_idle_by_what_they_do():
    small = ARCHITECTURES["llama-3.2-1b"]
    model = model_of(16, reference=True, reward_model=small)
    plan = plan_for_cluster(model, max_staleness=2, num_rows=2)
    layouts = executors(plan.best.plan)
    assert "reward_model" in layouts
    assert set(plan.best.rehearsed.idle) == set(layouts) == set(plan.best.found.memory)
    scoring_s = plan.best.found.step.sides["reward_model"].total
    assert plan.best.rehearsed.idle["reward_model"] == pytest.approx(1 - scoring_s / plan.best.rehearsed.step_s)


def test_a_cluster_that_is_too_small_is_refused_with_one_that_is_large_enough():
    with pytest.raises(ConfigError, match="does not fit on 2 H100") as refused:
        plan_for_cluster(model_of(2, groups=16), precisions=("bfloat16", "fp8"))
    text = str(refused.value)
    assert "GB short" in text
    enough = int(text.split("allowed: ")[1].split()[0])
    assert 2 < enough <= 8
    model = model_of(enough, groups=16)
    assert plan_for_cluster(model, precisions=("bfloat16", "fp8"), max_staleness=1, num_rows=1).rows


def test_more_of_the_cluster_is_never_worse():
    steps_s = []
    for devices in (8, 12, 16):
        model = model_of(devices, lengths=SPREAD, groups=256)
        search = Search(model, default_space(model.model, model.cluster, model.workload, precisions=("bfloat16",)))
        steps_s.append(next(iter(search.asynchronous(8).values())).seconds)
    assert steps_s == sorted(steps_s, reverse=True)


def told_of_best(model):
    space = default_space(model.model, model.cluster, model.workload, precisions=("bfloat16",))
    found = next(iter(Search(model, space).asynchronous(2).values()))
    return " ".join(constraints(model, space.slots, found))


def test_why_names_the_constraint_that_is_active():
    """Give the GPUs a hundred times the memory: what memory kept small is no longer told so."""
    model = model_of(16, lengths=lengths_with_tail(256, 2048, 6000, 12_000))
    assert "Memory is the limit" in told_of_best(model)
    roomy = replace(model.cluster.device, memory_bytes=1e13)
    rich = CostModel(model.model, replace(model.cluster, device=roomy), model.workload)
    assert "Memory is the limit" not in told_of_best(rich)


@pytest.mark.parametrize(
    ("nbytes", "digits", "shown"),
    [
        (99.7e9, 2, "100"),
        (99.2e9, 2, "99"),
        (1234.5e9, 3, "1,234"),
        (5e4, 3, "0.00005"),
        (7.25e9, 3, "7.25"),
        (8e9, 3, "8"),
    ],
)
def test_gigabytes_have_no_exponent(nbytes, digits, shown):
    assert gigabytes(nbytes, digits) == shown


def test_where_stragglers_ask_for_a_larger_bound_a_window_is_named():
    assert staleness({1: 20.0, 2: 12.0, 4: 10.0, 8: 9.9}, 4).endswith(
        "k = 2 makes it 12 s, +20%. With overtake_steps = 2 only stragglers would be older than at k = 2."
    )
    assert staleness({2: 10.5, 4: 10.0, 8: 9.9}, 4).endswith("k = 2 makes it 10.5 s, +5%.")
    assert "overtake_steps" not in staleness({0: 90.0, 1: 10.0}, 1), "turns have no stragglers to tolerate"
