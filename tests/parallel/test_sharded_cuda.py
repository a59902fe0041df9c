"""A policy on one GPU: a copy or FSDP2 over NCCL for bfloat16 products, plain parameters for float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import sharded_jobs
import torch
import torch.distributed as dist
from gradients import named_grads
from rank_models import CONFIGS
from sharded_jobs import Layout, assembled
from test_sharded import SETTINGS, alone, relative, without_key_biases

from slipstream.core.rank_group import RankGroup
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.sharded import Division, ShardedParameters
from slipstream.models.shards import local_parts
from slipstream.trainer.optim import AdamW

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("precision", "switches", "gradient_error", "weight_error"),
    [
        ("float32", {}, 3e-5, 1e-4),
        ("bfloat16", {}, 3e-2, 2e-2),
        ("bfloat16", {"copies": True}, 3e-2, 2e-2),
        ("bfloat16", {"copies": True, "varlen": False, "keeps_products": True}, 3e-2, 2e-2),
    ],
)
@pytest.mark.parametrize("case", ["qwen3", "gpt2", "llama_tied"])
@pytest.mark.usefixtures("one_rank")
def test_updates_are_those_of_a_cpu(
    case: str, precision: Any, switches: dict[str, Any], gradient_error: float, weight_error: float
) -> None:
    config, expected = CONFIGS[case], alone(case, 4)
    device = torch.device("cuda", torch.cuda.current_device())
    division = Division(device=device, precision=precision, recomputes=True, **switches)
    model = sharded_jobs.part_of(config, division)
    parameters = ShardedParameters(model, division)
    optimizer = AdamW(parameters, OptimizerConfig(**SETTINGS), total_updates=4)

    def on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        parts = [(part.box, part.of(tensors[part.parameter]).float().cpu().numpy()) for part in local_parts(model)]
        return assembled([parts])

    for update in range(4):
        sequences = sharded_jobs.sequences_of(update, config.vocab_size)
        sharded_jobs.update_from(model, optimizer, sequences, Layout(1, 1), RankGroup.alone())
        assert all(grad.is_cuda and grad.dtype == torch.float32 for grad in named_grads(parameters).values())
        if update == 0:
            assert relative(on_cpu(named_grads(parameters)), expected.first_gradient) < gradient_error
        optimizer.step()
    assert all(view.is_cuda and view.dtype == torch.float32 for view in parameters.named_views().values())
    weights = without_key_biases(on_cpu(parameters.named_views()), config)
    assert relative(weights, without_key_biases(expected.weights, config)) < weight_error
