"""One rank in bfloat16 with a copy of its weights, against FSDP2 on one rank: the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sharded_jobs
import torch
import torch.distributed as dist
from covering import covering
from gradients import named_grads
from rank_models import CONFIGS as DENSE
from rank_models import MIXTURE
from sharded_jobs import Layout
from test_sharded import SETTINGS, relative

from slipstream import batching
from slipstream.core.rank_group import RankGroup
from slipstream.core.stage_sections import WarmStartConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.compute_copy import ComputeCopy
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.sharded import Division, ShardedParameters
from slipstream.models.transformer import Transformer
from slipstream.trainer.optim import AdamW
from slipstream.trainer.supervised import supervised_updates

CONFIGS = {**DENSE, "mixture": MIXTURE}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(
    case: str, updates: int, *, weight_decay: float = 0.1, **division: Any
) -> tuple[list[Any], Transformer, ShardedParameters]:
    """Gradients, norms and losses of each update, and the weights behind the last."""
    config = CONFIGS[case]
    model = sharded_jobs.part_of(config, Division(precision="bfloat16", **division))
    parameters = ShardedParameters(model, Division(precision="bfloat16", **division))
    settings = OptimizerConfig(**(SETTINGS | {"weight_decay": weight_decay}))
    optimizer, found = AdamW(parameters, settings, total_updates=updates), list[Any]()
    for update in range(updates):
        sequences = sharded_jobs.sequences_of(update, config.vocab_size)
        loss = sharded_jobs.update_from(model, optimizer, sequences, Layout(1, 1), RankGroup.alone())
        found += [loss, {name: grad.clone() for name, grad in named_grads(parameters).items()}, optimizer.step()]
    return [*found, parameters.named_views()], model, parameters


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, float):
            assert mine == other
        else:
            assert mine.keys() == other.keys()
            assert all(mine[name].dtype == torch.float32 and torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize(("case", "weight_decay"), covering(["qwen3", "gpt2", "llama_tied", "mixture"], [0.1, 0.0]))
@pytest.mark.usefixtures("one_rank")
def test_updates_are_those_of_fsdp(case: str, weight_decay: float) -> None:
    """Without weight decay nothing but the fused optimizer writes into weights, and torch counts none of its writes."""
    ours, model, _ = trained(case, 3, weight_decay=weight_decay, copies=True, recomputes=case == "gpt2")
    theirs, *_ = trained(case, 3, weight_decay=weight_decay)
    assert_same(ours, theirs)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("case", ["qwen3", "gpt2"])
def test_a_copy_in_float32_changes_nothing(case: str) -> None:
    config, plain = CONFIGS[case], sharded_jobs.train_alone(CONFIGS[case], SETTINGS, 3)
    model = sharded_jobs.part_of(config, Division())
    model.compute_copy = ComputeCopy(model, torch.float32)
    optimizer = AdamW(ShardedParameters(model, Division()), OptimizerConfig(**SETTINGS), total_updates=3)
    for update in range(3):
        sequences = sharded_jobs.sequences_of(update, config.vocab_size)
        sharded_jobs.update_from(model, optimizer, sequences, Layout(1, 1), RankGroup.alone())
        assert optimizer.step() == pytest.approx(plain.grad_norms[update], rel=1e-6)
    boxes = sharded_jobs.boxes(model, optimizer.parameters.named_views())
    assert relative(sharded_jobs.assembled([boxes]), plain.weights) < 1e-5


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_published_bytes_are_those_of_the_copy(weight_decay: float) -> None:
    """And of the weights rounded once, which the copy is."""
    _, model, parameters = trained("llama_tied", 2, weight_decay=weight_decay, copies=True)
    layout, views = WeightLayout(model, "bfloat16"), parameters.computed_views()
    found, expected = (torch.zeros(layout.num_bytes, dtype=torch.uint8) for _ in range(2))
    list(Packer(layout, parameters.named_views()).pack(expected))
    types = {stored.name: stored.dtype for stored in layout.stored}
    list(Packer(layout, parameters.named_views() | {n: v for n, v in views.items() if types[n] == v.dtype}).pack(found))
    assert torch.equal(found, expected)
    for name, view in parameters.named_views().items():
        assert torch.equal(view.bfloat16(), views[name]), name


def test_what_is_written_into_weights_is_computed_with() -> None:
    """Without a pass in between, as after a checkpoint; and no gradient reaches a frozen model."""
    _, model, parameters = trained("qwen3", 1, copies=True)
    before = sharded_jobs.logits_of(model)
    with torch.no_grad():
        for view in parameters.named_views().values():
            view.mul_(1.25)
    parameters.reshard()
    assert all(torch.equal(parameters.named_views()[n].bfloat16(), v) for n, v in parameters.computed_views().items())
    after = sharded_jobs.logits_of(model)
    assert abs(after - before).max() > 1e-2
    parameters.reshard()
    model.requires_grad_(False)
    states = model(torch.arange(9), torch.arange(9), sharded_jobs.PackedAttention([9]))
    assert states.dtype == torch.bfloat16
    assert not states.requires_grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("one_rank")
def test_a_warm_start_learns(device: str) -> None:
    """As the trainer makes one by default, without weight decay: four completions by heart."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    division = Division(device=place, precision="bfloat16", copies=True)
    model = sharded_jobs.part_of(CONFIGS["llama_tied"], division)
    optimizer = AdamW(ShardedParameters(model, division), OptimizerConfig(lr=5e-3), total_updates=60)
    demonstrations = [
        (np.arange(3, dtype=np.int32) + first, np.arange(8, dtype=np.int32)[::-1] + first) for first in range(4)
    ]
    made = supervised_updates(
        model,
        optimizer,
        demonstrations,
        config=WarmStartConfig(steps=60, batch_size=4),
        microbatch_tokens=64,
        seed=0,
        batching=batching.collate,
    )
    losses = [update.loss for update in made]
    assert losses[-1] < 0.1 * losses[0]
