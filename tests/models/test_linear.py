"""The oneDNN product: values and gradients of `F.linear`, and bits that do not depend on company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slipstream.models import linear as module
from slipstream.models.linear import Linear, linear

needs_onednn = pytest.mark.skipif(module._onednn is None, reason="this build of torch has no oneDNN")
SIZES = [(256, 768), (768, 256), (64, 72), (48, 32)]


def operands(rows: int, inner: int, outer: int, *, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, inner), (outer, inner), (outer,))
    return tuple(torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes)


@pytest.mark.parametrize("rows", [1, 3, 8, 130])
@pytest.mark.parametrize(("inner", "outer"), SIZES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_values_and_gradients_are_those_of_a_float64_product(rows: int, inner: int, outer: int, has_bias: bool) -> None:
    x, weight, bias = operands(rows, inner, outer)
    given = (x, weight, bias) if has_bias else (x, weight)
    exact = tuple(value.detach().double().requires_grad_() for value in given)
    upstream = torch.randn(rows, outer, generator=torch.Generator().manual_seed(1))
    out, expected = linear(*given), F.linear(*exact)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    out.backward(upstream)
    expected.backward(upstream.double())
    for value, reference in zip(given, exact, strict=True):
        assert value.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(value.grad.double(), reference.grad, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_a_sum_has_no_strides_and_still_works() -> None:
    x, weight, bias = operands(16, 64, 32)
    linear(x, weight, bias).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(32, -1))


@needs_onednn
@pytest.mark.parametrize(("inner", "outer"), SIZES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_at_every_multiple_of_eight(inner: int, outer: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            x, weight, _ = operands(128, inner, outer)
            alone = torch.cat([linear(x[start : start + 8].clone(), weight) for start in range(0, 128, 8)])
            for rows in range(8, 129, 8):
                assert torch.equal(linear(x[:rows].clone(), weight), alone[:rows]), rows
    finally:
        torch.set_num_threads(before)


@needs_onednn
def test_gradients_repeat_bit_for_bit() -> None:
    def gradients() -> list[torch.Tensor]:
        given = operands(300, 256, 768)
        linear(*given).square().sum().backward()
        return [value.grad for value in given if value.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(), gradients(), strict=True))


def test_other_types_and_builds_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(8, 32, 16, dtype=torch.float64)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    monkeypatch.setattr(module, "_onednn", None)
    layer = Linear(32, 16)
    layer.load_state_dict({"weight": weight, "bias": bias})
    assert torch.equal(layer(x.float()), F.linear(x.float(), layer.weight, layer.bias))


@needs_onednn
def test_a_product_that_depends_on_its_batch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.keeps_bits()
    by_batch = lambda x, weight: F.linear(x, weight) * (1 + 1e-6 * (len(x) > 64))  # noqa: E731
    monkeypatch.setattr(module, "linear", by_batch)
    assert not module.keeps_bits()
