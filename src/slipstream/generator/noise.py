"""Sampling noise as a pure function of (run seed, stream, ordinal, sample, position): no generator state anywhere.

A completion therefore draws the same numbers alone or in a crowd, in any slot, on any replica, in any attempt, and when
it is exported and resumed. The hash is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014) with its output function applied once per coordinate; integer arithmetic modulo 2^64, so the
bits are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

Words = TypeVar("Words", np.ndarray, torch.Tensor)
"""int64 numbers that hold the bits of uint64: their sums and products are those modulo 2^64."""

GOLDEN, MUL_1, MUL_2 = (word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(x: Words, num_bits: int) -> Words:
    """Shift right, as uint64 are shifted: zeros come in from the left."""
    shifted: Words = (x >> num_bits) & ((1 << (64 - num_bits)) - 1)
    return shifted


def _mix(x: Words) -> Words:
    """The output function of splitmix64: a bijection whose every output bit depends on every input bit."""
    x = (x ^ _shifted(x, 30)) * MUL_1
    x = (x ^ _shifted(x, 27)) * MUL_2
    mixed: Words = x ^ _shifted(x, 31)
    return mixed


def noise_key(seed: int, stream: int, ordinal: int, sample: int) -> int:
    """The 64-bit key of one completion. `stream` separates uses that count ordinals on their own: 0 is training.

    Compute it once per completion; `uniform` turns it into numbers. Coordinates may be any Python ints (modulo 2^64).
    """
    return int(noise_keys(seed, [(stream, ordinal, sample)])[0])


def noise_keys(seed: int, completions: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """uint64 [N]: `noise_key` of every (stream, ordinal, sample), in as many numpy calls as one of them takes."""
    columns = ([seed], *zip(*completions, strict=True))
    key = np.zeros(1, dtype=np.int64)
    for column in columns:
        words = np.array([coordinate % 2**64 for coordinate in column], dtype=np.uint64).view(np.int64)
        key = _mix(key + GOLDEN + _mix(words + GOLDEN))
    return key.view(np.uint64)


def uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [N] in the open interval (0, 1): the number of each (key, position).

    `keys` uint64 [N] from `noise_key`; `positions` int64 [N], 0 for a completion's first token. Values are the
    midpoints of 2^52 equal cells, so neither 0 nor 1 occurs and no tail of the inverse CDF is ever cut.
    """
    numbers: np.ndarray = (_bits(keys.view(np.int64), positions).astype(np.float64) + 0.5) * 2.0**-52
    return numbers


def uniform_tensor(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [N]: `uniform` in torch operations, for rows that live on a device; the same bits.

    `keys` int64 [N] holds the bits of the uint64 keys (`keys.view(np.int64)`), `positions` int64 [N].
    """
    return (_bits(keys, positions).double() + 0.5) * 2.0**-52


def _bits(keys: Words, positions: Words) -> Words:
    """52 random bits for each (key, position)."""
    return _shifted(_mix(keys + GOLDEN * (positions + 1)), 12)
