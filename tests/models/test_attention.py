"""PackedAttention against a dense float64 reference, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.errors import ShapeError
from slipstream.models.attention import PackedAttention, length_batches


def dense_attention(q, k, v, lengths):
    """Softmax over an explicit block-diagonal causal mask, in float64."""
    repeat = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(repeat, 1), v.double().repeat_interleave(repeat, 1)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    visible = (sequence[:, None] == sequence[None]).tril()
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("lengths", [[1], [7], [1, 1, 1], [5, 40, 5, 6, 39, 1], list(range(1, 25))])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
def test_forward_and_gradients_equal_dense_attention(lengths, heads, kv_heads):
    generator = torch.Generator().manual_seed(len(lengths))
    fused = torch.randn(sum(lengths), heads + 2 * kv_heads, 8, generator=generator, requires_grad=True)
    weight = torch.randn(sum(lengths), heads, 8, generator=generator)
    results = []
    for attention in (lambda *qkv: PackedAttention(lengths)(0, *qkv), lambda *qkv: dense_attention(*qkv, lengths)):
        out = attention(*fused.split([heads, kv_heads, kv_heads], 1))
        (grad,) = torch.autograd.grad((out * weight).sum(), fused)
        results.append((out.float(), grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_one_object_serves_every_layer_and_no_grad():
    attention = PackedAttention([3, 2])
    q, k, v = torch.randn(3, 5, 2, 4).unbind(0)
    with torch.no_grad():
        assert torch.equal(attention(0, q, k, v), attention(1, q, k, v))


def contiguous_partitions(n):
    for cuts in itertools.product([False, True], repeat=n - 1):
        bounds = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        yield list(itertools.pairwise(bounds))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_length_batches_are_the_cheapest_partition(lengths, overhead):
    batches = length_batches(lengths, overhead)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    cost = sum(len(batch) * max(lengths[i] for i in batch) + overhead for batch in batches)
    ordered = sorted(lengths)
    best = min(
        sum((end - begin) * ordered[end - 1] + overhead for begin, end in partition)
        for partition in contiguous_partitions(len(ordered))
    )
    assert cost == best


@pytest.mark.parametrize("lengths", [[], [3, 0], [-1]])
def test_empty_sequences_are_refused(lengths):
    with pytest.raises(ShapeError):
        PackedAttention(lengths)


def test_wrong_number_of_tokens_is_refused():
    with pytest.raises(ShapeError, match="allowed: 5"):
        PackedAttention([3, 2])(0, *torch.zeros(3, 4, 1, 2).unbind(0))


# Prefixes of 0..9 tokens, each with the own lengths of the sequences that start with it.
families = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=4
)


def shared_rows(drawn):
    """Lengths of the sequences, and the rows of each: a prefix followed by what its sequences add."""
    lengths, rows, num_rows = [], [], 0
    for prefix, own_lengths in drawn:
        shared = list(range(num_rows, num_rows + prefix))
        num_rows += prefix
        for own in own_lengths:
            if prefix + own:
                lengths.append(prefix + own)
                rows.append([*shared, *range(num_rows, num_rows + own)])
                num_rows += own
    return lengths, rows


@given(families.filter(lambda drawn: shared_rows(drawn)[0]), st.sampled_from([(2, 2), (4, 2)]))
@settings(max_examples=60, deadline=None)
def test_shared_prefixes_equal_every_sequence_alone(drawn, heads_and_kv_heads):
    heads, kv_heads = heads_and_kv_heads
    lengths, rows = shared_rows(drawn)
    flat = torch.tensor([row for own in rows for row in own])
    num_rows = int(flat.max()) + 1
    generator = torch.Generator().manual_seed(num_rows)
    fused = torch.randn(num_rows, heads + 2 * kv_heads, 8, generator=generator, requires_grad=True)
    weight = torch.randn(num_rows, heads, 8, generator=generator).double()
    out = PackedAttention(lengths, flat)(0, *fused.split([heads, kv_heads, kv_heads], 1))
    (grad,) = torch.autograd.grad((out * weight).sum(), fused)
    # Every sequence in a copy of its own; what it sees of a shared row's output is the same in all of them.
    copies = dense_attention(*fused[flat].split([heads, kv_heads, kv_heads], 1), lengths)
    first = torch.tensor([flat.tolist().index(row) for row in range(num_rows)])
    torch.testing.assert_close(out.double()[flat], copies, atol=2e-5, rtol=1e-4)
    (expected,) = torch.autograd.grad((copies[first] * weight).sum(), fused)
    torch.testing.assert_close(grad, expected, atol=5e-5, rtol=1e-4)


def test_rows_that_do_not_fit_are_refused():
    with pytest.raises(ShapeError, match="one row is needed per token"):
        PackedAttention([2, 2], torch.tensor([0, 1, 2]))
    with pytest.raises(ShapeError, match="none in row 2"):
        PackedAttention([2, 2], torch.tensor([0, 1, 0, 3]))
