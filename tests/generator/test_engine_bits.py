"""A completion's bits depend on its request and the weights only, with one thread and with two."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from covering import covering, with_slow
from engine_kit import assert_same_bits, drain, new_engine, random_mixture, random_model, random_prompt, requests, run

from slipstream.generator.arrangement import SlotSpan, round_up
from slipstream.generator.kv_cache import DecodeAttention, SlotKV
from slipstream.generator.requests import Request
from slipstream.models.linear import linear


@pytest.mark.parametrize(("num_threads", "num_kv_heads"), covering([1, 2], [4, 1, 0]), indirect=["num_threads"])
def test_alone_crowd_and_any_number_of_slots(num_threads: int, num_kv_heads: int) -> None:
    """Also in a mixture of experts (0), which multiplies rows of the same expert together."""
    model = random_model(num_kv_heads=num_kv_heads) if num_kv_heads else random_mixture()
    batch = requests(4, 3, max_new_tokens=8)
    crowd = run(new_engine(model, num_slots=24), batch)
    for num_slots, prefill_tokens in ((1, 8), (5, 2048), (8, 40), (13, 64)):
        part = batch[::3] if num_slots == 1 else batch  # one after the other: as long as all others together
        other = run(new_engine(model, num_slots=num_slots, prefill_tokens=prefill_tokens), part)
        assert len(other) == len(part)
        for key, completion in other.items():
            assert_same_bits(completion, crowd[key])
    for request in batch[::7]:
        alone = run(new_engine(model), [request])
        assert_same_bits(alone[request.ordinal, request.sample], crowd[request.ordinal, request.sample])


@pytest.mark.parametrize("num_threads", with_slow([2], [1]), indirect=True)
def test_others_joining_and_leaving_change_nothing(num_threads: int) -> None:
    model = random_model()
    batch = requests(8, 2)
    lengths = [3, 14, 9, 11, 1, 8, 14, 5]
    batch = [dataclasses.replace(request, max_new_tokens=lengths[request.ordinal]) for request in batch]
    alone = {(r.ordinal, r.sample): run(new_engine(model), [r])[r.ordinal, r.sample] for r in batch}
    engine = new_engine(model, num_slots=11)
    joined = {}
    for start in range(0, len(batch), 3):
        engine.submit(batch[start : start + 3])
        for _ in range(4):
            joined.update({(f.ordinal, f.sample): f for f in engine.step()})
    joined.update(drain(engine))
    assert joined.keys() == alone.keys()
    for key, completion in alone.items():
        assert_same_bits(joined[key], completion)


@pytest.mark.parametrize("num_threads", with_slow([2], [1]), indirect=True)
def test_length_buckets_of_the_company_change_nothing(num_threads: int) -> None:
    """Heads wide enough for buckets; sequences that pass the ends of several, beside short and long ones."""
    model = random_model(head_dim=16, max_positions=320)
    lengths = [30, 31, 32, 33, 63, 64, 95, 126, 127, 128, 129, 159, 250]
    batch = [Request(i, 0, random_prompt(n, seed=i), max_new_tokens=4) for i, n in enumerate(lengths)]
    longest = Request(99, 0, random_prompt(60), max_new_tokens=77)
    crowd = run(new_engine(model, max_len=320, stop_token_ids=[]), [longest, *batch])
    for request in [longest, *batch]:
        alone = run(new_engine(model, max_len=320, stop_token_ids=[]), [request])
        assert_same_bits(alone[request.ordinal, 0], crowd[request.ordinal, 0])


def test_gemm_rows_are_stable_at_multiples_of_eight(num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for out_features, in_features in ((768, 256), (256, 704), (72, 256), (50, 48)):
        weight = torch.randn(out_features, in_features, generator=generator)
        rows = torch.randn(512, in_features, generator=generator)
        whole = linear(rows, weight)
        for num_rows in (8, 16, 24, 40, 64, 136, 320):
            assert torch.equal(linear(rows[:num_rows], weight), whole[:num_rows])
            assert torch.equal(linear(rows[-num_rows:], weight), whole[-num_rows:])


@pytest.mark.parametrize("longest", [32, 250, 400])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (4, 1, 32), (6, 2, 16), (8, 2, 16)])
def test_length_buckets_and_batch_sizes_are_bit_neutral(
    num_threads: int, num_heads: int, num_kv_heads: int, head_dim: int, longest: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.tensor(np.random.default_rng(0).integers(0, longest, 16))
    kv = SlotKV(num_layers=1, num_slots=16, num_kv_heads=num_kv_heads, max_len=1024, head_dim=head_dim)
    kv.keys.normal_(generator=generator)
    kv.values.normal_(generator=generator)
    q, k, v = (
        torch.randn(16, heads, head_dim, generator=generator) for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    attention = DecodeAttention(kv, num_heads=num_heads)
    attention.open_slots(range(16), positions.tolist())
    attention.prepare(positions, [SlotSpan(0, 16, round_up(longest, 32))])
    reference = attention(0, q, k, v).clone()
    for num_slots in (8, 16):
        for bucket in (round_up(longest, 32), 416, 512, 768, 1024):
            attention.prepare(positions[:num_slots], [SlotSpan(0, num_slots, bucket)])
            assert torch.equal(attention(0, q[:num_slots], k[:num_slots], v[:num_slots]), reference[:num_slots])
    for buckets in ((round_up(longest, 32), 1024), (1024, round_up(longest, 32))):
        attention.prepare(positions, [SlotSpan(8 * at, 8 * at + 8, bucket) for at, bucket in enumerate(buckets)])
        assert torch.equal(attention(0, q, k, v), reference)
