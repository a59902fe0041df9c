"""A process of its own for tests of kernels: of attention, decode steps, layers, sampling and checksums.

Triton compiles here, as it does when a kernel is launched.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from slipstream.generator import decode_kernels, paged_kernels, sampler_kernels
from slipstream.generator.fused_decode import HEADS_TILE, norm_warps
from slipstream.generator.paged_attention import KEYS_PER_TILE, SPLIT_TOKENS, SPLITS_PER_TILE
from slipstream.generator.paged_kv import PAGE_SIZE
from slipstream.models import layer_kernels
from slipstream.models.layer_functions import ROTATED_BLOCK, SILU_BLOCK
from slipstream.weight_sync import checksum_kernel
from slipstream.weight_sync.copying import BLOCK_BYTES

STRIDES = ("source_stride", "target_stride")
SHARED_BYTES = 99 * 1024  # of the smallest GPU since capability 8.0: that of 8.6 and 8.9
CASES = (  # compute capability, precision, query heads, key-value heads, head size
    (80, "bf16", 14, 2, 64),
    (90, "bf16", 12, 12, 80),
    (90, "bf16", 32, 8, 128),
    (90, "fp32", 32, 8, 128),
)


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, int], capability: int, num_warps: int = 4) -> Any:
    """The program; pointers begin at multiples of 16 bytes, as torch's do, and rows of heads are multiples apart."""
    signature = types | dict.fromkeys(constants, "constexpr")
    multiples = [place for place, (name, kind) in enumerate(types.items()) if kind[0] == "*" or name in STRIDES]
    aligned = {(place,): [["tt.divisibility", 16]] for place in multiples}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2, "num_warps": num_warps}
    )


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


DECODERS = (  # hidden size, inner width, query heads, key-value heads, head size, head norms; of benchmarked models
    (896, 4864, 14, 2, 64, False),  # Qwen2.5-0.5B
    (1536, 8960, 12, 2, 128, False),  # Qwen2.5-1.5B
    (4096, 14336, 32, 8, 128, False),  # Llama-3.1-8B
    (4096, 12288, 32, 8, 128, True),  # Qwen3-8B
)
MOST_REGISTERS = 64  # of 65,536 of a multiprocessor: as many threads as there may be, halved


def check_resources(program: Any, most_registers: int = MOST_REGISTERS) -> None:
    """No spills, few registers, and bfloat16 read and written by 16 bytes a thread."""
    ptx = program.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx), "reads of 16 bytes"
    assert re.search(r"st\.global\S*\.v4\.b32", ptx), "writes of 16 bytes"
    assert not re.search(r"(ld|st)\.global(\.v\d)?\.b16", ptx), "nothing number by number"
    check_registers(program, most_registers)


def check_registers(program: Any, most_registers: int) -> None:
    """No spills, few registers."""
    ptx = program.asm["ptx"]
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", "--gpu-name", "sm_90a", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in told, told
    (registers,) = re.findall(r"Used (\d+) registers", told)
    assert int(registers) <= most_registers, told
    if "-v" in sys.argv:
        sys.stdout.write(f"{program.metadata.name}: {program.metadata.num_warps} warps, {registers} registers\n")


