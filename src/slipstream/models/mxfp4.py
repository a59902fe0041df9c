"""MXFP4 of OCP's Microscaling Formats (MX) v1.0: blocks of 32 numbers of 4 bits that share a power of two.

A row of a matrix W [M, K] is cut into blocks of 32 columns. Each has one scale X, in E8M0, a biased exponent of 8 bits,
and its numbers are X times an E2M1 number, which is 0, 0.5, 1, 1.5, 2, 3, 4 or 6 with a sign:

    X = 2^(floor(log2 max_k |W_k|) - 2)              at least 2^-127, E8M0's smallest
    Q = X * e2m1(W / X)                              to the nearest, ties to an even mantissa, beyond 6 to 6

    |W - Q| <= max(|W|, X) / 4                       0.53 bytes per number

(section 6.3 of the specification, with 2 the exponent of E2M1's largest number). The largest of a block is between 4 X
and 8 X, so what is above 6 X loses up to a quarter. A row whose length is no multiple of 32 ends with a shorter block,
as if zeros followed. A block with a number that is not finite has the scale NaN, which all of its numbers become.

Bits of an E2M1 number: sign, two of exponent, one of mantissa. Two lie in a byte, the first in its low half.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

MXFP4 = torch.float4_e2m1fn_x2
"""The type's name in a layout; its bytes are computed with as uint8."""
BLOCK = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the three bits without sign."""

_EXPONENT = 2  # of E2M1's largest number, 6 = 1.5 * 2^2
_NAN = 255  # as a scale
_MANTISSA_BITS = 23  # of a float32
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbours of `E2M1`: the n-th goes to number n + 1 where n is odd, else to n, whose mantissa is even."""


def num_bytes(columns: int) -> int:
    """Return the bytes of a row of so many numbers, without scales."""
    return -(-columns // 2)


def num_blocks(columns: int) -> int:
    """Return the scales of a row of so many numbers."""
    return -(-columns // BLOCK)


def block_scales(weight: Tensor) -> Tensor:
    """fp32 [M, K] -> the scales of its blocks in E8M0, uint8 [M, blocks]."""
    padded = F.pad(weight, (0, -weight.shape[1] % BLOCK)).view(len(weight), -1, BLOCK)
    bits = padded.abs().amax(2).view(torch.int32)  # NaN is the largest of all
    biased = bits >> _MANTISSA_BITS
    return torch.where(biased == _NAN, biased, (biased - _EXPONENT).clamp_min(0)).to(torch.uint8)


def rounded(weight: Tensor, scales: Tensor) -> Tensor:
    """fp32 [M, K] and `block_scales` of it -> E2M1 numbers, two in a byte, uint8 [M, bytes]."""
    inverse = ((254 - scales.int()).clamp_min(0) << _MANTISSA_BITS).view(torch.float32)  # a power of two: exact
    scaled = weight * inverse.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    codes = torch.bucketize(scaled.abs(), _bounds(weight.device), out_int32=True).to(torch.uint8)
    codes |= scaled.signbit().to(torch.uint8) << 3
    first, second = F.pad(codes, (0, codes.shape[1] % 2)).view(len(codes), -1, 2).unbind(2)
    return first | (second << 4)


def expanded(values: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """`rounded` numbers and their scales -> [M, columns] in bfloat16 or float32, both of which hold all of them."""
    codes = torch.stack((values & 15, values >> 4), 2).flatten(1)[:, :columns]
    bits = scales.int() << _MANTISSA_BITS
    bits = torch.where(scales == 0, 1 << (_MANTISSA_BITS - 1), bits)  # 2^-127 is subnormal in float32
    powers = torch.where(scales == _NAN, torch.nan, bits.view(torch.float32)).to(dtype)
    numbers = _numbers(values.device, dtype).index_select(0, codes.flatten().int()).view(codes.shape)
    return numbers.mul_(powers.repeat_interleave(BLOCK, 1)[:, :columns])


@functools.cache
def _bounds(device: torch.device) -> Tensor:
    """The largest numbers that are rounded down to the n-th of `E2M1`."""
    ties = torch.tensor(_TIES)
    below = torch.nextafter(ties, torch.zeros(()))
    return torch.where(torch.arange(len(ties)) % 2 == 1, below, ties).to(device)


@functools.cache
def _numbers(device: torch.device, dtype: torch.dtype) -> Tensor:
    """All 16 E2M1 numbers by their bits."""
    return torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=dtype, device=device)
