import math

import pytest
import torch
from training_data import tiny_policy

from slipstream.core.config import OptimizerConfig
from slipstream.core.errors import CheckpointError, NonFiniteError
from slipstream.trainer.optim import FlatAdamW, lr_factor


def fill_grads(parameters, seed, scale=0.01):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_adamw_with_clipping_and_two_groups(weight_decay):
    config = OptimizerConfig(lr=1e-2, betas=(0.8, 0.95), weight_decay=weight_decay, max_grad_norm=0.5)
    ours, flat = tiny_policy()
    theirs, _ = tiny_policy()
    optimizer = FlatAdamW(ours, flat, config, total_updates=10)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in theirs.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.8, 0.95),
        eps=config.eps,
        foreach=False,
    )
    for update in range(5):
        optimizer.zero_grad()
        fill_grads(ours.parameters(), update, scale=0.1 if update % 2 else 1e-4)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            other.grad = mine.grad.clone()
        expected_norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        assert optimizer.step() == pytest.approx(expected_norm.item(), rel=1e-5)
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_backward_adds_into_the_flat_gradient():
    model, flat = tiny_policy()
    optimizer = FlatAdamW(model, flat, OptimizerConfig(), total_updates=1)
    FlatAdamW(model, flat, OptimizerConfig(), total_updates=1).zero_grad()  # another one had the gradients meanwhile
    optimizer.zero_grad()
    for _ in range(2):
        sum((parameter * parameter).sum() for parameter in model.parameters()).backward()
    torch.testing.assert_close(optimizer.grad, 4 * flat.flat)


def test_non_finite_gradients_change_nothing():
    model, flat = tiny_policy()
    optimizer = FlatAdamW(model, flat, OptimizerConfig(weight_decay=0.1), total_updates=10)
    optimizer.zero_grad()
    fill_grads(model.parameters(), 0)
    optimizer.step()
    before = flat.flat.clone(), optimizer.state_dict()["exp_avg"].clone(), optimizer.num_updates
    next(iter(model.parameters())).grad.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert torch.equal(before[0], flat.flat)
    assert torch.equal(before[1], optimizer.state_dict()["exp_avg"])
    assert before[2] == optimizer.num_updates


def test_schedules_golden():
    def factors(schedule, warmup):
        config = OptimizerConfig(schedule=schedule, warmup_updates=warmup)
        return [lr_factor(config, update=update, total_updates=6) for update in range(7)]

    assert factors("constant", 0) == [1.0] * 7
    assert factors("linear", 2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    half = math.sqrt(0.5)
    assert factors("cosine", 2) == pytest.approx([0.5, 1.0, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0], abs=1e-12)


def test_state_of_another_model_is_refused():
    model, flat = tiny_policy()
    optimizer = FlatAdamW(model, flat, OptimizerConfig(), total_updates=1)
    state = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3), "num_updates": torch.tensor(1)}
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(state)
