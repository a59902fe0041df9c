"""Triton kernels of a decode step's element-wise work (`fused_decode.py`). To be imported only where Triton is.

They round where the layer's own operations do, so results differ by the order of a sum and by fused products only.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# Triton compiles these functions from their source: their annotations are its own.
from __future__ import annotations

import triton
import triton.language as tl

from slipstream.models.e4m3_kernels import store_e4m3


@triton.jit
def add_norm_kernel(
    stream,  # [B, HIDDEN], contiguous, as `branch` and `normed`
    branch,
    weight,  # [HIDDEN]
    normed,  # e4m3 if ROUNDS
    scales,  # fp32 [B], written if ROUNDS
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,  # HIDDEN rounded up to a power of 2
    ADDS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """stream += branch, if ADDS;  normed = stream / sqrt(mean(stream^2) + eps) * weight, over its scale if ROUNDS."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_there = columns < HIDDEN
    places = row * HIDDEN + columns
    x = tl.load(stream + places, mask=is_there, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(branch + places, mask=is_there, other=0.0).to(tl.float32)
        rounded = x.to(stream.dtype.element_ty)
        tl.store(stream + places, rounded, mask=is_there)
        x = rounded.to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    x *= tl.load(weight + columns, mask=is_there, other=0.0).to(tl.float32)
    rounded = x.to(stream.dtype.element_ty)
    if ROUNDS:
        store_e4m3(rounded.to(tl.float32), is_there, normed, scales, row, places)
    else:
        tl.store(normed + places, rounded, mask=is_there)


@triton.jit
def enter_kernel(
    qkv,  # [B, H + 2 Hkv, D], contiguous
    q_weight,  # [D], read if NORMS
    k_weight,
    cos,  # fp32 [positions, ROTARY], contiguous, as `signed_sin`
    signed_sin,
    positions,  # int64 [B]
    slots,  # int64 [B]
    queries,  # [B, H, D], contiguous
    keys,  # [slots, Hkv, D], contiguous
    values,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,  # HEAD_DIM rounded up to a power of 2
    HEADS: tl.constexpr,  # of one program
    ROTARY: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Normalise heads of queries and keys, if NORMS, and rotate them; store keys and values at the rows' slots."""
    row = tl.program_id(0).to(tl.int64)
    kinds: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HEAD_BLOCK)
    partners = (dims + ROTARY // 2) % ROTARY
    is_dim = dims < HEAD_DIM
    is_rotated = dims < ROTARY
    is_there = (heads < kinds)[:, None] & is_dim[None, :]
    kind = qkv.dtype.element_ty
    source = qkv + (row * kinds + heads[:, None]) * HEAD_DIM
    raw = tl.load(source + dims[None, :], mask=is_there, other=0.0)
    own = raw.to(tl.float32)
    other = tl.load(source + partners[None, :], mask=(heads < kinds)[:, None] & is_rotated[None, :], other=0.0)
    other = other.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + eps)[:, None]
        is_query = (heads < NUM_HEADS)[:, None]
        own_weight = tl.where(
            is_query,
            tl.load(q_weight + dims, mask=is_dim, other=0.0)[None, :].to(tl.float32),
            tl.load(k_weight + dims, mask=is_dim, other=0.0)[None, :].to(tl.float32),
        )
        other_weight = tl.where(
            is_query,
            tl.load(q_weight + partners, mask=is_rotated, other=0.0)[None, :].to(tl.float32),
            tl.load(k_weight + partners, mask=is_rotated, other=0.0)[None, :].to(tl.float32),
        )
        own = (own * scale * own_weight).to(kind).to(tl.float32)
        other = (other * scale * other_weight).to(kind).to(tl.float32)
    angle = tl.load(positions + row) * ROTARY + dims
    c = tl.load(cos + angle, mask=is_rotated, other=0.0).to(kind).to(tl.float32)[None, :]
    s = tl.load(signed_sin + angle, mask=is_rotated, other=0.0).to(kind).to(tl.float32)[None, :]
    turned = (own * c).to(kind).to(tl.float32) + other * s
    out = tl.where(is_rotated[None, :], turned, own).to(kind)
    tl.store(
        queries + (row * NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :],
        out,
        mask=is_there & (heads < NUM_HEADS)[:, None],
    )
    stored = (tl.load(slots + row) * NUM_KV_HEADS - NUM_HEADS + heads[:, None]) * HEAD_DIM + dims[None, :]
    is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
    tl.store(keys + stored, out.to(keys.dtype.element_ty), mask=is_there & is_key[:, None])
    stored -= NUM_KV_HEADS * HEAD_DIM
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    tl.store(values + stored, raw.to(values.dtype.element_ty), mask=is_there & is_value[:, None])
