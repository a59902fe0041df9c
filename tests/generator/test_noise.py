"""Counter-based noise: golden values, uniformity, independence of company."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.generator.noise import noise_key, noise_keys, uniform, uniform_tensor

MASK = 2**64 - 1


def splitmix_output(x: int) -> int:
    """Plain-integer reference of splitmix64's output function."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_key_and_uniform_equal_the_plain_integer_reference() -> None:
    golden = 0x9E3779B97F4A7C15
    key = 0
    for word in (7, 0, 12, 3):
        key = splitmix_output((key + golden + splitmix_output((word + golden) & MASK)) & MASK)
    assert noise_key(7, 0, 12, 3) == key
    expected = [((splitmix_output((key + golden * (p + 1)) & MASK) >> 12) + 0.5) / 2**52 for p in range(5)]
    assert uniform(np.full(5, key, dtype=np.uint64), np.arange(5)).tolist() == expected


def test_known_first_outputs_of_splitmix64() -> None:
    assert splitmix_output(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # published for seed 0
    got = uniform(np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64))
    assert got[0] == ((0xE220A8397B1DCDAF >> 12) + 0.5) / 2**52


def test_uniform_and_independent_along_every_coordinate() -> None:
    length = 10_000
    base = np.uint64(noise_key(1, 0, 0, 0))
    first = np.zeros(length, dtype=np.int64)
    by_ordinal = noise_keys(1, [(0, ordinal, 0) for ordinal in range(length)])
    by_sample = noise_keys(1, [(0, 0, sample) for sample in range(length)])
    for number in range(0, length, 501):
        assert by_ordinal[number] == noise_key(1, 0, number, 0)
        assert by_sample[number] == noise_key(1, 0, 0, number)
    sequences = {
        "position": uniform(np.full(length, base), np.arange(length)),
        "ordinal": uniform(by_ordinal, first),
        "sample": uniform(by_sample, first),
    }
    for name, values in sequences.items():
        assert values.min() > 0.0, name
        assert values.max() < 1.0, name
        counts = np.histogram(values, bins=100, range=(0, 1))[0]
        chi_square = ((counts - length / 100) ** 2 / (length / 100)).sum()
        assert 50 < chi_square < 170, (name, chi_square)  # 99 degrees of freedom: mean 99, sd 14
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03, name
    assert abs(np.corrcoef(sequences["position"], sequences["sample"])[0, 1]) < 0.03


def test_a_row_does_not_depend_on_its_batch() -> None:
    keys = np.array([noise_key(3, 0, o, s) for o in range(8) for s in range(4)], dtype=np.uint64)
    positions = np.arange(32) % 11
    together = uniform(keys, positions)
    alone = [uniform(keys[i : i + 1], positions[i : i + 1])[0] for i in range(32)]
    assert together.tolist() == alone


def test_coordinates_are_not_interchangeable() -> None:
    keys = {noise_key(a, b, c, d) for a in range(4) for b in range(4) for c in range(4) for d in range(4)}
    assert len(keys) == 256


@given(st.lists(st.tuples(st.integers(0, MASK), st.integers(0, 2**62)), min_size=1, max_size=20))
def test_torch_draws_the_bits_of_numpy(pairs: list[tuple[int, int]]) -> None:
    keys = np.array([key for key, _ in pairs], dtype=np.uint64)
    positions = np.array([position for _, position in pairs], dtype=np.int64)
    drawn = uniform_tensor(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(positions))
    assert np.array_equal(drawn.numpy().view(np.uint64), uniform(keys, positions).view(np.uint64))
