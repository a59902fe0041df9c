"""Prefill and attention beside what the memory and the products of this machine allow.

    python benchmarks/rooflines.py [--parts prefill attention] [--device cuda] [--model qwen2.5-1.5b] [--rows 256]
        [--context 1024] [--prefill-tokens 8192] [--groups 4] [--samples 8] [--repeats 5] [--json FILE]

*prefill*: the passes with which the engine fills its cache for `--rows` prompts of `--context` tokens, at most
`--prefill-tokens` in each; the rest of its steps does not count. *attention* of one layer: a decode step's, of as many
rows over pages; and the trainer's, of `--groups` prompts of half the context, each with `--samples` completions of the
whole, in one call and by padded batches. The floor is max(bytes / bandwidth, FLOP / rate), of a copy and a product
measured here. FLOP are those needed: two for a weight and token, but for what the last layer of a prefill leaves out;
four for each number of a query and key that it may see, twice as many backward. Bytes: weights once a pass; queries,
keys, values and the result once where they are needed. bfloat16 on CUDA, random weights, medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from contenders.gpu import copy_bytes_per_s, product_flop_per_s, random_model, requests, synchronize
from contenders.models import MODELS, SHAPES, kv_bytes_per_token, matmul_params
from contenders.ours import new_engine
from head import seconds
from torch import Tensor

from slipstream.generator.paged_attention import default_attend
from slipstream.generator.paged_kv import PAGE_SIZE
from slipstream.generator.runner import Chunk
from slipstream.models.attention import PackedAttention
from slipstream.models.config import TransformerConfig
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions

CONFIGS = SHAPES | {name: model.config for name, model in MODELS.items()}
SIZES = {"rows": 256, "context": 1024, "prefill-tokens": 8192, "groups": 4, "samples": 8, "repeats": 5}
CALLS = 10  # of attention between two looks at the clock
Measured = tuple[str, list[float], float, float]  # its name, the seconds of each turn, FLOP and bytes of one


def prefill(config: TransformerConfig, given: argparse.Namespace, device: torch.device) -> list[Measured]:
    """The runner's passes alone, told by the chunks that the engine gives it."""
    model, precision, width = random_model(config, device), "bfloat16", 2
    if device.type == "cpu":
        model, precision, width = model.float(), "float32", 4
    sizes = {"num_slots": given.rows, "max_len": given.context + 1, "prefill_tokens": given.prefill_tokens}
    engine, _weights = new_engine(model, precision=precision, **sizes)
    runner, passes = engine._runner, list[tuple[float, list[tuple[int, int]]]]()
    plain, turns, layers = runner.prefill, list[float](), config.num_layers - 1

    def counted(chunks: Sequence[Chunk]) -> None:
        synchronize(device)
        passes.append((seconds(lambda: plain(chunks), device.type), [(len(one.tokens), one.start) for one in chunks]))

    runner.prefill = counted
    last = config.hidden_size * (config.query_size + 2 * config.kv_size)
    weights = (matmul_params(config) - config.vocab_size * config.hidden_size) * layers / config.num_layers + last
    for turn in range(given.repeats + 1):  # the first warms up
        passes.clear()
        engine.submit(requests(given.rows, given.context, 1, config.vocab_size, turn * given.rows))
        while not engine.is_idle:
            engine.step()
        turns.append(sum(taken_s for taken_s, _ in passes))
    chunks = [one for _, each in passes for one in each]
    tokens = sum(count for count, _ in chunks)
    seen = sum(count * (start + count / 2) for count, start in chunks)
    stored = sum(count + (start + count if start else 0) for count, start in chunks)
    flop = 2 * weights * tokens + 4 * layers * config.query_size * seen
    moved = len(passes) * width * weights + stored * kv_bytes_per_token(config, width)
    print(f"prefill: {tokens} tokens in {len(passes)} passes, {tokens / statistics.median(turns[1:]):,.0f} tokens/s")
    return [("prefill", turns[1:], flop, moved)]


