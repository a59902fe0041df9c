"""Triton kernels of a layer's element-wise work (`layer_functions.py`). To be imported only where Triton is.

Forward they round where the layer's own operations do. Backward they compute in float32 and round once, which is
nearer to the true gradient than the operations' own rounding behind each of several steps.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# Triton compiles these functions from their source: their annotations are its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_times_up(gate_up, row, columns, is_there, WIDTH: tl.constexpr):
    """silu(gate) * up at some columns of a row, rounded as `gate_up` is behind each of the two."""
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=is_there, other=0.0).to(tl.float32)
    active = (gate / (1 + tl.exp(-gate))).to(gate_up.dtype.element_ty).to(tl.float32)
    return (active * up).to(gate_up.dtype.element_ty)


@triton.jit
def silu_mul_kernel(
    gate_up,  # [N, 2 WIDTH], contiguous
    inner,  # [N, WIDTH], contiguous
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """inner = silu(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < WIDTH
    tl.store(inner + row * WIDTH + columns, silu_times_up(gate_up, row, columns, is_there, WIDTH), mask=is_there)


@triton.jit
def silu_mul_backward_kernel(gate_up, upstream, gradient, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """gradient of gate_up = upstream * (up * s * (1 + gate * (1 - s)), gate * s), where s = sigmoid(gate)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < WIDTH
    gates = row * 2 * WIDTH + columns
    gate = tl.load(gate_up + gates, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + gates + WIDTH, mask=is_there, other=0.0).to(tl.float32)
    d_inner = tl.load(upstream + row * WIDTH + columns, mask=is_there, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(gradient + gates, d_gate.to(gradient.dtype.element_ty), mask=is_there)
    tl.store(gradient + gates + WIDTH, (d_inner * gate * sigmoid).to(gradient.dtype.element_ty), mask=is_there)


@triton.jit
def rotate_kernel(
    source,  # [N, NUM_HEADS, HEAD_DIM], of which rows may lie apart, as of `target`
    target,
    cos,  # [N, ROTARY], contiguous, as `signed_sin`
    signed_sin,
    source_stride,
    target_stride,
    NUM_HEADS: tl.constexpr,
    NUM_ROTATED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,  # HEAD_DIM rounded up to a power of 2
    HEADS: tl.constexpr,  # of one program
    ROTARY: tl.constexpr,
    BACK: tl.constexpr,
):
    """target = source, in the first NUM_ROTATED heads rotated by the rows' angles; by the negative ones, if BACK."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, HEAD_BLOCK)
    is_there = (heads < NUM_HEADS) & (dims < HEAD_DIM)[None, :]
    is_rotated = (heads < NUM_ROTATED) & (dims < ROTARY)[None, :]
    partners = (dims + ROTARY // 2) % ROTARY
    read = source + row * source_stride + heads * HEAD_DIM
    own = tl.load(read + dims[None, :], mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(read + partners[None, :], mask=is_rotated, other=0.0).to(tl.float32)
    angles = row * ROTARY + dims[None, :] + 0 * heads  # for each head, so that a thread reads 16 bytes
    c = tl.load(cos + angles, mask=is_rotated, other=0.0).to(tl.float32)
    s = tl.load(signed_sin + angles, mask=is_rotated, other=0.0).to(tl.float32)
    kind = target.dtype.element_ty
    if BACK:
        turned = own * c - other * s
    else:
        turned = (own * c).to(kind).to(tl.float32) + other * s
    written = target + row * target_stride + heads * HEAD_DIM + dims[None, :]
    tl.store(written, tl.where(is_rotated, turned, own).to(kind), mask=is_there)
