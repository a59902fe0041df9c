"""Triton kernels over the logits of `head.py`: each reads them once. To be imported only where Triton is.

torch's operations read and write all of them several times in either pass, in float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# Triton compiles these functions from their source: their annotations are its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.device import launching_on

BLOCK = 4096
"""Logits that a program has at once."""


@triton.jit
def statistics_kernel(
    logits,  # fp32 [N, WIDTH], contiguous
    places,  # int64 [N], -1: none
    found,  # fp32 [4, N]
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """max z, z of the place or 0, sum exp(z - max z) z, sum exp(z - max z)."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * WIDTH
    top, weighed, total = float("-inf"), 0.0, 0.0
    for begin in range(0, WIDTH, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        z = tl.load(start + columns, mask=columns < WIDTH, other=float("-inf"))
        top_now = tl.maximum(top, tl.max(z, 0))
        shift = tl.where(top_now == float("-inf"), 0.0, top_now)
        mass = tl.exp(z - shift)
        shrink = tl.exp(top - shift)
        weighed = weighed * shrink + tl.sum(tl.where(z == float("-inf"), 0.0, mass * z), 0)
        total = total * shrink + tl.sum(mass, 0)
        top = top_now
    place = tl.load(places + row)
    tl.store(found + row, top)
    tl.store(found + num_rows + row, tl.load(start + place, mask=place >= 0, other=0.0))
    tl.store(found + 2 * num_rows + row, weighed)
    tl.store(found + 3 * num_rows + row, total)


@triton.jit
def gradient_kernel(
    logits,  # fp32 [N, WIDTH], contiguous
    places,  # int64 [N], -1: none
    normalisers,  # fp32 [N], as the others
    entropies,
    of_logprobs,  # read if HAS_LOGPROBS
    of_entropies,  # read if HAS_ENTROPIES
    gradient,  # [N, WIDTH], contiguous
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
    HAS_ENTROPIES: tl.constexpr,
):
    """g ([j = place] - p_j) - e p_j (log p_j + H), rounded once."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < WIDTH
    start = row.to(tl.int64) * WIDTH
    z = tl.load(logits + start + columns, mask=is_there, other=float("-inf"))
    logprobs = z - tl.load(normalisers + row)
    probs = tl.exp(logprobs)
    out = tl.zeros([BLOCK], tl.float32)
    if HAS_ENTROPIES:
        each = tl.load(of_entropies + row) * (logprobs + tl.load(entropies + row))
        out -= tl.where(z == float("-inf"), 0.0, probs * each)
    if HAS_LOGPROBS:
        given = tl.load(of_logprobs + row)
        out += tl.where(columns == tl.load(places + row), given, 0.0) - given * probs
    tl.store(gradient + start + columns, out.to(gradient.dtype.element_ty), mask=is_there)


def statistics(logits: Tensor, places: Tensor) -> Tensor:
    """Return [4, N] of fp32 `logits` [N, V]: the largest, that of int64 `places` [N], sum e^(z - max) z, and of 1."""
    rows, width = logits.shape
    found = logits.new_empty(4, rows)
    with launching_on(logits):
        statistics_kernel[(rows,)](logits, places, found, rows, WIDTH=width, BLOCK=BLOCK, num_warps=8)
    return found


def gradient(
    logits: Tensor,
    places: Tensor,
    normalisers: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return that of fp32 `logits` [N, V] in `dtype`, from float32 [N]: see `gradient_kernel`."""
    rows, width = logits.shape
    out = torch.empty_like(logits, dtype=dtype)
    with launching_on(logits):
        gradient_kernel[(rows, triton.cdiv(width, BLOCK))](
            logits,
            places,
            normalisers.contiguous(),
            entropies.contiguous(),
            entropies if of_logprobs is None else of_logprobs.contiguous(),
            entropies if of_entropies is None else of_entropies.contiguous(),
            out,
            WIDTH=width,
            BLOCK=BLOCK,
            HAS_LOGPROBS=of_logprobs is not None,
            HAS_ENTROPIES=of_entropies is not None,
            num_warps=8,
        )
    return out
