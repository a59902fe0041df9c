"""Attention to sequences end to end, in one call: its bounds and gathered keys, against explicit masks in float64.

The kernel is torch's, and needs a GPU; here a loop over sequences stands in for it, which reads the same bounds.
"""

from __future__ import annotations

import pytest
import torch
from drawn import drawn
from hypothesis import strategies as st
from test_attention import dense_attention, shared_rows
from test_recomputed import LLAMA

from slipstream.models import attention
from slipstream.models.attention import PackedAttention, SequenceEnds
from slipstream.models.initialise import initialise
from slipstream.models.sharded import Division, divide
from slipstream.models.transformer import Transformer


def one_by_one(q, k, v, queries, keys, most_queries, most_keys):
    """The queries of a sequence are its last tokens."""
    assert queries.dtype == keys.dtype == torch.int32
    assert (most_queries, most_keys) == (int(queries.diff().max()), int(keys.diff().max()))
    repeat, out = q.shape[1] // k.shape[1], []
    for number in range(len(queries) - 1):
        own = q[queries[number] : queries[number + 1]]
        seen, mixed = (x[keys[number] : keys[number + 1]].repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("nhd,mhd->hnm", own, seen) * q.shape[-1] ** -0.5
        is_seen = torch.ones(len(own), len(seen), dtype=torch.bool).tril(len(seen) - len(own))
        out.append(torch.einsum("hnm,mhd->nhd", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), mixed))
    return torch.cat(out)


families = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=4
)


@drawn(
    20,
    60,
    family=families.filter(lambda one: shared_rows(one)[0]),
    heads_and_kv_heads=st.sampled_from([(2, 2), (4, 2)]),
)
def test_one_call_equals_every_sequence_alone(family, heads_and_kv_heads):
    """A sequence without rows of its own, all of whose prompt is shared, is among those drawn."""
    heads, kv_heads = heads_and_kv_heads
    lengths, rows = shared_rows(family)
    flat = torch.tensor([row for own in rows for row in own])
    num_rows = int(flat.max()) + 1
    generator = torch.Generator().manual_seed(num_rows)
    fused = torch.randn(num_rows, heads + 2 * kv_heads, 8, generator=generator, requires_grad=True)
    weight = torch.randn(num_rows, heads, 8, generator=generator).double()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attention, "takes_flash", lambda q, k: True)
        patched.setattr(attention, "flash", one_by_one)
        patched.setattr(PackedAttention, "padded", None)
        out = PackedAttention(lengths, flat, varlen=True)(0, *fused.split([heads, kv_heads, kv_heads], 1))
    (grad,) = torch.autograd.grad((out * weight).sum(), fused)
    copies = dense_attention(*fused[flat].split([heads, kv_heads, kv_heads], 1), lengths)
    first = torch.tensor([flat.tolist().index(row) for row in range(num_rows)])
    torch.testing.assert_close(out.double()[flat], copies, atol=2e-5, rtol=1e-4)
    (expected,) = torch.autograd.grad((copies[first] * weight).sum(), fused)
    torch.testing.assert_close(grad, expected, atol=5e-5, rtol=1e-4)


def test_rows_that_lie_otherwise_are_padded():
    assert SequenceEnds.of([3, 3], torch.tensor([1, 0, 2, 0, 1, 3])) is None
    assert SequenceEnds.of([2, 3], torch.tensor([0, 1, 2, 0, 3])) is None
    assert SequenceEnds.of([2, 2, 3], torch.tensor([0, 1, 0, 1, 0, 1, 2])).queries.tolist() == [0, 2, 3]


@pytest.mark.parametrize(("alignment", "is_right"), [("last", True), ("first", False), ("missing", False)])
def test_a_kernel_is_tried_before_it_is_used(alignment, is_right, monkeypatch):
    """One that lets a sequence's first query see one key only would be found, and so is one that is not there."""

    def kernel(q, k, v, queries, keys, most_queries, most_keys):
        if alignment == "missing":
            raise RuntimeError("not compiled")
        if alignment == "first":
            starts = keys[:-1] + queries.diff()
            keys = torch.stack([keys[:-1], starts]).t().flatten().to(torch.int32)
            kept = [(int(keys[i]), int(keys[i + 1])) for i in range(0, len(keys), 2)]
            k, v = (torch.cat([x[a:b] for a, b in kept]) for x in (k, v))
            keys, most_keys = queries, most_queries
        return one_by_one(q, k, v, queries, keys, most_queries, most_keys)

    monkeypatch.setattr(attention, "flash", kernel)
    attention.flash_is_right.cache_clear()
    assert attention.flash_is_right(torch.device("cpu"), torch.bfloat16, 4, 2, 16) == is_right
    attention.flash_is_right.cache_clear()


@pytest.mark.parametrize("keeps_products", [False, True])
def test_the_trial_is_no_part_of_a_layer_that_runs_again(keeps_products, monkeypatch):
    """The first pass tries the kernel, in the middle of its first layer; the backward pass does not."""
    monkeypatch.setattr(attention, "flash", one_by_one)
    monkeypatch.setattr(
        attention,
        "takes_flash",
        lambda q, k: attention.flash_is_right(q.device, torch.bfloat16, q.shape[1], k.shape[1], q.shape[2]),
    )
    grads = []
    for recomputes in (False, True):
        attention.flash_is_right.cache_clear()
        model = Transformer(LLAMA)
        initialise(model, 0)
        divide(model, Division(recomputes=recomputes, keeps_products=recomputes and keeps_products))
        rows = torch.tensor([0, 1, 2, 0, 1, 3, 4])
        states = model(torch.arange(5), torch.tensor([0, 1, 2, 2, 3]), PackedAttention([3, 4], rows, varlen=True))
        states.square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
        assert attention.flash_is_right.cache_info().misses == 1
    attention.flash_is_right.cache_clear()
    assert all(torch.equal(plain, again) for plain, again in zip(*grads, strict=True))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_kernel_takes_what_it_is_given(kv_heads):
    """Shapes and types of torch's own, forward and backward, where nothing is computed."""
    attended = PackedAttention([5, 4, 3], torch.tensor([0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9]), varlen=True)
    fused = torch.empty(10, 4 + 2 * kv_heads, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = attended(0, *fused.split([4, kv_heads, kv_heads], 1))
    assert (out.shape, out.dtype) == ((10, 4, 16), torch.bfloat16)
    out.sum().backward()
    assert fused.grad.shape == fused.shape
    assert "_index" not in vars(attended)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 64), (14, 2, 64), (16, 8, 128)])
def test_a_gpus_kernel_is_right(heads, kv_heads, dim):
    assert attention.flash_is_right(torch.device("cuda", 0), torch.bfloat16, heads, kv_heads, dim)
