"""A process of its own for tests of kernels: of attention, decode steps, layers, heads, rounding, sampling, checksums.

Triton compiles here, as it does when a kernel is launched. With "few" behind the kinds it does so for one model only.
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
from slipstream.models import e4m3_kernels, head_kernels, layer_kernels
from slipstream.models.device import power_of_two
from slipstream.models.e4m3 import row_sizes
from slipstream.models.layer_functions import ROTATED_BLOCK, SILU_BLOCK
from slipstream.weight_sync import checksum_kernel
from slipstream.weight_sync.copying import BLOCK_BYTES

STRIDES = ("source_stride", "target_stride")
MULTIPLES = (*STRIDES, "query_row_stride", "query_head_stride")  # numbers that are some of whole heads
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
    multiples = [place for place, (name, kind) in enumerate(types.items()) if kind[0] == "*" or name in MULTIPLES]
    aligned = {(place,): [["tt.divisibility", 16]] for place in multiples}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_stages": 2, "num_warps": num_warps}
    )


def split_program(capability: int, precision: str, heads: int, kv_heads: int, head_dim: int, outputs: str) -> Any:
    numbers = ("query_row_stride", "query_head_stride", "blocks_stride", "num_splits")
    types = dict.fromkeys(("queries", "keys", "values"), f"*{precision}")
    types |= {"blocks": "*i32", "lengths": "*i64", "outputs": outputs, "log_sums": "*fp32"}
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
    return compiled(paged_kernels.split_kernel, types, constants, capability)


def join_program(heads: int, head_dim: int) -> Any:
    types = {"partial": "*fp32", "log_sums": "*fp32", "lengths": "*i64", "outputs": "*bf16", "num_splits": "i32"}
    constants = {"NUM_HEADS": heads, "HEAD_DIM": head_dim, "HEAD_BLOCK": max(16, power_of_two(head_dim))}
    constants |= {"SPLIT": SPLIT_TOKENS, "BLOCK": SPLITS_PER_TILE}
    return compiled(paged_kernels.join_kernel, types, constants, 90)


def main() -> None:
    for capability, precision, heads, kv_heads, head_dim in CASES:
        split = split_program(capability, precision, heads, kv_heads, head_dim, "*fp32")
        assert split.metadata.shared <= SHARED_BYTES, (precision, head_dim, split.metadata.shared)
        if precision == "bf16":
            assert "mma.sync" in split.asm["ptx"], "bfloat16 is for tensor cores"
    join_program(32, 80)


DECODERS = (  # hidden size, inner width, query heads, key-value heads, head size, head norms; of benchmarked models
    (896, 4864, 14, 2, 64, False),  # Qwen2.5-0.5B
    (1536, 8960, 12, 2, 128, False),  # Qwen2.5-1.5B
    (4096, 14336, 32, 8, 128, False),  # Llama-3.1-8B
    (4096, 12288, 32, 8, 128, True),  # Qwen3-8B
)
VOCABULARIES = (151936, 128256)  # of Qwen2.5, of Llama-3.1
IS_FEW = "few" in sys.argv
MOST_REGISTERS = 64  # of 65,536 of a multiprocessor: as many threads as there may be, halved


def check_resources(program: Any, most_registers: int = MOST_REGISTERS) -> None:
    """No spills, few registers, and bfloat16 read and written by 16 bytes a thread."""
    ptx = program.asm["ptx"]
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx), "reads of 16 bytes"
    assert re.search(r"st\.global\S*\.v4\.b32", ptx), "writes of 16 bytes"
    assert not re.search(r"(ld|st)\.global(\.v\d)?\.b(8|16)", ptx), "nothing number by number"
    check_registers(program, most_registers)


def check_registers(program: Any, most_registers: int = MOST_REGISTERS) -> None:
    """No spills, few registers."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(program.asm["ptx"])
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
        pointers = dict.fromkeys(("stream", "branch", "weight", "normed", "scales"), "*bf16")
        constants = {"HIDDEN": hidden, "BLOCK": block, "ADDS": True, "ROUNDS": False}
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


