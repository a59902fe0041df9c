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
_HALF = (1 << (_MANTISSA_BITS - 2)) - 1  # with the last bit that stays: rounds to the nearest, ties to even
_BIAS = 2 * (127 - 1)  # of a float32 and of E2M1, before a bit of mantissa


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
    padded = F.pad(weight, (0, -weight.shape[1] % BLOCK)).view(len(weight), -1, BLOCK)
    scaled = padded.mul(inverse[:, :, None])
    signs = (scaled.view(torch.int32) >> 28) & 8
    bits = scaled.abs_().clamp_max_(E2M1[-1]).view(torch.int32)
    # From 1 on exponent and first bit of mantissa are E2M1's, but for the bias; below it counts halves.
    last = (bits >> (_MANTISSA_BITS - 1)) & 1
    codes = ((bits + last + _HALF) >> (_MANTISSA_BITS - 1)) - _BIAS
    codes = torch.where(scaled < 1, (scaled + scaled).round_().to(torch.int32), codes) | signs
    first, second = codes.view(len(weight), -1, 2)[:, : num_bytes(weight.shape[1])].unbind(2)
    return (first | (second << 4)).to(torch.uint8)


def expanded(values: Tensor, scales: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """`rounded` numbers and their scales -> [M, columns] in bfloat16 or float32, both of which hold all of them."""
    codes = torch.stack((values & 15, values >> 4), 2).flatten(1)[:, :columns]
    bits = scales.int() << _MANTISSA_BITS
    bits = torch.where(scales == 0, 1 << (_MANTISSA_BITS - 1), bits)  # 2^-127 is subnormal in float32
    powers = torch.where(scales == _NAN, torch.nan, bits.view(torch.float32)).to(dtype)
    numbers = _numbers(values.device, dtype).index_select(0, codes.flatten().int()).view(codes.shape)
    return numbers.mul_(powers.repeat_interleave(BLOCK, 1)[:, :columns])


@functools.cache
def _numbers(device: torch.device, dtype: torch.dtype) -> Tensor:
    """All 16 E2M1 numbers by their bits."""
    return torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=dtype, device=device)
