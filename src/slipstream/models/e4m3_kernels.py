"""A Triton kernel that rounds rows to e4m3, each in one program (`e4m3.py`). To be imported only where Triton is."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# Triton compiles these functions from their source: their annotations are its own.
from __future__ import annotations

import triton
import triton.language as tl

from slipstream.models.layer_kernels import silu_times_up

PER_LARGEST, LEAST_SCALE = tl.constexpr(1 / 448), tl.constexpr(2.0**-126)


@triton.jit
def store_e4m3(x, is_there, values, scales, row, places):
    """Store the fp32 numbers of a row, 0 where none is there, at `places` of e4m3 values, and their scale."""
    scale = tl.maximum(tl.max(tl.abs(x), 0) * PER_LARGEST, LEAST_SCALE)
    tl.store(scales + row, scale)
    tl.store(values + places, tl.math.div_rn(x, scale).to(values.dtype.element_ty), mask=is_there)


@triton.jit
def e4m3_kernel(
    source,  # [N, WIDTH], or [N, 2 WIDTH] if IS_GATED, contiguous
    values,  # e4m3 [N, WIDTH], contiguous
    scales,  # fp32 [N]
    WIDTH: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,  # WIDTH rounded up to a power of 2
):
    """values = source / scales;  silu(gate) * up / scales, if IS_GATED."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    places = row * WIDTH + columns
    if IS_GATED:
        x = silu_times_up(source, row, columns, columns < WIDTH, WIDTH)
    else:
        x = tl.load(source + places, mask=columns < WIDTH, other=0.0)
    store_e4m3(x.to(tl.float32), columns < WIDTH, values, scales, row, places)
