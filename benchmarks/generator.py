"""Decode speed of the engine on a small random Llama: tokens/s, ms per step and the share of the GEMM floor reached.

    python benchmarks/generator.py [--threads N] [--repeats R] [--models small tiny]

`small` is the model of the comparison with TRL (3.4 M parameters), `tiny` the quickstart's (0.65 M). Workload:
`--groups` prompts x 8 completions; random weights, so lengths are geometric, stopping with probability near 1 / V per
token and `--new-tokens` at most. The floor is the matmul work of all decoded and prefilled tokens at the GEMM rate
measured on this machine in the same run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from slipstream.generator.engine import Engine
from slipstream.generator.requests import Finished, Request
from slipstream.models.config import TransformerConfig
from slipstream.models.linear import linear
from slipstream.models.transformer import Transformer

PROMPT_TOKENS = 16
GROUP_SIZE = 8
VOCAB = 72
MODELS = {"small": (256, 768, 4, 4), "tiny": (128, 384, 3, 4)}  # hidden, inner, layers, heads


class Stopwatch:
    """Collects seconds per state."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def span(self, state: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(state, []).append(time.perf_counter() - start)


def random_llama(hidden: int, inner: int, layers: int, heads: int) -> Transformer:
    model = Transformer(
        TransformerConfig(
            family="llama",
            vocab_size=VOCAB,
            hidden_size=hidden,
            intermediate_size=inner,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=hidden // heads,
            max_positions=256,
            tie_embeddings=False,
        )
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02, generator=generator)
    return model


@torch.inference_mode()
def gemm_rate(repeats: int = 20) -> float:
    """Best FLOP/s of a 1024 x 1024 x 1024 fp32 matmul."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        linear(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * 1024**3 / best


def generate(model: Transformer, requests: list[Request], max_len: int) -> tuple[float, Stopwatch, list[Finished]]:
    watch = Stopwatch()
    engine = Engine(model, num_slots=len(requests), max_len=max_len, seed=0, stop_token_ids=[1], spans=watch)
    finished: list[Finished] = []
    start = time.perf_counter()
    engine.submit(requests)
    while not engine.is_idle:
        finished.extend(engine.step())
    return time.perf_counter() - start, watch, finished


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"hardware       {platform.machine()}, {args.threads} threads, torch {torch.__version__}")
    print(f"commit         {commit.stdout.strip() or 'unknown'}")
    for name in args.models:
        measure(name, args)


def measure(name: str, args: argparse.Namespace) -> None:
    """Print what `name` reaches."""
    model = random_llama(*MODELS[name])
    num_params = sum(p.numel() for p in model.parameters())
    matmul_params = num_params - model.embedding.weight.numel()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB, PROMPT_TOKENS).astype(np.int32) for _ in range(args.groups)]
    requests = [
        Request(ordinal=ordinal, sample=sample, prompt_tokens=prompt, max_new_tokens=args.new_tokens)
        for ordinal, prompt in enumerate(prompts)
        for sample in range(GROUP_SIZE)
    ]
    generate(model, requests, PROMPT_TOKENS + args.new_tokens)  # warm-up
    runs = [generate(model, requests, PROMPT_TOKENS + args.new_tokens) for _ in range(args.repeats)]
    flops_per_s = gemm_rate()
    walls = sorted(wall for wall, _, _ in runs)
    lengths = [len(completion.tokens) for completion in runs[0][2]]
    num_tokens = sum(lengths)
    decode_s = statistics.median(sum(watch.seconds["decode"]) for _, watch, _ in runs)
    prefill_s = statistics.median(sum(watch.seconds["prefill"]) for _, watch, _ in runs)
    num_steps = len(runs[0][1].seconds["decode"])
    wall_s = statistics.median(walls)
    floor_s = 2 * matmul_params * (num_tokens + args.groups * (PROMPT_TOKENS - 1)) / flops_per_s
    print(f"\nmodel          {name}: {num_params / 1e6:.2f} M parameters, vocabulary {VOCAB}")
    print(f"workload       {len(requests)} completions, {num_tokens} tokens, {num_steps} steps")
    print(f"wall           {wall_s:.3f} s median of {args.repeats} (min {walls[0]:.3f}, max {walls[-1]:.3f})")
    print(f"tokens/s       {num_tokens / wall_s:,.0f}")
    print(f"ms/step        {1e3 * decode_s / num_steps:.2f} decode; prefill {1e3 * prefill_s:.2f} ms in all")
    print(f"floor          {floor_s:.3f} s at {flops_per_s / 1e9:.0f} GFLOP/s; reached {floor_s / wall_s:.0%} of it")


if __name__ == "__main__":
    main()
