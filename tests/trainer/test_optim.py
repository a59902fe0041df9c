import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training_data import make_groups, run_config, tiny_policy
from transformers.optimization import get_scheduler

from slipstream.batching import collate as batching
from slipstream.core.errors import NonFiniteError
from slipstream.core.imported import import_config
from slipstream.core.recipes import resolve
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.flat import FlatParameters
from slipstream.models.sharded import Division, ShardedParameters
from slipstream.trainer.optim import AdamW, corrected_eps, lr_factor
from slipstream.trainer.step import train_on_batch


def fill_grads(parameters, seed, scale=0.01):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def flat_moments(optimizer):
    """A copy of each moment, in the order of the weights."""
    moments = optimizer.named_moments().items()
    return {moment: torch.cat([view.flatten() for view in views.values()]) for moment, views in moments}


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch_adamw_with_clipping_and_two_groups(weight_decay):
    config = OptimizerConfig(lr=1e-2, betas=(0.8, 0.95), weight_decay=weight_decay, max_grad_norm=0.5)
    ours, flat = tiny_policy()
    theirs, _ = tiny_policy()
    optimizer = AdamW(flat, config, total_updates=10)
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
    optimizer = AdamW(flat, OptimizerConfig(), total_updates=1)
    for parameter in model.parameters():
        parameter.grad = None  # something else had the gradients meanwhile
    optimizer.zero_grad()
    for _ in range(2):
        sum((parameter * parameter).sum() for parameter in model.parameters()).backward()
    torch.testing.assert_close(optimizer.parameters.grad, 4 * flat.flat)


def test_non_finite_gradients_change_nothing():
    model, flat = tiny_policy()
    optimizer = AdamW(flat, OptimizerConfig(weight_decay=0.1), total_updates=10)
    optimizer.zero_grad()
    fill_grads(model.parameters(), 0)
    optimizer.step()
    before = flat.flat.clone(), flat_moments(optimizer)["exp_avg"], optimizer.num_updates
    next(iter(model.parameters())).grad.view(-1)[0] = math.nan
    with pytest.raises(NonFiniteError):
        optimizer.step()
    assert torch.equal(before[0], flat.flat)
    assert torch.equal(before[1], flat_moments(optimizer)["exp_avg"])
    assert before[2] == optimizer.num_updates


def test_schedules_golden():
    def factors(schedule, warmup):
        config = OptimizerConfig(schedule=schedule, warmup_updates=warmup)
        return [lr_factor(config, update=update, total_updates=6) for update in range(7)]

    assert factors("constant", 0) == [1.0] * 7
    assert factors("linear", 2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0])
    half = math.sqrt(0.5)
    assert factors("cosine", 2) == pytest.approx([0.5, 1.0, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2, 0.0], abs=1e-12)


def test_a_rate_per_step_is_the_same_for_all_its_updates_and_after_a_resume():
    """N, item 8: lr * (1 - (step - 1) / steps); four epochs of one minibatch are four updates at that rate."""
    _, flat = tiny_policy()
    config = OptimizerConfig(lr=1.0, schedule="linear", schedule_by="step")
    optimizer = AdamW(flat, config, total_updates=20, updates_per_step=4)
    rates = []
    for _ in range(20):
        rates.append(optimizer.lr)
        optimizer.planned += 1
    assert rates == pytest.approx([1 - step / 5 for step in range(5) for _ in range(4)])
    optimizer.planned = 6
    assert optimizer.lr == pytest.approx(0.8)
    by_update = AdamW(flat, OptimizerConfig(lr=1.0, schedule="linear"), total_updates=20, updates_per_step=4)
    by_update.planned = 6
    assert by_update.lr == pytest.approx(0.7)


def one_weight(config: OptimizerConfig) -> tuple[nn.Linear, AdamW]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, AdamW(FlatParameters(model), config, total_updates=10)


def weights_after(config: OptimizerConfig, grads: list[float]) -> list[float]:
    model, optimizer = one_weight(config)
    weights = []
    for grad in grads:
        optimizer.zero_grad()
        model.weight.grad.fill_(grad)
        optimizer.step()
        weights.append(model.weight.item())
    return weights