def attention(config: TransformerConfig, given: argparse.Namespace, device: torch.device) -> list[Measured]:
    """One layer's, forward and with gradients."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, kv_heads, dim, width = config.num_heads, config.num_kv_heads, config.head_dim, dtype.itemsize
    found: list[Measured] = []

    def measure(name: str, work: Callable[[], object], flop: float, numbers: float) -> None:
        turns = [seconds(lambda: [work() for _ in range(CALLS)], device.type) for _ in range(given.repeats + 1)]
        found.append((name, [one / CALLS for one in turns[1:]], flop, width * numbers))

    num_blocks = -(-given.context // PAGE_SIZE)
    pages = torch.randn(2, 1 + given.rows * num_blocks, PAGE_SIZE, kv_heads, dim, device=device).to(dtype)
    blocks = 1 + torch.arange(given.rows * num_blocks, device=device, dtype=torch.int32).view(given.rows, num_blocks)
    queries = torch.randn(given.rows, heads, dim, device=device).to(dtype)
    lengths = torch.full((given.rows,), given.context, device=device)
    with torch.inference_mode():
        step: Callable[[], object] = partial(default_attend(device), queries, *pages, blocks, lengths)
        if device.type == "cuda":  # as steps are captured
            step()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        seen = given.rows * given.context
        measure("decode", step, 4 * heads * dim * seen, 2 * kv_heads * dim * seen + 2 * queries.numel())

    prompt, own = given.context // 2, given.context
    each = prompt + given.samples * own
    num_rows, rows = given.groups * each, list[Tensor]()
    for shared in torch.arange(num_rows).view(given.groups, each):
        rows += [torch.cat([shared[:prompt], part]) for part in shared[prompt:].split(own)]
    seen = given.groups * (prompt**2 / 2 + given.samples * own * (prompt + own / 2))
    fused = torch.randn(num_rows, heads + 2 * kv_heads, dim, device=device).to(dtype).requires_grad_()

    def both(packed: PackedAttention) -> object:
        return torch.autograd.grad(out := packed(0, *fused.split([heads, kv_heads, kv_heads], 1)), fused, out)

    flop, numbers = 4 * heads * dim * seen, 2 * num_rows * (heads + kv_heads) * dim
    for name, is_one in (("in one call", True), ("by padded batches", False))[device.type == "cpu" :]:
        packed = PackedAttention([prompt + own] * len(rows), torch.cat(rows), varlen=is_one)
        forward = partial(packed, 0, *fused.detach().split([heads, kv_heads, kv_heads], 1))
        measure(f"training {name}, forward", forward, flop, numbers)
        measure(f"training {name}, with gradients", partial(both, packed), 3 * flop, 3 * numbers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"prefill": prefill, "attention": attention}
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=CONFIGS, default="qwen2.5-1.5b")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device, config, commit = torch.device(given.device), CONFIGS[given.model], versions().commit
    print(f"{describe()}, commit {commit}")
    bandwidth = copy_bytes_per_s(device, 1 << 30 if device.type == "cuda" else 1 << 24)
    rate, results = product_flop_per_s(device), []
    print(f"{given.model}: a copy moves {bandwidth / 1e9:,.0f} GB/s, a product makes {rate / 1e12:.3g} TFLOP/s")
    for name, turns, flop, moved in (one for part in given.parts for one in parts[part](config, given, device)):
        step_s, floors = statistics.median(turns), {"FLOP": flop / rate, "bytes": moved / bandwidth}
        by, floor_s = max(floors.items(), key=lambda one: one[1])
        told = {"name": name, "seconds": turns, "flop": flop, "bytes": moved, "floor_s": floor_s}
        results.append(told | {"reached": floor_s / step_s})
        spread = f"{1e3 * min(turns):.3f} .. {1e3 * max(turns):.3f}"
        print(f"{name}: {1e3 * step_s:.3f} ms ({spread}), {flop / 1e9:.4g} GFLOP, {moved / 1e6:.4g} MB", end="")
        print(f", floor {1e3 * floor_s:.3f} ms by {by}, {floor_s / step_s:.1%} reached")
    if given.json is not None:
        told = {"commit": commit, "hardware": str(describe()), "model": given.model, "measured": results}
        given.json.write_text(json.dumps(told | {"copy_bytes_per_s": bandwidth, "product_flop_per_s": rate}))


if __name__ == "__main__":
    main()
