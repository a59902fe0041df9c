"""Triton kernels of decode attention over pages. To be imported only where Triton is: CUDA builds of torch bring it.

Split-KV ("flash-decoding"; Dao et al., 2023) with the queries of one key-value head handled together: a program reads
the keys and values of one row, one key-value head and one stretch of `SPLIT` positions once, and a second kernel joins
the stretches. The launch depends on nothing but the number of rows and the longest length of a bucket; lengths are read
on the device. Stretches begin at multiples of `SPLIT` whatever the bucket, so a row's bits depend on that row alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# Triton compiles these functions from their source: their annotations are its own.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_kernel(
    queries,  # [B, H, D], the last dimension contiguous
    keys,  # [slots, Hkv, D], contiguous
    values,
    blocks,  # int32 [B, blocks]
    lengths,  # int64 [B], >= 1
    outputs,  # [B, H, splits, D], contiguous
    log_sums,  # fp32 [B, H, splits], base 2
    scale_log2e,
    query_row_stride,
    query_head_stride,
    blocks_stride,
    num_splits,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,  # HEAD_DIM rounded up to a power of 2, 16 at least
    GROUP_BLOCK: tl.constexpr,  # query heads of a key-value head, likewise
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    start = split * SPLIT
    if start >= length:
        return
    stop = tl.minimum(start + SPLIT, length)
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    members = tl.arange(0, GROUP_BLOCK)
    heads = kv_head * group + members
    dims = tl.arange(0, HEAD_BLOCK)
    in_tile = (members < group)[:, None] & (dims < HEAD_DIM)[None, :]
    row_start = row.to(tl.int64)
    query = tl.load(
        queries + row_start * query_row_stride + heads[:, None] * query_head_stride + dims[None, :],
        mask=in_tile,
        other=0.0,
    )
    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, HEAD_BLOCK], tl.float32)
    for begin in range(start, stop, BLOCK):
        positions = begin + tl.arange(0, BLOCK)
        is_there = positions < stop
        page = tl.load(blocks + row_start * blocks_stride + positions // PAGE, mask=is_there, other=0)
        slots = page.to(tl.int64) * PAGE + positions % PAGE
        places = (slots * NUM_KV_HEADS + kv_head) * HEAD_DIM
        key = tl.load(
            keys + places[None, :] + dims[:, None],
            mask=is_there[None, :] & (dims < HEAD_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2e
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        largest_now = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - largest_now)
        weights = tl.exp2(scores - largest_now[:, None])
        value = tl.load(
            values + places[:, None] + dims[None, :],
            mask=is_there[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = largest_now
    place = (row_start * NUM_HEADS + heads) * num_splits + split
    tl.store(log_sums + place, largest + tl.log2(total), mask=members < group)
    tl.store(outputs + place[:, None] * HEAD_DIM + dims[None, :], mixed / total[:, None], mask=in_tile)


@triton.jit
def join_kernel(
    partial,  # fp32 [B, H, splits, D]
    log_sums,  # fp32 [B, H, splits], base 2
    lengths,  # int64 [B]
    outputs,  # [B, H, D]
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sum_s 2^(l_s - max l) o_s / sum_s 2^(l_s - max l), over the stretches that a row has."""
    row, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, HEAD_BLOCK)
    first = (row.to(tl.int64) * NUM_HEADS + head) * num_splits
    used = tl.cdiv(tl.load(lengths + row), SPLIT)
    largest = float("-inf")
    total = 0.0
    mixed = tl.zeros([HEAD_BLOCK], tl.float32)
    for begin in range(0, used, BLOCK):
        splits = begin + tl.arange(0, BLOCK)
        is_used = splits < used
        logs = tl.load(log_sums + first + splits, mask=is_used, other=float("-inf"))
        largest_now = tl.maximum(largest, tl.max(logs, 0))
        shrink = tl.exp2(largest - largest_now)
        weights = tl.exp2(logs - largest_now)
        parts = tl.load(
            partial + (first + splits)[:, None] * HEAD_DIM + dims[None, :],
            mask=is_used[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * parts, 0)
        largest = largest_now
    place = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(outputs + place + dims, mixed / total, mask=dims < HEAD_DIM)
