"""A process of its own for `test_paged_kernels.py`: Triton compiles here, as it does when a kernel is launched."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.generator import paged_kernels
from slipstream.generator.paged_attention import KEYS_PER_TILE, SPLIT_TOKENS, SPLITS_PER_TILE
from slipstream.generator.paged_kv import PAGE_SIZE

SHARED_BYTES = 99 * 1024  # of the smallest GPU since capability 8.0: that of 8.6 and 8.9
CASES = (  # compute capability, precision, query heads, key-value heads, head size
    (80, "bf16", 14, 2, 64),
    (90, "bf16", 12, 12, 80),
    (90, "bf16", 32, 8, 128),
    (90, "fp32", 32, 8, 128),
)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, int], capability: int) -> Any:
    """The program; pointers begin at multiples of 16 bytes, as torch's do."""
    signature = types | dict.fromkeys(constants, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(types.values()) if kind[0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2})


def power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def main() -> None:
    numbers = ("query_row_stride", "query_head_stride", "blocks_stride", "num_splits")
    for capability, precision, heads, kv_heads, head_dim in CASES:
        types = dict.fromkeys(("queries", "keys", "values"), f"*{precision}")
        types |= {"blocks": "*i32", "lengths": "*i64", "outputs": "*fp32", "log_sums": "*fp32"}
        types |= {"scale_log2e": "fp32"} | dict.fromkeys(numbers, "i32")
        constants = {
            "NUM_HEADS": heads,
            "NUM_KV_HEADS": kv_heads,
            "HEAD_DIM": head_dim,
            "HEAD_BLOCK": max(16, power_of_two(head_dim)),
            "GROUP_BLOCK": max(16, power_of_two(heads // kv_heads)),
            "PAGE": PAGE_SIZE,
            "SPLIT": SPLIT_TOKENS,
            "BLOCK": KEYS_PER_TILE,
        }
        split = compiled(paged_kernels.split_kernel, types, constants, capability)
        assert split.metadata.shared <= SHARED_BYTES, (precision, head_dim, split.metadata.shared)
        if precision == "bf16":
            assert "mma.sync" in split.asm["ptx"], "bfloat16 is for tensor cores"
    types = {"partial": "*fp32", "log_sums": "*fp32", "lengths": "*i64", "outputs": "*bf16", "num_splits": "i32"}
    constants = {"NUM_HEADS": 32, "HEAD_DIM": 80, "HEAD_BLOCK": 128, "SPLIT": SPLIT_TOKENS, "BLOCK": SPLITS_PER_TILE}
    compiled(paged_kernels.join_kernel, types, constants, 90)


if __name__ == "__main__":
    main()
