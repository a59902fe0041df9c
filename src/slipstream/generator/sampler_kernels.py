"""Triton kernels of the sampler over a whole vocabulary (`fused_sampling.py`). To be imported only where Triton is.

Logits are read once, by as many programs for each row as it has blocks. A second kernel makes the noise of `noise.py`,
draws a block of each row by its share of the sum, and a token in it, for which it reads that block again.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# Triton compiles these functions from their source: their annotations are its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.generator.noise import GOLDEN, MUL_1, MUL_2
from slipstream.models.device import launching_on

BLOCK = 2048  # logits that a program has at once; fixed, as a row's bits depend on it
NUM_WARPS, DRAW_WARPS = 4, 8  # of the kernel that reads, four times 16 bytes a thread, and of the other
STEP, FIRST, SECOND = (tl.constexpr(word % 2**64) for word in (GOLDEN, MUL_1, MUL_2))


@triton.jit
def scaled(z, temperature, SCALES: tl.constexpr):
    """z / temperature, rounded as torch does; z where that is 0."""
    if SCALES:
        z = tl.div_rn(z, tl.where(temperature == 0.0, 1.0, temperature))
    return z


@triton.jit
def number_of(key, position):
    """`noise.uniform` of one row."""
    x = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * STEP
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return (((x ^ (x >> 31)) >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52


@triton.jit
def first_reaching(weights, target, SIZE: tl.constexpr):
    """The first place of a positive weight whose running sum reaches `target`, or the last one; the sum before it."""
    # In their last bits sums of a parallel scan need not grow from place to place, so that a weight of 0 may be first.
    places = tl.arange(0, SIZE)
    sums = tl.cumsum(weights, 0)
    found = tl.min(tl.where((sums >= target) & (weights > 0.0), places, SIZE), 0)
    found = tl.minimum(found, tl.max(tl.where(weights > 0.0, places, 0), 0))
    return found, tl.sum(tl.where(places == found - 1, sums, 0.0), 0)


@triton.jit
def blocks_kernel(
    logits, temperatures, tops, totals, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr
):  # as those of `draw_kernel`
    """max z and sum exp(z - max z) of one block of a row, where z = logits / temperature."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(logits + row * WIDTH + columns, mask=columns < WIDTH, other=float("-inf"))
    z = scaled(z, tl.load(temperatures + row), SCALES)
    top = tl.max(z, 0)
    place = row * tl.num_programs(0) + block
    tl.store(tops + place, top)
    tl.store(totals + place, tl.sum(tl.exp(z - tl.where(top == float("-inf"), 0.0, top)), 0))


@triton.jit
def draw_kernel(
    logits,  # fp32 [B, WIDTH], contiguous
    temperatures,  # fp32 [B]; 0: greedy
    keys,  # int64 [B], as `positions`
    positions,
    tops,  # fp32 [B, NUM_BLOCKS], as `totals`
    totals,
    tokens,  # int64 [B]
    logprobs,  # fp32 [B]
    WIDTH: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    PLACES: tl.constexpr,  # NUM_BLOCKS rounded up to a power of 2
    BLOCK: tl.constexpr,
    SCALES: tl.constexpr,
):
    """A block by its share of sum exp(z - max z), then a token by what is left of u; or the first largest one."""
    row, places, inside = tl.program_id(0).to(tl.int64), tl.arange(0, PLACES), tl.arange(0, BLOCK)
    is_there = places < NUM_BLOCKS
    largest = tl.load(tops + row * NUM_BLOCKS + places, mask=is_there, other=float("-inf"))
    masses = tl.load(totals + row * NUM_BLOCKS + places, mask=is_there, other=0.0).to(tl.float64)
    top = tl.max(largest, 0)
    masses *= tl.exp(largest.to(tl.float64) - top.to(tl.float64))
    total = tl.sum(masses, 0)
    target = total * number_of(tl.load(keys + row), tl.load(positions + row))
    block, before = first_reaching(masses, target, PLACES)
    share = (target - before) / tl.sum(tl.where(places == block, masses, 0.0), 0)
    temperature = tl.load(temperatures + row)
    is_greedy = temperature == 0.0
    block = tl.where(is_greedy, tl.min(tl.where(largest == top, places, NUM_BLOCKS - 1), 0), block)
    columns = block * BLOCK + inside
    z = tl.load(logits + row * WIDTH + columns, mask=columns < WIDTH, other=float("-inf"))
    z = scaled(z, temperature, SCALES)
    own_top = tl.max(z, 0)
    weights = tl.exp(z - tl.where(own_top == float("-inf"), 0.0, own_top)).to(tl.float64)
    place, _ = first_reaching(weights, share * tl.sum(weights, 0), BLOCK)
    place = tl.where(is_greedy, tl.min(tl.where(z == top, inside, BLOCK - 1), 0), place)
    chosen = tl.sum(tl.where(inside == place, z, 0.0), 0).to(tl.float64)
    tl.store(tokens + row, tl.minimum(block * BLOCK + place, WIDTH - 1).to(tl.int64))
    tl.store(logprobs + row, (chosen - top.to(tl.float64) - tl.log(total)).to(tl.float32))


def draw(
    logits: Tensor, temperatures: Tensor, keys: Tensor, positions: Tensor, *, scales: bool
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and logprobs float32 [B] of logits float32 [B, V], for noise of `keys`, `positions` int64 [B].

    `scales`: some of `temperatures` float32 [B] are neither 0, which is greedy, nor 1.
    """
    rows, width = (logits := logits.contiguous()).shape
    blocks = triton.cdiv(width, BLOCK)
    tops, totals = logits.new_empty(2, rows, blocks)
    tokens, logprobs = torch.empty_like(keys), logits.new_empty(rows)
    sizes = {"WIDTH": width, "BLOCK": BLOCK, "SCALES": scales}
    with launching_on(logits):
        blocks_kernel[(blocks, rows)](logits, temperatures, tops, totals, **sizes, num_warps=NUM_WARPS)
        sizes |= {"NUM_BLOCKS": blocks, "PLACES": triton.next_power_of_2(blocks), "num_warps": DRAW_WARPS}
        draw_kernel[(rows,)](logits, temperatures, keys, positions, tops, totals, tokens, logprobs, **sizes)
    return tokens, logprobs
