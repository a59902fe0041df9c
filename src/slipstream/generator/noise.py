"""Sampling noise as a pure function of (run seed, stream, ordinal, sample, position): no generator state anywhere.

A completion therefore draws the same numbers alone or in a crowd, in any slot, on any replica, in any attempt, and when
it is exported and resumed. The hash is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014) with its output function applied once per coordinate; integer arithmetic modulo 2^64, so the
bits are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31, _SHIFT_12 = (np.uint64(n) for n in (30, 27, 31, 12))


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of splitmix64: a bijection of uint64 whose every output bit depends on every input bit."""
    x = (x ^ (x >> _SHIFT_30)) * _MUL_1
    x = (x ^ (x >> _SHIFT_27)) * _MUL_2
    mixed: np.ndarray = x ^ (x >> _SHIFT_31)
    return mixed


def noise_key(seed: int, stream: int, ordinal: int, sample: int) -> int:
    """The 64-bit key of one completion. `stream` separates uses that count ordinals on their own: 0 is training.

    Compute it once per completion; `uniform` turns it into numbers. Coordinates may be any Python ints (modulo 2^64).
    """
    return int(noise_keys(seed, [(stream, ordinal, sample)])[0])


def noise_keys(seed: int, completions: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """uint64 [N]: `noise_key` of every (stream, ordinal, sample), in as many numpy calls as one of them takes."""
    columns = ([seed], *zip(*completions, strict=True))
    key = np.zeros(1, dtype=np.uint64)
    for column in columns:
        words = np.array([coordinate % 2**64 for coordinate in column], dtype=np.uint64)
        key = _mix(key + _GOLDEN + _mix(words + _GOLDEN))
    return key


def uniform(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [N] in the open interval (0, 1): the number of each (key, position).

    `keys` uint64 [N] from `noise_key`; `positions` int64 [N], 0 for a completion's first token. Values are the
    midpoints of 2^52 equal cells, so neither 0 nor 1 occurs and no tail of the inverse CDF is ever cut.
    """
    bits = _mix(keys + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1))) >> _SHIFT_12
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def uniform_tensor(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [N]: `uniform` in torch operations, for rows that live on a device; the same bits.

    `keys` int64 [N] holds the bits of the uint64 keys (`keys.view(np.int64)`), `positions` int64 [N].
    """
    bits = _shifted(_mix_tensor(keys + _signed(_GOLDEN) * (positions + 1)), 12)
    return (bits.double() + 0.5) * 2.0**-52


def _mix_tensor(x: torch.Tensor) -> torch.Tensor:
    """`_mix` on int64, whose sums and products are those of uint64 modulo 2^64."""
    x = (x ^ _shifted(x, 30)) * _signed(_MUL_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MUL_2)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int64 shifted right as if it were uint64: zeros come in from the left."""
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)


def _signed(word: np.uint64) -> int:
    return int(word.view(np.int64))