def test_both_formulations_of_adam_golden():
    """b1 = 1/2 and b2 = 3/4: after gradients 1 and -1, m = 1/2 then -1/4 and v = 1/4 then 7/16."""
    settings = {"lr": 1.0, "betas": (0.5, 0.75), "eps": 0.5, "max_grad_norm": 100.0}
    root = math.sqrt(7) / 4  # sqrt(v) and sqrt(1 - b2^t) at t = 2, while 1 - b1^t = 3/4
    tensorflow = [-0.5, -0.5 + (4 / 3) * root * 0.25 / (root + 0.5)]
    assert weights_after(OptimizerConfig(adam="tensorflow", **settings), [1.0, -1.0]) == pytest.approx(tensorflow)
    torch_form = [-1 / 1.5, -1 / 1.5 + (4 / 3) * 0.25 / 1.5]
    assert weights_after(OptimizerConfig(adam="torch", **settings), [1.0, -1.0]) == pytest.approx(torch_form)


def test_torch_is_more_aggressive_on_tiny_gradients():
    """N: at the first update the two differ by 1 / sqrt(1 - 0.999) = 31.6."""
    [ours] = weights_after(OptimizerConfig(adam="torch", eps=1e-5), [1e-9])
    [theirs] = weights_after(OptimizerConfig(adam="tensorflow", eps=1e-5), [1e-9])
    assert ours / theirs == pytest.approx(31.62, rel=1e-3)


def test_tensorflow_adam_against_its_formula_in_float64():
    lr, b1, b2, eps = 1e-2, 0.9, 0.999, 1e-5
    config = OptimizerConfig(lr=lr, betas=(b1, b2), eps=eps, adam="tensorflow", max_grad_norm=1e9)
    model, flat = tiny_policy()
    optimizer = AdamW(flat, config, total_updates=10)
    weights = flat.flat.double().clone()
    mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
    for update in range(1, 7):
        optimizer.zero_grad()
        fill_grads(model.parameters(), update, scale=10.0 ** -(update + 1))
        grad = optimizer.parameters.grad.double()
        mean = b1 * mean + (1 - b1) * grad
        square = b2 * square + (1 - b2) * grad**2
        weights -= lr * math.sqrt(1 - b2**update) / (1 - b1**update) * mean / (square.sqrt() + eps)
        optimizer.step()
        torch.testing.assert_close(flat.flat.double(), weights, rtol=1e-6, atol=1e-6)
        if update == 3:  # the epsilon follows the number of updates, also of a restored state
            kept = optimizer.named_moments()
            optimizer = AdamW(flat, config, total_updates=10)
            for moment, views in optimizer.named_moments().items():
                for name, view in views.items():
                    view.copy_(kept[moment][name])
            optimizer.resumed(update)


@pytest.mark.parametrize("update", [1, 2, 100])
def test_tensorflow_epsilon_scaled_by_the_bias_correction_is_torch(update):
    config = OptimizerConfig(eps=1e-5, betas=(0.9, 0.999))
    scaled = config.model_copy(update={"adam": "tensorflow", "eps": 1e-5 * math.sqrt(1 - 0.999**update)})
    assert corrected_eps(scaled, update=update) == pytest.approx(corrected_eps(config, update=update), rel=1e-12)


def test_rates_of_a_file_of_trl_are_those_of_transformers_schedules():
    for kind, warmup in (("linear", 4), ("cosine", 0.1), ("constant_with_warmup", 3), ("constant", 3)):
        rate = {"lr_scheduler_type": kind, "warmup_steps": warmup, "max_steps": 40, "learning_rate": "2e-4"}
        config = resolve(import_config(rate).tables, {"prompts.dataset": "x.jsonl", "model.path": "a/b"})
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        ratio = math.ceil(warmup * 40) if warmup < 1 else warmup
        theirs = get_scheduler(kind, optimizer, num_warmup_steps=ratio, num_training_steps=40)
        rates = []
        for _ in range(40):
            rates.append(theirs.get_last_lr()[0])
            optimizer.step()
            theirs.step()
        ours = [lr_factor(config.trainer.optimizer, update=i, total_updates=config.steps) for i in range(40)]
        first = config.trainer.optimizer.warmup_updates  # theirs begins at 0, ours at 1 / warm-up
        assert ours[first:] == pytest.approx(rates[first:])
        assert ours[: max(0, first - 1)] == pytest.approx(rates[1:first])
        assert config.trainer.optimizer.lr == 2e-4


