"""Slots of like lengths side by side: what a step reads, what an exchange may do, and that it changes no bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from covering import with_slow
from engine_kit import assert_same_bits, new_engine, random_model, random_prompt, run
from hypothesis import given
from hypothesis import strategies as st

from slipstream.generator import slot_runner
from slipstream.generator.arrangement import LENGTH_MULTIPLE, ROW_MULTIPLE, SlotSpan, bounds, round_up, spans, swaps
from slipstream.generator.requests import Request

LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 100), st.integers(1, 700)), min_size=1, max_size=70)


def slots_of(lengths: list[int]) -> np.ndarray:
    """Filled up with free ones to whole multiples."""
    filled = np.zeros(round_up(len(lengths), ROW_MULTIPLE), dtype=np.int64)
    filled[: len(lengths)] = lengths
    return filled


def after(lengths: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    moved = lengths.copy()
    for one, other in pairs:
        moved[[one, other]] = moved[[other, one]]
    return moved


def test_bounds_grow_by_a_half_and_a_third_in_turns() -> None:
    assert bounds(64) == []
    assert bounds(65) == [64]
    assert bounds(500) == [64, 96, 128, 192, 256, 384]


@given(LENGTHS)
def test_longer_slots_come_first_and_all_fit_into_as_few_as_there_may_be(lengths: list[int]) -> None:
    before = slots_of(lengths)
    room = round_up(max(1, np.count_nonzero(before)), ROW_MULTIPLE)
    pairs = swaps(before, room)
    moved = after(before, pairs)
    assert sorted(moved) == sorted(before)
    assert not moved[room:].any()
    for bound in bounds(int(before.max())):
        front = round_up(np.count_nonzero(before > bound), ROW_MULTIPLE)
        assert (moved[front:] <= bound).all()
    assert swaps(moved, room) == []
    now = before
    for one, other in pairs:
        assert one < other
        assert now[one] < now[other]
        now = after(now, [(one, other)])


def test_a_slot_that_has_outgrown_its_kind_is_exchanged_with_a_shorter_one_a_free_one_first() -> None:
    lengths = np.array([300, 20, 20, 20, 20, 20, 10, 20] + [20] * 6 + [300, 20])
    assert swaps(lengths, 16) == [(6, 14)]
    lengths[3] = 0
    assert swaps(lengths, 16) == [(3, 14)]


@given(LENGTHS)
def test_spans_follow_one_another_hold_what_is_in_them_and_read_no_more_than_one_span_would(lengths: list[int]) -> None:
    stored = np.maximum(slots_of(lengths), 1)
    found = spans(stored)
    assert [span.start for span in found] == [0, *(span.stop for span in found[:-1])]
    assert found[-1].stop == len(stored)
    for span in found:
        assert span.start % ROW_MULTIPLE == span.stop % ROW_MULTIPLE == span.bucket % LENGTH_MULTIPLE == 0
        assert span.bucket - LENGTH_MULTIPLE < stored[span.start : span.stop].max() <= span.bucket


def test_in_order_a_heavy_tail_reads_half_of_what_one_span_does() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(484, 8 * rng.random(64) ** (-1 / 1.2)).astype(np.int64)
    sorted_spans = spans(after(lengths, swaps(lengths, 64)))
    read = sum((span.stop - span.start) * span.bucket for span in sorted_spans)
    assert read < 64 * round_up(int(lengths.max()), LENGTH_MULTIPLE) / 2
    assert spans(np.full(64, 50)) == [SlotSpan(0, 64, 64)]


@pytest.mark.parametrize(
    ("num_threads", "head_dim"), with_slow([(2, 16)], [(1, 8), (1, 16), (2, 8)]), indirect=["num_threads"]
)
def test_rows_that_change_slots_keep_their_bits(
    num_threads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heavy tail with more requests than rows, in two engines; narrow heads have one length for all."""
    model = random_model(head_dim=head_dim, max_positions=160)
    rng = np.random.default_rng(1)
    counts = np.minimum(110, 8 * rng.random(32) ** (-1 / 1.1)).astype(int)
    batch = [
        Request(i, 0, random_prompt(3 + i % 11, seed=i), max_new_tokens=int(count)) for i, count in enumerate(counts)
    ]
    exchanged: list[tuple[int, int]] = []

    def counted(lengths: np.ndarray, num_slots: int) -> list[tuple[int, int]]:
        pairs = swaps(lengths, num_slots)
        exchanged.extend(pairs)
        return pairs

    monkeypatch.setattr(slot_runner, "swaps", counted)
    crowd = run(new_engine(model, num_slots=24, max_len=160, stop_token_ids=[]), batch)
    assert len(exchanged) > 5
    few = run(new_engine(model, num_slots=8, max_len=160, stop_token_ids=[]), batch[::2])
    for request in batch[::2]:
        assert_same_bits(few[request.ordinal, 0], crowd[request.ordinal, 0])
    for request in sorted(batch, key=lambda one: -one.max_new_tokens)[:1] + batch[:3]:
        alone = run(new_engine(model, max_len=160, stop_token_ids=[]), [dataclasses.replace(request)])
        assert_same_bits(alone[request.ordinal, 0], crowd[request.ordinal, 0])
