"""A planned critic with devices of its own: its costs, and the plan that the search finds, against all there are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from slipstream.core import recipes
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import cluster
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, TrainerLayout, Workload, layout_tables
from slipstream.plan.lengths import LengthSample
from slipstream.plan.question import ARCHITECTURES
from slipstream.plan.search import Search, Space, devices_of, signature_of

QWEN_4B = ARCHITECTURES["qwen3-4b"]
WORK = Workload(groups=16, group_size=8, lengths=LengthSample(100.0, (500,), "all alike"), reference=True, critic=True)
SPACE = Space(
    devices=(1, 2, 3, 4, 6, 8),
    trainer_parallel=(1, 2),
    generator_parallel=(1,),
    microbatches=(2, 8),
    slots=(32, 64),
    generator_precisions=("bfloat16",),
    recompute=(False, True),
    reduce_once=(False,),
    synchronous_devices=(8,),
    trainer_stages=(1, 2),
)


def costs(devices: int = 8) -> CostModel:
    return CostModel(QWEN_4B, cluster("H100", devices), WORK)


def plan_of(trainer: TrainerLayout, generator: GeneratorLayout, *, own: bool) -> AsynchronousPlan:
    return AsynchronousPlan(trainer=trainer, generator=generator, critic=trainer if own else None)


def test_policy_and_critic_take_half_of_the_time_of_both_in_turn() -> None:
    model = costs()
    trainer, generator = (
        TrainerLayout(devices=2, tensor_parallel=1, microbatch=8),
        GeneratorLayout(devices=2, tensor_parallel=1, slots=64),
    )
    inside = model.asynchronous(plan_of(trainer, generator, own=False)).sides
    apart = model.asynchronous(plan_of(trainer, generator, own=True)).sides
    serial, beside = model.efficiency.serial_s, apart["trainer"]["stage"] + apart["trainer"]["reference"]
    assert inside["trainer"].total - serial - beside == pytest.approx(2 * (apart["critic"].total - serial))
    assert apart["trainer"].total - beside == pytest.approx(apart["critic"].total)
    assert apart["generator"] == inside["generator"]


def test_its_memory_is_half_of_both_without_what_only_a_policy_has() -> None:
    model, layout = costs(), TrainerLayout(devices=4, tensor_parallel=2, microbatch=2)
    both, own = model.train_memory(layout), model.critic_memory(layout)
    for name in ("weights", "moments", "gradients"):
        assert own[name] == both[name] / 2
    assert own["activations"] == both["activations"], "one model runs after the other"
    assert not {"logits", "staging", "reference"} & own.parts.keys()


@pytest.mark.parametrize("num_devices", [4, 8])
def test_the_search_finds_the_best_of_all_plans(num_devices: int) -> None:
    model, bound = costs(num_devices), 10**9
    best = {False: float("inf"), True: float("inf")}
    trainers = [
        TrainerLayout(devices=n, tensor_parallel=m, microbatch=b, recompute=r, pipeline_parallel=p)
        for n, m, b, r, p in itertools.product(SPACE.devices, (1, 2), (2, 8), (False, True), (1, 2))
        if n % (m * p) == 0
    ]
    for trainer, own, n, slots in itertools.product(trainers, best, SPACE.devices, SPACE.slots):
        if (1 + own) * trainer.devices + n > num_devices or (own and not trainer.is_flat):
            continue
        generator = GeneratorLayout(devices=n, tensor_parallel=1, slots=slots)
        held = (model.without_critic if own else model).train_memory(trainer)
        if model.fits(held, model.generator_memory(generator)):
            best[own] = min(best[own], model.asynchronous(plan_of(trainer, generator, own=own)).seconds)
    assert min(best.values()) < float("inf")
    table = Search(model, SPACE).asynchronous(bound)
    for own, seconds in best.items():
        found = [one for signature, one in table.items() if signature.own_critic == own and not signature.own_reference]
        assert min((one.seconds for one in found), default=float("inf")) == pytest.approx(seconds)
    for signature, found in table.items():
        plan = found.side_by_side
        assert signature_of(plan) == signature
        assert sum(devices_of(plan).values()) <= num_devices
        if plan.critic is not None:
            assert devices_of(plan)["trainer"] == 2 * plan.trainer.devices
            assert found.memory["critic"].total < found.memory["trainer"].total


def test_a_recipe_has_what_was_planned() -> None:
    layout = TrainerLayout(devices=4, tensor_parallel=2, microbatch=2)
    plan = plan_of(layout, GeneratorLayout(devices=2, tensor_parallel=1, slots=32), own=True)
    tables = layout_tables(plan, WORK, 2, device="cuda")
    assert tables["critic"] == {"executor": "own", "ranks": 4, "tensor_parallel": 2, "device": "cuda"}
    given = recipes.merge(tables, {"loss": {"name": "ppo", "advantages": "gae"}})
    config = recipes.resolve("quickstart", given)
    assert config.has_own_critic
    assert replace(plan, critic=None).critic is None
    assert "critic" not in layout_tables(replace(plan, critic=None), WORK, 2, device="cuda")