def updates(optimizer, parameters, first, count):
    parameters = list(parameters)
    for update in range(first, first + count):
        optimizer.zero_grad()
        fill_grads(parameters, update, scale=0.1 if update % 2 else 1e-4)
        optimizer.step()


def test_offloaded_moments_change_no_bit():
    """Neither of weights nor of moments, before and after they are written into (a checkpoint)."""
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, warmup_updates=3)
    made = [tiny_policy() for _ in range(2)]
    plain, offloaded = (
        AdamW(flat, config, total_updates=10, offloads=offloads)
        for offloads, (_, flat) in zip((False, True), made, strict=True)
    )
    for optimizer, (model, _) in zip((plain, offloaded), made, strict=True):
        updates(optimizer, model.parameters(), 0, 5)
        for views in optimizer.named_moments().values():
            for view in views.values():
                view.mul_(0.5)
        optimizer.resumed(5)
        updates(optimizer, model.parameters(), 5, 4)
    assert torch.equal(made[0][1].flat, made[1][1].flat)
    for mine, theirs in zip(flat_moments(plain).values(), flat_moments(offloaded).values(), strict=True):
        assert mine.any()
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("offloads", [False, True])
def test_a_lent_optimizer_and_then_this_one_are_two_of_their_own(offloads):
    """To the bit: weights, moments and rates. The same memory is both's, and is there once."""
    first = OptimizerConfig(lr=3e-2, betas=(0.8, 0.9), weight_decay=0.2, schedule="linear")
    then = OptimizerConfig(lr=1e-2, warmup_updates=3, adam="tensorflow", schedule_by="step")
    (model, flat), (other_model, other_flat) = tiny_policy(), tiny_policy()
    optimizer = AdamW(flat, then, total_updates=10, updates_per_step=2, offloads=offloads)
    lent = optimizer.lent(first, total_updates=6)
    apart = AdamW(other_flat, first, total_updates=6)
    for one, trained in ((lent, model), (apart, other_model)):
        updates(one, trained.parameters(), 0, 4)
    assert lent.num_updates == apart.num_updates == 4
    assert optimizer.num_updates == optimizer.planned == 0
    assert lent.lr == apart.lr
    assert torch.equal(flat.flat, other_flat.flat)
    for moment, views in lent.named_moments().items():
        for name, view in views.items():
            assert view.data_ptr() == optimizer.named_moments()[moment][name].data_ptr()
    optimizer.restart()
    apart = AdamW(other_flat, then, total_updates=10, updates_per_step=2, offloads=offloads)
    for one, trained in ((optimizer, model), (apart, other_model)):
        updates(one, trained.parameters(), 4, 5)
    assert optimizer.lr == apart.lr
    assert torch.equal(flat.flat, other_flat.flat)
    for mine, theirs in zip(flat_moments(optimizer).values(), flat_moments(apart).values(), strict=True):
        assert mine.any()
        assert torch.equal(mine, theirs)


def test_offloaded_moments_lie_on_the_host_but_in_an_update(monkeypatch):
    """Of stored tensors that say they are on CUDA; of their moments, two at a time are there."""
    copied, alive = [], []

    def copy_(target, source, non_blocking=False):
        copied.append((str(source.device), str(target.device), non_blocking))
        return torch.ops.aten.copy_.default(target, source, non_blocking)

    def on_the_device(weights, grads, means, squares, _, steps, **__):
        assert {one.device.type for one in (*weights, *grads, *means, *squares, *steps)} == {"cuda"}
        alive.append(len(means) + len(squares))

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr("slipstream.trainer.optim.adamw", on_the_device)
    with FakeTensorMode():
        weights = [torch.empty(4, 3, device="cuda"), torch.empty(3, device="cuda")]
        stored = SimpleNamespace(
            stored=lambda: weights,
            stored_grads=lambda: [torch.empty_like(one) for one in weights],
            named_views=dict,
            grad_norm=lambda: 1.0,
            norm_on_device=lambda: None,
            reshard=lambda: None,
        )
        optimizer = AdamW(stored, OptimizerConfig(max_grad_norm=2.0), total_updates=3, offloads=True)
        moments = [one for each in optimizer._moments.values() for one in each]
        assert {one.device.type for one in moments} == {"cpu"}
        optimizer.step()
        assert {one.device.type for one in moments} == {"cpu"}
    assert alive == [2, 2]
    assert copied == 2 * (2 * [("cpu", "cuda:0", True)] + 2 * [("cuda:0", "cpu", True)])


