"""One tensor for all parameters, and what must stay true when it is swapped."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.errors import ShapeError
from slipstream.core.sections import ModelConfig
from slipstream.models.attention import PackedAttention
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors
from slipstream.models.initialise import new_model

CONFIG = ModelConfig(hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2, num_kv_heads=1, max_positions=16)


def tiny(seed=0, **changes):
    return new_model(CONFIG.model_copy(update=changes), vocab_size=11, seed=seed)


def outputs(model):
    tokens, positions = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 1, 2, 0, 1])
    return model.logits(model(tokens, positions, PackedAttention([3, 2])))


def test_rehoming_changes_no_output_and_counts_tied_weights_once():
    model = tiny()
    before = outputs(model)
    flat = FlatParameters(model)
    assert torch.equal(outputs(model), before)
    assert flat.num_params == flat.flat.numel() == sum(p.numel() for p in model.parameters())
    assert flat.flat.is_contiguous()
    assert FlatParameters(tiny(tie_embeddings=False)).num_params == flat.num_params + 11 * 16


def test_every_parameter_is_a_view_into_flat():
    model = tiny()
    flat = FlatParameters(model)
    assert list(flat.named_views()) == [name for name, _ in model.named_parameters()]
    flat.flat.zero_()
    assert all(not parameter.any() for parameter in model.parameters())


def test_rebind_is_a_pointer_flip_that_changes_the_outputs():
    model, other = tiny(seed=0), tiny(seed=1)
    flat = FlatParameters(model)
    first, second = flat.flat, FlatParameters(other).flat.clone()
    expected = outputs(model), outputs(other)
    flat.rebind(second)
    assert torch.equal(outputs(model), expected[1])
    assert model.embedding.weight.data_ptr() == second.data_ptr()
    flat.rebind(first)
    assert torch.equal(outputs(model), expected[0])


def test_fused_hugging_face_tensors_follow_a_rebind():
    model = tiny()
    flat = FlatParameters(model)
    new = torch.randn(flat.num_params)
    flat.rebind(new)
    inside = range(new.data_ptr(), new.data_ptr() + new.nbytes)
    assert all(tensor.data_ptr() in inside for tensor in logical_tensors(model).values())


def test_gradients_lie_in_one_tensor():
    model, plain = tiny(), tiny()
    flat = FlatParameters(model)
    flat.zero_grad()
    grad = flat.grad
    for _ in range(2):
        outputs(model).square().sum().backward()
        outputs(plain).square().sum().backward()
    assert torch.equal(grad, torch.cat([p.grad.flatten() for p in plain.parameters()]))
    grad.zero_()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_one_optimizer_step_on_flat_equals_one_per_parameter():
    model, plain = tiny(), tiny()
    flat = FlatParameters(model)
    whole = torch.nn.Parameter(flat.flat)
    flat.zero_grad()
    whole.grad = flat.grad
    for net, parameters in ((model, [whole]), (plain, list(plain.parameters()))):
        outputs(net).square().sum().backward()
        torch.optim.AdamW(parameters, lr=0.01).step()
    torch.testing.assert_close(outputs(model), outputs(plain))


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(1, dtype=torch.float64)])
def test_rebind_refuses_what_does_not_fit(wrong):
    with pytest.raises(ShapeError, match="rebind"):
        FlatParameters(tiny()).rebind(wrong)


def test_only_fp32_is_flattened():
    with pytest.raises(ShapeError, match=r"embedding\.weight"):
        FlatParameters(tiny().to(torch.bfloat16))
