"""Rows of activations in e4m3, each with a scale of its own: what `products.Fp8Product` multiplies.

    scale_n = max(max_k |x_nk| / 448, 2^-126),   Q_nk = e4m3(x_nk / scale_n)

By torch's operations, or with the same bits by a kernel on CUDA (`e4m3_kernels.py`), also of SiLU x `up`. So 1 / 448 is
multiplied by: torch's division by a number depends on the device.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.models.device import launching_on, power_of_two, takes_kernels
from slipstream.models.quantized import FP8, LARGEST

logger = logging.getLogger(__name__)


class E4m3Rows(NamedTuple):
    """Values e4m3 [N, K] and scales fp32 [N, 1] of rows in `dtype`, which products with them give back."""

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, like: Tensor, width: int) -> E4m3Rows:
        values = torch.empty((len(like), width), dtype=FP8, device=like.device)
        return cls(values, torch.empty((len(like), 1), device=like.device), like.dtype)


def in_torch(x: Tensor) -> E4m3Rows:
    """Round x [N, K]."""
    scales = (x.abs().amax(-1, keepdim=True).float() * (1 / LARGEST[FP8])).clamp_min(torch.finfo(torch.float32).tiny)
    return E4m3Rows((x / scales).to(FP8), scales, x.dtype)


def by_kernel(source: Tensor, *, is_gated: bool = False) -> E4m3Rows:
    """Round [N, K], or silu(gate) * up of [N, 2 K]."""
    from slipstream.models import e4m3_kernels as kernels

    rows = E4m3Rows.empty(source, source.shape[1] // (1 + is_gated))
    sizes = {"WIDTH": rows.values.shape[1], "IS_GATED": is_gated} | row_sizes(rows.values.shape[1])
    with launching_on(source):
        kernels.e4m3_kernel[(len(source),)](source.contiguous(), rows.values, rows.scales, **sizes)
    return rows


def row_sizes(width: int) -> dict[str, int]:
    """A program for a row: 16 numbers a thread, so that e4m3 is written by 16 bytes, or 32 of more than 16,384."""
    block = power_of_two(width)
    return {"BLOCK": block, "num_warps": min(32, max(1, block // 512))}


def has_kernels(x: Tensor) -> bool:
    """Tell whether kernels round what lies where `x` does."""
    return takes_kernels(x) and kernel_is_right(x.device)


@functools.cache
@torch.inference_mode()
def kernel_is_right(device: torch.device) -> bool:
    """Tell whether `by_kernel` has the bits of `in_torch` on `device`, on a small example."""
    from triton.errors import TritonError

    x = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 8)[:, None]
    x[3] = 0.0
    try:
        right, found = (each(x.to(device, torch.bfloat16)) for each in (in_torch, by_kernel))
        if right.values.float().equal(found.values.float()) and right.scales.equal(found.scales):
            return True
        logger.warning("fp8 rounds its inputs in several operations: the kernel has other numbers on %s", device)
    except (TritonError, RuntimeError) as error:
        logger.warning("fp8 rounds its inputs in several operations: the kernel does not run here (%s)", error)
    return False


def scaled_product(rows: E4m3Rows, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """y [N, M] in bfloat16, of e4m3 weights [M, K] with scales [M]; plus `bias` [M] in bfloat16."""
    return torch._scaled_mm(rows.values, weight.t(), rows.scales, scales[None], bias, out_dtype=torch.bfloat16)


@functools.cache
@torch.inference_mode()
def adds_bias(device: torch.device) -> bool:
    """Tell whether `scaled_product` adds a bias on `device` as a sum behind it does, on a small example."""
    x = torch.randn(17, 32, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    rows, bias = in_torch(x[:16]), 16 * x[16, :16]
    try:
        found, plain = (scaled_product(rows, rows.values, rows.scales[:, 0], one).float() for one in (bias, None))
    except RuntimeError:
        return False
    return bool((found - plain - bias).abs().max() <= 0.01 * found.abs().max())