def test_steps_with_offloaded_moments_change_no_bit():
    """Of whole training steps with several updates each, each of several microbatches."""
    config = run_config(trainer={"minibatches": 2, "epochs": 1, "microbatch_tokens": 20})
    weights = []
    for offloads in (False, True):
        model, flat = tiny_policy()
        optimizer = AdamW(flat, config.trainer.optimizer, total_updates=8, offloads=offloads)
        for _ in range(2):
            metrics = train_on_batch(model, optimizer, make_groups(), config=config, step=0, batching=batching)
        assert metrics["num_microbatches"] >= 2 * metrics["num_updates"] == 4
        weights.append(flat.flat.clone())
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], tiny_policy()[1].flat)


# As on one GPU: the norm stays on the device


def beside_a_device(config):
    """A model and its optimizer, stored as on one GPU, which takes the CPU for one."""
    model, _ = tiny_policy()
    parameters = ShardedParameters(model, Division(precision="bfloat16", copies=True))
    parameters._division = Division(device=torch.device("meta"), precision="bfloat16", copies=True)
    return parameters, AdamW(parameters, config, total_updates=10)


def give_grads(parameters, update):
    """Clipped in every other update."""
    parameters.zero_grad()
    generator = torch.Generator().manual_seed(update)
    for grad in parameters.stored_grads():
        grad.copy_(torch.randn(grad.shape, generator=generator) * (0.1 if update % 2 else 1e-4))


def in_float64(weights, grads_of_updates, config):
    """AdamW, clipped, by its formula; norms before clipping, too."""
    moments, norms = [[torch.zeros_like(w), torch.zeros_like(w)] for w in weights], []
    for update, grads in enumerate(grads_of_updates, 1):
        norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
        factor = min(1.0, config.max_grad_norm / norms[-1])
        for weight, grad, (m, v) in zip(weights, grads, moments, strict=True):
            weight *= 1 - config.lr * config.weight_decay * (weight.ndim >= 2)
            m.lerp_(factor * grad, 1 - config.betas[0])
            v.lerp_((factor * grad) ** 2, 1 - config.betas[1])
            corrected = m / (1 - config.betas[0] ** update), v / (1 - config.betas[1] ** update)
            weight -= config.lr * corrected[0] / (corrected[1].sqrt() + config.eps)
    return weights, norms


def test_clipped_on_the_device_it_is_adamw():
    config = OptimizerConfig(lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1, max_grad_norm=0.5)
    parameters, optimizer = beside_a_device(config)
    weights, grads, norms = [w.double() for w in parameters.stored()], [], []
    for update in range(5):
        give_grads(parameters, update)
        grads.append([grad.double() for grad in parameters.stored_grads()])
        norms.append(optimizer.step())
    expected, exact_norms = in_float64(weights, grads, config)
    assert norms == pytest.approx(exact_norms, rel=1e-6)
    assert min(norms) < config.max_grad_norm < max(norms)
    for mine, exact in zip(parameters.stored(), expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_an_update_that_is_refused_behind_its_launch_has_changed_nothing(bad):
    """1e30 squared is no float32."""
    config = OptimizerConfig(weight_decay=0.1, max_grad_norm=0.5)
    (parameters, optimizer), (others, undisturbed) = beside_a_device(config), beside_a_device(config)
    for update in range(3):
        for each, its in ((parameters, optimizer), (others, undisturbed)):
            give_grads(each, update)
            its.step()
        give_grads(parameters, update)
        parameters.stored_grads()[0].view(-1)[:2] = bad
        with pytest.raises(NonFiniteError, match="weights were not changed"):
            optimizer.step()
        assert optimizer.num_updates == undisturbed.num_updates == update + 1
    state = [
        [*each.stored(), *its._moments["exp_avg"], *its._moments["exp_avg_sq"], *its._steps]
        for each, its in ((parameters, optimizer), (others, undisturbed))
    ]
    assert all(torch.equal(one, other) for one, other in zip(*state, strict=True))
