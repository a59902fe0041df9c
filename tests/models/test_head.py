"""Logprobs and entropies straight from states, against autograd through all logits in float64."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.models import head
from slipstream.models.head import _HeadLogprobs, head_logprobs
from slipstream.models.transformer import OneRank

N, K, V = 11, 6, 17


def in_float64(hidden, weight, targets, kept, temperature):
    """By torch's log_softmax over all logits, or over each row's own set."""
    logits = hidden.double() @ weight.double().t() / temperature
    logprobs = logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    if kept is None:
        return logprobs.gather(1, targets[:, None]).squeeze(1), entropies
    rows = [
        row[target] - row[torch.tensor([j for j in own.tolist() if j >= 0])].logsumexp(0)
        for row, target, own in zip(logits, targets, kept, strict=True)
    ]
    return torch.stack(rows), entropies


def kept_sets(targets, generator):
    """Sets of 1 to 5 tokens with the target among them, filled up with -1."""
    sets = torch.full((len(targets), 5), -1)
    for row, target in enumerate(targets.tolist()):
        others = [j for j in torch.randperm(V, generator=generator).tolist() if j != target]
        own = [target, *others][: int(torch.randint(1, 6, (), generator=generator))]
        sets[row, : len(own)] = torch.tensor(own)
    return sets


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.booleans(),
    st.sampled_from([1.0, 0.7]),
    st.sampled_from([1, 4, 11, 100]),
    st.sampled_from(["both", "logprobs", "entropies"]),
)
def test_values_and_gradients_are_those_of_all_logits(seed, is_cut, temperature, at_once, used):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((N, K), (V, K)))
    targets = torch.randint(V, (N,), generator=generator)
    kept = kept_sets(targets, generator) if is_cut else None
    grads = [torch.randn(N, generator=generator) * (used in ("both", name)) for name in ("logprobs", "entropies")]
    found = head_logprobs(hidden, weight, targets, kept, temperature=temperature, at_once=at_once)
    expected = in_float64(hidden, weight, targets, kept, temperature)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    used_ones = [index for index, name in enumerate(("logprobs", "entropies")) if used in ("both", name)]
    ours = torch.autograd.grad([found[i] for i in used_ones], (hidden, weight), [grads[i] for i in used_ones])
    theirs = torch.autograd.grad(
        [expected[i] for i in used_ones], (hidden, weight), [grads[i].double() for i in used_ones]
    )
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, atol=2e-5, rtol=1e-4)


def test_in_bfloat16_only_the_gradient_of_logits_is_rounded():
    """Each number of it by 2^-8 of itself, and so what is summed of it by that share of its terms' sizes."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((N, K), (V, K)))
    targets, grads = torch.randint(V, (N,)), (torch.randn(N), torch.randn(N))
    found = head_logprobs(hidden, weight, targets, at_once=4)
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    expected = in_float64(*exact, targets, None, 1.0)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    logits = exact[0] @ exact[1].t()
    through = torch.autograd.grad(
        in_float64(logits, torch.eye(V), targets, None, 1.0), logits, [g.double() for g in grads]
    )
    bounds = through[0].abs() @ exact[1].abs(), through[0].abs().t() @ exact[0].abs()
    ours = torch.autograd.grad(found, (hidden, weight), grads)
    theirs = torch.autograd.grad(expected, exact, [g.double() for g in grads])
    for mine, right, terms in zip(ours, theirs, bounds, strict=True):
        assert mine.dtype == torch.bfloat16
        assert ((mine.double() - right).abs() <= 2**-8 * (terms + right.abs()) + 1e-5).all()


def test_no_rows_and_a_frozen_head():
    hidden, weight = torch.randn(0, K, requires_grad=True), torch.randn(V, K, requires_grad=True)
    logprobs, entropies = head_logprobs(hidden, weight, torch.empty(0, dtype=torch.int64), at_once=4)
    (logprobs.sum() + entropies.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()
    hidden, frozen = torch.randn(N, K, requires_grad=True), torch.randn(V, K)
    head_logprobs(hidden, frozen, torch.zeros(N, dtype=torch.int64), at_once=4)[0].sum().backward()
    assert hidden.grad is not None
    assert frozen.grad is None


class Products(TorchDispatchMode):
    """Notes the types of every matrix product."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.types.add((args[0].dtype, args[1].dtype, out.dtype))
        return out


def test_on_cuda_no_product_is_of_float32(monkeypatch):
    """Forward and backward, on tensors that only say where they lie; torch's own engine would look for the device."""
    monkeypatch.setattr(head, "takes_kernels", lambda _: False)  # there is nothing to launch them on
    ctx = SimpleNamespace(needs_input_grad=(True, True), set_materialize_grads=lambda _: None)
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    with FakeTensorMode(), Products() as seen:
        hidden, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((64, 32), (99, 32)))
        targets = torch.empty(64, dtype=torch.int64, device="cuda")
        found = _HeadLogprobs.forward(ctx, hidden, weight, targets, None, 0.5, 16, OneRank())
        assert [one.dtype for one in found] == [torch.float32] * 2
        of_hidden, of_weight, *_ = _HeadLogprobs.backward(ctx, *found)
    assert of_hidden is not None
    assert of_weight is not None
    assert (of_hidden.dtype, of_hidden.shape, of_hidden.device.type) == (torch.bfloat16, (64, 32), "cuda")
    assert (of_weight.dtype, of_weight.shape, of_weight.device.type) == (torch.bfloat16, (99, 32), "cuda")
    assert seen.types == {(torch.bfloat16, torch.bfloat16, torch.float32)}
