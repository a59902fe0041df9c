"""A layer's element-wise work on CUDA in one kernel each (`layer_kernels.py`): SwiGLU, and rotation of heads.

Identity: equal to the layer's own operations up to rounding, which compute everywhere else, and in compiled layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slipstream.models.device import launching_on, power_of_two, takes_kernels

SILU_BLOCK = 1024
ROTATED_BLOCK = 1024  # numbers of whole heads that a program of 4 warps has: 16 bytes in bfloat16 for each thread


def is_fused(x: Tensor) -> bool:
    """Tell whether these kernels compute with `x`, which is in half precision."""
    return x.dtype in (torch.bfloat16, torch.float16) and takes_kernels(x)


def gated(activation: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
    """activation(gate) * up, differentiable, of [N, 2 I] -> [N, I]."""
    if activation is F.silu and is_fused(gate_up):
        inner: Tensor = SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
        return inner
    gate, up = gate_up.chunk(2, -1)
    return activation(gate) * up


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2 I] -> [N, I], in any precision."""
    from slipstream.models import layer_kernels as kernels

    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    inner = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    with launching_on(gate_up):
        kernels.silu_mul_kernel[(rows, -(-width // SILU_BLOCK))](gate_up, inner, WIDTH=width, BLOCK=SILU_BLOCK)
    return inner


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up of [N, 2 I] -> [N, I]; keeps its input only."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return silu_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        from slipstream.models import layer_kernels as kernels

        gate_up, upstream = ctx.saved_tensors[0].contiguous(), upstream.contiguous()
        gradient = torch.empty_like(gate_up)
        rows, width = upstream.shape
        grid = (rows, -(-width // SILU_BLOCK))
        with launching_on(gate_up):
            kernels.silu_mul_backward_kernel[grid](gate_up, upstream, gradient, WIDTH=width, BLOCK=SILU_BLOCK)
        return gradient


class RotateHeads(torch.autograd.Function):
    """qkv [N, H + 2 Hkv, D] -> rotated q [N, H, D] and k [N, Hkv, D], and v [N, Hkv, D]; keeps nothing of qkv.

    `cos` and `signed_sin` [N, 1, R] as `transformer.rotate` takes them; the gradient is rotated by the negative angles.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, signed_sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, signed_sin)
        qkv = qkv.contiguous()
        out, num_rotated = torch.empty_like(qkv), qkv.shape[1] - kv_heads
        _rotate(qkv, out, cos, signed_sin, num_rotated, back=False)
        return out[:, : num_rotated - kv_heads], out[:, num_rotated - kv_heads : num_rotated], out[:, num_rotated:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        cos, signed_sin = ctx.saved_tensors
        sizes = [one.shape[1] for one in upstream]
        rows, _, head_dim = upstream[0].shape
        gradient = upstream[0].new_empty(rows, sum(sizes), head_dim)
        parts = torch.split(gradient, sizes, 1)
        for source, target, num_rotated in zip(upstream, parts, (*sizes[:2], 0), strict=True):
            _rotate(source.contiguous(), target, cos, signed_sin, num_rotated, back=True)
        return gradient, None, None, None


def _rotate(source: Tensor, target: Tensor, cos: Tensor, signed_sin: Tensor, num_rotated: int, *, back: bool) -> None:
    from slipstream.models import layer_kernels as kernels

    rows, heads, head_dim = source.shape
    block = power_of_two(head_dim)
    at_once = max(1, ROTATED_BLOCK // block)
    tables, strides = (cos.contiguous(), signed_sin.contiguous()), (source.stride(0), target.stride(0))
    sizes = {"NUM_HEADS": heads, "NUM_ROTATED": num_rotated, "HEAD_DIM": head_dim, "HEAD_BLOCK": block}
    sizes |= {"HEADS": at_once, "ROTARY": cos.shape[-1]}
    with launching_on(source):
        kernels.rotate_kernel[(rows, -(-heads // at_once))](source, target, *tables, *strides, **sizes, BACK=back)
