"""Tokens per second and model FLOP utilisation of the trainer's step, with random weights.

    python benchmarks/train_step.py [--device cuda] [--model qwen2.5-1.5b] [--groups 4] [--samples 8] [--prompt 512]
                                    [--completion 1024] [--microbatch-tokens 32768] [--steps 3] [--json FILE]
                                    [--only run recompute ...] [--profile]

A step is `trainer.step.train_on_batch`: prompts shared by their group, loss AIPO, clipping, AdamW. As a run trains (on
CUDA in bfloat16 with a copy of the weights and attention in one call), then each with one switch changed: FSDP2 instead
of the copy, padded attention, recomputation of all or of all but products, no kernels of ours, torch.compile. MFU
counts what the model needs: three times two FLOP for every weight and token (the head: for every target), and causal
attention, forward and twice backward; recomputed layers and logits do not count. Its denominators: the rate of a large
product measured here, and the maker's. The part of the head and of attention is told by FLOP, not by time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from contenders.gpu import product_flop_per_s, synchronize
from contenders.models import SHAPES, matmul_params

from slipstream.batching import collate
from slipstream.core.config import RunConfig
from slipstream.core.recipes import resolve
from slipstream.core.training_sections import OptimizerConfig
from slipstream.core.types import Completion, Group, Prompt, Rollout, Segment, VersionSpan
from slipstream.models import device as devices
from slipstream.models.config import TransformerConfig
from slipstream.models.sharded import Division, divide, stored_parameters
from slipstream.models.transformer import Transformer, rope_tables
from slipstream.observe.hardware import describe
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

MOST_KERNELS = 45
NOMINAL_FLOP_PER_S = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12}


def groups_of(given: argparse.Namespace, vocab_size: int) -> list[Group]:
    """Random rollouts, the completions of a group behind one prompt."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, vocab_size, count).astype(np.int32)

    groups = []
    for ordinal in range(given.groups):
        prompt = Prompt(prompt_id=str(ordinal), text="", tokens=tokens(given.prompt), task="")
        rollouts = []
        for sample in range(given.samples):
            segment = Segment(
                tokens=tokens(given.completion),
                behaviour_logprobs=np.full(given.completion, -np.log(vocab_size), np.float32),
                version_spans=(VersionSpan(start=0, version=0),),
            )
            completion = Completion(
                ordinal=ordinal, sample=sample, prompt=prompt, segments=(segment,), text="", finish_reason="stop"
            )
            rollouts.append(Rollout(completion=completion, reward=float(sample % 2)))
        groups.append(Group(ordinal=ordinal, rollouts=tuple(rollouts)))
    return groups


def step_flop(config: TransformerConfig, given: argparse.Namespace) -> dict[str, float]:
    """FLOP of one step by part: forward, and twice as many backward."""
    head = config.vocab_size * config.hidden_size
    targets = given.groups * given.samples * given.completion
    tokens = given.groups * given.prompt + targets
    # Rows of a prompt see half of it, rows of a completion all of the prompt and half of the completion.
    seen = given.groups * given.prompt**2 / 2 + targets * (given.prompt + given.completion / 2)
    inner = config.num_layers * config.num_heads * config.head_dim
    return {
        "layers": 6 * (matmul_params(config) - head) * tokens,
        "head": 6 * head * targets,
        "attention": 3 * 4 * inner * seen,
    }


CASES: dict[str, dict[str, Any]] = {
    "run": {},
    "fsdp": {"copies": False},
    "padded": {"varlen": False},
    "recompute": {"recomputes": True},
    "keep-products": {"recomputes": True, "keeps_products": True},
    "no-kernels": {},
    "compile": {"compiles": "inductor"},
}
CUDA_ONLY = ("fsdp", "padded", "no-kernels")
"""Those that a CPU, in float32, does not have."""