def decode() -> None:
    """Everything of a fused layer for Hopper."""
    for hidden, _, heads, kv_heads, head_dim, norms in DECODERS:
        block = power_of_two(hidden)
        pointers = dict.fromkeys(("stream", "branch", "weight", "normed"), "*bf16")
        constants = {"HIDDEN": hidden, "BLOCK": block, "ADDS": True}
        kernel = decode_kernels.add_norm_kernel
        check_resources(compiled(kernel, pointers | {"eps": "fp32"}, constants, 90, norm_warps(block)))
        types = dict.fromkeys(("qkv", "q_weight", "k_weight"), "*bf16") | dict.fromkeys(("cos", "signed_sin"), "*fp32")
        types |= dict.fromkeys(("positions", "slots"), "*i64")
        types |= dict.fromkeys(("queries", "keys", "values"), "*bf16") | {"eps": "fp32"}
        constants = {"NUM_HEADS": heads, "NUM_KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "ROTARY": head_dim}
        constants |= {"HEAD_BLOCK": power_of_two(head_dim), "NORMS": norms}
        constants |= {"HEADS": HEADS_TILE // power_of_two(head_dim)}
        check_resources(compiled(decode_kernels.enter_kernel, types, constants, 90, 2))


def layer() -> None:
    """What a layer computes between its products, forward and backward, for Hopper."""
    for _, width, heads, kv_heads, head_dim, _ in DECODERS:
        constants = {"WIDTH": width, "BLOCK": SILU_BLOCK}
        pointers = dict.fromkeys(("gate_up", "inner"), "*bf16")
        check_resources(compiled(layer_kernels.silu_mul_kernel, pointers, constants, 90))
        pointers = dict.fromkeys(("gate_up", "upstream", "gradient"), "*bf16")
        check_resources(compiled(layer_kernels.silu_mul_backward_kernel, pointers, constants, 90))
        types = dict.fromkeys(("source", "target", "cos", "signed_sin"), "*bf16") | dict.fromkeys(STRIDES, "i32")
        constants = {"HEAD_DIM": head_dim, "HEAD_BLOCK": power_of_two(head_dim), "ROTARY": head_dim}
        constants |= {"NUM_ROTATED": heads + kv_heads, "HEADS": ROTATED_BLOCK // power_of_two(head_dim)}
        for back in (False, True):
            numbers = {"NUM_HEADS": heads + (0 if back else 2 * kv_heads), "BACK": back}
            check_resources(compiled(layer_kernels.rotate_kernel, types, constants | numbers, 90))


def checksums() -> None:
    """Copying checksums for Hopper, aligned as slots are: nothing is exchanged between threads but sums at the end."""
    pointers = {"source": "*i32", "target": "*i32", "halves": "*i32", "sums": "*i64"}
    constants = {name: getattr(checksum_kernel, name) for name in ("GROUP", "PARTS", "TILE")}
    constants["WORDS"] = BLOCK_BYTES // 4
    types, kernel = pointers | {"num_blocks": "i32"}, checksum_kernel.checksum_kernel
    program = compiled(kernel, types, constants | {"COPIES": True}, 90, checksum_kernel.NUM_WARPS)
    check_resources(program, most_registers=80)  # six programs of a multiprocessor, with 48 KiB on the way
    assert not re.search(r"(ld|st)\.global\S*(?<!v4)\.b32", program.asm["ptx"]), "nothing word by word"
    assert program.metadata.shared == 8 * checksum_kernel.NUM_WARPS * checksum_kernel.GROUP, "room for these sums alone"


VOCABULARIES = (151_936, 50_257)  # of Qwen2.5, in 16 bytes a thread, and of GPT-2, whose rows begin anywhere


def sampling() -> None:
    """Both kernels for Hopper, with temperatures and greedy rows."""
    for width in VOCABULARIES if sys.argv[-1] != "few" else VOCABULARIES[:1]:
        sizes = {"WIDTH": width, "BLOCK": sampler_kernels.BLOCK, "SCALES": True}
        types = dict.fromkeys(("logits", "temperatures", "tops", "totals"), "*fp32")
        blocks = compiled(sampler_kernels.blocks_kernel, types, sizes, 90, sampler_kernels.NUM_WARPS)
        check_registers(blocks, 40)
        if width % 4 == 0:
            assert len(re.findall(r"ld\.global\S*\.v4\.b32", blocks.asm["ptx"])) == 4, "logits in 16 bytes a thread"
        types = dict.fromkeys(("logits", "temperatures"), "*fp32") | dict.fromkeys(("keys", "positions"), "*i64")
        types |= {"tops": "*fp32", "totals": "*fp32", "tokens": "*i64", "logprobs": "*fp32"}
        num_blocks = -(-width // sampler_kernels.BLOCK)
        sizes |= {"NUM_BLOCKS": num_blocks, "PLACES": power_of_two(num_blocks)}
        drawing = compiled(sampler_kernels.draw_kernel, types, sizes, 90, sampler_kernels.DRAW_WARPS)
        check_registers(drawing, MOST_REGISTERS)


WORK = {"layer": layer, "decode": decode, "sampling": sampling, "checksums": checksums}

if __name__ == "__main__":
    next((work for name, work in WORK.items() if name in sys.argv), main)()
