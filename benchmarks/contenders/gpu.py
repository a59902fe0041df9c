"""Decode speed of the engine on one GPU beside what its memory and its products allow, and where a step's time goes.

Random weights, so no checkpoint is needed. A batch of different prompts of `--context` tokens decodes
`--new-tokens` greedy tokens; counted are steps in which the whole batch was live, from one's end to the next one's: a
step is launched before the one before it is read. No two rows share keys and values, so every row's are read from
memory in every step. The roofline is max(bytes of weights / bandwidth, FLOP of products / rate) + bytes of keys and
values / bandwidth, of a copy and of a large product in bfloat16 measured beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from contenders.models import SHAPES, kv_bytes_per_token, matmul_params
from contenders.ours import new_engine

from slipstream.generator.requests import GenerationEngine, Request
from slipstream.models.config import TransformerConfig
from slipstream.models.transformer import Transformer, rope_tables

BATCH = 256
PREFILL_TOKENS = 32768  # a step: the batch is full before its first row ends
PROFILED_STEPS = 8
NOMINAL_BYTES_PER_S = {  # of the makers' data sheets; the first name that a device's name contains counts
    "B200": 8.0e12,
    "H200": 4.8e12,
    "H100 PCIe": 2.0e12,
    "H100": 3.35e12,
    "A100-SXM4-80GB": 2.04e12,
    "A100 80GB": 1.94e12,
    "A100": 1.56e12,
    "L40S": 0.864e12,
    "A10": 0.6e12,
    "L4": 0.3e12,
    "4090": 1.01e12,
    "3090": 0.936e12,
    "V100": 0.9e12,
    "T4": 0.32e12,
}
BYTES_READ = {"float32": (4, 4), "bfloat16": (2, 2), "int8": (2, 2), "fp8": (1, 2)}  # of a weight, of a key
KINDS = {  # a kernel is of the first kind one of whose words its name contains
    "attention": ("attention", "attn", "flash", "fmha", "paged", "split_kernel", "join_kernel"),
    "products": ("gemm", "cutlass", "cublas", "nvjet", "xmma", "gemv", "splitk"),
    "copies": ("memcpy", "memset", "copy", "index", "gather", "scatter"),
    "sampling": ("softmax", "sort", "scan", "cum", "argmax", "topk", "reduce", "blocks_kernel", "draw_kernel"),
}


def nominal_bytes_per_s(device_name: str) -> float | None:
    return next((rate for name, rate in NOMINAL_BYTES_PER_S.items() if name in device_name), None)


def kind_of(kernel: str) -> str:
    lowered = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lowered for word in words)), "other")


@torch.no_grad()
def random_model(config: TransformerConfig, device: torch.device) -> Transformer:
    """In bf16, made on the device: no copy in the host's memory is ever filled."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Transformer(config).to_empty(device=device)
    finally:
        torch.set_default_dtype(torch.float32)
    cos, signed_sin = rope_tables(config)
    model.cos, model.signed_sin = cos.to(device), signed_sin.to(device)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.02)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bytes_per_s(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Best of ten copies, bytes read and written."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_s = float("inf")
    for _ in range(10):
        synchronize(device)
        started_s = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return 2 * num_bytes / best_s


def product_flop_per_s(device: torch.device) -> float:
    """Best of six large products in bfloat16, on a CPU smaller in float32; random numbers, as zeros are faster."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    found = []
    for _ in range(6):
        synchronize(device)
        started_s = time.perf_counter()
        a @ b
        synchronize(device)
        found.append(time.perf_counter() - started_s)
    return 2 * size**3 / min(found)


def requests(batch: int, context: int, new_tokens: int, vocab_size: int, first: int) -> list[Request]:
    """`batch` greedy requests, ordinals and prompts from `first` on."""
    prompts = np.random.default_rng(first).integers(0, vocab_size, (batch, context)).astype(np.int32)
    return [
        Request(ordinal=first + i, sample=0, prompt_tokens=prompt, max_new_tokens=new_tokens, temperature=0.0)
        for i, prompt in enumerate(prompts)
    ]


def full_steps(engine: GenerationEngine, batch: int, device: torch.device) -> list[float]:
    """Run dry; seconds of each step that began with the full batch, but for the first, which waits for prompts."""
    taken = []
    while not engine.is_idle:
        is_full = engine.num_live == batch and engine.num_waiting == 0
        started_s = time.perf_counter()
        engine.step()
        if is_full:
            taken.append(time.perf_counter() - started_s)
    synchronize(device)
    return taken[1:]


def profile(engine: GenerationEngine, batch: int, device: torch.device) -> tuple[float, Counter[str], Counter[str]]:
    """Seconds of `PROFILED_STEPS` full steps, and of their kernels by kind and by name."""
    while engine.num_live < batch or engine.num_waiting:
        engine.step()
    engine.step()
    activities = [
        torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    ]
    with torch.profiler.profile(activities=activities) as recorded:
        synchronize(device)
        started_s = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            engine.step()
        synchronize(device)
        wall_s = time.perf_counter() - started_s
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in recorded.key_averages():
        total_us = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        kinds[kind_of(event.key)] += total_us / 1e6
        kernels[event.key] += total_us / 1e6
    while not engine.is_idle:
        engine.step()
    return wall_s, kinds, kernels


def measure(
    name: str, config: TransformerConfig, arguments: argparse.Namespace, device: torch.device
) -> list[dict[str, Any]]:
    """Every batch of one model, printed and returned."""
    bandwidth, rate = copy_bytes_per_s(device), product_flop_per_s(device)
    nominal = nominal_bytes_per_s(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    weight_bytes, kv_bytes = BYTES_READ[arguments.precision]
    measured = []
    for batch in arguments.batch or [BATCH]:
        new_tokens = max(arguments.new_tokens, PROFILED_STEPS + 8)
        engine, weights = new_engine(
            random_model(config, device),
            precision=arguments.precision,
            num_slots=batch,
            max_len=arguments.context + new_tokens,
            prefill_tokens=PREFILL_TOKENS,
        )
        steps: list[float] = []
        prefill_s: list[float] = []
        for turn in range(arguments.repeats + 1):
            wanted = requests(batch, arguments.context, new_tokens, config.vocab_size, (turn + 1) * batch)
            started_s = time.perf_counter()
            engine.submit(wanted)
            taken = full_steps(engine, batch, device)
            if turn > 0:  # the first warms up
                steps += taken
                prefill_s.append(time.perf_counter() - started_s - sum(taken))
        engine.submit(requests(batch, arguments.context, new_tokens, config.vocab_size, 0))
        profiled_s, kinds, kernels = profile(engine, batch, device)
        if not steps:
            raise SystemExit(f"{name}, batch {batch}: rows ended before the batch was full; raise --new-tokens")
        step_s = statistics.median(steps)
        context = arguments.context + new_tokens / 2
        of_weights = weight_bytes * matmul_params(config)
        of_keys = batch * context * kv_bytes_per_token(config, kv_bytes)
        moved = of_weights + of_keys
        floor_s = max(of_weights / bandwidth, 2 * batch * matmul_params(config) / rate) + of_keys / bandwidth
        print(f"\n## {name}, random weights, {arguments.precision}, batch {batch}, context {context:.0f}\n")
        print(
            "| tokens/s | ms a step, median | p95 | roofline, ms | GB a step | of copy's | of nominal | rest of a run |"
        )
        print("|---|---|---|---|---|---|---|---|")
        print(
            f"| {batch / step_s:,.0f} | {1e3 * step_s:.2f} | {1e3 * float(np.quantile(steps, 0.95)):.2f} "
            f"| {1e3 * floor_s:.2f}: {floor_s / step_s:.0%} of it at {rate / 1e12:.0f} TFLOP/s "
            f"| {moved / 1e9:.2f} | {moved / bandwidth / step_s:.0%} of {bandwidth / 1e12:.2f} TB/s "
            f"| {f'{moved / nominal / step_s:.0%} of {nominal / 1e12:.2f} TB/s' if nominal else 'unknown'} "
            f"| {statistics.median(prefill_s):.2f} s |"
        )
        busy_s = sum(kinds.values())
        print(
            f"\nOf {1e3 * profiled_s / PROFILED_STEPS:.2f} ms a step under the profiler, kernels run "
            f"{1e3 * busy_s / PROFILED_STEPS:.2f}: "
            + ", ".join(f"{kind} {1e3 * seconds / PROFILED_STEPS:.2f}" for kind, seconds in kinds.most_common())
        )
        for kernel, seconds in kernels.most_common(8):
            print(f"  {1e3 * seconds / PROFILED_STEPS:8.3f} ms  {kernel[:90]}")
        measured.append(
            {
                "model": name,
                "batch": batch,
                "context": context,
                "tokens_per_s": batch / step_s,
                "steps_s": steps,
                "bytes_per_step": moved,
                "roofline_s": floor_s,
                "product_flop_per_s": rate,
                "copy_bytes_per_s": bandwidth,
                "nominal_bytes_per_s": nominal,
                "kernel_s_per_step": {kind: seconds / PROFILED_STEPS for kind, seconds in kinds.items()},
            }
        )
        del engine, weights
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return measured


def measure_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All models that were asked for and that the GPU has memory for; ends the program with 2 where there is no GPU."""
    if not torch.cuda.is_available():
        print(
            f"--device cuda: torch {torch.__version__} sees no CUDA device here; nothing was measured", file=sys.stderr
        )
        raise SystemExit(2)
    measured = []
    for name in arguments.models:
        try:
            measured += measure(name, SHAPES[name], arguments, torch.device("cuda"))
        except torch.cuda.OutOfMemoryError:
            print(f"\n## {name}: not measured, this GPU has too little memory")
        torch.cuda.empty_cache()
    return measured
