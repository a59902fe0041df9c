"""Time of drawing one token per row, beside a plain inverse CDF over the whole vocabulary, and with cuts.

    python benchmarks/sampler.py [--threads N] [--device cuda]

Milliseconds per step, the best of many; the contenders take turns. "plain" is log_softmax, exp, a float64 running
sum and a binary search: what a small vocabulary still gets.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipstream.generator.sampler import SamplingPlan, SamplingRows, sample_tokens
from slipstream.observe.hardware import describe

SHAPES = [(64, 49_152), (8, 49_152), (64, 72), (8, 72)]  # [rows, vocabulary]
TEMPERATURES = [1.0, 0.7]
CUTS: dict[str, tuple[int, float, float]] = {  # top_k, top_p, min_p
    "whole": (0, 1.0, 0.0),
    "top_k 8": (8, 1.0, 0.0),
    "top_k 64, top_p 0.95": (64, 0.95, 0.0),
    "top_k 512, top_p 0.95": (512, 0.95, 0.0),
    "top_p 0.95": (0, 0.95, 0.0),
}


def plain(logits: Tensor, temperatures: Tensor | None, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    scaled = logits if temperatures is None else logits / temperatures.unsqueeze(1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, cumulative[:, -1:] * uniforms.unsqueeze(1))
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


def planned(
    rows: int, temperature: float, cut: tuple[int, float, float], device: str
) -> tuple[SamplingRows, SamplingPlan]:
    top_k, top_p, min_p = cut
    temperatures, k = np.full(rows, temperature, dtype=np.float32), np.full(rows, top_k)
    p, least = np.full(rows, top_p, dtype=np.float32), np.full(rows, min_p, dtype=np.float32)
    plan = SamplingPlan.of(temperatures, k, p, least, np.full(rows, top_k > 0))
    return SamplingRows(*(torch.from_numpy(values).to(device) for values in (temperatures, k, p, least))), plan


def best_ms(contenders: Sequence[Callable[[], object]], device: str, seconds: float) -> list[float]:
    """Each contender's least time, all of them in turn until the time is over."""
    best = [float("inf")] * len(contenders)
    until = time.perf_counter() + seconds
    for turn in itertools.count():
        if turn > 3 and time.perf_counter() > until:
            return best
        for i, work in enumerate(contenders):
            started = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            best[i] = min(best[i], 1e3 * (time.perf_counter() - started))
    return best


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0, help="per line of the table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print("commit:", commit.strip() or "unknown")
    print(f"{platform.machine()}, {args.device}, {args.threads} threads, torch {torch.__version__}, seed 0\n")
    print("| rows x vocabulary | temperature | plain, ms | " + " | ".join(f"{name}, ms" for name in CUTS) + " |")
    print("|---" * (3 + len(CUTS)) + "|")
    generator = torch.Generator().manual_seed(0)
    for rows, vocab_size in SHAPES:
        logits = (torch.randn(rows, vocab_size, generator=generator) * 3.0).to(args.device)
        uniforms = torch.rand(rows, generator=generator, dtype=torch.float64).to(args.device)
        for temperature in TEMPERATURES:
            divisors = None if temperature == 1.0 else torch.full((rows,), temperature, device=args.device)
            contenders: list[Callable[[], object]] = [partial(plain, logits, divisors, uniforms)]
            for cut in CUTS.values():
                settings, plan = planned(rows, temperature, cut, args.device)
                contenders.append(partial(sample_tokens, logits, settings, uniforms, plan))
            times = best_ms(contenders, args.device, args.seconds)
            print(f"| {rows} x {vocab_size} | {temperature} | " + " | ".join(f"{one:.3f}" for one in times) + " |")


if __name__ == "__main__":
    main()
