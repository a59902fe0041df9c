import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algorithms.ratios import drop_above, geometric_ratios, sequence_ratios
from slipstream.algorithms.reduce import average
from slipstream.algorithms.segments import segment_counts, segment_mean, segment_sum
from slipstream.core.errors import ShapeError

VALUES = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
MASK = torch.tensor([True, False, True, True, True])
IDS = torch.tensor([0, 0, 1, 1, 1])


def test_by_hand():
    assert segment_sum(VALUES, MASK, IDS).tolist() == [1.0, 28.0]
    assert segment_counts(MASK, IDS).tolist() == [1.0, 3.0]
    assert segment_mean(VALUES, MASK, IDS).tolist() == pytest.approx([1.0, 28 / 3])
    assert average(VALUES, MASK, IDS, reduction="token", num_units=4).item() == pytest.approx(29 / 4)
    assert average(VALUES, MASK, IDS, reduction="sequence", num_units=2).item() == pytest.approx((1 + 28 / 3) / 2)
    assert average(VALUES, MASK, IDS, reduction="constant", num_units=2, max_tokens=10).item() == pytest.approx(1.45)


def test_a_sequence_without_counted_tokens_is_zero():
    mask = torch.tensor([False, False, True, True, True])
    assert segment_sum(VALUES, mask, IDS).tolist() == [0.0, 28.0]
    assert segment_mean(VALUES, mask, IDS)[0] == 0.0


def test_an_empty_batch_has_no_sequences():
    empty = torch.zeros(0, requires_grad=True)
    total = segment_sum(empty, torch.zeros(0, dtype=torch.bool), torch.zeros(0, dtype=torch.int64))
    assert total.shape == (0,)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=12), seed=st.integers(0, 999))
def test_sums_do_not_depend_on_the_packing(lengths, seed):
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed))
    mask = torch.rand(sum(lengths), generator=torch.Generator().manual_seed(seed)) < 0.7
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    packed = segment_sum(values, mask, ids)
    for index in range(len(lengths)):
        rows = ids == index
        alone = segment_sum(values[rows], mask[rows], torch.zeros(lengths[index], dtype=torch.int64))
        assert packed[index] == alone[0]


@settings(max_examples=50, deadline=None)
@given(value=st.floats(-1e3, 1e3, width=32), length=st.integers(1, 300))
def test_the_mean_of_equal_values_is_that_value(value, length):
    values = torch.full((length,), value)
    ids = torch.zeros(length, dtype=torch.int64)
    assert segment_mean(values, torch.ones(length, dtype=torch.bool), ids).item() == value


def test_gradients():
    values = VALUES.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: segment_sum(v, MASK, IDS), (values,))
    assert torch.autograd.gradcheck(lambda v: segment_mean(v, MASK, IDS), (values,))


def test_sequence_ratios_multiply_token_ratios():
    policy = torch.tensor([2.0, 100.0, 3.0, 4.0, 6.0]).log()
    anchor = torch.tensor([1.0, 1.0, 1.0, 2.0, 1.0]).log()
    torch.testing.assert_close(sequence_ratios(policy, anchor, MASK, IDS), torch.tensor([2.0, 36.0]))
    torch.testing.assert_close(geometric_ratios(policy, anchor, MASK, IDS), torch.tensor([2.0, 36.0 ** (1 / 3)]))


def test_dropping_ratios():
    assert drop_above(torch.tensor([0.5, 2.0, 2.1]), 2.0).tolist() == [0.5, 2.0, 0.0]
    assert drop_above(torch.tensor([0.5, 9.0]), float("inf")).tolist() == [0.5, 9.0]


def test_ids_must_be_those_of_contiguous_sequences():
    with pytest.raises(ShapeError, match="ascend"):
        segment_sum(VALUES, MASK, torch.tensor([0, 1, 0, 1, 1]))
    with pytest.raises(ShapeError, match="same tokens"):
        segment_sum(VALUES, MASK, IDS[:3])
