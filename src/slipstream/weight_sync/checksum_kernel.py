"""Checksums of whole blocks (`device_memory.py`) as one Triton kernel. To be imported only where Triton is.

It reads each byte once, and with a target writes it once: copy and checksums in one pass over memory. The table of
weights is twice as large as a block, so several blocks share each part of it that a program has read.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped"
# Triton compiles this function from its source: its annotations are its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP, PARTS = 4, 8
"""Blocks that a program shares weights among, of which it reads one of so many parts: 64 MiB are 512 programs."""
TILE, NUM_WARPS = 512, 4
"""Words of each block at once: 16 bytes for every thread."""


@triton.jit(do_not_specialize=["num_blocks"])
def checksum_kernel(
    source,  # int32 [num_blocks, WORDS], contiguous, as `target`, which is written if COPIES
    target,
    halves,  # int32 [2, WORDS]: of the weights, the lower ones first
    sums,  # int64 [num_blocks], added to
    num_blocks,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    COPIES: tl.constexpr,
):
    """sums[b] += sum_i weights[i] source[b, i] modulo 2^64, over a part of GROUP blocks; target = source, if COPIES.

    Halves of weights have the size of words: both are read by the same threads, and nothing is exchanged in the loop.
    """
    program = tl.program_id(0)  # those that run together read bytes that lie together
    blocks = (program // PARTS).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    is_there = blocks < num_blocks
    columns = tl.arange(0, TILE)
    places = blocks[:, None] * WORDS + columns[None, :]
    total = tl.zeros([GROUP, TILE], tl.int64)
    start = program % PARTS * (WORDS // PARTS)
    for first in range(start, start + WORDS // PARTS, TILE):
        # Weights come first: words are waited for once, and no longer. Each of these is wanted once: evicted first.
        lower = tl.load(halves + first + columns).to(tl.uint32, bitcast=True).to(tl.int64)
        weights = (tl.load(halves + WORDS + first + columns).to(tl.int64) << 32) | lower
        words = tl.load(source + places + first, mask=is_there[:, None], other=0, eviction_policy="evict_first")
        if COPIES:
            tl.store(target + places + first, words, mask=is_there[:, None], eviction_policy="evict_first")
        total += words.to(tl.int64) * weights[None, :]
    tl.atomic_add(sums + blocks, tl.sum(total, 1), mask=is_there, sem="relaxed")


def sum_blocks(words: Tensor, target: Tensor | None, halves: Tensor, sums: Tensor) -> None:
    """Add to int64 `sums` [N] the checksums of int32 `words` [N, W], which are copied to `target`, if there is one.

    `halves` int32 [2, W]: the lower and the upper halves of the weights.
    Addresses may be any multiples of 4; where they are multiples of 16, words are read and written four at a time.
    """
    with torch.cuda.device_of(words):
        checksum_kernel[(triton.cdiv(len(words), GROUP) * PARTS,)](
            words,
            words if target is None else target,
            halves,
            sums,
            len(words),
            WORDS=words.shape[1],
            GROUP=GROUP,
            PARTS=PARTS,
            TILE=TILE,
            COPIES=target is not None,
            num_warps=NUM_WARPS,
        )