def attention() -> None:
    """Keys and values go to shared memory by 16 bytes; queries are read and results written so, but for joined ones."""
    for _, _, heads, kv_heads, head_dim, _ in DECODERS[: 1 if IS_FEW else -1]:  # the last has the heads before
        for outputs in ("*fp32", "*bf16")[: 2 - IS_FEW]:  # of many stretches, of one
            split = split_program(90, "bf16", heads, kv_heads, head_dim, outputs)
            check_resources(split, most_registers=128)  # four programs of a multiprocessor
            widths = re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (\w+)", split.asm["ptx"])
            assert set(widths) == {"0x10"}, "keys and values on their way while others are multiplied"
        join = join_program(heads, head_dim)
        check_registers(join)
        assert "ld.global.v4.b32" in join.asm["ptx"], "parts of stretches by 16 bytes"


def head() -> None:
    """Logits of the trainer's head for Hopper, read once each way."""
    for width in VOCABULARIES[: 2 - IS_FEW]:
        constants = {"WIDTH": width, "BLOCK": head_kernels.BLOCK}
        types = {"logits": "*fp32", "places": "*i64", "found": "*fp32", "num_rows": "i32"}
        statistics = compiled(head_kernels.statistics_kernel, types, constants, 90, 8)
        check_registers(statistics)
        assert "ld.global.v4.b32" in statistics.asm["ptx"], "logits by 16 bytes"
        types = {"logits": "*fp32", "places": "*i64"}
        types |= dict.fromkeys(("normalisers", "entropies", "of_logprobs", "of_entropies"), "*fp32")
        types |= {"gradient": "*bf16"}
        for has_entropies in (True, False)[: 2 - IS_FEW]:
            flags = {"HAS_LOGPROBS": True, "HAS_ENTROPIES": has_entropies}
            check_resources(compiled(head_kernels.gradient_kernel, types, constants | flags, 90, 8))


def e4m3() -> None:
    """Rows of attention, of SiLU * up and of norms for Hopper, up to those of 32,768 numbers."""
    pointers = {"source": "*bf16", "values": "*fp8e4nv", "scales": "*fp32"}
    widths = [(heads * head_dim, inner) for _, inner, heads, _, head_dim, _ in DECODERS] + [(32768, 32768)]
    for each in widths[: 1 if IS_FEW else None]:
        for width, is_gated in zip(each, (False, True), strict=True):
            sizes = row_sizes(width)
            num_warps = sizes.pop("num_warps")
            constants = {"WIDTH": width, "IS_GATED": is_gated} | sizes
            program = compiled(e4m3_kernels.e4m3_kernel, pointers, constants, 90, num_warps)
            check_resources(program)
            assert "cvt.rn.satfinite.e4m3x2.f32" in program.asm["ptx"], "rounded by the GPU, two at once"
            assert "div.rn.f32" in program.asm["ptx"], "divided as torch divides"
    for hidden, *_ in DECODERS[: 1 if IS_FEW else None]:
        types = dict.fromkeys(("stream", "branch", "weight"), "*bf16")
        types |= {"normed": "*fp8e4nv", "scales": "*fp32", "eps": "fp32"}
        constants = {"HIDDEN": hidden, "BLOCK": power_of_two(hidden), "ADDS": True, "ROUNDS": True}
        kernel = decode_kernels.add_norm_kernel
        check_resources(compiled(kernel, types, constants, 90, norm_warps(power_of_two(hidden))))


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


SAMPLED = (151_936, 50_257, 72)
"""Of Qwen2.5, in 16 bytes a thread, of GPT-2, whose rows begin anywhere, and of a model of characters: one block."""


def sampling() -> None:
    """Both kernels for Hopper, with temperatures and greedy rows."""
    for width in SAMPLED[:1] if IS_FEW else SAMPLED:
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
        check_registers(drawing, 80)  # a program of 8 warps for each row: three of a multiprocessor


WORK = {
    "layer": layer,
    "decode": decode,
    "sampling": sampling,
    "checksums": checksums,
    "attention": attention,
    "head": head,
    "e4m3": e4m3,
}

if __name__ == "__main__":
    for do in [work for name, work in WORK.items() if name in sys.argv] or [main]:
        do()
