"""Curves measured on one GPU in place of the hardware table."""

from __future__ import annotations

import pytest
from measured_kit import measured
from theory import eta_t

from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import cluster
from slipstream.plan.layouts import GeneratorLayout, TrainerLayout, Workload
from slipstream.plan.lengths import LengthSample
from slipstream.plan.measured import COMMUNICATION, CalibratedCostModel
from slipstream.plan.question import ARCHITECTURES

SHAPE = ARCHITECTURES["qwen2.5-0.5b"]
CLUSTER = cluster("h100", 8)
# Samples of 6 + 5 tokens, as they were measured: nothing is converted, prompts are shared by nobody.
WORKLOAD = Workload(groups=64, group_size=1, lengths=LengthSample(5.0, (5,), "test"))


def models(**curves):
    made = measured(SHAPE, device="cuda", **curves).models[0]
    return CalibratedCostModel(SHAPE, CLUSTER, WORKLOAD, made), CostModel(SHAPE, CLUSTER, WORKLOAD)


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_one_gpu_takes_what_was_measured(batch):
    calibrated, _ = models(train_s=lambda _, b: 0.02 * (1 + 3 / b), generate_s=lambda _, b: 0.1 * (1 + 5 / b))
    trainer = TrainerLayout(devices=1, tensor_parallel=1, microbatch=batch, recompute=False)
    assert eta_t(calibrated, trainer) == pytest.approx(0.02 * (1 + 3 / batch))
    generator = GeneratorLayout(devices=1, tensor_parallel=1, slots=batch)
    step = calibrated.decode_step(generator, live=batch, context=6 + 5 / 2)
    read = calibrated.prefill(generator, prompts=batch / 5 * 6 / WORKLOAD.lengths.prompt_mean)
    assert step.total + read.total == pytest.approx(0.1 * (1 + 5 / batch) * batch / 5), (
        "prompts are in what was measured"
    )
    assert read.total > 0


def test_what_gpus_send_each_other_stays_as_the_table_has_it():
    calibrated, modelled = models(train_s=lambda *_: 1.0, generate_s=lambda *_: 1.0)
    trainer = TrainerLayout(devices=8, tensor_parallel=2, microbatch=8, recompute=False)
    slow, fast = calibrated.train_step(trainer), modelled.train_step(trainer)
    assert slow["tensor_parallel"] == pytest.approx(fast["tensor_parallel"]) != 0
    assert slow["compute"] > 100 * fast["compute"]
    generator = GeneratorLayout(devices=8, tensor_parallel=2, slots=64)
    slow, fast = (model.decode_step(generator, live=64, context=8) for model in (calibrated, modelled))
    factors = {name: slow[name] / fast[name] for name in fast.parts if name not in COMMUNICATION and fast[name]}
    assert len({round(factor, 6) for factor in factors.values()}) == 1  # one factor for all that is computed
    assert slow["tensor_parallel"] == pytest.approx(fast["tensor_parallel"])


def test_memory_is_the_model_s():
    calibrated, modelled = models()
    trainer = TrainerLayout(devices=8, tensor_parallel=1, microbatch=4)
    assert calibrated.train_memory(trainer) == modelled.train_memory(trainer)
