"""Checksums of whole blocks (`device_memory.py`) as one Triton kernel. To be imported only where Triton is.

It reads each byte once, and with a target writes it once: copy and checksums in one pass over memory. The table of
weights is twice as large as a block, so several blocks share each part of it that a program has read.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# Triton compiles this function from its source: its annotations are its own.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP, TILE, NUM_WARPS = 4, 1024, 8
"""Blocks of a program; words of each that it has at once: with 8 warps four loads of 16 bytes for every thread."""


@triton.jit(do_not_specialize=["num_blocks"])
def checksum_kernel(
    source,  # int32 [num_blocks, WORDS], contiguous, as `target`, which is written if COPIES
    target,
    weights,  # int64 [WORDS]
    sums,  # int64 [num_blocks]
    num_blocks,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    COPIES: tl.constexpr,
):
    """sums[b] = sum_i weights[i] source[b, i] modulo 2^64, of GROUP blocks; target = source, if COPIES."""
    blocks = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    is_there = blocks < num_blocks
    columns = tl.arange(0, TILE)
    places = blocks[:, None] * WORDS + columns[None, :]
    total = tl.zeros([GROUP, TILE], tl.int64)
    for first in range(0, WORDS, TILE):
        # Each word is wanted once: it should not drive the weights from the cache.
        words = tl.load(source + places + first, mask=is_there[:, None], other=0, eviction_policy="evict_first")
        if COPIES:
            tl.store(target + places + first, words, mask=is_there[:, None], eviction_policy="evict_first")
        total += words.to(tl.int64) * tl.load(weights + first + columns)[None, :]
    tl.store(sums + blocks, tl.sum(total, 1), mask=is_there)


def sum_blocks(words: Tensor, target: Tensor | None, weights: Tensor, sums: Tensor) -> None:
    """Fill int64 `sums` [N] with the checksums of int32 `words` [N, W], which are copied to `target`, if there is one.

    Addresses may be any multiples of 4; where they are multiples of 16, words are read and written four at a time.
    """
    with torch.cuda.device_of(words):
        checksum_kernel[(triton.cdiv(len(words), GROUP),)](
            words,
            words if target is None else target,
            weights,
            sums,
            len(words),
            WORDS=words.shape[1],
            GROUP=GROUP,
            TILE=TILE,
            COPIES=target is not None,
            num_warps=NUM_WARPS,
        )