def trainer_of(config: TransformerConfig, device: torch.device, case: str) -> tuple[Transformer, AdamW]:
    """A model of random weights made where it is trained, and its optimizer."""
    precision = "bfloat16" if device.type == "cuda" else "float32"
    division = replace(Division(device=device, precision=precision, copies=True), **CASES[case])
    with torch.device(device):
        model = Transformer(config)
    model.cos, model.signed_sin = (table.to(device) for table in rope_tables(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    divide(model, division)
    return model, AdamW(stored_parameters(model, division), OptimizerConfig(lr=1e-6), total_updates=100)


def run_config(given: argparse.Namespace) -> RunConfig:
    return resolve(
        {
            "model": {"max_positions": SHAPES[given.model].max_positions},
            "groups_per_step": given.groups,
            "completions_per_group": given.samples,
            "prompts": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": given.prompt},
            "generator": {"max_new_tokens": given.completion},
            "loss": {"name": "aipo"},
            "trainer": {"microbatch_tokens": given.microbatch_tokens},
        }
    )


def measure(given: argparse.Namespace, case: str) -> dict[str, Any]:
    device = torch.device(given.device, 0) if given.device == "cuda" else torch.device("cpu")
    shape, devices.KERNELS = SHAPES[given.model], case != "no-kernels"
    model, optimizer = trainer_of(shape, device, case)
    config, groups = run_config(given), groups_of(given, shape.vocab_size)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    found: list[float] = []
    for number in range(given.steps + 1):
        synchronize(device)
        started_s = time.perf_counter()
        metrics = train_on_batch(model, optimizer, groups, config=config, step=0, batching=collate)
        synchronize(device)
        if number:  # the first warms up
            found.append(time.perf_counter() - started_s)
    if given.profile:
        tell_kernels(lambda: train_on_batch(model, optimizer, groups, config=config, step=0, batching=collate), device)
    flop, step_s = step_flop(shape, given), statistics.median(found)
    tokens = given.groups * (given.prompt + given.samples * given.completion)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {
        "case": case,
        "steps_s": found,
        "tokens_per_s": tokens / step_s,
        "flop_per_s": sum(flop.values()) / step_s,
        "share_of_flop": {name: value / sum(flop.values()) for name, value in flop.items()},
        "microbatches": metrics["num_microbatches"],
        "peak_bytes": peak,
    }


def tell_kernels(work: Callable[[], object], device: torch.device) -> None:
    """Print how long which kernels run in one call."""
    activity = torch.profiler.ProfilerActivity.CUDA if device.type == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as recorded:
        work()
        synchronize(device)
    events = recorded.key_averages()
    seconds = {
        one.key: one.self_device_time_total / 1e6 if device.type == "cuda" else one.self_cpu_time_total / 1e6
        for one in events
    }
    calls = {one.key: one.count for one in events}
    print(f"  kernels run {sum(seconds.values()):.3f} s")
    for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:MOST_KERNELS]:
        print(f"  {1e3 * seconds[name]:9.2f} ms {calls[name]:6} x  {name[:150]}")


def nominal(device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((rate for known, rate in NOMINAL_FLOP_PER_S.items() if known in name), None)


def main(words: Sequence[str] | None = None) -> int:
    """The exit code is 1 where a case had too little memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-0.5b")
    for name, default in {"groups": 4, "samples": 8, "prompt": 512, "completion": 1024, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--microbatch-tokens", type=int, default=32768)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes, by kernel")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    print(describe())
    if given.device == "cuda":
        store = dist.HashStore()
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    rate, makers = product_flop_per_s(torch.device(given.device)), nominal(given.device)
    results, missing = [], 0
    for case in (one for one in given.only if given.device == "cuda" or one not in CUDA_ONLY):
        gc.collect()  # the model before, whose hooks refer to it
        try:
            results.append(measure(given, case))
        except torch.cuda.OutOfMemoryError:
            print(f"{case}: this GPU has too little memory")
            missing = 1
            continue
        one = results[-1]
        told = f"{one['flop_per_s'] / rate:.1%} of a product's {rate / 1e12:.4g} TFLOP/s"
        told += f", {one['flop_per_s'] / makers:.1%} of the maker's {makers / 1e12:.4g}" if makers else ""
        told += f", {one['peak_bytes'] / 2**30:.1f} GiB at its peak" if one["peak_bytes"] else ""
        step_s = statistics.median(one["steps_s"])
        print(f"{case}: {step_s:.3f} s, {one['tokens_per_s']:,.0f} tokens/s, {told}")
    if given.json is not None:
        given.json.write_text(json.dumps({"product_flop_per_s": rate, "nominal_flop_per_s": makers, "steps": results}))
    if given.device == "cuda":
        dist.destroy_process_group()
    return missing


if __name__ == "__main__":
    sys.exit(main())
